"""The configurations for which the persistent kernel is compiled, and the function that chooses one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, PANEL_HEAD_BYTES, PANEL_STRIPS
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import BUFFERS, COUNTERS, GROUPS, MMA_WARPS, SHARED_BYTES, STAGES
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import Config as StreamConfig

BLOCKS = 45  # k blocks of both expert GEMMs: at most 2880 features
HIDDEN = BLOCKS * BLOCK
WIDTH = 4096  # maximum number of features of the attention's output
HEAD_DIM = 64
GROUP_HEADS = 8  # maximum number of query heads of a key head: half of the MMA's m
KV_HEADS = 8  # maximum number of key heads
LEAST_CTAS = 128  # least number of CTAs: each CTA then has at most 40 rows of qkv (`TILES` tiles), and one row of the router
SPLITS = 16  # maximum number of CTAs that share the keys of a token and a key head
KEYS = 16  # keys of an attention tile, which one warp computes: the MMA's k. Pages hold a multiple of this number.
PREFERRED = 4  # largest number of tokens for which the kernel is faster than separate kernels
TOKENS = (1, 2, 4, 8)  # numbers of tokens for which kernels are compiled
RANKS = (1, 2)  # numbers of ranks, likewise
EXPERTS = 128  # maximum number of experts: one warp selects a token's experts, with four logits in each lane
PAIRS = 32  # maximum number of (token, slot) pairs: one warp lists them, with one pair in each lane
TILE = 8  # rows of dense weights in a ring stage: the MMA's n
TILES = 5  # maximum number of tiles per CTA: 5120 rows of qkv on 132 SMs are 39 rows per CTA, five tiles of 8
PART_BYTES = 1152  # maximum bytes of a row of dense weights in a ring stage, see `layout`: eight rows fill a stage
CHUNK_BYTES = 64  # bytes of a row of dense weights that a quad of lanes loads at once: a chunk
Dense = Literal["bfloat16", "float8_e4m3fn"]
DENSE: tuple[Dense, ...] = ("bfloat16", "float8_e4m3fn")  # formats of dense weights; float8_e4m3fn has a float32 scale for each row
# The row pitch of activations is an odd multiple of 64 bytes. So two rows that a warp reads at once hit different banks. With fp8
# weights, the last 64 bytes hold the exponents of the row's chunks, see `gemm_device`.
WIDTH_PITCH = 2 * WIDTH + 64
ROUTER_BYTES = 6144  # bytes of a CTA's rows of the router; one row of 2880 features takes 5760
MOST_LAYERS = 48  # maximum number of layers of a launch: a copy of the table of layers is in shared memory
OTHER_BYTES = 10 * 1024  # the table of layers, barriers, lists and other small arrays
# Indices of a layer's counters.
OUT, LOGITS, TOTALS = 0, 2, 3
QKV, PARTIALS, ATTENDED = range(COUNTERS + PAIRS, COUNTERS + PAIRS + 3)
ACTIVATED = COUNTERS  # the counter of the first entry, one for each entry
LAYER_COUNTERS = COUNTERS + PAIRS + 4  # even, because the 64-bit words of a trace follow
# Indices of the 32-bit words at the head of the scratch memory, before the layers' counters: the number of CTAs that have finished,
# the tag of the last launch's last layer, and the error flag.
LEFT, TAG, FAILED = 0, 1, 2
HEAD_WORDS = 32
# The exchanges of activations between CTAs, named by their counters; `exchange_device` has the protocol. Readers always check the
# tags of the words. An exchange in `Config.counted` also has a counter in global memory: readers begin to poll the words only when
# all CTAs have increased the counter. Without a counter, an exchange saves an atomic and a load, but more polls delay the writers.
EXCHANGES = (OUT, QKV, PARTIALS, ATTENDED, TOTALS, LOGITS, ACTIVATED)
# The shared memory of attention: the query heads of a token, the new key and value, and the warps' results. Q_PITCH has 16 bytes of
# padding, so that lanes that read different heads hit different banks.
Q_PITCH = 2 * HEAD_DIM + 16
WARP_BYTES = 4 * GROUP_HEADS * (HEAD_DIM + 2)  # a warp's results: the unnormalised output, then each head's row max and row sum
ATTEND_BYTES = GROUP_HEADS * Q_PITCH + 4 * HEAD_DIM + MMA_WARPS * WARP_BYTES
# The number of 64-bit words of a partial result of a query head and a split: the unnormalised output, the row max, and the row sum.
# Each word has a float32 and the layer's tag.
PARTIAL_WORDS = HEAD_DIM + 2
# Events of a trace, in the order in which a layer has them: 30 of an MMA thread, six of the producer, two of an epilogue thread.
# Events with "first" belong to the CTA's first entry, the others to the CTA's last entry. Events that a CTA does not have are 0.
EVENTS = (
    "outputs of all CTAs seen", "input normalised", "qkv: first stage full", "qkv: MMAs done", "qkv: own words stored",
    "attention: queries seen", "attention: values multiplied", "attention: partial results stored",
    "attention: own words stored", "attention's output seen", "projection: first stage full", "projection: MMAs done",
    "totals: own words stored", "totals: words seen by a thread", "totals: words seen by all warps", "norm and router done",
    "logits: own words stored", "logits: all words seen", "top-k done", "lists of pairs made",
    "w13: message read (first)", "w13: rows split (first)", "w13: slab full (first)", "w13: MMAs done",
    "w2: activations seen (first)", "w2: rows split (first)", "w2: slab full (first)", "w2: MMAs done",
    "w2 of all CTAs seen", "output written",
    "producer: begins qkv", "producer: qkv issued", "producer: projection issued", "producer: knows the pairs",
    "producer: w13 issued", "producer: w2 issued", "epilogue: w13 stored", "epilogue: w2 stored",
)  # fmt: skip
CHAIN, PRODUCED = 30, 6


def part_bytes(row_bytes: int) -> int:
    """Returns the bytes of a part of a row of dense weights: parts are as equal as multiples of `CHUNK_BYTES` can be."""
    parts = -(-row_bytes // PART_BYTES)
    return -(-row_bytes // (parts * CHUNK_BYTES)) * CHUNK_BYTES


@dataclass(frozen=True)
class Config(StreamConfig):
    """Configuration of one kernel variant. ``slab`` also determines the number of stages.

    Attributes:
        tokens: the maximum number of tokens.
        counted: the exchanges that use counters, see `EXCHANGES`.
        most_stages: the maximum number of stages of the ring buffer.
        cooperative: whether the launch is cooperative, so that the driver starts all CTAs or none. Then the launch does not use
            PDL.
        in_flight: the maximum number of stages whose copies are in flight, for the weights of qkv, of the projection, of w13 and of
            w2. With more, the loads of activations that other warps wait for would take longer.
        begun_in_flight: the same for dense weights beyond the capacity of the ring buffer, which are loaded while the MMA warps
            compute the same GEMM.
        trace: whether the kernel stores the times of `EVENTS`.
        tiles_of_cta: the maximum number of tiles of dense weights per CTA.
        dense: the format of the weights of qkv and of the projection, one of `DENSE`.
        ranks: the number of GPUs that share each layer. Each has some of the heads, and a slice of every expert.
    """

    tokens: int = 1
    counted: tuple[int, ...] = ()
    most_stages: int = STAGES
    cooperative: bool = False
    in_flight: tuple[int, int, int, int] = (STAGES,) * 4
    begun_in_flight: int = STAGES
    trace: bool = False
    tiles_of_cta: int = TILES
    dense: Dense = "bfloat16"
    ranks: int = 1

    @property
    def dense_bytes(self) -> int:
        """The bytes of an element of dense weights."""
        return 2 if self.dense == "bfloat16" else 1

    @property
    def normed_pitch(self) -> int:
        """Row pitch in bytes of the normalised tokens."""
        return 2 * HIDDEN

    @property
    def rows_room(self) -> int:
        """Bytes of the memory that the steps of a layer reuse. In order, it holds: the normalised input; the queries and results of
        attention (`ATTEND_BYTES`); the attention's output; and the normalised tokens with the rows of an entry (pairs of one expert
        that are computed together)."""
        return max(self.tokens * WIDTH_PITCH, ATTEND_BYTES, self.rows_bytes + self.tokens * self.normed_pitch)

    @property
    def partials_bytes(self) -> int:
        """Bytes of the warps' partial sums of a GEMM with dense weights."""
        return 4 * MMA_WARPS * self.tokens * self.rows_of_cta

    @property
    def sent_bytes(self) -> int:
        """Bytes of the tagged numbers that a CTA sends for a GEMM of the experts: two numbers for each lane, strip and tile."""
        return PANEL_STRIPS * self.tiles * 32 * 2 * 8

    @property
    def rows_of_cta(self) -> int:
        """The maximum number of rows of dense weights per CTA."""
        return self.tiles_of_cta * TILE

    @property
    def group(self) -> int:
        """The number of k blocks whose MMAs are issued together. With 5, registers spill."""
        return min(super().group, 4)

    @property
    def at_once(self) -> int:
        """The number of tokens whose exchanged rows a thread loads at once. With 4 rows, registers spill."""
        return min(self.tokens, max(2 // self.ranks, 1))

    @property
    def stages(self) -> int:
        """The number of stages of the ring buffer. It is a multiple of `GROUPS`, so that a warpgroup always uses the same stages.

        Otherwise a stage would hold data for one warpgroup in one round and for another in the next. A warpgroup that is ahead
        could wait for its round of the stage while the copy of the preceding round, for the other warpgroup, is still in flight. An
        mbarrier knows only the parity of a phase. The round before that copy has the same parity as the round that is waited for.
        So the wait would return at once.
        """
        used = OTHER_BYTES + self.rows_room + self.partials_bytes + ROUTER_BYTES + BUFFERS * (self.sums_bytes + PANEL_HEAD_BYTES)
        return min(STAGES, self.most_stages, (SHARED_BYTES - used) // self.stage_bytes) // GROUPS * GROUPS


def config_of(
    tokens: int,
    *,
    slab: int = 4,
    counted: tuple[int, ...] | None = None,
    cooperative: bool = False,
    most: int = STAGES,
    in_flight: tuple[int, int, int, int] | None = None,
    begun_in_flight: int = 9,
    trace: bool = False,
    tiles: int = TILES,
    dense: Dense = "bfloat16",
    ranks: int = 1,
) -> Config:
    """Returns the configuration for a number of tokens. The other arguments are options of `Config`, to measure variants."""
    room = next(room for room in TOKENS if room >= tokens)
    if counted is None:
        # Microseconds of a layer with one, two and four tokens on an H200: 38.9, 52.1 and 79.8. With a counter for ACTIVATED too:
        # 38.8, 52.8 and 80.6. Without a counter for ATTENDED: 39.1, 52.7 and 79.9.
        counted = tuple(each for each in EXCHANGES if each not in (QKV, ACTIVATED))
    if in_flight is None:
        # Measured on an H200: without these limits, a layer takes 5 us longer.
        in_flight = (4, 4, 7, 2) if room == 1 else (4, 3, 9, 4)
    return Config(
        "bfloat16", BLOCKS, 8, slab, tokens=room, counted=counted, most_stages=most, cooperative=cooperative,
        in_flight=in_flight, begun_in_flight=begun_in_flight, trace=trace, tiles_of_cta=tiles, dense=dense,
        ranks=ranks,
    )  # fmt: skip


def served_config(tokens: int, dense: Dense = "bfloat16", ranks: int = 1) -> Config:
    """Returns the configuration that the operator `decoder_layers` uses for numbers of tokens and ranks and a format of dense
    weights.

    The launch is cooperative, so that it cannot deadlock with another launch of this kernel on another stream.
    """
    return config_of(tokens, cooperative=True, dense=dense, ranks=ranks)


def every_config() -> list[Config]:
    """Returns the configurations that the operator `decoder_layers` uses."""
    return [served_config(tokens, dense, ranks) for ranks in RANKS for dense in DENSE for tokens in TOKENS]


def usual_configs() -> list[Config]:
    """Returns the configurations that calls use without naming a kernel."""
    return [config for config in every_config() if config.tokens <= PREFERRED]

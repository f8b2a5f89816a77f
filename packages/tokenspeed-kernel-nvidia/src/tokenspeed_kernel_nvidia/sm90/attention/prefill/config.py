"""The configurations of the prefill kernel: tiles, stages and registers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.attention.supported import GQA_RATIOS, HEAD_DIMS, OTHER_WIDTHS, PAGE_SIZES
from tokenspeed_kernel_nvidia.sm90.common.registers import left_by


class Tile(NamedTuple):
    """The sizes of a CTA's tile and rings.

    Attributes:
        rows: query rows of a tile, 64 per consumer warpgroup.
        keys: keys of a block of K and V.
        q_stages: Q tiles in shared memory. With one Q tile, each warpgroup releases its queries after its last q @ k of a tile.
            The queries of the next tile are then loaded during the softmax of that last block.
        kv_stages: stages, of one block each, of the K ring and of the V ring.
    """

    rows: int
    keys: int
    q_stages: int
    kv_stages: int


# Tiles by (head_dim, v_head_dim): for ragged K/V, and for paged caches. These tiles fill an SM's shared memory, and their
# accumulators of output and scores fit a thread's registers. Outputs are stored from registers. TFLOP/s on an H200, first with the
# tile below, then with other tiles (rows, keys, Q stages, K/V stages). Figures without tiles are for the tiles of the preceding
# call, in the same order:
# * DeepSeek-V3, 4 x 4096 tokens of 128 heads: 647; (128, 128, 1, 2) 633, (192, 80, 1, 3) 643, (128, 96, 2, 2) 579. 2 x 8192 tokens
#   of 16 heads: 725; 721, 721, 674.
# * Gemma 3 (12B), 4 x 4096: 716; (128, 80, 1, 2) 704. Gemma 2 (9B) from pages of 64, 8 x 1024 new tokens of 8192: 632; 594.
# * Phi-3-mini (96 columns), 4 x 4096: 595; (192, 96, 2, 3) 568, (128, 160, 2, 2) 528, (128, 192, 1, 2) 531.
# * Phi-2 (80 columns), 8 x 2048: 463; 436, 390, 391.
TILES = {
    (192, 128): (Tile(192, 64, 1, 3), Tile(128, 128, 1, 2)),
    (256, 256): (Tile(128, 64, 1, 2), Tile(128, 64, 1, 2)),
    (96, 96): (Tile(128, 128, 2, 3), Tile(128, 128, 2, 3)),
    (80, 80): (Tile(128, 128, 2, 3), Tile(128, 128, 2, 3)),
}
# The pairs (head_dim, v_head_dim), besides 64 and 128, that also support an fp8 cache with 16-bit queries. Other head dims do not
# fill whole panels of shared memory.
FP8_CACHE_WIDTHS = ((256, 256),)

# Tiles for fp8 operands, by (head_dim, v_head_dim), for ragged and paged K/V. A block has 128 or 64 keys, so that a row of
# transposed V has 128 or 64 bytes. TFLOP/s on an H100, first with the tile below, then with other tiles:
# * DeepSeek-V3, 2 x 8192 tokens of 16 heads: 872; (192, 64, 2, 4) 865, (128, 128, 2, 2) 863, (128, 64, 2, 5) 719. 8 x 1024: 563;
#   (192, 64, 2, 4) 504.
# * Gemma 3 (12B), 4 x 4096: 771.
# * Phi-3-mini (96 columns), 4 x 4096: 638; (192, 64, 2, 4) 600.
FP8_TILES = {
    (192, 128): Tile(128, 128, 2, 3),
    (256, 256): Tile(128, 64, 2, 3),
    (96, 96): Tile(128, 128, 2, 3),
}


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant.

    Figures are TFLOP/s on an H200 with 64 query heads and 8 KV heads (32 and 8 at head_dim 128), for sequence length x number of
    sequences. Except for short sequences, all runs are at the power limit of 700 W, with the clock at 1.6 to 1.8 GHz instead of
    1.98 GHz. So extra energy lowers the clock rate, and costs time.

    Three alternatives were slower. Computing one exponential in eight by a polynomial, to relieve the exponential unit, gave 523
    instead of 544 TFLOP/s at 8192 x 4. Without ping-pong scheduling of the warpgroups, 8192 x 4 gave the same TFLOP/s at head_dim
    64, and 606 instead of 625 TFLOP/s at head_dim 128. A static serpentine tile schedule instead of an atomic counter gave 529
    instead of 537 TFLOP/s at 8192 x 4, and 572 instead of 618 TFLOP/s at 8192 x 1 with head_dim 128.

    Attributes:
        dtype: the dtype of q, k, v and the output; of the output alone if q, k and v are fp8.
        head_dim: elements per head of q and k: 64, 128, or a head_dim of TILES.
        gqa_ratio: GQA group size: query heads per KV head. All query heads of a KV head are rows of the same tile.
        page_size: tokens per page; 0 for ragged K/V. ``block_n`` stands for all its multiples, see `with_page_size`.
        section_mib: how many MiB of K/V concurrently running tiles may read, so that these reads hit in L2. With 8 MiB, fewer heads
            run at once: 524 instead of 537 TFLOP/s at 8192 x 4.
        lazy: log2 by which exponentials may exceed 1 before accumulators are rescaled. The shift of the exponents need not be the
            exact row max, so the shift seldom changes: 535 TFLOP/s at 8192 x 1, instead of 495 with ``lazy`` 0.
        fp8: whether q, keys and values are e4m3. Probabilities are rounded to e4m3 too, for P @ V. Two sequences of 8192 with 64
            query heads and 8 KV heads of dimension 128 took 2472 us, and 3117 us in bfloat16. Four such sequences with head_dim 64
            took 3308 us, and 3676 us in bfloat16. With ping-pong scheduling (see `pingpong`), these calls took 2509 and 3613 us.
            With ping-pong scheduling and polynomials of degree 2 for 4, 8 and 12 of 64 exponentials, they took 2452, 2530 and 2595
            us with head_dim 128, and 3523, 3482 and 3483 us with head_dim 64.
        fp8_cache: whether keys and values are e4m3, but not q. Keys and values are converted to float16 in shared memory. 8
            sequences of 1024 new and 7168 cached tokens with 64 query heads and 8 KV heads of dimension 128 took 5265 us, and 2999
            us with a bfloat16 cache. With head_dim 64 they took 2062 us, and 1836 us with a bfloat16 cache. These figures are of a
            version in which a converter warp waited for each of its loads; see `Converters.widen_block`.
        windowed: whether there is a sliding window. Attention is then causal.
        v_head_dim: elements per head of v and the output; 0 if equal to head_dim.
        capped: whether there is a logit cap, which only 16-bit operands support.
        own_kv: whether ragged K/V have other offsets than the queries.
    """

    dtype: str
    head_dim: int
    gqa_ratio: int
    page_size: int = 0
    section_mib: int = 24
    lazy: float = 8.0
    fp8: bool = False
    fp8_cache: bool = False
    windowed: bool = False
    v_head_dim: int = 0
    capped: bool = False
    own_kv: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """head_dim and v_head_dim."""
        return self.head_dim, self.v_head_dim or self.head_dim

    @property
    def tile(self) -> Tile | None:
        """The tile if head_dim is neither 64 nor 128; otherwise None."""
        if self.fp8:
            return FP8_TILES.get(self.widths)
        return TILES[self.widths][self.paged] if self.widths in TILES else None

    @property
    def splits_q(self) -> bool:
        """Whether each consumer warpgroup has its own Q barriers. A warpgroup then releases its queries without waiting for the
        other warpgroups. This hides the load of the next tile's queries if there is only one Q tile."""
        return self.q_stages == 1

    @property
    def stores_from_registers(self) -> bool:
        """Whether outputs are stored from registers, without staging in shared memory."""
        return self.tile is not None

    @property
    def pingpong(self) -> bool:
        """Whether consumer warpgroups issue their MMAs in turn (ping-pong scheduling).

        With fp8 operands and head_dim 128, a call took 2509 us with ping-pong scheduling, and 2472 us without. With head_dim 64 it
        took 3613 and 3308 us. On an H100, a call took 687 us with ping-pong scheduling, and 646 us without, at head_dim 96; at
        head_dim 256, 713 and 756 us.
        """
        return not self.fp8 or self.head_dim == 256

    @property
    def converts(self) -> bool:
        """Whether three warps of the producer warpgroup convert loaded K/V blocks: V is transposed (``fp8``), or K and V are
        converted to fp16 (``fp8_cache``)."""
        return self.fp8 or self.fp8_cache

    @property
    def lift(self) -> float:
        """log2 of the largest probability in a tile's first block. Probabilities are not normalised: the softmax subtracts the row
        max minus this number.

        With e4m3 probabilities, the result is 3. A thread holds 32 elements of a row. Even if all of them were 2^3, their sum of
        256 would be less than the largest e4m3 value, 448. See `fp8_softmax_device`.
        """
        return 3.0 if self.fp8 else 0.0

    @property
    def bytes(self) -> int:
        """Bytes per element of Q, K and V as MMA operands."""
        return 1 if self.fp8 else 2

    @property
    def panel(self) -> int:
        """Elements per row of a panel of Q, K or V in shared memory. Such a row has 128 or 64 bytes."""
        if self.fp8:
            return 64 if self.head_dim % 128 == 64 else 128
        return 32 if self.head_dim % 64 else 64

    @property
    def k_columns(self) -> int:
        """Columns of Q and K in shared memory: head_dim, padded to whole panels. TMA fills columns beyond head_dim with zeros."""
        return -(-self.head_dim // self.panel) * self.panel

    @property
    def v_columns(self) -> int:
        """Columns of V in shared memory as an MMA operand: v_head_dim, padded."""
        panel = 32 if self.fp8 else self.panel
        return -(-self.widths[1] // panel) * panel

    @property
    def block_m(self) -> int:
        """Query rows of a tile, 64 per consumer warpgroup. With head_dim 128 or a logit cap, registers suffice for two warpgroups
        only."""
        if self.tile:
            return self.tile.rows
        return 192 if self.head_dim == 64 and not self.capped else 128

    @property
    def block_n(self) -> int:
        """Keys of a block. The last block of a tile is halved if no row sees its second half, which gives 537 instead of 533
        TFLOP/s at 4096 x 4.

        With an fp8 cache of head_dim 128, shared memory limits blocks to 64 keys, because it holds blocks both before and after
        conversion. With an fp8 cache of head_dim 64 and a window, registers limit blocks to 64 keys.
        """
        if self.tile:
            return self.tile.keys
        return 64 if self.fp8_cache and (self.head_dim == 128 or self.windowed) else 128

    @property
    def warpgroups(self) -> int:
        """The number of consumer warpgroups. A CTA also has one producer warpgroup."""
        return self.block_m // 64

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def positions(self) -> int:
        """Query positions (tokens) of a tile. If gqa_ratio does not divide block_m, some of the tile's rows are unused."""
        return self.block_m // self.gqa_ratio

    @property
    def q_stages(self) -> int:
        """Stages of the Q ring."""
        return self.tile.q_stages if self.tile else 2

    @property
    def q_records(self) -> int:
        """The number of tile records in shared memory: one per Q stage, or two per warpgroup if `splits_q`."""
        return 2 * self.warpgroups if self.splits_q else self.q_stages

    @property
    def q_positions(self) -> int:
        """Query positions (tokens) of one TMA load of Q: a tile's, or a warpgroup's if `splits_q`."""
        return 64 // self.gqa_ratio if self.splits_q else self.positions

    @property
    def kv_stages(self) -> int:
        """Stages of the K ring, and of the V ring: as many as shared memory holds besides two Q tiles and an output tile."""
        if self.tile:
            return self.tile.kv_stages
        if self.fp8_cache:
            return 3
        return 4 if self.head_dim == 64 else 3 if self.fp8 else 2

    @property
    def raw_stages(self) -> int:
        """Stages of the ring of raw fp8 blocks, before transposition or conversion to fp16: V, and also K if `fp8_cache`.

        Without raw blocks, the result is 1, because an array needs a size. Besides fp16 K and V of 256 columns, shared memory holds
        two raw stages.
        """
        if not self.converts:
            return 1
        return 2 if self.tile and self.fp8_cache else 3

    @property
    def raw_panel(self) -> int:
        """Elements per row of a panel of a raw fp8 block, see `raw_stages`."""
        return 64 if self.widths[1] <= 64 else 128

    @property
    def raw_columns(self) -> int:
        """Columns of a raw fp8 block, padded to whole panels, see `raw_stages`."""
        return -(-self.widths[1] // self.raw_panel) * self.raw_panel

    @property
    def raw_bytes(self) -> int:
        """Bytes of a raw fp8 block, see `raw_stages`."""
        return self.block_n * self.raw_columns if self.converts else 16

    @property
    def paged(self) -> bool:
        """Whether K and V are in a paged cache."""
        return self.page_size > 0

    @property
    def holds_blocks(self) -> bool:
        """Whether a page has whole blocks of keys. The program then takes the page size from the cache's shape, because only the
        producer's address arithmetic depends on it."""
        return self.paged and self.page_size % self.block_n == 0

    def with_page_size(self, page_size: int) -> Config:
        """Returns the configuration that serves pages of this size."""
        config = replace(self, page_size=page_size)
        return replace(config, page_size=config.block_n) if config.holds_blocks else config

    @property
    def box(self) -> int:
        """Keys per TMA box; with a paged cache, all of one page."""
        return math.gcd(self.page_size, self.block_n) if self.paged else self.block_n

    @property
    def q_bytes(self) -> int:
        """Bytes that the full barrier of a Q stage expects: those of a Q tile, or of a warpgroup's rows of it if `splits_q`."""
        return self.gqa_ratio * self.q_positions * self.k_columns * self.bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of a K block as an MMA operand."""
        return self.block_n * self.k_columns * self.bytes

    @property
    def v_bytes(self) -> int:
        """Bytes of a V block as an MMA operand."""
        return self.block_n * self.v_columns * self.bytes

    @property
    def store_by_tma(self) -> bool:
        """Whether TMA can store outputs: they are staged in shared memory, and a warpgroup's 64 rows are whole tokens."""
        return not self.stores_from_registers and 64 % self.gqa_ratio == 0

    @property
    def _converters_need_more(self) -> bool:
        """Whether converter warps need more registers than the load warp. Then consumers must have fewer than 160 or 232
        registers."""
        return self.fp8 or (self.fp8_cache and self.block_n == 64)

    @property
    def consumer_registers(self) -> int:
        """Registers per consumer thread (setmaxnreg). No configuration of `every_config` spills."""
        if self._converters_need_more:
            return 152 if self.warpgroups == 3 else 224
        return 160 if self.warpgroups == 3 else 232

    @property
    def producer_registers(self) -> int:
        """Registers per thread of the producer warpgroup: those that consumers leave. At head_dim 128 with pages of 16, 24
        registers would spill."""
        return left_by(self.threads, self.warpgroups, self.consumer_registers)


def every_config() -> list[Config]:
    """Returns all supported configurations."""
    of_heads = [
        Config(dtype, head_dim, gqa_ratio, fp8=fp8, fp8_cache=fp8_cache, windowed=windowed).with_page_size(page_size)
        for dtype, fp8 in (*((dtype, False) for dtype in DTYPES.values()), ("bfloat16", True))
        for fp8_cache in ((False,) if fp8 else (False, True))
        for windowed in (False, True)
        for head_dim in HEAD_DIMS
        for gqa_ratio in GQA_RATIOS
        for page_size in (*(() if fp8_cache else (0,)), *PAGE_SIZES)
    ]
    others = [
        Config(
            dtype, head_dim, gqa_ratio, fp8=fp8, windowed=windowed, v_head_dim=v_head_dim, capped=capped, own_kv=own_kv
        ).with_page_size(page_size)
        for dtype, fp8 in (*((dtype, False) for dtype in DTYPES.values()), ("bfloat16", True))
        for head_dim, v_head_dim in (*((width, 0) for width in HEAD_DIMS), *OTHER_WIDTHS)
        for capped in ((False,) if fp8 else (False, True))
        if capped or v_head_dim
        if not fp8 or (head_dim, v_head_dim) in FP8_TILES
        for windowed in (False, True)
        for gqa_ratio in GQA_RATIOS
        for page_size in (0, *PAGE_SIZES)
        # Only `mla_prefill` has K/V offsets that differ from the queries' offsets.
        for own_kv in ((False, True) if (head_dim, v_head_dim, gqa_ratio, page_size) == (192, 128, 1, 0) else (False,))
    ]
    of_caches = [
        Config(dtype, head_dim, gqa_ratio, fp8_cache=True, windowed=windowed, v_head_dim=v_head_dim).with_page_size(page_size)
        for dtype in DTYPES.values()
        for head_dim, v_head_dim in FP8_CACHE_WIDTHS
        for windowed in (False, True)
        for gqa_ratio in GQA_RATIOS
        for page_size in PAGE_SIZES
    ]
    return [*dict.fromkeys(of_heads + others + of_caches)]

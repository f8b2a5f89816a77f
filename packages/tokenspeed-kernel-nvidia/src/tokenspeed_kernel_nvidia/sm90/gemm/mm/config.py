"""Configurations and shared-memory layout of the `mm` kernel with a ring buffer (`kernel_device`), and the function that chooses a
configuration for a call.

Rows of activations (a) are the MMA's m, most of which may be padding. Rows of weights (columns of b) are its n. A *tile* is 8 rows
of weights. A *group* is 40 rows of weights, that is 5 tiles, whose results are reduced together. A *chunk* is the range of k whose
activations are in shared memory at the same time. A *vector* is 16 bytes of a row of weights, which a lane loads at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES

ROWS = 8  # rows of weights in a tile: the MMA's n
TOKENS = (8, 16)  # maximum numbers of rows of activations for which kernels are compiled; the MMA's m is 16
LOAD_BYTES = 16  # bytes of a row of weights that a lane loads at once
QUAD_BYTES = 4 * LOAD_BYTES  # bytes of a row of weights that a quad of lanes loads at once
GROUP = 40  # rows of weights whose partial sums are in shared memory together; with 132 SMs, 5280 rows are one group per SM
STAGES = 12  # maximum number of stages of the ring of weights
# Bytes of the barriers at the start of shared memory. The last 16 of them are zeros, which lanes load instead of weights beyond k.
HEAD_BYTES = 512
SHARED_BYTES = 227 * 1024  # maximum shared memory of a CTA
CLUSTER = 8  # CTAs of a cluster that splits k, if there are few rows of weights
# The defaults of `Config.prefetched` and `Config.pace`: how many bytes of weights a CTA prefetches into L2 while the preceding
# kernel runs, and the clock cycles from one prefetch to the next, per KB prefetched.
PREFETCHED, PACE = 160 * 1024, 70
PREFETCH_BYTES = 4096  # maximum number of bytes of a row of weights that one prefetch instruction loads into L2
# Bytes of the ring of weights. A larger ring gained nothing. With this size, CTAs of two successive launches fit on an SM if there
# are few rows of activations.
RING_BYTES = 100 * 1024

# Bytes of the ring of weights of a long GEMM, which need not overlap another kernel. On one H200, with 201088 x 2880 bfloat16
# weights and one row of activations: 260 us; with a ring of 100 KB 300 us; PyTorch 278 us.
LONG_RING_BYTES = 200 * 1024
LONG_GROUPS = 8  # a GEMM is long if a CTA has more groups of `GROUP` rows of weights than this

WARPS = 8  # MMA warps of a CTA
# The MMA warps of a CTA for a long GEMM with fp8 weights. One row by 201088 x 2880 weights on an H200: 148 us, and 195 us with 8
# warps, which convert the weights to bfloat16 more slowly than memory delivers them.
LONG_FP8_WARPS = 12
# The numbers of 16-byte loads that a lane makes of each row in a ring stage. With three loads, rows of 2880 bytes fill their stages
# better. On an H200, one row by 2880 x 5120 fp8 weights took 6.3 us with three loads and 7.0 us with four; by 4096 x 2880 weights,
# whose rows have 4096 bytes, 5.6 and 5.5 us; by 2880 x 5120 mxfp4 weights 8.1 and 9.8 us.
LOADS = (4, 3)

# The storage format of weights, with the number of weights in 16 bytes.
Weights = Literal["dense", "float8_e4m3fn", "mxfp4"]
ELEMENTS: dict[Weights, int] = {"dense": 8, "float8_e4m3fn": 16, "mxfp4": 32}
# The elements that share a scale. "row": whole rows of activations and of weights. "block": 128 elements of a row of activations,
# and 128 x 128 weights. "mx": 32 elements of a row of weights.
Scales = Literal["none", "row", "block", "mx"]
BLOCK = 128
Sharing = Literal["", "weights", "activations"]  # the operand that the CTAs of a cluster split or multicast


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant.

    Attributes:
        dtype: dtype of the activations.
        weights: storage format of the weights.
        scales: granularity of the scales of weights, and of 8-bit activations.
        out: dtype of the result.
        tokens: the maximum number of rows of activations.
        warps: the number of MMA warps, among which k of a ring stage is split. The producer is one further warp.
        loads: how many 16-byte loads a lane makes per ring stage, all of one row of weights.
        cluster: the number of CTAs that split k of the same rows of weights; 1 without clusters.
        pair: whether CTAs form clusters of two that multicast activations to each other, half of the rows each. The two CTAs have
            different rows of weights. Shared memory holds whole rows of activations.
        prefetched: the maximum number of bytes of weights that a CTA prefetches into L2 while the preceding kernel runs.
        pace: clock cycles from a prefetch to the next, per KB prefetched. The delay keeps the preceding kernel's loads from
            queueing behind many prefetches.
        dependent: whether the launch uses PDL. For one row and 2880 x 5120 weights on an H200, PDL saves 0.8 of 11.3 us if the
            preceding kernel triggers an early launch. PDL costs 0.6 us if the preceding kernel does not.
    """

    dtype: str
    weights: Weights
    scales: Scales
    out: str
    tokens: int
    warps: int = WARPS
    loads: int = LOADS[0]
    cluster: int = 1
    pair: bool = False
    prefetched: int = PREFETCHED
    pace: int = PACE
    dependent: bool = True

    @property
    def activation_bytes(self) -> int:
        """Bytes of an element of the activations."""
        return 1 if self.dtype.startswith("float8") else 2

    @property
    def product_dtype(self) -> str:
        """The dtype of the MMA operands. The conversion of activations and weights to this dtype is exact: 8-bit floats to float16,
        mxfp4 to bfloat16."""
        return "float16" if self.activation_bytes == 1 else self.dtype

    @property
    def elements(self) -> int:
        """The number of weights in 16 bytes, that is, in one load of a lane."""
        return ELEMENTS[self.weights]

    @property
    def copied(self) -> bool:
        """Whether bulk copies load the activations to shared memory, which is faster for many rows. Bulk copies require that
        activations need no conversion.
        """
        return self.weights == "dense" and self.tokens > ROWS

    @property
    def planes(self) -> int:
        """The number of planes of activations in shared memory. 16 bytes of weights are 8, 16 or 32 elements, so 1, 2 or 4 times 16
        bytes of 16-bit activation operands belong to them. Each of these is in its own plane, to avoid bank conflicts."""
        return self.elements // 8

    @property
    def together(self) -> int:
        """The number of CTAs per cluster."""
        return 2 if self.pair else self.cluster

    @property
    def ctas_at_once(self) -> int:
        """The number of CTAs per SM that the register count must allow. With block scales, or with more warps, a CTA needs too many
        registers for two CTAs per SM."""
        return 2 if self.tokens == ROWS and self.scales != "block" and self.warps == WARPS else 1

    @property
    def threads(self) -> int:
        """The number of threads of the MMA warps."""
        return 32 * self.warps

    @property
    def part_bytes(self) -> int:
        """Bytes of each row of weights that a ring stage holds."""
        return self.warps * self.loads * QUAD_BYTES

    @property
    def pitch(self) -> int:
        """The distance between rows of weights in a ring stage, in bytes, padded so that quads that read two rows hit different
        banks."""
        return self.part_bytes + QUAD_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of a ring stage."""
        return ROWS * self.pitch


@dataclass(frozen=True)
class Layout:
    """The shared-memory layout of a CTA for a call: offsets and sizes in bytes.

    Attributes:
        chunk_bytes: bytes of a row of weights to which the activations in shared memory belong; a multiple of `Config.part_bytes`.
        stages: the number of stages of the ring of weights.
        scales, activations, ring: offsets of the scales, the activations and the ring. The warps' partial sums follow the barriers.
        size: the total size.
    """

    chunk_bytes: int
    stages: int
    scales: int
    activations: int
    ring: int
    size: int


def layout_of(config: Config, m: int, row_bytes: int, ring_bytes: int = RING_BYTES, stages: int = STAGES) -> Layout | None:
    """Returns the shared-memory layout for m rows of activations, or None if not even the activations for one `Config.part_bytes`
    and one ring stage fit. The chunk is the longest one that leaves at least 4 ring stages. If there is none, it has one
    `part_bytes`.

    Args:
        row_bytes: bytes of this CTA's part of a row of weights.
        ring_bytes: the preferred size of the ring of weights. The ring has at least 4 stages if they fit.
        stages: the number of stages that the CTA's weights fill, a limit for the ring. A CTA with few weights then leaves shared
            memory for another CTA on its SM. Otherwise, some of the clusters of 8 might have to wait.
    """
    part, stage = config.part_bytes, config.stage_bytes
    # float32 partial sums of the warps; with clusters, also those that the cluster's CTAs send, for as many rows in all.
    sums = 4 * GROUP * m * (config.warps + (config.cluster > 1))
    for parts in range(-(-row_bytes // part), 0, -1):
        chunk = parts * part
        scales = {
            "none": 0,
            "row": 4 * m,
            "block": 4 * (2 + m) * (chunk // BLOCK),
            "mx": GROUP * (chunk // LOAD_BYTES),
        }[config.scales]
        scales_at = HEAD_BYTES + sums
        activations_at = -(-(scales_at + scales) // 16) * 16
        ring_at = -(-(activations_at + config.planes * m * (chunk + QUAD_BYTES)) // 128) * 128
        found = min(STAGES, max(4, ring_bytes // stage), (SHARED_BYTES - ring_at) // stage)
        if found >= 4 or parts == 1:
            break
    if found < 1:
        return None
    found = min(found, stages)
    return Layout(chunk, found, scales_at, activations_at, ring_at, ring_at + found * stage)


def loads_of(weights: Weights, scales: Scales, row_bytes: int) -> int:
    """Returns `Config.loads`: the number in `LOADS` with which rows of ``row_bytes`` bytes leave least of their ring stages empty.

    With dense weights and with block scales, the number is always the first one. Dense weights, which need no conversion, gained
    nothing from another number.
    """
    if scales not in ("row", "mx"):
        return LOADS[0]
    return min(LOADS, key=lambda loads: -(-row_bytes // (WARPS * loads * QUAD_BYTES)) * loads)


def config_of(
    dtype: str,
    weights: Weights,
    scales: Scales,
    out: str,
    tokens: int,
    sharing: Sharing = "",
    row_bytes: int = 0,
    long: bool = False,
) -> Config:
    """Returns the configuration for a call.

    Args:
        dtype, weights, scales, out: see `Config`.
        tokens: the number of rows of activations, at most 16.
        sharing: the operand that the CTAs of a cluster split or multicast, from `sharing_of`.
        row_bytes: bytes of a row of weights.
        long: whether the GEMM is long, see `is_long`.
    """
    room = next(room for room in TOKENS if room >= tokens)
    if sharing == "weights":
        return Config(dtype, weights, scales, out, room, loads=2, cluster=CLUSTER)
    if sharing == "activations":
        return Config(dtype, weights, scales, out, room, pair=True)
    if long and room == ROWS and (weights, scales) == ("float8_e4m3fn", "row"):
        return Config(dtype, weights, scales, out, room, LONG_FP8_WARPS)
    return Config(dtype, weights, scales, out, room, loads=loads_of(weights, scales, row_bytes))


def sharing_of(weights: Weights, m: int, n: int, row_bytes: int, count: int) -> Sharing:
    """Returns the operand that the CTAs of a cluster split or multicast; "" means no clusters.

    "weights": with few rows of weights, the CTAs of a cluster split k, so each CTA reads less of the activations. "activations":
    with many activations, pairs of CTAs multicast them.

    Args:
        m, n: rows of activations and of weights.
        row_bytes: bytes of a row of weights.
        count: number of SMs.
    """
    if weights != "dense":
        return ""
    # Two conditions: each CTA of a cluster gets a part of k, and a cluster's rows of weights are one group.
    if n <= count // CLUSTER * GROUP and row_bytes >= CLUSTER * (CLUSTER - 1) * QUAD_BYTES:
        return "weights"
    config = Config("bfloat16", weights, "none", "bfloat16", max(TOKENS), pair=True)
    layout = layout_of(config, m, row_bytes)
    fits = layout is not None and layout.chunk_bytes >= row_bytes
    return "activations" if config.copied and m > ROWS and n >= count and fits else ""


def is_long(n: int, count: int) -> bool:
    """Returns whether a GEMM with n rows of weights is long on ``count`` SMs: a CTA has more than `LONG_GROUPS` groups of rows."""
    return n > count * GROUP * LONG_GROUPS


def ring_bytes_of(n: int, count: int) -> int:
    """Returns the preferred bytes of the ring of weights for n rows of weights on ``count`` SMs."""
    return LONG_RING_BYTES if is_long(n, count) else RING_BYTES


# Supported combinations of activation dtype, weights and scales.
SUPPORTED: tuple[tuple[str, Weights, Scales], ...] = (
    *((dtype, "dense", "none") for dtype in DTYPES.values()),
    *((dtype, "float8_e4m3fn", scales) for dtype in (*DTYPES.values(), "float8_e4m3fn") for scales in ("row", "block")),
    ("bfloat16", "mxfp4", "mx"),
)


def results_of(dtype: str) -> tuple[str, ...]:
    """Returns the supported result dtypes for an activation dtype."""
    return (*DTYPES.values(), "float32") if dtype.startswith("float8") else (dtype, "float32")


def _sharings(weights: Weights, tokens: int) -> tuple[Sharing, ...]:
    if weights != "dense":
        return ("",)
    return ("", "weights") if tokens <= ROWS else ("", "weights", "activations")


def every_config() -> list[Config]:
    """Returns all configurations that calls use."""
    fitting = [(loads * WARPS * QUAD_BYTES, False) for loads in LOADS]  # rows that fill one stage
    return [
        *dict.fromkeys(
            config_of(dtype, weights, scales, out, tokens, sharing, row_bytes, long)
            for dtype, weights, scales in SUPPORTED
            for out in results_of(dtype)
            for tokens in TOKENS
            for sharing in _sharings(weights, tokens)
            for row_bytes, long in (*fitting, (0, True))
        )
    ]

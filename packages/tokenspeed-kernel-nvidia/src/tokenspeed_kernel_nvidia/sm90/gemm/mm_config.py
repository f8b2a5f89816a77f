"""Configurations of the programs of `mm`, their shared memory, and which one serves a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

ROWS = 8  # rows of weights in a tile: columns of an instruction's result
TOKENS = (8, 16)  # rows of activations that programs are made for: an instruction has room for 16
LOAD_BYTES = 16  # of a row of weights, which a lane reads at once
QUAD_BYTES = 4 * LOAD_BYTES  # of a row, which four lanes read at once
GROUP = 40  # rows of weights whose sums are in shared memory together; on 132 multiprocessors 5280 rows are one group of each
STAGES = 12  # of the ring at most
HEAD_BYTES = 512  # at the beginning of shared memory: barriers, and 16 bytes of zeros at the end
SHARED_BYTES = 227 * 1024  # the most that a CTA may have
CLUSTER = 8  # CTAs that share rows where there are few
PREFETCHED, PACE = 160 * 1024, 70  # see `Config`
PIECE_BYTES = 4096  # of a row at most are brought to the L2 cache at once
# The ring's. More gained nothing, and with this two CTAs of successive launches share a multiprocessor where activations are few.
RING_BYTES = 100 * 1024

# The ring's of a long product, beside which no other has to begin. One H200, 201088 rows of 2880 in bfloat16, one row of
# activations: 260 us, with 100 KB 300; PyTorch 278.
LONG_RING_BYTES = 200 * 1024
LONG_GROUPS = 8  # groups of rows of a CTA that make a product a long one

# How weights are stored, and how many of them 16 bytes hold.
Weights = Literal["dense", "float8_e4m3fn", "mxfp4"]
ELEMENTS: dict[Weights, int] = {"dense": 8, "float8_e4m3fn": 16, "mxfp4": 32}
# What scales there are: of whole rows, of activations as of weights; of 128 of a row's activations and of 128 x 128 weights; or of
# 32 of a row's weights.
Scales = Literal["none", "row", "block", "mx"]
BLOCK = 128
Sharing = Literal["", "weights", "activations"]  # what CTAs of a cluster share


@dataclass(frozen=True)
class Config:
    """Describes a program.

    Attributes:
        dtype: of the activations.
        weights: how the weights are stored.
        scales: of weights, and of activations of 8 bits.
        out: dtype of the result.
        tokens: the most rows of activations that it serves.
        warps: the number of warps that share a row of weights, each with its own part; another warp loads.
        loads: how many 16 bytes of a row a lane has in a stage.
        cluster: the number of CTAs that share rows of weights, each with its own part.
        pair: whether the two CTAs of a cluster copy activations for both, each half of the rows. They share no weights, and all
            of a row's activations have room.
        prefetched: the most bytes of its weights that a CTA brings to the L2 cache while the kernel before still works.
        pace: the cycles from one KB of those to the next, so that loads of the kernel before do not wait behind many of them.
        dependent: whether a launch may begin while the kernel before ends. Of 2880 x 5120 weights and a row, behind a kernel that
            lets it, that saves 0.8 of 11.3 microseconds on an H200; behind one that does not, it costs 0.6.
    """

    dtype: str
    weights: Weights
    scales: Scales
    out: str
    tokens: int
    warps: int = 8
    loads: int = 4
    cluster: int = 1
    pair: bool = False
    prefetched: int = PREFETCHED
    pace: int = PACE
    dependent: bool = True

    @property
    def activation_bytes(self) -> int:
        return 1 if self.dtype.startswith("float8") else 2

    @property
    def product_dtype(self) -> str:
        """Returns the dtype that both operands are converted to, exactly: float16 for 8-bit floats, bfloat16 for mxfp4."""
        return "float16" if self.activation_bytes == 1 else self.dtype

    @property
    def elements(self) -> int:
        """Returns the number of weights in 16 bytes."""
        return ELEMENTS[self.weights]

    @property
    def copied(self) -> bool:
        """Returns whether activations come by bulk copies, which is quicker for many rows; they must be operands as they are."""
        return self.weights == "dense" and self.tokens > ROWS

    @property
    def planes(self) -> int:
        """Returns how many planes of 16 bytes hold the operands that belong to 16 bytes of weights."""
        return self.elements // 8

    @property
    def together(self) -> int:
        """Returns the number of CTAs of a cluster."""
        return 2 if self.pair else self.cluster

    @property
    def ctas_at_once(self) -> int:
        """Returns how many CTAs have registers on a multiprocessor at least; a program with scales of blocks takes more."""
        return 2 if self.tokens == ROWS and self.scales != "block" else 1

    @property
    def threads(self) -> int:
        """Returns the number of threads that compute."""
        return 32 * self.warps

    @property
    def part_bytes(self) -> int:
        """Returns the bytes of a row that a stage holds."""
        return self.warps * self.loads * QUAD_BYTES

    @property
    def pitch(self) -> int:
        """Returns the bytes from one row of a stage to the next: two quads that read two rows at once then read all banks."""
        return self.part_bytes + QUAD_BYTES

    @property
    def stage_bytes(self) -> int:
        """Returns the size of a stage."""
        return ROWS * self.pitch


@dataclass(frozen=True)
class Layout:
    """Describes the shared memory of a CTA for a call: offsets and sizes in bytes.

    Attributes:
        chunk_bytes: how much of a row of weights the activations there belong to; whole parts of stages.
        stages: the number of the ring's stages.
        scales, activations, ring: where these begin; the warps' sums begin behind the barriers.
        size: the size of everything.
    """

    chunk_bytes: int
    stages: int
    scales: int
    activations: int
    ring: int
    size: int


def layout_of(config: Config, m: int, row_bytes: int, ring_bytes: int = RING_BYTES, stages: int = STAGES) -> Layout | None:
    """Returns the layout for some rows of activations and of weights; None where too little of a row would fit.

    Args:
        row_bytes: what a CTA has of a row of weights.
        ring_bytes: the most that the ring is to have, if that leaves it some stages.
        stages: the most stages that there is something for. A CTA with little to load then leaves room for another one on its
            multiprocessor, without which not all clusters of 8 may run at once.
    """
    part, stage = config.part_bytes, config.stage_bytes
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


def config_of(dtype: str, weights: Weights, scales: Scales, out: str, tokens: int, sharing: Sharing = "") -> Config:
    """Returns the program for some work. ``sharing``: see `sharing_of`."""
    room = next(room for room in TOKENS if room >= tokens)
    if sharing == "weights":
        return Config(dtype, weights, scales, out, room, loads=2, cluster=CLUSTER)
    return Config(dtype, weights, scales, out, room, pair=sharing == "activations")


def sharing_of(weights: Weights, m: int, n: int, row_bytes: int, count: int) -> Sharing:
    """Returns what the CTAs of a cluster share; nothing where there are no clusters.

    They share rows of weights, each with a part of every row, where there are few rows: each then reads less of the activations.
    Pairs of CTAs share the copies of activations where there are many activations.

    Args:
        m, n: rows of activations and of weights.
        row_bytes: of a row of weights.
        count: of multiprocessors.
    """
    if weights != "dense":
        return ""
    # Each CTA of a cluster has something, and a cluster's rows are one group.
    if n <= count // CLUSTER * GROUP and row_bytes >= CLUSTER * (CLUSTER - 1) * QUAD_BYTES:
        return "weights"
    config = Config("bfloat16", weights, "none", "bfloat16", max(TOKENS), pair=True)
    layout = layout_of(config, m, row_bytes)
    fits = layout is not None and layout.chunk_bytes >= row_bytes
    return "activations" if config.copied and m > ROWS and n >= count and fits else ""


def ring_bytes_of(n: int, count: int) -> int:
    """Returns the size of the ring for n rows of weights on so many multiprocessors."""
    return LONG_RING_BYTES if n > count * GROUP * LONG_GROUPS else RING_BYTES


# Activations' dtypes, weights and scales that go together.
SERVED: tuple[tuple[str, Weights, Scales], ...] = (
    *((dtype, "dense", "none") for dtype in DTYPES.values()),
    *((dtype, "float8_e4m3fn", scales) for dtype in (*DTYPES.values(), "float8_e4m3fn") for scales in ("row", "block")),
    ("bfloat16", "mxfp4", "mx"),
)


def results_of(dtype: str) -> tuple[str, ...]:
    """Returns the dtypes of results for a dtype of activations."""
    return (*DTYPES.values(), "float32") if dtype.startswith("float8") else (dtype, "float32")


def _sharings(weights: Weights, tokens: int) -> tuple[Sharing, ...]:
    if weights != "dense":
        return ("",)
    return ("", "weights") if tokens <= ROWS else ("", "weights", "activations")


def every_config() -> list[Config]:
    """Returns the configurations that calls are served by."""
    return [
        config_of(dtype, weights, scales, out, tokens, sharing)
        for dtype, weights, scales in SERVED
        for out in results_of(dtype)
        for tokens in TOKENS
        for sharing in _sharings(weights, tokens)
    ]

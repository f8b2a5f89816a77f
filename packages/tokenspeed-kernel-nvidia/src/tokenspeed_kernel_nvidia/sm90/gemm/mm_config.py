"""What programs of `mm` are compiled for, and which one serves what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

ROWS = 8  # rows of weights in a tile: columns of an instruction's result
TOKENS = (8, 16)  # rows of activations that programs are made for: an instruction has room for 16
LOAD_BYTES = 16  # that a lane reads of a row of weights at once
QUAD_BYTES = 4 * LOAD_BYTES  # of a row, that four lanes read at once
GROUP = 40  # rows of weights whose sums are in shared memory together; on 132 multiprocessors 5280 rows are one group of each
STAGES = 12  # of the ring at most
HEAD_BYTES = 512  # of shared memory: barriers, and 16 bytes of zeros at the end
SHARED_BYTES = 227 * 1024  # that a CTA may have
CLUSTER = 8  # CTAs that share rows where there are few
PREFETCHED, PACE = 160 * 1024, 70  # see `Config`
PIECE_BYTES = 4096  # of a row at most, that are brought to the L2 cache at once
# Of the ring. More gained nothing, and with this two CTAs of successive launches share a multiprocessor where activations are few.
RING_BYTES = 100 * 1024

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
    """A program.

    Attributes:
        dtype: of the activations.
        weights: how the weights are stored.
        scales: of weights, and of activations of 8 bits.
        out: dtype of the result.
        tokens: rows of activations that there is room for.
        warps: share a row of weights, each with its own part; another one loads.
        loads: of 16 bytes, that a lane has of a row in a stage.
        cluster: CTAs that share rows of weights, each with its own part.
        pair: CTAs of a cluster of two bring the activations for both, each half of the rows; they share no weights. Only where all
            of a row's activations have room.
        prefetched: bytes of its weights that a CTA brings to the L2 cache at most while the kernel before still works.
        pace: cycles from one KB of those to the next, so that loads of the kernel before do not wait behind many of them.
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
        """What both operands are brought to, exactly: 8-bit floats are in float16, mxfp4 with its scales is in bfloat16."""
        return "float16" if self.activation_bytes == 1 else self.dtype

    @property
    def elements(self) -> int:
        """Weights in 16 bytes."""
        return ELEMENTS[self.weights]

    @property
    def copied(self) -> bool:
        """Whether activations come by bulk copies, which is quicker for many; what is an operand as it is can."""
        return self.weights == "dense" and self.tokens > ROWS

    @property
    def planes(self) -> int:
        """Of 16 bytes each, the activations that belong to 16 bytes of weights, as operands."""
        return self.elements // 8

    @property
    def together(self) -> int:
        """CTAs of a cluster."""
        return 2 if self.pair else self.cluster

    @property
    def threads(self) -> int:
        """That compute."""
        return 32 * self.warps

    @property
    def part_bytes(self) -> int:
        """Of a row, in a stage."""
        return self.warps * self.loads * QUAD_BYTES

    @property
    def pitch(self) -> int:
        """Bytes from one row of a stage to the next, such that quads that read two rows at once read all banks."""
        return self.part_bytes + QUAD_BYTES

    @property
    def stage_bytes(self) -> int:
        return ROWS * self.pitch


@dataclass(frozen=True)
class Layout:
    """Shared memory of a CTA, which depends on the call: places of things behind the barriers, in bytes, and their sizes.

    Attributes:
        chunk_bytes: of a row of weights, whose activations are there; whole parts.
        stages: of the ring.
        scales, activations, ring: where these begin; the warps' sums begin behind the barriers.
        size: of all.
    """

    chunk_bytes: int
    stages: int
    scales: int
    activations: int
    ring: int
    size: int


def layout_of(config: Config, m: int, row_bytes: int, ring_bytes: int = RING_BYTES) -> Layout | None:
    """The layout for some rows of activations and a row of weights; None where too little of a row would fit.

    Args:
        row_bytes: of a row of weights, that a CTA has.
        ring_bytes: that the ring is to have at most, if that leaves it some stages.
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
        stages = min(STAGES, max(4, ring_bytes // stage), (SHARED_BYTES - ring_at) // stage)
        if stages >= 4 or parts == 1:
            break
    if stages < 1:
        return None
    return Layout(chunk, stages, scales_at, activations_at, ring_at, ring_at + stages * stage)


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


# Activations' dtypes, weights and scales that go together.
SERVED: tuple[tuple[str, Weights, Scales], ...] = (
    *((dtype, "dense", "none") for dtype in DTYPES.values()),
    *((dtype, "float8_e4m3fn", scales) for dtype in (*DTYPES.values(), "float8_e4m3fn") for scales in ("row", "block")),
    ("bfloat16", "mxfp4", "mx"),
)


def results_of(dtype: str) -> tuple[str, ...]:
    """The dtypes of results for a dtype of activations."""
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

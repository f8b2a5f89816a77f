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
SHARED_BYTES = 227 * 1024  # that a CTA may have

# How weights are stored, and how many of them 16 bytes hold.
Weights = Literal["dense", "float8_e4m3fn", "mxfp4"]
ELEMENTS: dict[Weights, int] = {"dense": 8, "float8_e4m3fn": 16, "mxfp4": 32}
# What scales there are: of whole rows, of activations as of weights; of 128 of a row's activations and of 128 x 128 weights; or of
# 32 of a row's weights.
Scales = Literal["none", "row", "block", "mx"]
BLOCK = 128


@dataclass(frozen=True)
class Config:
    """A program.

    Attributes:
        dtype: of the activations.
        weights: how the weights are stored.
        scales: of weights, and of activations of 8 bits.
        out: dtype of the result.
        tokens: rows of activations that there is room for.
        warps: share a row of weights, each with its own part.
        loads: of 16 bytes, that a lane has of a row in a stage.
        parts: stages that a row takes, or a chunk of a longer row. The activations for a chunk are in registers.
        stages: of the ring through which weights come.
        cluster: CTAs that share rows of weights, each with its own part.
        dependent: whether a launch may begin while the kernel before ends.
    """

    dtype: str
    weights: Weights
    scales: Scales
    out: str
    tokens: int
    warps: int = 16
    loads: int = 2
    parts: int = 4
    stages: int = 10
    cluster: int = 1
    dependent: bool = True
    stamped: bool = False

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
    def threads(self) -> int:
        """That compute; those of another warp load."""
        return 32 * self.warps

    @property
    def part_bytes(self) -> int:
        """Of a row, in a stage."""
        return self.warps * self.loads * QUAD_BYTES

    @property
    def chunk_bytes(self) -> int:
        """Of a row, whose activations are in registers."""
        return self.parts * self.part_bytes

    @property
    def pitch(self) -> int:
        """Bytes from one row of a stage to the next, such that quads that read two rows at once read all banks."""
        return self.part_bytes + QUAD_BYTES

    @property
    def stage_bytes(self) -> int:
        return ROWS * self.pitch

    @property
    def result_floats(self) -> int:
        """Shared memory for the warps' sums."""
        return self.warps * self.tokens * GROUP

    @property
    def gathered_floats(self) -> int:
        """Shared memory for what the CTAs of a cluster have of the rows that this one writes."""
        return self.tokens * GROUP if self.cluster > 1 else 0

    @property
    def scale_bytes(self) -> int:
        """Shared memory for a group's scales of 32."""
        return GROUP // ROWS * self.parts * self.loads * self.threads if self.scales == "mx" else 0

    @property
    def shared_bytes(self) -> int:
        """Of a CTA, but for barriers."""
        return self.stages * self.stage_bytes + 4 * (self.result_floats + self.gathered_floats) + self.scale_bytes


def config_of(dtype: str, weights: Weights, scales: Scales, out: str, tokens: int) -> Config:
    """The program for some work."""
    room = next(room for room in TOKENS if room >= tokens)
    # To a load of weights of fewer bits belong two or four times as many activations, which are in registers.
    return Config(dtype, weights, scales, out, room, parts={"dense": 4, "float8_e4m3fn": 2, "mxfp4": 1}[weights])


# Activations' dtypes, weights and scales that go together.
SERVED: tuple[tuple[str, Weights, Scales], ...] = (
    *((dtype, "dense", "none") for dtype in DTYPES.values()),
    *((dtype, "float8_e4m3fn", scales) for dtype in (*DTYPES.values(), "float8_e4m3fn") for scales in ("row", "block")),
    ("bfloat16", "mxfp4", "mx"),
)


def results_of(dtype: str) -> tuple[str, ...]:
    """The dtypes of results for a dtype of activations."""
    return (*DTYPES.values(), "float32") if dtype.startswith("float8") else (dtype, "float32")


def every_config() -> list[Config]:
    """All that is served."""
    return [
        config_of(dtype, weights, scales, out, tokens)
        for dtype, weights, scales in SERVED
        for out in results_of(dtype)
        for tokens in TOKENS
    ]

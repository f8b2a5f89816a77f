"""What programs of `mm` are compiled for, and which one serves what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

ROWS = 8  # rows of weights in a tile: columns of an instruction's result
TOKENS = (8, 16)  # rows of activations that programs are made for: an instruction has room for 16
LOAD_BYTES = 16  # that a lane loads of a row of weights at once
QUAD_BYTES = 4 * LOAD_BYTES  # of a row, that four lanes load at once
GROUP = 64  # rows of weights at most, whose sums are in shared memory together
STAGED_GROUP = 40  # the same where shared memory has other uses
SHARED_BYTES = 227 * 1024  # that a CTA may have
RESERVED_BYTES = 1024  # that a CTA takes besides

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
        loads: of 16 bytes, that a lane has of a row at once. The activations for them are in registers.
        depth: tiles of 8 rows of weights that are on their way.
        staged: whether that way leads to shared memory, where each lane finds what it asked for itself; otherwise it leads to
            registers. Not for mxfp4.
        resident: CTAs that share a multiprocessor.
        dependent: whether a launch may begin while the kernel before ends.
        spare: percent of a multiprocessor's memory that is wanted as shared memory beyond what CTAs need; the rest is L1 cache.
    """

    dtype: str
    weights: Weights
    scales: Scales
    out: str
    tokens: int
    warps: int
    loads: int
    depth: int
    staged: bool = False
    resident: int = 1
    dependent: bool = True
    spare: int = 0

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
        return 32 * self.warps

    @property
    def chunk_bytes(self) -> int:
        """Of a row, that all warps have at once."""
        return self.warps * self.loads * QUAD_BYTES

    @property
    def together(self) -> int:
        """Loads of a lane that a warp has next to each other: two fill a line of 128 bytes."""
        return 2 - self.loads % 2

    @property
    def group(self) -> int:
        """Rows of weights whose sums are in shared memory together."""
        return STAGED_GROUP if self.staged else GROUP // (ROWS * self.depth) * ROWS * self.depth

    @property
    def slot_bytes(self) -> int:
        """Shared memory for a tile on its way."""
        return self.threads * self.loads * LOAD_BYTES

    @property
    def result_pitch(self) -> int:
        """Floats from one row of activations to the next, in the warps' sums: an odd multiple of 8, for the banks' sake."""
        return ROWS * (self.group // ROWS | 1)

    @property
    def result_floats(self) -> int:
        """Shared memory for the warps' sums."""
        return self.warps * self.tokens * self.result_pitch

    @property
    def shared_bytes(self) -> int:
        """Of a CTA."""
        return 4 * self.result_floats + (self.depth * self.slot_bytes if self.staged else 0)

    @property
    def carveout(self) -> int:
        """Percent of a multiprocessor's memory that is to be shared memory. Loads on their way take room in the rest."""
        needed = self.resident * (self.shared_bytes + RESERVED_BYTES)
        return min(100, -(-100 * needed // (SHARED_BYTES + RESERVED_BYTES)) + self.spare)


def config_of(dtype: str, weights: Weights, scales: Scales, out: str, tokens: int) -> Config:
    """The program for some work."""
    room = next(room for room in TOKENS if room >= tokens)
    # Registers bound what is on its way. Activations take a lane as many as a tile of bfloat16 does for 8 rows, twice that for 16;
    # to a load of weights of fewer bits belong two or four times as many activations.
    loads = {"dense": 8, "float8_e4m3fn": 4, "mxfp4": 2}[weights] * 8 // room
    if weights == "dense":
        return Config(dtype, weights, scales, out, room, warps=16, loads=loads, depth=2 if loads == 8 else 3)
    return Config(dtype, weights, scales, out, room, warps=8 if loads > 1 else 16, loads=loads, depth=4)


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

"""What programs of `mm` are compiled for, and which one serves what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

ROWS = 8  # rows of weights in a tile: columns of an instruction's result
TOKENS = (8, 16)  # rows of activations that programs are made for: an instruction has room for 16
LOAD_BYTES = 16  # that a lane loads of a row of weights at once
QUAD_BYTES = 4 * LOAD_BYTES  # of a row, that four lanes load at once
# A row in shared memory begins so many bytes after a multiple of 128: lanes that load neighbouring rows use different banks.
PAD_BYTES = 64
SHARED_BYTES = 227 * 1024  # that a CTA may have
OTHER_BYTES = 1024  # of that, besides the ring and the results

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
        tiles: of weights' rows, whose sums are in registers together. The activations are read once for all of them.
        warps: that compute. They share a row of weights, each with its own part; one more warp loads.
        loads: of 16 bytes, that a lane has of a row in a stage.
        ring: bytes of shared memory for weights on their way.
        resident: CTAs that share a multiprocessor.
        direct: whether there is no ring, and lanes load weights to registers themselves.
        early: whether weights are read before the kernel before has ended. Only for weights that it does not write.
    """

    dtype: str
    weights: Weights
    scales: Scales
    out: str
    tokens: int
    tiles: int
    warps: int = 8
    loads: int = 4
    ring: int = 160 * 1024
    resident: int = 1
    direct: bool = False
    early: bool = False

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
    def chunk_bytes(self) -> int:
        """Of a row, in a stage."""
        return self.warps * self.loads * QUAD_BYTES

    @property
    def pitch(self) -> int:
        """Bytes from row to row in a stage."""
        return self.chunk_bytes + PAD_BYTES

    @property
    def stage_bytes(self) -> int:
        return 16 if self.direct else ROWS * self.pitch

    @property
    def result_pitch(self) -> int:
        """Floats from one row of activations to the next, in the warps' sums: an odd multiple of 8, for the banks' sake."""
        return ROWS * (self.tiles | 1)

    @property
    def result_floats(self) -> int:
        """Shared memory for the warps' sums."""
        return self.warps * self.tokens * self.result_pitch

    @property
    def stages(self) -> int:
        """Tiles on their way."""
        if self.direct:
            return 1
        room = SHARED_BYTES // self.resident - OTHER_BYTES - 4 * self.result_floats
        return min(self.ring, room) // self.stage_bytes


def config_of(dtype: str, weights: Weights, scales: Scales, out: str, tokens: int, rows: int, early: bool) -> Config:
    """The program for some work. ``rows``: of weights, that a CTA has."""
    room = next(room for room in TOKENS if room >= tokens)
    loads = {"dense": 4, "float8_e4m3fn": 2, "mxfp4": 1}[weights]  # with more, activations want more registers than there are
    if rows <= ROWS:  # little work: what activations a thread needs, it asks for at once
        return Config(dtype, weights, scales, out, room, 1, warps=16 if weights == "dense" else 12, loads=loads, early=early)
    return Config(dtype, weights, scales, out, room, 8, loads=loads, early=early)


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
        config_of(dtype, weights, scales, out, tokens, rows, early)
        for dtype, weights, scales in SERVED
        for out in results_of(dtype)
        for tokens in TOKENS
        for rows in (1, 64)
        for early in (False, True)
    ]

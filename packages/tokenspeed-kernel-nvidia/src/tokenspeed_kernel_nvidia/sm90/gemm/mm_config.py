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
Weights = Literal["dense"]
ELEMENTS: dict[Weights, int] = {"dense": 8}


@dataclass(frozen=True)
class Config:
    """A program.

    Attributes:
        dtype: of the activations.
        weights: how the weights are stored.
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


def config_of(dtype: str, weights: Weights, out: str, tokens: int, rows: int, early: bool) -> Config:
    """The program for some work. ``rows``: of weights, that a CTA has."""
    room = next(room for room in TOKENS if room >= tokens)
    if rows <= ROWS:  # little work: what activations a thread needs, it asks for at once
        return Config(dtype, weights, out, room, 1, warps=16, early=early)
    return Config(dtype, weights, out, room, 8, early=early)


def every_config() -> list[Config]:
    """All that is served."""
    return [
        config_of(dtype, weights, out, tokens, rows, early)
        for dtype in DTYPES.values()
        for weights in ELEMENTS
        for out in (dtype, "float32")
        for tokens in TOKENS
        for rows in (1, 64)
        for early in (False, True)
    ]

"""Configurations and shared-memory sizes of GEMMs whose k the CTAs of a cluster split. `tile_device` describes these kernels."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES

CLUSTER = 8  # CTAs of a cluster, which split k of the same rows of weights
TILE = 64  # rows of weights of a tile: the wgmma's m
HALF = 32  # rows of weights that one TMA load copies: half of a tile
BLOCK = 64  # elements of k of a ring stage: 128 bytes
BOX_BYTES = HALF * BLOCK * 2
STAGE_BYTES = 2 * BOX_BYTES
SHARE = TILE // CLUSTER  # rows of a tile whose results one CTA of the cluster writes
WARPGROUPS = 2  # MMA warpgroups of a CTA, whose tiles alternate
WARPS = 4 * WARPGROUPS
THREADS = 32 * (WARPS + 1)  # the last warp is the producer
MAX_TOKENS = 32  # the wgmma's n
ROOM = 8  # maximum number of k blocks of a CTA
MAX_K = CLUSTER * ROOM * BLOCK
HEAD_BYTES = 2048  # an upper bound for barriers, sums of squares, and alignment
SHARED_BYTES = 227 * 1024  # maximum shared memory of a CTA
# Stages of the ring of weights, 8 KB each. Latency times bandwidth needs about 40 KB per SM; the rest hides the time until tokens
# are in shared memory. H200, 32 tokens by 2880 x 4096: 10.8 us with 12 stages, 11.3 us with 24. 8 stages took 10.4 us, but
# a variant for 16 tokens took 11.9 us with 8 stages, and 10.2 us with 12.
STAGES = 12
PAD = 8  # float32 between the rows of a buffer of partial sums, so that the threads that add them hit different banks


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant.

    Attributes:
        dtype: dtype of tokens, weights and result.
        tokens: the maximum number of tokens of a cluster, at most 32.
        room: the maximum number of k blocks of a CTA.
    """

    dtype: str
    tokens: int = MAX_TOKENS
    room: int = ROOM

    @property
    def pitch(self) -> int:
        """The distance between rows of a buffer of partial sums, in float32."""
        return self.tokens + PAD

    @property
    def buffer_floats(self) -> int:
        """The number of float32 in a buffer of partial sums: `SHARE` rows of a tile from each CTA of the cluster."""
        return CLUSTER * SHARE * self.pitch

    @property
    def sent_bytes(self) -> int:
        """Bytes of the partial sums that a CTA receives for a tile, its own included."""
        return CLUSTER * SHARE * self.tokens * 4

    @property
    def stages(self) -> int:
        """The number of stages of the ring of weights."""
        return STAGES

    @property
    def shared_bytes(self) -> int:
        """An upper bound for the shared memory of a CTA, in bytes."""
        columns = self.room * self.tokens * BLOCK * 2
        return HEAD_BYTES + columns + WARPGROUPS * self.buffer_floats * 4 + self.stages * STAGE_BYTES


def every_config() -> list[Config]:
    """Returns all configurations that `mm` uses."""
    return [Config(dtype) for dtype in DTYPES.values()]

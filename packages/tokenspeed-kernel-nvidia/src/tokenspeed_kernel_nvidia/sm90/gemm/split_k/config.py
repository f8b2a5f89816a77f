"""Configurations and shared-memory sizes of GEMMs whose k the CTAs of a cluster split, and the function that chooses one."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import PACE, PREFETCHED

CLUSTER = 8  # CTAs of a cluster, which split k of the same rows of weights
TILE = 64  # rows of weights of a tile: the wgmma's m
HALF = 32  # rows of weights that one TMA load copies: half of a tile
BLOCK = 64  # elements of k of a ring stage: 128 bytes
BOX_BYTES = HALF * BLOCK * 2
STAGE_BYTES = 2 * BOX_BYTES
SHARE = TILE // CLUSTER  # rows of a tile whose results one CTA of the cluster writes
WARPGROUPS = 2  # MMA warpgroups of a CTA, which compute tiles in turn
WARPS = 4 * WARPGROUPS
THREADS = 32 * (WARPS + 1)  # the last warp is the producer
TOKENS = (16, 32, 64)  # numbers of tokens for which kernels are compiled: the wgmma's n
ROOMS = (6, 8, 16)  # numbers of k blocks of a CTA for which kernels are compiled; 6 for k of 2880, 8 for 4096
MAX_TOKENS = max(TOKENS)
MAX_K = CLUSTER * max(ROOMS) * BLOCK
HEAD_BYTES = 2048  # an upper bound for barriers, sums of squares, and alignment
SHARED_BYTES = 227 * 1024  # maximum shared memory of a CTA
# Stages of the ring of weights, 8 KB each. Latency times bandwidth needs about 40 KB per SM; the rest hides the time until tokens
# are in shared memory.
STAGES = 24
PAD = 8  # float32 between the rows of a buffer of partial sums, so that the threads that add them hit different banks


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant.

    Attributes:
        dtype: dtype of tokens, weights and result.
        tokens: the maximum number of tokens, from `TOKENS`.
        room: the maximum number of k blocks of a CTA, from `ROOMS`.
        most_stages: the maximum number of stages of the ring of weights.
        prefetched, pace: see `mm.config.Config`.
    """

    dtype: str
    tokens: int
    room: int
    most_stages: int = STAGES
    prefetched: int = PREFETCHED
    pace: int = PACE

    @property
    def pitch(self) -> int:
        """The distance between rows of a buffer of partial sums, in float32."""
        return self.tokens + PAD

    @property
    def buffer_floats(self) -> int:
        """The float32 of a buffer of partial sums: those of all CTAs of the cluster for `SHARE` rows of a tile."""
        return CLUSTER * SHARE * self.pitch

    @property
    def sent_bytes(self) -> int:
        """Bytes of the partial sums that a CTA receives for a tile, its own included."""
        return CLUSTER * SHARE * self.tokens * 4

    @property
    def stages(self) -> int:
        """The number of stages of the ring of weights."""
        columns = self.room * self.tokens * BLOCK * 2
        left = SHARED_BYTES - HEAD_BYTES - columns - WARPGROUPS * self.buffer_floats * 4
        return min(self.most_stages, left // STAGE_BYTES)

    @property
    def shared_bytes(self) -> int:
        """An upper bound for the shared memory of a CTA, in bytes."""
        columns = self.room * self.tokens * BLOCK * 2
        return HEAD_BYTES + columns + WARPGROUPS * self.buffer_floats * 4 + self.stages * STAGE_BYTES


def room_of(k: int) -> int:
    """Returns the `Config.room` of a call with k elements, at most `MAX_K`.

    Raises:
        ValueError: k is larger.
    """
    blocks = -(-k // BLOCK)
    found = [room for room in ROOMS if room * CLUSTER >= blocks]
    if not found:
        raise ValueError(f"split-K over a cluster is for k of at most {MAX_K}, got {k}")
    return found[0]


def tokens_of(m: int) -> int:
    """Returns the `Config.tokens` of a call with m tokens.

    Raises:
        ValueError: m is larger than `MAX_TOKENS`.
    """
    found = [tokens for tokens in TOKENS if tokens >= m]
    if not found:
        raise ValueError(f"split-K over a cluster is for at most {MAX_TOKENS} tokens, got {m}")
    return found[0]


def config_of(dtype: str, m: int, k: int) -> Config:
    """Returns the configuration for m tokens of k elements."""
    return Config(dtype, tokens_of(m), room_of(k))


def every_config() -> list[Config]:
    """Returns all configurations that calls use."""
    return [Config(dtype, tokens, room) for dtype in DTYPES.values() for tokens in TOKENS for room in ROOMS]

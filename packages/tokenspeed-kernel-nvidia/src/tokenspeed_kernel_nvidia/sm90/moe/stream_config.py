"""What programs of `stream` are compiled for, and which one serves what."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import BLOCK, HEAD_BYTES, blocks_of, strip_bytes

COLUMNS = 8  # pairs of a tile: the columns of a product
MAX_PAIRS = 1024  # (token, slot) pairs of a launch
MAX_EXPERTS = 384
MAX_TOP_K = 8
STAGES = 24  # strips on their way, at most
BUFFERS = 2  # strips whose partial sums the finishing warp has not added up yet
SHARED_BYTES = 227 * 1024  # of a CTA
LIST_BYTES = 4 * (2 * MAX_EXPERTS + 3 * MAX_PAIRS)  # of experts and pairs, see `stream_tile_device`
OTHER_BYTES = 3 * 1024  # barriers and what else is small
WARPS = 14  # that compute
# Blocks of the widest strips that programs are made for: inputs of 768, 2880, 4096 and 7168 features. And tiles of pairs of an expert
# that are computed at once: a warp keeps its part of their rows in registers, which limits it.
_TILES = {12: (1, 2), 45: (1, 2), 64: (1,), 112: (1,)}
_FEW_PAIRS = 2.0  # pairs an expert up to which most experts have no more than a tile


@dataclass(frozen=True)
class Config:
    """A program.

    Attributes:
        dtype: of tokens and output.
        blocks: of a strip, at most.
        tiles: tiles of 8 pairs that an expert's rows are cut into.
        warps: that compute.
    """

    dtype: str
    blocks: int
    tiles: int
    warps: int = WARPS

    @property
    def span(self) -> int:
        """Blocks of a strip that each warp computes, at most."""
        return -(-self.blocks // self.warps)

    @property
    def load_warp(self) -> int:
        """The warp that loads."""
        return self.warps

    @property
    def finish_warp(self) -> int:
        """The warp that adds up what the others have computed."""
        return self.warps + 1

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 2)

    @property
    def pairs(self) -> int:
        """Pairs of an expert that share the reading of its weights."""
        return self.tiles * COLUMNS

    @property
    def partial_floats(self) -> int:
        """Partial sums of a strip: of each warp, four numbers a lane and tile."""
        return self.warps * self.tiles * 128

    @property
    def stage_bytes(self) -> int:
        """A strip, as wide as it may be."""
        return strip_bytes(self.blocks * BLOCK)

    @property
    def stages(self) -> int:
        """Strips on their way."""
        sums = BUFFERS * 4 * (self.partial_floats + HEAD_BYTES // 4)
        return min(STAGES, (SHARED_BYTES - LIST_BYTES - OTHER_BYTES - sums) // self.stage_bytes)


def max_k() -> int:
    """The widest input of a product that there is a program for."""
    return max(_TILES) * BLOCK


def config_of(dtype: str, k: int, pairs_per_expert: float) -> Config:
    """The program for a layer, both of whose products have inputs of at most ``k`` features."""
    blocks = next(blocks for blocks in _TILES if blocks >= blocks_of(k))
    tiles = _TILES[blocks]
    return Config(dtype, blocks, tiles[0] if pairs_per_expert <= _FEW_PAIRS else tiles[-1])


def entries_of(config: Config, pairs: int, experts: int) -> int:
    """Groups of pairs that an expert's weights are read for, at most."""
    return min(pairs, experts + pairs // config.pairs)


def every_config() -> list[Config]:
    """All that is served."""
    return [Config(dtype, blocks, count) for dtype in DTYPES.values() for blocks, tiles in _TILES.items() for count in tiles]


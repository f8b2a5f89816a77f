"""Shared-memory layout of `mla_decode` with an fp8 cache."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import ROPE, ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_config import Fp8Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import LATENT_CHUNK, READERS, Tiles
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Ring

FP8 = cutlass.Float8E4M3FN
CHUNK_BYTES = 16  # granularity of the swizzle


class Fp8Tiles(Tiles):
    """Shapes and shared memory of a configuration.

    A latent chunk is one panel of 128 columns. A row of probabilities has as many bytes as a rotary part, and overwrites it.
    """

    every_factor = True
    kept_sums = READERS * 4 * ROWS

    def __init__(self, config: Fp8Config) -> None:
        Tiles.__init__(self, config)
        self.stored = cutlass.Uint8
        self.latent_chunks = Ring(ROWS, LATENT_CHUNK, config.latent_chunks, LATENT_CHUNK, LATENT_CHUNK)
        self.ropes = Ring(ROWS, ROPE, config.stages, ROPE, ROPE)
        self.others = Ring(ROWS, config.others, 1, LATENT_CHUNK, LATENT_CHUNK)
        self.wide = Ring(ROWS, PANEL, config.latent_chunks)  # 16-bit queries, in the chunk ring

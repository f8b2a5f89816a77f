"""Which tiles serve a call of multi-head attention to many queries, by architecture. Figures are TFLOP/s on an H200."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.attention.triton import _mha_band, _mha_tiles
from tokenspeed_kernel.ops.attention.triton._mha_band import Band
from tokenspeed_kernel.ops.attention.triton._mha_call import Call
from tokenspeed_kernel.ops.attention.triton._mha_tiles import Tiles
from tokenspeed_kernel.ops.triton_common import for_architecture

# Registers are limited such that four programs share a multiprocessor: while one exponentiates, another multiplies.
_HOPPER_64 = Tiles(64, 64, 4, 2, "apart", descriptors=True, edge_stages=2, registers=128, edges_first=True)
_HOPPER_128 = Tiles(64, 64, 4, 3, "apart", descriptors=True, edge_stages=2)


def choose(call: Call, longest_q: int) -> Tiles | Band:
    """The tiles for a call, of which a sequence has at most ``longest_q`` queries."""
    device = call.q.device
    head_dim, v_head_dim = call.q.shape[2], call.v.shape[-1]
    widest = max(head_dim, v_head_dim)
    rows = longest_q * call.group
    if call.q.dtype == torch.float32:
        return Tiles(16 if rows <= 16 else 32, 32, 4, 2)
    if call.causal and 0 <= call.window_left <= 127 and rows > 64 and widest <= 128:
        band = Band(64, 1, 4, 1)
        main, tail = _mha_band.band_widths(band.block_m, call.group, call.window_left)
        if tail <= 16 and 64 <= main <= 128:
            return band
    if rows <= 32:
        return Tiles(16 if rows <= 16 else 32, 64 if widest <= 128 else 32, 4, 3)
    if widest > 128:
        return Tiles(64, 32, 4, 2)
    if call.window_left >= 0:
        return Tiles(64, 32, 4, 3)
    hopper = _HOPPER_64 if widest <= 64 else _HOPPER_128
    return for_architecture({"sm_90": hopper, "any": Tiles(64, 64, 4, 2 if widest <= 64 else 2)}, device)


def attend(choice: Tiles | Band, call: Call) -> None:
    """Launches what was chosen."""
    if isinstance(choice, Band):
        _mha_band.attend(choice, call)
    else:
        _mha_tiles.attend(choice, call)

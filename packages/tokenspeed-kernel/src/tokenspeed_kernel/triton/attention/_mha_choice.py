"""Chooses the tiles, by architecture, for multi-head attention with many queries per sequence.

Figures are TFLOP/s on an H200, causal, 8192 tokens per sequence unless stated otherwise, with Triton 3.6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenspeed_kernel.triton.attention import _mha_band, _mha_tiles
from tokenspeed_kernel.triton.attention._mha_band import Band
from tokenspeed_kernel.triton.attention._mha_call import Call
from tokenspeed_kernel.triton.attention._mha_tiles import Tiles
from tokenspeed_kernel.triton.common import for_architecture
from tokenspeed_kernel_base.checks import FP8


class Choices(NamedTuple):
    """Tiles by the columns of a head's key or value, whichever is wider: up to 64 (``narrow``), 128 (``wide``) and 256
    (``widest``).

    ``wide_fp8``, ``widest_fp8``: the tiles for fp8 keys of up to 128 and 256 columns, if they differ.
    """

    narrow: Tiles
    wide: Tiles
    widest: Tiles
    wide_fp8: Tiles | None = None
    widest_fp8: Tiles | None = None


_CHOICES = {
    "sm_90": Choices(
        # 400 to 418 TFLOP/s; 312 TFLOP/s with 16 sequences of 1024 tokens. The register limit allows four CTAs per SM: one computes
        # exponentials while another runs MMAs. Alternatives, in TFLOP/s, for the same two cases. Without the limit, three CTAs fit:
        # 375 and 282. Tiles of 128 x 64: 379 and 282. Tiles of 64 x 128: 411 and 271. Keys loaded by pointers, first case: 379.
        narrow=Tiles(64, 64, 4, 2, "apart", descriptors=True, edge_stages=2, registers=128, edges_first=True),
        # 500 to 514 TFLOP/s. With edges_first: 390 TFLOP/s, because the compiler serialises the WGMMAs. Tiles of 128 x 128 and 8
        # warps: 475 TFLOP/s. Keys loaded by pointers: at most 448 TFLOP/s.
        wide=Tiles(64, 64, 4, 3, "apart", descriptors=True, edge_stages=2),
        # 497 TFLOP/s with 256 columns. Tiles of 64 x 64: 358 TFLOP/s; of 128 x 32: 411 TFLOP/s.
        widest=Tiles(128, 64, 8, 2, "apart", descriptors=True, edge_stages=2),
        # 348 TFLOP/s, with keys and values converted from fp8 in registers. Tiles of 64 x 64: 290 TFLOP/s.
        wide_fp8=Tiles(128, 128, 8, 2),
    ),
    # Other architectures were not measured. Their tiles compile without register spills.
    "sm_100": Choices(
        narrow=Tiles(128, 64, 4, 3, "apart", descriptors=True),
        wide=Tiles(128, 64, 8, 3, "apart", descriptors=True),
        widest=Tiles(64, 32, 8, 2),
    ),
    "amd": Choices(
        narrow=Tiles(128, 64, 4, 2),
        wide=Tiles(128, 64, 8, 2),
        widest=Tiles(64, 32, 8, 2),
        # With Triton 3.9, tiles of 64 x 32 spill 84 bytes per thread on gfx950.
        widest_fp8=Tiles(32, 32, 8, 2),
    ),
    "any": Choices(narrow=Tiles(64, 64, 4, 2), wide=Tiles(64, 64, 8, 2), widest=Tiles(64, 32, 8, 2)),
}
# The tile of `_mha_band`. 16 sequences of 8192 tokens with a window of 128 take 1.37 ms, or 1.8 ms with a loop over blocks of 32
# keys.
_BAND = Band(64, 4)
_BAND_KEYS = (64, 128)
_FEW_LATER = 16


def choose(call: Call, longest_q: int) -> Tiles | Band:
    """Returns the tiles for a call with at most ``longest_q`` queries per sequence. The result's type, `Tiles` or `Band`, chooses
    the kernel."""
    widest = max(call.q.shape[2], call.v.shape[-1])
    rows = longest_q * call.group
    if call.q.dtype == torch.float32:
        return Tiles(16, 32, 4, 2) if rows <= 16 else Tiles(32, 32, 8, 2)
    if _in_a_band(call, rows, widest):
        return _BAND
    choices = for_architecture(_CHOICES, call.q.device)
    if rows <= 32 and choices is not _CHOICES["sm_90"]:  # on sm_90, a smaller tile costs as much as 64 rows, WGMMA's M
        return Tiles(16 if rows <= 16 else 32, 64 if widest <= 128 else 32, 4, 2)
    if widest > 128:
        return choices.widest_fp8 if call.k.dtype in FP8 and choices.widest_fp8 is not None else choices.widest
    if widest <= 64:
        return choices.narrow
    if call.k.dtype in FP8 and choices.wide_fp8 is not None and rows > 64:
        return choices.wide_fp8
    return choices.wide


def _in_a_band(call: Call, rows: int, widest: int) -> bool:
    """Whether `_mha_band` handles the call: one MAIN and one TAIL block, not much larger than the window, hold all keys of a
    tile.
    """
    if call.cu_seqlens_kv is not None or not call.causal or call.window_left < 0 or rows <= _BAND.block_m or widest > 128:
        return False
    main, tail = _mha_band.band_widths(_BAND.block_m, call.group, call.window_left)
    return _BAND_KEYS[0] <= main <= _BAND_KEYS[1] and tail <= _FEW_LATER


def attend(choice: Tiles | Band, call: Call) -> None:
    """Launches the chosen kernel."""
    if isinstance(choice, Band):
        _mha_band.attend(choice, call)
    else:
        _mha_tiles.attend(choice, call)

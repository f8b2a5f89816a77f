"""Tests the layout of mxfp4 expert weights for CDNA4 against the canonical layout, element by element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_amd.gfx950.moe import mxfp4_layout as layout
from tokenspeed_kernel_base.ops.quantization.encodings import decode_mxfp4

from .experts import RandomLayer


def read_back(weight: Tensor, scale: Tensor, k: int) -> Tensor:
    """Returns weights ``[experts, rows of strips, k]``, read one by one at the positions that the layout's docstring describes."""
    experts, strips, steps = weight.shape[:3]
    codes = torch.empty(experts, strips, 32, steps * 128, dtype=torch.uint8)
    exponents = torch.empty(experts, strips, 32, steps * 4, dtype=torch.uint8)
    for half in range(2):
        for r in range(16):
            for g in range(4):
                for b in range(16):
                    found = weight[:, :, :, half, 16 * g + r, b]
                    codes[:, :, 16 * half + r, 32 * g + 2 * b :: 128] = found & 15
                    codes[:, :, 16 * half + r, 32 * g + 2 * b + 1 :: 128] = found >> 4
                for step in range(steps):
                    exponents[:, :, 16 * half + r, 4 * step + g] = scale[:, :, step // 4, half, 16 * g + r, step % 4]
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return decode_mxfp4(packed, exponents, torch.float64).flatten(1, 2)[..., :k]


@pytest.mark.parametrize(
    ("hidden", "intermediate", "interleaved", "bias"),
    [(96, 64, True, True), (64, 160, False, False), (2880, 32, True, False), (512, 544, False, True)],
)
def test_every_element_is_where_the_layout_says(hidden: int, intermediate: int, interleaved: bool, bias: bool) -> None:
    layer = RandomLayer(torch.device("cpu"), 3, 2, hidden, intermediate, w13_interleaved=interleaved, bias=bias)
    given, arranged = layer.given, layer.prepared
    assert arranged.layout == layout.LAYOUT
    assert arranged.w13_weight.numel() == 3 * 2 * intermediate * -(-hidden // 128) * 64
    assert given.w13_weight_scale is not None
    assert given.w2_weight_scale is not None
    assert arranged.w13_weight_scale is not None
    assert arranged.w2_weight_scale is not None
    feature, both = torch.arange(intermediate), torch.arange(2 * intermediate)
    at = feature // 16 * 32 + feature % 16  # the row of a feature's gate; the row of its up is 16 rows further
    gates = both[::2] if interleaved else both[:intermediate]
    ups = both[1::2] if interleaved else both[intermediate:]
    w13 = read_back(arranged.w13_weight, arranged.w13_weight_scale, hidden)
    canonical = decode_mxfp4(given.w13_weight, given.w13_weight_scale, torch.float64)
    assert torch.equal(w13[:, at], canonical[:, gates])
    assert torch.equal(w13[:, at + 16], canonical[:, ups])
    w2 = read_back(arranged.w2_weight, arranged.w2_weight_scale, intermediate)
    assert torch.equal(w2, decode_mxfp4(given.w2_weight, given.w2_weight_scale, torch.float64))
    if bias:
        assert given.w13_weight_bias is not None
        assert arranged.w13_weight_bias is not None
        assert arranged.w2_weight_bias is not None
        assert torch.equal(arranged.w13_weight_bias[:, at], given.w13_weight_bias[:, gates])
        assert torch.equal(arranged.w13_weight_bias[:, at + 16], given.w13_weight_bias[:, ups])
        assert torch.equal(arranged.w2_weight_bias, given.w2_weight_bias)
    else:
        assert arranged.w13_weight_bias is None
        assert arranged.w2_weight_bias is None


def test_padding_is_zeros() -> None:
    layer = RandomLayer(torch.device("cpu"), 2, 1, 96, 608)
    w13, w2 = layer.prepared.w13_weight, layer.prepared.w2_weight
    assert not w13.view(2, -1, 1, 2, 4, 16, 16)[..., 3, :, :].any()  # 96 elements in a k step of 128
    assert not w2.view(2, -1, 5, 2, 4, 16, 16)[:, :, 4, :, 3:].any()  # 608 = 4 * 128 + 96
    assert layer.prepared.w2_weight_scale is not None
    assert not layer.prepared.w2_weight_scale[:, :, 1, :, :, 1:].any()


def test_weights_that_are_given_stay_as_they_are() -> None:
    layer = RandomLayer(torch.device("cpu"), 2, 2, 64, 64, bias=True, w13_interleaved=True)
    before = layer.given.w13_weight.clone()
    layout.prepare_weights(layer.given, layer.plan)
    assert torch.equal(layer.given.w13_weight, before)

"""Tests Triton GEMMs beyond the operators' cases: every GEMM kernel on every device, layouts, split-K, extreme values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.triton.common import for_architecture
from tokenspeed_kernel.triton.gemm import _split_k, decoded, dequantised, direct, once, words
from tokenspeed_kernel.triton.gemm._operands import operand
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.platform import current_platform
from tokenspeed_kernel_base.variation import Variation, Want

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=_generator(seed)).to(dtype).to(default_device())


def _codes(*shape: int, seed: int = 0, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=_generator(seed)).to(default_device())


def _coarse(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Small random integers. Every format represents them exactly, and their sums are exact. (Triton's interpreter lacks subnormal
    fp8 values.)"""
    return torch.randint(-8, 9, shape, generator=_generator(seed)).to(F32).to(dtype).to(default_device())


def _close(got: Tensor, wanted: Tensor, bound: float = 4e-3) -> None:
    assert got.shape == wanted.shape
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert error <= bound, float(error)


def _scales(m: int, k: int, n: int, kind: str) -> tuple[Tensor, Tensor]:
    positive = lambda *shape: _normal(*shape, seed=9).abs() + 0.1  # noqa: E731
    blocks = [-(-size // 128) for size in (n, k)]
    a = {"whole": (1,), "line": (m, 1), "block": (m, blocks[1])}[kind]
    b = {"whole": (1,), "line": (n, 1), "block": tuple(blocks)}[kind]
    b_scale = positive(*b)
    return positive(*a), b_scale if kind == "whole" else b_scale.t()


def _exponents(m: int, k: int, n: int, kind: str) -> tuple[Tensor, Tensor]:
    """Random e8m0 scales of a and b, for blocks of 128 along k. A scale of b is for 128 columns ("e8m0") or for one column.
    "packed" scales are four in an int32, with the row or column index contiguous."""
    along = -(-k // 128)
    if kind == "e8m0":
        return _codes(m, along, seed=4, low=124, high=130), _codes(-(-n // 128), along, seed=5, low=124, high=130).t()
    a, b = (_codes(-(-along // 4), lines, 4, seed=seed, low=124, high=130) for lines, seed in ((m, 4), (n, 5)))
    return a.view(torch.int32)[..., 0].t(), b.view(torch.int32)[..., 0]


@pytest.mark.parametrize("kind", ["e8m0", "packed"])
def test_direct_gemms_of_fp8_with_e8m0_scales(kind: str) -> None:
    m, k, n = 140, 640, 136
    codes = _coarse(m, k, seed=1, dtype=E4M3), _coarse(n, k, seed=2, dtype=E4M3).t()
    scales = _exponents(m, k, n, kind)
    x, w = (operand(each, scale, axis) for each, scale, axis in zip(codes, scales, (-2, -1), strict=True))
    if not current_platform().is_cpu and not direct.is_eligible(x, w):
        pytest.skip("the matrix units of this device do not take 8-bit floats")
    out = torch.empty(m, n, device=codes[0].device)
    direct.multiply(x, w, None, out, direct.Config(64, 64, 128, 4, 2))
    _close(out, tk.mm(*codes, *scales, out_dtype=F32, override="reference_mm"), 1e-3)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["whole", "line", "block"])
@pytest.mark.parametrize("descriptors", [False, True])
def test_direct_gemms_of_fp8(descriptors: bool, kind: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = _coarse(70, 1600, seed=1, dtype=E4M3)
    plain = torch.ones(1, device=codes.device)
    if not current_platform().is_cpu and not direct.is_eligible(operand(codes, plain, -2), operand(codes.t(), plain, -1)):
        pytest.skip("the matrix units of this device do not take 8-bit floats")
    m, k, n = 70, 1600, 136
    monkeypatch.setattr(_split_k, "sm_count_of", lambda device: 6 * splits)
    for persistent in (0, 1):
        config = direct.Config(64, 64, 128, 4, 2, persistent, partial=persistent == 1, descriptors=descriptors)
        a, b = _coarse(m, k, seed=1, dtype=E4M3), _coarse(n, k, seed=2, dtype=E4M3).t()
        a_scale, b_scale = _scales(m, k, n, kind)
        bias = _normal(n, seed=3)
        out = torch.empty(m, n, device=a.device)
        direct.multiply(operand(a, a_scale, -2), operand(b, b_scale, -1), bias, out, config)
        _close(out, tk.mm(a, b, a_scale, b_scale, bias, out_dtype=F32, override="reference_mm"), 1e-3)


def test_direct_gemms_of_batches_and_transposed_operands() -> None:
    """Tests operands that are not contiguous along k, batches, and an output with gaps between elements."""
    a, b = _normal(3, 80, 64, seed=1, dtype=F16), _normal(3, 64, 48, seed=2, dtype=F16)
    wanted = torch.bmm(a.float(), b.float())
    for x in (a, a.mT.contiguous().mT):
        for w in (b, b.mT.contiguous().mT):
            wide = torch.zeros(3, 80, 96, device=a.device)
            for persistent in (0, 1):
                config = direct.Config(64, 64, 64, 4, 2, persistent=persistent, descriptors=True)
                direct.multiply(operand(x, None, -2), operand(w, None, -1), None, wide[..., ::2], config)
                _close(wide[..., ::2], wanted, 1e-3)
                assert not wide[..., 1::2].any()


def test_few_tiles_split_k(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _normal(5, 2304, seed=1, dtype=BF16), _codes(40, 1152, seed=2).t()
    scale = _codes(40, 72, seed=3, low=120, high=128).t()
    bias = _normal(40, seed=4)
    wanted = tk.mm(a, b, None, scale, bias, override="reference_mm")
    for programs in (1, 2, 4, 1000):
        monkeypatch.setattr(_split_k, "sm_count_of", lambda device, programs=programs: programs)
        _close(tk.mm(a, b, None, scale, bias, override="triton_mm"), wanted)
        wide = torch.zeros(5, 80, device=a.device, dtype=BF16)
        tk.mm(a, b, None, scale, bias, out=wide[:, ::2], override="triton_mm")
        _close(wide[:, ::2], wanted)
        assert not wide[:, 1::2].any()
    batch, wide_b = a.expand(2, 5, 2304), b.expand(2, 1152, 40)
    got = tk.bmm(batch, wide_b, None, scale.expand(2, 72, 40), override="triton_bmm")
    _close(got, tk.bmm(batch, wide_b, None, scale.expand(2, 72, 40), override="reference_bmm"))


@pytest.mark.parametrize("weight", ["mxfp4", "mxfp8"])
def test_float16_meets_mx_weights_beyond_its_range(weight: str) -> None:
    a = _normal(4, 64, seed=1, dtype=F16)
    a[0] = 2.0**-24  # subnormal
    b = _codes(24, 32, seed=2).t() if weight == "mxfp4" else _coarse(24, 64, seed=2, dtype=E5M2).t()
    for low in (20, 121, 220):
        scale = _codes(24, 2, seed=3, low=low, high=low + 4).t()
        got = tk.mm(a, b, None, scale, out_dtype=F32, override="triton_mm")
        _close(got, tk.mm(a, b, None, scale, out_dtype=F32, override="reference_mm"), 1e-5)


@pytest.mark.parametrize("name", ["nvfp4 in tiles of 128x4", "fp8 per block, packed e8m0"])
def test_padding_of_tiles_and_packed_scales_does_not_matter(name: str) -> None:
    op = tk.get_operator("mm")
    case = next(case for case in op.all_cases() if case.name == name)
    arguments = op.complete(case.build(default_device()))
    changed = op.varied(arguments, Variation(Want.UNUSED, Draw(default_device())))
    assert sorted(changed) == ["a_scale", "b_scale"]
    wanted = tk.mm(**arguments, override="triton_mm")
    assert torch.equal(tk.mm(**{**arguments, **changed}, override="triton_mm"), wanted)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_nvfp4_dequantises_exactly_to_16_bit_floats(dtype: torch.dtype) -> None:
    """The GEMM's other operand is the identity matrix, so the result must equal the dequantised weights. All quantised values
    occur, with the smallest and the largest scales."""
    codes = torch.arange(256, dtype=torch.uint8, device=default_device()).reshape(16, 16)
    scale = torch.tensor([2.0**-9, 7 * 2.0**-9, 0.8125, 448.0], device=codes.device).to(E4M3).repeat(8).reshape(16, 2)
    one = torch.eye(32, dtype=dtype, device=codes.device)
    got = tk.mm(one, codes.t(), None, scale.t(), None, F32, torch.ones(1, device=codes.device), override="triton_mm")
    wanted = tk.dequantize_nvfp4(codes, scale, torch.ones(1, device=codes.device), F32, override="reference_dequantize_nvfp4")
    assert torch.equal(got, wanted.t())


def test_scales_of_nan_stay_in_their_columns() -> None:
    a, b = _normal(4, 96, seed=1, dtype=BF16), _codes(40, 48, seed=2).t()
    scale = _codes(40, 3, seed=3, low=120, high=128).t()
    scale[1, 7] = 255
    got = tk.mm(a, b, None, scale, override="triton_mm")
    assert got[:, 7].isnan().all()
    assert not torch.cat([got[:, :7], got[:, 8:]], 1).isnan().any()


def _weights(kind: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    if kind == "nvfp4":
        scale = _normal(n, k // 16, seed=3).abs().to(E4M3)
        return _codes(n, k // 2, seed=2).t(), tk.swizzle_scales(scale, override="reference_swizzle_scales")
    if kind == "mxfp4":
        return _codes(n, k // 2, seed=2).t(), _codes(n, k // 32, seed=3, low=120, high=128).t()
    codes = _coarse(n, k, seed=2, dtype=E4M3).t()
    if kind in ("e8m0", "packed"):
        return codes, _exponents(1, k, n, kind)[1]
    if kind == "mxfp8":
        return codes, _codes(n, k // 32, seed=3, low=120, high=128).t()
    return codes, _scales(1, k, n, kind)[1]


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8", "nvfp4", "whole", "line", "block", "packed"])
def test_weights_decoded_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests kernels that dequantise the weights before the GEMM, here in several slices, of which the last is shorter."""
    monkeypatch.setattr(once, "_SLICE_BYTES", 2 * 192 * 128)
    if current_platform().is_cpu:  # Triton's interpreter cannot multiply bfloat16
        monkeypatch.setattr(direct, "multiply", decoded.multiply)
    m, k, n = 40, 192, 300
    b, b_scale = _weights(kind, n, k)
    bias = _normal(n, seed=4)
    codes, scale = _codes(m, k // 2, seed=1), _codes(m, k // 32, low=120, high=128)
    alpha = torch.tensor(0.3, device=bias.device) if kind == "nvfp4" else None
    if alpha is not None:
        scale = _normal(m, k // 16, seed=3).abs().to(E4M3)
    for a, a_scale in ((_normal(m, k, seed=1, dtype=F16 if kind == "nvfp4" else BF16), None), (codes, scale)):
        if a_scale is not None and not (kind.startswith("mx") or kind == "nvfp4"):
            continue
        out = torch.empty(m, n, device=a.device)
        once.multiply(once.dense_rows(operand(a, a_scale, -2)), operand(b, b_scale, -1), bias, out, alpha)
        _close(out, tk.mm(a, b, a_scale, b_scale, bias, F32, alpha, override="reference_mm"), 1e-3)


@pytest.mark.parametrize("columns", [300, 128])
@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8", "swizzled", "whole", "line"])
def test_dequantised_weights_meet_pytorchs_gemm(kind: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``columns`` is the number of columns of a slice. The last slice is shorter."""
    m, k, n = 40, 192, 300
    monkeypatch.setattr(dequantised, "_SLICE_BYTES", 2 * k * columns)
    b, b_scale = _weights("mxfp4" if kind == "swizzled" else kind, n, k)
    if kind == "swizzled":
        b_scale = tk.swizzle_scales(b_scale.t(), override="reference_swizzle_scales")
    a, bias = _normal(m, k, seed=1, dtype=BF16), _normal(n, seed=4, dtype=BF16)
    for added in (None, bias):
        wanted = tk.mm(a, b, None, b_scale, added, override="reference_mm")
        _close(dequantised.mm(a, b, b_scale, added, None), wanted)
        wide = torch.zeros(m, 2 * n, device=a.device, dtype=BF16)
        dequantised.mm(a, b, b_scale, added, wide[:, ::2])
        _close(wide[:, ::2], wanted)
        assert not wide[:, 1::2].any()


def test_dequantised_weights_share_one_workspace() -> None:
    a, (b, b_scale) = _normal(8, 64, seed=1, dtype=BF16), _weights("line", 32, 64)
    first = dequantised.mm(a, b, b_scale, None, None)
    dequantised.mm(a, *_weights("mxfp4", 48, 64), None, None)
    assert torch.equal(dequantised.mm(a, b, b_scale, None, None), first)


@pytest.mark.parametrize("tile", [*decoded._TILES, *decoded._BLOCKS, decoded._UNALIGNED], ids=str)
def test_every_tile_that_decodes(tile: decoded.Tile) -> None:
    m, k, n = tile.m + 3, 2 * tile.k + 32, tile.n + 1
    kinds = ["block"] if tile in decoded._BLOCKS else ["mxfp4", "line"]
    for kind in kinds:
        b, b_scale = _weights(kind, n, k)
        a = _normal(m, k, seed=1, dtype=BF16)
        out = torch.empty(m, n, device=a.device)
        decoded.multiply(operand(a, None, -2), operand(b, b_scale, -1), None, out, tile)
        _close(out, tk.mm(a, b, None, b_scale, out_dtype=F32, override="reference_mm"), 1e-3)


@pytest.mark.parametrize("tile", [words._TILES["sm_90"][0], words._TILES["sm_90"][-1]], ids=str)
def test_tiles_of_32_bit_words(tile: words.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """m is less than a tile, n exceeds a tile by two columns, and k ends inside a tile and is split."""
    monkeypatch.setattr(_split_k, "sm_count_of", lambda device: 2)
    monkeypatch.setattr(_split_k, "_SHORTEST", tile.k)
    m, k, n = tile.m - 2, 2 * tile.k + 32, tile.n + 2
    for kind, dtype in (("mxfp4", BF16), ("nvfp4", F16)):
        b, b_scale = _weights(kind, n, k)
        a, bias, alpha = _normal(m, k, seed=1, dtype=dtype), _normal(n, seed=4), torch.tensor(0.3, device=b.device)
        alpha = alpha if kind == "nvfp4" else None
        out = torch.empty(m, n, device=a.device)
        words.multiply(operand(a, None, -2), operand(b, b_scale, -1), bias, out, alpha, tile)
        _close(out, tk.mm(a, b, None, b_scale, bias, F32, alpha, override="reference_mm"), 1e-3)


def test_the_word_kernel_needs_operands_contiguous_along_k() -> None:
    b, b_scale = _weights("nvfp4", 48, 128)
    w = operand(b, b_scale, -1)
    a = _normal(4, 128, seed=1, dtype=BF16)
    assert words.is_eligible(operand(a, None, -2), w)
    most = for_architecture(words._ROWS, a.device)
    assert words.is_eligible(operand(_normal(most, 128, seed=1, dtype=BF16), None, -2), w)
    assert not words.is_eligible(operand(_normal(most + 1, 128, seed=1, dtype=BF16), None, -2), w)
    odd = _normal(4, 129, seed=1, dtype=BF16)[:, 1:]
    for other in (_transposed(a), odd):
        assert not words.is_eligible(operand(other, None, -2), w)
        alpha = torch.tensor(0.3, device=a.device)
        got = tk.mm(other, b, None, b_scale, alpha=alpha, override="triton_mm")
        _close(got, tk.mm(other, b, None, b_scale, alpha=alpha, override="reference_mm"))


@pytest.mark.parametrize(("block", "columns"), [(64, 64), (32, 32), (32, 1), (128, 1)])
def test_direct_gemms_with_scales_of_smaller_blocks(block: int, columns: int) -> None:
    m, k, n = 130, 192, 72
    a, b = _coarse(m, k, seed=1, dtype=E4M3), _coarse(n, k, seed=2, dtype=E4M3).t()
    a_scale = _normal(m, -(-k // block), seed=3).abs() + 0.1
    b_scale = (_normal(-(-n // columns), -(-k // block), seed=4).abs() + 0.1).t()
    x, w = operand(a, a_scale, -2), operand(b, b_scale, -1)
    if not current_platform().is_cpu and not direct.is_eligible(x, w):
        pytest.skip("the matrix units of this device do not take 8-bit floats")
    out = torch.empty(m, n, device=a.device)
    direct.multiply(x, w, None, out, direct.Config(64, 64, block, 4, 2))
    _close(out, tk.mm(a, b, a_scale, b_scale, out_dtype=F32, override="reference_mm"), 1e-3)


def _transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


@pytest.mark.parametrize("change", [_transposed, lambda x: x.clone(), lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]]])
def test_layouts(change: Callable[[Tensor], Any]) -> None:
    a, b = _codes(20, 80, seed=1), _codes(33, 80, seed=2).t()
    a_scale, b_scale = _codes(20, 5, low=120, high=128), _codes(33, 5, seed=3, low=120, high=128).t()
    wanted = tk.mm(a, b, a_scale, b_scale, override="reference_mm")
    _close(tk.mm(change(a), change(b), change(a_scale), change(b_scale), override="triton_mm"), wanted)

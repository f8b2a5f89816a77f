"""Tests that the Triton quantisers are bitwise equal to the references, on values that are hard to round and on tensors with
unusual strides."""

from __future__ import annotations

import operator
from fractions import Fraction
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.triton.quantization.quantize_mx_device import scale_of_blocks
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.ops.quantization.encodings import FP8_MAX
from tokenspeed_kernel_base.platform import current_platform

SOURCES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = sorted(FP8_MAX, key=str)
E4M3 = torch.float8_e4m3fn


def _same(name: str, got: Any, wanted: Any) -> None:
    for part, (one, other) in enumerate(zip(_list(got), _list(wanted), strict=True)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), (name, part)
        left, right = _bits(one), _bits(other)
        differing = left != right
        assert not differing.any(), (name, part, int(differing.sum()), left[differing][:8], right[differing][:8])


def _list(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _bits(x: Tensor) -> Tensor:
    """Returns the bits as integers. Formats wider than 8 bits are widened to float32, and all their NaNs get the same bits."""
    if x.element_size() == 1:
        return x.reshape(-1).view(torch.uint8)
    widened = x.float().reshape(-1)
    return torch.where(widened.isnan(), 0x7FC00000, widened.view(torch.int32))


def _both(function: Any, *arguments: Any, **options: Any) -> None:
    name = function.operator.mode
    got = function(*arguments, **options, override=f"triton_{name}")
    _same(name, got, function(*arguments, **options, override=f"reference_{name}"))


def _neighbours(values: Tensor) -> Tensor:
    """Returns float32 values, both neighbours of each, and the negatives of all."""
    bits = values.float().view(torch.int32)
    near = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    return torch.cat([near, -near])


def _boundaries(dtype: torch.dtype) -> Tensor:
    """Returns the positive values of a format, and the midpoints between neighbours."""
    values = torch.arange(1, 127, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()]
    return torch.cat([values, (values[1:] + values[:-1]) / 2, values[:1] / 2])


def _as(x: Tensor, source: torch.dtype) -> Tensor:
    """Converts values to a dtype, and moves them to the device. Triton's interpreter flushes subnormal bfloat16 values to zero, so
    on a CPU these become zero."""
    x = x.to(source)
    if source == torch.bfloat16 and current_platform().is_cpu:
        x = torch.where(x.abs() < 2.0**-126, torch.zeros_like(x), x)
    return x.to(default_device())


SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-45,
    -1e-45,
    2.0**-126,
    3.4e38,
    -3.4e38,
    6.0,
    448.0,
    464.0,
    465.0,
]


def _hard(dtype: torch.dtype, source: torch.dtype) -> Tensor:
    values = torch.cat([_neighbours(_boundaries(dtype)), torch.tensor(SPECIAL)])
    return _as(values, source)


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_conversion_to_fp8(dtype: torch.dtype, source: torch.dtype) -> None:
    x = _hard(dtype, source)
    for scale in (1.0, 0.5, -2.0, 2.0**-100, 2.0**100, 0.0, 1e-40, float("inf"), float("nan"), 1 / 3):
        _both(tk.quantize_fp8_with_scale, x, torch.tensor(scale, device=x.device), dtype)
        scaled = _as(x.float() * scale, source)
        _both(tk.quantize_fp8_with_scale, scaled, torch.tensor(scale, device=x.device), dtype)


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_quotients_next_to_the_middle_of_two_codes(dtype: torch.dtype, source: torch.dtype) -> None:
    """Divides x by ``x / midpoint of two fp8 values``, rounded, and by this divisor's neighbours. The quotients are so close to the
    midpoint that a slightly wrong quotient would round to the other fp8 value."""
    device = default_device()
    generator = torch.Generator().manual_seed(1)
    x = (1 + torch.rand(64, generator=generator)).to(source).float()
    edges = _boundaries(dtype)
    edges = edges[torch.randperm(len(edges), generator=generator)[:24]]
    edges = _neighbours(edges)[: 3 * len(edges)]
    for power in (0, -125, -70, 70, 110):
        rows = torch.ldexp(x, torch.tensor(power if source != torch.float16 else min(max(power, -10), 10))).to(source)
        scales = _neighbours((rows.float()[:, None] / edges[None, :]).reshape(-1))
        scales = scales[: len(scales) // 2].reshape(3, len(rows), -1).permute(1, 0, 2).reshape(len(rows), -1)
        columns = scales.shape[1]
        # Each pair of x and divisor is one row, with a per-token scale.
        pairs = rows[:, None].expand(-1, columns).reshape(-1, 1)
        _both(tk.quantize_fp8_with_scale, _as(pairs, source), scales.reshape(-1, 1).to(device), dtype)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "token", "block", "block2d"])
def test_fp8_of_hard_groups(granularity: str, source: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    for dtype in FP8:
        rows = torch.randn(40, 96, generator=generator) * torch.logspace(-44, 37, 40)[:, None]
        rows[3] = 0.0
        rows[5, 7], rows[9, 50], rows[11, 0] = float("nan"), float("inf"), float("-inf")
        rows[12, :] = 1e-45
        rows[13, :] = 3.4e38
        rows[15, ::2] = -0.0
        _both(tk.quantize_fp8, _as(rows, source), granularity, 32, dtype)
        for block in (5, 33, 1000) if granularity.startswith("block") else ():
            _both(tk.quantize_fp8, _as(rows[:7], source), granularity, block, dtype)
        if granularity.startswith("block") and dtype != torch.float8_e4m3fnuz:
            _both(tk.quantize_fp8, _as(rows, source), granularity, 16, dtype, torch.int32)


def test_fp8_of_groups_too_large_for_registers() -> None:
    x = torch.randn(3, 20011, generator=torch.Generator().manual_seed(3)).to(default_device())
    _both(tk.quantize_fp8, x, "token")
    _both(tk.quantize_fp8, x, "block", 17000)
    _both(tk.quantize_fp8, x[:, :5000].reshape(3, 50, 100).contiguous(), "block2d", 700)
    wide = torch.randn(300, 301, generator=torch.Generator().manual_seed(4)).to(default_device())
    _both(tk.quantize_fp8, wide, "block2d", 150)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_fp4_and_mxfp8_of_hard_blocks(source: torch.dtype) -> None:
    device = default_device()
    edges = _neighbours(torch.tensor([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.9]))
    edges = torch.cat([edges, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38])])
    rows = edges.repeat(4)[: 32 * (4 * len(edges) // 32)].reshape(-1, 32)
    rows = torch.cat([torch.ldexp(rows, torch.tensor(power)) for power in (0, -3, 100, -100, -126, -140, -10, 9)])
    special = torch.randn(12, 32, generator=torch.Generator().manual_seed(5))
    for at, value in enumerate(SPECIAL[:9]):
        special[at, at] = value
    special[9] *= 1e38
    special[10] *= 1e-44
    x = _as(torch.cat([rows, special]), source)
    _both(tk.quantize_mxfp8, x)
    _both(tk.quantize_mxfp8, x, "up")
    _both(tk.quantize_mxfp4, x)
    for global_scale in (1.0, 1e-8, 1e-30, 1e-44, 3e30, 0.0, -0.01, float("inf"), float("nan"), 1 / 3):
        _both(tk.quantize_nvfp4, x, torch.tensor([global_scale], device=device))


@triton.jit
def _scale_blocks(amax, out, FORMAT: tl.constexpr, UP: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    scale, _, _ = scale_of_blocks(tl.load(amax + at), FORMAT, UP)
    tl.store(out + at, scale)


@pytest.mark.parametrize("up", [False, True], ids=["down", "up"])
@pytest.mark.parametrize(("form", "largest"), [("e4m3fn", 448), ("e5m2", 57344), ("e2m1", 6)])
def test_scales_of_mx_blocks(form: str, largest: int, up: bool) -> None:
    """A scale rounded up is the smallest power of two with which amax is at most the format's largest value. A scale rounded down
    is the smallest with which amax is below the next power of two."""
    limit = Fraction(largest) if up else Fraction(1 << largest.bit_length())
    amax = _neighbours(torch.tensor([largest * 2.0**n for n in (-134, -127, -126, -20, 0, 1, 90)] + [1.0, 2.0, 3.0, 3e38])).abs()
    amax = torch.nn.functional.pad(amax, (0, 128 - len(amax)), value=1.25)
    got = torch.empty(len(amax), dtype=torch.int32, device=default_device())
    _scale_blocks[(1,)](amax.to(got.device), got, FORMAT=form, UP=up, COUNT=len(amax))
    for value, scale in zip(amax.tolist(), got.tolist(), strict=True):
        step = Fraction(2) ** (scale - 127)
        fits = operator.le if up else operator.lt
        assert fits(Fraction(value), limit * step), (value, scale)
        assert scale == 0 or not fits(Fraction(value), limit * step / 2), (value, scale)


def test_dequantisation_of_every_code_and_scale() -> None:
    device = default_device()
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    every = codes.repeat(256, 1)
    scales = codes[:, None].repeat(1, 16)
    for dtype in SOURCES:
        _both(tk.dequantize_mxfp4, every, scales, dtype)
        for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
            _both(tk.dequantize_mxfp8, every.view(fp8), scales[:, :8].contiguous(), dtype)
        for fp8 in FP8:
            factors = torch.logspace(-44, 38, 256, device=device)[:, None]
            _both(tk.dequantize_fp8, every.view(fp8), factors, dtype)
        for global_scale in (0.0123, 1e-40, 3e38):
            block_scales = codes[:, None].repeat(1, 32).contiguous().view(E4M3)
            _both(tk.dequantize_nvfp4, every, block_scales, torch.tensor(global_scale, device=device), dtype)


def test_tensors_that_are_not_contiguous() -> None:
    device = default_device()
    wide = torch.randn(6, 4, 192, generator=torch.Generator().manual_seed(6)).to(device)
    for x in (
        wide[:, 1, 32:160],
        wide[:, :, :96],
        wide.transpose(0, 1),
        wide[::2, 0].t().contiguous().t()[:, :64],
        wide[:1, 0, :32],
    ):
        for granularity in ("tensor", "token", "block", "block2d"):
            _both(tk.quantize_fp8, x, granularity, 32)
        _both(tk.quantize_fp8_with_scale, x, torch.tensor(0.3, device=device))
        _both(tk.quantize_mxfp8, x)
        _both(tk.quantize_mxfp8, x, "up")
        _both(tk.quantize_mxfp4, x)
        _both(tk.quantize_nvfp4, x, torch.tensor(0.01, device=device))
    q = torch.randint(0, 256, (6, 4, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(7)).to(device)
    scale = torch.randint(100, 140, (6, 4, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(8)).to(device)
    _both(tk.dequantize_mxfp4, q[:, 1], scale[:, 1, ::2])
    _both(tk.dequantize_mxfp4, q[:, 1], scale[:, 1, :4])
    _both(tk.dequantize_mxfp8, q[:, ::2].view(torch.float8_e5m2), scale[:, ::2, :2])
    _both(tk.dequantize_fp8, q.transpose(0, 1).view(E4M3), torch.rand(4, 6, 2, device=device), torch.float32, 32)
    _both(tk.dequantize_fp8, q.view(E4M3), torch.rand(6, 2, 4, device=device)[:, :1, ::2], torch.float32, 32)


def test_outputs_that_are_not_contiguous() -> None:
    device = default_device()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(9)).to(device)
    out = torch.zeros(5, 128, dtype=torch.uint8, device=device).view(E4M3)[:, ::2]
    scale_out = torch.zeros(2, 5, device=device).t()[:, :1]
    q, scale = tk.quantize_fp8(x, out=out, scale_out=scale_out, override="triton_quantize_fp8")
    assert q.data_ptr() == out.data_ptr()
    assert scale.data_ptr() == scale_out.data_ptr()
    _same("quantize_fp8", (q, scale), tk.quantize_fp8(x, override="reference_quantize_fp8"))


def test_one_correction_is_enough_for_values_of_eleven_bits() -> None:
    """`divide` corrects the quotient of 16-bit values once. The test proves that this is enough for all 11-bit values and all
    boundaries between quantised values (at most five bits). It uses the divisors that bring the quotient closest to a midpoint of
    two float32 values next to the boundary."""

    def rounded(value: Fraction) -> Fraction:
        magnitude = abs(value)
        if not magnitude:
            return value
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        exponent -= magnitude < Fraction(2) ** exponent
        unit = Fraction(2) ** (exponent - 23)
        return round(value / unit) * unit  # Python rounds ties to even

    for boundary in (Fraction(step, 16) for step in range(16, 32, 5)):
        for middle in (boundary * (1 - Fraction(1, 2 ** (25 if boundary == 1 else 24))), boundary * (1 + Fraction(1, 2**25))):
            for x in (Fraction(bits, 1024) for bits in range(1024, 2048, 7)):
                divisor = rounded(x / middle)
                reciprocal, quotient = rounded(1 / divisor), rounded(x / divisor)
                rough = rounded(x * reciprocal)
                corrected = rounded(rough - rounded(rough * divisor - x) * reciprocal)
                assert (corrected > boundary, corrected < boundary) == (quotient > boundary, quotient < boundary), (x, divisor)


@pytest.mark.parametrize("shape", [(1, 4), (130, 136), (2, 3, 8)], ids=str)
def test_scales_are_swizzled_by_words_and_by_bytes(shape: tuple[int, ...]) -> None:
    """Tests rows of whole 32-bit words, with and without a gap after each row, and rows that begin inside a word."""
    wide = torch.randint(256, (*shape[:-1], shape[-1] + 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    wide = wide.to(default_device())
    for first in (0, 1, 4):
        scale = wide[..., first : first + shape[-1]]
        _both(tk.swizzle_scales, scale)
        tiles = tk.swizzle_scales(scale, override="reference_swizzle_scales")
        assert torch.equal(tk.unswizzle_scales(tiles, *shape[-2:], override="triton_unswizzle_scales"), scale)

"""Tests whole Gluon kernels for gfx950, on the emulator, against references in PyTorch."""

from __future__ import annotations

import re

import pytest
import torch
import triton

from gfx950_emulator import emulated_gfx950

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
    pytest.skip(f"Gluon for gfx950 as used here came with triton 3.9; this is {triton.__version__}", allow_module_level=True)

from triton.experimental.gluon import language as gl

from .kernels import gluon_memory, gluon_products
from .kernels.formats import FP4_VALUES, decode_e8m0, decode_fp4, integers, random_operand, relative_error


def _mnemonics(compiled: triton.compiler.CompiledKernel) -> set[str]:
    return set(re.findall(r"^\t([a-z]\w+)", compiled.asm["amdgcn"], re.MULTILINE))


# Matmul.


@pytest.mark.parametrize("nonk", [16, 32])
@pytest.mark.parametrize(
    ("b_order", "shared", "dtype"),
    [
        ((1, 0), "plain", torch.bfloat16),
        ((1, 0), "padded", torch.bfloat16),
        ((1, 0), "swizzled", torch.float16),
        ((0, 1), "swizzled", torch.bfloat16),
        ((0, 1), "padded", torch.float16),
    ],
    ids=str,
)
def test_matmul_through_lds(nonk: int, b_order: tuple[int, int], shared: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    m, n, k = 128, 64, 128
    a, b = torch.randn(m, k, generator=rng).to(dtype), torch.randn(k, n, generator=rng).to(dtype)
    stored = b if b_order[0] == 1 else b.T.contiguous()
    c = torch.zeros(m, n)
    with emulated_gfx950():
        compiled = gluon_products.matmul_through_lds[(2, 1)](a, stored, c, k, n, nonk, b_order, shared, 64, 64, 64)
    used = _mnemonics(compiled)
    form = "bf16" if dtype is torch.bfloat16 else "f16"
    assert f"v_mfma_f32_{'32x32x16' if nonk == 32 else '16x16x32'}_{form}" in used
    assert ("ds_read_b64_tr_b16" in used) == (b_order[0] == 1), "b is read across its rows by transposing reads, and only then"
    assert relative_error(c, a.double() @ b.double()) <= 1e-6


@pytest.mark.parametrize("by_buffer", [True, False], ids=["buffer", "global"])
@pytest.mark.parametrize(("nonk", "shared", "buffers"), [(32, "padded", 2), (16, "padded", 3), (32, "plain", 1)])
def test_matmul_by_direct_loads_to_lds(by_buffer: bool, nonk: int, shared: str, buffers: int, rng: torch.Generator) -> None:
    m, n, k = 64, 128, 256
    a, b = torch.randn(m, k, generator=rng).bfloat16(), torch.randn(k, n, generator=rng).bfloat16()
    c = torch.zeros(m, n)
    with emulated_gfx950():
        compiled = gluon_products.matmul_async[(1, 2)](a, b, c, k, n, nonk, shared, by_buffer, buffers, buffers - 1, 64, 64, 64)
    text = compiled.asm["amdgcn"]
    assert "ds_read_b64_tr_b16" in text
    assert re.search(r"buffer_load_dwordx4 .* lds" if by_buffer else r"global_load_lds_dwordx4", text)
    assert relative_error(c, a.double() @ b.double()) <= 1e-6


def test_matmul_of_alternating_waves(rng: torch.Generator) -> None:
    m, n, k = 128, 64, 192
    a, b = torch.randn(m, k, generator=rng).bfloat16(), torch.randn(k, n, generator=rng).bfloat16()
    c = torch.zeros(m, n)
    with emulated_gfx950():
        compiled = gluon_products.matmul_warp_pipelined[(1, 1)](a, b, c, k, n, 128, 64, 64, num_warps=8)
    assert "s_setprio" in _mnemonics(compiled)
    assert relative_error(c, a.double() @ b.double()) <= 1e-6


@pytest.mark.parametrize("nonk", [16, 32])
@pytest.mark.parametrize(("a_format", "b_format"), [("e2m1", "e4m3"), ("e4m3", "e2m1"), ("e2m1", "e2m1"), ("e5m2", "e4m3")])
def test_scaled_matmul(nonk: int, a_format: str, b_format: str, rng: torch.Generator) -> None:
    m, n, k = 64, 32, 512
    a, a_scale, a_values = random_operand(a_format, m, k, rng)
    b, b_scale, b_values = random_operand(b_format, n, k, rng)
    c = torch.zeros(m, n)
    with emulated_gfx950():
        compiled = gluon_products.scaled_matmul[(2, 1)](
            a, a_scale, b, b_scale, c, k, n, a_format, b_format, nonk, 32, 32, 256, (1, 1), num_warps=1
        )
    assert f"v_mfma_scale_f32_{'32x32x64' if nonk == 32 else '16x16x128'}_f8f6f4" in _mnemonics(compiled)
    assert relative_error(c, a_values @ b_values.T) <= 1e-6


def test_scaled_matmul_of_several_waves(rng: torch.Generator) -> None:
    m, n, k = 64, 128, 256
    a, a_scale, a_values = random_operand("e4m3", m, k, rng)
    b, b_scale, b_values = random_operand("e2m1", n, k, rng)
    c = torch.zeros(m, n)
    with emulated_gfx950():
        gluon_products.scaled_matmul[(1, 1)](a, a_scale, b, b_scale, c, k, n, "e4m3", "e2m1", 32, m, n, 128, (2, 2))
    assert relative_error(c, a_values @ b_values.T) <= 1e-6


# LDS and buffer memory.


def _shared_layout(name: str, itemsize: int) -> gl.SwizzledSharedLayout | gl.PaddedSharedLayout:
    """Returns a layout of 64 x 64 elements. Triton does not check that paddings keep 16-byte accesses aligned. These paddings keep
    them aligned."""
    unit = 16 // itemsize
    return {
        "plain": gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
        "by columns": gl.SwizzledSharedLayout(1, 1, 1, [0, 1]),
        "swizzled 8 1 8": gl.SwizzledSharedLayout(8, 1, 8, [1, 0]),
        "swizzled 4 2 4": gl.SwizzledSharedLayout(4, 2, 4, [1, 0]),
        "swizzled by columns": gl.SwizzledSharedLayout(8, 2, 4, [0, 1]),
        "padded": gl.PaddedSharedLayout.with_identity_for([[64, unit]], [64, 64], [1, 0]),
        "padded twice": gl.PaddedSharedLayout.with_identity_for([[32, unit], [256, 2 * unit]], [64, 64], [1, 0]),
    }[name]


_ROWS = gl.BlockedLayout([1, 8], [8, 8], [4, 1], [1, 0])
_COLUMNS = gl.BlockedLayout([4, 1], [16, 4], [1, 4], [0, 1])


@pytest.mark.parametrize(
    ("shared", "dtype"),
    [
        ("plain", torch.int8),
        ("plain", torch.int64),
        ("by columns", torch.bfloat16),
        ("by columns", torch.int64),
        ("swizzled 8 1 8", torch.int8),
        ("swizzled 8 1 8", torch.bfloat16),
        ("swizzled 8 1 8", torch.float32),
        ("swizzled 4 2 4", torch.bfloat16),
        ("swizzled 4 2 4", torch.int64),
        ("swizzled by columns", torch.int8),
        ("swizzled by columns", torch.float32),
        ("padded", torch.int8),
        ("padded", torch.bfloat16),
        ("padded", torch.float32),
        ("padded twice", torch.int8),
        ("padded twice", torch.int64),
    ],
    ids=str,
)
def test_shared_layouts(shared: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    x = integers(rng, -128, 128, 64, 64).to(dtype)
    out = torch.zeros_like(x)
    layout = _shared_layout(shared, dtype.itemsize)
    with emulated_gfx950():
        gluon_memory.through_shared[(1,)](x, out, 64, 64, layout, _ROWS, _COLUMNS)
    assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32], ids=str)
def test_permuted_view_of_lds(dtype: torch.dtype, rng: torch.Generator) -> None:
    x = integers(rng, -128, 128, 64, 32).to(dtype)
    out = torch.zeros(32, 64, dtype=dtype)
    with emulated_gfx950():
        gluon_memory.transposed_view[(1,)](x, out, 64, 32, gl.SwizzledSharedLayout(4, 1, 8, [1, 0]), _ROWS, _ROWS)
    assert torch.equal(out, x.T)


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 8), (torch.int8, 4), (torch.float64, 2)], ids=str
)
@pytest.mark.parametrize("n", [512 - 16, 512 - 13])
def test_buffer_masks(dtype: torch.dtype, width: int, n: int, rng: torch.Generator) -> None:
    x = integers(rng, -100, 100, n).to(dtype)
    out = torch.full((512 + 8,), 3).to(dtype)
    with emulated_gfx950():
        gluon_memory.masked_buffers[(2,)](x, out, n, 256, width, num_warps=1)
    assert torch.equal(out[:n], x + 1)
    assert (out[n : n + width] == 42).all()
    assert (out[n + width :] == 3).all()


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64, torch.float32, torch.float64], ids=str)
def test_buffer_atomic_add(dtype: torch.dtype, rng: torch.Generator) -> None:
    n, bins = 500, 16
    x = integers(rng, 0, 50, n)
    sums, old = torch.zeros(bins, dtype=dtype), torch.full((n,), 9999).to(dtype)
    with emulated_gfx950():
        gluon_memory.buffer_atomics[(2,)](x.to(dtype), sums, old, n, bins, 256)
    expected = torch.zeros(bins, dtype=torch.float64).index_add(0, torch.arange(n) % bins, x.double())
    assert torch.equal(sums.double(), expected)
    # In any order of additions to a bin, each addition returns the sum of the earlier additions.
    for bin_ in range(bins):
        found, value = old.double()[bin_::bins], x[bin_::bins].double()
        order = torch.argsort(found + value / 1024)
        assert torch.equal(torch.cumsum(value[order], 0) - value[order], found[order])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_buffer_atomic_bounds(dtype: torch.dtype, rng: torch.Generator) -> None:
    x = integers(rng, -(2**30), 2**30, 300, dtype=dtype)
    low, high = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype)
    with emulated_gfx950():
        gluon_memory.buffer_bounds[(2,)](x, low, high, 300, 256)
    assert (low.item(), high.item()) == (x.min().item(), x.max().item())


def test_gather_from_and_scatter_to_lds(rng: torch.Generator) -> None:
    x = torch.randn(256, generator=rng)
    index = torch.randperm(256, generator=rng).int()
    out = torch.zeros(2, 256)
    with emulated_gfx950():
        gluon_memory.shared_gather[(1,)](x, index, out, 256)
    assert torch.equal(out, torch.stack((x[index.long()], x)))


def test_atomics_in_lds(rng: torch.Generator) -> None:
    x = (torch.rand(512, generator=rng) ** 3 * 64).int()
    out = torch.zeros(64, dtype=torch.int32)
    with emulated_gfx950():
        gluon_memory.shared_counters[(1,)](x, out, 512, 64)
    assert torch.equal(out, torch.bincount(x, minlength=64).int())


@pytest.mark.parametrize(
    ("form", "source"), [("e4m3", torch.bfloat16), ("e5m2", torch.float32), ("e2m1", torch.bfloat16), ("e2m1", torch.float32)]
)
def test_conversion_with_scales_to_fewer_bits(form: str, source: torch.dtype, rng: torch.Generator) -> None:
    rows, k = 32, 128
    scale = integers(rng, 118, 136, rows, k // 32, dtype=torch.uint8)
    factor = decode_e8m0(scale).repeat_interleave(32, 1)
    # Values are within each format's range, so nothing saturates.
    x = ((torch.rand(rows, k, generator=rng) * 2 - 1) * 6 * factor).to(source)
    out = torch.zeros(rows, k // 2 if form == "e2m1" else k, dtype=torch.uint8)
    target = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}[form]
    with emulated_gfx950():
        gluon_memory.scaled_down[(1,)](x, scale, out.view(target), rows, k, form, num_warps=1)
    exact = x.double() / factor
    if form == "e2m1":
        # Rounds to nearest, ties to the even mantissa. An encoding with an even mantissa has an even index in FP4_VALUES.
        distance = (exact.abs()[..., None] - FP4_VALUES[:8]).abs()
        tie_to_even = torch.arange(8) % 2 * 1e-9
        nearest = (distance + tie_to_even).argmin(-1)
        assert torch.equal(decode_fp4(out).double(), FP4_VALUES[nearest].double() * exact.sign())
    else:
        assert torch.equal(out, exact.float().to(target).view(torch.uint8))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["e2m1", "e4m3"])
def test_conversion_with_scales_to_more_bits(form: str, target: torch.dtype, rng: torch.Generator) -> None:
    x, scale, values = random_operand(form, 32, 128, rng)
    out = torch.zeros(32, 128, dtype=target)
    with emulated_gfx950():
        gluon_memory.scaled_up[(1,)](x, scale, out, 32, 128, form == "e2m1", num_warps=1)
    assert torch.equal(out, values.to(target))

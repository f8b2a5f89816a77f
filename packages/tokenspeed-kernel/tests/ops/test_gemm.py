"""Tests mm and bmm: results in every format against float64, format detection, errors, outputs, torch.compile, and PyTorch's
kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenspeed_kernel as tk
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.operator import operators
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format, mxfp8_format, nvfp4_format
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.signature import dense_tensor_format
from tokenspeed_kernel_base.variation import Variation, Want

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPERATORS = [op for op in operators() if op.family == "gemm" and "a" in op.names]  # linear has tests of its own
CASES = [pytest.param(op, case, id=f"{op.mode}: {case.name}") for op in OPERATORS for case in op.all_cases() if not case.large]
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24, F64: 2.0**-53}  # the largest relative rounding error
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def _values(role: str, operand: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Returns the float64 values of an operand, without alpha: each element times the scale of its block."""
    tiles = scale is not None and scale.ndim == operand.ndim + 3
    if role == "b":
        scale = scale.mT if scale is not None and scale.ndim > 1 and not tiles else scale
        operand = operand.mT
    if operand.dtype == torch.uint8:
        codes = torch.stack((operand % 16, operand // 16), -1).flatten(-2).long()
        wide = torch.tensor(FP4, dtype=F64)[codes]
    else:
        wide = operand.double()
    if scale is not None:
        if scale.dtype == torch.int32:  # the lowest byte holds the first of four exponents
            scale = scale.contiguous()[..., None].view(torch.uint8).flatten(-2)[..., : -(-wide.shape[-1] // 128)]
        factor = 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
        rows, columns = torch.arange(wide.shape[-2])[:, None], torch.arange(wide.shape[-1])
        # k is the last axis here. The other axis is that of tokens for a, and that of channels for b.
        if tiles:
            at = columns // (16 if scale.dtype == E4M3 else 32)
            factor = factor[..., rows // 128, at // 4, rows % 32, rows % 128 // 32, at % 4]
        elif scale.ndim > 1 and scale.numel():
            lines, per_line = wide.shape[-2], scale.shape[-1]
            per_k = 10**6 if per_line == 1 else next(size for size in (16, 32, 64, 128) if -(-wide.shape[-1] // size) == per_line)
            per_n = next(size for size in (1, 32, 64, 128) if -(-lines // size) == scale.shape[-2])
            factor = factor[..., rows // per_n, columns // per_k]
        wide = wide * factor if factor.numel() else wide
    return wide.mT if role == "b" else wide


def _check_gemm(got: torch.Tensor, arguments: dict[str, Any]) -> None:
    a = _values("a", arguments["a"], arguments.get("a_scale"))
    b = _values("b", arguments["b"], arguments.get("b_scale"))
    exact, terms = a @ b, a.abs() @ b.abs()
    if arguments.get("alpha") is not None:
        exact, terms = exact * arguments["alpha"].double(), terms * arguments["alpha"].double()
    if arguments.get("bias") is not None:
        exact, terms = exact + arguments["bias"].double(), terms + arguments["bias"].double().abs()
    rounded = exact.abs()
    if arguments.get("residual") is not None:  # the residual is added to the rounded GEMM result, and the sum is rounded again
        exact = exact + arguments["residual"].double()
        rounded = rounded + exact.abs()
    sums = UNIT[F64 if arguments["a"].dtype == F64 else F32]
    # The bound allows one rounding of the GEMM result, the rounding of each term's two dequantised operands, and the accumulation
    # of k terms.
    bound = UNIT[got.dtype] * rounded * 1.01 + sums * (3 + math.sqrt(a.shape[-1]) * 2) * terms + 1e-30
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("op", "case"), CASES)
@pytest.mark.parametrize("solution", ["reference", None])
def test_gemms_agree_with_float64(op: Any, case: Any, solution: str | None) -> None:
    arguments = case.build()
    got = op.function(**arguments, solution=solution)
    default = arguments["a"].dtype if arguments["a"].dtype in UNIT else BF16
    assert got.dtype == arguments.get("out_dtype", default)
    assert got.is_contiguous()
    _check_gemm(got, arguments)


@pytest.mark.parametrize(("op", "case"), CASES)
@pytest.mark.parametrize("solution", ["reference", None])
def test_out_is_written_and_returned(op: Any, case: Any, solution: str | None) -> None:
    arguments = case.build()
    expected = op.function(**arguments, solution=solution)
    out = torch.full_like(expected, float("nan"))
    assert op.function(**arguments, out=out, solution=solution) is out
    assert torch.equal(out, expected)
    strided = torch.full((*expected.shape[:-1], 2 * expected.shape[-1]), 7.0, dtype=expected.dtype)
    op.function(**arguments, out=strided[..., ::2], solution=solution)
    torch.testing.assert_close(strided[..., ::2], expected)
    assert (strided[..., 1::2] == 7.0).all()


@settings(deadline=None, max_examples=40)
@given(
    m=st.integers(0, 5),
    k=st.integers(0, 300),
    n=st.integers(0, 150),
    scales=st.sampled_from(
        [("tensor", "tensor"), ("token", "channel"), ("token", "tensor"), ("tensor", "channel"), ("block", "block")]
    ),
    seed=st.integers(0, 99),
)
def test_fp8_gemms_of_any_size(m: int, k: int, n: int, scales: tuple[str, str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"tensor": (1,), "token": (m, 1), "channel": (1, n)}
    blocks = {"a": (m, -(-k // 128)), "b": (-(-k // 128), -(-n // 128))}
    arguments: dict[str, Any] = {
        "a": (torch.randn(m, k, generator=generator) * 10).to(E4M3),
        "b": (torch.randn(n, k, generator=generator) * 10).to(E4M3).t(),
    }
    for role, name in zip("ab", scales, strict=True):
        arguments[f"{role}_scale"] = torch.rand(shapes.get(name, blocks[role]), generator=generator) + 0.5
    got = tk.mm(**arguments, out_dtype=F32)
    assert got.shape == (m, n)
    _check_gemm(got, arguments)


def test_quantised_gemms_are_close_to_dense_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    a, w = torch.randn(6, 256, generator=generator), torch.randn(160, 256, generator=generator)
    dense = tk.mm(a, w.t())

    def error(got: torch.Tensor) -> float:
        return float((got - dense).norm() / dense.norm())

    a8, a_scale = tk.quantize_fp8(a, "block")
    w8, w_scale = tk.quantize_fp8(w, "block2d")
    assert error(tk.mm(a8, w8.t(), a_scale, w_scale.t(), out_dtype=F32)) < 0.05
    a8, a_scale = tk.quantize_fp8(a)
    w8, w_scale = tk.quantize_fp8(w)
    assert error(tk.mm(a8, w8.t(), a_scale, w_scale.t(), out_dtype=F32)) < 0.05
    for quantize, most in ((tk.quantize_mxfp8, 0.05), (tk.quantize_mxfp4, 0.25)):
        (aq, a_scale), (wq, w_scale) = quantize(a), quantize(w)
        assert error(tk.mm(aq, wq.t(), a_scale, w_scale.t(), out_dtype=F32)) < most
        assert error(tk.mm(a.to(BF16), wq.t(), b_scale=w_scale.t(), out_dtype=F32)) < most


def test_bmm_is_mm_of_each_pair() -> None:
    op = next(op for op in OPERATORS if op.mode == "bmm")
    for case in op.all_cases():
        if case.large:
            continue
        arguments = case.build()
        whole = tk.bmm(**arguments, solution="reference")
        for i in range(len(whole)):
            each = {name: v[i] if isinstance(v, torch.Tensor) and v.ndim >= 3 else v for name, v in arguments.items()}
            torch.testing.assert_close(whole[i], tk.mm(**each, solution="reference"))


def test_k_zero_gives_the_bias() -> None:
    bias = torch.tensor([1.0, -2.0])
    assert tk.mm(torch.ones(3, 0), torch.ones(0, 2), bias=bias).tolist() == [[1.0, -2.0]] * 3
    empty = torch.ones(3, 0).to(E4M3), torch.ones(0, 2).to(E4M3)
    for a_scale, b_scale in (((1,), (1,)), ((3, 1), (1, 2)), ((3, 0), (0, 1))):
        got = tk.mm(*empty, torch.ones(a_scale), torch.ones(b_scale), bias=bias, out_dtype=F32)
        assert got.tolist() == [[1.0, -2.0]] * 3


def test_bias_is_added_before_rounding() -> None:
    # bfloat16 represents 258 but not 257, so rounding before the bias is added would give another result.
    a, b = torch.tensor([[256.0, 1.0]], dtype=BF16), torch.ones(2, 1, dtype=BF16)
    for bias in (torch.ones(1, dtype=BF16), torch.ones(1)):
        assert tk.mm(a, b, bias=bias).item() == 258.0
        assert tk.mm(a, b, bias=bias, solution="reference").item() == 258.0


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 2880, 128), (4, 2880, 128), (33, 352, 77)], ids=str)
def test_16_bit_gemms_of_pytorch_are_rounded_once(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = sizes
    generator = torch.Generator().manual_seed(k)
    a = torch.randn(m, k, generator=generator).to(dtype)
    b = (torch.randn(n, k, generator=generator) / math.sqrt(k)).to(dtype).t()
    bias = torch.randn(n, generator=generator).to(dtype)
    _check_gemm(tk.mm(a, b, solution="torch"), {"a": a, "b": b})
    _check_gemm(tk.mm(a, b, bias=bias, solution="torch"), {"a": a, "b": b, "bias": bias})
    _check_gemm(tk.bmm(a[None], b[None], solution="torch")[0], {"a": a, "b": b})


def _chosen(function: Any, **arguments: Any) -> str:
    return str(function.explain(**arguments).chosen.name)


def test_pytorchs_dense_gemms_and_their_limits() -> None:
    a, b = torch.ones(3, 32, dtype=BF16), torch.ones(32, 4, dtype=BF16)
    for dtype in (BF16, F16, F32, F64):
        name = str(dtype).removeprefix("torch.") + ("_cpu" if dtype in (BF16, F16) else "")
        assert _chosen(tk.mm, a=a.to(dtype), b=b.to(dtype)) == f"torch_mm_{name}"
        assert _chosen(tk.mm, a=a.to(dtype), b=b.to(dtype), bias=torch.ones(4, dtype=dtype)) == f"torch_mm_{name}"
        assert _chosen(tk.bmm, a=a.to(dtype)[None], b=b.to(dtype)[None]) == f"torch_bmm_{name}"
    assert _chosen(tk.mm, a=a, b=b, out_dtype=F32) == "reference_mm"
    assert _chosen(tk.mm, a=a, b=b, bias=torch.ones(4)) == "reference_mm"
    assert _chosen(tk.bmm, a=a[None], b=b[None], out_dtype=F32) == "reference_bmm"
    assert "wide_bias=True is not False" in str(tk.mm.explain(a, b, bias=torch.ones(4)))


@pytest.mark.parametrize("k", [33, 70, 80, 96])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_cpu_gemms_do_not_read_beyond_a_row(dtype: torch.dtype, k: int) -> None:
    """NaN in gaps between rows, and infinity in another row, must not change a row's result. If k is not a multiple of 32,
    PyTorch's AMX kernels read beyond a row and multiply these elements by zero, which gives NaN."""
    held = torch.full((17, k + 26), math.nan, dtype=dtype)
    a, b = held[:, :k].fill_(1.0), torch.ones(k, 200, dtype=dtype)
    assert (tk.mm(a, b) == k).all()
    assert (tk.bmm(a[None], b[None]) == k).all()
    lone = torch.ones(17, k, dtype=dtype)
    lone[8] = math.inf
    expected = torch.where(lone[:, :1].isinf(), math.inf, float(k))
    assert (tk.mm(lone, b) == expected).all()
    assert (tk.bmm(lone[None], b[None]) == expected).all()
    taken = _chosen(tk.mm, a=a, b=b)
    assert taken.startswith("torch_mm") == (k % 32 == 0)
    assert k % 32 == 0 or f"k={k} is not a multiple of 32" in str(tk.mm.explain(a, b))


def test_no_two_kernels_have_equal_priority() -> None:
    assert not [c for c in KernelRegistry.get().clashes() if c.first.family == "gemm"]


def _signature(function: Any, **arguments: Any) -> Any:
    complete = function.operator.complete(arguments)
    function.operator.check_call(complete)
    return function.operator.request(complete)


def _eights(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def _u8(*shape: int) -> torch.Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


def _words(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0x7F7F7F7F, dtype=torch.int32)


A_BLOCKS, B_BLOCKS = fp8_format(E4M3, "block", (1, 128)), fp8_format(E4M3, "block", (128, 128))
TENSOR, TOKEN, CHANNEL = (fp8_format(E4M3, name) for name in ("tensor", "token", "channel"))
RECOGNISED = {
    "tensor": (_eights(4, 256), (), _eights(256, 128), (1,), TENSOR, TENSOR),
    "token, channel": (_eights(4, 256), (4, 1), _eights(256, 128), (1, 128), TOKEN, CHANNEL),
    "tensor, channel": (_eights(4, 256), (1,), _eights(256, 128), (1, 128), TENSOR, CHANNEL),
    "blocks": (_eights(4, 256), (4, 2), _eights(256, 128), (2, 1), A_BLOCKS, B_BLOCKS),
    "one token per tensor": (_eights(1, 256), (1,), _eights(256, 128), (1,), TENSOR, TENSOR),
    "one token per token": (_eights(1, 256), (1, 1), _eights(256, 128), (1, 128), TOKEN, CHANNEL),
    "one token, blocks": (_eights(1, 256), (1, 2), _eights(256, 128), (2, 1), A_BLOCKS, B_BLOCKS),
    "one block along k, several along n": (_eights(4, 64), (4, 1), _eights(64, 256), (1, 2), A_BLOCKS, B_BLOCKS),
    "one block in all": (_eights(4, 64), (4, 1), _eights(64, 100), (1, 1), A_BLOCKS, B_BLOCKS),
    "one channel": (_eights(4, 64), (4, 1), _eights(64, 1), (1, 1), TOKEN, CHANNEL),
    "one of everything": (_eights(1, 1), (1, 1), _eights(1, 1), (1, 1), TOKEN, CHANNEL),
    "weight only": (torch.ones(4, 256, dtype=BF16), None, _eights(256, 128), (2, 1), dense_tensor_format(BF16), B_BLOCKS),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_fp8_formats_follow_from_the_shapes_of_scales(name: str) -> None:
    a, a_shape, b, b_shape, a_format, b_format = RECOGNISED[name]
    a_scale = None if a_shape is None else torch.ones(a_shape)
    request = _signature(tk.mm, a=a, b=b, a_scale=a_scale, b_scale=torch.ones(b_shape))
    assert (request.signature.format_for("a"), request.signature.format_for("b")) == (a_format, b_format)
    if a_scale is None or a_scale.ndim == 2:
        batched = {"a": a[None], "b": b[None], "a_scale": None if a_scale is None else a_scale[None]}
        b_scale = torch.ones(b_shape)
        request = _signature(tk.bmm, **batched, b_scale=b_scale[None] if b_scale.ndim == 2 else b_scale)
        assert (request.signature.format_for("a"), request.signature.format_for("b")) == (a_format, b_format)


def test_mx_formats_and_traits() -> None:
    eight, four = {"a": _eights(3, 64), "a_scale": _u8(3, 2)}, {"a": _u8(3, 32), "a_scale": _u8(3, 2)}
    eight_b, four_b = {"b": _eights(64, 5), "b_scale": _u8(2, 5)}, {"b": _u8(32, 5), "b_scale": _u8(2, 5)}
    half = {"a": torch.ones(3, 64, dtype=F16)}
    formats_a = ((eight, mxfp8_format()), (four, mxfp4_format()), (half, dense_tensor_format(F16)))
    formats_b = ((eight_b, mxfp8_format(block_shape=(32, 1))), (four_b, mxfp4_format((32, 1))))
    for a, a_format in formats_a:
        for b, b_format in formats_b:
            request = _signature(tk.mm, **a, **b, bias=torch.ones(5), out_dtype=BF16)
            assert request.signature.format_for("a") == a_format
            assert request.signature.format_for("b") == b_format
            assert request.traits == {"m": 4, "k": 64, "n": 5, "out_dtype": "bfloat16", "bias": True, "wide_bias": True}
            assert tk.mm(**a, **b).shape == (3, 5)
    batched = {name: t[None] for name, t in {**four, **four_b}.items()}
    assert _signature(tk.bmm, **batched).traits == {"k_multiple": 64, "n_multiple": 1, "out_dtype": "bfloat16"}


def _narrow(role: str, size: int, stored: torch.dtype, across: int = 1) -> Any:
    return fp8_format(E4M3, "block", (1, size) if role == "a" else (size, across), stored)


BLOCKS = {  # the scales of a [4, 256] and b [256, 200]
    "64 x 64": (torch.ones(4, 4), torch.ones(4, 4), (64, F32), (64, F32, 64)),
    "32 x 32": (torch.ones(4, 8), torch.ones(8, 7), (32, F32), (32, F32, 32)),
    "128 along k": (torch.ones(4, 2), torch.ones(2, 200), (128, F32), (128, F32)),
    "32 along k": (torch.ones(4, 8), torch.ones(8, 200), (32, F32), (32, F32)),
    "e8m0": (_u8(4, 2), _u8(2, 2), (128, torch.uint8), (128, torch.uint8, 128)),
    "e8m0, 64": (_u8(4, 4), _u8(4, 4), (64, torch.uint8), (64, torch.uint8, 64)),
    "packed": (_words(4, 1), _words(1, 200), (128, torch.int32), (128, torch.int32)),
    "packed and plain": (_words(4, 1), _u8(2, 2), (128, torch.int32), (128, torch.uint8, 128)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_formats_follow_from_the_shapes_of_scales(name: str) -> None:
    a_scale, b_scale, a_format, b_format = BLOCKS[name]
    request = _signature(tk.mm, a=_eights(4, 256), b=_eights(256, 200), a_scale=a_scale, b_scale=b_scale)
    assert request.signature.format_for("a") == _narrow("a", *a_format)
    assert request.signature.format_for("b") == _narrow("b", *b_format)


def test_layouts_of_scales_are_part_of_the_format() -> None:
    codes, codes_b, scale, scale_b = _NV4
    tiles, tiles_b = tk.swizzle_scales(scale), tk.swizzle_scales(scale_b.t())
    for one, name in ((scale, "linear"), (tiles, "128x4")):
        for other, other_name in ((scale_b, "linear"), (tiles_b, "128x4")):
            request = _signature(tk.mm, a=codes, b=codes_b, a_scale=one, b_scale=other, alpha=torch.ones(()))
            assert request.signature.format_for("a") == nvfp4_format(layout=name)
            assert request.signature.format_for("b") == nvfp4_format((16, 1), other_name)
    request = _signature(tk.mm, a=_u8(3, 32), b=_eights(64, 5), a_scale=_u8(1, 1, 32, 4, 4), b_scale=_u8(2, 5))
    assert request.signature.format_for("a") == mxfp4_format(layout="128x4")


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this PyTorch does not have float8_e8m0fnu")
def test_scales_may_have_the_dtype_e8m0() -> None:
    generator = torch.Generator().manual_seed(0)
    a, w = torch.randn(3, 64, generator=generator), torch.randn(5, 64, generator=generator)
    for quantize in (tk.quantize_mxfp8, tk.quantize_mxfp4):
        (aq, a_scale), (wq, w_scale) = quantize(a), quantize(w)
        wanted = tk.mm(aq, wq.t(), a_scale, w_scale.t())
        named = (scale.view(torch.float8_e8m0fnu) for scale in (a_scale, w_scale.t()))
        assert torch.equal(tk.mm(aq, wq.t(), *named), wanted)


def test_layouts_of_scales_do_not_change_gemms() -> None:
    generator = torch.Generator().manual_seed(0)
    a, w = torch.randn(150, 96, generator=generator), torch.randn(20, 96, generator=generator)
    one = torch.tensor(0.01)
    for quantize, alpha in ((lambda x: tk.quantize_nvfp4(x, one), one * one), (tk.quantize_mxfp8, None), (tk.quantize_mxfp4, None)):
        (aq, a_scale), (wq, w_scale) = quantize(a), quantize(w)
        wanted = tk.mm(aq, wq.t(), a_scale, w_scale.t(), alpha=alpha)
        got = tk.mm(aq, wq.t(), tk.swizzle_scales(a_scale), tk.swizzle_scales(w_scale), alpha=alpha)
        assert torch.equal(got, wanted)
        assert (wanted.float() - a @ w.t()).norm() < 0.25 * (a @ w.t()).norm()


def test_padding_of_tiles_and_packed_scales_does_not_matter() -> None:
    changed = []
    for op, case in (p.values for p in CASES):  # type: ignore[union-attr]
        arguments = op.complete(case.build())
        found = op.varied(arguments, Variation(Want.UNUSED, Draw()))
        if found:
            assert not any(torch.equal(found[name].int(), arguments[name].int()) for name in found)
            wanted = op.function(**arguments, solution="reference")
            assert torch.equal(op.function(**{**arguments, **found}, solution="reference"), wanted)
            changed.append(f"{op.mode}: {case.name}")
    assert len(changed) == 6, changed


@pytest.mark.parametrize(("rows", "stated"), [(0, 0), (1, 1), (3, 4), (16, 16), (17, 32), (1000, 1024)])
def test_rows_are_a_trait_in_powers_of_two(rows: int, stated: int) -> None:
    """A kernel may be limited to few rows by the trait ``m``. The trait must have the bucket's number of rows instead of the
    call's, so that a measured result applies to the whole bucket."""
    request = _signature(tk.mm, a=torch.ones(rows, 8), b=torch.ones(8, 3))
    assert request.traits["m"] == stated == request.buckets["m"]


def _opcheck_cases() -> list[Any]:
    wanted = ("dense, odd sizes", "dense, no tokens", "fp8 per block, short", "mxfp4, bias", "mxfp4 weight only", "dense, float16")
    return [p for p in CASES if p.values[1].name.startswith(wanted)]  # type: ignore[union-attr]


@pytest.mark.parametrize(("op", "case"), _opcheck_cases())
def test_custom_operators_pass_opcheck(op: Any, case: Any, opcheck: Any) -> None:
    opcheck(op.function, op.complete(case.build()))


def test_a_compiled_function_gives_the_same_result() -> None:
    weight, bias = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)), torch.ones(48, dtype=BF16)

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dense = tk.mm(x, weight.to(BF16).t(), bias=bias)
        out = torch.empty(x.shape[0], 48, dtype=F32)
        tk.mm(x.float(), weight.t(), out=out)
        q, scale = tk.quantize_fp8(x)
        w, w_scale = tk.quantize_fp8(weight)
        batched = tk.bmm(q[None], w.t()[None], scale[None], w_scale.t()[None])
        return dense, out, tk.mm(q, w.t(), scale, w_scale.t(), out_dtype=F16), batched

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(BF16)
        for got, expected in zip(compiled(x), layer(x), strict=True):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)


_A, _B, _F8, _G8, _ONE = torch.ones(2, 64), torch.ones(64, 3), _eights(2, 64), _eights(64, 3), torch.ones(1)
_LONG_A, _LONG_B = _eights(2, 256), _eights(256, 3)
_NV4 = (_u8(2, 32), _u8(32, 3), _eights(2, 4), _eights(4, 3))
MALFORMED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: tk.mm(_A[0], _B), ValueError, r"a must be of shape \[m, k\], got .*\[64\]"),
    (lambda: tk.mm(_A, _B[0]), ValueError, "b must be of shape"),
    (lambda: tk.mm(_A, _A), ValueError, r"b must be such that its k is 64 like a's .*, got 2 \("),
    (lambda: tk.mm(_A, _B.half()), TypeError, "formats that go together .*, got a: float32 and b: float16"),
    (lambda: tk.mm(_A.int(), _B.int()), TypeError, "a must be a tensor of .*, got int32"),
    (lambda: tk.mm(_A, _B, _ONE), ValueError, "a_scale must be None with a of a dense dtype"),
    (lambda: tk.mm(_A, _B, None, _ONE), ValueError, "b_scale must be None with b of a dense dtype"),
    (lambda: tk.mm(_A, [1.0]), TypeError, "b must be a tensor, got list"),
    (lambda: tk.mm(_A, _B, bias=torch.ones(4)), ValueError, r"bias must be of shape \[n\] where n is 3 in b"),
    (lambda: tk.mm(_A, _B, bias=torch.ones(3, dtype=BF16)), TypeError, "bias must be a tensor of float32, got bfloat16"),
    (lambda: tk.mm(_A, _B, bias=torch.ones(3, 1)), ValueError, "bias must be of shape"),
    (lambda: tk.mm(_A, _B, out_dtype=torch.int8), ValueError, "out_dtype must be one of .*, got int8"),
    (lambda: tk.mm(_A, _B, out_dtype=F64), ValueError, "out_dtype must be one of"),
    (lambda: tk.mm(_A.double(), _B.double(), out_dtype=F32), ValueError, "out_dtype must be one of float64, got float32"),
    (lambda: tk.mm(_A, _B, out=torch.ones(3, 2)), ValueError, r"out must have shape \[2, 3\]"),
    (lambda: tk.mm(_A, _B, out=torch.ones(2, 3, dtype=BF16)), TypeError, "out must be float32"),
    (lambda: tk.mm(_F8, _G8), ValueError, "a_scale must be given with a of a scaled format"),
    (lambda: tk.mm(_F8, _G8, _ONE), ValueError, "b_scale must be given with b of a scaled format"),
    (lambda: tk.mm(_F8, _G8, torch.ones(3), _ONE), ValueError, r"a_scale must be of shape \[\] or \[1\] \(tensor\), \[2, 1\]"),
    (lambda: tk.mm(_F8, _G8, torch.ones(1, 1), _ONE), ValueError, "a_scale must be of shape"),
    (lambda: tk.mm(_F8, _G8, _ONE, torch.ones(3)), ValueError, r"b_scale must be of shape .* \[1, 3\] \(channel\)"),
    (lambda: tk.mm(_F8, _G8, _ONE, torch.ones(3, 1)), ValueError, "b_scale must be of shape"),
    (
        lambda: tk.mm(_F8, _G8, _ONE.half(), _ONE),
        TypeError,
        "a_scale must be a tensor of float32 or float8_e8m0fnu or int32 or uint8",
    ),
    (lambda: tk.mm(_LONG_A, _LONG_B, torch.ones(2, 2), _ONE), TypeError, "formats that go together"),
    (lambda: tk.mm(_LONG_A, _LONG_B, torch.ones(2, 1), torch.ones(2, 1)), TypeError, "formats that go together"),
    (lambda: tk.mm(_F8, _G8, _ONE, _u8(2, 3)), TypeError, "formats that go together"),
    (lambda: tk.mm(_F8, _B, _ONE), TypeError, "formats that go together"),
    (lambda: tk.mm(_A, _G8, None, _ONE), TypeError, "formats that go together"),
    (
        lambda: tk.mm(_u8(2, 24), _u8(24, 3), _u8(2, 1), _u8(1, 3)),
        ValueError,
        "a must be such that k is a multiple of 32 in mxfp4; zeros may be",
    ),
    (lambda: tk.mm(_F8, _G8, _u8(2, 3), _u8(2, 3)), ValueError, r"a_scale must be of shape \[2, 2\] \(blocks of 1x32\)"),
    (lambda: tk.mm(_F8, _G8, _u8(2, 2), _u8(3, 2)), ValueError, r"b_scale must be of shape \[2, 3\] \(blocks of 32x1\)"),
    (lambda: tk.mm(_F8, _G8, _u8(2, 1), _u8(2, 3)), TypeError, "formats that go together"),
    (lambda: tk.mm(_LONG_A, _LONG_B, torch.ones(2, 2), torch.ones(4, 3)), TypeError, "formats that go together"),
    (lambda: tk.mm(_LONG_A, _LONG_B, torch.ones(2, 2), _u8(2, 3)), TypeError, "formats that go together"),
    (
        lambda: tk.mm(_LONG_A, _LONG_B, _words(2, 2), _words(1, 3)),
        ValueError,
        r"a_scale must be of shape \[2, 1\] \(blocks of 1x128",
    ),
    (lambda: tk.mm(*_NV4[:2], _u8(2, 4), _NV4[3], alpha=_ONE), ValueError, r"a_scale must be of shape \[2, 2\] .*tiles of 128x4"),
    (lambda: tk.mm(*_NV4), ValueError, "alpha must be given with an operand in nvfp4"),
    (lambda: tk.mm(*_NV4, alpha=_ONE.half()), TypeError, "alpha must be a tensor of float32"),
    (lambda: tk.mm(*_NV4, alpha=torch.ones(1, 1)), ValueError, r"alpha must be of shape \[\] or \[1\]"),
    (lambda: tk.mm(*_NV4[:3], _u8(2, 3), alpha=_ONE), TypeError, "formats that go together"),
    (lambda: tk.mm(*_NV4[:3], _NV4[3][:, :2], alpha=_ONE), ValueError, r"b_scale must be of shape \[4, 3\] .*\[1, 1, 32, 4, 4\]"),
    (lambda: tk.mm(_A, _B, alpha=_ONE), ValueError, "alpha must be None where no operand is nvfp4"),
    (
        lambda: tk.mm(_u8(2, 32), _u8(32, 3), torch.ones(2, 2), _u8(2, 3)),
        TypeError,
        "a_scale must be a tensor of float8_e4m3fn or float8_e8m0fnu or uint8, got float32",
    ),
    (lambda: tk.mm(_u8(2, 32), _u8(64, 3), _u8(2, 2), _u8(4, 3)), ValueError, "its k is 64 .*mxfp4.*got 128"),
    (lambda: tk.mm(_A.to(torch.float8_e4m3fnuz), _G8, _u8(2, 2), _u8(2, 3)), TypeError, "a must be a tensor of"),
    (lambda: tk.bmm(_A, _B), ValueError, r"a must be of shape \[batch, m, k\]"),
    (lambda: tk.bmm(_A[None], _B), ValueError, "b must be of shape"),
    (lambda: tk.bmm(_A[None], torch.ones(2, 64, 3)), ValueError, "where batch is 1 in a"),
    (lambda: tk.bmm(_F8[None], _G8[None], torch.ones(2, 1), _ONE), ValueError, r"a_scale must be of shape .*\[1, 2, 1\]"),
    (lambda: tk.bmm(_A[None], _B[None], out=torch.ones(1, 3, 2)), ValueError, "out must have shape"),
    (lambda: tk.bmm(_A[None], _B[None], bias=_ONE), TypeError, "bias"),
]


@pytest.mark.parametrize(("call", "error", "message"), MALFORMED)
def test_malformed_calls(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_costs_count_what_is_stored() -> None:
    op = next(op for op in OPERATORS if op.mode == "mm")
    packed = {"a": _u8(3, 32), "b": _u8(32, 5), "a_scale": _u8(3, 2), "b_scale": _u8(2, 5)}
    cost = op.cost_of(packed)
    assert cost.flops == 2 * 3 * 5 * 64
    assert cost.bytes == 3 * 32 + 32 * 5 + 3 * 2 + 2 * 5 + 2 * 3 * 5

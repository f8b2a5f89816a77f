"""Tests the quantisation operators: against formulas in NumPy, at the limits of formats, for errors, provided outputs, and under
torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tokenspeed_kernel_base.operator import operators
from tokenspeed_kernel_base.ops.quantization.encodings import FP8_MAX, e8m0_to_float, encode_e2m1, encode_fp8
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format, mxfp8_format, nvfp4_format
from tokenspeed_kernel_base.ops.quantization.fp8 import dequantize_fp8, quantize_fp8, quantize_fp8_with_scale
from tokenspeed_kernel_base.ops.quantization.mx import dequantize_mxfp4, dequantize_mxfp8, quantize_mxfp4, quantize_mxfp8
from tokenspeed_kernel_base.ops.quantization.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from tokenspeed_kernel_base.ops.quantization.swizzle import swizzle_scales, unswizzle_scales

E4M3 = torch.float8_e4m3fn
OPERATORS = [op for op in operators() if op.family == "quantization"]
CASES = [pytest.param(op, case, id=f"{op.mode}: {case.name}") for op in OPERATORS for case in op.all_cases() if not case.large]


def _matrix(max_rows: int = 3, columns: int = 48) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    shapes = st.tuples(st.integers(1, max_rows), st.just(columns))
    values = st.floats(-1e4, 1e4, width=32) | st.floats(-(2.0**-10), 2.0**-10, width=32) | st.sampled_from([0.0, -0.0, 1.0, 448.0])
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=values))


def _bytes(t: torch.Tensor) -> list[int]:
    return t.flatten().view(torch.uint8).tolist()


def _groups(shape: tuple[int, int], granularity: str, block: int) -> list[tuple[tuple[int, ...], tuple[slice, slice]]]:
    """Returns the index of each scale, with the slices of the elements that share the scale."""
    m, k = shape
    rows = {"tensor": m, "block2d": block}.get(granularity, 1)
    columns = block if granularity.startswith("block") else k
    groups = []
    for i, top in enumerate(range(0, m, rows)):
        for j, left in enumerate(range(0, k, columns)):
            index = (0,) if granularity == "tensor" else (i, j)
            groups.append((index, (slice(top, top + rows), slice(left, left + columns))))
    return groups


@pytest.mark.parametrize("granularity", ["tensor", "token", "block", "block2d"])
@pytest.mark.parametrize("dtype", sorted(FP8_MAX, key=str), ids=str)
@settings(deadline=None, max_examples=30)
@given(x=_matrix(max_rows=5, columns=21))
def test_quantize_fp8_is_its_formula_in_every_bit(dtype: torch.dtype, granularity: str, x: np.ndarray[Any, Any]) -> None:
    q, scale = quantize_fp8(torch.from_numpy(x), granularity, 4, dtype)
    for index, group in _groups(x.shape, granularity, 4):  # type: ignore[arg-type]
        amax = np.abs(x[group]).max()
        expected = max(np.float32(amax) / np.float32(FP8_MAX[dtype]), np.float32(2.0**-126))
        assert scale[index].item() == expected
        quotient = x[group] / expected
        assert quotient.dtype == np.float32
        assert _bytes(q[group]) == _bytes(encode_fp8(torch.from_numpy(quotient), dtype))


@pytest.mark.parametrize("granularity", ["block", "block2d"])
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2], ids=str)
@settings(deadline=None, max_examples=30)
@given(x=_matrix(max_rows=5, columns=21))
def test_fp8_scales_that_are_powers_of_two(dtype: torch.dtype, granularity: str, x: np.ndarray[Any, Any]) -> None:
    """Asserts, in exact arithmetic, that each scale is the smallest power of two at which nothing saturates. Packed scales must
    have the same bytes, padded with zeros."""
    values = torch.from_numpy(x)
    q, scale = quantize_fp8(values, granularity, 4, dtype, torch.uint8)
    for index, group in _groups(x.shape, granularity, 4):  # type: ignore[arg-type]
        amax, exponent = Fraction(float(np.abs(x[group]).max())), int(scale[index]) - 127
        largest = int(FP8_MAX[dtype])
        assert amax <= largest * Fraction(2) ** exponent
        assert exponent == -127 or amax > largest * Fraction(2) ** (exponent - 1)
        scaled = torch.from_numpy(x[group]).double() * 2.0**-exponent
        assert _bytes(q[group]) == _bytes(encode_fp8(scaled.float(), dtype))
    same, packed = quantize_fp8(values, granularity, 4, dtype, torch.int32)
    assert _bytes(same) == _bytes(q)
    stored = packed.view(torch.uint8)
    assert torch.equal(stored[..., : scale.shape[-1]], scale)
    assert not stored[..., scale.shape[-1] :].any()
    wanted = dequantize_fp8(q, e8m0_to_float(scale), torch.float32, 4)
    for form in (scale, packed):
        assert torch.equal(dequantize_fp8(q, form, torch.float32, 4), wanted)


def test_powers_of_two_of_blocks_that_are_not_finite() -> None:
    x = torch.tensor([[1.0, float("nan"), 448.0, -0.0, 0.0, float("-inf"), 1e-45, 0.0, 449.0, -1.0]])
    q, scale = quantize_fp8(x, "block", 2, scale_dtype=torch.uint8)
    assert scale.tolist() == [[255, 127, 255, 0, 128]]
    assert _bytes(q) == [0, 0, 0x7E, 0x80, 0, 0, 0, 0, 0x76, 0xB0]


@settings(deadline=None)
@given(x=_matrix())
def test_fp8_round_trip_is_within_half_a_step(x: np.ndarray[Any, Any]) -> None:
    values = torch.from_numpy(x)
    for granularity in ("tensor", "token", "block", "block2d"):
        q, scale = quantize_fp8(values, granularity, 16)
        back = dequantize_fp8(q, scale, torch.float32, block_size=16)
        each = {"tensor": 1, "token": 1, "block": 16, "block2d": 16}[granularity]
        wide = scale.expand(len(x), 1) if granularity in ("tensor", "token") else scale.repeat_interleave(each, 1)[:, :48]
        wide = wide.repeat_interleave(16, 0)[: len(x)] if granularity == "block2d" else wide
        # The bound is half of e4m3's relative step 2^-3, or half of its smallest value 2^-9, plus a margin for the float32
        # operations.
        assert ((back - values).abs() <= values.abs() * (2**-4 + 2**-20) + wide * 2**-10 * (1 + 2**-20)).all()


@settings(deadline=None)
@given(x=_matrix(), power=st.integers(-40, 40))
def test_fp8_codes_do_not_change_with_a_power_of_two(x: np.ndarray[Any, Any], power: int) -> None:
    values = torch.from_numpy(x)
    values = torch.where(values.abs() < 1e-12, 0.0, values)  # no scale reaches its lower bound, and nothing is subnormal
    (q, scale), (same, scaled) = quantize_fp8(values), quantize_fp8(values * 2.0**power)
    assert _bytes(q) == _bytes(same)
    filled = values.abs().amax(-1) > 0
    assert torch.equal(scaled[filled], scale[filled] * 2.0**power)


@settings(deadline=None)
@given(codes=arrays(np.uint8, (2, 32), elements=st.integers(0, 255).filter(lambda c: c & 0x7F != 0x7F)), power=st.integers(-60, 60))
def test_representable_fp8_values_round_trip(codes: np.ndarray[Any, Any], power: int) -> None:
    codes[:, 0] = 0x7E  # the first value of each row is 448, so the scale is 2^power
    q = torch.from_numpy(codes).view(E4M3)
    again, scale = quantize_fp8(q.float() * 2.0**power)
    assert scale.flatten().tolist() == [2.0**power] * 2
    assert _bytes(again) == _bytes(q)


def test_quantize_fp8_of_zero_tiny_and_nonfinite_rows() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[0.0, -0.0, 0.0], [1e-45, -1e-39, 2.0**-127], [nan, 1.0, 2.0], [inf, 1.0, -inf], [inf, nan, 1.0]])
    q, scale = quantize_fp8(x)
    smallest = 2.0**-126
    assert scale[:2].flatten().tolist() == [smallest, smallest]
    assert _bytes(q[0]) == [0, 0x80, 0]
    assert torch.equal(q[1].float(), encode_fp8(x[1] / smallest).float())
    assert q[1, 2].float().item() == 0.5
    assert scale[2].isnan().all()
    assert _bytes(q[2]) == [0x7F] * 3
    assert scale[3].item() == inf
    assert _bytes(q[3]) == [0x7F, 0, 0x7F]
    assert scale[4].isnan().all()
    assert _bytes(q[4]) == [0x7F] * 3


@pytest.mark.parametrize(
    ("granularity", "shape", "expected"),
    [
        ("tensor", (2, 0, 5), (1,)),
        ("token", (2, 0), (2, 1)),
        ("token", (0, 7), (0, 1)),
        ("block", (3, 0), (3, 0)),
        ("block", (2, 3, 129), (2, 3, 2)),
        ("block2d", (2, 129, 5), (2, 2, 1)),
        ("block2d", (0, 5), (0, 1)),
    ],
)
def test_scales_have_a_shape_also_where_there_are_no_elements(
    granularity: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    q, scale = quantize_fp8(torch.zeros(shape), granularity)
    assert (q.shape, scale.shape) == (shape, expected)
    assert (scale == 2.0**-126).all()
    assert scale.is_contiguous()


@pytest.mark.parametrize("scale_shape", [(), (1,), (2, 3, 1), (8,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_quantize_fp8_with_scale_divides_then_rounds(scale_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(2, 3, 8, generator=generator) * 20).to(dtype)
    scale = torch.rand(scale_shape, generator=generator) * 0.2 + 0.01
    quotient = x.float().numpy() / scale.numpy()
    assert quotient.dtype == np.float32
    assert _bytes(quantize_fp8_with_scale(x, scale)) == _bytes(encode_fp8(torch.from_numpy(quotient)))


def test_dynamic_and_static_scales_agree() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2), dtype=torch.bfloat16)
    for granularity in ("tensor", "token"):
        q, scale = quantize_fp8(x, granularity)
        assert _bytes(quantize_fp8_with_scale(x, scale)) == _bytes(q)


def test_dequantize_fp8_multiplies_in_float32_and_rounds_once() -> None:
    q = torch.arange(256, dtype=torch.uint8).view(E4M3).reshape(2, 128)
    scale = torch.tensor([[0.1], [3.0]])
    exact = q.float().numpy() * scale.numpy()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = dequantize_fp8(q, scale, dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got, torch.from_numpy(exact).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_dequantize_fp8_tells_layouts_by_shape() -> None:
    q = torch.ones(3, 4).to(E4M3)
    token, channel = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    tiles = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert dequantize_fp8(q, token)[:, 0].tolist() == [1, 2, 3]
    assert dequantize_fp8(q, channel)[0].tolist() == [1, 2, 3, 4]
    assert dequantize_fp8(q, tiles, block_size=2).tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4]]
    assert dequantize_fp8(q, torch.cat((tiles, tiles[:1])), block_size=2).tolist() == [[1, 1, 2, 2], [3, 3, 4, 4], [1, 1, 2, 2]]


@settings(deadline=None)
@given(x=_matrix(), global_scale=st.floats(2.0**-20, 10.0, width=32))
def test_quantize_nvfp4_is_its_formula_in_every_bit(x: np.ndarray[Any, Any], global_scale: float) -> None:
    factor = np.float32(global_scale)
    packed, scale = quantize_nvfp4(torch.from_numpy(x), torch.tensor(factor))
    blocks = x.reshape(len(x), 3, 16)
    wanted = (np.abs(blocks).max(-1) / np.float32(6)) / factor
    assert wanted.dtype == np.float32
    expected = encode_fp8(torch.from_numpy(wanted))
    assert _bytes(scale) == _bytes(expected)
    step = expected.float().numpy()[..., None] * factor
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(step > 0, blocks / step, np.float32(0))
    assert _bytes(packed) == _bytes(encode_e2m1(torch.from_numpy(quotient.reshape(len(x), 48))))
    back = dequantize_nvfp4(packed, scale, torch.tensor([factor]), torch.float32)
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    nibbles = np.stack((packed.numpy() & 15, packed.numpy() >> 4), -1).reshape(len(x), 3, 16)
    decoded = codes[nibbles & 7] * np.where(nibbles & 8, np.float32(-1), np.float32(1)) * step
    assert np.array_equal(back.numpy(), decoded.reshape(len(x), 48))


@settings(deadline=None)
@given(x=_matrix())
def test_nvfp4_round_trip_is_within_its_steps(x: np.ndarray[Any, Any]) -> None:
    values = torch.from_numpy(x)
    global_scale = (values.abs().max() / (448 * 6)).clamp(min=1e-6)
    packed, scale = quantize_nvfp4(values, global_scale)
    back = dequantize_nvfp4(packed, scale, global_scale, torch.float32)
    amax = values.abs().reshape(len(x), 3, 16).amax(-1).repeat_interleave(16, -1)
    # The bound adds two errors. Half of e2m1's widest step is 1/6 of the block's amax. The relative error of the scale is at most
    # 2^-4, or its error is half of e4m3's smallest value.
    assert ((back - values).abs() <= amax * (1 / 6 + 2**-4 + 0.02) + 6 * global_scale * 2**-10).all()


def test_nvfp4_blocks_that_are_nonfinite_zero_or_tiny() -> None:
    x = torch.ones(5, 16)
    x[0, 3], x[1, 5], x[2], x[3] = float("nan"), float("inf"), -0.0, 1e-9
    packed, scale = quantize_nvfp4(x, torch.ones(1))
    assert _bytes(scale)[:4] == [0x7F, 0x7F, 0, 0]
    assert not packed[:4].any()
    back = dequantize_nvfp4(packed, scale, torch.ones(1))
    assert back[:2].isnan().all()
    assert not back[2:4].any()
    assert (back[4] - 1).abs().max() < 0.07


@pytest.mark.parametrize("shape", [(2, 32), (16,)])
def test_nvfp4_of_all_zeros_by_the_recipe_is_zeros(shape: tuple[int, ...]) -> None:
    for x in (torch.zeros(shape), -torch.zeros(shape, dtype=torch.bfloat16)):
        global_scale = (x.abs().amax() / (448 * 6)).float()
        packed, scale = quantize_nvfp4(x, global_scale)
        assert not scale.view(torch.uint8).any()
        assert not dequantize_nvfp4(packed, scale, global_scale).any()


def test_nvfp4_with_a_global_scale_of_zero_decodes_to_zeros() -> None:
    x = torch.tensor([[0.0] * 16, [1e-45] * 16, [3.0] * 16])  # with global_scale 1, the second row's scale would round to 0
    packed, scale = quantize_nvfp4(x, torch.zeros(1))
    assert not dequantize_nvfp4(packed, scale, torch.zeros(1)).any()


def test_mx_operators_on_half_precision_equal_float32() -> None:
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(3))
    for dtype in (torch.float16, torch.bfloat16):
        for quantize in (quantize_mxfp4, quantize_mxfp8):
            (q, scale), (same, same_scale) = quantize(x.to(dtype)), quantize(x.to(dtype).float())
            assert _bytes(q) == _bytes(same)
            assert torch.equal(scale, same_scale)


def test_operators_take_tensors_that_are_not_contiguous() -> None:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(4)).t()
    one = torch.ones(1)
    pairs: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (quantize_mxfp4, dequantize_mxfp4),
        (quantize_mxfp8, dequantize_mxfp8),
        (quantize_fp8, dequantize_fp8),
        (lambda x: quantize_fp8(x, "block2d", 16), lambda q, s: dequantize_fp8(q, s, block_size=16)),
        (lambda x: (quantize_fp8_with_scale(x, one), one), dequantize_fp8),
        (lambda x: quantize_nvfp4(x, one), lambda q, s: dequantize_nvfp4(q, s, one)),
    ]
    for quantize, dequantize in pairs:
        expected = quantize(x.contiguous())
        for got, wanted in zip(quantize(x), expected, strict=True):
            assert _bytes(got) == _bytes(wanted)
            assert got.is_contiguous()
        back = dequantize(*(t.t().contiguous().t() if t.ndim == 2 else t for t in expected))
        assert torch.equal(back, dequantize(*expected))
        assert back.is_contiguous()


@pytest.mark.parametrize(("op", "case"), CASES)
def test_outputs_are_as_declared_and_written_to_out(op: Any, case: Any) -> None:
    arguments = case.build()
    before = {name: v.clone() for name, v in arguments.items() if isinstance(v, torch.Tensor)}
    results = op.function(**arguments)
    expected = op.fake_outputs(op.complete(arguments))
    results, expected = (r if isinstance(r, tuple) else (r,) for r in (results, expected))
    assert [(t.shape, t.dtype) for t in results] == [(t.shape, t.dtype) for t in expected]
    names = op.outputs_of(op.complete(arguments))
    outs = {name: torch.empty_like(t) for name, t in zip(names, expected, strict=True)}
    written = op.function(**arguments, **outs)
    for got, out, result in zip(written if isinstance(written, tuple) else (written,), outs.values(), results, strict=True):
        assert got is out
        torch.testing.assert_close(out.float(), result.float(), rtol=0, atol=0, equal_nan=True)
    for name, value in before.items():
        assert _bytes(arguments[name]) == _bytes(value)


def _opcheck_cases() -> list[Any]:
    wanted = {"per token, gpt-oss-120b decode 8", "tiles of 128 x 128, short at both ends", "kv cache scale []"}
    wanted |= {"gpt-oss-120b decode 8", "per token to float16", "no tokens"}
    return [p for p in CASES if p.values[1].name in wanted]  # type: ignore[union-attr]


@pytest.mark.parametrize(("op", "case"), _opcheck_cases())
def test_custom_operators_pass_opcheck(op: Any, case: Any, opcheck: Any) -> None:
    opcheck(op.function, op.complete(case.build()))


def test_a_compiled_function_gives_the_same_bits() -> None:
    def roundtrips(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        block = dequantize_fp8(*quantize_fp8(x, "block"), torch.float32)
        static = dequantize_fp8(quantize_fp8_with_scale(x, global_scale), global_scale)
        mx = dequantize_mxfp8(*quantize_mxfp8(x)), dequantize_mxfp4(*quantize_mxfp4(x), torch.float16)
        packed, scale = quantize_nvfp4(x, global_scale)
        return block, static, *mx, dequantize_nvfp4(packed, scale, global_scale)

    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(5), dtype=torch.bfloat16)
    compiled = torch.compile(roundtrips, fullgraph=True, dynamic=True)
    for got, expected in zip(compiled(x, torch.tensor([0.01])), roundtrips(x, torch.tensor([0.01])), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_requests_state_formats_and_traits() -> None:
    def request(function: Any, **arguments: Any) -> Any:
        return function.operator.request(function.operator.complete(arguments))

    q, x = torch.ones(3, 64).to(E4M3), torch.ones(3, 64)
    layouts = {"tensor": torch.ones(1), "token": torch.ones(3, 1), "channel": torch.ones(64)}
    for name, scale in layouts.items():
        assert request(dequantize_fp8, q=q, scale=scale).signature.format_for("q") == fp8_format(E4M3, name)
        static = request(quantize_fp8_with_scale, x=x, scale=scale)
        assert static.traits == {"k": 64, "granularity": name, "dtype": "float8_e4m3fn"}
    blocks = request(dequantize_fp8, q=q, scale=torch.ones(3, 4), block_size=16).signature
    assert blocks.format_for("q") == fp8_format(E4M3, "block", (1, 16))
    tiles = request(dequantize_fp8, q=q, scale=torch.ones(2, 32), block_size=2).signature
    assert tiles.format_for("q") == fp8_format(E4M3, "block", (2, 2))
    dynamic = request(quantize_fp8, x=x, granularity="block", block_size=32)
    stated = {"k": 64, "granularity": "block", "dtype": "float8_e4m3fn", "block_size": 32}
    assert dynamic.traits == {**stated, "scales_e8m0": False, "scales_packed": False}
    powers = request(quantize_fp8, x=x, granularity="block", block_size=32, scale_dtype=torch.uint8)
    assert powers.traits == {**stated, "scales_e8m0": True, "scales_packed": False}
    read = request(dequantize_fp8, q=q, scale=torch.ones(3, 1, dtype=torch.int32), block_size=16).signature
    assert read.format_for("q") == fp8_format(E4M3, "block", (1, 16), torch.int32)
    packed = {"q": torch.zeros(3, 32, dtype=torch.uint8), "scale": torch.zeros(3, 2, dtype=torch.uint8)}
    assert request(dequantize_mxfp4, **packed).signature.format_for("q") == mxfp4_format()
    assert request(dequantize_mxfp4, **packed).traits == {"k": 64, "out_dtype": "bfloat16"}
    assert request(dequantize_mxfp8, q=q, scale=packed["scale"]).signature.format_for("q") == mxfp8_format()
    packed = {"q": packed["q"], "scale": torch.ones(3, 4).to(E4M3), "global_scale": torch.ones(1)}
    assert request(dequantize_nvfp4, **packed).signature.format_for("q") == nvfp4_format()


_X, _Q, _U8 = torch.ones(2, 64), torch.ones(2, 64).to(E4M3), torch.zeros(2, 32, dtype=torch.uint8)
_BYTES = torch.zeros(2, 2, dtype=torch.uint8)
_EIGHTS = torch.ones(2, 4).to(E4M3)
_ONE = torch.ones(1)
MALFORMED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: quantize_fp8(_X.double()), TypeError, "x must be a tensor of bfloat16 or float16 or float32, got float64"),
    (lambda: quantize_fp8(torch.tensor(1.0)), ValueError, "x must be of shape"),
    (lambda: quantize_fp8(_X, "row"), ValueError, "granularity must be one of 'tensor', 'token', 'block', 'block2d', got '?row"),
    (lambda: quantize_fp8(_X, "block", 0), ValueError, "block_size must be at least 1, got 0"),
    (lambda: quantize_fp8(_X[0], "block2d"), ValueError, "x must be of shape"),
    (lambda: quantize_fp8(_X, dtype=torch.int8), ValueError, "dtype must be one of"),
    (lambda: quantize_fp8(_X, out=_X), TypeError, "out must be float8_e4m3fn"),
    (lambda: quantize_fp8(_X, scale_out=torch.ones(2)), ValueError, r"scale_out must have shape \[2, 1\]"),
    (lambda: quantize_fp8_with_scale(_X, torch.ones(3)), ValueError, r"scale must be of shape .* \[64\] \(channel\), got"),
    (lambda: quantize_fp8_with_scale(_X, torch.ones(1, 1)), ValueError, r"scale must be of shape"),
    (lambda: quantize_fp8_with_scale(_X, _ONE.double()), TypeError, "scale must be a tensor of float32, got float64"),
    (lambda: quantize_fp8_with_scale(_X, 1.0), TypeError, "scale must be a tensor"),
    (lambda: quantize_fp8_with_scale(_X, _ONE, torch.float16), ValueError, "dtype must be one of"),
    (lambda: dequantize_fp8(_X, _ONE), TypeError, "q must be a tensor of float8"),
    (lambda: dequantize_fp8(_Q, torch.ones(5)), ValueError, "scale must be of shape"),
    (lambda: dequantize_fp8(_Q, _ONE, torch.float64), ValueError, "out_dtype must be one of"),
    (lambda: dequantize_fp8(_Q, _ONE, block_size=0), ValueError, "block_size must be at least 1"),
    (lambda: quantize_mxfp8(_X[:, :48]), ValueError, "x must be of shape .* multiple of 32, got .*48"),
    (lambda: quantize_mxfp4(_X[:, :48]), ValueError, "x must be of shape .* multiple of 32"),
    (lambda: quantize_mxfp4(_X.int()), TypeError, "x must be a tensor of"),
    (lambda: quantize_mxfp4(_X, out=_BYTES), ValueError, r"out must have shape \[2, 32\]"),
    (lambda: dequantize_mxfp8(_Q, _U8), ValueError, r"scale must be of shape \[2, 2\]"),
    (lambda: dequantize_mxfp8(_Q, _BYTES.float()), TypeError, "scale must be a tensor of uint8"),
    (lambda: dequantize_mxfp8(_Q[:, :40], _BYTES), ValueError, "q must be of shape"),
    (lambda: dequantize_mxfp8(_Q.float().to(torch.float8_e4m3fnuz), _BYTES), TypeError, "q must be a tensor of"),
    (lambda: dequantize_mxfp4(_Q, _BYTES), TypeError, "q must be a tensor of uint8"),
    (lambda: dequantize_mxfp4(_U8, _BYTES[:1]), ValueError, r"scale must be of shape \[2, 2\]"),
    (lambda: dequantize_mxfp4(_U8, _BYTES, torch.int32), ValueError, "out_dtype must be one of"),
    (lambda: quantize_nvfp4(_X[:, :40], _ONE), ValueError, "x must be of shape .* multiple of 16"),
    (lambda: quantize_nvfp4(_X, torch.ones(2)), ValueError, r"global_scale must be of shape \[\] or \[1\]"),
    (lambda: quantize_nvfp4(_X, _ONE.half()), TypeError, "global_scale must be a tensor of float32"),
    (lambda: dequantize_nvfp4(_U8, _BYTES, _ONE), TypeError, "scale must be a tensor of float8_e4m3fn"),
    (lambda: dequantize_nvfp4(_U8, _EIGHTS[:, :2], _ONE), ValueError, r"scale must be of shape \[2, 4\]"),
    (lambda: dequantize_nvfp4(_U8[:, :4], _EIGHTS, _ONE), ValueError, "q must be of shape"),
    (lambda: dequantize_nvfp4(_U8, _EIGHTS, torch.ones(1, 1)), ValueError, "global_scale must be of shape"),
]


@pytest.mark.parametrize(("call", "error", "message"), MALFORMED)
def test_malformed_calls(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("granularity", ["block", "block2d"])
def test_a_block_may_be_longer_than_a_row(granularity: str) -> None:
    """Asserts that a block of 2^31 elements acts like a block as long as the row. The operator must not allocate memory for a whole
    block."""
    x = torch.randn(3, 40)
    codes, scale = quantize_fp8(x, granularity, 2**31)
    wanted_codes, wanted_scale = quantize_fp8(x, granularity, 40)
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(dequantize_fp8(codes, scale, torch.float32, 2**31), dequantize_fp8(codes, scale, torch.float32, 40))


@pytest.mark.parametrize("shape", [(1, 1), (33, 5), (128, 4), (300, 9), (2, 3, 130, 6)], ids=str)
def test_scales_are_stored_at_the_documented_offsets(shape: tuple[int, ...]) -> None:
    scale = torch.randint(1, 255, shape, dtype=torch.uint8)
    swizzled = swizzle_scales(scale)
    *lead, rows, columns = shape
    across = -(-columns // 4)
    assert swizzled.shape == (*lead, -(-rows // 128), across, 32, 4, 4)
    flat = swizzled.reshape(*lead, -1)
    for i in range(rows):
        for j in range(columns):
            at = ((i // 128) * across + j // 4) * 512 + (i % 32) * 16 + (i // 32 % 4) * 4 + j % 4
            assert torch.equal(flat[..., at], scale[..., i, j])
    assert int((swizzled != 0).sum()) == scale.numel(), "what completes the tiles is 0"
    assert torch.equal(unswizzle_scales(swizzled, rows, columns), scale)


@pytest.mark.parametrize(
    "quantize", [quantize_mxfp8, quantize_mxfp4, lambda x, **options: quantize_nvfp4(x, torch.tensor(0.01), **options)]
)
@pytest.mark.parametrize("shape", [(3, 64), (2, 130, 96), (0, 32), (5, 0)], ids=str)
def test_quantised_scales_in_tiles(quantize: Callable[..., Any], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    (q, scale), (same, tiles) = quantize(x), quantize(x, scale_layout="128x4")
    assert torch.equal(q.view(torch.uint8), same.view(torch.uint8))
    assert torch.equal(tiles.view(torch.uint8), swizzle_scales(scale).view(torch.uint8))

"""Tests comparison, tolerances, and verification. Each kernel with a fault must fail, with a message that names the fault."""

from __future__ import annotations

import json
import math
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed_kernel.workbench.numerics import (
    EXACT,
    CaseResult,
    Status,
    Tolerance,
    compare,
    compare_tensors,
    tolerance_for,
    verify_kernel,
)
from tokenspeed_kernel.workbench.numerics.compare import compare_results, same_bits
from tokenspeed_kernel.workbench.numerics.places import describe_places
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.quantization.encodings import encode_mxfp8
from tokenspeed_kernel_base.ops.quantization.value import Quantization
from tokenspeed_kernel_base.platform import CapabilityRequirement, named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import Request
from tokenspeed_kernel_base.signature import FormatSignature, ScaleFormat, TensorFormat, dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import KernelSpec

LOOSE = Tolerance(0.01, 0.0, 1.0, "a hundredth of each value")
NAN, INF = math.nan, math.inf


def one(got: list[Any], expected: list[Any], tolerance: Tolerance = LOOSE, dtype: torch.dtype = torch.float32) -> Any:
    return compare_tensors("output", torch.tensor(got, dtype=dtype), torch.tensor(expected, dtype=dtype), tolerance)


# -- comparing ----------------------------------------------------------------------------------------------------------------


def test_equal_tensors_differ_in_nothing() -> None:
    outcome = one([1.0, -2.0, 0.0], [1.0, -2.0, 0.0])
    assert outcome.passed
    assert (outcome.max_abs_error, outcome.relative_error, outcome.beyond, outcome.worst) == (0.0, 0.0, 0.0, None)


def test_what_is_reported_of_a_difference() -> None:
    got, expected = torch.zeros(3, 4), torch.zeros(3, 4)
    expected[0, 0], got[0, 0] = 4.0, 4.01
    expected[2, 1], got[2, 1] = 3.0, 3.5
    outcome = compare_tensors("output", got, expected, LOOSE)
    assert not outcome.passed
    assert outcome.fault == "1 of 12 elements beyond tolerance, worst at [2, 1]: got 3.5, expected 3"
    assert outcome.worst.index == (2, 1)
    assert outcome.max_abs_error == pytest.approx(0.5)
    assert outcome.relative_error == pytest.approx(math.hypot(0.5, 0.01) / 5, rel=1e-3)
    assert outcome.beyond == pytest.approx(1 / 12)


def test_the_worst_element_is_measured_by_its_own_tolerance() -> None:
    outcome = one([1000.0, 1.0], [1005.0, 1.009])
    assert outcome.passed
    assert outcome.max_abs_error == pytest.approx(5.0)
    assert outcome.worst.index == (1,)


def test_absolute_tolerance_goes_by_the_root_mean_square() -> None:
    by_size = Tolerance(0.0, 0.1, 1.0, "")
    assert one([3.0, 0.2], [3.0, 0.0], by_size).passed
    assert not one([0.3, 0.2], [0.3, 0.0], by_size).passed


def test_zeros_must_be_zeros() -> None:
    assert one([0.0, 0.0], [0.0, -0.0]).passed
    assert not one([0.0, 1e-30], [0.0, 0.0], Tolerance(0.1, 0.1, 1.0, "")).passed


def test_many_small_errors_that_lean_one_way_are_seen() -> None:
    expected = torch.ones(1000)
    tolerance = Tolerance(0.01, 0.0, 0.002, "")
    outcome = compare_tensors("output", expected * 1.005, expected, tolerance)
    assert outcome.beyond == 0
    assert "each element is within tolerance, but together they are not" in outcome.fault
    assert compare_tensors("output", expected[:10] * 1.005, expected[:10], tolerance).passed


@pytest.mark.parametrize(
    ("got", "expected", "passes"),
    [
        (NAN, NAN, True), (INF, INF, True), (-INF, -INF, True),
        (NAN, 1.0, False), (1.0, NAN, False), (INF, 1.0, False), (1.0, INF, False),
        (INF, -INF, False), (NAN, INF, False), (INF, NAN, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tolerance", [LOOSE, EXACT], ids=["loose", "exact"])
def test_nan_and_infinity_are_where_they_belong(got: float, expected: float, passes: bool, tolerance: Tolerance) -> None:
    outcome = one([1.0, got, 2.0], [1.0, expected, 2.0], tolerance)
    assert outcome.passed is passes
    if not passes:
        assert outcome.worst.index == (1,)
        assert outcome.max_abs_error == outcome.relative_error == INF
        assert "NaN" in outcome.fault


def test_nan_in_the_result_is_counted() -> None:
    assert "2 of 3 elements beyond tolerance (2 NaN where the reference has none)" in one([NAN, NAN, 1.0], [1.0, 1.0, 1.0]).fault


def test_elements_around_an_expected_nan_are_compared() -> None:
    assert one([NAN, 2.0], [NAN, 1.0]).worst.index == (1,)


def test_exact_means_every_bit() -> None:
    assert not one([0.0], [-0.0], EXACT).passed
    assert one([NAN], [-NAN], EXACT).passed
    assert not one([1.0], [math.nextafter(1.0, 2.0)], EXACT, torch.float64).passed
    assert one([2**62], [2**62], EXACT, torch.int64).passed
    off = one([5, 2**62 + 1], [5, 2**62], EXACT, torch.int64)
    assert "1 of 2 elements differ, worst at [1]" in off.fault
    assert (off.worst.got, off.worst.expected) == (2**62 + 1, 2**62)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.bool, torch.bfloat16])
def test_narrow_dtypes_compare(dtype: torch.dtype) -> None:
    expected = torch.tensor([0, 1, 1, 0]).to(dtype)
    got = expected.clone()
    got[2] = torch.tensor(0).to(dtype)
    assert compare_tensors("output", expected.clone(), expected, EXACT).passed
    assert compare_tensors("output", got, expected, EXACT).worst.index == (2,)
    assert compare_tensors("output", got, expected, LOOSE).worst.index == (2,)


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (torch.zeros(3), "is a float32 tensor of shape [3] on cpu, expected a float32 tensor of shape [2] on cpu"),
        (torch.zeros(2, dtype=torch.float64), "is a float64 tensor"),
        (torch.zeros(2, device="meta"), "on meta, expected"),
        (None, "is None, expected"),
    ],
)
def test_a_tensor_of_another_kind(got: Any, said: str) -> None:
    assert said in compare_tensors("output", got, torch.zeros(2), LOOSE).fault


def test_results_of_several_outputs() -> None:
    a, b = torch.ones(2), torch.tensor([1, 2])
    assert [c.name for c in compare((a, b), (a, b))] == ["output 0", "output 1"]
    assert all(c.passed for c in compare((a, b), (a, b)))
    assert compare(None, None) == []
    wrong = compare((a, b + 1), (a, b))
    assert [c.passed for c in wrong] == [True, False]
    assert compare(a, (a, b))[0].fault == "the result is one tensor, expected 2 tensors"
    assert compare(None, a)[0].fault == "the result is None, expected one tensor"
    assert "expected one tensor" in compare([a], a)[0].fault


def test_scalars_and_empty_tensors() -> None:
    assert compare(torch.tensor(1.0), torch.tensor(1.0))[0].passed
    assert compare(torch.tensor(2.0), torch.tensor(1.0))[0].worst.index == ()
    assert compare(torch.empty(0, 3), torch.empty(0, 3))[0].passed
    assert not compare(torch.empty(0, 4), torch.empty(0, 3))[0].passed


def test_views_compare_by_their_elements() -> None:
    base = torch.randn(6, 8)
    assert compare(base.t(), base.t().contiguous())[0].passed
    assert same_bits(base.t()[::2], base.t()[::2].contiguous())


def test_tensors_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tokenspeed_kernel.workbench.numerics.compare"], "_CHUNK", 7)
    expected = torch.randn(5, 9)
    got = expected.clone()
    got[4, 2] += 1
    outcome = compare_tensors("output", got, expected, LOOSE)
    assert outcome.worst.index == (4, 2)
    assert outcome.beyond == pytest.approx(1 / 45)
    assert outcome.relative_error == pytest.approx(float((got - expected).norm() / expected.norm()), rel=1e-5)


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=20))
def test_comparison_agrees_with_one_element_at_a_time(pairs: list[tuple[float, float]]) -> None:
    got, expected = (torch.tensor(values, dtype=torch.float32) for values in zip(*pairs, strict=True))
    outcome = compare_tensors("output", got, expected, LOOSE)

    def fits(g: float, e: float) -> bool:
        if math.isfinite(g) and math.isfinite(e):
            return abs(g - e) <= 0.01 * abs(e)
        return g == e or (math.isnan(g) and math.isnan(e))

    misfits = [i for i, (g, e) in enumerate(zip(got.tolist(), expected.tolist(), strict=True)) if not fits(g, e)]
    assert outcome.beyond == pytest.approx(len(misfits) / len(pairs))
    assert outcome.passed is (not misfits)
    if misfits:
        assert outcome.worst.index[0] in misfits


def test_a_comparison_as_json_has_only_finite_numbers() -> None:
    text = json.dumps(one([NAN], [1.0]).to_dict(), allow_nan=False)
    assert json.loads(text)["worst"] == {"index": [0], "got": "nan", "expected": 1.0}


def test_the_angle_between_two_results() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert compare_tensors("output", expected * 2, expected, LOOSE).cosine == pytest.approx(1.0)
    assert compare_tensors("output", -expected, expected, LOOSE).cosine == pytest.approx(-1.0)
    assert compare_tensors("output", torch.tensor([-4.0, 3.0]), expected, LOOSE).cosine == pytest.approx(0.0)
    assert compare_tensors("output", torch.zeros(2), expected, LOOSE).cosine == 0.0
    assert compare_tensors("output", torch.tensor([3.0, NAN]), expected, LOOSE).cosine == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_differences_are_counted_in_units_in_the_last_place(dtype: torch.dtype) -> None:
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    expected = torch.tensor([1.0, -1.0, 2.0, 0.5, 1.5, 3.0, -0.0, 1.0, NAN, INF, 1.0]).to(dtype)
    got = expected.clone()
    bits = got.view(integers)
    for place, steps in ((1, 1), (2, -1), (3, 2), (4, 3), (5, 4), (7, 5)):  # below 2, the step is half as large
        bits[place] += steps
    got[6], got[10] = 0.0, NAN
    outcome = compare_tensors("output", got, expected, Tolerance(1, 1, 1, ""))
    assert dict(outcome.ulps) == {"0": 4, "1": 2, "2": 1, "3-4": 2, "5-8": 1, "not finite": 1}


def test_units_in_the_last_place_across_zero_and_of_narrow_formats() -> None:
    tiny = torch.tensor(2.0**-149)
    assert compare_tensors("output", -tiny, tiny, LOOSE).ulps == (("2", 1),)
    assert compare_tensors("output", torch.tensor([-1.0]), torch.tensor([1.0]), LOOSE).ulps == ((">1048576", 1),)
    wide = torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64)
    assert compare_tensors("output", wide.flip(0), wide, LOOSE).ulps == ((">1048576", 2),)
    codes = torch.tensor([0x38, 0x38, 0xB8, 0x00], dtype=torch.uint8)
    moved = torch.tensor([0x39, 0x36, 0xB9, 0x80], dtype=torch.uint8)
    fp8 = torch.float8_e4m3fn
    assert dict(compare_tensors("output", moved.view(fp8), codes.view(fp8), LOOSE).ulps) == {"0": 1, "1": 2, "2": 1}
    assert compare_tensors("output", torch.tensor([3]), torch.tensor([1]), EXACT).ulps == (), "integers have none"


def test_several_of_the_worst_are_named_worst_first() -> None:
    expected = torch.ones(100)
    got = expected.clone()
    for place, error in ((7, 0.1), (50, 0.5), (99, 0.3), (3, 0.2), (12, 0.4), (60, 0.15)):
        got[place] += error
    assert [e.index for e in compare_tensors("output", got, expected, LOOSE).several] == [(50,), (12,), (99,), (3,), (60,)]
    got[50:] = 1.0
    assert len(compare_tensors("output", got, expected, LOOSE).several) == 3, "those that are beyond the tolerance"
    assert compare_tensors("output", expected.clone(), expected, LOOSE).several == ()


@pytest.mark.parametrize(
    ("shape", "index", "said"),
    [
        ((128, 8), (slice(64, None), slice(1, None, 2)), "all in [64:, 1::2] of [128, 8], all of it; axis 0 from a multiple of 64"),
        ((4, 6), (slice(None), slice(None)), "everywhere of [4, 6], all of it"),
        ((4, 6), (2, 3), "all in [2, 3] of [4, 6], all of it"),
        ((4, 6), (slice(None), -1), "all in [:, 5] of [4, 6], all of it"),
        ((100,), (slice(10, 30),), "all in [10:30] of [100], all of it"),
        ((100,), (slice(0, None, 10),), "all in [::10] of [100], all of it"),
        ((100,), (slice(32, 96),), "all in [32:96] of [100], all of it; axis 0 from a multiple of 32"),
        ((8,), ([1, 2, 7],), "all in [1:] of [8], 42% of it"),
        ((300,), ([0, 1, 299],), "everywhere of [300], 1% of it"),
        ((1000,), ([0, 1, 999],), "everywhere of [1000], under 1% of it"),
        ((1, 8), (0, slice(None)), "everywhere of [1, 8], all of it"),
        ((), (), "the only element"),
    ],
)  # fmt: skip
def test_where_the_faults_lie(shape: tuple[int, ...], index: Any, said: str) -> None:
    faulty = torch.zeros(shape, dtype=torch.bool)
    faulty[index] = True
    assert describe_places(faulty) == said
    expected = torch.ones(shape)
    assert compare_tensors("output", expected + faulty.float(), expected, LOOSE).places == said


def test_fault_positions_in_a_tensor_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tokenspeed_kernel.workbench.numerics.compare"], "_CHUNK", 16)
    expected = torch.ones(32, 8)
    got = expected.clone()
    got[24:, 2] = 0
    outcome = compare_tensors("output", got, expected, LOOSE)
    assert outcome.places == "all in [24:, 2] of [32, 8], all of it; axis 0 from a multiple of 8"
    assert len(outcome.several) == 5
    assert dict(outcome.ulps) == {"0": 248, ">1048576": 8}


VALUES = torch.linspace(-3, 5, 64)


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (VALUES * math.log2(math.e), "1.4427 times what is expected throughout (log2(e): a logarithm of base 2 instead of"),
        (VALUES * math.log(2), "0.69315 times what is expected throughout (ln(2)"),
        (-VALUES, "-1 times what is expected throughout (the sign is wrong)"),
        (VALUES * 2, "got is 2 times what is expected throughout"),
        (VALUES + 0.5, "got is what is expected + 0.5 throughout"),
        (VALUES - 0.5, "got is what is expected - 0.5 throughout"),
        (VALUES.roll(1), "got has the expected values at other positions"),
        (torch.zeros(64), "got is 0 throughout"),
        (torch.full((64,), NAN), "got is NaN throughout"),
    ],
)
def test_relations_between_a_wrong_result_and_the_right_one(got: Tensor, said: str) -> None:
    assert said in compare_tensors("output", got, VALUES, LOOSE).relation


def test_faults_without_a_simple_relation() -> None:
    torch.manual_seed(0)
    assert compare_tensors("output", torch.randn(64), VALUES, LOOSE).relation == ""
    one = VALUES.clone()
    one[3] = NAN
    assert compare_tensors("output", one, VALUES, LOOSE).relation == "", "what is left is right"
    assert compare_tensors("output", VALUES.clone(), VALUES, LOOSE).relation == ""


# -- tolerances ---------------------------------------------------------------------------------------------------------------

MXFP4 = TensorFormat(torch.uint8, "mxfp4", ScaleFormat(torch.uint8, "block", (1, 32)))


def request_with(traits: dict[str, Any] | None = None, **formats: TensorFormat) -> Request:
    return Request("f", "m", FormatSignature(tuple(formats.items())), named_platform("cpu"), traits or {})


def test_integers_and_exact_operators_are_exact() -> None:
    assert all(tolerance_for(dtype).exact for dtype in (torch.uint8, torch.int32, torch.int64, torch.bool))
    assert all(tolerance_for(dtype, exact=True).exact for dtype in (torch.float32, torch.float8_e4m3fn))
    fp8 = request_with(q=dense_tensor_format(torch.float8_e4m3fn))
    assert tolerance_for(torch.int32, fp8).exact


def test_wider_dtypes_are_held_to_more() -> None:
    order = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    relative = [tolerance_for(dtype).relative for dtype in order]
    assert relative == sorted(relative)
    assert len(set(relative)) == len(order)
    assert all(tolerance_for(dtype).reason for dtype in order)


def test_narrow_formats_loosen_it() -> None:
    dense = tolerance_for(torch.bfloat16, request_with(a=dense_tensor_format(torch.bfloat16)))
    assert dense == tolerance_for(torch.bfloat16)
    fp4 = tolerance_for(torch.bfloat16, request_with(a=dense_tensor_format(torch.bfloat16), b=MXFP4))
    fp8 = tolerance_for(torch.bfloat16, request_with(a=dense_tensor_format(torch.float8_e4m3fn)))
    inside = tolerance_for(torch.bfloat16, replace(request_with(b=MXFP4), intermediates=(MXFP4,)))
    assert dense.norm < fp4.norm < fp8.norm < inside.norm
    assert len({dense.reason, fp4.reason, fp8.reason, inside.reason}) == 4
    assert tolerance_for(torch.bfloat16, request_with({"layout": "fp8 and mxfp4"}, a=dense_tensor_format(torch.bfloat16))) == dense


def test_rounded_activations_loosen_it() -> None:
    """Intermediate formats that the operator declares must widen the tolerance, the more the coarser they are."""
    op = get_operator("moe_apply")
    cases = {case.name: op.request(op.complete(case.build())) for case in op.all_cases() if not case.large}
    plain, fp8, fp4 = (
        tolerance_for(torch.float16, cases[name])
        for name in ("dense float16, bias, concatenated", "dense, fp8 activations", "dense float16, mxfp4 activations")
    )
    assert plain == tolerance_for(torch.float16)
    assert plain.norm < fp8.norm < fp4.norm


def test_roundings_on_the_way_add_up_as_noise_does() -> None:
    """The error of a chain of GEMMs with rounded operands grows with the square root of the chain's length, and the tolerance must
    grow equally."""
    half = dense_tensor_format(torch.bfloat16)
    one, four = (tolerance_for(torch.bfloat16, replace(request_with(a=half), intermediates=(half,) * n)) for n in (1, 4))
    assert one == tolerance_for(torch.bfloat16)
    assert four.relative == one.relative
    assert four.absolute / one.absolute == four.norm / one.norm == pytest.approx(2.5**0.5)
    assert "4 intermediates" in four.reason
    # Results in float32 have the same tolerance.
    assert tolerance_for(torch.float32, replace(request_with(a=half), intermediates=(half,) * 4)) == four
    torch.manual_seed(0)
    exact = rounded = torch.randn(256, 128, dtype=torch.float64).bfloat16().double()
    for _ in range(4):
        factor = torch.linalg.qr(torch.randn(128, 128, dtype=torch.float64))[0].bfloat16().double()
        exact, rounded = exact @ factor, (rounded @ factor).bfloat16().double()
    compared = compare_tensors("output", rounded.bfloat16(), exact.bfloat16(), four)
    assert compared.passed
    assert float((rounded - exact).norm() / exact.norm()) > four.norm / 8


def test_quantised_results_are_compared_after_dequantisation() -> None:
    """Results whose inputs to quantisation differ in the last bit must pass, although quantised values and scales differ. Results
    of other values must fail."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    nearly = torch.where(torch.rand(x.shape, generator=generator) < 0.1, (x.view(torch.int16) + 1).view(torch.bfloat16), x)
    op = get_operator("rmsnorm_quantize")
    for quantization in (Quantization.mxfp8(), Quantization.nvfp4(torch.tensor(0.001))):
        arguments = op.complete({"x": x, "weight": torch.ones(256), "quantization": quantization})
        expected = op.reference(*arguments.values())
        codes, scale = op.reference(*{**arguments, "x": nearly}.values())
        assert not torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
        tolerance = partial(tolerance_for, request=op.request(arguments), exact=op.exact)
        compared = partial(compare_results, op, arguments, expected=expected, tolerance=tolerance)
        assert compared((codes, scale))[0].passed
        assert not compared((codes, scale), tolerance=EXACT)[0].passed
        assert not compared((codes.roll(1, 1), scale))[0].passed
        assert not compared((codes, scale.roll(1, 0)))[0].passed
        assert "of shape [63, " in compared((codes[1:], scale[1:]))[0].fault
    # The first block's amax saturates at its scale. The second block has the next larger scale.
    below, at = (encode_mxfp8(torch.full((1, 32), value)) for value in (510.0, 512.0))
    assert not torch.equal(below[1], at[1])
    arguments = op.complete({"x": torch.zeros(1, 32), "weight": torch.ones(32), "quantization": Quantization.mxfp8()})
    for got, wanted in ((below, at), (at, below)):
        assert compare_results(op, arguments, got, wanted, tolerance_for)[0].passed


def test_rounding_that_is_granted_passes_and_a_wrong_scale_does_not() -> None:
    """A GEMM whose partial sums are rounded to bfloat16 must pass. A GEMM in which the scale of one block of 32 is twice too large
    must fail."""
    torch.manual_seed(0)
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(512, 64).bfloat16()
    exact = a.float() @ b.float()
    tolerance = tolerance_for(torch.bfloat16, request_with(a=dense_tensor_format(torch.bfloat16), b=MXFP4))
    halves = (a[:, :256].float() @ b[:256].float()).bfloat16() + (a[:, 256:].float() @ b[256:].float()).bfloat16()
    assert compare_tensors("output", halves, exact.bfloat16(), tolerance).passed
    scaled = b.clone()
    scaled[:32] *= 2
    assert not compare_tensors("output", (a.float() @ scaled.float()).bfloat16(), exact.bfloat16(), tolerance).passed


# -- verifying ----------------------------------------------------------------------------------------------------------------

Declare = Callable[..., Any]
Impl = Callable[..., Any]


def _scale_body(x: Tensor, factor: float = 2.0, out: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
    return (x.float() * factor).to(x.dtype)


@pytest.fixture
def scale(declare: Declare) -> Any:
    function = declare(_scale_body, formats=("x",), traits={"size": int, "counted": bool})

    @function.traits
    def _(x: Tensor, counts: Tensor | None) -> dict[str, Any]:
        return {"size": x.shape[-1], "counted": counts is not None}

    @function.fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @function.cases
    def _() -> list[Case]:
        return [
            Case("eight", lambda draw: {"x": draw.normal(2, 4)}),
            Case("none", lambda draw: {"x": draw.normal(0, 4)}),
            Case("huge", lambda draw: {"x": draw.normal(64, 64)}, large=True),
        ]

    return function


def verify(function: Any, impl: Impl | str, *, name: str = "tried", **declaration: Any) -> list[CaseResult]:
    """Registers a kernel, verifies it, and returns the result."""
    op = function.operator
    spec = KernelSpec(name, op.family, op.mode, solution="tried", format_signatures=None, **declaration)
    KernelRegistry.get().register(spec, impl)
    return verify_kernel(spec, device="cpu")


def right(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    return torch.mul(x, factor, out=out)


def test_a_kernel_that_is_right_passes(scale: Any) -> None:
    results = verify(scale, right)
    assert [(r.case, r.status) for r in results] == [("eight", Status.PASSED), ("none", Status.PASSED)]
    assert [c.name for c in results[0].comparisons] == ["output", "out="]
    assert results[0].to_dict()["status"] == "passed"


def wrong_at_one(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
    made = right(x, factor, out, counts)
    made[1, 3] += 1
    return made


def nan_at_one(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
    made = right(x, factor, out, counts)
    made[0, 1] = NAN
    return made


def ignores_out(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
    return x * factor


def fills_out_and_returns_another(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
    made = x * factor
    if out is not None:
        out.copy_(made)
    return made


def returns_out_unwritten(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
    return x * factor if out is None else out


def writes_part_of_out(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
    if out is None:
        return x * factor
    out[:1] = x[:1] * factor
    return out


def changes_input(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
    made = right(x, factor, out, counts)
    x[0, 0] = 0
    return made


def returns_input(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
    x.mul_(factor)
    return x if out is None else out.copy_(x)


def wrong_shape(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
    return (x * factor).t()


def wrong_dtype(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
    return (x * factor).double()


def gives_nothing(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> None:
    return None


def gives_two(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    return right(x, factor, out, counts), x.clone()


def gives_a_list(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> list[Tensor]:
    return [right(x, factor, out, counts)]


WRONG: list[tuple[Impl, str]] = [
    (wrong_at_one, r"output: 1 of 8 elements beyond tolerance, worst at \[1, 3\]: got "),
    (nan_at_one, r"output: 1 of 8 elements beyond tolerance \(1 NaN where the reference has none\), worst at \[0, 1\]: got nan"),
    (ignores_out, "ignores out=: what it returns is not the tensor it was given"),
    (fills_out_and_returns_another, "ignores out=: what it returns is not the tensor it was given"),
    (returns_out_unwritten, "out=: 8 of 8 elements beyond tolerance"),
    (writes_part_of_out, r"out=: 4 of 8 elements beyond tolerance.*worst at \[1, "),
    (changes_input, "changes its input x"),
    (returns_input, "output 0 shares memory with x; changes its input x"),
    (wrong_shape, r"output: is a float32 tensor of shape \[4, 2\] on cpu, expected a float32 tensor of shape \[2, 4\] on cpu"),
    (wrong_dtype, "output: is a float64 tensor"),
    (gives_nothing, "result: the result is None, expected one tensor"),
    (gives_two, "result: the result is 2 tensors, expected one tensor"),
    (gives_a_list, "result: the result is a list, expected one tensor"),
]


@pytest.mark.parametrize(("impl", "said"), WRONG, ids=[impl.__name__ for impl, _ in WRONG])
def test_a_kernel_that_is_wrong_is_caught(scale: Any, impl: Impl, said: str) -> None:
    result = verify(scale, impl)[0]
    assert result.status is Status.FAILED
    assert re.search(said, result.reason), result.reason


def test_a_kernel_that_raises(scale: Any) -> None:
    def raises(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
        raise RuntimeError("out of registers")

    result = verify(scale, raises)[0]
    assert result.status is Status.ERROR
    assert result.reason == "running the kernel: RuntimeError: out of registers"
    assert "in raises" in result.traceback


def test_a_kernel_that_fails_only_when_given_out(scale: Any) -> None:
    def raises(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
        if out is not None:
            raise NotImplementedError("out")
        return x * factor

    assert verify(scale, raises)[0].reason == "running the kernel: NotImplementedError: out"


def test_a_kernel_that_says_it_is_deterministic_must_be(scale: Any) -> None:
    calls = iter(range(100))

    def drifts(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
        made = right(x, factor, out, counts)
        made *= 1 + 1e-6 * next(calls)
        return made

    assert verify(scale, drifts, name="silent")[0].status is Status.PASSED
    result = verify(scale, drifts, name="claiming", tags=frozenset({"determinism"}), priority=9)[0]
    assert result.status is Status.FAILED
    assert result.reason.startswith("is tagged determinism, but gives other bits the second time: ")


def test_determinism_can_be_checked_for_any_kernel(scale: Any) -> None:
    calls = iter(range(100))

    def drifts_later(x: Tensor, factor: float, out: Tensor | None, counts: Tensor | None) -> Tensor:
        made = right(x, factor, out, counts)
        made *= 1 + (1e-6 if next(calls) == 6 else 0)
        return made

    op = scale.operator
    spec = KernelSpec("late", op.family, op.mode, solution="tried", format_signatures=None)
    KernelRegistry.get().register(spec, drifts_later)
    case = op.all_cases()[:1]
    assert verify_kernel(spec, case, repeat=3)[0].status is Status.PASSED
    result = verify_kernel(spec, case, repeat=5)[0]
    assert result.status is Status.FAILED
    assert result.reason.startswith("gives other bits in run 3 of 5: output: ")
    assert result.faults[0].check == "determinism"


def test_a_kernel_without_outputs_runs_twice_where_it_is_tagged(put: Any) -> None:
    calls = iter(range(100))

    def drifts(table: Tensor, index: Tensor, values: Tensor) -> None:
        table.index_copy_(0, index, values * (1 + 1e-6 * next(calls)))

    result = verify(put, drifts, tags=frozenset({"determinism"}))[0]
    assert result.reason.startswith("is tagged determinism, but gives other bits in run 2 of 2: table: ")


def test_faults_are_of_a_kind(scale: Any) -> None:
    kernels = (wrong_at_one, ignores_out, changes_input)
    kinds = {impl: verify(scale, impl, name=impl.__name__, priority=at)[0] for at, impl in enumerate(kernels, 5)}
    assert [fault.kind for fault in kinds[wrong_at_one].faults] == ["values output"], "out= is wrong alike: said once"
    assert [fault.check for fault in kinds[ignores_out].faults] == ["out="]
    assert [fault.check for fault in kinds[changes_input].faults] == ["inputs"]
    assert kinds[ignores_out].to_dict()["faults"] == [{"kind": "out= out", "text": kinds[ignores_out].reason}]


def test_kernels_are_imported_when_they_are_verified(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("kernels_of_a_test")
    module.right = right  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels_of_a_test", module)
    assert verify(scale, "kernels_of_a_test:right")[0].status is Status.PASSED


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_kernel_that_cannot_be_imported_is_an_error_in_every_case(scale: Any) -> None:
    results = verify(scale, "no_such_package_at_all:kernel")
    assert {r.status for r in results} == {Status.ERROR}
    assert "loading the kernel: ImportError" in results[0].reason
    assert "no_such_package_at_all" in results[0].traceback


def test_ineligible_cases_are_skipped_with_the_gates_reason(scale: Any) -> None:
    needy = verify(scale, right, name="needy", capability=CapabilityRequirement(vendors=frozenset({"nvidia"})))
    assert {r.status for r in needy} == {Status.SKIPPED}
    assert needy[0].reason == "platform: needs an NVIDIA device, this is a CPU"
    small = verify(scale, right, name="small", traits={"size": 2}, priority=9)
    assert small[0].reason == "traits: size=4 is not 2"
    assert small[0].status is Status.SKIPPED


def test_nothing_launches_on_a_pretended_platform(scale: Any) -> None:
    with use_platform(named_platform("gfx950")):
        results = verify(scale, right)
    assert {(r.status, r.reason) for r in results} == {(Status.SKIPPED, "platform: gfx950 is pretended, nothing launches")}


def test_large_cases_run_on_request(scale: Any) -> None:
    op = scale.operator
    spec = KernelSpec("tried", op.family, op.mode, solution="tried", format_signatures=None)
    KernelRegistry.get().register(spec, right)
    assert [r.case for r in verify_kernel(spec, large=True)] == ["eight", "none", "huge"]
    assert [r.case for r in verify_kernel(spec, [op.all_cases()[2]])] == ["huge"]


def test_a_kernel_of_no_operator() -> None:
    spec = KernelSpec("stray", "no", "operator", solution="tried", format_signatures=None)
    results = verify_kernel(spec)
    assert results[0].status is Status.ERROR
    assert "no operator no.operator" in results[0].reason


def test_the_reference_is_not_said_to_agree_with_itself(scale: Any) -> None:
    op = scale.operator
    result = verify_kernel(KernelRegistry.get().get_by_name(f"reference_{op.mode}"))[0]
    assert result.status is Status.PASSED
    assert result.reason.startswith("is the reference: ")
    assert all(c.tolerance.exact for c in result.comparisons)


def test_a_reference_that_changes_from_call_to_call_is_caught(declare: Declare) -> None:
    calls = iter(range(1000))

    def unsteady(x: Tensor, out: Tensor | None = None) -> Tensor:
        return x + 1e-3 * next(calls)

    function = declare(unsteady, formats=("x",))
    function.fake(lambda x: torch.empty_like(x))
    function.cases(lambda: [Case("one", lambda draw: {"x": draw.normal(4)})])
    result = verify_kernel(KernelRegistry.get().get_by_name(f"reference_{function.operator.mode}"))[0]
    assert result.status is Status.FAILED
    assert "output: 4 of 4 elements differ" in result.reason


def test_a_reference_that_changes_its_input_is_caught(declare: Declare) -> None:
    def eager(x: Tensor, out: Tensor | None = None) -> Tensor:
        x.mul_(2)
        return x + 1

    function = declare(eager, formats=("x",))
    function.fake(lambda x: torch.empty_like(x))
    function.cases(lambda: [Case("one", lambda draw: {"x": draw.normal(4)})])
    result = verify_kernel(KernelRegistry.get().get_by_name(f"reference_{function.operator.mode}"))[0]
    assert result.status is Status.FAILED
    assert "changes its input x" in result.reason


@pytest.fixture
def put(declare: Declare) -> Any:
    """Declares an operator that writes values into a table and returns nothing."""

    def put(table: Tensor, index: Tensor, values: Tensor) -> None:
        table[index] = values

    function = declare(put, formats=("table",), outs=(), mutates=("table",))
    function.fake(lambda table: None)

    def make(draw: Draw) -> dict[str, Any]:
        return {"table": draw.normal(6, 2), "index": draw.permutation(6)[:3], "values": draw.normal(3, 2)}

    function.cases(lambda: [Case("three rows", make)])
    return function


def test_arguments_that_are_written_to_are_compared(put: Any) -> None:
    def writes(table: Tensor, index: Tensor, values: Tensor) -> None:
        table.index_copy_(0, index, values)

    def writes_too_much(table: Tensor, index: Tensor, values: Tensor) -> None:
        table.fill_(0).index_copy_(0, index, values)

    def writes_nothing(table: Tensor, index: Tensor, values: Tensor) -> None:
        pass

    def turns_the_index(table: Tensor, index: Tensor, values: Tensor) -> None:
        table.index_copy_(0, index, values)
        index.copy_(index.flip(0))

    good = verify(put, writes, name="a")[0]
    assert good.status is Status.PASSED
    assert [c.name for c in good.comparisons] == ["table"]
    much = verify(put, writes_too_much, name="b", priority=9)[0]
    assert much.reason.startswith("table: 6 of 12 elements beyond tolerance")
    nothing = verify(put, writes_nothing, name="c", priority=10)[0]
    assert nothing.reason.startswith("table: 6 of 12 elements beyond tolerance")
    index = verify(put, turns_the_index, name="d", priority=11)[0]
    assert "changes its input index" in index.reason


def test_exact_operators_compare_bits(declare: Declare) -> None:
    def exact(x: Tensor, out: Tensor | None = None) -> Tensor:
        return x * 3

    function = declare(exact, formats=("x",), exact=True)
    function.fake(lambda x: torch.empty_like(x))
    function.cases(lambda: [Case("one", lambda draw: {"x": draw.normal(64)})])

    def nearly(x: Tensor, out: Tensor | None) -> Tensor:
        made = torch.nextafter(x * 3, torch.full_like(x, 100))
        return made if out is None else out.copy_(made)

    result = verify(function, nearly)[0]
    assert "output: 64 of 64 elements differ" in result.reason


def test_two_outputs_that_share_memory_are_caught(declare: Declare) -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 1

    function = declare(twice, formats=("x",), outs=())
    function.fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    function.cases(lambda: [Case("one", lambda draw: {"x": draw.normal(4)})])

    def shared(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x + 1
        return made, made

    assert verify(function, shared)[0].reason == "output 1 shares memory with output 0"


def test_a_case_that_is_not_reproducible_is_blamed_itself(declare: Declare) -> None:
    function = declare(_scale_body, formats=("x",))
    function.fake(lambda x: torch.empty_like(x))
    function.cases(lambda: [Case("fresh", lambda draw: {"x": torch.rand(4)})])
    result = verify(function, right)[0]
    assert result.status is Status.ERROR
    assert result.reason == "the case does not draw the same x twice"


@dataclass(frozen=True)
class Plan:
    kernel: str
    layout: str


def test_kernels_get_the_arguments_that_were_prepared_for_them(declare: Declare) -> None:
    """The kernel needs its operand transposed; the reference does not."""

    def body(x: Tensor, plan: Plan, out: Tensor | None = None) -> Tensor:
        return x.sum(1)

    options = {"planned": "plan", "layout": "layout", "fixed_traits": ("layout",), "reference_traits": {"layout": "canonical"}}
    function = declare(body, formats={}, traits={"layout": str}, **options)
    function.traits(lambda plan: {"layout": plan.layout})
    function.formats(lambda plan: format_signature())
    function.fake(lambda x, plan: x.new_empty(x.shape[1 if plan.layout == "transposed" else 0]))
    function.cases(lambda: [Case("one", lambda draw: {"x": draw.normal(2, 3), "plan": Plan("undecided", "canonical")})])
    function.plan(lambda check: Plan("undecided", "canonical"))
    function.prepare(lambda preparation, x, plan: preparation.preprocess("x", x, plan, plan.layout))

    def transposed(x: Tensor, plan: Plan, out: Tensor | None) -> Tensor:
        made = x.sum(0)
        return made if out is None else out.copy_(made)

    layout = {"traits": {"layout": "transposed"}, "weight_preprocessor": lambda x, plan: x.t().contiguous()}
    assert verify(function, transposed, **layout)[0].status is Status.PASSED


def test_absolute_tolerance_depends_on_the_row() -> None:
    """The absolute tolerance of an element must be that of its row, because the rounding errors of rows of other magnitudes
    differ."""
    expected = torch.full((1000, 64), 0.01)
    expected[3] = 1.0
    expected[3, 5] = 0.0
    tolerance = Tolerance(0.01, 0.01, 1.0, "for this test")
    got = expected.clone()
    got[3, 5] = 0.009
    assert compare(got, expected, tolerance)[0].passed
    got[3, 5], got[4, 5] = 0.0, 0.01 + 0.009
    assert "worst at [4, 5]" in compare(got, expected, tolerance)[0].fault


def test_a_row_too_long_for_a_chunk_is_held_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tokenspeed_kernel.workbench.numerics.compare"], "_CHUNK", 48)
    expected = torch.ones(2, 100)
    got = expected.clone()
    got[1, 99] += 0.021
    tolerance = Tolerance(0.01, 0.01, 1.0, "for this test")
    assert "1 of 200 elements beyond tolerance, worst at [1, 99]" in compare(got, expected, tolerance)[0].fault
    got[1, 99] -= 0.002
    assert compare(got, expected, tolerance)[0].passed

"""Tests linear layers against explicit formulas. Also tests plans, processed weights, and kernels with their own weight layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.gemm.linear import linear
from tokenspeed_kernel_base.ops.gemm.linear_plan import ACTIVATION_DTYPES, LinearPlan
from tokenspeed_kernel_base.ops.gemm.linear_weights import LinearWeights
from tokenspeed_kernel_base.ops.quantization.encodings import (
    decode_fp8,
    decode_mxfp4,
    decode_mxfp8,
    decode_nvfp4,
    encode_fp8,
    encode_mxfp4,
    encode_mxfp8,
    encode_nvfp4,
)
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import NoKernelFoundError
from tokenspeed_kernel_base.traits import at_most

SMALL = [case for case in get_operator("linear").all_cases() if not case.large]
K, N = 64, 32
LAYOUT = "rows-reversed"


def decoded(weights: LinearWeights, weight_format: str) -> Tensor:
    weight, scale, global_scale = weights.weight, weights.weight_scale, weights.weight_global_scale
    if scale is None:
        return weight.double()
    if weight_format == "fp8_channel":
        return weight.double() * scale.double()
    if weight_format == "fp8_block":
        return decode_fp8(weight, scale, (128, 128), torch.float64)
    if weight_format == "mxfp4":
        return decode_mxfp4(weight, scale, torch.float64)
    assert global_scale is not None
    return decode_nvfp4(weight, scale, global_scale).double()


def rounded(x: Tensor, activation_dtype: str, scale: Tensor | None) -> Tensor:
    """Returns the tokens after quantisation to the activation dtype and dequantisation. The GEMM uses these values."""
    wide = x.float()
    if activation_dtype == "fp8":
        largest = (wide.abs().amax(-1, keepdim=True) / 448).clamp(min=torch.finfo(torch.float32).tiny)
        return decode_fp8(encode_fp8(wide / largest), largest, (), torch.float64)
    if activation_dtype == "fp8_static":
        assert scale is not None
        return decode_fp8(encode_fp8(wide / scale), scale, (), torch.float64)
    if activation_dtype == "fp8_block":
        found = torch.nn.functional.pad(wide, (0, -wide.shape[-1] % 128)).unflatten(-1, (-1, 128))
        each = rounded(found, "fp8", None)
        return each.flatten(-2)[:, : wide.shape[-1]]
    if activation_dtype == "mxfp8":
        return decode_mxfp8(*encode_mxfp8(wide)).double()
    if activation_dtype == "mxfp4":
        return decode_mxfp4(*encode_mxfp4(wide)).double()
    if activation_dtype == "nvfp4":
        assert scale is not None
        return decode_nvfp4(*encode_nvfp4(wide, scale), scale).double()
    return x.double()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("solution", ["composed", "reference"])
def test_linear_agrees_with_the_formula(case: Any, solution: str) -> None:
    arguments = case.build()
    x, weights, plan = (arguments[name] for name in ("x", "weights", "plan"))
    wanted = rounded(x, plan.activation_dtype, weights.input_scale) @ decoded(weights, plan.weight_format).t()
    if weights.bias is not None:
        wanted += weights.bias.double()
    found = linear(x, weights, plan, solution=solution)
    assert found.dtype == x.dtype == plan.dtype
    near = 2e-5 * wanted.abs().max().item() + 1e-6 if wanted.numel() else 0.0  # the error of float32 accumulation
    torch.testing.assert_close(found.double(), wanted, rtol=2 * torch.finfo(x.dtype).eps, atol=near)


def test_every_pair_of_formats_has_a_case() -> None:
    stated = {(fmt, dtype) for fmt, dtypes in ACTIVATION_DTYPES.items() for dtype in dtypes}
    plans = [case.build()["plan"] for case in SMALL]
    assert {(plan.weight_format, plan.activation_dtype) for plan in plans} == stated


def plan_of(**options: Any) -> LinearPlan:
    return linear.plan(K, N, **{"dtype": torch.float32, "device": "cpu", **options})


def weights_of(**changed: Any) -> LinearWeights:
    return LinearWeights(**{"weight": torch.randn(N, K), **changed})


FP8, U8 = torch.float8_e4m3fn, torch.uint8
WRONG_PLANS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "in_features must be at least 1, got 0", {"in_features": 0}),
    (TypeError, "out_features must be int, got float 2.0", {"out_features": 2.0}),
    (TypeError, "bias must be bool, got int 1", {"bias": 1}),
    (ValueError, "max_tokens must be at least 1 or None, got 0", {"max_tokens": 0}),
    (TypeError, "max_tokens must be int or None, got float 2.0", {"max_tokens": 2.0}),
    (TypeError, "max_tokens must be int or None, got bool True", {"max_tokens": True}),
    (TypeError, "dtype must be a torch.dtype, got str 'bf16'", {"dtype": "bf16"}),
    (TypeError, "weight_format must be str, got NoneType None", {"weight_format": None}),
    (ValueError, "weight_format must be one of 'dense', .*'nvfp4', got 'int4'", {"weight_format": "int4"}),
    (ValueError, "dtype must be one of bfloat16, float16 beside nvfp4 weights, got float32", {"weight_format": "nvfp4"}),
    (ValueError, "dtype must be one of bfloat16, float16, float32, float64, got int8", {"dtype": torch.int8}),
    (
        ValueError,
        "activation_dtype must be one of 'none', 'fp8_block' beside fp8_block weights, got fp8",
        {"weight_format": "fp8_block", "activation_dtype": "fp8", "dtype": torch.bfloat16},
    ),
    (ValueError, "activation_dtype must be one of 'none' beside dense weights, got fp8", {"activation_dtype": "fp8"}),
    (
        ValueError,
        "in_features must be a multiple of 16, because weight_format is nvfp4; zeros may be appended .*, got 72",
        {"weight_format": "nvfp4", "dtype": torch.bfloat16, "in_features": 72},
    ),
]


@pytest.mark.parametrize(("error", "message", "options"), WRONG_PLANS, ids=[w[1][:45] for w in WRONG_PLANS])
def test_wrong_plans(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    facts = {"in_features": K, "out_features": N, "dtype": torch.float32, "device": "cpu"}
    with pytest.raises(error, match="linear.plan: " + message):
        linear.plan(**{**facts, **options})


NVFP4 = {"weight_format": "nvfp4", "dtype": torch.bfloat16}
CODES = torch.zeros(N, K // 2, dtype=U8)
WRONG_WEIGHTS: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
    (TypeError, "weights must be an object with weight, got dict", {}, {}),
    (TypeError, "weights.weight must be a tensor, got None", SimpleNamespace(weight=None), {}),
    (ValueError, r"weights.weight must be of shape \[out_features, in_features\]", weights_of(weight=torch.zeros(K, N)), {}),
    (TypeError, "weights.weight must be a tensor of float32, got float16", weights_of(weight=torch.zeros(N, K).half()), {}),
    (ValueError, "weights.weight_scale must be None, because .* 'dense'", weights_of(weight_scale=torch.ones(1)), {}),
    (ValueError, "weights.weight_scale must be a tensor, because .* 'nvfp4'", weights_of(weight=CODES), NVFP4),
    (
        ValueError,
        "weights.weight_global_scale must be a tensor, because .* 'nvfp4'",
        weights_of(weight=CODES, weight_scale=torch.zeros(N, 4).to(FP8)),
        NVFP4,
    ),
    (
        ValueError,
        r"weights.weight_scale must be of shape \[out_features, ceil\(in_features/16\)\]",
        weights_of(weight=CODES, weight_scale=torch.zeros(N, 2).to(FP8), weight_global_scale=torch.ones(1)),
        NVFP4,
    ),
    (
        ValueError,
        r"weights.weight_scale must be of shape \[out_features, 1\]",
        weights_of(weight=torch.zeros(N, K).to(FP8), weight_scale=torch.ones(1, N)),
        {"weight_format": "fp8_channel", "dtype": torch.bfloat16},
    ),
    (ValueError, "weights.bias must be a tensor, because plan.bias is True", weights_of(), {"bias": True}),
    (TypeError, "weights.bias must be a tensor of float32, got float16", weights_of(bias=torch.zeros(N).half()), {"bias": True}),
    (ValueError, "weights.input_scale must be None, because plan.act", weights_of(input_scale=torch.ones(1)), {}),
    (ValueError, "weights.bias must be on meta|weights.bias must be on cpu", weights_of(bias=torch.zeros(N, device="meta")), {}),
    (ValueError, "weights.layout must be 'canonical' or the plan's 'canonical', got 'other'", weights_of(layout="other"), {}),
]


@pytest.mark.parametrize(("error", "message", "weights", "options"), WRONG_WEIGHTS, ids=[w[1][:60] for w in WRONG_WEIGHTS])
def test_wrong_weights(error: type[Exception], message: str, weights: Any, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        linear.prepare(weights, plan_of(**options))


def test_modules_are_weights() -> None:
    module = torch.nn.Linear(K, N).requires_grad_(False)
    weights, plan, x = linear.prepare(module, plan_of(bias=True)), plan_of(bias=True), torch.randn(3, K)
    assert weights.weight is module.weight
    torch.testing.assert_close(linear(x, weights, plan), module(x))
    torch.testing.assert_close(linear(x, module, plan), module(x))


@pytest.mark.parametrize("solution", ["composed", "reference"])
def test_calls_have_no_more_tokens_than_their_plan(solution: str) -> None:
    plan, weights = plan_of(max_tokens=4), weights_of()
    for few in (0, 1, 4):
        assert linear(torch.randn(few, K), weights, plan, solution=solution).shape == (few, N)
    with pytest.raises(ValueError, match=r"x.shape\[0\] must be at most .*4, got 5"):
        linear(torch.randn(5, K), weights, plan, solution=solution)
    assert linear(torch.randn(5, K), weights, plan_of(), solution=solution).shape == (5, N)


def test_plans_are_distinguished() -> None:
    with pytest.raises(TypeError, match=r"plan must be a LinearPlan, .* got dict"):
        linear.prepare(weights_of(), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"linear: plan.in_features .* 1, got 0"):
        linear(torch.zeros(1, K), weights_of(), dataclasses.replace(plan_of(), in_features=0))


# -- kernels with a layout of their own --------------------------------------------------------------------------------------------


def reverse(weights: LinearWeights, plan: LinearPlan) -> Any:
    """Converts weights to a layout for tests, in which the out-features are in reverse order."""
    assert plan.weight_layout == LAYOUT
    return SimpleNamespace(weight=weights.weight.flip(0), bias=weights.bias)


@pytest.fixture
def reversing() -> Iterator[str]:
    yield from registered("reversing")


@pytest.fixture
def few() -> Iterator[str]:
    yield from registered("few", max_tokens=at_most(4))


def registered(name: str, **traits: Any) -> Iterator[str]:
    def kernel(x: Tensor, weights: Any, plan: LinearPlan, out: Tensor | None) -> Tensor:
        result = torch.nn.functional.linear(x, weights.weight.flip(0), weights.bias)
        return result if out is None else out.copy_(result)

    traits = {"weight_layout": LAYOUT, "processed_weights": True, "bias": any, **traits}
    declared: dict[str, Any] = {"solution": "testing", "signatures": None, "priority": 12, "weight_preprocessor": reverse}
    register_kernel("gemm", "linear", name=name, traits=traits, **declared)(kernel)
    yield name
    KernelRegistry.get().unregister(name)


def test_plan_prepare_bind_call(reversing: str) -> None:
    given, x = weights_of(bias=torch.randn(N)), torch.randn(3, K)
    canonical = plan_of(bias=True, solution="composed")
    assert (canonical.kernel, canonical.weight_layout) == ("composed_linear", "canonical")
    wanted = linear(x, linear.prepare(given, canonical), canonical, override="composed_linear")
    plan = plan_of(bias=True)
    assert (plan.kernel, plan.weight_layout) == (reversing, LAYOUT)
    weights = linear.prepare(given, plan)
    assert torch.equal(weights.weight, given.weight.flip(0))
    assert linear.prepare(weights, plan).weight is weights.weight
    torch.testing.assert_close(linear(x, weights, plan), wanted)
    torch.testing.assert_close(linear.bind(x, weights, plan)(x, weights, plan, None), wanted)
    out = torch.empty(3, N)
    assert linear(x, weights, plan, out=out) is out
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("max_tokens", [None, 1, 4, 5])
def test_a_kernel_for_few_tokens(few: str, max_tokens: int | None) -> None:
    plan, given, x = plan_of(max_tokens=max_tokens), weights_of(), torch.randn(1, K)
    served = max_tokens in (1, 4)
    assert plan.kernel == (few if served else "composed_linear")
    weights = linear.prepare(given, plan)
    torch.testing.assert_close(linear(x, weights, plan), x @ given.weight.t())
    if not served:
        with pytest.raises(NoKernelFoundError, match=f"{few}.*max_tokens={max_tokens} is not at most 4"):
            plan_of(max_tokens=max_tokens, solution="testing")


def test_arranged_weights_reach_nobody_else(reversing: str) -> None:
    plan = plan_of()
    weights = linear.prepare(weights_of(), plan)
    x = torch.randn(2, K)
    verdicts = {v.spec.name: v for v in linear.explain(x, weights, plan).verdicts}
    assert verdicts[reversing].accepted
    for other in ("composed_linear", "reference_linear"):
        assert verdicts[other].reason == f"weight_layout={LAYOUT} is not canonical"
        with pytest.raises(NoKernelFoundError, match="weight_layout=rows-reversed is not canonical"):
            linear(x, weights, plan, override=other)
    with pytest.raises(ValueError, match=r"weights.layout must be 'rows-reversed'"):
        linear(x, weights_of(), plan)


def test_rounded_activations_need_a_kernel_that_says_so(reversing: str) -> None:
    facts: dict[str, Any] = {"weight_format": "fp8_channel", "dtype": torch.bfloat16}
    assert plan_of(**facts).kernel == reversing
    assert plan_of(**facts, activation_dtype="fp8").kernel == "composed_linear"

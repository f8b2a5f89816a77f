"""Tests MoE from a plan, over processed weights, to the kernel for which the weights were processed."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.moe.moe_apply import _inputs, moe_apply
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.planning import wanted_layout
from tokenspeed_kernel_base.platform import ArchVersion, CapabilityRequirement, PlatformInfo, cpu_platform
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import NoKernelFoundError, kernel_override

E, K, H, I = 4, 2, 64, 32  # noqa: E741
LAYOUT = "rows-reversed"
ATTRIBUTES = [f"{w}_weight{part}" for w in ("w13", "w2") for part in ("", "_scale", "_bias")]

Register = Callable[..., str]


def plan_of(**options: Any) -> MoEPlan:
    return moe_apply.plan(E, K, H, I, **{"dtype": torch.float32, "device": "cpu", **options})


def weights_of(weight_format: str = "dense", bias: bool = False, dtype: torch.dtype = torch.float32) -> MoEWeights:
    w13, w2 = torch.randn(E, 2 * I, H) * 0.1, torch.randn(E, H, I) * 0.1
    b13, b2 = (torch.randn(E, 2 * I), torch.randn(E, H)) if bias else (None, None)
    if weight_format == "fp8_block":
        scales = torch.rand(E, 1, 1) + 0.5, torch.rand(E, 1, 1) + 0.5
        return MoEWeights(w13.to(torch.float8_e4m3fn), scales[0], b13, w2.to(torch.float8_e4m3fn), scales[1], b2)
    if weight_format == "mxfp4":
        codes = (torch.randint(0, 256, (E, n, k // 2), dtype=torch.uint8) for n, k in ((2 * I, H), (H, I)))
        scales = (torch.randint(120, 128, (E, n, k // 32), dtype=torch.uint8) for n, k in ((2 * I, H), (H, I)))
        return MoEWeights(next(codes), next(scales), b13, next(codes), next(scales), b2)
    return MoEWeights(w13.to(dtype), None, b13, w2.to(dtype), None, b2)


def call_with(weights: Any, plan: MoEPlan) -> dict[str, Any]:
    topk_ids = torch.tensor([[0, 3], [2, 1], [3, -1]], dtype=torch.int32)
    return {"x": torch.randn(3, H), "weights": weights, "topk_weights": torch.rand(3, K), "topk_ids": topk_ids, "plan": plan}


def reverse(weights: MoEWeights, plan: MoEPlan) -> Any:
    """Converts weights to a layout for tests, in which the hidden rows of w2 are in reverse order. The returned object has no
    ``layout``."""
    assert plan.weight_layout == LAYOUT
    changed = dataclasses.replace(weights, w2_weight=weights.w2_weight.flip(1))
    return SimpleNamespace(**{name: getattr(changed, name) for name in ATTRIBUTES})


def reversing_kernel(  # type: ignore[no-untyped-def]
    x: torch.Tensor, weights: Any, topk_weights: torch.Tensor, topk_ids: torch.Tensor, plan: MoEPlan, out
) -> torch.Tensor:
    canonical = dataclasses.replace(weights, w2_weight=weights.w2_weight.flip(1), layout="canonical")
    body = get_operator("moe_apply").body
    CALLS.append(plan.kernel)
    result: torch.Tensor = body(x, canonical, topk_weights, topk_ids, plan)
    return result if out is None else out.copy_(result)


CALLS: list[str] = []
OWN_LAYOUT = {"weight_layout": LAYOUT, "processed_weights": True}


@pytest.fixture
def register() -> Iterator[Register]:
    """Yields a function that registers kernels for one test."""
    names: list[str] = []
    CALLS.clear()

    def add(name: str = "reversing", **declaration: Any) -> str:
        given = {
            "solution": "testing",
            "signatures": None,
            "traits": OWN_LAYOUT,
            "weight_preprocessor": reverse,
            "priority": 8,
            **declaration,
        }
        register_kernel("moe", "moe_apply", name=name, **given)(reversing_kernel)
        names.append(name)
        return name

    yield add
    for name in {spec.name for spec in KernelRegistry.get().list_kernels()}.intersection(names):
        KernelRegistry.get().unregister(name)


# -- plans -------------------------------------------------------------------------------------------------------------------------


def test_plan_without_other_kernels_is_the_references() -> None:
    plan = plan_of(bias=True, limit=7.0)
    assert (plan.kernel, plan.weight_layout) == ("reference_moe_apply", "canonical")
    assert (plan.num_experts, plan.top_k, plan.hidden_size, plan.intermediate_size) == (E, K, H, I)
    assert (plan.bias, plan.limit, plan.alpha, plan.beta) == (True, 7.0, 1.0, 0.0)
    assert plan == plan_of(bias=True, limit=7.0)
    assert hash(plan) == hash(plan_of(bias=True, limit=7.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.top_k = 3  # type: ignore[misc]


def test_plan_holds_primitives_only() -> None:
    for field in dataclasses.fields(MoEPlan):
        value = getattr(plan_of(), field.name)
        assert value is None or type(value) in (int, float, bool, str, torch.dtype), field.name


def test_device_and_platform(register: Register) -> None:
    register(capability=CapabilityRequirement(vendors=frozenset({"amd"})))
    amd = PlatformInfo("amd", ArchVersion(9, 5), "an amd gpu")
    assert plan_of(device=None, platform=amd).kernel == "reversing"
    assert plan_of(device=torch.device("cpu")).kernel == plan_of(device=None, platform=cpu_platform()).kernel != "reversing"
    assert plan_of(device=None).kernel == plan_of().kernel != "reversing"


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"bias": True}, "bias"),
        ({"w13_interleaved": True}, "w13_interleaved"),
        ({"limit": 7.0}, "swiglu_limit"),
        ({"alpha": 1.702}, "swiglu_alpha_beta"),
        ({"beta": 1.0}, "swiglu_alpha_beta"),
        ({"activation_dtype": "fp8"}, "fp8_activations"),
        ({"activation_dtype": "fp8_static"}, "static_fp8_activations"),
        ({"activation_dtype": "mxfp4"}, "mxfp4_activations"),
        ({"dtype": torch.float16}, "wide_activations"),
        ({"exact_activations": True}, "exact_activations"),
    ],
)
def test_an_unmentioned_feature_makes_a_kernel_ineligible(register: Register, options: dict[str, Any], flag: str) -> None:
    register()
    assert plan_of().kernel == "reversing"
    assert plan_of(**options).kernel == "reference_moe_apply"
    with pytest.raises(NoKernelFoundError, match=f"reversing +traits: does not declare the flag {flag}"):
        plan_of(**options, solution="testing")
    register("knows", traits={**OWN_LAYOUT, flag: True}, priority=9)
    assert plan_of(**options).kernel == "knows"


@pytest.mark.parametrize(
    ("options", "wide"),
    [
        ({"dtype": torch.bfloat16}, False),
        ({"limit": 7.0, "alpha": 1.702, "beta": 1.0}, False),
        ({"limit": 255.0}, False),
        ({"limit": 256.0}, True),
        ({"limit": 7.0, "beta": -1e4}, True),
        ({"limit": 7.0, "alpha": 1e-6}, True),  # gate * sigmoid(alpha * gate) reaches -278,500
        ({"limit": 7.0, "alpha": -1.0}, True),  # the activation is unbounded for negative gates
        ({}, True),
    ],
    ids=str,
)
def test_plans_whose_activations_may_exceed_float16(options: dict[str, Any], wide: bool) -> None:
    plan = plan_of(**{"dtype": torch.float16, **options})
    assert plan.wide_activations is wide
    up = torch.tensor([1e4, -1e4], dtype=torch.float64)[:, None]
    gate = torch.linspace(-3e6, 3e6, 3_000_001, dtype=torch.float64)
    limit = math.inf if plan.limit is None else plan.limit
    act = (up.clamp(-limit, limit) + plan.beta) * gate.clamp(max=limit) * torch.sigmoid(plan.alpha * gate.clamp(max=limit))
    assert bool((act.abs() > 65504).any()) is wide or plan.dtype != torch.float16


def test_exactness_is_required_only_of_unrounded_activations(register: Register) -> None:
    register(traits={**OWN_LAYOUT, "fp8_activations": any}, accuracy="numbers within 2^-21 of their row's largest")
    assert plan_of(exact_activations=True).kernel == "reference_moe_apply"
    assert plan_of(exact_activations=True, activation_dtype="fp8").kernel == "reversing"
    with pytest.raises(TypeError, match="exact_activations must be bool, got int 1"):
        plan_of(exact_activations=1)


def test_the_bound_of_a_kernel_is_explained(register: Register) -> None:
    register(accuracy="numbers within 2^-21 of their row's largest")
    plan = plan_of()
    explained = moe_apply.explain(**call_with(moe_apply.prepare(weights_of(), plan), plan))
    assert "-> reversing" in str(explained)
    assert "priority 8, numbers within 2^-21 of their row's largest\n" in str(explained)


def test_values_are_traits(register: Register) -> None:
    register(traits={**OWN_LAYOUT, "num_experts": {8}, "hidden_size": {H}, "intermediate_size": {I}, "top_k": {K}})
    assert plan_of().kernel == "reference_moe_apply"
    assert moe_apply.plan(8, K, H, I, device="cpu").kernel == "reversing"


def test_formats_gate_holds(register: Register) -> None:
    from tokenspeed_kernel_base.ops.quantization.formats import mxfp4_format
    from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature

    dense, mxfp4 = dense_tensor_format(torch.bfloat16), mxfp4_format()
    register(signatures=[format_signature(x=dense, w13=mxfp4, w2=mxfp4)])
    assert plan_of(weight_format="mxfp4", dtype=torch.bfloat16).kernel == "reversing"
    assert plan_of(weight_format="mxfp4", dtype=torch.float16).kernel == "reference_moe_apply"
    assert plan_of(weight_format="fp8_block", dtype=torch.bfloat16).kernel == "reference_moe_apply"
    assert plan_of(dtype=torch.bfloat16).kernel == "reference_moe_apply"


def test_override_and_solution(register: Register) -> None:
    register(priority=8)
    assert plan_of().kernel == "reversing"
    assert plan_of(override="reference_moe_apply").kernel == "reference_moe_apply"
    assert plan_of(solution="reference").kernel == "reference_moe_apply"
    # An override skips trait gates, as for every operator. The plan still has the kernel's layout.
    forced = plan_of(bias=True, override="reversing")
    assert (forced.kernel, forced.weight_layout) == ("reversing", LAYOUT)
    with kernel_override("moe", "moe_apply", "reference_moe_apply"):
        assert plan_of().kernel == "reference_moe_apply"
    with pytest.raises(NoKernelFoundError, match="no kernel named nothing"):
        plan_of(override="nothing")
    with pytest.raises(NoKernelFoundError, match=r"override= requests reversing, which fails the solution"):
        plan_of(override="reversing", solution="reference")


def test_the_best_kernel_is_chosen_across_layouts(register: Register) -> None:
    register("canonical_5", traits={}, weight_preprocessor=None, priority=5)
    register("other_8", traits={"weight_layout": "other", "processed_weights": True}, priority=8)
    register("reversed_6", priority=6)
    assert (plan_of().kernel, plan_of().weight_layout) == ("other_8", "other")
    KernelRegistry.get().unregister("other_8")
    assert (plan_of().kernel, plan_of().weight_layout) == ("reversed_6", LAYOUT)
    assert (plan_of(override="canonical_5").kernel, plan_of(override="canonical_5").weight_layout) == ("canonical_5", "canonical")


@pytest.mark.parametrize(
    ("traits", "preprocessor", "layout"),
    [
        ({}, None, "canonical"),
        ({"weight_layout": "canonical"}, reverse, "canonical"),
        ({"weight_layout": any}, None, "canonical"),
        ({"weight_layout": {"canonical", "b"}}, None, "canonical"),
        ({"weight_layout": {"canonical", "b"}}, reverse, "b"),
        ({"weight_layout": {"b", "a"}}, None, "a"),
    ],
)
def test_layout_that_a_kernel_wants(register: Register, traits: dict[str, Any], preprocessor: Any, layout: str) -> None:
    for other in ("a", "b"):
        register(f"makes_{other}", traits={**OWN_LAYOUT, "weight_layout": other}, priority=7)
    spec = KernelRegistry.get().get_by_name(register(traits=traits, weight_preprocessor=preprocessor))
    assert wanted_layout(spec, "weight_layout") == layout
    assert moe_apply.operator.plan_for(plan_of(), spec).weight_layout == layout


WRONG_PLANS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "num_experts must be at least 1, got 0", {"num_experts": 0}),
    (TypeError, "top_k must be int, got float 2.0", {"top_k": 2.0}),
    (TypeError, "top_k must be int, got bool True", {"top_k": True}),
    (ValueError, "hidden_size must be at least 1, got -4", {"hidden_size": -4}),
    (
        ValueError,
        "intermediate_size must be a multiple of 32, because weight_format is mxfp4; zeros may be appended .*, got 40",
        {"weight_format": "mxfp4"},
    ),
    (ValueError, "intermediate_size must be a multiple of 32, because activation_dtype is mxfp4", {"activation_dtype": "mxfp4"}),
    (TypeError, "dtype must be a torch.dtype, got str 'bf16'", {"dtype": "bf16"}),
    (ValueError, "dtype must be one of .*bfloat16.*got int8", {"dtype": torch.int8}),
    (ValueError, "weight_format must be one of 'dense', 'fp8_channel', .*, 'nvfp4', got 'int4'", {"weight_format": "int4"}),
    (ValueError, "intermediate_size must be a multiple of 16, because weight_format is nvfp4", {"weight_format": "nvfp4"}),
    (ValueError, "intermediate_size must be a multiple of 32, because weight_format is mxfp8", {"weight_format": "mxfp8"}),
    (ValueError, "activation_dtype must be one of 'none', 'fp8', 'fp8_static', 'mxfp4', got 'fp4'", {"activation_dtype": "fp4"}),
    (TypeError, "activation_dtype must be str, got NoneType None", {"activation_dtype": None}),
    (ValueError, "hidden_size must be within the range of int64, got int 9223372036854775808", {"hidden_size": 1 << 63}),
    (ValueError, r"alpha must be a float within ±3.4e\+38, got int 1000", {"alpha": 10**400}),
    (ValueError, "activation must be one of 'swiglu', got 'gelu'", {"activation": "gelu"}),
    (TypeError, "w13_interleaved must be bool, got int 1", {"w13_interleaved": 1}),
    (TypeError, "bias must be bool, got NoneType None", {"bias": None}),
    (TypeError, "alpha must be float, got NoneType None", {"alpha": None}),
    (ValueError, "beta must be finite, got nan", {"beta": math.nan}),
    (ValueError, "limit must be finite, got inf", {"limit": math.inf}),
    (ValueError, "limit must be positive or None, got 0.0", {"limit": 0.0}),
    (TypeError, "override must be a str or None, got 3", {"override": 3}),
    (TypeError, "solution must be a str or None", {"solution": 3}),
    (TypeError, "platform must be a PlatformInfo or None, got", {"platform": "gfx950", "device": None}),
    (ValueError, "platform must be None where device is given", {"platform": PlatformInfo("cpu", ArchVersion(0, 0), "a cpu")}),
    (ValueError, "tensors are on meta; expected cpu or cuda", {"device": "meta"}),
]


@pytest.mark.parametrize(("error", "message", "options"), WRONG_PLANS, ids=[w[1][:45] for w in WRONG_PLANS])
def test_wrong_plans(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    sizes = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": 40, "device": "cpu"}
    with pytest.raises(error, match=message):
        moe_apply.plan(**{**sizes, **options})


def test_zeros_may_be_appended_to_sizes() -> None:
    """The error message of a plan suggests appending zeros to tokens, weights and biases. Asserts that the extra features of the
    results are then zero."""
    hidden, intermediate, call = 40, 24, call_with(None, plan_of())
    torch.manual_seed(0)
    w13, w2 = torch.randn(E, 2 * intermediate, hidden), torch.randn(E, hidden, intermediate)
    b13, b2 = torch.randn(E, 2 * intermediate), torch.randn(E, hidden)
    x = torch.randn(3, hidden)

    def padded(t: torch.Tensor, *sizes: int) -> torch.Tensor:
        made = torch.zeros(*t.shape[: -len(sizes)], *sizes)
        made[(..., *(slice(size) for size in t.shape[-len(sizes) :]))] = t
        return made

    results = []
    for h, i in ((hidden, intermediate), (64, 32)):
        halves = [padded(half, i, h) for half in w13.chunk(2, 1)], [padded(half, i) for half in b13.chunk(2, 1)]
        weights = MoEWeights(torch.cat(halves[0], 1), None, torch.cat(halves[1], 1), padded(w2, h, i), None, padded(b2, h))
        plan = moe_apply.plan(E, K, h, i, dtype=torch.float32, device="cpu", bias=True, beta=1.0, limit=3.0)
        results.append(moe_apply(**{**call, "x": padded(x, h), "weights": weights, "plan": plan}))
    torch.testing.assert_close(results[1][:, :hidden], results[0])
    assert not results[1][:, hidden:].any()


# -- weights -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_format", ["dense", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("bias", [False, True])
def test_canonical_weights_stay_as_they_are(weight_format: str, bias: bool) -> None:
    given = weights_of(weight_format, bias)
    before = dataclasses.replace(given)
    processed = moe_apply.prepare(given, plan_of(weight_format=weight_format, bias=bias))
    assert isinstance(processed, MoEWeights)
    assert processed is not given
    assert processed.layout == "canonical"
    for name in ATTRIBUTES:
        assert getattr(processed, name) is getattr(given, name) is getattr(before, name)


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this PyTorch has no float8_e8m0fnu")
def test_scales_may_have_the_dtype_of_e8m0() -> None:
    given, plan = weights_of("mxfp4"), plan_of(weight_format="mxfp4")
    assert given.w13_weight_scale is not None
    assert given.w2_weight_scale is not None
    scales = {f"{name}_weight_scale": getattr(given, f"{name}_weight_scale").view(torch.float8_e8m0fnu) for name in ("w13", "w2")}
    other = dataclasses.replace(given, **scales)
    processed = moe_apply.prepare(other, plan)
    assert processed.w13_weight_scale is not None
    assert torch.equal(processed.w13_weight_scale, given.w13_weight_scale)
    call = call_with(given, plan)
    for weights in (processed, other):  # weights in the canonical layout need no preprocessing
        assert torch.equal(moe_apply(**{**call, "weights": weights}), moe_apply(**call))


def test_foreign_weights_become_ours() -> None:
    given = weights_of(bias=True)
    other = SimpleNamespace(**{name: getattr(given, name) for name in ATTRIBUTES}, something_else=1)
    processed = moe_apply.prepare(other, plan_of(bias=True))
    assert isinstance(processed, MoEWeights)
    assert processed.w2_weight is given.w2_weight
    assert not hasattr(other, "layout")


def without(name: str) -> Any:
    return SimpleNamespace(**{n: getattr(weights_of(), n) for n in ATTRIBUTES if n != name})


def changed(weight_format: str = "dense", bias: bool = False, **fields: Any) -> MoEWeights:
    return dataclasses.replace(weights_of(weight_format, bias), **fields)


def drawn(weight_format: str, **fields: Any) -> MoEWeights:
    weights = _inputs(1, E, K, H, I, weight_format=weight_format, dtype=torch.float32)(Draw(torch.device("cpu"), 0))["weights"]
    return dataclasses.replace(weights, **fields)


U8, FP8 = torch.uint8, torch.float8_e4m3fn
WRONG_WEIGHTS: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
    (TypeError, "weights must be an object with w13_weight, got dict", {}, {}),
    (TypeError, "weights must be an object with w2_weight_bias, got SimpleNamespace", without("w2_weight_bias"), {}),
    (TypeError, "weights.w13_weight must be a tensor, got None", changed(w13_weight=None), {}),
    (TypeError, "weights.w2_weight_scale must be a tensor, got 1.0", changed(w2_weight_scale=1.0), {}),
    (
        ValueError,
        r"w13_weight must be of shape \[experts, 2\*intermediate, hidden\] where 2\*intermediate is 64 in plan.intermediate_size,",
        changed(w13_weight=torch.zeros(E, I, H)),
        {},
    ),
    (ValueError, "where experts is 4 in plan.num_experts, got", changed(w2_weight=torch.zeros(5, H, I)), {}),
    (ValueError, "weights.w2_weight must be of shape .* where hidden is 64", changed(w2_weight=torch.zeros(E, I, H)), {}),
    (TypeError, "weights.w13_weight must be a tensor of float32, got bfloat16", weights_of(dtype=torch.bfloat16), {}),
    (ValueError, "weights.w13_weight_scale must be None, because dense", changed(w13_weight_scale=torch.ones(E)), {}),
    (ValueError, "weights.w13_weight_scale must be a tensor, because .* 'mxfp4'", weights_of(), {"weight_format": "mxfp4"}),
    (TypeError, "weights.w13_weight must be a tensor of float8_e4m3fn", weights_of("mxfp4"), {"weight_format": "fp8_block"}),
    (
        ValueError,
        r"weights.w2_weight must be of shape \[experts, hidden, ceil\(intermediate/2\)\] where .* is 16",
        changed("mxfp4", w2_weight=torch.zeros(E, H, I, dtype=U8)),
        {"weight_format": "mxfp4"},
    ),
    (
        TypeError,
        "weights.w13_weight_scale must be a tensor of (float8_e8m0fnu or )?uint8, got float32",
        changed("mxfp4", w13_weight_scale=torch.zeros(E, 2 * I, 2)),
        {"weight_format": "mxfp4"},
    ),
    (
        ValueError,
        r"weights.w13_weight_scale must be of shape .*ceil\(hidden/32\)\] where ceil\(hidden/32\) is 2",
        changed("mxfp4", w13_weight_scale=torch.zeros(E, 2 * I, 4, dtype=U8)),
        {"weight_format": "mxfp4"},
    ),
    (
        ValueError,
        r"weights.w2_weight_scale must be of shape .*ceil\(hidden/128\), ceil\(intermediate/128\)\]",
        changed("fp8_block", w2_weight_scale=torch.zeros(E, H, I)),
        {"weight_format": "fp8_block"},
    ),
    (
        ValueError,
        r"weights.w13_weight_scale must be of shape \[experts, 2\*intermediate, 1\]",
        drawn("fp8_channel", w13_weight_scale=torch.zeros(E, 2 * I)),
        {"weight_format": "fp8_channel"},
    ),
    (TypeError, "weights.w13_weight must be a tensor of float8_e4m3fn", weights_of("mxfp4"), {"weight_format": "mxfp8"}),
    (
        TypeError,
        "weights.w2_weight_scale must be a tensor of (float8_e8m0fnu or )?uint8, got float32",
        drawn("mxfp8", w2_weight_scale=torch.zeros(E, H, 1)),
        {"weight_format": "mxfp8"},
    ),
    (
        TypeError,
        "weights.w13_weight_scale must be a tensor of float8_e4m3fn, got uint8",
        drawn("nvfp4", w13_weight_scale=torch.zeros(E, 2 * I, 4, dtype=U8)),
        {"weight_format": "nvfp4"},
    ),
    (
        ValueError,
        "weights.w2_weight_global_scale must be a tensor, because plan.weight_format is 'nvfp4', got None",
        drawn("nvfp4", w2_weight_global_scale=None),
        {"weight_format": "nvfp4"},
    ),
    (
        ValueError,
        r"weights.w13_weight_global_scale must be of shape \[experts\] where experts is 4",
        drawn("nvfp4", w13_weight_global_scale=torch.ones(1)),
        {"weight_format": "nvfp4"},
    ),
    (
        ValueError,
        "weights.w13_weight_global_scale must be None, because plan.weight_format is 'dense'",
        changed(w13_weight_global_scale=torch.ones(E)),
        {},
    ),
    (ValueError, "weights.w13_weight_bias must be a tensor, because plan.bias is True", weights_of(), {"bias": True}),
    (ValueError, "weights.w13_weight_bias must be None, because plan.bias is False", weights_of(bias=True), {}),
    (ValueError, "weights.w2_weight_bias must be of shape", changed(bias=True, w2_weight_bias=torch.zeros(E, I)), {"bias": True}),
    (
        TypeError,
        "weights.w2_weight_bias must be a tensor of .*float32.* got int64",
        changed(bias=True, w2_weight_bias=torch.zeros(E, H, dtype=torch.int64)),
        {"bias": True},
    ),
    (
        ValueError,
        "weights.w13_input_scale must be a tensor, because plan.activation_dtype is 'fp8_static'",
        weights_of(),
        {"activation_dtype": "fp8_static"},
    ),
    (
        ValueError,
        r"weights.w2_input_scale must be of shape \[1\]",
        changed(w13_input_scale=torch.ones(1), w2_input_scale=torch.ones(E)),
        {"activation_dtype": "fp8_static"},
    ),
    (
        ValueError,
        "weights.w2_input_scale must be None, because .* 'fp8'",
        changed(w2_input_scale=torch.ones(1)),
        {"activation_dtype": "fp8"},
    ),
    (
        ValueError,
        "weights.w2_weight must be on cpu like weights.w13_weight",
        changed(w2_weight=torch.zeros(E, H, I, device="meta")),
        {},
    ),
    (ValueError, "weights.layout must be 'canonical' or the plan's 'canonical', got 'other'", changed(layout="other"), {}),
]


@pytest.mark.parametrize(("error", "message", "weights", "options"), WRONG_WEIGHTS, ids=[w[1][:60] for w in WRONG_WEIGHTS])
def test_wrong_weights(error: type[Exception], message: str, weights: Any, options: dict[str, Any]) -> None:
    plan = plan_of(**options)
    with pytest.raises(error, match=message):
        moe_apply.prepare(weights, plan)
    if isinstance(weights, MoEWeights) and "meta" not in str(weights.w2_weight.device):
        with pytest.raises((TypeError, ValueError), match=r"weights\."):
            moe_apply(**call_with(weights, plan))


def test_wrong_plans_for_weights() -> None:
    with pytest.raises(TypeError, match=r"plan must be a MoEPlan, .* got dict"):
        moe_apply.prepare(weights_of(), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"plan.top_k must be at least 1, got 0"):
        moe_apply.prepare(weights_of(), dataclasses.replace(plan_of(), top_k=0))
    with pytest.raises(ValueError, match=r"plan.kernel must .*got 'gone': no kernel"):
        moe_apply.prepare(weights_of(), dataclasses.replace(plan_of(), kernel="gone"))


# -- kernels with a layout of their own --------------------------------------------------------------------------------------------


def test_plan_process_apply_reach_the_kernel(register: Register) -> None:
    given = weights_of()
    expected_plan = plan_of()
    call = call_with(given, expected_plan)
    expected = moe_apply(**call)
    register()
    plan = plan_of()
    assert (plan.kernel, plan.weight_layout) == ("reversing", LAYOUT)
    before = given.w2_weight.clone()
    processed = moe_apply.prepare(given, plan)
    assert processed.layout == LAYOUT
    assert torch.equal(processed.w2_weight, before.flip(1))
    assert torch.equal(given.w2_weight, before)
    assert given.layout == "canonical"
    own = {**call, "weights": processed, "plan": plan}
    assert torch.equal(moe_apply(**own), expected)
    assert CALLS == ["reversing"]
    chosen = moe_apply.explain(**own).chosen
    assert chosen is not None
    assert chosen.name == plan.kernel
    compiled = torch.compile(lambda **kwargs: moe_apply(**kwargs), fullgraph=True)
    assert torch.equal(compiled(**own), expected)
    assert CALLS == ["reversing"] * 2


def test_processing_twice_changes_nothing(register: Register) -> None:
    register()
    plan = plan_of()
    once = moe_apply.prepare(weights_of(), plan)
    twice = moe_apply.prepare(once, plan)
    assert all(getattr(twice, name) is getattr(once, name) for name in ATTRIBUTES)
    assert twice.layout == LAYOUT


def test_canonical_weights_are_refused_where_the_plan_wants_others(register: Register) -> None:
    register()
    with pytest.raises(
        ValueError,
        match=r"weights.layout .*'rows-reversed'.*got 'canonical'",
    ):
        moe_apply(**call_with(weights_of(), plan_of()))
    assert CALLS == []


def test_processed_weights_never_reach_a_kernel_for_others(register: Register) -> None:
    register()
    plan = plan_of()
    own = call_with(moe_apply.prepare(weights_of(), plan), plan)
    # Three kernels have a higher priority but are not eligible: one declares no layout, one has another layout, and one does not
    # declare the flag ``processed_weights``.
    register("silent", traits={}, priority=16)
    register("other", traits={"weight_layout": "other", "processed_weights": True}, priority=15)
    register("forgot", traits={"weight_layout": LAYOUT}, priority=14)
    explanation = moe_apply.explain(**own)
    assert explanation.chosen is not None
    assert explanation.chosen.name == "reversing"
    reasons = {v.spec.name: v.reason for v in explanation.verdicts if not v.accepted}
    assert reasons["silent"] == reasons["forgot"] == "does not declare the flag processed_weights, which the request sets"
    assert reasons["other"] == "weight_layout=rows-reversed is not other"
    assert reasons["reference_moe_apply"] == "weight_layout=rows-reversed is not canonical"
    KernelRegistry.get().unregister("reversing")
    with pytest.raises(NoKernelFoundError, match="weight_layout=rows-reversed is not canonical"):
        moe_apply(**own)
    with pytest.raises(NoKernelFoundError, match="traits gate: weight_layout=rows-reversed"):
        moe_apply(**own, override="reference_moe_apply")
    assert CALLS == []


def test_a_silent_kernel_gets_canonical_weights(register: Register) -> None:
    register("silent", traits={}, weight_preprocessor=None)
    plan = plan_of()
    assert (plan.kernel, plan.weight_layout) == ("silent", "canonical")
    chosen = moe_apply.explain(**call_with(moe_apply.prepare(weights_of(), plan), plan)).chosen
    assert chosen is not None
    assert chosen.name == "silent"


def test_preprocessor_by_name(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("moe_preprocessors")
    module.reverse = reverse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "moe_preprocessors", module)
    register(weight_preprocessor="moe_preprocessors:reverse")
    given = weights_of()
    assert torch.equal(moe_apply.prepare(given, plan_of()).w2_weight, given.w2_weight.flip(1))


def test_preprocessors_that_do_not_deliver(register: Register) -> None:
    register(priority=7)  # its weight preprocessor makes the layout that the kernels below declare too
    register("none", weight_preprocessor=None, priority=9)
    with pytest.raises(ValueError, match=r"'rows-reversed' already.*none .*no weight_prepro"):
        moe_apply.prepare(weights_of(), plan_of())
    register("nothing", weight_preprocessor=lambda weights, plan: None, priority=10)
    with pytest.raises(TypeError, match=r"weight_preprocessor of nothing .*w13_weight"):
        moe_apply.prepare(weights_of(), plan_of())
    register("absent", weight_preprocessor="tokenspeed_kernel_base.ops.moe:absent", priority=11)
    with pytest.raises(AttributeError, match="the weight_preprocessor of absent"):
        moe_apply.prepare(weights_of(), plan_of())


@pytest.mark.parametrize("case", [c for c in get_operator("moe_apply").all_cases() if not c.large], ids=lambda case: case.name)
def test_cases_can_be_prepared_for_a_kernel(register: Register, case: Any) -> None:
    flags = (
        "bias",
        "w13_interleaved",
        "swiglu_limit",
        "swiglu_alpha_beta",
        "fp8_activations",
        "static_fp8_activations",
        "mxfp4_activations",
        "wide_activations",
        "exact_activations",
    )
    spec = KernelRegistry.get().get_by_name(register(traits={**OWN_LAYOUT, **dict.fromkeys(flags, any)}))
    arguments = case.build()
    expected = moe_apply(**arguments)
    prepared = moe_apply.operator.prepared(moe_apply.operator.complete(arguments), spec)
    assert prepared["weights"].layout == LAYOUT
    assert torch.equal(moe_apply(**prepared), expected)
    assert arguments["weights"].layout == "canonical"

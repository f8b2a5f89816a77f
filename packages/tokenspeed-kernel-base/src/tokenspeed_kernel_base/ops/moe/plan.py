"""The plan of a mixture-of-experts layer: what it computes, and the kernel that its weights are prepared for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel_base.checks import FLOATS, Checker, describe
from tokenspeed_kernel_base.ops.moe.weights import BLOCK_FP8, CANONICAL
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format
from tokenspeed_kernel_base.platform import PlatformInfo, current_platform, platform_of
from tokenspeed_kernel_base.registry import KernelRegistry, KernelSpec
from tokenspeed_kernel_base.selection import (
    Explanation,
    NoKernelFoundError,
    Override,
    Verdict,
    consider,
    make_request,
    override_in_force,
)
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat, dense_tensor_format, format_signature

WEIGHT_FORMATS = ("dense", "fp8_block", "mxfp4")
ACTIVATION_DTYPES = ("none", "fp8", "mxfp4")
ACTIVATIONS = ("swiglu",)

_SCALED_FORMATS = {
    "fp8_block": fp8_format(torch.float8_e4m3fn, "block", (BLOCK_FP8, BLOCK_FP8)),
    "mxfp4": mxfp4_format(),
}


@dataclass(frozen=True)
class MoEPlan:
    """What a mixture-of-experts layer computes, and for which kernel. Made by `moe_plan`, once a layer; immutable, hashable.

    Attributes:
        num_experts: experts whose weights there are; under expert parallelism those of this rank.
        top_k: experts a token, those of other ranks included.
        hidden_size: features of a token.
        intermediate_size: features between an expert's two projections.
        dtype: of the tokens, and of dense weights.
        weight_format: ``"dense"``, ``"fp8_block"`` or ``"mxfp4"``; see `MoEWeights`.
        activation_dtype: what the inputs of both projections are rounded to: ``"none"``, ``"fp8"`` or ``"mxfp4"``.
        w13_interleaved: whether rows of w13 alternate between gate and up.
        bias: whether both projections have a bias.
        activation: ``"swiglu"``: ``(up + beta) * gate * sigmoid(alpha * gate)``.
        alpha, beta: see activation; 1 and 0 make the usual SiLU-gated unit.
        limit: gate is cut to at most this and up to between minus this and this, before the activation; None leaves them.
        kernel: the kernel that the weights are prepared for.
        weight_layout: the layout that it wants them in.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    weight_format: str
    activation_dtype: str
    w13_interleaved: bool
    bias: bool
    activation: str
    alpha: float
    limit: float | None
    beta: float
    kernel: str
    weight_layout: str


def moe_plan(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    platform: PlatformInfo | None = None,
    weight_format: str = "dense",
    activation_dtype: str = "none",
    w13_interleaved: bool = False,
    bias: bool = False,
    activation: str = "swiglu",
    alpha: float = 1.0,
    limit: float | None = None,
    beta: float = 0.0,
    override: str | None = None,
    solution: str | None = None,
) -> MoEPlan:
    """Decides, before weights are loaded, which kernel shall serve `moe_apply` and how it wants them arranged.

    Kernels are compared as a call would compare them, each as if the weights were in the layout that it wants. `moe_apply`
    chooses again, among the kernels for the layout that was decided on here: as long as nothing was registered or configured in
    between, it arrives at ``plan.kernel``. To insist on that kernel, call it with ``override=plan.kernel``.

    Args:
        num_experts to beta: see `MoEPlan`. float32, float64 and the halves are dtypes.
        device: where the tensors will be; by default what `current_platform` stands for.
        platform: where the kernel shall run, in place of device.
        override: only this kernel; the platform and format gates still hold.
        solution: only kernels made with this.

    Returns:
        The plan, for `moe_process_weights` and `moe_apply`. Needs no device and launches nothing.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        NoKernelFoundError: no kernel does this here; the message has each with its reason.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import moe_plan
        >>> plan = moe_plan(8, 2, 64, 32, dtype=torch.float32, device="cpu", solution="reference")
        >>> plan.kernel, plan.weight_layout
        ('reference_moe_apply', 'canonical')
    """
    check = Checker("moe_plan")
    if device is not None and platform is not None:
        check.fail("platform", "None where device is given", str(platform))
    for name, value, kind in (("override", override, str), ("solution", solution, str), ("platform", platform, PlatformInfo)):
        if value is not None and not isinstance(value, kind):
            check.fail(name, f"a {kind.__name__} or None", value, TypeError)
    plan = MoEPlan(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=dtype,
        weight_format=weight_format,
        activation_dtype=activation_dtype,
        w13_interleaved=w13_interleaved,
        bias=bias,
        activation=activation,
        alpha=alpha,
        limit=limit,
        beta=beta,
        kernel="undecided",
        weight_layout=CANONICAL,
    )
    check_plan(check, plan)
    if platform is None:
        platform = current_platform() if device is None else platform_of(torch.device(device))
    wanted = Override(override, "override=") if override else override_in_force("moe", "moe_apply")
    explanation = _consider(plan, platform, solution, wanted)
    if explanation.chosen is None:
        raise NoKernelFoundError(explanation)
    return plan_for(plan, explanation.chosen)


def plan_for(plan: MoEPlan, spec: KernelSpec) -> MoEPlan:
    """The plan of the same computation for another kernel."""
    return dataclasses.replace(plan, kernel=spec.name, weight_layout=wanted_layout(spec))


def wanted_layout(spec: KernelSpec) -> str:
    """The layout that weights are prepared in for a kernel: the one that it names beside canonical (the first by name of
    several), if it has a preprocessor or does not take canonical weights; else canonical."""
    constraint = spec.traits.get("weight_layout")
    if constraint is None or constraint.values is None:
        return CANONICAL
    own = sorted(value for value in constraint.values if isinstance(value, str) and value != CANONICAL)
    if not own or (CANONICAL in constraint.values and spec.weight_preprocessor is None):
        return CANONICAL
    return own[0]


def _consider(plan: MoEPlan, platform: PlatformInfo, solution: str | None, override: Override | None) -> Explanation:
    """One selection in which each kernel is asked for the layout that it wants."""
    specs = KernelRegistry.get().get_for_operator("moe", "moe_apply")
    explanations: dict[str, Explanation] = {}
    for layout in sorted({CANONICAL, *map(wanted_layout, specs)}):
        request = make_request(
            "moe", "moe_apply", signature_of(plan), platform=platform, traits=traits_of(plan, layout), solution=solution
        )
        explanations[layout] = consider(request, override)
    verdicts = [
        verdict
        for layout, explanation in explanations.items()
        for verdict in explanation.verdicts
        if wanted_layout(verdict.spec) == layout
    ]
    accepted = _best_first(v for v in verdicts if v.accepted)
    rejected = sorted((v for v in verdicts if not v.accepted), key=lambda v: (-v.spec.priority, v.spec.name))
    shown = explanations[CANONICAL]
    chosen, problem = (accepted[0].spec if accepted else None), ""
    if override is not None and (chosen is None or chosen.name != override.kernel):
        layout = next((wanted_layout(v.spec) for v in verdicts if v.spec.name == override.kernel), CANONICAL)
        chosen, problem = None, explanations[layout].problem
    return dataclasses.replace(shown, verdicts=(*accepted, *rejected), chosen=chosen, problem=problem)


def _best_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return sorted(verdicts, key=lambda verdict: (tuple(-part for part in verdict.rank), verdict.spec.name))


def signature_of(plan: MoEPlan) -> FormatSignature:
    """The formats of tokens and weights; weights in a kernel's own layout keep the format that they came from."""
    dense = dense_tensor_format(plan.dtype)
    weight = _SCALED_FORMATS.get(plan.weight_format, dense)
    return format_signature(x=dense, w13=weight, w2=weight)


def intermediates_of(plan: MoEPlan) -> tuple[TensorFormat, ...]:
    """The format that the inputs of both projections are rounded to, if to any."""
    formats = {"fp8": fp8_format(torch.float8_e4m3fn, "token"), "mxfp4": mxfp4_format()}
    return (formats[plan.activation_dtype],) if plan.activation_dtype in formats else ()


def traits_of(plan: MoEPlan, layout: str) -> dict[str, Any]:
    """What a plan asks of a kernel, with weights in this layout. Each departure from the plain layer is a flag of its own, so that
    a kernel that has not heard of it is refused."""
    return {
        "num_experts": plan.num_experts,
        "top_k": plan.top_k,
        "hidden_size": plan.hidden_size,
        "intermediate_size": plan.intermediate_size,
        "activation": plan.activation,
        "bias": plan.bias,
        "w13_interleaved": plan.w13_interleaved,
        "swiglu_limit": plan.limit is not None,
        "swiglu_alpha_beta": (plan.alpha, plan.beta) != (1.0, 0.0),
        "fp8_activations": plan.activation_dtype == "fp8",
        "mxfp4_activations": plan.activation_dtype == "mxfp4",
        "weight_layout": layout,
        "processed_weights": layout != CANONICAL,
    }


def check_plan(check: Checker, plan: MoEPlan, prefix: str = "") -> None:
    """Raises TypeError or ValueError for a plan that makes no sense. ``prefix`` stands before the fields' names."""
    for name in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
        value = getattr(plan, name)
        if isinstance(value, bool) or not isinstance(value, int):
            check.fail(prefix + name, "int", _typed(value), TypeError)
        check.require(value >= 1, prefix + name, "at least 1", value)
    for name in ("w13_interleaved", "bias"):
        if not isinstance(getattr(plan, name), bool):
            check.fail(prefix + name, "bool", _typed(getattr(plan, name)), TypeError)
    for name in ("alpha", "beta", "limit"):
        value = getattr(plan, name)
        if value is None and name == "limit":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            check.fail(prefix + name, "float" + " or None" * (name == "limit"), _typed(value), TypeError)
        check.require(math.isfinite(value), prefix + name, "finite", value)
    check.require(plan.limit is None or plan.limit > 0, prefix + "limit", "positive or None", plan.limit)
    if not isinstance(plan.dtype, torch.dtype):
        check.fail(prefix + "dtype", "a torch.dtype", _typed(plan.dtype), TypeError)
    check.one_of(prefix + "dtype", plan.dtype, sorted(FLOATS, key=str))
    check.one_of(prefix + "weight_format", plan.weight_format, WEIGHT_FORMATS)
    check.one_of(prefix + "activation_dtype", plan.activation_dtype, ACTIVATION_DTYPES)
    check.one_of(prefix + "activation", plan.activation, ACTIVATIONS)
    for name in ("kernel", "weight_layout"):
        value = getattr(plan, name)
        if not isinstance(value, str):
            check.fail(prefix + name, "str", _typed(value), TypeError)
    blocked = [name for name in ("weight_format", "activation_dtype") if getattr(plan, name) == "mxfp4"]
    for name in ("hidden_size", "intermediate_size") if blocked else ():
        value = getattr(plan, name)
        because = f"a multiple of {BLOCK_MX}, because {blocked[0]} is mxfp4"
        check.require(value % BLOCK_MX == 0, prefix + name, because, value)


def _typed(value: Any) -> str:
    return f"{type(value).__name__} {describe(value)}"

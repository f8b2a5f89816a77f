"""The plan of a mixture-of-experts layer: its computation, and the kernel that its weights are processed for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8, BLOCK_MX, BLOCK_NVFP4
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format, mxfp8_format, nvfp4_format
from tokenspeed_kernel_base.planning import check_fields
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat, dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import CANONICAL
from tokenspeed_kernel_base.traits import TraitKind

WEIGHT_FORMATS = ("dense", "fp8_channel", "fp8_block", "mxfp8", "mxfp4", "nvfp4")
# Number of elements along k that share a scale. The length of a row must be a multiple of this number.
BLOCKS = {"mxfp8": BLOCK_MX, "mxfp4": BLOCK_MX, "nvfp4": BLOCK_NVFP4}
ACTIVATION_DTYPES = ("none", "fp8", "fp8_static", "mxfp4")
ACTIVATIONS = ("swiglu",)

_SCALED_FORMATS = {
    "fp8_channel": fp8_format(torch.float8_e4m3fn, "channel"),
    "fp8_block": fp8_format(torch.float8_e4m3fn, "block", (BLOCK_FP8, BLOCK_FP8)),
    "mxfp8": mxfp8_format(),
    "mxfp4": mxfp4_format(),
    "nvfp4": nvfp4_format(),
}


@dataclass(frozen=True)
class MoEPlan:
    """A plan: what a mixture-of-experts layer computes, and which kernel its weights are processed for. Plans are immutable and
    hashable.

    Make one plan for each layer, with `moe_apply.plan`. It takes the attributes up to ``intermediate_size`` by position, and the
    others by keyword.

    Attributes:
        num_experts: number of experts in the weights; under expert parallelism only this rank's experts.
        top_k: number of experts of each token, including experts of other ranks.
        hidden_size: number of features of a token.
        intermediate_size: features between the gate/up and the down projection of an expert.
        dtype: dtype of the tokens and of dense weights: float16, bfloat16, float32 or float64.
        weight_format: ``"dense"``, ``"fp8_channel"``, ``"fp8_block"``, ``"mxfp8"``, ``"mxfp4"`` or ``"nvfp4"``; see `MoEWeights`.
        activation_dtype: the format that the inputs of both projections are rounded to. ``"none"``; ``"fp8"`` with a scale for each
            token; ``"fp8_static"`` with one scale for each projection, stored in the weights object; or ``"mxfp4"``.
        w13_interleaved: whether rows of w13 alternate between gate and up.
        bias: whether both projections have a bias.
        activation: ``"swiglu"``: ``(up + beta) * gate * sigmoid(alpha * gate)``.
        alpha, beta: see activation; 1 and 0 give SwiGLU (SiLU gate).
        limit: before the activation, gate is clamped to at most ``limit`` and up to ``[-limit, limit]``; None does not clamp.
        exact_activations: whether activations must enter the MMAs exactly if ``activation_dtype`` is ``"none"``; see `moe_apply`.
        kernel: the kernel that the weights are processed for.
        weight_layout: the weight layout of that kernel.
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
    exact_activations: bool = False

    @property
    def wide_activations(self) -> bool:
        """Whether the result of ``act`` may exceed the range of the tokens' dtype. Only float16 tokens have a smaller range than
        the float32 result.
        """
        if self.dtype != torch.float16:
            return False
        if self.limit is None or self.alpha <= 0:  # gate * sigmoid(alpha * gate) is unbounded
            return True
        # The minimum of gate * sigmoid(alpha * gate) is -0.2785 / alpha.
        gate = max(self.limit, 0.2785 / self.alpha)
        return (self.limit + abs(self.beta)) * gate > torch.finfo(self.dtype).max


def signature_of(plan: MoEPlan) -> FormatSignature:
    """Returns the formats of tokens and weights; weights in a kernel's own layout keep the name of their original format."""
    dense = dense_tensor_format(plan.dtype)
    weight = _SCALED_FORMATS.get(plan.weight_format, dense)
    return format_signature(x=dense, w13=weight, w2=weight)


def intermediates_of(plan: MoEPlan) -> tuple[TensorFormat, ...]:
    """Returns the format that the inputs of both projections are rounded to, if any."""
    formats = {
        "fp8": fp8_format(torch.float8_e4m3fn, "token"),
        "fp8_static": fp8_format(torch.float8_e4m3fn, "tensor"),
        "mxfp4": mxfp4_format(),
    }
    return (formats[plan.activation_dtype],) if plan.activation_dtype in formats else ()


OPERAND_FORMATS = {"x": ("dense",), **dict.fromkeys(("w13", "w2"), ("dense", "fp8", "mxfp8", "mxfp4", "nvfp4"))}
PLAN_KINDS: dict[str, TraitKind] = {
    **dict.fromkeys(("num_experts", "top_k", "hidden_size", "intermediate_size"), int),
    "activation": ACTIVATIONS,
    **dict.fromkeys(("bias", "w13_interleaved", "swiglu_limit", "swiglu_alpha_beta"), bool),
    **dict.fromkeys(("fp8_activations", "static_fp8_activations", "mxfp4_activations"), bool),
    **dict.fromkeys(("wide_activations", "exact_activations"), bool),
    "weight_layout": str,
    "processed_weights": bool,
}


def traits_of(plan: MoEPlan) -> dict[str, Any]:
    """Returns the traits that a plan requires of a kernel.

    Each feature beyond the plain layer has its own flag, so a kernel that does not declare the flag is rejected."""
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
        "static_fp8_activations": plan.activation_dtype == "fp8_static",
        "mxfp4_activations": plan.activation_dtype == "mxfp4",
        "wide_activations": plan.wide_activations,
        "exact_activations": plan.exact_activations and plan.activation_dtype == "none",
        "weight_layout": plan.weight_layout,
        "processed_weights": plan.weight_layout != CANONICAL,
    }


def check_plan(check: Checker, plan: MoEPlan, prefix: str = "") -> None:
    """Raises TypeError or ValueError for an inconsistent plan. Error messages put ``prefix`` before the fields' names."""
    check_fields(check, plan, prefix)
    for name in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
        check.require(getattr(plan, name) >= 1, prefix + name, "at least 1", getattr(plan, name))
    for name in ("alpha", "beta", "limit"):
        value = getattr(plan, name)
        check.require(value is None or math.isfinite(value), prefix + name, "finite", value)
    check.require(plan.limit is None or plan.limit > 0, prefix + "limit", "positive or None", plan.limit)
    check.one_of(prefix + "dtype", plan.dtype, sorted(FLOATS, key=str))
    check.one_of(prefix + "weight_format", plan.weight_format, WEIGHT_FORMATS)
    check.one_of(prefix + "activation_dtype", plan.activation_dtype, ACTIVATION_DTYPES)
    check.one_of(prefix + "activation", plan.activation, ACTIVATIONS)
    for stated in ("weight_format", "activation_dtype"):
        block = BLOCKS.get(getattr(plan, stated), 1)
        for name in ("hidden_size", "intermediate_size"):
            value, because = getattr(plan, name), f"because {stated} is {getattr(plan, stated)}"
            wanted = f"a multiple of {block}, {because}; zeros may be appended to tokens, weights and biases"
            check.require(value % block == 0, prefix + name, wanted, value)

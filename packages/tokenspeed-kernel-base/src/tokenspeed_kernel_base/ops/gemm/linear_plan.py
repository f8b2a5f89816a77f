"""The plan of a linear layer: its computation, and the kernel that its weights are processed for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel_base.checks import FLOATS, HALVES, Checker
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8, BLOCK_MX, BLOCK_NVFP4
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format, mxfp8_format, nvfp4_format
from tokenspeed_kernel_base.planning import check_fields
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat, dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import CANONICAL
from tokenspeed_kernel_base.traits import TraitKind

E4M3 = torch.float8_e4m3fn
# The activation dtypes that each weight format can be combined with. The GEMM runs on tokens and weights in these two formats.
ACTIVATION_DTYPES = {
    "dense": ("none",),
    "fp8_channel": ("none", "fp8", "fp8_static"),
    "fp8_block": ("none", "fp8_block"),
    "mxfp4": ("none", "mxfp8", "mxfp4"),
    "nvfp4": ("none", "nvfp4"),
}
# Activation dtypes whose static scale is stored in the weights object.
STATIC = ("fp8_static", "nvfp4")
# Number of elements along k that share a scale. The length of a row must be a multiple of this number.
BLOCKS = {"mxfp4": BLOCK_MX, "nvfp4": BLOCK_NVFP4}

_WEIGHTS = {
    "fp8_channel": fp8_format(E4M3, "channel"),
    "fp8_block": fp8_format(E4M3, "block", (BLOCK_FP8, BLOCK_FP8)),
    "mxfp4": mxfp4_format(),
    "nvfp4": nvfp4_format(),
}
_ACTIVATIONS = {
    "fp8": fp8_format(E4M3, "token"),
    "fp8_static": fp8_format(E4M3, "tensor"),
    "fp8_block": fp8_format(E4M3, "block", (1, BLOCK_FP8)),
    "mxfp8": mxfp8_format(),
    "mxfp4": mxfp4_format(),
    "nvfp4": nvfp4_format(),
}


@dataclass(frozen=True)
class LinearPlan:
    """A plan: what a linear layer computes, and which kernel its weights are processed for. Plans are immutable and hashable.

    Make one plan for each layer, with `linear.plan`. It takes ``in_features`` and ``out_features`` by position, and the other
    attributes by keyword.

    Attributes:
        in_features: features of a token.
        out_features: features of a result.
        dtype: dtype of the tokens, the results and dense weights.
        weight_format: ``"dense"``, ``"fp8_channel"``, ``"fp8_block"``, ``"mxfp4"`` or ``"nvfp4"``; see `LinearWeights`. All
            formats but dense require float16 or bfloat16 tokens.
        activation_dtype: the format that tokens are rounded to. ``"none"`` is always possible. With fp8_channel weights:
            ``"fp8"``, with a scale for each token, or ``"fp8_static"``, with the weights' ``input_scale``. With fp8_block
            weights: ``"fp8_block"``, with a scale for each 128 features of a token. With mxfp4 weights: ``"mxfp8"`` or
            ``"mxfp4"``. With nvfp4 weights: ``"nvfp4"``, with the weights' ``input_scale`` as global scale.
        bias: whether the layer has a bias.
        max_tokens: the largest number of tokens of a call, if it is known, as in a decode-only worker; None: any number. Some
            kernels are specialised for few tokens, with a weight layout that no kernel for more tokens can read.
        kernel: the kernel that the weights are processed for.
        weight_layout: the weight layout of that kernel.
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    weight_format: str
    activation_dtype: str
    bias: bool
    max_tokens: int | None
    kernel: str
    weight_layout: str


def signature_of(plan: LinearPlan) -> FormatSignature:
    """Returns the formats of tokens and weights; weights in a kernel's own layout keep the name of their original format."""
    dense = dense_tensor_format(plan.dtype)
    return format_signature(x=dense, weight=_WEIGHTS.get(plan.weight_format, dense))


def intermediates_of(plan: LinearPlan) -> tuple[TensorFormat, ...]:
    """Returns the format that tokens are rounded to, if any."""
    return (_ACTIVATIONS[plan.activation_dtype],) if plan.activation_dtype in _ACTIVATIONS else ()


# Flag trait -> the plan's activation_dtype for which the flag is set.
_ROUNDED = {
    "fp8_activations": "fp8",
    "static_fp8_activations": "fp8_static",
    "fp8_block_activations": "fp8_block",
    "mxfp8_activations": "mxfp8",
    "mxfp4_activations": "mxfp4",
    "nvfp4_activations": "nvfp4",
}
OPERAND_FORMATS = {"x": ("dense",), "weight": ("dense", "fp8", "mxfp4", "nvfp4")}
PLAN_KINDS: dict[str, TraitKind] = {
    "in_features": int,
    "out_features": int,
    "bias": bool,
    "max_tokens": int | None,
    **dict.fromkeys(_ROUNDED, bool),
    "weight_layout": str,
    "processed_weights": bool,
}


def traits_of(plan: LinearPlan) -> dict[str, Any]:
    """Returns the traits of a plan.

    Each feature beyond a plain GEMM has its own trait. A kernel that does not declare the trait of a requested feature is not
    eligible. A kernel for few tokens declares ``max_tokens``. So it is not eligible for a plan without a bound, where
    ``max_tokens`` is None.
    """
    return {
        "in_features": plan.in_features,
        "out_features": plan.out_features,
        "bias": plan.bias,
        "max_tokens": plan.max_tokens,
        **{flag: plan.activation_dtype == dtype for flag, dtype in _ROUNDED.items()},
        "weight_layout": plan.weight_layout,
        "processed_weights": plan.weight_layout != CANONICAL,
    }


def check_plan(check: Checker, plan: LinearPlan, prefix: str = "") -> None:
    """Raises TypeError or ValueError for an inconsistent plan. Error messages put ``prefix`` before the fields' names."""
    check_fields(check, plan, prefix)
    for name in ("in_features", "out_features"):
        check.require(getattr(plan, name) >= 1, prefix + name, "at least 1", getattr(plan, name))
    check.require(plan.max_tokens is None or plan.max_tokens >= 1, prefix + "max_tokens", "at least 1 or None", plan.max_tokens)
    check.one_of(prefix + "weight_format", plan.weight_format, tuple(ACTIVATION_DTYPES))
    dtypes, beside = (FLOATS, "") if plan.weight_format == "dense" else (HALVES, f" beside {plan.weight_format} weights")
    spelled = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    check.require(plan.dtype in dtypes, prefix + "dtype", f"one of {spelled}{beside}", plan.dtype)
    allowed = ACTIVATION_DTYPES[plan.weight_format]
    wanted = f"one of {', '.join(map(repr, allowed))} beside {plan.weight_format} weights"
    check.require(plan.activation_dtype in allowed, prefix + "activation_dtype", wanted, plan.activation_dtype)
    block = BLOCKS.get(plan.weight_format, 1)
    because = f"a multiple of {block}, because weight_format is {plan.weight_format}; zeros may be appended to tokens and weights"
    check.require(plan.in_features % block == 0, prefix + "in_features", because, plan.in_features)

"""The plan of a linear layer: what it computes, and the kernel that its weights are prepared for."""

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
# What activations may be rounded to beside each format of weights, so that products are of the two formats.
ACTIVATION_DTYPES = {
    "dense": ("none",),
    "fp8_channel": ("none", "fp8", "fp8_static"),
    "fp8_block": ("none", "fp8_block"),
    "mxfp4": ("none", "mxfp8", "mxfp4"),
    "nvfp4": ("none", "nvfp4"),
}
# Activations that are rounded with a scale that the weights have.
STATIC = ("fp8_static", "nvfp4")
# Elements of k that share a scale, which a row has to have whole.
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
    """What a linear layer computes, and for which kernel. Made by `linear_plan`, once a layer; immutable, hashable.

    Attributes:
        in_features: features of a token.
        out_features: features of a result.
        dtype: of the tokens and results, and of dense weights.
        weight_format: ``"dense"``, ``"fp8_channel"``, ``"fp8_block"``, ``"mxfp4"`` or ``"nvfp4"``; see `LinearWeights`. All but
            dense ones go with float16 and bfloat16 tokens.
        activation_dtype: what tokens are rounded to: ``"none"``; beside fp8_channel ``"fp8"`` with a scale for each token, or
            ``"fp8_static"`` with one that the weights have; beside fp8_block ``"fp8_block"`` with a scale for each 128 features of
            a token; beside mxfp4 ``"mxfp8"`` or ``"mxfp4"``; beside nvfp4 ``"nvfp4"`` with a global scale that the weights have.
        bias: whether there is one.
        max_tokens: the most tokens of a call, as a worker knows them that only decodes; None: any number. Some kernels are for few
            tokens alone, and want weights in a layout of their own, in which they are of no use to more.
        kernel: the kernel that the weights are prepared for.
        weight_layout: the layout that it wants them in.
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
    """The formats of tokens and weights; weights in a kernel's own layout keep the format that they came from."""
    dense = dense_tensor_format(plan.dtype)
    return format_signature(x=dense, weight=_WEIGHTS.get(plan.weight_format, dense))


def intermediates_of(plan: LinearPlan) -> tuple[TensorFormat, ...]:
    """The format that tokens are rounded to, if to any."""
    return (_ACTIVATIONS[plan.activation_dtype],) if plan.activation_dtype in _ACTIVATIONS else ()


# The flag of a plan's activations, and the dtype that each stands for.
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
    """The traits of a plan.

    Each thing that a plan adds to a plain product is a trait of its own. A kernel that does not declare it is not selected. A
    kernel for few tokens declares ``max_tokens``. It is not selected for a plan without a bound, where ``max_tokens`` is None.
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
    """Raises TypeError or ValueError for a plan that makes no sense. ``prefix`` stands before the fields' names."""
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

"""A linear layer whose weights are processed once for the fastest kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import REFERENCE, operator
from tokenspeed_kernel_base.ops.gemm import _inputs as operands
from tokenspeed_kernel_base.ops.gemm.linear_plan import (
    OPERAND_FORMATS,
    PLAN_KINDS,
    LinearPlan,
    check_plan,
    intermediates_of,
    signature_of,
    traits_of,
)
from tokenspeed_kernel_base.ops.gemm.linear_weights import LinearWeights, check_canonical
from tokenspeed_kernel_base.ops.gemm.mm import mm
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8, quantize_fp8_with_scale
from tokenspeed_kernel_base.ops.quantization.mx import quantize_mxfp4, quantize_mxfp8
from tokenspeed_kernel_base.ops.quantization.nvfp4 import quantize_nvfp4
from tokenspeed_kernel_base.planning import UNDECIDED, Preparation, check_layout
from tokenspeed_kernel_base.platform import cpu_platform
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat
from tokenspeed_kernel_base.spec import CANONICAL
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "gemm",
    "linear",
    formats=OPERAND_FORMATS,
    traits=PLAN_KINDS,
    reference_traits={"weight_layout": CANONICAL},
    composed_traits={"weight_layout": CANONICAL},  # `mm` and the quantising operators support no other layout
    fixed_traits=("weight_layout", "processed_weights"),
    varying=("tokens",),
    planned="plan",
    layout="weight_layout",
    parts=(quantize_fp8, quantize_fp8_with_scale, quantize_mxfp8, quantize_mxfp4, quantize_nvfp4, mm),
)
def linear(x: Tensor, weights: LinearWeights, plan: LinearPlan, out: Tensor | None = None) -> Tensor:
    """Linear layer: ``x @ weight.t() + bias``, with weights that `linear.prepare` arranged for the plan's kernel.

    The operator is a composition of `mm` and, if the plan quantises activations, of `quantize_fp8`, `quantize_fp8_with_scale`,
    `quantize_mxfp8`, `quantize_mxfp4` or `quantize_nvfp4`. This composition is the fallback for plans that no fused kernel
    supports. Its weights are in the canonical layout.

    Rounding is that of these operators. Weights are dequantised exactly. Activations are rounded only as the plan's
    ``activation_dtype`` says. Accumulators are float32 (float64 for float64 tokens), and the result, bias included, is rounded to
    x's dtype once.

    Args:
        x: the plan's dtype ``[tokens, in_features]``; at most ``plan.max_tokens`` tokens.
        weights: `LinearWeights` or any object with its attributes, in the plan's ``weight_layout``: the result of
            `linear.prepare`. If the plan's layout is canonical, unprocessed weights are accepted too. Weights that are a `Resource`
            are passed to the kernel unchanged, with any further tensors that they hold.
        plan: the result of `linear.plan`.
        out: receives the result; must not overlap x.

    Returns:
        ``[tokens, out_features]`` in x's dtype.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.
        NoKernelFoundError: no registered kernel supports the plan and the layout of the weights.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import LinearWeights, linear
        >>> plan = linear.plan(2, 3, dtype=torch.float32, device="cpu", bias=True)
        >>> weights = LinearWeights(torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0]]), bias=torch.tensor([0.0, 0.0, 0.5]))
        >>> weights = linear.prepare(weights, plan)
        >>> linear(torch.tensor([[1.0, 10.0]]), weights, plan)
        tensor([[21.0000, 10.0000,  3.5000]])

    Safe in CUDA graphs.

    A kernel with its own weight layout declares ``traits={"weight_layout": "its-name", "processed_weights": True, ...}`` and a
    ``weight_preprocessor``. The kernel must not read ``weights.layout``, because the object may lack that attribute. If the kernel
    needs further tensors, its preprocessor returns an object that holds them, of a class derived from `LinearWeights` and
    `Resource`.
    """
    a, a_scale = x, None
    weight_scale = getattr(weights, "weight_scale", None)
    alpha = getattr(weights, "weight_global_scale", None)
    if plan.activation_dtype == "fp8":
        a, a_scale = quantize_fp8(x, "token")
    elif plan.activation_dtype == "fp8_block":
        a, a_scale = quantize_fp8(x, "block")
    elif plan.activation_dtype == "fp8_static":
        assert weights.input_scale is not None  # the operator has checked this
        a_scale = weights.input_scale
        a = quantize_fp8_with_scale(x, a_scale)
    elif plan.activation_dtype == "mxfp8":
        a, a_scale = quantize_mxfp8(x)
    elif plan.activation_dtype == "mxfp4":
        a, a_scale = quantize_mxfp4(x)
    elif plan.activation_dtype == "nvfp4":
        assert weights.input_scale is not None and alpha is not None  # noqa: PT018
        a, a_scale = quantize_nvfp4(x, weights.input_scale)
        alpha = alpha * weights.input_scale
    b_scale = None if weight_scale is None else weight_scale.t()
    return mm(a, weights.weight.t(), a_scale, b_scale, getattr(weights, "bias", None), plan.dtype, alpha, out)


@linear.formats
def _(plan: LinearPlan) -> FormatSignature:
    return signature_of(plan)


@linear.intermediates
def _(plan: LinearPlan) -> tuple[TensorFormat, ...]:
    return intermediates_of(plan)


@linear.traits
def _(plan: LinearPlan) -> dict[str, object]:
    return traits_of(plan)  # the ``check`` hook ensures that the weights are in the plan's layout


@linear.check
def _(check: Checker, x: Tensor, weights: LinearWeights, plan: LinearPlan) -> None:
    check_plan(check, plan, "plan.")
    check.bind("in_features", plan.in_features, "plan.in_features")
    check.bind("out_features", plan.out_features, "plan.out_features")
    check.tensor("x", x, "tokens in_features", plan.dtype)
    if plan.max_tokens is not None:
        check.require(
            x.shape[0] <= plan.max_tokens, "x.shape[0]", f"at most plan.max_tokens, which is {plan.max_tokens}", x.shape[0]
        )
    check_layout(check, weights, plan, "linear.prepare")
    if plan.weight_layout == CANONICAL:
        check_canonical(check, weights, plan)


@linear.plan
def _(
    check: Checker,
    in_features: int,
    out_features: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_format: str = "dense",
    activation_dtype: str = "none",
    bias: bool = False,
    max_tokens: int | None = None,
) -> LinearPlan:
    facts = (in_features, out_features, dtype, weight_format, activation_dtype, bias, max_tokens)
    plan = LinearPlan(*facts, UNDECIDED, CANONICAL)
    check_plan(check, plan)
    return plan


@linear.prepare
def _(preparation: Preparation, weights: Any, plan: LinearPlan) -> LinearWeights:
    """Prepares weights for the plan's kernel. The kernel's preprocessor returns an object with the attributes of `LinearWeights`.
    These attributes are copied to a new `LinearWeights`, so any further attributes are lost. To keep further tensors, the
    preprocessor returns an object of a class derived from both `LinearWeights` and `Resource`. Such an object is not copied. If the
    preprocessor omits the input scale, this hook adds it.
    """
    check_plan(preparation.check, plan, "plan.")
    return preparation.arranged(weights, plan, LinearWeights, check_canonical)


@linear.fake
def _(x: Tensor, plan: LinearPlan) -> Tensor:
    return x.new_empty((x.shape[0], plan.out_features))


def _drawn(draw: Draw, tokens: int, plan: LinearPlan) -> tuple[Tensor, LinearWeights]:
    """Draws tokens, and weights that keep outputs about as large as inputs. The weights are `mm`'s b operands in their stored
    orientation."""
    sizes = tokens, plan.in_features, plan.out_features
    if plan.weight_format == "dense":
        make = operands.dense(*sizes, dtype=plan.dtype)
    elif plan.weight_format.startswith("fp8"):
        make = operands.fp8(*sizes, a_scale="", b_scale=plan.weight_format.removeprefix("fp8_"), a_dtype=plan.dtype)
    else:
        make = operands.micro(*sizes, a="dense", b=plan.weight_format)
    made = make(draw)
    scale = made.get("b_scale")
    largest = {"fp8_static": 448.0, "nvfp4": 448.0 * 6}.get(plan.activation_dtype)  # magnitudes of the tokens reach about 4
    weights = LinearWeights(
        made["b"].mT,
        None if scale is None else scale.mT,
        made.get("alpha"),
        draw.normal(plan.out_features, dtype=plan.dtype) if plan.bias else None,
        input_scale=None if largest is None else draw.uniform(1, low=3.5 / largest, high=5.0 / largest),
    )
    return made["a"].to(plan.dtype), weights


@recipe
def _inputs(
    tokens: int, in_features: int, out_features: int, *, wide_bias: bool = False, **options: Any
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments of one layer.

    Args:
        wide_bias: whether to use a float32 bias.
        options: further fields of the plan.
    """

    def make(draw: Draw) -> dict[str, Any]:
        # All kernels get the same case, with canonical weights. The code that runs the case then prepares these weights for each
        # kernel.
        fixed: dict[str, Any] = {"platform": cpu_platform(), "override": f"{REFERENCE}_linear"}
        plan = linear.plan(in_features, out_features, **{"bias": wide_bias, **options, **fixed})
        x, weights = _drawn(draw, tokens, plan)
        if wide_bias:
            weights = dataclasses.replace(weights, bias=draw.normal(out_features))
        return {"x": x, "weights": weights, "plan": plan}

    return make


@linear.cases
def _() -> list[Case]:
    half, single, double = torch.float16, torch.float32, torch.float64
    formats = ("fp8_channel", "fp8_block", "mxfp4", "nvfp4")
    channel, block, mxfp4, nvfp4 = (dict[str, Any](weight_format=each) for each in formats)
    decode = (1, 4, 16, 64, 256)
    return [
        Case("dense, odd sizes, float32, bias", _inputs(5, 33, 7, dtype=single, bias=True)),
        Case("dense, float64", _inputs(3, 9, 5, dtype=double)),
        Case("dense, one token", _inputs(1, 96, 80)),
        Case("dense, float16, float32 bias", _inputs(9, 64, 48, dtype=half, wide_bias=True)),
        Case("dense, no tokens", _inputs(0, 64, 48, bias=True)),
        Case("fp8 per channel", _inputs(4, 160, 48, **channel)),
        Case("fp8 per channel, fp8 activations, bias", _inputs(7, 96, 40, activation_dtype="fp8", bias=True, **channel)),
        Case("fp8 per channel, static fp8 activations", _inputs(5, 64, 48, activation_dtype="fp8_static", dtype=half, **channel)),
        Case("fp8 per block, short last blocks", _inputs(3, 160, 200, dtype=half, **block)),
        Case("fp8 per block, fp8 activations", _inputs(5, 300, 200, activation_dtype="fp8_block", **block)),
        Case("mxfp4", _inputs(3, 96, 40, **mxfp4)),
        Case("mxfp4, 3 tokens of at most 4", _inputs(3, 96, 40, max_tokens=4, **mxfp4)),
        Case("mxfp4, 12 tokens of at most 16, bias, float16", _inputs(12, 192, 72, bias=True, dtype=half, max_tokens=16, **mxfp4)),
        Case("mxfp4, 17 tokens, bias, float16", _inputs(17, 192, 72, bias=True, dtype=half, **mxfp4)),
        Case("mxfp4, mxfp8 activations", _inputs(5, 64, 33, activation_dtype="mxfp8", **mxfp4)),
        Case("mxfp4 in all, bias", _inputs(5, 96, 40, activation_dtype="mxfp4", bias=True, **mxfp4)),
        Case("nvfp4, one token", _inputs(1, 144, 40, **nvfp4)),
        Case("nvfp4, one token of at most one, float16", _inputs(1, 144, 40, dtype=half, max_tokens=1, **nvfp4)),
        Case("nvfp4, 9 tokens of at most 16, float32 bias", _inputs(9, 512, 130, wide_bias=True, max_tokens=16, **nvfp4)),
        Case("nvfp4, 70 tokens, float16", _inputs(70, 80, 64, dtype=half, **nvfp4)),
        Case("nvfp4 in all", _inputs(5, 80, 48, activation_dtype="nvfp4", **nvfp4)),
        Case("nvfp4, no tokens of at most 16", _inputs(0, 80, 64, max_tokens=16, **nvfp4)),
        *(Case(f"llama-70b o, nvfp4, decode {m}", _inputs(m, 8192, 8192, max_tokens=m, **nvfp4), large=True) for m in decode),
        *(
            Case(f"llama-70b gate and up, nvfp4, decode {m}", _inputs(m, 8192, 57344, max_tokens=m, **nvfp4), large=True)
            for m in decode
        ),
        *(Case(f"llama-70b o, mxfp4, decode {m}", _inputs(m, 8192, 8192, max_tokens=m, **mxfp4), large=True) for m in decode),
        *(
            Case(f"gpt-oss-120b qkv, mxfp4, decode {m}", _inputs(m, 2880, 5120, bias=True, max_tokens=m, **mxfp4), large=True)
            for m in decode
        ),
        Case("gpt-oss-120b qkv, dense, decode 64", _inputs(64, 2880, 5120, bias=True), large=True),
        Case("llama-70b o, nvfp4, prefill 4096", _inputs(4096, 8192, 8192, **nvfp4), large=True),
        Case("llama-70b o, fp8 per channel, decode 16", _inputs(16, 8192, 8192, activation_dtype="fp8", **channel), large=True),
        Case(
            "deepseek-v3 o, fp8 per block, decode 16", _inputs(16, 16384, 7168, activation_dtype="fp8_block", **block), large=True
        ),
        Case("deepseek-v3 o, fp8 weight only per block, decode 16", _inputs(16, 16384, 7168, **block), large=True),
    ]


@linear.vary
def _(variation: Variation, x: Tensor, weights: LinearWeights, plan: LinearPlan) -> dict[str, Any]:
    if variation.want is not Want.CAPTURED:
        return {}
    options = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    for name in ("kernel", "weight_layout"):  # these fields follow from the kernel
        del options[name]
    bias = getattr(weights, "bias", None)
    return _inputs(len(x), wide_bias=bias is not None and bias.dtype != plan.dtype, **options)(variation.draw)


@linear.cost
def _(x: Tensor, weights: LinearWeights, plan: LinearPlan) -> Cost:
    stored = (getattr(weights, name, None) for name in ("weight", "weight_scale", "weight_global_scale", "bias", "input_scale"))
    tokens, k, n = x.shape[0], plan.in_features, plan.out_features
    return Cost(flops=2.0 * tokens * k * n, bytes=nbytes(x, *stored) + tokens * n * x.element_size())

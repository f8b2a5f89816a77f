"""A mixture-of-experts layer for given expert ids and routing weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, absent_ids, nbytes, poisoned, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import REFERENCE, operator
from tokenspeed_kernel_base.ops.activation.swiglu import swiglu
from tokenspeed_kernel_base.ops.moe.plan import (
    BLOCKS,
    OPERAND_FORMATS,
    PLAN_KINDS,
    MoEPlan,
    check_plan,
    intermediates_of,
    signature_of,
    traits_of,
)
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights, check_canonical, with_byte_scales
from tokenspeed_kernel_base.ops.quantization.encodings import (
    BLOCK_FP8,
    decode_fp8,
    decode_mxfp4,
    decode_mxfp8,
    decode_nvfp4,
    encode_fp8,
    encode_mxfp4,
)
from tokenspeed_kernel_base.ops.quantization.formats import blocks
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8
from tokenspeed_kernel_base.planning import UNDECIDED, Preparation, check_layout
from tokenspeed_kernel_base.platform import cpu_platform
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat
from tokenspeed_kernel_base.spec import CANONICAL
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "moe",
    "moe_apply",
    formats=OPERAND_FORMATS,
    traits=PLAN_KINDS,
    reference_traits={"weight_layout": CANONICAL},
    fixed_traits=("weight_layout", "processed_weights"),
    varying=("tokens",),
    planned="plan",
    layout="weight_layout",
)
def moe_apply(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
) -> Tensor:
    """Applies a mixture-of-experts layer to routed tokens: gate/up projection, gated activation, down projection, weighted sum.

    ``sum over slots of topk_weights * (w2 act(w13 x + b13) + b2)``, with the weights of the slot's expert. A slot is one of the
    top_k (token, expert) pairs of a token.

    ``w13 x`` has a gate and an up value for each intermediate feature. ``act`` is ``(up + beta) * gate * sigmoid(alpha * gate)``
    (Shazeer, 2020, arXiv:2002.05202). With a ``limit``, gate is first clamped to at most ``limit`` and up to ``[-limit, limit]``.
    The options are fields of `MoEPlan`.

    Rounding. Weights are dequantised exactly (to float32). ``activation_dtype`` says how x and the result of ``act`` are rounded.
    ``"fp8"`` rounds them to float8_e4m3fn with a scale for each token, as `quantize_fp8` does. ``"fp8_static"`` rounds them to
    float8_e4m3fn with the static input scales of the weights object, saturating. ``"mxfp4"`` rounds both to mxfp4, as
    `quantize_mxfp4` does. ``"none"`` rounds neither, but see Exactness below. Everything else is float32 (float64 for float64
    tokens), including the sum over slots; the result is rounded to x's dtype once, at the end. Kernels may also round the result of
    ``act`` and each slot's output to x's dtype. Each of these roundings changes a term of a sum by a relative error of at most eps.
    So a tolerance of a few eps of the largest output covers these roundings. If a kernel rounds an activation differently before it
    quantises the activation, the quantised value may be a neighbouring value. The tolerance is then that of the narrow format.

    Range. With float16 tokens, the result of ``act`` and the outputs of slots may exceed float16's maximum, 65,504. Kernels keep
    such values as float32, or as float16 with a power-of-two scale for each row. The float16 values have a relative error of at
    most eps, or an absolute error of at most 2^-40 of the row's largest magnitude. The trait ``wide_activations`` means that the
    plan's ``limit`` does not keep ``act`` within float16. A kernel that stores ``act`` as plain float16 does not declare this
    trait, so it is not eligible for such plans.

    Exactness. With ``"none"`` a kernel may split each input of a projection into float8 terms. An element then has an error of at
    most 2^-21 of the largest magnitude in its row, where a row is a token of x or a slot of ``act``. Elements of at least 2^-13 of
    that magnitude are exact. A row counts as inexact if more than a quarter of its elements would be inexact, or more than a
    quarter of the nonzero elements of 32 neighbours. The kernel computes inexact rows by another method, without these errors. The
    device decides in each call which rows are inexact. So an element next to an outlier that is 2^21 times larger vanishes only if
    most of its neighbours do not vanish. In a dot product, float8 MMAs may truncate the terms of 32 neighbouring elements to 14
    bits, counted from the largest of these terms. `explain` states the error bound of such kernels. With ``exact_activations`` no
    kernel has these errors: elements of 16 bits or more enter the MMAs exactly.

    Overflow. An intermediate beyond float32's range is infinite, and outputs that depend on it are infinite or NaN. Within that
    range, precision does not depend on magnitude. The order of summation is unspecified. With ``"fp8"`` and ``"fp8_static"`` a
    kernel may accumulate weights times unscaled e4m3 activations (up to 448), and multiply by the activation's scale afterwards.
    Outputs may then be infinite or NaN where this accumulator overflows.

    Args:
        x: the plan's dtype ``[tokens, hidden]``.
        weights: `MoEWeights` or any object with its attributes, in the plan's ``weight_layout``: the result of
            `moe_apply.prepare`. If the plan's layout is canonical, unprocessed weights are accepted too. Weights that are a
            `Resource` are passed to the kernel unchanged, with any further tensors that they hold.
        topk_weights: float32 ``[tokens, top_k]``.
        topk_ids: int32 ``[tokens, top_k]``, below ``plan.num_experts``; this is checked for CPU tensors only. A negative id skips
            the slot: under expert parallelism it stands for an expert of another rank. An expert that occurs twice counts twice.
        plan: the result of `moe_apply.plan`.
        out: receives the result; must not overlap x.

    Returns:
        ``[tokens, hidden]`` in x's dtype; zero for tokens whose slots are all skipped.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.
        NoKernelFoundError: no registered kernel supports the plan and the layout of the weights.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import MoEWeights, moe_apply, moe_topk
        >>> plan = moe_apply.plan(num_experts=4, top_k=2, hidden_size=8, intermediate_size=6, dtype=torch.float32, device="cpu")
        >>> weights = MoEWeights(torch.randn(4, 12, 8), None, None, torch.randn(4, 8, 6), None, None)
        >>> weights = moe_apply.prepare(weights, plan)
        >>> topk_weights, topk_ids = moe_topk(torch.randn(3, 4), top_k=2)
        >>> moe_apply(torch.randn(3, 8), weights, topk_weights, topk_ids, plan).shape
        torch.Size([3, 8])

    Safe in CUDA graphs, except with the reference, which reads topk_ids on the host.

    A kernel with its own weight layout declares ``traits={"weight_layout": "its-name", "processed_weights": True, ...}`` and a
    ``weight_preprocessor``. The kernel must not read ``weights.layout``, because the object may lack that attribute. If the kernel
    needs more than the six tensors, its preprocessor returns an object that holds them, of a class derived from `MoEWeights` and
    `Resource`.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    result = torch.zeros(x.shape, dtype=wide, device=x.device)
    tokens = _rounded(x.to(wide), plan.activation_dtype, getattr(weights, "w13_input_scale", None))
    between_scale = getattr(weights, "w2_input_scale", None)
    for expert in sorted(set(topk_ids.flatten().tolist())):
        if expert < 0:
            continue
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        w13 = _decoded(weights, "w13", expert, plan.weight_format, wide)
        gate_up = tokens[token] @ w13.t()
        if weights.w13_weight_bias is not None:
            gate_up += weights.w13_weight_bias[expert]
        hidden = swiglu.operator.body(gate_up, plan.alpha, plan.limit, plan.beta, plan.w13_interleaved)
        w2 = _decoded(weights, "w2", expert, plan.weight_format, wide)
        down = _rounded(hidden, plan.activation_dtype, between_scale) @ w2.t()
        if weights.w2_weight_bias is not None:
            down += weights.w2_weight_bias[expert]
        result.index_add_(0, token, down * topk_weights[token, slot].unsqueeze(-1))
    return result.to(x.dtype)


def _decoded(weights: MoEWeights, name: str, expert: int, weight_format: str, dtype: torch.dtype) -> Tensor:
    """Returns one expert's dequantised weight ``[out, in]`` of the projection ``name``."""
    weight: Tensor = getattr(weights, f"{name}_weight")[expert]
    scales: Tensor | None = getattr(weights, f"{name}_weight_scale")
    if scales is None:
        return weight.to(dtype)
    scale = scales[expert]
    if weight_format == "fp8_channel":
        return decode_fp8(weight, scale, (), dtype)
    if weight_format == "fp8_block":
        return decode_fp8(weight, scale, (BLOCK_FP8, BLOCK_FP8), dtype)
    if weight_format == "mxfp8":
        return decode_mxfp8(weight, scale.view(torch.uint8), dtype)
    if weight_format == "nvfp4":
        return decode_nvfp4(weight, scale, getattr(weights, f"{name}_weight_global_scale")[expert], dtype)
    return decode_mxfp4(weight, scale.view(torch.uint8), dtype)


def _rounded(values: Tensor, activation_dtype: str, scale: Tensor | None) -> Tensor:
    """Quantises and dequantises an activation. ``scale``: the static input scale of ``"fp8_static"``."""
    if activation_dtype == "fp8":
        q, scale = quantize_fp8.operator.body(values.float(), "token")
        return decode_fp8(q, scale, (), values.dtype)
    if activation_dtype == "fp8_static":
        assert scale is not None  # checked by the operator
        return decode_fp8(encode_fp8(values.float() / scale), scale, (), values.dtype)
    if activation_dtype == "mxfp4":
        return decode_mxfp4(*encode_mxfp4(values), values.dtype)
    return values


@moe_apply.formats
def _(plan: MoEPlan) -> FormatSignature:
    return signature_of(plan)


@moe_apply.intermediates
def _(plan: MoEPlan) -> tuple[TensorFormat, ...]:
    return intermediates_of(plan)


@moe_apply.traits
def _(plan: MoEPlan) -> dict[str, object]:
    return traits_of(plan)  # the ``check`` hook ensures that the weights are in the plan's layout


@moe_apply.check
def _(check: Checker, x: Tensor, weights: MoEWeights, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan) -> None:
    check_plan(check, plan, "plan.")
    check.bind("hidden", plan.hidden_size, "plan.hidden_size")
    check.bind("top_k", plan.top_k, "plan.top_k")
    check.tensor("x", x, "tokens hidden", plan.dtype)
    check.tensor("topk_weights", topk_weights, "tokens top_k", torch.float32)
    check.tensor("topk_ids", topk_ids, "tokens top_k", torch.int32)
    check_layout(check, weights, plan, "moe_apply.prepare")
    if plan.weight_layout == CANONICAL:
        check_canonical(check, weights, plan)


@moe_apply.check_values(host=("topk_ids",))
def _(check: Checker, topk_ids: Tensor | None, plan: MoEPlan) -> None:
    if topk_ids is None or not topk_ids.numel():
        return
    highest = int(topk_ids.max())
    check.require(highest < plan.num_experts, "topk_ids", f"below plan.num_experts = {plan.num_experts}", f"an id {highest}")


@moe_apply.plan
def _(
    check: Checker,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_format: str = "dense",
    activation_dtype: str = "none",
    w13_interleaved: bool = False,
    bias: bool = False,
    activation: str = "swiglu",
    alpha: float = 1.0,
    limit: float | None = None,
    beta: float = 0.0,
    exact_activations: bool = False,
) -> MoEPlan:
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
        kernel=UNDECIDED,
        weight_layout=CANONICAL,
        exact_activations=exact_activations,
    )
    check_plan(check, plan)
    return plan


@moe_apply.prepare
def _(preparation: Preparation, weights: Any, plan: MoEPlan) -> MoEWeights:
    """Prepares weights for the plan's kernel. The kernel's preprocessor receives e8m0 scales as uint8, and returns an object with
    the six attributes of `MoEWeights`. An object derived from `Resource` may hold further tensors. If the returned object lacks
    input scales, this hook adds the scales.
    """
    check_plan(preparation.check, plan, "plan.")
    return preparation.arranged(weights, plan, MoEWeights, check_canonical, with_byte_scales)


@moe_apply.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _weight(draw: Draw, plan: MoEPlan, rows: int, columns: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Draws one projection's weights, scales and global scales. Outputs are about as large as inputs."""
    experts, spread = plan.num_experts, columns**-0.5
    if plan.weight_format == "dense":
        return draw.normal(experts, rows, columns, dtype=plan.dtype, scale=spread), None, None
    if plan.weight_format in ("fp8_channel", "fp8_block"):
        channel = (rows, 1)
        shape = channel if plan.weight_format == "fp8_channel" else (blocks(rows, BLOCK_FP8), blocks(columns, BLOCK_FP8))
        scale = draw.uniform(experts, *shape, low=spread / 2, high=spread * 1.5)
        return draw.normal(experts, rows, columns, dtype=torch.float8_e4m3fn), scale, None
    if plan.weight_format == "mxfp8":
        codes, deviation = draw.normal(experts, rows, columns, dtype=torch.float8_e4m3fn), 1.0
    else:
        # Uniformly distributed e2m1 bit patterns have a standard deviation of about 3.
        codes, deviation = draw.integers(0, 256, experts, rows, columns // 2, dtype=torch.uint8), 3.0
    scales = (experts, rows, columns // BLOCKS[plan.weight_format])
    if plan.weight_format == "nvfp4":
        scale = draw.uniform(*scales, low=32.0, high=96.0).to(torch.float8_e4m3fn)
        return codes, scale, draw.uniform(experts, low=0.5, high=1.5) * (spread / (64 * deviation))
    exponent = 127 + round(torch.tensor(spread / deviation).log2().item())
    return codes, draw.integers(exponent - 1, exponent + 2, *scales, dtype=torch.uint8), None


def _input_scale(draw: Draw, plan: MoEPlan) -> Tensor | None:
    """Returns a static input scale, if the plan needs one. With this scale, magnitudes above about 4 saturate."""
    return draw.uniform(1, low=0.008, high=0.012) if plan.activation_dtype == "fp8_static" else None


@functools.lru_cache(typed=True)  # planning takes several times as long as drawing a small layer
def _canonical_plan(*sizes: int, **options: Any) -> MoEPlan:
    """Returns the plan with which the cases draw weights: that of the reference, whose layout is canonical. So all kernels are
    tested with the same weights. The code that runs a case on a kernel prepares the weights for this kernel."""
    plan: MoEPlan = moe_apply.plan(*sizes, **options, platform=cpu_platform(), override=f"{REFERENCE}_moe_apply")
    return plan


@recipe
def _inputs(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    *,
    of: int = 0,
    rows: Sequence[int] | None = None,
    gain: float = 1.0,
    outlier: float | None = None,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments of one layer.

    Args:
        of: number of experts of all ranks together; 0 means only this rank's experts. Experts of other ranks get negative ids.
        rows: number of tokens of each expert of this rank; all other slots get negative ids. By default routing is random.
        gain: multiplies x. The result of ``act`` grows with the square of the gain, so topk_weights are divided by that square.
        outlier: value of the first feature of all tokens. The column of w13 for this feature is zero. All other features are 1.25.
        options: further fields of the plan.
    """

    def make(draw: Draw) -> dict[str, Any]:
        plan = _canonical_plan(experts, top_k, hidden, intermediate, **options)
        w13, w13_scale, w13_global_scale = _weight(draw, plan, 2 * intermediate, hidden)
        w2, w2_scale, w2_global_scale = _weight(draw, plan, hidden, intermediate)
        b13, b2 = (draw.normal(experts, n, scale=0.2) if plan.bias else None for n in (2 * intermediate, hidden))
        if rows is None:
            chosen = draw.uniform(tokens, max(experts, of)).topk(top_k, dim=-1).indices.int()
        else:
            # Ids are filled expert by expert, column by column. No expert occurs twice for a token, because no expert has more
            # rows than there are tokens.
            ids = [expert for expert, count in enumerate(rows) for _ in range(count)]
            ids += [experts] * (tokens * top_k - len(ids))
            chosen = draw.tensor(ids, torch.int32).view(top_k, tokens).T[draw.permutation(tokens)].contiguous()
        x = draw.normal(tokens, hidden, dtype=plan.dtype) * gain
        if outlier is not None:
            x[:], x[:, 0], w13[..., 0] = 1.25, outlier, 0
        return {
            "x": x,
            "weights": MoEWeights(
                *(w13, w13_scale, b13, w2, w2_scale, b2),
                w13_input_scale=_input_scale(draw, plan),
                w2_input_scale=_input_scale(draw, plan),
                w13_weight_global_scale=w13_global_scale,
                w2_weight_global_scale=w2_global_scale,
            ),
            "topk_weights": torch.softmax(draw.normal(tokens, top_k), dim=-1) / gain**2,
            "topk_ids": torch.where(chosen < experts, chosen, -1),
            "plan": plan,
        }

    return make


def _nothing_here(draw: Draw) -> dict[str, Any]:
    arguments = _inputs(3, 2, 2, 16, 16, dtype=torch.float32)(draw)
    return {**arguments, "topk_ids": torch.full_like(arguments["topk_ids"], -1)}


_OUTLIER: dict[str, Any] = {"exact_activations": True, "outlier": 2.0**20}
_GPT_OSS: dict[str, Any] = {"w13_interleaved": True, "bias": True, "alpha": 1.702, "limit": 7.0, "beta": 1.0}


@moe_apply.cases
def _() -> list[Case]:
    float32: dict[str, Any] = {"dtype": torch.float32}
    half = torch.float16
    return [
        Case("dense float32, 4 experts, odd sizes", _inputs(5, 4, 2, 10, 7, **float32)),
        Case("dense bfloat16, gpt-oss options", _inputs(9, 8, 4, 96, 64, **_GPT_OSS)),
        Case("dense float16, bias, concatenated", _inputs(9, 6, 2, 64, 48, dtype=torch.float16, bias=True)),
        Case("dense float16, activations beyond its range", _inputs(9, 6, 2, 64, 48, dtype=torch.float16, gain=512.0)),
        Case(
            "mxfp4 float16, activations beyond its range",
            _inputs(9, 6, 2, 64, 96, weight_format="mxfp4", dtype=torch.float16, gain=512.0),
        ),
        Case("mxfp4, exact beside an outlier", _inputs(9, 6, 2, 64, 96, weight_format="mxfp4", **_OUTLIER)),
        Case("one token, one expert of 16", _inputs(1, 16, 1, 64, 64)),
        Case("mxfp4, gpt-oss options", _inputs(7, 8, 4, 96, 64, weight_format="mxfp4", **_GPT_OSS)),
        Case("mxfp4, concatenated, fp8 activations", _inputs(7, 8, 2, 64, 96, weight_format="mxfp4", activation_dtype="fp8")),
        Case(
            "mxfp4, static fp8 activations",
            _inputs(7, 8, 4, 96, 64, weight_format="mxfp4", activation_dtype="fp8_static", **_GPT_OSS),
        ),
        Case("dense float16, static fp8 activations", _inputs(5, 4, 2, 48, 80, activation_dtype="fp8_static", dtype=torch.float16)),
        Case("mxfp4 in all", _inputs(7, 8, 4, 96, 64, weight_format="mxfp4", activation_dtype="mxfp4", **_GPT_OSS)),
        Case("fp8 per channel, odd sizes", _inputs(6, 4, 2, 90, 70, weight_format="fp8_channel", bias=True)),
        Case(
            "fp8 per channel, fp8 activations, interleaved",
            _inputs(6, 4, 2, 160, 96, weight_format="fp8_channel", activation_dtype="fp8", w13_interleaved=True),
        ),
        Case(
            "fp8 per channel, static fp8 activations, float16",
            _inputs(5, 4, 2, 64, 80, weight_format="fp8_channel", activation_dtype="fp8_static", dtype=torch.float16),
        ),
        Case("mxfp8, gpt-oss options", _inputs(7, 4, 2, 96, 160, weight_format="mxfp8", **_GPT_OSS)),
        Case(
            "mxfp8, fp8 activations, float16", _inputs(5, 4, 2, 64, 32, weight_format="mxfp8", activation_dtype="fp8", dtype=half)
        ),
        Case("nvfp4, gpt-oss options", _inputs(7, 4, 2, 80, 144, weight_format="nvfp4", **_GPT_OSS)),
        Case("nvfp4, float16", _inputs(5, 4, 2, 64, 48, weight_format="nvfp4", dtype=half)),
        Case("nvfp4, fp8 activations", _inputs(6, 4, 2, 160, 64, weight_format="nvfp4", activation_dtype="fp8")),
        Case("fp8 blocks, blocks cut short", _inputs(6, 4, 2, 192, 136, weight_format="fp8_block")),
        Case("fp8 blocks, fp8 activations", _inputs(6, 4, 2, 128, 256, weight_format="fp8_block", activation_dtype="fp8")),
        Case(
            "fp8 blocks, static fp8 activations",
            _inputs(6, 4, 2, 160, 96, weight_format="fp8_block", activation_dtype="fp8_static"),
        ),
        Case("fp8 blocks, gpt-oss options", _inputs(9, 4, 2, 160, 160, weight_format="fp8_block", **_GPT_OSS)),
        Case("fp8 blocks, float16", _inputs(5, 4, 2, 256, 128, weight_format="fp8_block", dtype=torch.float16)),
        Case("mxfp4, float16", _inputs(9, 6, 2, 64, 96, weight_format="mxfp4", dtype=torch.float16)),
        Case(
            "mxfp4 and fp8 activations, float32", _inputs(5, 4, 2, 64, 32, weight_format="mxfp4", activation_dtype="fp8", **float32)
        ),
        Case("dense, fp8 activations", _inputs(9, 4, 2, 80, 48, activation_dtype="fp8")),
        Case("dense float16, mxfp4 activations", _inputs(9, 4, 2, 64, 96, activation_dtype="mxfp4", dtype=torch.float16)),
        Case("2 of 8 experts here", _inputs(12, 2, 3, 32, 32, of=8, **float32)),
        Case("no expert of these tokens here", _nothing_here),
        Case("no tokens", _inputs(0, 8, 4, 96, 64, weight_format="mxfp4", **_GPT_OSS)),
        *(
            Case(f"gpt-oss-120b decode {n}", _inputs(n, 128, 4, 2880, 2880, weight_format="mxfp4", **_GPT_OSS), large=True)
            for n in (1, 4, 16, 64, 256, 1024, 8192)
        ),
        Case("gpt-oss-120b prefill 4096", _inputs(4096, 128, 4, 2880, 2880, weight_format="mxfp4", **_GPT_OSS), large=True),
        Case("gpt-oss-120b prefill 4096, bfloat16 weights", _inputs(4096, 128, 4, 2880, 2880, **_GPT_OSS), large=True),
        Case(
            "deepseek-v3 decode 128, 32 of 256 experts here, fp8 activations",
            _inputs(128, 32, 8, 7168, 2048, of=256, weight_format="fp8_block", activation_dtype="fp8"),
            large=True,
        ),
        *(
            Case(f"fp8 blocks, {n} tokens", _inputs(n, 8, 2, 1024, 1024, weight_format="fp8_block"), large=True)
            for n in (16, 64, 256, 2048)
        ),
        *(
            Case(f"{name}, 256 tokens", _inputs(256, 8, 2, 1024, 1024, weight_format=name), large=True)
            for name in ("fp8_channel", "mxfp8", "nvfp4")
        ),
        Case(
            "fp8 per channel, fp8 activations, 1024 tokens",
            _inputs(1024, 8, 2, 1024, 1024, weight_format="fp8_channel", activation_dtype="fp8"),
            large=True,
        ),
        Case(
            "fp8 blocks, fp8 activations, 1024 tokens",
            _inputs(1024, 8, 2, 1024, 1024, weight_format="fp8_block", activation_dtype="fp8"),
            large=True,
        ),
    ]


@moe_apply.work
def _(topk_ids: Tensor, plan: MoEPlan) -> dict[str, list[int]]:
    return {"rows": topk_ids.flatten().long().clamp(min=-1).add(1).bincount(minlength=plan.num_experts + 1)[1:].tolist()}


@moe_apply.vary
def _(variation: Variation, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan) -> dict[str, Any]:
    if variation.want is Want.UNUSED:
        return {"topk_weights": poisoned(topk_weights, topk_ids < 0), "topk_ids": absent_ids(topk_ids, topk_ids < 0)}
    if variation.want is Want.OTHER:  # reverse the order of the experts
        return {"topk_ids": torch.where(topk_ids >= 0, topk_ids.max() - topk_ids, topk_ids)} if topk_ids.numel() else {}
    rows = list(variation.work.get("rows", ()))
    sizes, options = drawn_as(plan)
    return _inputs(len(x), *sizes, rows=rows if len(rows) == plan.num_experts else None, **options)(variation.draw)


def drawn_as(plan: MoEPlan) -> tuple[list[int], dict[str, Any]]:
    """Returns the sizes and options from which `_inputs` draws a layer for this plan."""
    options = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    sizes = [options.pop(name) for name in ("num_experts", "top_k", "hidden_size", "intermediate_size")]
    for name in ("kernel", "weight_layout"):  # these fields follow from the kernel
        del options[name]
    return sizes, options


@moe_apply.cost
def _(x: Tensor, weights: MoEWeights, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan) -> Cost:
    hit = topk_ids[topk_ids >= 0]
    experts = len(set(hit.tolist()))
    tensors = (getattr(weights, f"{w}_weight{part}") for w in ("w13", "w2") for part in ("", "_scale", "_bias"))
    weight_bytes = nbytes(*tensors) * experts / plan.num_experts
    flops = 6.0 * hit.numel() * plan.hidden_size * plan.intermediate_size
    return Cost(flops=flops, bytes=weight_bytes + 2 * nbytes(x) + nbytes(topk_weights, topk_ids))

"""moe_apply by ``flashinfer.fused_moe.cutlass_fused_moe``, and the preparation of its weights.

``cutlass_fused_moe`` needs all up rows of w13 first, then all gate rows. mxfp4 weights and their scales are also rearranged by two
functions of FlashInfer. Sizes of mxfp4 weights that are not multiples of 128 are zero-padded. A padding feature is ``(0 + beta) *
0``, which is 0 whatever the activation's parameters are.

``cutlass_fused_moe`` skips top-k slots whose id is negative or beyond the rank's experts. A separate kernel sums over the slots of
a token, and writes zeros for tokens without slots. FlashInfer can also sum in the down projection's epilogue, but this option is
not used. That epilogue uses atomic operations in the output's dtype. So results vary from run to run, and a token of four experts
is rounded four times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8
from tokenspeed_kernel_base.resources import Resource
from tokenspeed_kernel_nvidia._rows import deliver
from tokenspeed_kernel_nvidia.flashinfer._memory import to_write
from tokenspeed_kernel_nvidia.flashinfer.package import load

_experts = load("flashinfer.fused_moe", "cutlass_fused_moe")
_interleaved_codes = load("flashinfer.fused_moe", "interleave_moe_weights_for_sm90_mixed_gemm")
_interleaved_scales = load("flashinfer.fused_moe", "interleave_moe_scales_for_sm90_mixed_gemm")

_MXFP4_MULTIPLE = 128


@dataclass(eq=False)
class FlashInferWeights(MoEWeights, Resource):
    """Weights in the layout that ``cutlass_fused_moe`` needs, and the activation's parameters.

    Attributes:
        alpha, beta, limit: float32 ``[experts]``, or all None for SwiGLU without limit, with alpha 1 and beta 0.
        hidden_size: number of elements of a token as the kernels read it, padding included.
    """

    alpha: Tensor | None = None
    beta: Tensor | None = None
    limit: Tensor | None = None
    hidden_size: int = 0

    def __post_init__(self) -> None:
        # Kernel selection depends on these weights only through their layout.
        self.key = self.layout
        self.device = self.w13_weight.device


def prepare_dense(weights: MoEWeights, plan: MoEPlan) -> FlashInferWeights:
    """Prepares float16 or bfloat16 weights. Copies w13."""
    return _made(weights, plan, plan.hidden_size, lambda w13: w13, "flashinfer_dense", weights.w2_weight.contiguous(), None, None)


def prepare_mxfp4(weights: MoEWeights, plan: MoEPlan) -> FlashInferWeights:
    """Prepares mxfp4 weights. Copies all weights and scales."""
    hidden, intermediate = (_up(size, _MXFP4_MULTIPLE) for size in (plan.hidden_size, plan.intermediate_size))
    w13_scale, w2_scale = _scales(weights)

    def columns(tensor: Tensor, features: int, per_feature: int) -> Tensor:
        return pad(tensor, (0, features // per_feature - tensor.shape[-1]))

    w2 = columns(_rows(weights.w2_weight, hidden), intermediate, 2)
    w2_scale = columns(_rows(w2_scale, hidden), intermediate, 32)
    w13_scale = columns(_halves(w13_scale, plan, intermediate), hidden, 32)
    return _made(
        weights,
        plan,
        hidden,
        lambda w13: _interleaved_codes(columns(w13, hidden, 2).contiguous(), "fp4"),
        "flashinfer_mxfp4",
        _interleaved_codes(w2.contiguous(), "fp4"),
        _interleaved_scales(w13_scale.contiguous()),
        _interleaved_scales(w2_scale.contiguous()),
        intermediate,
    )


def prepare_fp8_blocks(weights: MoEWeights, plan: MoEPlan) -> FlashInferWeights:
    """Prepares fp8 weights with a scale per 128 x 128 block. Copies w13. The declaration requires that gate rows and up rows fill
    whole blocks."""
    w13_scale, w2_scale = _scales(weights)
    blocks = plan.intermediate_size // BLOCK_FP8
    swapped = torch.cat([w13_scale[:, blocks:], w13_scale[:, :blocks]], 1)
    return _made(
        weights, plan, plan.hidden_size, lambda w13: w13, "flashinfer_fp8_blocks",
        weights.w2_weight.contiguous(), swapped, w2_scale.contiguous(),
    )  # fmt: skip


def _made(
    weights: MoEWeights,
    plan: MoEPlan,
    hidden: int,
    arrange: Callable[[Tensor], Tensor],
    layout: str,
    w2: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    intermediate: int | None = None,
) -> FlashInferWeights:
    """Makes the prepared weights of any format: moves up rows before gate rows, converts biases to the tokens' dtype, and adds the
    activation's parameters.

    Args:
        hidden, intermediate: padded sizes; ``intermediate`` is the plan's if None.
        arrange: function applied to w13 after its rows are reordered.
        layout: name of the result's layout.
        w2, w13_scale, w2_scale: prepared tensors, used unchanged.
    """
    intermediate = plan.intermediate_size if intermediate is None else intermediate
    w13 = arrange(_halves(weights.w13_weight, plan, intermediate))
    b13, b2 = weights.w13_weight_bias, weights.w2_weight_bias
    if b13 is not None:
        b13 = _halves(b13.to(plan.dtype), plan, intermediate)
    if b2 is not None:
        b2 = pad(b2.to(plan.dtype), (0, hidden - plan.hidden_size)).contiguous()
    made = FlashInferWeights(w13, w13_scale, b13, w2, w2_scale, b2, layout, hidden_size=hidden)
    if plan.limit is not None or (plan.alpha, plan.beta) != (1.0, 0.0):
        limit = torch.finfo(torch.float32).max if plan.limit is None else plan.limit
        made.alpha, made.beta, made.limit = (
            torch.full((plan.num_experts,), value, dtype=torch.float32, device=w13.device)
            for value in (plan.alpha, plan.beta, limit)
        )
    return made


def _halves(tensor: Tensor, plan: MoEPlan, intermediate: int) -> Tensor:
    """Reorders the rows (axis 1) of a tensor of w13: all up rows, then all gate rows, each zero-padded to ``intermediate`` rows."""
    size = plan.intermediate_size
    gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if plan.w13_interleaved else (tensor[:, :size], tensor[:, size:])
    return torch.cat([_rows(up, intermediate), _rows(gate, intermediate)], 1)


def _rows(tensor: Tensor, count: int) -> Tensor:
    """Zero-pads axis 1 of a tensor to ``count`` rows."""
    behind = (0, 0) * (tensor.dim() - 2)
    return tensor if tensor.shape[1] == count else pad(tensor, (*behind, 0, count - tensor.shape[1]))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _scales(weights: MoEWeights) -> tuple[Tensor, Tensor]:
    w13, w2 = weights.w13_weight_scale, weights.w2_weight_scale
    if w13 is None or w2 is None:
        raise TypeError("weights.w13_weight_scale and weights.w2_weight_scale must be tensors, got None")
    return w13, w2


def moe_apply(
    x: Tensor,
    weights: FlashInferWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel_nvidia.moe_apply`. The call never waits for the device. Make the first call before
    a graph is captured, because that call may compile the kernels.
    """
    if not x.numel():
        return deliver(torch.empty_like(x), out)
    options: dict[str, Any] = {}
    scales: list[Tensor] = []
    if plan.weight_format == "mxfp4":
        options["use_w4_group_scaling"] = True
        scales = [scale.view(torch.int32) for scale in _scales(weights)]  # four e8m0 in an int32
    elif plan.weight_format == "fp8_block":
        options["use_deepseek_fp8_block_scale"] = True
        scales = [*_scales(weights)]
    padding = weights.hidden_size - plan.hidden_size
    # Rows of results with padding do not fit into ``out``.
    written = to_write(None if padding else out, x, (x.shape[0], weights.hidden_size))
    _experts(
        pad(x, (0, padding)) if padding else x.contiguous(),
        topk_ids.contiguous(),
        topk_weights.contiguous(),
        weights.w13_weight,
        weights.w2_weight,
        x.dtype,
        quant_scales=scales,
        fc1_expert_biases=weights.w13_weight_bias,
        fc2_expert_biases=weights.w2_weight_bias,
        swiglu_alpha=weights.alpha,
        swiglu_beta=weights.beta,
        swiglu_limit=weights.limit,
        output=written,
        use_fused_finalize=False,
        **options,
    )
    return deliver(written[:, : plan.hidden_size].contiguous() if padding else written, out)

"""moe_apply by ``flashinfer.fused_moe.cutlass_fused_moe``, and the preparation of its weights.

The function needs all up rows of w13 first, then all gate rows. mxfp4 weights and their scales are also converted by two functions
of FlashInfer. Sizes that are not multiples of 128 are zero-padded: a padding feature is ``(0 + beta) * 0``, for any options.

Slots with negative ids are skipped, as are experts beyond the rank's. A separate kernel sums over slots, and writes zeros for
tokens without slots. FlashInfer can also sum in the second GEMM's epilogue. But that epilogue uses atomic operations in the
output's dtype. Results vary from run to run, and a token of four experts is rounded four times.
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
    """Weights as the kernels need them, and the activation's options.

    Attributes:
        alpha, beta, limit: float32 ``[experts]``, or all None for the plain activation.
        hidden_size: number of elements of a token as the kernels read it, padding included.
    """

    alpha: Tensor | None = None
    beta: Tensor | None = None
    limit: Tensor | None = None
    hidden_size: int = 0

    def __post_init__(self) -> None:
        # The layout determines everything that hooks read. Everything else is private to the kernel.
        self.key = self.layout
        self.device = self.w13_weight.device


def prepare_dense(weights: MoEWeights, plan: MoEPlan) -> FlashInferWeights:
    """float16 or bfloat16 weights; copies w13."""
    return _made(weights, plan, plan.hidden_size, lambda w13: w13, "flashinfer_dense", weights.w2_weight.contiguous(), None, None)


def prepare_mxfp4(weights: MoEWeights, plan: MoEPlan) -> FlashInferWeights:
    """mxfp4 weights; copies everything."""
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
    """Prepares fp8 weights with a scale per 128 x 128 block. Copies w13. Gates and ups are whole blocks, as the declaration
    requires."""
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
    """The common part: ups before gates, biases in the tokens' dtype, and the options."""
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
    """Rows (axis 1) of w13: all ups, then all gates, each padded to ``intermediate``."""
    size = plan.intermediate_size
    gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if plan.w13_interleaved else (tensor[:, :size], tensor[:, size:])
    return torch.cat([_rows(up, intermediate), _rows(gate, intermediate)], 1)


def _rows(tensor: Tensor, count: int) -> Tensor:
    """Zero-pads axis 1 to ``count``."""
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
    """See `tokenspeed_kernel_nvidia.moe_apply`. Never waits for the device. Make the first call before a graph is captured, because
    it may compile the kernels.
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
    # Padded results do not fit into ``out``.
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

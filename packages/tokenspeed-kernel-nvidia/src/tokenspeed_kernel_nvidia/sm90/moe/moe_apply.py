"""`moe_apply` with mxfp4 weights on Hopper: few tokens are streamed past, see `stream`."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.formats import mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import LAYOUT, prepare_weights
from tokenspeed_kernel_nvidia.sm90.moe.stream import moe_apply_few
from tokenspeed_kernel_nvidia.sm90.moe.stream_config import MAX_EXPERTS, MAX_TOP_K, max_k


@register_kernel(
    "moe",
    "moe_apply",
    name="cutedsl_moe_apply_mxfp4",
    solution="cutedsl",
    capability=CUTEDSL_HOPPER,
    signatures={format_signature(x=dense_tensor_format(dtype), w13=mxfp4_format(), w2=mxfp4_format()) for dtype in DTYPES},
    traits={
        "weight_layout": LAYOUT,
        "processed_weights": True,
        "activation": "swiglu",
        "num_experts": at_most(MAX_EXPERTS),
        "top_k": at_most(MAX_TOP_K),
        "hidden_size": at_most(max_k()),
        "intermediate_size": at_most(max_k()),
        "bias": any,
        "w13_interleaved": any,
        "swiglu_limit": any,
        "swiglu_alpha_beta": any,
    },
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
    weight_preprocessor=prepare_weights,
)
def moe_apply(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
) -> Tensor:
    """See the operator. Weights are in the layout that `prepare_weights` makes."""
    return moe_apply_few(x, weights, topk_weights, topk_ids, plan, out)

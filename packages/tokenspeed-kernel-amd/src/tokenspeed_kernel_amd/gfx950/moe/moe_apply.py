"""`moe_apply` with mxfp4 weights on CDNA4. Weights are in one layout, see `mxfp4_layout`, and two ways read it: `few` for the
smallest batches, in two launches, and `grouped`, where pairs are sorted by expert. The number of tokens decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.moe.few import few_enough, moe_apply_few
from tokenspeed_kernel_amd.gfx950.moe.grouped import moe_apply_many
from tokenspeed_kernel_amd.gfx950.moe.mxfp4_layout import LAYOUT, prepare_weights
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.formats import mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority

# To what activations may be rounded, and the trait of it.
ROUNDED = {"fp8": "fp8_activations", "static_fp8": "static_fp8_activations", "mxfp4": "mxfp4_activations"}
TRAITS: dict[str, Any] = {
    "weight_layout": LAYOUT,
    "processed_weights": True,
    "activation": "swiglu",
    "bias": any,
    "w13_interleaved": any,
    "swiglu_limit": any,
    "swiglu_alpha_beta": any,
}


def _registered(name: str, dtypes: set[torch.dtype], **traits: Any) -> Callable[[Any], Any]:
    return register_kernel(
        "moe",
        "moe_apply",
        name=name,
        solution="gluon",
        capability=GLUON_CDNA4,
        signatures={format_signature(x=dense_tensor_format(dtype), w13=mxfp4_format(), w2=mxfp4_format()) for dtype in dtypes},
        traits={**TRAITS, **traits},
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
    """See `tokenspeed_kernel_amd.moe_apply`, which has checked the arguments. Weights are as `prepare_weights` makes them."""
    launch = moe_apply_few if few_enough(len(x), plan, weights) else moe_apply_many
    return launch(x, weights, topk_weights, topk_ids, plan, out)


_registered("gluon_moe_apply_mxfp4", {torch.bfloat16, torch.float16}, **dict.fromkeys(ROUNDED.values(), any))(moe_apply)
# float32 has no codes that hold it, so it must be rounded.
for _kind, _trait in ROUNDED.items():
    _registered(f"gluon_moe_apply_mxfp4_float32_{_kind}", {torch.float32}, **{_trait: {True}})(moe_apply)

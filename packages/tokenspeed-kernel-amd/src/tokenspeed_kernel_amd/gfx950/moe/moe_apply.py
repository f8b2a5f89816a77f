"""`moe_apply` with mxfp4 and fp8 block-scaled weights on CDNA4. ``dense`` has bf16 weights.

Each weight format has one layout, see `mxfp4_layout` and `fp8_block_layout`. Two groups of kernels read these layouts: `few` for
the smallest batches, in two launches; and `grouped`, which sorts (token, expert) pairs by expert. `few_enough` decides, mostly by
the number of (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.moe import fp8_block_layout, mxfp4_layout
from tokenspeed_kernel_amd.gfx950.moe.encoding import ACCURACY
from tokenspeed_kernel_amd.gfx950.moe.few import few_enough, moe_apply_few
from tokenspeed_kernel_amd.gfx950.moe.grouped import moe_apply_many
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import TensorFormat, dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import multiple_of

# Formats of rounded activations, and their traits.
ROUNDED = {"fp8": "fp8_activations", "static_fp8": "static_fp8_activations", "mxfp4": "mxfp4_activations"}
_TRAITS: dict[str, Any] = {
    "processed_weights": True,
    "activation": "swiglu",
    "bias": any,
    "w13_interleaved": any,
    "swiglu_limit": any,
    "swiglu_alpha_beta": any,
    "wide_activations": any,
    "exact_activations": any,
}


class Weights(NamedTuple):
    """A format of weights that these kernels support.

    Attributes:
        format: the tensor format of both projections.
        traits: the traits of the kernels that read these weights.
        prepare: function that copies canonical weights to the kernels' layout.
    """

    format: TensorFormat
    traits: dict[str, Any]
    prepare: Callable[[MoEWeights, MoEPlan], MoEWeights]


WEIGHTS = {
    "mxfp4": Weights(mxfp4_format(), {**_TRAITS, "weight_layout": mxfp4_layout.LAYOUT}, mxfp4_layout.prepare_weights),
    "fp8_block": Weights(
        fp8_format(torch.float8_e4m3fn, "block", (BLOCK_FP8, BLOCK_FP8)),
        # Strips have 32 rows of weights, and a row of k fp8 values must begin at a multiple of 16 bytes.
        {
            **_TRAITS,
            "weight_layout": fp8_block_layout.LAYOUT,
            "hidden_size": multiple_of(32),
            "intermediate_size": multiple_of(32),
        },
        fp8_block_layout.prepare_weights,
    ),
}


def _registered(name: str, weights: str, dtypes: set[torch.dtype], **traits: Any) -> Callable[[Any], Any]:
    projection = WEIGHTS[weights].format
    return register_kernel(
        "moe",
        "moe_apply",
        name=f"gluon_moe_apply_{weights}{name}",
        solution="gluon",
        capability=GLUON_CDNA4,
        signatures={format_signature(x=dense_tensor_format(dtype), w13=projection, w2=projection) for dtype in dtypes},
        traits={**WEIGHTS[weights].traits, **traits},
        priority=Priority.SPECIALIZED,
        tags={"determinism"},
        accuracy=ACCURACY,
        weight_preprocessor=WEIGHTS[weights].prepare,
    )


def moe_apply(
    x: Tensor, weights: MoEWeights, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan, out: Tensor | None = None
) -> Tensor:
    """Implements the operator `tokenspeed_kernel_amd.moe_apply`, which has checked the arguments. Weights are in the layout that
    ``prepare`` of `WEIGHTS` makes."""
    launch = moe_apply_few if few_enough(len(x), plan, weights) else moe_apply_many
    return launch(x, weights, topk_weights, topk_ids, plan, out)


for _weights in WEIGHTS:
    _registered("", _weights, {torch.bfloat16, torch.float16}, **dict.fromkeys(ROUNDED.values(), any))(moe_apply)
    # No number of planes represents float32 exactly, so float32 activations must be rounded.
    for _kind, _trait in ROUNDED.items():
        _registered(f"_float32_{_kind}", _weights, {torch.float32}, **{_trait: {True}})(moe_apply)

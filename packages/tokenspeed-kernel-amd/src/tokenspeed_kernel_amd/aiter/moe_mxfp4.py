"""Declarations of AITER's kernels for moe_apply with mxfp4 weights. The adapter, which also shuffles weights, is in
``moe_mxfp4_device``.

``fused_moe`` decides itself how activations are quantised, and does not follow the operator's plan. Therefore both kernels are
eligible only for calls that name them. The ``only_by_name`` texts below say how such a call's results differ.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_kernel_amd.aiter.package import UNTRIED, aiter_gap
from tokenspeed_kernel_amd.capability import cdna4
from tokenspeed_kernel_base.ops.quantization.formats import mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature

_DEVICE = f"{__name__}_device"


def _register(form: str, only_by_name: str, **traits: Any) -> None:
    register_kernel(
        "moe",
        "moe_apply",
        name=f"aiter_moe_apply_mxfp4_{form}",
        solution="aiter",
        capability=cdna4(probe=aiter_gap),
        signatures={format_signature(x=dense_tensor_format(torch.bfloat16), w13=mxfp4_format(), w2=mxfp4_format())},
        traits={
            "weight_layout": f"aiter_mxfp4_{form}",
            "processed_weights": True,
            "activation": "swiglu",
            "w13_interleaved": any,
            **traits,
        },
        priority=UNTRIED,
        only_by_name=only_by_name,
        weight_preprocessor=f"{_DEVICE}:prepare_{form}",
    )(f"{_DEVICE}:moe_apply")


_register(
    "gpt_oss",  # AITER's kernels a16w4 and a8w4
    "activations of fewer than 256 tokens are not rounded, those of more are rounded to fp8 with a scale for every 32 features "
    "(AITER_BF16_FP8_MOE_BOUND has another bound); alpha, limit and beta must be those of GPT-OSS",
    bias=any,
    fp8_activations=any,
    swiglu_limit={True},
    swiglu_alpha_beta={True},
)
_register(
    "silu",  # AITER's kernel a4w4
    "a block's scale is twice the operator's where its largest magnitude is 1.75 times a power of two or more; activations of so "
    "few tokens that k is split among workgroups are not rounded",
    mxfp4_activations={True},
)

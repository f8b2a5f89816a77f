"""The last step of a mixture-of-experts layer: sums the second projection's rows of a token's top-k slots, each times its routing
weight."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, next_power_of_2
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")


def slots_for(x: Tensor, pairs: int, parts: int = 1) -> Tensor:
    """Returns an uninitialised buffer for the second projection's rows, one per (token, slot) pair: ``[parts, pairs, hidden]``.

    The dtype is float32 for split-K partial sums (``parts > 1``) and for a float16 x, whose range is too small. Otherwise it is x's
    dtype.
    """
    dtype = torch.float32 if parts > 1 or x.dtype == torch.float16 else x.dtype
    return torch.empty(parts, pairs, x.shape[1], dtype=dtype, device=x.device)


def combine(slots: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, out: Tensor) -> None:
    """Computes ``out[token] = sum of topk_weights[token, slot] * slots[:, token * top_k + slot].sum(0)``, in slot order, in
    float32.

    ``slots``: ``[parts, tokens * top_k, hidden]``, contiguous. Slots without an expert contribute nothing.
    """
    parts, _, hidden = slots.shape
    tokens, top_k = topk_ids.shape
    block = min(512, next_power_of_2(hidden))
    device_code.combine_kernel[(tokens, cdiv(hidden, block))](
        slots,
        slots.stride(0),
        topk_weights,
        *topk_weights.stride(),
        topk_ids,
        *topk_ids.stride(),
        out,
        *out.stride(),
        hidden,
        num_experts,
        TOP_K=top_k,
        PARTS=parts,
        INTERPRETED=abilities(out.device).interpreted,
        BLOCK=block,
        num_warps=4,
    )

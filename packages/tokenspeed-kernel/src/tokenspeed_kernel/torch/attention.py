"""Prefill attention on a CPU by PyTorch's fused kernel, one sequence at a time. ``cu_seqlens`` is in host memory, so reading it
needs no device sync.

The kernel handles causal attention only, without windows, sinks, logit caps or LSE. Accumulators are float32 (float64 for float64
inputs).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tokenspeed_kernel_base.platform import CapabilityRequirement
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority


# Ranked above the portable Triton kernels: on a CPU, Triton interprets its kernels, while this kernel is compiled.
@register_kernel(
    "attention",
    "mha_prefill",
    solution="torch",
    capability=CapabilityRequirement(vendors=frozenset({"cpu"})),
    signatures=format_signatures(("q", "k", "v"), "dense", {torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    priority=Priority.PORTABLE + 1,
)
def torch_mha_prefill(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, softmax_scale: float | None, out: Tensor | None
) -> Tensor:
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        if begin < end:
            of_q, of_k, of_v = (x[begin:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            grouped = q.shape[1] != k.shape[1]
            # [1, heads, q_len, v_head_dim]
            attended = scaled_dot_product_attention(of_q, of_k, of_v, is_causal=True, scale=softmax_scale, enable_gqa=grouped)
            out[begin:end] = attended[0].transpose(0, 1)
    return out

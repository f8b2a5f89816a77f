"""Attention on a CPU by PyTorch's own fused kernel, sequence by sequence: offsets are on the host there anyway.

It serves what that kernel knows, which is causal attention and nothing more: no windows, sinks, caps or log-sum-exps. Sums are
float32 (float64 for float64).
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


# Above the portable kernels that can be interpreted on a CPU: this one is compiled.
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

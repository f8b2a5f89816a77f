"""Computes the distribution that sampling draws from. The sampling kernels find the kept tokens, and one more launch writes
probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, dense, for_architecture, launch_options, may_overlap
from tokenspeed_kernel.triton.sampling._rows import spans_of
from tokenspeed_kernel.triton.sampling.sample_top_k_top_p import decide_rows
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")

# Tokens per loop step. The interpreter takes about as long for few tokens as for many.
_BLOCKS = {"cpu": 16384, "any": 1024}
_WARPS = 4


@register_kernel(
    "sampling",
    "top_k_top_p_probs",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("logits", "dense", FLOATS),
    priority=Priority.PORTABLE,
    tags={"determinism", "batch_invariant"},
)
def top_k_top_p_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None, out: Tensor | None
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.top_k_top_p_probs`. Takes five launches."""
    rows, vocab = logits.shape
    if out is None:
        out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return out
    state = decide_rows(logits, temperature, top_k, top_p, min_p)
    spans = spans_of(logits)
    early = may_overlap(logits.device)
    device_code.write_probs_kernel[(rows * spans.count,)](
        logits,
        *logits.stride(),
        vocab,
        temperature.contiguous(),
        dense(min_p),
        state,
        out,
        *out.stride(),
        spans.count,
        spans.length,
        BLOCK=for_architecture(_BLOCKS, logits.device),
        EARLY=early,
        num_warps=_WARPS,
        # The definition of weights rounds after every multiplication, so fused multiply-adds would give other weights.
        enable_fp_fusion=False,
        **launch_options(early),
    )
    return out

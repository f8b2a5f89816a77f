"""Applies penalties and biases to logits. The kernel reads and writes only the logits of listed tokens. All logits are copied first
if the result goes to another tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, cdiv, dense, launch_options, may_overlap
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

_BLOCK = 256


@register_kernel(
    "sampling",
    "adjust_logits",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("logits", "dense", FLOATS),
    traits={"vocab": at_most(2**31 - 1)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def adjust_logits(
    logits: Tensor,
    tokens: Tensor,
    counts: Tensor | None,
    logit_bias: Tensor | None,
    repetition_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
    presence_penalty: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.adjust_logits`. Takes one launch, after a copy if ``out`` is not ``logits``."""
    rows, listed = tokens.shape
    vocab = logits.shape[1]
    if out is None:
        out = torch.empty(rows, vocab, dtype=logits.dtype, device=logits.device)
    if out.data_ptr() != logits.data_ptr() or out.stride() != logits.stride():
        out.copy_(logits)
    blocks = cdiv(listed, _BLOCK)
    if rows * blocks:
        early = may_overlap(logits.device)
        device_code.adjust_logits_kernel[(rows * blocks,)](
            out,
            *out.stride(),
            vocab,
            tokens.contiguous(),
            dense(counts),
            dense(logit_bias),
            dense(repetition_penalty),
            dense(frequency_penalty),
            dense(presence_penalty),
            listed,
            blocks,
            BLOCK=_BLOCK,
            INTERPRETED=abilities(logits.device).interpreted,
            EARLY=early,
            # The definition rounds after every multiplication.
            enable_fp_fusion=False,
            **launch_options(early),
        )
    return out

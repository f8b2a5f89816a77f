"""Device code of `adjust_logits`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.quantization._encode_device import round_to


@triton.jit
def adjust_logits_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    tokens,
    counts,
    logit_bias,
    repetition_penalty,
    frequency_penalty,
    presence_penalty,
    listed,
    blocks,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Adds biases to, and applies penalties to, the logits of one block of a row's listed tokens. counts, the bias and each penalty
    may be None.
    """
    start(EARLY)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    entry = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    within = entry < listed
    entries = row * listed + entry
    token = tl.load(tokens + entries, mask=within, other=-1)
    within = within & (token >= 0) & (token < vocab)
    position = logits + row * row_stride + token.to(tl.int64) * vocab_stride
    x = tl.load(position, mask=within, other=0.0).to(tl.float64)
    if logit_bias is not None:
        x += tl.load(logit_bias + entries, mask=within, other=0.0).to(tl.float64)
    if counts is not None:
        count = tl.load(counts + entries, mask=within, other=-1)
        if repetition_penalty is not None:
            penalty = tl.load(repetition_penalty + row).to(tl.float64)
            x = tl.where(count >= 0, tl.where(x > 0.0, x / penalty, x * penalty), x)
        if frequency_penalty is not None:
            penalty = tl.load(frequency_penalty + row).to(tl.float64)
            x = tl.where(count >= 0, x - penalty * count.to(tl.float64), x)
        if presence_penalty is not None:
            x = tl.where(count > 0, x - tl.load(presence_penalty + row).to(tl.float64), x)
    tl.store(position, round_to(x.to(tl.float32), logits.dtype.element_ty, INTERPRETED), mask=within)

"""Argmax of each row in two stages: the token with the largest logit of each span, then the largest of these."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.sampling._rows import spans_of
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")

# Tokens per loop step. 64 rows of 201088 float32 on an H200 take 23.8 us; 28.0 us with 1024, 29.3 with 2048, 29.9 with 4096, 38.4
# with 8192.
_BLOCK = 512


def write_best(logits: Tensor, tokens: Tensor, values: Tensor | None = None, first_token: int = 0) -> None:
    """Finds the largest logit of each row. Writes its index in the row plus ``first_token`` (the token id of column 0) to
    ``tokens``, and the logit to ``values`` unless that is None.

    Rows of one span take one launch, longer rows two launches.
    """
    rows, vocab = logits.shape
    if rows == 0:
        return
    spans = spans_of(logits)
    best = torch.empty(rows, spans.count, dtype=torch.int64, device=logits.device) if spans.count > 1 else None
    results = (first_token, tokens, tokens.stride(0), values, 0 if values is None else values.stride(0))
    device_code.best_of_spans_kernel[(rows * spans.count,)](
        logits,
        *logits.stride(),
        vocab,
        best,
        *results,
        spans.count,
        spans.length,
        BLOCK=_BLOCK,
        FINAL=best is None,
    )
    if best is not None:
        device_code.best_of_rows_kernel[(rows,)](best, *results, spans.count, SPANS=spans.block, num_warps=1)

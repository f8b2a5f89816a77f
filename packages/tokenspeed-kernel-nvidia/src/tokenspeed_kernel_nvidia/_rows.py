"""Outputs whose rows are contiguous and 16-byte aligned, as bulk copies require, even if the caller's ``out`` is not."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import is_aligned


def to_write(out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the tensor that a kernel should write: ``out`` if it `is_aligned`, otherwise a new tensor in like's dtype, which
    `deliver` copies to ``out``.

    If ``out`` has another shape, dtype or device than the result, ``out`` itself is returned. The kernel then rejects it; a copy to
    ``out`` would not.
    """
    if out is not None:
        if is_aligned(out) or (out.shape, out.dtype, out.device) != (shape, like.dtype, like.device):
            return out
        return like.new_empty(shape)
    if like.shape == shape:  # true for most calls; empty_like costs half as much as new_empty
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return like.new_empty(shape)


def deliver(written: Tensor, out: Tensor | None) -> Tensor:
    """Returns the call's result. Without ``out``, the result is ``written``, the tensor that the kernel wrote. Otherwise the result
    is ``out``; if ``written`` is another tensor, it is copied to ``out`` first."""
    return written if out is None or written is out else out.copy_(written)

"""Outputs as kernels want them: rows contiguous, each at a multiple of 16 bytes, as bulk copies need them."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import is_aligned


def to_write(out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``out`` if it `is_aligned`, else new memory in like's dtype. What the caller gets is then for `deliver`.

    An ``out`` of another shape, dtype or device comes back too: programs refuse it, and a copy would not.
    """
    if out is not None:
        if is_aligned(out) or (out.shape, out.dtype, out.device) != (shape, like.dtype, like.device):
            return out
        return like.new_empty(shape)
    if like.shape == shape:  # nearly always, and half the price
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return like.new_empty(shape)


def deliver(written: Tensor, out: Tensor | None) -> Tensor:
    """What the caller gets: ``out`` if it gave one, also where other memory was written instead."""
    return written if out is None or written is out else out.copy_(written)

"""Tensors as kernels want them: rows contiguous, each at a multiple of 16 bytes, as bulk copies need them.

Rows themselves are of whole 16 bytes, as those of 64 or 128 halves are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_aligned(tensor: Tensor) -> bool:
    """Whether the last axis is contiguous and all rows begin at multiples of 16 bytes."""
    if tensor.data_ptr() % 16:
        return False
    if tensor.is_contiguous():  # nearly always, and quick to ask
        return True
    step = 16 // tensor.element_size()
    *outer, last = tensor.stride()
    return last == 1 and all(stride % step == 0 for stride in outer)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that `is_aligned`."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


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

"""Outputs as kernels need them: contiguous rows, 16-byte aligned for bulk copies."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import is_aligned


def to_write(out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the tensor that a kernel should write: ``out`` if it `is_aligned`, otherwise a new tensor in like's dtype, which
    `deliver` copies to ``out``.

    An ``out`` of another shape, dtype or device than the result's is returned as well: the kernel rejects it, while a copy would
    not.
    """
    if out is not None:
        if is_aligned(out) or (out.shape, out.dtype, out.device) != (shape, like.dtype, like.device):
            return out
        return like.new_empty(shape)
    if like.shape == shape:  # nearly always true, and half the cost of new_empty
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return like.new_empty(shape)


def deliver(written: Tensor, out: Tensor | None) -> Tensor:
    """Returns the tensor that the caller receives: ``written``, which the kernel wrote, if the caller passed no ``out``. Otherwise
    returns ``out``, after ``written`` is copied to it unless both are the same tensor."""
    return written if out is None or written is out else out.copy_(written)

"""Copies of inputs, and memory for outputs, with the strides that the kernels require: a contiguous last axis."""

from __future__ import annotations

import torch
from torch import Tensor


def rows(tensor: Tensor) -> Tensor:
    """Returns the tensor itself if its last axis is contiguous, otherwise a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def rows_to_write(out: Tensor | None, q: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``out`` if its rows are contiguous, otherwise an uninitialised tensor of this shape and dtype (None: q's dtype)."""
    return out if out is not None and out.stride(-1) == 1 else q.new_empty(shape, dtype=dtype)


def deliver(written: Tensor, out: Tensor | None) -> Tensor:
    """Returns the tensor that the caller receives: ``written``, which the kernel wrote, if the caller passed no ``out``.
    Otherwise returns ``out``, after ``written`` is copied to it unless both are the same tensor.
    """
    return written if out is None or written is out else out.copy_(written)

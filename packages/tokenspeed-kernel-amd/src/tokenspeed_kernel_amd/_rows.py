"""Tensors with strides that the kernels accept: every kernel requires a contiguous last axis."""

from __future__ import annotations

import torch
from torch import Tensor


def rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy with its last axis contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def rows_to_write(out: Tensor | None, q: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """``out`` if its rows are contiguous, otherwise new memory of this shape and dtype, by default q's."""
    return out if out is not None and out.stride(-1) == 1 else q.new_empty(shape, dtype=dtype)


def deliver(written: Tensor, out: Tensor | None) -> Tensor:
    """The caller's result. If ``out`` is None it is ``written``; otherwise ``out``, after ``written`` is copied into it if they
    differ.
    """
    return written if out is None or written is out else out.copy_(written)

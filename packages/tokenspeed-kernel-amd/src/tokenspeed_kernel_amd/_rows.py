"""Tensors with the strides that kernels take: all of them take the last axis to be contiguous."""

from __future__ import annotations

from torch import Tensor


def rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy with its last axis contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def rows_to_write(out: Tensor | None, q: Tensor, *shape: int) -> Tensor:
    """``out`` if its rows are contiguous, otherwise new memory of this shape in q's dtype."""
    return out if out is not None and out.stride(-1) == 1 else q.new_empty(shape)


def deliver(written: Tensor, out: Tensor | None) -> Tensor:
    """What the caller gets: ``out`` if it gave one, into which other memory that was written instead is copied."""
    return written if out is None or written is out else out.copy_(written)

"""Tensors whose last axis is contiguous: AITER looks at no stride of it."""

from __future__ import annotations

from torch import Tensor


def rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy with its last axis contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def rows_to_write(out: Tensor | None, q: Tensor, *shape: int) -> Tensor:
    """``out`` if rows can be written to it, else memory of q's dtype."""
    return out if out is not None and out.stride(-1) == 1 else q.new_empty(shape)


def deliver(written: Tensor, out: Tensor | None) -> Tensor:
    """What the caller gets: ``out`` if it gave one, also where other memory was written instead."""
    return written if out is None or written is out else out.copy_(written)

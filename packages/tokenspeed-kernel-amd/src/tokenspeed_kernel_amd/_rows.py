"""Tensors as kernels want them: the last axis contiguous, of which they look at no stride."""

from __future__ import annotations

from torch import Tensor


def rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy with its last axis contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def aligned_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, whose rows are contiguous and begin at multiples of 16 bytes, as copies to LDS need them."""
    step = 16 // tensor.element_size()
    aligned = tensor.data_ptr() % 16 == 0 and all(stride % step == 0 for stride in tensor.stride()[:-1])
    return tensor if aligned and tensor.stride(-1) == 1 else tensor.contiguous()


def rows_to_write(out: Tensor | None, q: Tensor, *shape: int) -> Tensor:
    """``out`` if rows can be written to it, else memory of q's dtype."""
    return out if out is not None and out.stride(-1) == 1 else q.new_empty(shape)


def deliver(written: Tensor, out: Tensor | None) -> Tensor:
    """What the caller gets: ``out`` if it gave one, also where other memory was written instead."""
    return written if out is None or written is out else out.copy_(written)

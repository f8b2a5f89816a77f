"""Copies tensors into larger buffers, with guard elements that detect out-of-bounds writes, or with gaps between elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Guard elements on either side: several cache lines, and a multiple of every alignment that kernels rely on.
_GUARD = 256
# The number of elements in the gap between two rows.
_GAP = 16


@dataclass
class Guarded:
    """A tensor inside a larger buffer.

    Attributes:
        name: the argument's name.
        tensor: the view to pass to a kernel.
        buffer: the whole buffer.
        outside: a mask of the buffer's elements that are not in the tensor.
        before: a copy of the buffer before the call.
    """

    name: str
    tensor: Tensor
    buffer: Tensor
    outside: Tensor
    before: Tensor

    def fault(self) -> str:
        """Describes writes outside the tensor; empty if there were none."""
        changed = (_codes(self.buffer) != _codes(self.before)) & self.outside
        if not bool(changed.any()):
            return ""
        places = changed.nonzero().flatten()
        start, end = _GUARD, len(self.buffer) - _GUARD
        first, last, count = int(places[0]), int(places[-1]), len(places)
        if last < start:
            where = f"up to {start - first} before its first"
        elif first >= end:
            where = f"up to {last - end + 1} behind its last"
        else:
            where = "before, between or behind its own"
        return f"writes {count} elements outside of {self.name}, {where}"


def guard(name: str, tensor: Tensor) -> Guarded:
    """Copies a tensor into a larger buffer, whose other elements come from `filled`.

    The copy has the tensor's strides, or is contiguous if the tensor overlaps itself.
    """
    strides = tensor.stride()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + 1 if tensor.numel() else 0
    if tensor.numel() > reach:  # the tensor overlaps itself
        tensor = tensor.contiguous()
        strides, reach = tensor.stride(), tensor.numel()
    buffer = filled(reach + 2 * _GUARD, tensor)
    view = buffer.as_strided(tensor.shape, strides, _GUARD)
    view.copy_(tensor)
    outside = torch.ones(len(buffer), dtype=torch.bool, device=tensor.device)
    outside.as_strided(tensor.shape, strides, _GUARD).fill_(False)
    return Guarded(name, view, buffer, outside, buffer.clone())


def filled(count: int, like: Tensor) -> Tensor:
    """Returns elements that no kernel may use: NaN, or integers larger than every size.

    On a GPU, elements of integer tensors are 0 instead. If a kernel used a huge integer as an index, the illegal access would
    make all further checks in the process fail.
    """
    made = torch.empty(count, dtype=like.dtype, device=like.device)
    if like.dtype == torch.bool:
        return made.fill_(True)
    if like.is_cuda and not like.is_floating_point():
        return made.zero_()
    # The byte 0x7f is NaN in 8-bit floats; all ones are NaN in wider floats.
    code = 0xFF if like.is_floating_point() and like.element_size() > 1 else 0x7F
    made.untyped_storage().fill_(code)  # type: ignore[attr-defined]
    return made


def _codes(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _gaps(count: int, like: Tensor) -> Tensor:
    """Returns elements for the gaps of a strided tensor: NaN, or 0 for integers.

    A kernel that ignores strides would use integers in gaps as lengths or indices, so these must be harmless.
    """
    return filled(count, like) if like.is_floating_point() else torch.zeros(count, dtype=like.dtype, device=like.device)


def apart(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor with gaps between rows, as in a slice of a fused projection."""
    if tensor.dim() < 2 or not tensor.numel():
        return tensor
    rows, row = tensor.shape[:-1], tensor.shape[-1]
    wide = _gaps(rows.numel() * (row + _GAP), tensor).view(*rows, row + _GAP)
    return wide[..., :row].copy_(tensor)


def spread(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor in every second element of a wider last axis."""
    if not tensor.dim() or not tensor.numel():
        return tensor
    wide = _gaps(2 * tensor.numel(), tensor).view(*tensor.shape, 2)
    return wide[..., 0].copy_(tensor)


def swapped(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor with the first two axes exchanged in memory, such as heads before tokens."""
    if tensor.dim() < 2 or not tensor.numel():
        return tensor
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


LAYOUTS: dict[str, Any] = {"rows apart": apart, "every second element": spread, "first two axes exchanged in memory": swapped}

"""Tests whether two tensors share memory.

A kernel reads inputs while it writes outputs. So an output that overlaps an input would silently give wrong values. Tensors that
share an allocation but no byte are valid: the query and key slices of one projection's output, keys and values of one cache.
"""

from __future__ import annotations

from torch import Tensor

# Tensors without a common row pitch are compared element by element, up to this many elements.
_MOST_ELEMENTS = 1 << 20


def span(tensor: Tensor) -> int:
    """Number of bytes from the start of a tensor's first element to the end of its last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def repeats_itself(tensor: Tensor) -> bool:
    """Whether several elements of a tensor share an address, because the tensor was expanded."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def lies_like(tensor: Tensor, other: Tensor) -> bool:
    """Whether every element of both tensors has the same address if the first elements have the same address."""
    return tensor.dtype == other.dtype and tensor.shape == other.shape and tensor.stride() == other.stride()


def overlap(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors share a byte. If their row pitches differ, their elements are compared one by one. If one of them then
    has more than 2^20 elements, they are not compared, and the result is False."""
    distance = other.data_ptr() - tensor.data_ptr()
    if not -span(other) < distance < span(tensor):
        return False
    rows, others = _as_rows(tensor), _as_rows(other)
    if rows is None or others is None or rows[0] != others[0]:
        return _share_elements(tensor, other, distance)
    pitch, width, other_width = rows[0], rows[1], others[1]
    # Both tensors have rows at the same pitch. So the distance of the first elements modulo the pitch decides whether rows overlap.
    within = distance % pitch
    return within < width or within + other_width > pitch


def _as_rows(tensor: Tensor) -> tuple[int, int] | None:
    """Row pitch and row width in bytes of a tensor that consists of contiguous rows at one pitch; None for any other tensor."""
    size = tensor.element_size()
    axes = sorted((stride, count) for stride, count in zip(tensor.stride(), tensor.shape, strict=True) if count > 1)
    width, pitch, rows = 1, 0, 1
    for stride, count in axes:
        if pitch == 0 and stride == width:
            width *= count
        elif pitch == 0:
            pitch, rows = stride, count
        elif stride == pitch * rows:
            rows *= count
        else:
            return None
    return (pitch or width) * size, width * size


def _share_elements(tensor: Tensor, other: Tensor, distance: int) -> bool:
    if max(tensor.numel(), other.numel()) > _MOST_ELEMENTS:
        return False
    return not _bytes_of(tensor).isdisjoint(offset + distance for offset in _bytes_of(other))


def _bytes_of(tensor: Tensor) -> set[int]:
    offsets = {0}
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = {offset + index * stride for offset in offsets for index in range(size)}
    width = tensor.element_size()
    return {offset * width + byte for offset in offsets for byte in range(width)}

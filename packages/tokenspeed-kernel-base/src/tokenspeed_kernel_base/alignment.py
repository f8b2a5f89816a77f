"""Tests whether a tensor's rows are aligned to 16 bytes, as bulk copies to shared memory require. Makes aligned copies of other
tensors."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

ROW_BYTES = 16


class CacheCopyWarning(UserWarning):
    """A kernel copies a whole cache at every call."""


def is_aligned(tensor: Tensor) -> bool:
    """Whether the last axis is contiguous and every row starts at a multiple of ROW_BYTES. The caller guarantees that a row's size
    is a multiple of ROW_BYTES."""
    if tensor.data_ptr() % ROW_BYTES:
        return False
    if tensor.is_contiguous():  # contiguous rows, and a row's size is aligned; the common case, and a cheap test
        return True
    step = ROW_BYTES // tensor.element_size()
    *outer, last = tensor.stride()
    return last == 1 and all(stride % step == 0 for stride in outer)


def aligned(tensor: Tensor) -> Tensor:
    """Returns the tensor itself if it `is_aligned`, else an aligned copy."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def aligned_cache(cache: Tensor, name: str) -> Tensor:
    """Returns the cache itself if it `is_aligned`, else an aligned copy. Warns once for each ``name``, at its first copy."""
    copy = aligned(cache)
    if copy is not cache:
        _warn_of_copies(name)
    return copy


def copied_cache(cache: Tensor) -> str:
    """Returns the line that `explain` shows for a cache that a kernel would copy; an empty text if no copy is needed."""
    if type(cache) is not Tensor or cache.is_meta or is_aligned(cache):
        return ""
    size = cache.numel() * cache.element_size()
    return f"copied whole at every call, {size} bytes: its rows do not begin at multiples of {ROW_BYTES} bytes"


@functools.cache
def _warn_of_copies(name: str) -> None:
    warnings.warn(
        f"{name} is copied whole at every call, because its rows do not begin at multiples of {ROW_BYTES} bytes; "
        "`explain` says which kernel does so",
        CacheCopyWarning,
        stacklevel=4,
    )

"""Tensors whose rows begin at multiples of 16 bytes, as bulk copies to shared memory need them, and copies of those that do not."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

ROW_BYTES = 16


class CacheCopyWarning(UserWarning):
    """A kernel copies a whole cache at every call."""


def is_aligned(tensor: Tensor) -> bool:
    """Whether the last axis is contiguous and all rows begin at multiples of ROW_BYTES. Rows are of whole ROW_BYTES themselves."""
    if tensor.data_ptr() % ROW_BYTES:
        return False
    if tensor.is_contiguous():  # nearly always, and quick to ask
        return True
    step = ROW_BYTES // tensor.element_size()
    *outer, last = tensor.stride()
    return last == 1 and all(stride % step == 0 for stride in outer)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that `is_aligned`."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def aligned_cache(cache: Tensor, name: str) -> Tensor:
    """The cache, or a copy that `is_aligned`. Warns of the first copy of a cache of that name."""
    copy = aligned(cache)
    if copy is not cache:
        _warn_of_copies(name)
    return copy


def copied_cache(cache: Tensor) -> str:
    """What `explain` says of a cache that a kernel would copy; empty where it would not."""
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

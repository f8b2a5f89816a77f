"""The global memory that kernels may access: the memory of tensors whose address was taken.

A launch gets the address of a tensor in one of two ways: from the tensor itself, as an argument, or from ``Tensor.data_ptr()``, as
a number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kernel_emulation.emulator import Allocation, Bounds, allocation_of

# Maps the byte range of a view to its storage and the storage's byte range. Items of freed storages are removed before use.
_taken: dict[Allocation, tuple[StorageWeakRef, Allocation]] = {}


def add(tensor: torch.Tensor) -> None:
    """Makes the memory of a CPU tensor accessible to kernels as long as the tensor's storage exists."""
    view, storage = (allocation_of(tensor, "tensor", bounds) for bounds in ("view", "storage"))
    _taken[view] = StorageWeakRef(tensor.untyped_storage()), storage


def accessible(bounds: Bounds) -> list[Allocation]:
    """Returns the byte ranges that kernels may access."""
    for freed in [view for view, (storage, _) in _taken.items() if storage.expired()]:
        del _taken[freed]
    return [view if bounds == "view" else storage for view, (_, storage) in _taken.items()]


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Inside the block, a call of ``Tensor.data_ptr()`` makes the CPU tensor's memory accessible to kernels."""
    data_ptr = torch.Tensor.data_ptr

    def recording(tensor: Any) -> int:
        address = data_ptr(tensor)
        if tensor.device.type == "cpu":
            add(tensor)
        return address

    with mock.patch.object(torch.Tensor, "data_ptr", recording):
        yield

"""The global memory that kernels may access: the memory of tensors whose address was taken.

A launch gets the address of a tensor from the tensor itself, as an argument, or as a number from ``Tensor.data_ptr()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kernel_emulation.emulator import Allocation, Bounds, allocation_of

# The dictionary's keys are the memory of views. An entry whose storage was freed is removed before it is read.
_taken: dict[Allocation, tuple[StorageWeakRef, Allocation]] = {}


def add(tensor: torch.Tensor) -> None:
    """Makes the memory of a CPU tensor accessible as long as it exists."""
    view, storage = (allocation_of(tensor, "tensor", bounds) for bounds in ("view", "storage"))
    _taken[view] = StorageWeakRef(tensor.untyped_storage()), storage


def accessible(bounds: Bounds) -> list[Allocation]:
    """The accessible memory."""
    for freed in [view for view, (storage, _) in _taken.items() if storage.expired()]:
        del _taken[freed]
    return [view if bounds == "view" else storage for view, (_, storage) in _taken.items()]


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Inside the block, ``Tensor.data_ptr()`` makes a CPU tensor's memory accessible."""
    data_ptr = torch.Tensor.data_ptr

    def recording(tensor: Any) -> int:
        address = data_ptr(tensor)
        if tensor.device.type == "cpu":
            add(tensor)
        return address

    with mock.patch.object(torch.Tensor, "data_ptr", recording):
        yield

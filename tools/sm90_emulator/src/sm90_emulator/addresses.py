"""The global memory that kernels may access: that of tensors whose address was taken.

A launch gets the address of a tensor from the tensor itself, as an argument, or as a number from ``Tensor.data_ptr()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_storages: dict[tuple[int, int], StorageWeakRef] = {}


def add(tensor: torch.Tensor) -> None:
    """Makes the memory of a CPU tensor accessible as long as it exists: all of its storage."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    _storages[begin, begin + storage.nbytes()] = StorageWeakRef(storage)


def accessible() -> list[tuple[int, int]]:
    """The accessible memory, as (begin, end)."""
    for freed in [key for key, storage in _storages.items() if storage.expired()]:
        del _storages[freed]
    return list(_storages)


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

"""Tests the `with` block of `emulated_sm90`: its settings, and the global memory that kernels may access inside the block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sm90_emulator import EmulationError, emulated_sm90
from sm90_emulator.emulator import BLOCK
from sm90_emulator.launching import pack
from sm90_emulator.machine import Geometry
from sm90_emulator.program import load

from .snippets import kernel

STORE = "mad.wide.u32 %d50, %r0, 4, %d0; st.global.b32 [%d50], %r0;"


def stores(address: int, count: int) -> None:
    """Launches a kernel that stores integers at an address."""
    text = kernel(STORE, 1)
    BLOCK.active().run(text, "snippet", Geometry((1, 1, 1), (count, 1, 1)), pack(load(text, "snippet").kernel, [address]))


def test_memory_whose_address_was_taken() -> None:
    with emulated_sm90() as running:
        x = torch.zeros(64, dtype=torch.int32)
        stores(x[8:].data_ptr(), 56)
        stores(x.data_ptr(), 4)  # the storage outlives the view whose address was taken
    assert x.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, *range(56)]
    assert [launch.kernel for launch in running.launches] == ["snippet"] * 2
    with emulated_sm90(), pytest.raises(EmulationError, match="out-of-bounds"):
        stores(x[8:].data_ptr(), 57)


def test_memory_whose_address_nobody_took() -> None:
    others = torch.zeros(64, dtype=torch.int32)
    address = others.data_ptr()  # the address was taken outside of the block
    with emulated_sm90(), pytest.raises(EmulationError, match="out-of-bounds"):
        stores(address, 1)


def test_memory_that_was_freed() -> None:
    with emulated_sm90():
        address = torch.zeros(1 << 16, dtype=torch.int32).data_ptr()
        with pytest.raises(EmulationError, match="out-of-bounds"):
            stores(address, 1)


def test_it_is_undone() -> None:
    def state() -> tuple[Any, ...]:
        names = ("get_device_properties", "get_device_capability")
        return torch.Tensor.data_ptr, *(getattr(torch.cuda, name) for name in names), "data_ptr" in vars(torch.Tensor)

    before = state()
    with emulated_sm90(multiprocessors=7):
        assert torch.cuda.get_device_properties(0).multi_processor_count == 7
        assert not set(state()) & set(before[:-1])
    assert state() == before
    with pytest.raises(EmulationError, match="outside `emulated_sm90"):
        BLOCK.active()


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match="'never'"), emulated_sm90(copies="never"):
        pass
    with emulated_sm90(), pytest.raises(RuntimeError, match="inside"), emulated_sm90():
        pass

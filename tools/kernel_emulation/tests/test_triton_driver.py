"""Tests the packing of arguments, and the device properties that the driver reports to Triton."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget

from kernel_emulation import triton_driver
from kernel_emulation.errors import EmulationError
from kernel_emulation.triton_driver import Argument, Driver, Launcher, compiled_text, pack


@pytest.mark.parametrize(
    ("type_", "value", "wanted"),
    [
        ("i1", 2, b"\1"), ("i8", -1, b"\xff"), ("u16", 258, b"\2\1"), ("i32", -2, struct.pack("<i", -2)),
        ("i32", 2**32 - 1, b"\xff" * 4), ("i64", -(2**40), struct.pack("<q", -(2**40))), ("u64", 2**63, struct.pack("<Q", 2**63)),
        ("fp16", 1.5, struct.pack("<e", 1.5)), ("bf16", 1.5, b"\xc0\x3f"), ("fp32", 3, struct.pack("<f", 3.0)),
        ("fp64", 0.1, struct.pack("<d", 0.1)), ("*fp32", None, bytes(8)), ("*i8", 4096, struct.pack("<Q", 4096)),
        ("nvTmaDesc", b"map", b"map"),
    ],
)  # fmt: skip
def test_each_type(type_: str, value: Any, wanted: bytes) -> None:
    assert pack(type_, value) == wanted


def test_a_tensor_is_packed_as_its_address() -> None:
    tensor = torch.zeros(4)
    assert pack("*fp32", tensor) == struct.pack("<Q", tensor.data_ptr())


def test_an_unknown_type() -> None:
    with pytest.raises(EmulationError, match="complex"):
        pack("complex", 1)


class _Recorder(Launcher):
    """Records launches."""

    kind = "ptx"

    def __init__(self, signature: dict[str, Any], names: list[str]) -> None:
        source = SimpleNamespace(name="f", fn=SimpleNamespace(arg_names=names), signature=signature)
        super().__init__(source, SimpleNamespace(hash="digest"))
        self.launches: list[tuple[tuple[int, int, int], list[Argument]]] = []

    def launch(self, grid: tuple[int, int, int], arguments: list[Argument]) -> None:
        self.launches.append((grid, arguments))

    def described(self, type_: str, descriptor: Any, index: int) -> Iterable[tuple[str, Any]]:
        return [("i64", descriptor), ("i32", index)]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> _Recorder:
    monkeypatch.setattr(triton_driver, "compiled_text", lambda digest, function, kind: f"{digest} {function} {kind}")
    return _Recorder({"a": "i32", "b": ("fp32", ("tensordesc<fp16[64]>", "constexpr")), "c": "tensordesc<fp16[64]>"}, ["a", "b"])


def test_arguments_are_flattened(recorder: _Recorder) -> None:
    """Tuples are flattened in order, without constants. Descriptors are numbered across the whole launch."""
    calls: list[str] = []
    recorder(2, 1, 1, 0, None, None, "meta", calls.append, calls.append, 5, (0.5, ("first", 64)), "second")
    assert recorder.text == "digest f ptx"
    assert calls == ["meta", "meta"]
    ((grid, arguments),) = recorder.launches
    assert grid == (2, 1, 1)
    assert arguments == [
        ("argument a", "i32", 5), ("argument b[0]", "fp32", 0.5), ("argument b[1][0]", "i64", "first"),
        ("argument b[1][0]", "i32", 0), ("argument 2", "i64", "second"), ("argument 2", "i32", 1),
    ]  # fmt: skip


def test_an_empty_grid_launches_nothing(recorder: _Recorder) -> None:
    recorder(0, 1, 1, 0, None, None, None, None, None, 5, (0.5, ("first", 64)), "second")
    assert recorder.launches == []


def test_the_driver_is_there_inside_the_block_alone() -> None:
    before = triton.runtime.driver._active
    target = GPUTarget("cuda", 90, 32)
    with triton_driver.installed(Driver(_Recorder, target, 90, (9, 0), {"warpSize": 32})):
        active = triton.runtime.driver.active
        assert active.get_current_target() == target
        assert active.get_device_capability() == (9, 0)
        assert active.get_current_device() == 90
        assert active.utils.get_device_properties(90) == {"warpSize": 32}
        assert active.utils.load_binary("f", b"", 0, 90)[0] is None
    assert triton.runtime.driver._active is before


def test_a_text_that_is_not_cached() -> None:
    with pytest.raises(EmulationError, match="no ptx of f"):
        compiled_text("0" * 64, "f", "ptx")

"""Tests the base class of emulators: errors, accessible memory, and the `with` block."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest
import torch

from kernel_emulation.emulator import Block, Bounds, Emulator, LaunchReport, allocation_of
from kernel_emulation.errors import EmulationError, SanitizerError, UnknownInstruction, describe


@dataclass(frozen=True)
class Instruction:
    text: str
    source: tuple[str, int] | None = ("attend.py", 12)

    @property
    def where(self) -> str:
        return f", at attend.py:12: {self.text}"


@pytest.mark.parametrize(
    "error",
    [
        UnknownInstruction("unknown modifier", "attend", Instruction("frob %r1")),
        SanitizerError("race", "two warps", "attend", Instruction("ld %r1")),
        EmulationError("no compiler"),
    ],
    ids=["unknown", "sanitizer", "no kernel"],
)
def test_errors_are_pickled(error: EmulationError) -> None:
    """Pickling keeps an error's type, text and attributes. Child processes send errors to their parent by pickling."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_an_error_names_kind_kernel_and_instruction() -> None:
    error = SanitizerError("race", "two warps", "attend", Instruction("ld %r1"))
    assert str(error) == "race: two warps\n  in kernel attend, at attend.py:12: ld %r1"
    assert (error.kind, error.kernel, error.source) == ("race", "attend", ("attend.py", 12))
    assert str(EmulationError("no compiler")) == "no compiler"


def test_long_names_are_cut() -> None:
    name = "a" * 100 + "b" * 100
    assert describe(name, None) == f"in kernel {'a' * 60}...{'b' * 40}"


@pytest.mark.parametrize(("bounds", "begin", "end"), [("view", 4 * 7, 4 * 18), ("storage", 0, 4 * 30)])
def test_the_memory_of_a_view(bounds: Bounds, begin: int, end: int) -> None:
    whole = torch.zeros(5, 6)
    found = allocation_of(whole[1:3, 1:6], "x", bounds)
    assert (found.start - whole.data_ptr(), found.end - whole.data_ptr()) == (begin, end)
    assert found.block == whole.data_ptr()
    assert str(found) == f"x of {end - begin} bytes at {found.start:#x}"


def test_the_memory_of_nothing() -> None:
    found = allocation_of(torch.zeros(4)[2:2], "x")
    assert found.start == found.end


def test_a_block() -> None:
    block = Block[Emulator[LaunchReport]]("emulated")
    emulator = Emulator[LaunchReport](bounds="storage", edit=lambda kernel, text: f"{text} of {kernel}")
    with pytest.raises(EmulationError, match="outside `emulated"):
        block.active()
    with block.entered(emulator):
        assert block.active() is emulator
        with pytest.raises(RuntimeError, match="inside"), block.entered(Emulator()):
            pass
        assert block.active() is emulator
    assert block.current is None
    assert emulator.edited("attend", "text") == "text of attend"
    assert Emulator[LaunchReport]().edited("attend", "text") == "text"


def test_a_shared_tensor() -> None:
    emulator, whole = Emulator[LaunchReport](), torch.zeros(8)
    emulator.share(whole[2:4])
    (found,) = emulator.extra
    assert (found.start - whole.data_ptr(), found.end - whole.data_ptr()) == (8, 16)


def test_wrong_bounds() -> None:
    with pytest.raises(ValueError, match="'tensor'"):
        Emulator(bounds="tensor")  # type: ignore[arg-type]

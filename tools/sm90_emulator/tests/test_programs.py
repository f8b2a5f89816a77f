"""Tests the binaries of CuteDSL's programs and their PTX, the C compiler, and the setting ``edit``."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from sm90_emulator import EmulationError, build, cutedsl, emulated_sm90
from sm90_emulator.emulator import BLOCK
from sm90_emulator.launching import pack
from sm90_emulator.machine import Geometry
from sm90_emulator.program import load

from .snippets import kernel

# The header of an ELF image of 64 + 2 * 16 bytes: the offset of the section headers, the size of one, and their number.
ELF = bytearray(96)
ELF[:4] = b"\x7fELF"
struct.pack_into("<Q", ELF, 0x28, 64)
struct.pack_into("<HH", ELF, 0x3A, 16, 2)


def fat(*parts: tuple[int, bytes]) -> bytes:
    """Returns a fat binary with parts of these kinds."""
    content = b"".join(struct.pack("<HHIQ", kind, 0, 24, len(part)) + bytes(8) + part for kind, part in parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def cubin_of(image: bytes) -> bytes:
    held = ctypes.create_string_buffer(image, len(image) + 64)
    return cutedsl.cubin_of(ctypes.addressof(held))


def test_machine_code_is_found() -> None:
    cubin = bytes(ELF)
    assert cubin_of(cubin + b"more") == cubin
    assert cubin_of(fat((1, b".version 8.8"), (2, cubin))) == cubin


@pytest.mark.parametrize(
    ("image", "message"),
    [(b"text" * 16, "neither ELF nor"), (fat((1, b".version 8.8")), "without machine code"), (fat(), "without")],
    ids=["text", "ptx alone", "nothing"],
)
def test_what_has_no_machine_code(image: bytes, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        cubin_of(image)


def test_ptx_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM90_EMULATOR_CACHE", str(tmp_path))
    cutedsl.keep(b"code", "text")
    cutedsl.keep(b"code", "another text")
    (file,) = cutedsl.ptx_directory().iterdir()
    assert file.parent == tmp_path / "ptx"
    assert file.read_text() == "text"


def test_ptx_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM90_EMULATOR_CACHE", str(tmp_path))
    cubin = bytes(ELF) + b"\1"
    cutedsl.keep(cubin, "a text")
    library = b"\x7fELF of the host" + fat((1, b".version 8.8"), (2, cubin)) + b"more"
    assert cutedsl.ptx_in(library) == "a text"
    with pytest.raises(EmulationError, match="there is no PTX"):
        cutedsl.ptx_in(fat((2, bytes(ELF) + b"\2")))
    with pytest.raises(EmulationError, match="without a fat binary"):
        cutedsl.ptx_in(b"\x7fELF of the host")


@pytest.mark.slow
def test_a_program_is_compiled_once_for_its_ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of the program finds it in the cache, and `ptx` does, too."""
    pytest.importorskip("cutlass")
    from sm90_emulator.programs import Recording, ptx
    from tokenspeed_kernel_nvidia.program_backend import use_backend
    from tokenspeed_kernel_nvidia.sm90.moe.grouped.launch import combine_program

    monkeypatch.setenv("SM90_EMULATOR_CACHE", str(tmp_path))
    config = combine_program.configs()[0]
    text = ptx(combine_program, config)
    assert ".entry" in text
    recording = Recording()
    with use_backend(recording):
        combine_program.cached(config)
        assert recording.last is None
        assert str(combine_program.compile(config).__ptx__) == text
        assert recording.last is not None
    assert ptx(combine_program, config) == text


def test_only_cpu_tensors_are_disguised() -> None:
    for value in (3, 1.5, None, torch.zeros(2, device="meta")):
        assert cutedsl.on_device(value) is value


def test_a_program_whose_ptx_nobody_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback cannot raise through C code. The callback's caller receives an error code, and the `with` block raises the
    exception."""
    monkeypatch.setenv("SM90_EMULATOR_CACHE", str(tmp_path))
    library, found = ctypes.c_void_p(), ctypes.c_void_p()
    image = ctypes.create_string_buffer(bytes(ELF) + bytes(64))
    with emulated_sm90() as running:
        assert cutedsl._load_library(ctypes.addressof(image), ctypes.pointer(library)) == 0
        assert cutedsl._find_kernel(library.value, b"attend", ctypes.pointer(found)) == 0
        assert cutedsl._launch_kernel(found.value, None, 0, None) != 0
        assert "no PTX of attend" in str(running.error)


def test_programs_raise_the_emulators_errors() -> None:
    def program(*arguments: Any) -> Any:
        if arguments[0] == "fails in the kernel":
            BLOCK.active().error = EmulationError("a missing wait")
        raise ValueError("a wrong argument")

    launch = cutedsl.launching(program)
    with pytest.raises(EmulationError, match="outside `emulated_sm90"):
        launch(1)
    with emulated_sm90():
        with pytest.raises(EmulationError, match="a missing wait"):
            launch("fails in the kernel")
        with pytest.raises(ValueError, match="a wrong argument"):
            launch("fails before")


def test_c_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM90_EMULATOR_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"does not compile: .*absent\.c"):
        build.compiled("machine", ("absent.c",), ())
    assert list(tmp_path.iterdir()) == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="ziglang"):
        build._compiler()
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name)
    assert build._compiler()[1:] == ["-m", "ziglang", "cc"]


@pytest.mark.parametrize(("edit", "wanted"), [(None, 3), (lambda name, text: text.replace("[%d0], 3", f"[%d0], {len(name)}"), 7)])
def test_an_edited_text_is_executed(edit: Any, wanted: int) -> None:
    text, out = kernel("st.global.b32 [%d0], 3;", 1), torch.zeros(1, dtype=torch.int32)
    with emulated_sm90(edit=edit) as running:
        running.share(out)
        address = out.storage_offset() + out.untyped_storage().data_ptr()  # an address from these calls is not recorded
        running.run(text, "snippet", Geometry((1, 1, 1), (1, 1, 1)), pack(load(text, "snippet").kernel, [address]))
    assert out.item() == wanted

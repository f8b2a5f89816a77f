"""Tests the compile cache: its key, concurrent compilation, and damaged files.

The tests use a kernel of a few lines. It is compiled for sm_90a, which needs CuteDSL but no GPU. The tests recognise a loaded
program by its error messages for wrong arguments, and launch it if there is an sm_90.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base import config as settings
from tokenspeed_kernel_base import packs, storage
from tokenspeed_kernel_base.compilation import CompilationForbiddenError, compilations, compile_policy
from tokenspeed_kernel_nvidia import _machine, _programs, warmup
from tokenspeed_kernel_nvidia.program_backend import Backend, use_backend

HERE = Path(_programs.__file__).parents[1]
needs_dsl = pytest.mark.skipif(_machine.dsl_gap() is not None, reason=str(_machine.dsl_gap()))

KERNEL = '''
from dataclasses import dataclass

from tokenspeed_kernel_nvidia._programs import program


@dataclass(frozen=True)
class Config:
    factor: int


@program(arch="sm_90a", configs=lambda: [Config(2), Config(3)])
def scale(config):
    """Multiplies."""
    from . import scale_device

    return scale_device.host(config), scale_device.fake_arguments()
'''

DEVICE = """
import os

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from .shared import times


class Host:
    def __init__(self, factor):
        self.factor = factor

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32):
        index = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        if index < n:
            y[index] = times(x[index], self.factor)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32, stream):
        self.kernel(x, y, n).launch(grid=[(n + 127) // 128, 1, 1], block=[128, 1, 1], stream=stream)


def host(config):
    if "COMPILED" in os.environ:  # who compiles says so
        with open(os.environ["COMPILED"], "a") as file:
            file.write(f"{os.getpid()}\\n")
    return Host(config.factor)


def fake_arguments():
    size = cute.sym_int()
    x, y = (make_fake_compact_tensor(cutlass.Float32, (size,), assumed_align=16) for _ in range(2))
    return x, y, cutlass.Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)
"""

SHARED = """
def times(x, factor):
    return x * factor
"""

ASK = """
import sys
import torch
sys.path[:0] = sys.argv[1:3]
from scaling.scale import Config, scale
x = torch.zeros(4)
launch = scale(Config(int(sys.argv[3])))
try:
    launch(x, x, 4)
except ValueError as error:
    print("cutlass" in sys.modules, "x: Tensor([n0], float32)" in str(error))
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Writes a package with a program to a temporary directory."""
    package = tmp_path / "source" / "scaling"
    package.mkdir(parents=True)
    files = {"__init__": "", "scale": KERNEL, "scale_device": DEVICE, "shared": SHARED, "other": "import os\n"}
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    return package


@pytest.fixture
def scaling(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports the package of `sources`, with a separate cache."""
    monkeypatch.syspath_prepend(str(sources.parent))
    monkeypatch.setenv(_programs.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("COMPILED", str(tmp_path / "compiled"))
    yield importlib.import_module("scaling.scale")
    for name in [name for name in sys.modules if name.partition(".")[0] == "scaling"]:
        del sys.modules[name]


def fresh(module: Any) -> Any:
    """Returns a new `Program` like that of ``module``, which has loaded nothing yet, as in a new process."""
    program = module.scale
    return _programs.Program(program._declaration, program.arch, program.configs)


def compiled(folder: Path) -> int:
    """Returns the number of compilations."""
    log = folder / "compiled"
    return len(log.read_text().split()) if log.exists() else 0


def works(launch: Any) -> bool:
    """Asserts that a launch function is the compiled kernel: it rejects a CPU tensor with the kernel's error message."""
    x = torch.zeros(4)
    with pytest.raises(ValueError, match=r"x: Tensor\(\[n0\], float32\)"):
        launch(x, x, 4)
    return True


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache").iterdir() if path.suffix != ".lock")


def asking(sources: Path, folder: Path, factor: int, **environment: str) -> subprocess.Popen[str]:
    """Starts a new process that requests a program."""
    command = [sys.executable, "-c", ASK, str(HERE), str(sources.parent), str(factor)]
    settings = {**os.environ, _programs.VARIABLE: str(folder / "cache"), "COMPILED": str(folder / "compiled"), **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings)


def answer(process: subprocess.Popen[str]) -> tuple[bool, bool]:
    """Returns whether the compiler was imported, and whether the program works."""
    out, error = process.communicate()
    assert process.returncode == 0, error
    imported, right = out.split()
    return imported == "True", right == "True"


# -- the key -------------------------------------------------------------------------------------------------------------------


def test_a_file_is_named_by_what_it_is_made_from(scaling: Any, sources: Path) -> None:
    program, config = scaling.scale, scaling.Config(2)
    name = program.file(config).name
    assert name.startswith("scaling.scale.scale.")
    assert program.file(scaling.Config(2)).name == name
    assert program.file(scaling.Config(3)).name != name
    other_arch = _programs.Program(program._declaration, "sm_100a", program.configs)
    assert other_arch.file(config).name != name
    for changed in ("scale", "scale_device", "shared"):
        path = sources / f"{changed}.py"
        text = path.read_text()
        path.write_text(text + "\n# changed\n")
        assert program.file(config).name != name, changed
        path.write_text(text)
    (sources / "other.py").write_text("import sys\n")
    assert program.file(config).name == name


def test_the_toolchain_is_in_the_key(scaling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program, config = scaling.scale, scaling.Config(2)
    name = program.file(config).name
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    with_lines = program.file(config).name
    assert with_lines != name
    monkeypatch.setattr(_programs, "toolchain", lambda: ("nvidia-cutlass-dsl 9.9",))
    assert program.file(config).name not in (name, with_lines)


def test_imports_are_found_wherever_they_stand(sources: Path, scaling: Any) -> None:
    (sources / "deep").mkdir()
    (sources / "deep" / "__init__.py").write_text("from ..other import os\n")
    (sources / "deep" / "leaf.py").write_text("def late():\n    import scaling.shared\n")
    (sources / "scale.py").write_text(KERNEL + "    from .deep import leaf\n")
    assert {"scaling.deep", "scaling.deep.leaf", "scaling.other", "scaling.shared"} <= set(_programs._sources("scaling.scale"))
    assert "scaling" not in _programs._sources("scaling.scale")


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(_programs.VARIABLE, raising=False)
    assert _programs.cache_directory() == tmp_path / "tokenspeed_kernel" / "programs"
    monkeypatch.setenv(_programs.VARIABLE, str(tmp_path / "there"))
    assert _programs.cache_directory() == tmp_path / "there"
    for word in ("off", "0", "false", "No"):
        monkeypatch.setenv(_programs.VARIABLE, word)
        assert _programs.cache_directory() is None
    monkeypatch.setenv(_programs.VARIABLE, "1")
    assert _programs.cache_directory() == tmp_path / "tokenspeed_kernel" / "programs"


def test_a_program_is_pickled_by_name(scaling: Any) -> None:
    assert pickle.loads(pickle.dumps(scaling.scale)) is scaling.scale
    assert scaling.scale.__doc__ == "Multiplies."
    assert repr(scaling.scale) == "<program scaling.scale.scale for sm_90a>"


# -- compiling and loading -----------------------------------------------------------------------------------------------------


@needs_dsl
def test_it_is_compiled_once(scaling: Any, tmp_path: Path) -> None:
    program, config = fresh(scaling), scaling.Config(2)
    assert not program.is_kept(config)
    launch = program(config)
    assert works(launch)
    assert program(config) is launch
    assert program.is_kept(config)
    assert works(fresh(scaling)(config))
    assert compiled(tmp_path) == 1
    assert works(program(scaling.Config(3)))
    assert compiled(tmp_path) == 2
    assert len(files(tmp_path)) == 2
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@needs_dsl
def test_another_process_loads_it_without_the_compiler(scaling: Any, sources: Path, tmp_path: Path) -> None:
    if not any(_programs.shutil.which(linker) for linker in ("cc", "gcc", "clang")):
        pytest.skip("needs a linker")
    fresh(scaling)(scaling.Config(2))
    imported, right = answer(asking(sources, tmp_path, 2))
    assert right
    assert not imported
    assert compiled(tmp_path) == 1


@needs_dsl
def test_without_a_linker_it_is_kept_as_an_object(scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_programs.shutil, "which", lambda name: None)
    assert works(fresh(scaling)(scaling.Config(2)))
    assert [Path(name).suffix for name in files(tmp_path)] == [".o"]
    assert works(fresh(scaling)(scaling.Config(2)))
    assert compiled(tmp_path) == 1


@needs_dsl
def test_off_keeps_nothing(scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_programs.VARIABLE, "off")
    assert works(fresh(scaling)(scaling.Config(2)))
    assert not (tmp_path / "cache").exists()
    assert compiled(tmp_path) == 1


@needs_dsl
def test_a_backend_stands_in_for_the_gpu(scaling: Any, tmp_path: Path) -> None:
    """Asserts that a backend such as an emulator has a separate cache and separate programs, and that the GPU's programs are the
    same before and after."""
    config, built = scaling.Config(2), []

    class Emulator(Backend):
        def directory(self) -> Path:
            return tmp_path / "emulator"

        def compile(self, build: Any) -> Any:
            built.append(build(f"--keep-ptx --dump-dir {tmp_path}"))
            return built[-1]

        def launcher(self, launch: Any) -> Any:
            return "emulated", launch

    program, backend = fresh(scaling), Emulator()
    launch = program(config)
    with use_backend(backend):
        assert not program.is_kept(config)
        kind, inner = program(config)
        assert kind == "emulated"
        assert works(inner)
        assert ".entry" in str(built[0].__ptx__)
        assert program.is_kept(config)
    assert program(config) is launch
    with use_backend(backend):
        assert program(config)[1] is inner
    assert len(built) == 1
    assert compiled(tmp_path) == 2


def test_without_a_compiler_it_says_what_to_install(scaling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_programs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"scaling\.scale\.scale .*nvidia-cutlass-dsl"):
        scaling.scale.compile(scaling.Config(2))


# -- the compile policy --------------------------------------------------------------------------------------------------------


@needs_dsl
def test_forbid_allows_cached_programs_and_stops_others_before_the_compiler(scaling: Any, tmp_path: Path) -> None:
    config, begun = scaling.Config(2), len(compilations())
    message = r"scaling\.scale\.scale Config\(factor=2\) is not compiled yet, and the compile policy is forbid"
    with compile_policy("forbid"), pytest.raises(CompilationForbiddenError, match=message):
        fresh(scaling)(config)
    assert compiled(tmp_path) == 0
    assert not (tmp_path / "cache").exists(), "a refused call must not wait for a lock"
    fresh(scaling)(config)
    (event,) = compilations(begun)
    assert (event.program, event.compiler, event.seconds > 0) == ("scaling.scale.scale Config(factor=2)", "CuteDSL", True)
    with compile_policy("forbid"):
        assert works(fresh(scaling)(config))
    assert len(compilations(begun)) == compiled(tmp_path) == 1


# -- packs --------------------------------------------------------------------------------------------------------------------


@needs_dsl
def test_programs_come_from_packs_first(scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that programs are loaded from packs first, even if nothing can be cached. If a pack's file is damaged, or the pack
    was made with another compiler, a warning names it, and the program is compiled."""
    config, pack = scaling.Config(2), tmp_path / "pack"
    fresh(scaling)(config)
    pack.mkdir()
    (tmp_path / "cache").rename(pack / "cutedsl")
    for lock in (pack / "cutedsl").glob("*.lock"):
        lock.unlink()
    packs.write_manifest(pack, {"distributions": {}, "toolchains": {"cutedsl": [*_programs.toolchain()]}})
    monkeypatch.setenv("TOKENSPEED_KERNEL_PACKS", str(pack))
    monkeypatch.setattr(settings, "_settings", settings.read_settings())
    (warmed,) = warmup.warm_up([(fresh(scaling), config)])
    assert (warmed.seconds, warmed.error) == (0, ""), "nothing is left to compile"
    with compile_policy("forbid"):
        assert works(fresh(scaling)(config))
        monkeypatch.setenv(_programs.VARIABLE, "off")
        assert works(fresh(scaling)(config))
    assert compiled(tmp_path) == 1
    with monkeypatch.context() as other:
        other.setattr(_programs, "toolchain", lambda: ("nvidia-cutlass-dsl 9.9",))
        with pytest.warns(storage.StorageWarning, match="programs of cutedsl .*nvidia-cutlass-dsl"):
            assert fresh(scaling).packed(config) is None
    (file,) = (pack / "cutedsl").iterdir()
    damaged = file.read_bytes()[:-1] + b"?"
    file.unlink()  # not overwritten: this process has mapped the library
    file.write_bytes(damaged)
    with pytest.warns(storage.StorageWarning, match=f"{file.name} is damaged or missing, and not used"):
        assert works(fresh(scaling)(config))
    assert compiled(tmp_path) == 2


# -- damaged files -------------------------------------------------------------------------------------------------------------


@needs_dsl
@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "text", "longer"])
def test_a_damaged_file_is_kept_aside_and_replaced(scaling: Any, tmp_path: Path, damage: str) -> None:
    config = scaling.Config(2)
    fresh(scaling)(config)
    (name,) = files(tmp_path)
    path = tmp_path / "cache" / name
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "truncated": whole[:middle],
        "empty": b"",
        "text": b"not a program",
        "longer": whole + b"\0",
    }[damage]
    path.unlink()  # not overwritten: this process has mapped the old file
    path.write_bytes(damaged)
    assert not fresh(scaling).is_kept(config)
    with pytest.warns(storage.StorageWarning, match=rf"{name} is damaged, .* kept as .*{name}\.corrupt"):
        assert works(fresh(scaling)(config))
    assert compiled(tmp_path) == 2
    assert files(tmp_path) == [name, f"{name}.corrupt"]
    assert works(fresh(scaling)(config))
    assert compiled(tmp_path) == 2


@needs_dsl
def test_a_whole_file_that_does_not_load_is_replaced(scaling: Any, sources: Path, tmp_path: Path) -> None:
    body = b"no library"
    (tmp_path / "cache").mkdir()
    path = tmp_path / "cache" / f"{scaling.scale.file(scaling.Config(2)).name}.so"
    path.write_bytes(_programs._sealed(body))
    assert answer(asking(sources, tmp_path, 2))[1]
    assert answer(asking(sources, tmp_path, 2))[1]
    assert compiled(tmp_path) == 1


@needs_dsl
def test_a_folder_that_cannot_be_written(scaling: Any, tmp_path: Path) -> None:
    """Puts a file at the path of the cache's folder, so that nothing can be written there. A read-only folder would not stop
    root."""
    (tmp_path / "cache").write_text("a file")
    storage.warn_once.cache_clear()
    with pytest.warns(storage.StorageWarning, match="compiled programs are not kept in .*cache"):
        assert works(fresh(scaling)(scaling.Config(2)))
    assert compiled(tmp_path) == 1


@needs_dsl
def test_without_any_place_it_is_what_the_compiler_made(scaling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setenv(_programs.VARIABLE, "off")
    monkeypatch.setattr(_programs.tempfile, "TemporaryDirectory", refuse)
    assert hasattr(fresh(scaling)(scaling.Config(2)), "export_to_c")


@needs_dsl
def test_a_folder_that_libraries_cannot_be_loaded_from(scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = _programs._read
    monkeypatch.setattr(_programs, "_read", lambda file: None if file.parent == tmp_path / "cache" else read(file))
    storage.warn_once.cache_clear()
    with pytest.warns(storage.StorageWarning, match="cannot be loaded .*cache, .* by every process"):
        assert works(fresh(scaling)(scaling.Config(2)))


@needs_dsl
@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_folder_that_is_read_only(scaling: Any, tmp_path: Path) -> None:
    config = scaling.Config(2)
    fresh(scaling)(config)
    (tmp_path / "cache").chmod(0o500)
    try:
        assert works(fresh(scaling)(config))
        assert compiled(tmp_path) == 1
        storage.warn_once.cache_clear()
        with pytest.warns(storage.StorageWarning):
            assert works(fresh(scaling)(scaling.Config(3)))
    finally:
        (tmp_path / "cache").chmod(0o700)


@needs_dsl
def test_a_writer_that_was_killed_leaves_no_trace(scaling: Any, sources: Path, tmp_path: Path) -> None:
    """Kills a writer between writing and renaming its file. The partial file must not be used as a program, and the next writer
    must remove this file."""
    config = scaling.Config(2)
    stop = "from pathlib import Path; Path.replace = lambda *_: (print('written', flush=True), sys.stdin.read())\n"
    command = [sys.executable, "-c", stop + ASK, str(HERE), str(sources.parent), "2"]
    settings = {**os.environ, _programs.VARIABLE: str(tmp_path / "cache"), "COMPILED": str(tmp_path / "compiled")}
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "written\n"
    writer.kill()
    writer.communicate()
    assert any(".part" in name for name in files(tmp_path))
    assert not fresh(scaling).is_kept(config)
    assert works(fresh(scaling)(config))
    assert compiled(tmp_path) == 2
    assert not any(".part" in name for name in files(tmp_path))


# -- concurrent processes ------------------------------------------------------------------------------------------------------


@needs_dsl
def test_of_many_processes_one_compiles(scaling: Any, sources: Path, tmp_path: Path) -> None:
    answers = [answer(process) for process in [asking(sources, tmp_path, 2) for _ in range(4)]]
    assert all(right for _, right in answers)
    assert compiled(tmp_path) == 1
    assert len(files(tmp_path)) == 1


@needs_dsl
def test_of_many_threads_one_compiles(scaling: Any, tmp_path: Path) -> None:
    program, found = fresh(scaling), []
    threads = [threading.Thread(target=lambda: found.append(program(scaling.Config(2)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(launch) for launch in found}) == 1
    assert compiled(tmp_path) == 1


# -- on the device -------------------------------------------------------------------------------------------------------------


def test_it_launches_on_the_current_stream(scaling: Any, sm90: torch.device) -> None:
    x = torch.randn(1000, device=sm90)
    y, z = torch.empty_like(x), torch.empty_like(x)
    for config in (scaling.Config(2), scaling.Config(3)):
        for program in (fresh(scaling), fresh(scaling)):  # the first program compiles, the second loads
            program(config)(x, y, 1000)
            assert torch.equal(y, x * config.factor)
    launch = fresh(scaling)(scaling.Config(3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, z, 1000)
    z.zero_()
    x.normal_()
    graph.replay()
    assert torch.equal(z, x * 3)
    with pytest.raises((TypeError, ValueError), match="argument #0"):
        launch(x.half(), y, 1000)
    with pytest.raises(ValueError, match="argument #0"):
        launch(x[1:], y, 999)

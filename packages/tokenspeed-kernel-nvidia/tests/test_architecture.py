"""Tests a new architecture: `made_up/sm77` has only the code that ARCHITECTURE.md requires of an architecture.

The kernel of `made_up/sm77` is registered, selected on such a device, and launched by the shared code, with a stub instead of the
compiler. The kernel's device code is compiled for architectures older and newer than Hopper, and executed.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel_nvidia
from tokenspeed_kernel_base.ops.activation.silu_and_mul import silu_and_mul
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry, register_package
from tokenspeed_kernel_nvidia import _machine, _programs, warmup

PACKAGE = Path(tokenspeed_kernel_nvidia.__file__).parent
MADE_UP = Path(__file__).parent / "made_up"
NAME = "cutedsl_silu_and_mul_sm77"
needs_dsl = pytest.mark.skipif(_machine.dsl_gap() is not None, reason=str(_machine.dsl_gap()))


@pytest.fixture(scope="module")
def launch() -> Iterator[Any]:
    """Yields the launcher's module. For Python, the folder `sm77` is beside `sm90`, as the folder of a new architecture would
    be."""
    folder = f"{tokenspeed_kernel_nvidia.__name__}.sm77"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenspeed_kernel_nvidia, "__path__", [*tokenspeed_kernel_nvidia.__path__, str(MADE_UP)])
        patch.setattr(_machine, "dsl_gap", lambda: None)
        patch.setenv(_programs.VARIABLE, "off")
        register_package(folder)
        launch = importlib.import_module(f"{folder}.silu.launch")
        patch.setattr(launch, "sm_count_of", lambda device: 2)
        yield launch
    KernelRegistry.get().unregister(NAME)
    for name in [name for name in sys.modules if name.startswith(folder)]:
        del sys.modules[name]  # a later import declares the kernel again


class Stub:
    """A stand-in for a compiled program, which computes the kernel's result in PyTorch, row by row."""

    def __init__(self) -> None:
        self.launches: list[int] = []

    def __call__(self, x: Tensor, out: Tensor, ctas: int) -> None:
        self.launches.append(ctas)
        for row in (row for cta in range(ctas) for row in range(cta, len(x), ctas)):
            gate, up = x[row].float().chunk(2)
            out[row] = (gate / (1 + torch.exp(-gate)) * up).to(out.dtype)

    def export_to_c(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOTSUP, "a stub has no machine code")


def arguments() -> dict[str, Tensor]:
    return {"x": torch.randn(5, 2 * 136, generator=torch.Generator().manual_seed(3)).bfloat16()}


def test_it_is_selected_on_its_devices_only(launch: Any) -> None:
    with use_platform(named_platform("sm_77")):
        assert silu_and_mul.explain(**arguments()).chosen.name == NAME
    with use_platform(named_platform("sm_90")):
        ((gate, reason),) = (found for found, names in silu_and_mul.explain(**arguments()).rejections.items() if NAME in names)
    assert gate == "platform"
    assert "7.7" in reason


def test_it_is_compiled_ahead_of_time_like_the_others(launch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert warmup.main(["--arch", "sm_77", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 2)[-1].split()[-1] for line in lines] == ["Config(dtype='bfloat16')", "Config(dtype='float16')"]


def test_it_is_launched_by_the_shared_plumbing(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, compiled = Stub(), []

    def compile_(program: Any, config: Any, options: str = "") -> Any:
        compiled.append((program.arch, config))
        return stub

    monkeypatch.setattr(_programs.Program, "compile", compile_)
    given = arguments()
    with use_platform(dataclasses.replace(named_platform("sm_77"), pretended=False)):
        results = [silu_and_mul(**given), silu_and_mul(**given, out=torch.empty(5, 136, dtype=torch.bfloat16))]
    assert compiled == [("sm_77", launch.Config("bfloat16"))]
    assert stub.launches == [2, 2]
    for result in results:
        torch.testing.assert_close(result, silu_and_mul(**given, solution="reference"))


@needs_dsl
def test_its_device_code_is_right(launch: Any) -> None:
    emulator = pytest.importorskip("sm90_emulator")
    if torch.cuda.is_available():
        pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process")
    program = _programs.Program(launch.silu_program._declaration, "sm_90a", launch.every_config)
    x = arguments()["x"]
    out = torch.empty(5, 136, dtype=x.dtype)
    with emulator.emulated_sm90(multiprocessors=2, uninitialised=True):
        program(launch.Config("bfloat16"))(x, out, 2)
    torch.testing.assert_close(out, silu_and_mul(x, solution="reference"))


@needs_dsl
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_shared_device_code_compiles_for_other_architectures(launch: Any, arch: str, tmp_path: Path) -> None:
    program = _programs.Program(launch.silu_program._declaration, arch, launch.every_config)
    compiled = program.compile(launch.Config("bfloat16"), f"--keep-ptx --dump-dir {tmp_path}")
    assert re.search(rf"^\.target {arch}$", str(compiled.__ptx__), re.MULTILINE)


def test_shared_code_depends_on_no_architecture() -> None:
    """Asserts that shared code uses neither CuteDSL's `nvgpu` nor inline PTX of Hopper. Code of `sm90` gets TMA, wgmma and clusters
    from these two."""
    for path in (PACKAGE / "cutedsl").rglob("*.py"):
        code = path.read_text()
        imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", code, re.MULTILINE)
        assert not [name for name in imported if ".nvgpu" in name or re.search(r"\.sm\d", name)], path
        assert not re.search(r"[\"{ ](wgmma|setmaxnreg|cp\.async\.bulk|mapa)\.", code), path

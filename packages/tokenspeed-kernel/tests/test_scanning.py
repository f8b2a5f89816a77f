"""Tests that packages are scanned for kernels, and that device code is imported at the first launch."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from processes import run_python

import tokenspeed_kernel
from tokenspeed_kernel_base.discovery import DEVICE_SUFFIX, import_modules
from tokenspeed_kernel_base.registry import KernelRegistry, register_package
from tokenspeed_kernel_base.spec import RegistrationError

PORTABLE = "tokenspeed_kernel.triton"
ROOT = Path(tokenspeed_kernel.__file__).parent / "triton"


def modules() -> dict[str, Path]:
    """Returns the source files of the portable kernels, by module name."""
    named = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent.parent).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


# -- the portable kernels ---------------------------------------------------------------------------------------------------------


def test_every_module_is_scanned_or_device_code() -> None:
    scanned = set(import_modules(PORTABLE))
    assert [name for name in modules() if (name in scanned) == name.endswith(DEVICE_SUFFIX)] == []
    assert scanned <= modules().keys()


def test_device_code_alone_imports_triton() -> None:
    importing = {name for name, path in modules().items() if re.search(r"^\s*(import|from) triton", path.read_text(), re.MULTILINE)}
    assert importing == {name for name in modules() if name.endswith(DEVICE_SUFFIX)}


def test_scanning_imports_no_triton() -> None:
    program = (
        "import sys, tokenspeed_kernel, tokenspeed_kernel_base.registry as registry; "
        f"found = registry.register_package({PORTABLE!r}); "
        "assert len(found) > 30, found; assert 'triton' not in sys.modules"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr


def _wanted(path: Path, name: str) -> Iterator[str]:
    """Yields the names of the device modules that a launcher's module refers to by ``DeviceModule(...)``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "DeviceModule":
            yield str(eval(ast.unparse(node.args[0]), {"__name__": name}))


def test_launchers_name_device_code_that_exists_and_all_device_code_is_wanted() -> None:
    wanted = {device for name, path in modules().items() for device in _wanted(path, name) if not device.startswith("triton.")}
    assert wanted <= modules().keys()
    for name in [*wanted]:  # adds device code that this device code imports
        waiting = [name]
        while waiting:
            for node in ast.walk(ast.parse(modules()[waiting.pop()].read_text())):
                if isinstance(node, ast.ImportFrom):
                    named = {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
                    new = {other for other in named & modules().keys() if other.endswith(DEVICE_SUFFIX)} - wanted
                    wanted |= new
                    waiting += new
    assert wanted == {name for name in modules() if name.endswith(DEVICE_SUFFIX)}


# -- a package written for the test ----------------------------------------------------------------------------------------------

LAUNCHER = """
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.platform import CapabilityRequirement
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
import torch

device_code = DeviceModule(__name__ + "_device")


@register_kernel(
    "norm", "rmsnorm", name="lately_rmsnorm", solution="lately", signatures=format_signatures("x", "dense", {torch.float32})
)
def rmsnorm(x, weight, eps, residual, out, residual_out):
    return device_code.normalise(x, weight, eps)
"""
ANOTHER = LAUNCHER.replace("lately_", "another_").replace('"norm", "rmsnorm",', '"norm", "rmsnorm", priority=1,')
DEVICE_CODE = """
import torch


def normalise(x, weight, eps):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Writes a package with these modules, and returns the package's name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def make(**sources: str) -> str:
        name = f"scanned_{tmp_path.name}_{len(made)}"
        made.append(name)
        (tmp_path / name / "sm90").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "sm90" / "__init__.py").write_text("")
        for module, source in sources.items():
            (tmp_path / name / "sm90" / f"{module}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    yield make
    for module in [module for module in sys.modules if module.partition(".")[0] in made]:
        del sys.modules[module]


def test_a_new_kernel_is_its_files_and_no_other_edit(package: Callable[..., str]) -> None:
    name = package(rms=LAUNCHER, rms_device=DEVICE_CODE)
    (spec,) = register_package(name)
    assert (spec.name, spec.package, spec.origin) == ("lately_rmsnorm", name, f"{sys.modules[name + '.sm90.rms'].__file__}:12")
    assert f"{name}.sm90.rms_device" not in sys.modules, "device code is imported at the first launch"
    x, weight = torch.randn(3, 8), torch.randn(8)
    got = tokenspeed_kernel.rmsnorm(x, weight, override="lately_rmsnorm")
    torch.testing.assert_close(got, tokenspeed_kernel.rmsnorm(x, weight, override="reference_rmsnorm"))
    device_code = sys.modules[name + ".sm90.rms"].device_code
    assert vars(device_code)["normalise"] is sys.modules[name + ".sm90.rms_device"].normalise, "found at once from now on"
    assert register_package(name) == [spec]


def test_modules_that_would_not_be_found_are_named(package: Callable[..., str], tmp_path: Path) -> None:
    name = package(rms=LAUNCHER, rms_device=DEVICE_CODE)
    (tmp_path / name / "sm90" / "__init__.py").unlink()
    with pytest.raises(ImportError, match=re.escape(str(tmp_path / name / "sm90")) + " holds modules and no __init__.py"):
        register_package(name)


SOLUTION = 'solution="lately"'
SIGNATURES = 'format_signatures("x", "dense", {torch.float32})'


@pytest.mark.parametrize(
    ("declared", "instead", "said"),
    [
        ('"norm", "rmsnorm"', '"norm", ""', "mode of a kernel must be a non-empty str, got ''"),
        (SOLUTION, "solution=None", "solution of a kernel must be a non-empty str, got None"),
        (SOLUTION, SOLUTION + ", priority=99", "lately_rmsnorm: priority must be an int from 0 to 19, got 99"),
        (SOLUTION, SOLUTION + ", traits=['residual']", "traits must be a dict of constraints by trait, got ['residual']"),
        (SOLUTION, SOLUTION + ", traits={3: True}", "traits must be a dict of constraints by trait, got {3: True}"),
        (SOLUTION, SOLUTION + ", tags=7", "tags must be a set of str, got 7"),
        (SOLUTION, SOLUTION + ", capability='sm_90'", "capability must be a CapabilityRequirement, got 'sm_90'"),
        (SOLUTION, SOLUTION + ", weight_preprocessor=3", "weight_preprocessor must be a function or"),
        (SOLUTION, SOLUTION + ", tunables={'warps': [1]}", "it does not take warps"),
        (SIGNATURES, "torch.float32", "signatures must be FormatSignature, got torch.float32"),
        (SIGNATURES, "[]", "signatures is empty"),
        ("def rmsnorm(x, weight, ", "def rmsnorm(x, wieght, ", "norm.rmsnorm has no parameter wieght; did you mean weight?"),
        ('name="lately_rmsnorm"', 'name="reference_rmsnorm"', "a kernel named reference_rmsnorm exists: registered by "),
    ],
)
def test_a_wrong_declaration_says_file_and_line(package: Callable[..., str], declared: str, instead: str, said: str) -> None:
    assert declared in LAUNCHER
    name = package(good=ANOTHER, rms=LAUNCHER.replace(declared, instead), rms_device=DEVICE_CODE)
    with pytest.raises(RegistrationError) as raised:
        register_package(name)
    message = str(raised.value)
    assert said in message
    assert re.search(rf"{name}/sm90/rms\.py:12\b", message.replace("\\", "/")), message
    assert not any(spec.package == name for spec in KernelRegistry.get().list_kernels()), "all of a package or nothing"
    assert f"{name}.sm90.rms" not in sys.modules, "it runs again when it is imported again"

"""The fixture ``lab``: an operator whose kernels take prescribed times, and a folder for its tuned results."""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from processes import run_python

from tokenspeed_kernel.workbench.tuned import fingerprint
from tokenspeed_kernel_base import operator as operator_module
from tokenspeed_kernel_base import storage

MODULES = Path(__file__).parent / "lab_modules"


@pytest.fixture
def folder(tmp_path: Path, settings_from: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets the folder of tuned results to one for this test, and returns it."""
    storage.warn_once.cache_clear()
    settings_from(TUNED=str(tmp_path / "tuned"))
    return tmp_path / "tuned"


class Laboratory:
    """The operator of `lab.py`, its kernels' recorded calls, and its tuned results."""

    def __init__(self, module: ModuleType, folder: Path, results: Path) -> None:
        self.lab, self.register, self.serving, self.tune_all = module.lab, module.register, module.serving, module.tune_all
        self.folder, self.results = folder, results

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Every kernel call so far: the kernel's name and configuration."""
        return importlib.import_module("lab_kernels").calls  # type: ignore[no-any-return]

    def spend(self, us: float) -> None:
        importlib.import_module("lab_clock").spend(us)

    def table(self) -> Path:
        """The file with the tuned results."""
        (file,) = self.results.glob("*.json")
        return file

    def in_a_new_process(self, *words: str) -> list[str]:
        """Runs `lab.py` in a new process, and returns the lines of its output."""
        done = run_python(str(self.folder / "lab.py"), *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@functools.cache
def _operator() -> ModuleType:
    """Imports the operator once, because PyTorch cannot unregister a custom operator."""
    return importlib.import_module("lab")


@pytest.fixture
def forget_sources() -> Iterator[Callable[[], None]]:
    """Returns a function after which sources of kernels are read again. Otherwise each source is read once per process."""

    def forget() -> None:
        fingerprint.source_fingerprint.cache_clear()
        fingerprint._locate.cache_clear()

    forget()
    yield forget
    forget()


@pytest.fixture
def lab(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_sources: Callable[[], None]) -> Iterator[Laboratory]:
    """Returns the laboratory without kernels. Its modules are copies, so tests can edit their source."""
    where = tmp_path / "lab"
    shutil.copytree(MODULES, where, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(str(where))
    known = "lab" in sys.modules
    module = _operator()
    operator_module._operators["testing", "lab"] = module.lab.operator
    for timekeeper in module.timekeepers():
        monkeypatch.setattr(timekeeper, "time", importlib.import_module("lab_clock").clock)
    if known:  # the import registered the reference, but an earlier test removed it
        module.lab.operator.register_reference()
    yield Laboratory(module, where, folder)
    del operator_module._operators["testing", "lab"]
    for name in ("lab_kernels", "lab_clock"):
        sys.modules.pop(name, None)

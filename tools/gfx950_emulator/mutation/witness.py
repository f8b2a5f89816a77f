"""A pytest plugin for runs against a mutated copy of the emulator. It rejects any other copy, and writes the run's result to a
file.

Environment variables configure the plugin. ``MUTATION_ROOT`` is the folder of the copy. ``MUTATION_MODULE`` is the changed module,
which is always imported; all imported modules of the package are checked. ``MUTATION_REPORT`` is the file to write.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_PACKAGE = "gfx950_emulator"


class Witness:
    """Collects the contents of the report.

    Attributes:
        passed: tests that passed.
        failures: tests that failed in their own code, each with its name, the exception's classes (most derived first) and the
            exception's text.
        broken: failures outside of tests: imports, collection, fixtures.
    """

    def __init__(self, root: Path, module: str, report: Path) -> None:
        self._root, self._report = root, report
        self.passed = 0
        self.failures: list[dict[str, Any]] = []
        self.broken: list[str] = []
        try:
            importlib.import_module(module)
        except Exception as error:  # a mutant's import may raise any exception
            self.broken.append(f"{module} cannot be imported: {type(error).__name__}: {error}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(f"{report.nodeid} cannot be collected: {report.longreprtext.strip().splitlines()[-1]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and report.when == "call":
            error: BaseException | None = call.excinfo.value if call.excinfo is not None else None
            while isinstance(getattr(error, "exceptions", None), tuple):  # an exception group: several hypothesis failures
                error = error.exceptions[0]
            classes = [cls.__name__ for cls in type(error).__mro__]
            self.failures.append({"test": report.nodeid, "classes": classes, "text": str(error)})
        elif report.failed:
            self.broken.append(f"{report.nodeid} fails in its {report.when}")
        elif report.when == "call" and report.passed:
            self.passed += 1
        return report

    def pytest_sessionfinish(self) -> None:
        origins = {
            name: getattr(module, "__file__", None) for name, module in sys.modules.items() if name.split(".")[0] == _PACKAGE
        }
        foreign = sorted(name for name, file in origins.items() if file is None or self._root not in Path(file).resolve().parents)
        self.broken += [f"{name} was imported from elsewhere" for name in foreign]
        self._report.write_text(json.dumps({"passed": self.passed, "failures": self.failures, "broken": self.broken}))


def pytest_configure(config: pytest.Config) -> None:
    root, module, report = (os.environ[f"MUTATION_{name}"] for name in ("ROOT", "MODULE", "REPORT"))
    config.pluginmanager.register(Witness(Path(root).resolve(), module, Path(report)))

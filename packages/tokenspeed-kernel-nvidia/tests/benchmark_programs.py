"""The scripts of ``benchmarks/`` for tests: as modules, and without a GPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
# These plot with matplotlib.
DRAWN = ("drawing", "plot", "plot_moe", "plot_mm")


@contextlib.contextmanager
def loaded(names: Sequence[str]) -> Iterator[dict[str, ModuleType]]:
    """The scripts as modules, which can import each other as when run as scripts. Without matplotlib, those that plot
    are left out.
    """
    ours = {file.stem for file in FOLDER.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in ours if name in sys.modules}
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        draws = importlib.util.find_spec("matplotlib") is not None
        yield {name: importlib.import_module(name) for name in names if draws or name not in DRAWN}
    finally:
        sys.path[:] = path
        for name in ours:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def measure_on_the_cpu(measuring: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run, and times are faked: 20 microseconds and more, and 1.5 for the kernel between calls."""

    def sample(calls: Any, device: Any, **options: Any) -> list[float]:
        return [float(index + 10) for index in range(5)]

    def sample_graph(calls: Any, device: Any, *, fewest: int, **options: Any) -> list[float]:
        for call in calls:
            call()
        if len(calls) == measuring._BETWEEN:
            return [1.5] * fewest
        return [21.5 + index for index in range(fewest)]

    monkeypatch.setattr(measuring, "sample", sample)
    monkeypatch.setattr(measuring, "sample_graph", sample_graph)
    monkeypatch.setattr(measuring, "host_time", lambda call, device, calls: 3.0)

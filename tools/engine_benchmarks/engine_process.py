"""What an engine's own process does: it writes result lines, waits for its turn, and runs tasks. The plugins' benchmarks share this
module.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STARTED = time.time()


class Results:
    """Writes result lines to ``<folder>/<name>.jsonl``."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.file = name, folder / f"{name}.jsonl"

    def report(self, figure: str, **values: Any) -> None:
        """Writes a line of results."""
        line = {"engine": self.name, "figure": figure, **values, "at_s": round(time.time() - _STARTED, 1)}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print("RESULT", json.dumps(line), flush=True)


def wait(file: Path | None, seconds: float) -> None:
    """Waits until a file exists, at most ``seconds``."""
    end = time.time() + seconds
    while file is not None and not file.exists() and time.time() < end:
        time.sleep(0.05)


def run_task(results: Results, name: str, task: Callable[[], None]) -> bool:
    """Runs a task. If it fails, reports this and returns False, because the engine's other tasks can still run."""
    try:
        task()
    except Exception as error:
        traceback.print_exc()
        results.report("failed", task=name, error=repr(error)[:600])
        return False
    return True

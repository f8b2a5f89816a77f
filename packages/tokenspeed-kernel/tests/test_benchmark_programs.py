"""The programs of ``benchmarks/`` start without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.py") if "__main__" in file.read_text()))
def test_a_program_says_what_it_does(
    programs: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        programs(name).main()
    assert not ended.value.code
    assert f"usage: {name}" in capsys.readouterr().out

"""Tests how ``ci/resolve.py`` interprets pip's output."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).parents[3] / "ci"
CONFLICT = """\
INFO: pip is looking at multiple versions of tokenspeed-kernel-nvidia to determine which version is compatible.
ERROR: Cannot install engine==1.0 and tokenspeed-kernel-nvidia==0.3.0+independent because these package versions have conflicting
dependencies.

The conflict is caused by:
    engine 1.0 depends on nvidia-cutlass-dsl==4.6.0
    tokenspeed-kernel-nvidia 0.3.0+independent depends on nvidia-cutlass-dsl>=4.8

To fix this you could try to:
1. loosen the range of package versions you've specified
"""


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not CI.is_dir():
        pytest.skip("this is no checkout")
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("resolve")


def test_the_newest_versions(resolve: ModuleType) -> None:
    assert resolve.versions_of("vllm (0.33.0)\nAvailable versions: 0.33.0, 0.32.1, 0.32.0\n  INSTALLED: 0.1\n") == [
        "0.33.0",
        "0.32.1",
    ]
    assert resolve.versions_of("ERROR: No matching distribution found for vllm\n") == []


def test_the_wheels_beside_an_engine(resolve: ModuleType) -> None:
    version = "0.3.0+independent"
    names = ("kernel", "kernel_base", "kernel_nvidia", "kernel_vllm")
    wheels = [f"tokenspeed_{name}-{version}-py3-none-any.whl" for name in names] + ["gpt_oss_runtime-0.2.0-py3-none-any.whl"]
    both = [f"tokenspeed-kernel=={version}", f"tokenspeed-kernel-nvidia=={version}"]
    assert resolve.wanted("vllm", wheels) == [*both, f"tokenspeed-kernel-vllm=={version}"]
    assert resolve.wanted("sglang", wheels) == both


def test_a_conflict_names_the_pins(resolve: ModuleType) -> None:
    outcome = resolve.outcome_of(1, CONFLICT)
    assert outcome.status == "conflicts"
    assert outcome.lines == (
        "engine 1.0 depends on nvidia-cutlass-dsl==4.6.0",
        "tokenspeed-kernel-nvidia 0.3.0+independent depends on nvidia-cutlass-dsl>=4.8",
        "would have to move: engine 1.0 depends on nvidia-cutlass-dsl==4.6.0",
    )
    ranges = ["a 1.0+x depends on torch<2.6", "b 1 depends on torch!=2.5,>=2.6"]
    assert resolve.pins(ranges) == ranges
    assert resolve.pins([*ranges, "The user requested torch==2.5"]) == ["The user requested torch==2.5"]


@pytest.mark.parametrize(
    ("output", "status", "lines"),
    [
        ("WARNING: Retrying (Retry(total=0)) after ...\nERROR: No matching distribution found for torch", "skipped", 1),
        ("ERROR: Could not find a version that satisfies b==1\nERROR: No matching distribution found for b==1\n", "fails", 2),
        ("Traceback\nRuntimeError: pip is broken", "fails", 1),
    ],
)
def test_a_failure_is_skipped_only_if_the_index_does_not_answer(resolve: ModuleType, output: str, status: str, lines: int) -> None:
    outcome = resolve.outcome_of(1, output)
    assert outcome.status == status
    assert outcome.lines == tuple(output.splitlines()[-lines:])


def test_a_requirement_that_pip_cannot_build(resolve: ModuleType) -> None:
    output = "error: metadata-generation-failed\n\n× Encountered error while generating.\n╰─> cuda-tile\n\nhint: See above."
    status, (line,) = resolve.outcome_of(1, output)
    assert status == "skipped"
    assert line.endswith(": cuda-tile")


def test_versions_of_a_report(resolve: ModuleType) -> None:
    parts = [{"metadata": {"name": name, "version": "2.14.1"}} for name in ("Torch", "numpy")]
    assert resolve.resolved(json.dumps({"install": parts})) == ("torch==2.14.1",)


def test_the_exit_status(
    resolve: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "tokenspeed_kernel-0.3.0-py3-none-any.whl").touch()
    monkeypatch.setattr(resolve, "WHEELS", tmp_path)

    def pip(*words: str) -> tuple[int, str]:
        if words[0] == "index":
            return (0, f"{words[2]} (2)\nAvailable versions: 2, 1") if words[2] != "away" else (1, "ERROR: no route to the index")
        if words[-1] == "engine==1":
            return 1, CONFLICT
        report = next(word for word in words if word.startswith("--report=")).partition("=")[2]
        Path(report).write_text('{"install": []}')
        return 0, ""

    monkeypatch.setattr(resolve, "_pip", pip)
    assert resolve.main(["away", "engine"]) == 1
    said = capsys.readouterr().out
    assert "away: skipped\n    ERROR: no route to the index\nengine 2: resolves\n" in said
    assert "engine 1: conflicts\n    engine 1.0 depends on nvidia-cutlass-dsl==4.6.0\n" in said
    assert resolve.main(["away"]) == 0

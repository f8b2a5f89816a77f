"""Tests the record of compiled kernels, by which ``ci/compile_triton.py`` decides what to compile."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).parents[3] / "ci"


@pytest.fixture
def compile_record(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not CI.is_dir():
        pytest.skip("this is no checkout")
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("compile_record")


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    (tmp_path / "launch.py").write_text('"""Launches."""\nSTAGES = 2  # two are enough\n')
    (tmp_path / "device.py").write_text('def kernel(x):\n    """Doubles x."""\n    return 2 * x\n')
    return [tmp_path / "launch.py", tmp_path / "device.py"]


def test_only_code_changes_a_digest(compile_record: ModuleType, sources: list[Path], tmp_path: Path) -> None:
    launch, device = sources
    before = compile_record.digest(sources, tmp_path)
    assert compile_record.digest(reversed(sources), tmp_path) == before
    launch.write_text('"""Launches a kernel."""\n\nSTAGES = 2\n')
    device.write_text('def kernel(x):\n    """Doubles a number."""\n    return 2 * x  # exact\n')
    assert compile_record.digest(sources, tmp_path) == before
    launch.write_text("STAGES = 2\n")
    device.write_text("def kernel(x):\n    return 2 * x\n")
    assert compile_record.digest(sources, tmp_path) == before
    launch.write_text("STAGES = 3\n")
    assert compile_record.digest(sources, tmp_path) != before


def test_a_renamed_or_additional_file_changes_a_digest(compile_record: ModuleType, sources: list[Path], tmp_path: Path) -> None:
    before = compile_record.digest(sources, tmp_path)
    renamed = sources[0].rename(tmp_path / "launcher.py")
    assert compile_record.digest([renamed, sources[1]], tmp_path) != before
    assert compile_record.digest(sources[1:], tmp_path) != before


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ({"changed": True, "unrecorded": False}, [("sm_90", "edited")]),
        ({"changed": False, "unrecorded": True}, [("sm_90", "new"), ("gfx950", "new")]),
        ({"changed": True, "unrecorded": True}, [("sm_90", "edited"), ("sm_90", "new"), ("gfx950", "new")]),
    ],
)
def test_which_pairs_are_compiled(
    compile_record: ModuleType, tmp_path: Path, which: dict[str, bool], expected: list[tuple[str, str]]
) -> None:
    jobs = [(arch, kernel) for kernel in ("same", "edited", "new") for arch in ("sm_90", "gfx950")]
    recorded = {("sm_90", "same"): "1", ("gfx950", "same"): "1", ("sm_90", "edited"): "2", ("gfx950", "edited"): "3"}
    record = tmp_path / "compiled.json"
    compile_record.write(record, "triton 3.9.0", recorded)
    assert compile_record.read(record, "triton 3.9.0") == recorded
    assert compile_record.chosen(jobs, {"same": "1", "edited": "3", "new": "4"}, recorded, **which) == expected


def test_every_recorded_pair_has_changed_for_another_compiler(compile_record: ModuleType, tmp_path: Path) -> None:
    record, job = tmp_path / "compiled.json", ("sm_90", "a")
    assert compile_record.read(record, "triton 3.9.0") == {}
    compile_record.write(record, "triton 3.6.0", {job: "1"})
    recorded = compile_record.read(record, "triton 3.9.0")
    assert compile_record.chosen([job], {"a": "1"}, recorded, changed=True, unrecorded=False) == [job]


def test_the_committed_record_names_registered_kernels(compile_record: ModuleType) -> None:
    import tokenspeed_kernel  # noqa: F401  (declares the kernels)
    from tokenspeed_kernel_base.registry import KernelRegistry

    registered = {spec.name for spec in KernelRegistry.get().list_kernels()}
    recorded = json.loads(compile_record.RECORD.read_text())["compiled"]
    assert recorded
    assert set(recorded) <= registered

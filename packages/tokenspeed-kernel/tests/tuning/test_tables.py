"""Tests tables of tuned results: their entries, when an entry applies, and how invalid entries are handled."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel.workbench import source, tuned
from tokenspeed_kernel.workbench.tuned import Device, Entry, Result, tables
from tokenspeed_kernel.workbench.tuning import tune_case
from tokenspeed_kernel_base import config
from tokenspeed_kernel_base.platform import PlatformInfo, cpu_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import SelectionPolicy, SelectionStrategy, set_selection_policy
from tokenspeed_kernel_base.storage import StorageWarning

# -- tables --------------------------------------------------------------------------------------------------------------------


def entry(rows: int = 8, us: float = 5.0, kernel: str = "gone", **changes: Any) -> Entry:
    platform = cpu_platform()
    made = Entry(
        "testing.lab",
        "x: float32",
        {"width": 4},
        {"rows": rows, "width": 4},
        Device.of(platform),
        (Result(kernel, {}, us, None, "f" * 16),),
        "",
        dict(tuned.toolchain()),
    )
    return dataclasses.replace(made, **changes)


def test_entries_are_written_and_read_as_they_are(folder: Path) -> None:
    made = entry(
        results=(Result("k", {"n": 1, "flag": True, "none": None, "s": "x", "f": 0.5}, 4.2, 5.0, "0" * 16),), case="a case"
    )
    assert Entry.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    path = folder / "table.json"
    assert tuned.save_entry(path, made)
    assert tuned.read_table(path) == [made]
    assert json.loads(path.read_text())["entries"][0]["results"][0]["config"]["flag"] is True


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"\xff\xfe", b"[]", b'{"format": 2, "entries": []}', b'{"format": 1, "entries": [1]}',
        b'{"format": 1, "entries": [{"operator": "a"}]}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_corrupt_file_is_a_miss_once_reported_and_kept(lab: Any, folder: Path, damage: bytes) -> None:
    lab.register("steady", "growing")
    path = tuned.user_table(Device.of(cpu_platform()))
    assert path is not None
    folder.mkdir(parents=True)
    path.write_bytes(damage)
    with pytest.warns(StorageWarning, match=r"are corrupt and not used.*kept as"):
        assert lab.serving(2) == "steady"
    assert Path(f"{path}.corrupt").read_bytes() == damage
    assert not path.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lab.serving(2) == "steady"
        tuned.record(entry())
    assert len(tuned.read_table(path)) == 1


def test_times_that_are_no_times_are_corrupt() -> None:
    for us in (0, -1, float("nan"), float("inf"), "5", True, None):
        broken = entry().to_dict()
        broken["results"][0]["us"] = us
        with pytest.raises(ValueError, match="us must be a "):
            Entry.from_dict(broken)


def test_without_a_place_to_write_it_works_for_the_process(lab: Any, tmp_path: Path, settings_from: Callable[..., Any]) -> None:
    """The folder of tuned results is below a regular file, so not even root can create it. Tuned results must apply in this process
    all the same."""
    (tmp_path / "file").write_text("")
    settings_from(TUNED=str(tmp_path / "file" / "tuned"))
    lab.register("steady", "growing")
    with pytest.warns(StorageWarning, match="tuned results are not kept"):
        lab.tune_all()
    assert lab.serving(2) == "growing"
    assert (tmp_path / "file").read_text() == ""


def test_switched_off_nothing_is_read_or_written(lab: Any, folder: Path, settings_from: Callable[..., Any]) -> None:
    lab.register("steady", "growing")
    lab.tune_all()
    assert lab.serving(2) == "growing"
    settings_from(TUNED="off")
    assert lab.serving(2) == "steady"
    before = lab.table().read_bytes()
    (outcome, *_) = tune_case("testing.lab", lab.lab.operator.all_cases()[0], "cpu", budget_s=0.1)
    assert outcome.saved is None
    assert lab.serving(2) == "growing", "for this process it holds"
    assert lab.table().read_bytes() == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"driver": "570.1"}, "the driver was 570.1 and is unknown"),
        ({"toolchain": {"torch": "1.0"}}, "torch was 1.0 and is"),
        ({"toolchain": {**tuned.toolchain(), "cutlass": "4"}}, "cutlass was 4 and is absent"),
    ],
)
def test_stale_entries_are_reported(lab: Any, change: dict[str, Any], reason: str) -> None:
    lab.register("steady", "growing")
    lab.tune_all()
    (listed, *_) = [one for one in tuned.all_entries(cpu_platform()) if one.entry.sizes["rows"] == 2]
    assert listed.stale == ""
    path = tuned.record(dataclasses.replace(listed.entry, **change))
    assert path is not None
    explanation = lab.lab.explain(torch.ones(2, 4))
    assert explanation.chosen.name == "steady"
    assert len(explanation.notes) == 1
    assert f"is not used: {reason}" in explanation.notes[0]
    assert str(path) in explanation.notes[0]
    assert f"tuned    {explanation.notes[0]}" in str(explanation)
    assert explanation.to_dict()["notes"] == [*explanation.notes]


def test_a_configuration_that_is_declared_no_more_is_stale(lab: Any) -> None:
    lab.register("settable")
    tune_case("testing.lab", lab.lab.operator.all_cases()[0], "cpu", budget_s=0.5)
    KernelRegistry.get().unregister("settable")
    register_kernel(
        "testing", "lab", name="settable", solution="lab", signatures=None, traits={"width": any}, tunables={"wait": [1]}
    )("lab_kernels:settable")  # fmt: skip
    assert "the tunables of settable are wait" in lab.lab.explain(torch.ones(2, 4)).notes[0]


def test_a_kernel_that_is_gone_does_not_matter(lab: Any) -> None:
    lab.register("steady", "growing")
    lab.tune_all()
    KernelRegistry.get().unregister("growing")
    explanation = lab.lab.explain(torch.ones(2, 4))
    assert explanation.chosen.name == "steady"
    assert explanation.notes == ()


def test_results_of_other_kernels_are_merged_if_measured_alike() -> None:
    older = entry(kernel="a", us=3.0)
    assert {r.kernel: r.us for r in entry(kernel="b").merged_onto(older).results} == {"b": 5.0, "a": 3.0}
    assert {r.kernel: r.us for r in entry(kernel="a").merged_onto(older).results} == {"a": 5.0}
    assert [r.kernel for r in entry(kernel="b", driver="2").merged_onto(older).results] == ["b"]


def test_another_device_has_results_of_its_own(lab: Any) -> None:
    lab.register("steady", "growing")
    lab.tune_all()
    other = dataclasses.replace(cpu_platform(), device_name="another cpu")
    with use_platform(other):
        assert lab.serving(2) == "steady"
    with use_platform(dataclasses.replace(cpu_platform(), emulated=True)):
        assert lab.serving(2) == "steady", "an emulator's times say nothing"
    assert lab.serving(2) == "growing"


def test_nothing_is_measured_unless_the_policy_asks(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(source, "autotune", lambda *call: asked.append(call) or "")
    lab.register("steady", "growing")
    lab.lab(torch.ones(2, 4))
    assert asked == []
    set_selection_policy(SelectionPolicy(SelectionStrategy.AUTOTUNE))
    lab.lab(torch.ones(2, 4))
    assert len(asked) == 1


def test_a_shipped_table_applies_without_a_users(lab: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.register("steady", "growing")
    lab.tune_all()
    shipped = tmp_path / "wheel"
    shipped.mkdir()
    for one in tuned.read_table(lab.table()):  # measured with another driver and another patch level of Triton
        versions = {**one.toolchain, "torch": "1.0"}
        assert tuned.save_entry(shipped / "cpu.json", dataclasses.replace(one, driver="elsewhere", toolchain=versions))
    lab.table().unlink()
    assert lab.serving(2) == "steady"
    tuned.register_tuned_tables(shipped)
    tuned.register_tuned_tables(shipped)
    assert tables._shipped.count(shipped) == 1
    assert lab.serving(2) == "growing"
    pretended: PlatformInfo = dataclasses.replace(cpu_platform(), pretended=True)
    with use_platform(pretended):
        assert lab.serving(2) == "growing", "shipped tables explain other devices too"
    with use_platform(dataclasses.replace(cpu_platform(), device_name="another cpu")):
        explanation = lab.lab.explain(torch.ones(2, 4))
    assert explanation.chosen.name == "steady"
    measured_on = Device.of(cpu_platform())
    assert explanation.notes == (f"not used: {shipped / 'cpu.json'} has results of {measured_on}, this is another cpu [cpu]",)
    older = {**tuned.toolchain(), "triton": "1.0.0"}
    for one in tuned.read_table(shipped / "cpu.json"):
        tuned.save_entry(shipped / "cpu.json", dataclasses.replace(one, toolchain=older))
    explanation = lab.lab.explain(torch.ones(2, 4))
    assert explanation.chosen.name == "steady"
    assert "triton was 1.0.0 and is" in explanation.notes[0]


def test_the_users_cache_directory(settings_from: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(config.PREFIX + "TUNED")
    settings_from()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tuned.tuned_directory() == tmp_path / "cache" / "tokenspeed_kernel" / "tuned"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.tuned_directory() == tmp_path / ".cache" / "tokenspeed_kernel" / "tuned"


def test_sizes_come_from_the_operators_own_names() -> None:
    import tokenspeed_kernel as tk

    def sizes(function: Any, **arguments: Any) -> dict[str, int]:
        return dict(function.explain(**arguments).request.sizes)

    x = torch.ones(2, 3, 64)
    assert sizes(tk.rmsnorm, x=x, weight=torch.ones(64)) == {"rows": 6, "hidden": 64}
    cache = torch.ones(7, 16, 2, 8)
    lengths = torch.tensor([3, 20], dtype=torch.int32)
    table = torch.zeros(2, 2, dtype=torch.int32)
    decode = sizes(
        tk.mha_decode_with_kvcache, q=torch.ones(2, 4, 8), k_cache=cache, v_cache=cache, page_table=table, cache_seqlens=lengths,
        max_seqlen_k=20,
    )  # fmt: skip
    assert decode["batch"] == 2
    assert decode["max_seqlen_k"] == 20
    assert decode["heads"] == 4
    assert not {"pages", "max_pages"} & decode.keys(), "room in memory is not work"


# -- fingerprints --------------------------------------------------------------------------------------------------------------


KERNEL = """
from .inner import helper
import os
device_code = DeviceModule(__name__ + "_device")
shared_device = DeviceModule("some_kernels.shared_device")
def f():
    from some_kernels import late
"""


def test_a_fingerprint_covers_what_a_module_imports_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_sources: Any
) -> None:
    package = tmp_path / "some_kernels"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "kernel.py").write_text(KERNEL)
    (package / "inner" / "helper.py").write_text("from . import constant\n")
    (package / "inner" / "constant.py").write_text("X = 1\n")
    (package / "late.py").write_text("")
    (package / "kernel_device.py").write_text("from some_kernels import more_device\n")
    (package / "shared_device.py").write_text("")
    (package / "more_device.py").write_text("")
    (package / "other.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    def now() -> str:
        forget_sources()
        return tuned.source_fingerprint("some_kernels.kernel")

    first = now()
    assert len(first) == 16
    assert now() == first
    assert "some_kernels" not in sys.modules
    (package / "other.py").write_text("# not imported\n")
    assert now() == first
    for name in ("inner/constant.py", "late.py", "kernel.py", "kernel_device.py", "shared_device.py", "more_device.py"):
        path = package / name
        path.write_text(path.read_text() + "# changed\n")
        assert now() != first, name
        first = now()
    assert tuned.source_fingerprint("some_kernels.nothing") == ""
    assert tuned.source_fingerprint("no_such_package.kernel") == ""


def test_every_kernel_has_a_fingerprint() -> None:
    registry = KernelRegistry.get()
    modules = {spec.name: registry.module_of(spec.name) for spec in registry.list_kernels() if not spec.universal}
    assert [name for name, module in modules.items() if not tuned.source_fingerprint(module)] == []

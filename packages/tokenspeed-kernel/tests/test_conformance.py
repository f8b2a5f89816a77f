"""Runs the conformance kit on `wrong_kernels`: twelve kernels with one fault each, and three correct kernels. The kit must report
the fault of each wrong kernel, and nothing for the correct ones.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from tokenspeed_kernel import plugins
from tokenspeed_kernel.plugins import PluginFailure, PluginInfo
from tokenspeed_kernel.workbench.numerics import CaseResult, Status
from tokenspeed_kernel.workbench.numerics.conformance import (
    CHECKS,
    Finding,
    Options,
    conform,
    conformance,
    junit,
    only_where,
    plugin_kernels,
)
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.platform import CapabilityRequirement, named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry, PriorityClashWarning
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_command.commands import app

SAMPLES = Path(__file__).parent / "wrong_kernels"
CPU = torch.device("cpu")

# The small cases that the kit runs and derives all other cases from.
CASES = (
    "one key head, lengths 0 to 33, float32, lse", "window of the token alone", "window, cap, sinks and lse together",
    "lengths about a page's end, float32, lse", "float64, pages of 1", "four new tokens in a window of three",
    "one row of 8, float32", "odd hidden 1001, float16", "gpt-oss-120b decode 64 with residual",
)  # fmt: skip

# For each wrong kernel: the check that must find its fault, the expected message, and further checks that may also find it.
WRONG: dict[str, tuple[str, str, set[str]]] = {
    "wrong_mask_edge": (
        "values",
        r"(only where|all with) .*sliding_window=True.*smallest: ragged\(\[2\], .*window_left=0",
        {"trait edges", "option edges"},
    ),
    "window_wraps": ("option edges", r"is wrong at window_left=1073741823: output", set()),
    "ignored_out": ("out=", r"ignores out=: what it returns is not the tensor it was given", set()),
    "ignored_eps": ("option edges", r"is wrong at eps=0\.\d+ \(ignores eps: the result is that of eps=1e-05\): output", set()),
    "hidden_sync": ("no waiting", r"waits for the device: Tensor.item at attention.py:\d+: longest = int\(cu_seqlens", set()),
    "mutated_input": ("inputs unchanged", r"only where residual=True.*changes its input x", set()),
    "not_deterministic": ("determinism", r"is tagged determinism, but gives other bits", set()),
    "lies_about_head_dim": ("trait edges", r"declares head_dim: 1 to 320, but is wrong at head_dim=3(19|20): output", set()),
    "nan_on_empty": (
        "nothing to do",
        r"is wrong if there is nothing to compute: output.*NaN where the reference has none",
        {"values", "trait edges"},
    ),
    "wrong_lse_base": ("values", r"output 1: .*1\.4427 times what is expected throughout \(log2\(e\)", {"trait edges"}),
    "wrong_sink": ("values", r"only where .*sinks=True.*smallest: ragged\(\[1\], .*sinks=True", {"trait edges"}),
    "reads_past_page_table": (
        "unused values",
        r"uses values that must not matter, of page_table, k_cache, v_cache: .*IndexError: index 2147483647",
        set(),
    ),
}


@dataclass
class Outcome:
    """The exit code, the output and the reports of the command, run on both plugins."""

    code: int
    printed: str
    report: dict[str, Any]
    xml: ElementTree.Element

    def findings(self, kernel: str) -> dict[str, dict[str, Any]]:
        return {row["check"]: row for row in self.report["results"] if row["kernel"] == kernel}


def _load(name: str, register: str) -> PluginInfo:
    """Registers a sample plugin's kernels as plugin discovery would."""
    from wrong_kernels import plugin

    before = {spec.name for spec in KernelRegistry.get().list_kernels()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PriorityClashWarning)
        getattr(plugin, register)()
    added = tuple(sorted({spec.name for spec in KernelRegistry.get().list_kernels()} - before))
    return PluginInfo(name, "wrong-kernels", "0.1", len(added), added)


@pytest.fixture(scope="module")
def samples() -> Iterator[None]:
    """Loads the sample plugins, and unloads them after the module's tests."""
    sys.path.insert(0, str(SAMPLES))
    kept, loaded = KernelRegistry.get().list_kernels(), dict(plugins._loaded)
    for name, register in (("wrong-kernels", "register"), ("right-kernels", "register_right")):
        plugins._loaded[name] = _load(name, register)
    yield
    for name in {spec.name for spec in KernelRegistry.get().list_kernels()} - {spec.name for spec in kept}:
        KernelRegistry.get().unregister(name)
    plugins._loaded.clear()
    plugins._loaded.update(loaded)
    sys.path.remove(str(SAMPLES))
    for module in [name for name in sys.modules if name.partition(".")[0] == "wrong_kernels"]:
        del sys.modules[module]


def _verify(plugin: str, folder: Path) -> Outcome:
    words = [
        "verify",
        "--device",
        "cpu",
        "--plugin",
        plugin,
        "--junit",
        str(folder / "report.xml"),
        "--output",
        str(folder / "report.json"),
    ]
    words += [word for case in CASES for word in ("--case", case)]
    result = CliRunner().invoke(app, words)
    report = json.loads((folder / "report.json").read_text())
    return Outcome(result.exit_code, result.stdout, report, ElementTree.parse(folder / "report.xml").getroot())


@pytest.fixture(scope="module")
def wrong(samples: None, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return _verify("wrong-kernels", tmp_path_factory.mktemp("wrong"))


@pytest.fixture(scope="module")
def right(samples: None, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return _verify("right-kernels", tmp_path_factory.mktemp("right"))


@pytest.mark.parametrize("kernel", WRONG)
def test_a_wrong_kernel_is_caught_and_its_fault_is_named(wrong: Outcome, kernel: str) -> None:
    check, said, others = WRONG[kernel]
    findings = wrong.findings(kernel)
    assert findings[check]["status"] == "failed"
    assert re.search(said, findings[check]["detail"]), findings[check]["detail"]
    failed = {name for name, finding in findings.items() if finding["status"] == "failed"}
    assert failed - {check} <= others, {name: findings[name]["detail"] for name in failed}
    row = re.search(rf"^{kernel} +{re.escape(check)} +failed +(.*)$", wrong.printed, re.M)
    assert row is not None
    assert re.search(said, row[1])


def test_the_command_fails_and_ends_with_the_table(wrong: Outcome) -> None:
    assert wrong.code == 1
    assert set(WRONG) == {row["kernel"] for row in wrong.report["results"]}
    assert re.search(r"^\d+ passed, 1\d failed, \d+ skipped on ", wrong.printed.splitlines()[-1])
    table = wrong.printed[wrong.printed.index("\nkernel ") :]
    assert len(table.splitlines()) >= len(WRONG) * len(CHECKS)


def test_right_kernels_pass_everything(right: Outcome) -> None:
    assert [row for row in right.report["results"] if row["status"] in ("failed", "error")] == []
    assert right.code == 0
    norm = right.findings("right_rmsnorm")
    assert list(norm) == [*CHECKS]
    skipped = {check for check, finding in norm.items() if finding["status"] == "skipped"}
    assert skipped == {"unused values", "graph replay"}, "every other check ran"
    attention = right.findings("right_decode")
    ran = ("option edges", "unused values", "no waiting", "bounds", "strides")
    assert all(attention[check]["status"] == "passed" for check in ran)


def test_the_reports_say_the_same(wrong: Outcome) -> None:
    suites = {suite.get("name"): suite for suite in wrong.xml}
    assert set(suites) == set(WRONG)
    for kernel, suite in suites.items():
        findings = wrong.findings(str(kernel))
        tests = {test.get("name"): test for test in suite}
        assert set(tests) == set(findings)
        for name, finding in findings.items():
            failure, skipped = tests[name].find("failure"), tests[name].find("skipped")
            assert (failure is not None, skipped is not None) == (finding["status"] == "failed", finding["status"] == "skipped")
            if failure is not None:
                assert failure.get("message") == finding["detail"]
        assert suite.get("failures") == str(sum(f["status"] == "failed" for f in findings.values()))


def test_the_smallest_call_is_printed_as_a_program_that_fails(wrong: Outcome, samples: None) -> None:
    smallest = wrong.findings("wrong_mask_edge")["values"]["smallest"]
    assert smallest["exhausted"]
    assert smallest["reproducer"].splitlines()[0] in wrong.printed
    room: dict[str, Any] = {}
    exec(compile(smallest["reproducer"].replace("print(", "found = ("), "reproducer", "exec"), room)
    assert room["found"] == smallest["reason"]
    assert room["got"].shape == (2, 1, 1)


# -- as a function, in pytest -------------------------------------------------------------------------------------------------


def test_it_can_be_called(samples: None) -> None:
    spec = KernelRegistry.get().get_by_name("right_rmsnorm")
    cases = [case for case in get_operator("rmsnorm").all_cases() if case.name in CASES]
    findings = conform(spec, CPU, Options(repeat=3), cases)
    assert [str(f) for f in findings] == [f"right_rmsnorm: {check}" for check in CHECKS]
    assert not any(finding.wrong for finding in findings)


def test_a_plugin_that_is_not_there(monkeypatch: pytest.MonkeyPatch, samples: None) -> None:
    assert [spec.name for spec in plugin_kernels("right-kernels")] == ["right_decode", "right_prefill", "right_rmsnorm"]
    with pytest.raises(LookupError, match=r"no plugin 'right-kernel' .* 'right-kernels'\?"):
        conformance(plugin="right-kernel")
    monkeypatch.setattr(plugins, "_failed", {"bad": PluginFailure("bad", "bad-kernels", "1", "RuntimeError: no driver", "")})
    with pytest.raises(LookupError, match=r"plugin bad failed .*: RuntimeError: no driver"):
        conformance(plugin="bad")


def test_kernels_that_cannot_run_here_are_skipped_with_the_reason() -> None:
    wants = CapabilityRequirement(vendors=frozenset({"nvidia"}))
    needy = KernelSpec("needy", "norm", "rmsnorm", solution="x", format_signatures=None, capability=wants)
    findings = conform(needy, CPU, Options())
    assert [(f.check, f.status) for f in findings] == [(check, Status.SKIPPED) for check in CHECKS]
    assert findings[0].detail == "platform: needs an NVIDIA device, this is a CPU"
    with use_platform(named_platform("gfx950")):
        findings = conform(KernelRegistry.get().get_by_name("reference_rmsnorm"), CPU, Options())
    assert {f.detail for f in findings} == {"platform: gfx950 is pretended, nothing launches"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_kernel_that_cannot_be_loaded(samples: None) -> None:
    spec = KernelSpec("absent", "norm", "rmsnorm", solution="absent", format_signatures=None, priority=1)
    KernelRegistry.get().register(spec, "no_such_package_at_all:kernel")
    findings = conform(spec, CPU, Options(), get_operator("rmsnorm").all_cases()[:1])
    assert findings[0].status is Status.FAILED
    assert "no_such_package_at_all" in findings[0].detail
    assert {f.detail for f in findings if f.check == "bounds"} == {"the kernel cannot be loaded"}
    stray = KernelSpec("stray", "no", "operator", solution="x", format_signatures=None)
    assert "no operator no.operator" in conform(stray, CPU, Options())[0].detail


# -- common traits of failures -------------------------------------------------------------------------------------------------


def _result(**traits: Any) -> CaseResult:
    return CaseResult("k", "f.m", "c", Status.PASSED, traits=traits)


def test_what_failures_have_in_common() -> None:
    plain, sinks, both = _result(sinks=False, dim=64), _result(sinks=True, dim=64), _result(sinks=True, dim=128)
    assert only_where([sinks, both], [plain]) == "only where sinks=True"
    assert only_where([both], [plain, sinks]) == "only where dim=128"
    assert only_where([both, _result(sinks=True, dim=256)], [plain, sinks]) == "only where dim is above 64"
    assert only_where([_result(dim=8), _result(dim=16)], [_result(dim=32)]) == "only where dim is below 32"
    assert only_where([plain, both], [plain]) == ""
    assert only_where([plain], []) == ""
    assert only_where([sinks, both], [plain, plain, plain, sinks]) == "all with sinks=True"


def test_junit_survives_what_xml_has_not() -> None:
    finding = Finding("k", "f.m", "values", Status.FAILED, "a \x00\x1b[31m <b> & 'c'")
    root = ElementTree.fromstring(junit([finding]).encode())
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.get("message") == "a [31m <b> & 'c'"

"""Tests the command line as a user runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import run_python, start_python

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer
from typer.testing import CliRunner

from tokenspeed_kernel import moe_apply, plugins
from tokenspeed_kernel.plugins import PluginFailure, PluginInfo
from tokenspeed_kernel.version import __version__
from tokenspeed_kernel.workbench.benchmark.compare import CONFIDENCE, THRESHOLD
from tokenspeed_kernel.workbench.cli.find import find_device
from tokenspeed_kernel.workbench.cli.output import print_table
from tokenspeed_kernel_base import config, packs
from tokenspeed_kernel_base.operator import operators
from tokenspeed_kernel_base.platform import CapabilityRequirement, cpu_platform, named_platform, use_platform
from tokenspeed_kernel_base.registry import PriorityClashWarning, register_kernel
from tokenspeed_kernel_base.selection import SelectionObjective
from tokenspeed_kernel_command import COMMANDS, options
from tokenspeed_kernel_command.commands import DECLARED, app, implementation

runner = CliRunner()


def brief(output: str) -> str:
    """Shortens an output for an assertion message. A report as JSON has tens of thousands of characters."""
    return output if len(output) < 3000 else f"{output[:1500]}\n...\n{output[-1500:]}"


def call(*words: str, code: int = 0) -> str:
    """Runs a command, asserts its exit code, and returns its output."""
    result = runner.invoke(app, list(words))
    assert result.exit_code == code, f"{brief(result.output)}\n{result.exception!r}"
    assert "\x1b" not in result.output, "no colours in a pipe"
    return result.stdout


def plain(text: str) -> str:
    """Returns a text in one line, without backquotes."""
    return " ".join(text.replace("`", "").split())


def call_json(*words: str, code: int = 0) -> Any:
    return json.loads(call(*words, "--json", code=code))


def refused(*words: str) -> str:
    """Runs a command that must be rejected, and returns its stderr."""
    result = runner.invoke(app, list(words))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


def process(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(config.PREFIX)} | environment
    return run_python(*command, env=env)


def without_pytorch(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process that has not imported PyTorch."""
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


@pytest.fixture
def wrong() -> str:
    """Registers a kernel of rmsnorm whose result has one wrong element. Returns the kernel's name."""

    @register_kernel("norm", "rmsnorm", name="wrong_rmsnorm", solution="wrong", signatures=None, traits={"hidden": 8}, priority=1)
    def rmsnorm(x: Any, weight: Any, eps: Any, residual: Any, out: Any, residual_out: Any) -> Any:
        made = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
        made[0, 5] = 7
        return made if out is None else out.copy_(made)

    return "wrong_rmsnorm"


# -- doctor -------------------------------------------------------------------------------------------------------------------


def test_doctor_lists_the_installation() -> None:
    found = call_json("doctor")
    assert found["healthy"] is True
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["kernels"]["operators"] == len(operators())
    text = call("doctor")
    for word in ("platform", "versions", "settings", "plugins", torch.__version__, "all well"):
        assert word in text


def test_doctor_says_where_settings_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings_from: Callable[..., Any]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('objective = "accuracy"\n[overrides]\n"norm.rmsnorm" = "reference_rmsnorm"\n')
    settings_from(CONFIG=str(file), VERBOSE="1", OVERRIDE_GEMM_MM="reference_mm")
    settings = {s["name"]: (s["value"], s["source"]) for s in call_json("doctor")["settings"]}
    assert settings["objective"] == ("accuracy", str(file))
    assert settings["verbose"] == ("true", "environment: TOKENSPEED_KERNEL_VERBOSE")
    assert settings["override GEMM_MM"] == ("reference_mm", "environment: TOKENSPEED_KERNEL_OVERRIDE_GEMM_MM")
    assert settings["override norm.rmsnorm"] == ("reference_rmsnorm", str(file))
    assert settings["platform"] == ("as found", "default")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OVERRIDE_NORM_RMSNORM": "reference_rmsnrom"}, "did you mean reference_rmsnorm?"),
        ({"OVERRIDE_NORM_RMSNORM": "reference_mm"}, "reference_mm implements gemm.mm, not norm.rmsnorm"),
        ({"OVERRIDE_NORM_RMSNROM": "reference_rmsnorm"}, "no such operator"),
        ({"PLATFORM": "gfx9"}, "unknown platform 'gfx9'"),
    ],
)
def test_doctor_finds_settings_that_cannot_be_followed(
    settings_from: Callable[..., Any], variables: dict[str, str], said: str
) -> None:
    settings_from(**variables)
    found = call_json("doctor", code=1)
    assert found["healthy"] is False
    assert any(said in finding["what"] and finding["problem"] for finding in found["findings"]), found["findings"]
    assert f"problem: {found['findings'][0]['what']}" in call("doctor", code=1)


def test_doctor_finds_packs_that_are_not_used(tmp_path: Path, settings_from: Callable[..., Any]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    packs.write_manifest(other, {"arch": "gfx950", "distributions": {}, "toolchains": {}})
    settings_from(PACKS=os.pathsep.join([str(tmp_path / "missing"), str(other)]))
    what = f"the pack {tmp_path / 'missing'} is not used: pack.json cannot be read: No such file or directory"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a finding says it, not a warning
        assert [f["what"] for f in call_json("doctor", code=1)["findings"] if f["problem"]] == [what]
        with use_platform(dataclasses.replace(named_platform("h200"), pretended=False)):
            found = call_json("doctor", code=1)["findings"]
        assert f"the pack {other} is for gfx950, this is sm_90" in [f["what"] for f in found if not f["problem"]]


def test_doctor_finds_a_wrong_objective(tmp_path: Path, settings_from: Callable[..., Any]) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('objective = "speed"')
    settings_from(CONFIG=str(file))
    assert "objective must be one of" in call("doctor", code=1)


def test_doctor_says_that_a_platform_is_pretended(settings_from: Callable[..., Any]) -> None:
    settings_from(PLATFORM="gfx950")
    found = call_json("doctor")
    assert found["platform"]["pretended"] is True
    assert any("gfx950 is pretended: nothing launches" in finding["what"] for finding in found["findings"])


def test_doctor_shows_the_traceback_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = PluginFailure(
        "bad", "bad-kernels", "1.2", "RuntimeError: no driver", "Traceback...\n  File x\nRuntimeError: no driver"
    )
    monkeypatch.setattr(plugins, "_failed", {"bad": failure})
    text = call("doctor", code=1)
    assert "plugin bad of bad-kernels 1.2 failed to load: RuntimeError: no driver" in text
    assert "  File x" in text
    assert "TOKENSPEED_KERNEL_DISABLE_PLUGINS=bad" in text


def test_doctor_finds_distributions_of_another_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenspeed_kernel_some_vendor-0.0.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = [each for each in call_json("doctor", code=1)["findings"] if each["problem"]]
    assert f"tokenspeed-kernel-some-vendor 0.0.0 in {tmp_path} is another project's package" in finding["what"]
    assert finding["remedy"].startswith("pip uninstall tokenspeed-kernel-some-vendor; ")


def test_doctor_shows_clashes(wrong: str) -> None:
    with pytest.warns(PriorityClashWarning):
        register_kernel("norm", "rmsnorm", name="rival", solution="rival", signatures=None, priority=1)("a_module:function")
    assert "rival" in call_json("doctor", code=1)["findings"][0]["what"]


# -- ops ----------------------------------------------------------------------------------------------------------------------


def test_ops_lists_every_operator() -> None:
    listed = call_json("ops")
    assert [o["operator"] for o in listed] == [str(op) for op in operators()]
    assert all(o["parameters"] and o["kernels"] and o["solutions"] and o["purpose"] for o in listed)
    text = call("ops")
    assert max(map(len, text.splitlines())) <= 100
    families = re.split(r"^(?=\w)", text, flags=re.MULTILINE)
    for op in listed:
        family, _, mode = op["operator"].partition(".")
        (mine,) = (block for block in families if block.startswith(f"{family}\n"))
        entry = re.split(r"\n  (?=\w)", mine)
        (shown,) = (each for each in entry if each.split()[0] == mode)
        assert plain(f"{mode} {op['purpose']}") == plain(shown), "the whole purpose, and nothing else"


def test_a_wide_and_a_narrow_terminal_lose_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = call("ops").splitlines()
        assert max(map(len, lines)) <= columns
        assert max(map(len, lines)) > columns - 30, "the width is used"
        assert {op.mode for op in operators()} <= {word for line in lines for word in line.split()[:1]}


def test_ops_shows_one_in_full() -> None:
    text = call("ops", "rmsnorm")
    assert "eps: float = 1e-05" in text
    assert "arXiv:1910.07467" in text
    assert "reference_rmsnorm" in text
    assert "\ntraits\n  hidden: int\n  residual: True or False\n  wide_residual: True or False\n\nformats\n  x: dense\n" in text
    assert call_json("ops", "all_reduce")["traits"]["world_size"] == "int"
    assert call_json("ops", "mm")["formats"]["a"] == ["dense", "fp8", "mxfp8", "mxfp4", "nvfp4"]
    assert call_json("ops", "norm.rmsnorm")["cases"][0].keys() == {"name", "large"}


# -- explain ------------------------------------------------------------------------------------------------------------------


def test_explain_lists_a_verdict_for_every_kernel() -> None:
    found = call_json("explain", "mm")
    assert found["chosen"] in {c["name"] for c in found["candidates"] if c["accepted"]}
    assert all(c["reason"] for c in found["candidates"])
    text = call("explain", "mm", "--all")
    assert max(map(len, text.splitlines())) <= 100
    assert text.splitlines()[-1].startswith(f"-> {found['chosen']} "), "the choice is the last line"
    for candidate in found["candidates"]:
        assert candidate["name"] in text.replace(",", " ").split(), "no name is broken"
        assert plain(candidate["reason"]).removeprefix("needs ") in plain(text)


def test_explain_groups_what_is_rejected_for_one_reason() -> None:
    found = call_json("explain", "mm", "--platform", "cpu")
    text = call("explain", "mm", "--platform", "cpu")
    groups: dict[str, list[str]] = {}
    for candidate in found["candidates"]:
        if not candidate["accepted"]:
            groups.setdefault(candidate["reason"], []).append(candidate["name"])
    for reason, names in groups.items():
        assert plain(text).count(plain(reason).removeprefix("needs ")) == 1, "each reason stands once"
        for name in names:
            assert (name in text.replace(",", " ").split()) == (len(names) <= 3)
        if len(names) > 1 and reason.startswith("needs "):
            assert f"{len(names)} kernels need {plain(reason)[6:]}" in plain(text)
    assert ("--all names them" in text) == any(len(names) > 3 for names in groups.values())


def test_explain_starts_from_a_case() -> None:
    assert call_json("explain", "rmsnorm")["case"] == "gpt-oss-120b decode 64", "the small case most like the first large one"
    assert call_json("explain", "rmsnorm", "--case", "with residual")["traits"]["residual"] is True


@pytest.mark.parametrize("platform", ["sm_90", "gfx950", "cpu"])
def test_explain_of_prepared_weights_agrees_with_a_plan(platform: str) -> None:
    """``explain`` must evaluate each kernel with weights in its own layout, as a plan does, although the case has unprepared
    weights."""
    found = call_json("explain", "moe_apply", "--platform", platform, "--case", "mxfp4, gpt-oss options")
    facts: dict[str, Any] = {"w13_interleaved": True, "bias": True, "alpha": 1.702, "limit": 7.0, "beta": 1.0}
    plan = moe_apply.plan(8, 4, 96, 64, weight_format="mxfp4", **facts, platform=named_platform(platform))
    assert found["chosen"] == plan.kernel
    for candidate in found["candidates"]:
        assert "weight_layout=canonical is not" not in candidate["reason"], candidate


def test_explain_of_every_large_case_draws_little() -> None:
    for op in operators():
        large = [case.name for case in op.all_cases() if case.large]
        if op.family not in ("attention", "moe") and large:
            assert call_json("explain", op.mode, "--case", large[0])["case"] == large[0]


def test_explain_changes_traits_and_formats() -> None:
    found = call_json("explain", "rmsnorm", "residual=true", "hidden=64", "x=float16")
    assert found["traits"]["residual"] is True
    assert found["traits"]["hidden"] == 64
    assert found["formats"]["x"] == "float16"


def test_explain_asks_for_calls_that_are_possible() -> None:
    """``explain`` with changed traits or formats must show formats, sizes and traits that one call can have together."""
    words = ["explain", "mha_decode_with_kvcache", "--platform", "gfx950", "sinks=true", "head_dim=128"]
    found = call_json(*words)
    assert set(found["formats"].values()) == {"bfloat16"}
    assert found["sizes"]["head_dim"] == found["sizes"]["v_head_dim"] == found["traits"]["head_dim"] == 128
    assert "head_dim=128" in found["changed_to"]
    assert plain(f"changed to {found['changed_to']}") in plain(call(*words))
    cached = call_json("explain", "mha_decode_with_kvcache", "k_cache=float8_e4m3fn", "scaled=true")
    assert cached["formats"] == {"q": "bfloat16", "k_cache": "float8_e4m3fn", "v_cache": "float8_e4m3fn"}
    capped = call_json("explain", "mha_decode_with_kvcache", "logit_cap=true", "gqa_ratio=4")
    assert capped["traits"]["logit_cap"] is True
    assert capped["sizes"]["heads"] == 4 * capped["sizes"]["kv_heads"]
    assert call_json("explain", "mm", "a=float8_e4m3fn", "n=1000")["sizes"]["n"] == 1000, "from another case than the first"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", "float8_e4m3fn"), ("FP8", "float8_e4m3fn"), ("e5m2", "float8_e5m2"), ("bf16", "bfloat16"), ("fp16", "float16")],
)
def test_explain_understands_short_names_of_dtypes(name: str, dtype: str) -> None:
    op, operand = ("dequantize_fp8", "q") if dtype.startswith("float8") else ("rmsnorm", "x")
    assert dtype in call_json("explain", op, f"{operand}={name}")["formats"][operand]
    if not dtype.startswith("float8"):
        assert call_json("explain", "mm", f"out_dtype={name}")["traits"]["out_dtype"] == dtype
    assert "is a format and no dtype" in refused("explain", "mm", "a=mxfp4")


def test_explain_understands_names_of_devices() -> None:
    for name, arch in (("h100", "sm_90"), ("H200", "sm_90"), ("mi355x", "gfx950")):
        assert call_json("explain", "rmsnorm", "--platform", name)["platform"]["arch"] == arch


def test_explain_asks_for_another_platform_objective_solution_and_kernel() -> None:
    found = call_json("explain", "rmsnorm", "--platform", "gfx950", "--objective", "debug", "--solution", "reference")
    assert found["platform"]["arch"] == "gfx950"
    assert found["objective"] == "debug"
    assert found["chosen"] == "reference_rmsnorm"
    assert call_json("explain", "rmsnorm", "--override", "reference_rmsnorm")["override"] == "reference_rmsnorm"


def test_explain_follows_the_settings(settings_from: Callable[..., Any]) -> None:
    settings_from(OVERRIDE_NORM_RMSNORM="reference_rmsnorm", PLATFORM="sm_90")
    found = call_json("explain", "rmsnorm")
    assert found["override"] == "reference_rmsnorm"
    assert found["platform"]["arch"] == "sm_90"


def test_explain_of_a_call_without_an_eligible_kernel(wrong: str) -> None:
    found = call_json("explain", "rmsnorm", "--solution", "wrong", "hidden=9", code=1)
    assert found["chosen"] is None
    text = call("explain", "rmsnorm", "--solution", "wrong", "hidden=9", code=1)
    assert "hidden=9 is not 8" in text
    assert "no kernel is eligible" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rmsnrom"], "no operator rmsnrom; did you mean rmsnorm?"),
        (["rmsnorm", "residuel=true"], "did you mean 'residual'?"),
        (["rmsnorm", "residual"], "a change is written trait=value or role=dtype, got 'residual'"),
        (["rmsnorm", "residual=3"], "residual is a flag, true or false; got '3'"),
        (["rmsnorm", "hidden=true"], "hidden is not a flag; got 'true'"),
        (["rmsnorm", "hidden=abc"], "hidden is a number; got 'abc'"),
        (["argmax", "vocab=-3"], "vocab is 0 or more; got '-3'"),
        (["quantize_mxfp8", "k=33"], "no call of quantization.quantize_mxfp8 with k=33 could be made from 'gpt-oss-120b decode 8'"),
        (["layernorm", "hidden=100000000000"], "no call of norm.layernorm with hidden=100000000000 could be made"),
        (["mm", "out_dtype=floaf16"], "no value of out_dtype 'floaf16'; did you mean 'float16'?"),
        (["rmsnorm", "x=flaot16"], "no dtype 'flaot16'; did you mean 'float16'?"),
        (["rmsnorm", "x=nosuch"], "no dtype 'nosuch'; for example float32, bfloat16 (bf16), float16 (fp16), float8_e4m3fn (fp8)"),
        (["rmsnorm", "--platform", "h10"], "unknown platform 'h10'; expected one of cpu, sm_<version> (sm_90), gfx<version>"),
        (["rmsnorm", "--platform", "gfx"], "unknown platform 'gfx'"),
        (["rmsnorm", "--solution", "referense"], "no solution of norm.rmsnorm 'referense'; did you mean 'reference'?"),
        (["rmsnorm", "--override", "triton"], "did you mean a kernel of solution triton (triton_rmsnorm)?"),
        (["rmsnorm", "--override", "reference_rmsnrom"], "did you mean reference_rmsnorm?"),
        (["rmsnorm", "--case", "no rovs"], "did you mean 'no rows'?"),
        (["rmsnorm", "--objective", "speed"], "'speed' is not one of"),
    ],
)
def test_explain_rejects_unknown_names(words: list[str], said: str) -> None:
    assert said in refused("explain", *words)


# -- verify -------------------------------------------------------------------------------------------------------------------


def test_verify_one_kernel_and_one_operator() -> None:
    by_kernel = call_json("verify", "reference_rmsnorm")
    assert {r["status"] for r in by_kernel["results"]} == {"passed"}
    assert by_kernel["summary"]["passed"] == len(by_kernel["results"])
    by_operator = call_json("verify", "rmsnorm")
    assert {r["kernel"] for r in by_operator["results"]} >= {"reference_rmsnorm"}
    assert "passed" in call("verify", "rmsnorm").splitlines()[-1]


def test_verify_several(wrong: str) -> None:
    found = call_json("verify", "reference_silu_and_mul", "rmsnorm", "reference_rmsnorm", "--case", "one ", code=1)
    kernels = [r["kernel"] for r in found["results"]]
    assert kernels[0] == "reference_silu_and_mul"
    assert {"reference_rmsnorm", wrong} < set(kernels)
    assert len({(r["kernel"], r["case"]) for r in found["results"]}) == len(kernels), "each kernel once"
    assert "no kernel or operator 'rmsnrom'" in refused("verify", "silu_and_mul", "rmsnrom")


def test_verify_fails_for_a_wrong_kernel_and_shows_the_element(wrong: str) -> None:
    text = call("verify", wrong, code=1)
    assert "1 of 8 elements beyond tolerance, worst at [0, 5]: got 7, expected " in text
    assert re.search(r"^wrong_rmsnorm +one row of 8, float32 +failed ", text, re.MULTILINE)
    found = call_json("verify", "rmsnorm", code=1)
    failed = [r for r in found["results"] if r["status"] == "failed"]
    assert [r["kernel"] for r in failed] == [wrong]
    assert failed[0]["comparisons"][0]["worst"]["index"] == [0, 5]


def test_verify_says_all_that_is_known_of_a_failure(wrong: str, tmp_path: Path) -> None:
    files = ["--junit", str(tmp_path / "v.xml"), "--output", str(tmp_path / "v.json")]
    text = call("verify", wrong, "--case", "one row of 8", *files, code=1)
    for said in (
        "\nwrong_rmsnorm, one row of 8, float32:\n",
        "  max abs ",
        ", cosine ",
        "  where: all in [:, 5] of [1, 8], all of it\n",
        "    [0, 5]: got 7, expected ",
        "units in the last place: 0: ",
        "tolerance: relative 2e-05, absolute 2e-05 of the rms, norm 1e-05 (sums of thousands of terms in another order",
        " calls that were tried:\n",
        "    kernel = KernelRegistry.get().get_by_name('wrong_rmsnorm')\n",
    ):
        assert said in text, (said, text)
    assert 'classname="norm.rmsnorm.wrong_rmsnorm" name="one row of 8, float32"' in (tmp_path / "v.xml").read_text()
    assert json.loads((tmp_path / "v.json").read_text())["summary"]["failed"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.json", "v.xml"]
    assert "smallest" not in call("verify", wrong, "--case", "one row of 8", "--shrink", "0", code=1)
    assert "cannot be written" in runner.invoke(app, ["verify", wrong, "--case", "no rows", "--output", "/nowhere/x.json"]).stderr


def test_verify_repeats_and_checks_all_on_request() -> None:
    calls = iter(range(100))

    @register_kernel("norm", "rmsnorm", name="drifting", solution="drifting", signatures=None, traits={"hidden": 8}, priority=1)
    def rmsnorm(x: Any, weight: Any, eps: Any, residual: Any, out: Any, residual_out: Any) -> Any:
        made = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps) * (1 + 1e-6 * (next(calls) % 2))
        return made if out is None else out.copy_(made)

    assert "1 passed" in call("verify", "drifting", "--case", "one row of 8")
    assert "gives other bits in run 2 of 3" in call("verify", "drifting", "--case", "one row of 8", "--repeat", "3", code=1)
    text = call("verify", "drifting", "--case", "one row of 8", "--conformance")
    assert re.search(r"^drifting +determinism +skipped +not tagged determinism; --repeat N asks for it$", text, re.MULTILINE)
    assert re.search(r"^drifting +no waiting +passed +1 calls$", text, re.MULTILINE)
    found = call_json("verify", "drifting", "--case", "one row of 8", "--conformance", "--repeat", "3", code=1)
    assert [r["check"] for r in found["results"] if r["status"] == "failed"] == ["determinism"]


def test_verify_shows_the_traceback_of_an_error() -> None:
    @register_kernel("norm", "rmsnorm", name="raising", solution="raising", signatures=None, traits={"hidden": 8}, priority=1)
    def rmsnorm(x: Any, weight: Any, eps: Any, residual: Any, out: Any, residual_out: Any) -> Any:
        raise RuntimeError("out of registers")

    text = call("verify", "raising", code=1)
    assert "running the kernel: RuntimeError: out of registers" in text
    assert "Traceback (most recent call last):" in text


def test_verify_groups_equal_skip_reasons(wrong: str) -> None:
    assert re.search(r"^wrong_rmsnorm +\d+ cases +skipped +traits: hidden=\d+ is not 8", call("verify", "rmsnorm", code=1), re.M)
    assert not re.search(r"\d+ cases +skipped", call("verify", wrong, code=1))


def test_verify_chooses_cases(wrong: str) -> None:
    found = call_json("verify", "reference_rmsnorm", "--case", "decode 64")
    assert len(found["results"]) >= 2
    assert all("decode 64" in r["case"] for r in found["results"])
    exact = call_json("verify", "reference_rmsnorm", "--case", "gpt-oss-120b decode 64")
    assert [r["case"] for r in exact["results"]] == ["gpt-oss-120b decode 64"], "a whole name means itself"
    assert "did you mean 'no rows'?" in refused("verify", "rmsnorm", "--case", "no rovs")
    assert "; there are one pair, float32; llama-70b decode 8, one" in refused("verify", "silu_and_mul", "--case", "nosuch")


def test_verify_of_a_plugin(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(plugins, "_loaded", {"sample": PluginInfo("sample", "sample-kernels", "1", 1, (wrong,))})
    assert {r["kernel"] for r in call_json("verify", "--plugin", "sample", code=1)["results"]} == {wrong}
    assert "did you mean 'sample'?" in refused("verify", "--plugin", "sampel")
    failure = PluginFailure("bad", "bad-kernels", "1.2", "RuntimeError: no driver", "")
    monkeypatch.setattr(plugins, "_failed", {"bad": failure})
    assert "plugin bad failed to load: RuntimeError: no driver" in refused("verify", "--plugin", "bad")


@pytest.mark.parametrize("name", ["gpu:2", "gpux", "toaster", "meta", "hip", "cuda:x", "cuda:2", "cpu:1", ""])
def test_an_absent_device_is_reported_with_the_present_ones(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    wanted = f"error: no device {name!r}; there are cpu, cuda:0 (GPU 0), cuda:1 (GPU 1) (gpu is cuda, for ROCm too)\n"
    assert refused("verify", "rmsnorm", "--device", name) == wanted


def test_a_gpu_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as none:
        none.setattr(torch.cuda, "is_available", lambda: False)
        assert "error: device gpu: PyTorch finds no GPU here" in refused("verify", "rmsnorm", "--device", "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("gpu") == find_device("GPU") == torch.device("cuda")
    assert find_device("gpu:1") == find_device("CUDA:1") == torch.device("cuda:1")
    assert find_device(None) is None


def test_verify_says_what_tritons_interpreter_computes_wrongly() -> None:
    triton = CapabilityRequirement(required_features=frozenset({"triton"}))

    @register_kernel("activation", "silu_and_mul", name="in_triton", solution="testing", signatures=None, capability=triton)
    def in_triton(x: Any, out: Any) -> Any:
        gate, up = x.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
        return y if out is None else out.copy_(y)

    case = ("--case", "float32")
    with use_platform(dataclasses.replace(cpu_platform(), features=frozenset({"triton"}))):
        for options in ((), ("--conformance",)):
            text = call("verify", "in_triton", *case, *options)
            assert "Triton's interpreter truncates when it converts to bfloat16" in text
        assert "interpreter" not in call("verify", "reference_silu_and_mul", *case)


def test_verify_of_nothing_is_no_success(wrong: str) -> None:
    skipped = ("verify", wrong, "--case", "gpt-oss-120b decode 64")
    text = call(*skipped, code=1)
    assert "nothing was verified: the only run was skipped" in text
    assert call_json(*skipped, code=1)["summary"]["skipped"] == 1
    assert "nothing was verified: all " in call("verify", wrong, "--case", "gpt-oss", "--conformance", code=1)
    assert "nothing was verified" not in call("verify", "reference_rmsnorm", "--case", "no rows")


def test_names_and_devices_that_are_not_there() -> None:
    assert "no kernel or operator 'rmsnrom'; did you mean 'rmsnorm'?" in refused("verify", "rmsnrom")
    assert "did you mean 'reference_rmsnorm'?" in refused("bench", "reference_rmsnrom")
    listed = "tokenspeed-kernel ops lists operators, ops OP its kernels"
    assert refused("verify", "nosuch") == f"error: no kernel or operator 'nosuch'; {listed}\n"
    assert refused("explain", "nosuch") == "error: no operator nosuch\n"
    assert "no solution 'tritn'; did you mean 'triton'?" in refused("verify", "rmsnorm", "--solution", "tritn")
    if not torch.cuda.is_available():
        assert "PyTorch finds no GPU here" in refused("verify", "rmsnorm", "--device", "cuda")
        assert "there are CUDA graphs on GPUs only" in refused("bench", "rmsnorm", "--graph", "20")


def test_several_cases_may_be_requested() -> None:
    report = call_json("verify", "reference_rmsnorm", "--case", "no rows", "--case", "one row")
    assert [result["case"] for result in report["results"]] == ["one row of 8, float32", "no rows"]
    assert "no case 'no rovs'" in refused("verify", "rmsnorm", "--case", "no rows", "--case", "no rovs")


def test_a_solution_may_be_requested() -> None:
    report = call_json("verify", "rmsnorm", "--solution", "reference", "--case", "no rows")
    assert {result["kernel"] for result in report["results"]} == {"reference_rmsnorm"}


# -- bench --------------------------------------------------------------------------------------------------------------------

QUICK = ("bench", "reference_rmsnorm", "--case", "no rows", "--budget", "0.001")


def test_bench_writes_its_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    printed = call_json(*QUICK, "--output", str(file))
    assert json.loads(file.read_text()) == printed
    assert printed["format"] == 2
    assert printed["rows"][0]["timing"]["repeats"] >= 10
    assert len(printed["rows"][0]["timing"]["rounds"]) == 7
    command = "tokenspeed-kernel bench reference_rmsnorm --case 'no rows' --rounds 7 --budget 0.001"
    assert printed["metadata"]["command"] == command
    assert printed["method"] == {"cache": "warm", "graph_calls": 0, "copies": 1, "budget_s": 0.001, "rounds": 7}
    assert "there is no folder" in refused(*QUICK, "--output", str(tmp_path / "none" / "report.json"))


def test_a_run_is_added_to_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    for runs in (1, 2, 3):
        call(*QUICK, "--rounds", "2", "--output", str(file), "--append")
        assert [len(row["timing"]["rounds"]) for row in json.loads(file.read_text())["rows"]] == [2 * runs]
    call(*QUICK, "--rounds", "2", "--output", str(file))
    assert len(json.loads(file.read_text())["rows"][0]["timing"]["rounds"]) == 2
    kept = file.read_bytes()
    assert "cannot be added to: it was timed otherwise" in refused(*QUICK, "--rounds", "3", "--output", str(file), "--append")
    assert file.read_bytes() == kept
    assert "--append needs --output" in refused(*QUICK, "--append")
    file.write_text("{")
    assert "is no benchmark report" in refused(*QUICK, "--output", str(file), "--append")


def test_the_command_in_a_report_makes_it_again(tmp_path: Path) -> None:
    baselines = tmp_path / "its baselines.py"
    baselines.write_text(BASELINES)
    words = ["bench", "rmsnorm", "--case", "no rows", "--solutions", "reference,aten", "--baseline", str(baselines)]
    words += ["--device", "cpu", "--cache", "warm", "--rotate", "3", "--rounds", "2", "--budget", "0.001"]
    printed = call_json(*words)
    assert shlex.split(printed["metadata"]["command"]) == ["tokenspeed-kernel", *words]
    assert printed["method"]["copies"] == 3


def test_bench_keeps_results_when_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel.workbench.benchmark import run

    calls = 0

    def stopped(*args: Any, **options: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return [1.0, 2.0, 3.0]

    monkeypatch.setattr(run, "sample", stopped)
    monkeypatch.setattr(run, "reference_time", lambda device: 1.0)
    file = tmp_path / "report.json"
    assert runner.invoke(app, [*QUICK, "--case", "one row", "--output", str(file)]).exit_code == 130
    assert [len(row["timing"]["rounds"]) for row in json.loads(file.read_text())["rows"]] == [2, 1]


def test_bench_prints_a_table(wrong: str) -> None:
    text = call("bench", "rmsnorm", "--case", "one row", "--budget", "0.001", code=1)
    assert text.split()[:4] == ["kernel", "case", "status", "median"]
    assert re.search(r"^reference_rmsnorm +one row of 8, float32 +measured +[\d.]+", text, re.MULTILINE)
    assert re.search(r"^wrong_rmsnorm +one row of 8, float32 +failed .*worst at \[0, 5\]", text, re.MULTILINE)


BASELINES = """
import torch
from tokenspeed_kernel.workbench.benchmark import Unsupported, baseline

@baseline("norm.rmsnorm", name="aten")
def aten(x, weight, eps):
    if x.dtype == torch.float16:
        raise Unsupported("float16 is not for it")
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

@baseline("gemm.mm", name="other")
def other(a, b):
    raise AssertionError("not asked for")
"""


def test_solutions_and_baselines_stand_side_by_side(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "baselines.py"
    file.write_text(BASELINES)
    words = ["bench", "rmsnorm", "--baseline", str(file), "--budget", "0.001", "--rounds", "4"]
    text = call(*words, "--solutions", "reference,aten,wrong", code=1)
    lines = text.splitlines()
    assert re.split(r"  +", lines[0]) == ["operator", "case", "reference us", "aten us", "wrong us", "detail"]
    number = r"[\d.]+"
    assert re.search(rf"^norm.rmsnorm +no rows +{number} +{number} \(~?{number}\) +skipped", text, re.MULTILINE)
    assert re.search(rf"^norm.rmsnorm +one row of 8, float32 +{number} +{number} \(~?{number}\) +failed +.*\[0, 5\]", text, re.M)
    assert re.search(
        rf"^norm.rmsnorm +odd hidden 1001, float16 +{number} +skipped +skipped +aten: float16 is not for it", text, re.M
    )
    first_other = call_json(*words, "--solutions", "aten,reference", "--case", "no rows")
    assert {row["kernel"] for row in first_other["rows"]} == {"aten", "reference_rmsnorm"}
    for baselines_only in (["--solutions", "aten"], ["--solution", "aten"]):
        assert [row["kernel"] for row in call_json(*words, *baselines_only, "--case", "no rows")["rows"]] == ["aten"]
    beside = call(*words, "--solutions", "reference", "--case", "no rows")
    assert re.split(r"  +", beside.splitlines()[0]) == ["operator", "case", "reference us", "aten us", "detail"]
    plain = call_json(*words, "--case", "no rows")
    assert {"aten", "reference_rmsnorm", "wrong_rmsnorm"} <= {row["kernel"] for row in plain["rows"]}


def test_a_column_shows_the_fastest_and_its_ratio_to_the_first() -> None:
    from tokenspeed_kernel.workbench.benchmark import Row, Timing
    from tokenspeed_kernel.workbench.cli.bench_tables import side_by_side

    def row(kernel: str, solution: str, *times: float, status: str = "measured", reason: str = "") -> Row:
        timing = Timing.of([[time, time] for time in times]) if times else None
        return Row(kernel, "f.m", "c", status, reason, timing=timing, solution=solution)

    rows = [
        row("slow", "a", 20, 20, 20, 20),
        row("fast", "a", 10, 10.1, 9.9, 10),
        row("b", "b", 5, 5, 5, 5),
        row("c", "c", 10.2, 9.8, 10, 10.1),
        row("d", "d", status="failed", reason="wrong"),
        row("e", "e", status="skipped", reason="no such dtype"),
    ]
    columns, cells = side_by_side(rows, ["a", "b", "c", "d", "e", "f"])
    assert columns == ["operator", "case", "a us", "b us", "c us", "d us", "e us", "f us", "detail"]
    assert cells == [
        ["f.m", "c", "10.00", "5.00 (0.50)", "10.05 (~1.00)", "failed", "skipped", "-", "d: wrong; e: no such dtype"],
    ]
    assert side_by_side(rows, ["e"])[1] == [], "nothing to show"


@pytest.fixture
def two_reports(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Returns a function that writes two reports of one kernel. In the second report the kernel takes ``factor`` times as long; if
    ``factor`` is None, it failed."""
    from tokenspeed_kernel.workbench.benchmark import Method, Report, Row, Timing, collect_metadata

    def make(factor: float | None) -> tuple[str, str]:
        paths = []
        for name, scale in (("a", 1.0), ("b", factor)):
            timing = Timing.of([[scale * time] for time in (10.0, 10.1, 9.9, 10.0, 10.05)]) if scale else None
            row = Row("kernel", "f.m", "the case", "measured" if scale else "failed", "" if scale else "NaN", timing=timing)
            report = Report(collect_metadata("", "cpu"), (row,), None, Method())
            report.write(tmp_path / f"{name}.json")
            paths.append(str(tmp_path / f"{name}.json"))
        return paths[0], paths[1]

    return make


@pytest.mark.parametrize(
    ("factor", "verdict", "code"), [(1.0, "no difference", 0), (1.05, "slower", 1), (0.9, "faster", 0), (None, "failed", 1)]
)
def test_reports_are_compared(two_reports: Callable[..., tuple[str, str]], factor: float | None, verdict: str, code: int) -> None:
    files = two_reports(factor)
    text = call("bench", "--compare", *files, code=code)
    assert re.search(rf"^kernel +the case +{verdict} ", text, re.MULTILINE)
    found = call_json("bench", "--compare", *files, code=code)
    assert found["worse"] is bool(code)
    if factor is not None:
        assert re.search(rf"geometric mean of B / A: {factor:.3f} \(", text)
        assert found["differences"][0]["verdict"] == verdict
        assert found["differences"][0]["ratio"]["value"] == pytest.approx(factor)
    if factor == 1.05:
        call("bench", "--compare", *files, "--threshold", "0.1", code=0)
        call("bench", "--compare", *files, "--confidence", "0.999", code=0)


def test_captured_calls_are_measured(tmp_path: Path) -> None:
    import tokenspeed_kernel as tk

    file = tmp_path / "shapes.jsonl"
    with tk.shape_capture(file):
        tk.rmsnorm(torch.ones(3, 24), torch.ones(24))
    measured = call_json("bench", "--from", str(file), "--solution", "reference", "--budget", "0.001")
    assert [(row["kernel"], row["status"]) for row in measured["rows"]] == [("reference_rmsnorm", "measured")]
    assert "3" in measured["rows"][0]["case"]
    assert "24" in measured["rows"][0]["case"]
    assert f"--from {file}" in measured["metadata"]["command"]


def test_incomparable_reports_are_rejected(two_reports: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    a, b = two_reports(1.0)
    assert "there is nothing to compare" in refused("bench", "--compare", a, _without_rows(b))
    (tmp_path / "c.json").write_text("{")
    assert "c.json is no benchmark report" in refused("bench", "--compare", a, str(tmp_path / "c.json"))
    assert "No such file" in refused("bench", "--compare", a, str(tmp_path / "none.json"))
    assert "--case has no effect" in refused("bench", "--compare", a, b, "--case", "x")
    assert "KERNEL or OP has no effect" in refused("bench", "rmsnorm", "--compare", a, b)


def _without_rows(file: str) -> str:
    table = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps({**table, "rows": []}))
    return file


def test_without_memory_for_a_roofline_there_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenspeed_kernel.workbench.cli import bench

    def full(device: torch.device, **options: Any) -> None:
        raise torch.OutOfMemoryError("4 GiB are not free")

    monkeypatch.setattr(bench, "cached_roofline", full)
    monkeypatch.setattr(bench, "measure_roofline", full)
    assert bench._roofline(torch.device("cuda"), no_cache=False, remeasure=False) is None
    assert bench._roofline(torch.device("cuda"), no_cache=True, remeasure=False) is None
    assert capsys.readouterr().err.count("without a roofline: 4 GiB are not free") == 2


def test_options_of_bench_that_cannot_be_followed(tmp_path: Path) -> None:
    assert "did you mean 'warm'?" in refused("bench", "rmsnorm", "--cache", "warn")
    assert "give one of the two" in refused("bench", "rmsnorm", "--solution", "triton", "--solutions", "triton,torch")
    assert "no solution 'tritn'" in refused("bench", "rmsnorm", "--solutions", "reference,tritn")
    assert "none.py is no Python file" in refused("bench", "rmsnorm", "--baseline", str(tmp_path / "none.py"))
    if not torch.cuda.is_available():
        assert "caches are flushed on GPUs only" in refused("bench", "rmsnorm", "--cache", "cold")


# -- plugins ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def some_plugins(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(plugins, "_loaded", {"sample": PluginInfo("sample", "sample-kernels", "1.0", 1, (wrong,))})
    failure = PluginFailure("bad", "bad-kernels", "1.2", "RuntimeError: no driver", "Traceback...\nRuntimeError: no driver")
    monkeypatch.setattr(plugins, "_failed", {"bad": failure})


@pytest.mark.usefixtures("some_plugins")
def test_plugins_are_listed() -> None:
    found = call_json("plugins", "list")
    assert [p["name"] for p in found["loaded"]] == ["sample"]
    assert [p["name"] for p in found["failed"]] == ["bad"]
    text = call("plugins", "list")
    assert re.search(r"^sample +loaded +sample-kernels +1\.0 +1$", text, re.MULTILINE)
    assert re.search(r"^bad +failed +bad-kernels +1\.2 +RuntimeError: no driver$", text, re.MULTILINE)


@pytest.mark.usefixtures("some_plugins")
def test_one_plugin_is_shown() -> None:
    assert "wrong_rmsnorm  norm.rmsnorm  wrong" in call("plugins", "info", "sample")
    assert call_json("plugins", "info", "sample")["kernels"][0]["name"] == "wrong_rmsnorm"
    assert "Traceback..." in call("plugins", "info", "bad", code=1)
    assert call_json("plugins", "info", "bad", code=1)["status"] == "failed"
    assert "did you mean 'sample'?" in refused("plugins", "info", "sampel")


# -- output -------------------------------------------------------------------------------------------------------------------


def test_a_table_in_a_terminal_loses_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    words = [f"word{i}" for i in range(40)]
    print_table(["name", "text"], [["a", " ".join(words)], ["[b]", "failed"]])
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
    assert "[b]" in printed, "names are not markup"


def test_a_table_in_a_pipe_keeps_each_row_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "text"], [["a", "one\ntwo " + "x" * 300], ["bb", ""]])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["name  text", "a     one two " + "x" * 300, "bb"]


def test_help_and_version_come_without_pytorch() -> None:
    """Importing PyTorch takes seconds, so help must not import it."""
    heavy = "[name for name in ('torch', 'tokenspeed_kernel') if name in sys.modules]"
    program = f"import sys, tokenspeed_kernel_command as command; command.main(); print({heavy})"
    for words in ((), ("-h",), ("--help",), ("--version",)):
        *told, imported = without_pytorch("-c", program, *words).stdout.splitlines()
        assert imported == "[]"
        assert told == [f"tokenspeed-kernel {__version__}"] or len(told) > len(COMMANDS)
    program = f"""
    import sys, tokenspeed_kernel_command as command
    try:
        command.main()
    finally:
        print({heavy})
    """
    for words in (
        ("explain", "--help"),
        ("verify", "-h"),
        ("bench", "--help"),
        ("capture", "show", "--help"),
        ("plugins", "info", "-h"),
    ):
        *told, imported = without_pytorch("-c", textwrap.dedent(program), *words).stdout.splitlines()
        assert imported == "[]"
        assert told[0].startswith(f"Usage: tokenspeed-kernel {words[0]} ")
    done = without_pytorch("-c", textwrap.dedent(program), "verify", "--devcie", "cpu")
    assert "No such option: --devcie" in done.stderr
    assert done.stdout.split() == ["[]"], "wrong options, too, are found at once"
    assert without_pytorch("-m", "tokenspeed_kernel", "--version").stdout == f"tokenspeed-kernel {__version__}\n"


def test_the_help_names_every_command_and_says_what_its_docstring_says() -> None:
    commands = typer.main.get_group(app).commands
    assert [*commands] == [*COMMANDS]
    for name, does in COMMANDS.items():
        assert commands[name].help.startswith(does), name


def test_what_is_declared_is_what_runs() -> None:
    for module, declared in DECLARED:
        names = [*inspect.signature(declared).parameters]
        assert [*inspect.signature(implementation(module, declared.__name__)).parameters] == names, declared.__name__
    assert {each.value for each in options.Objectives} == {each.value for each in SelectionObjective}
    assert (options.THRESHOLD, options.CONFIDENCE) == (THRESHOLD, CONFIDENCE)


def test_the_command_is_a_module_too() -> None:
    shown = without_pytorch("-m", "tokenspeed_kernel_command").stdout
    assert re.search(r"^  bench    Time kernels, after", shown, re.MULTILINE)
    assert [line for line in shown.splitlines() if len(line) > 100] == []


# -- warmup -------------------------------------------------------------------------------------------------------------------


def _warms_up(monkeypatch: pytest.MonkeyPatch, **functions: Callable[[list[str]], Any]) -> None:
    """Installs plugins with these warm-up functions."""
    entries = []
    for name, function in functions.items():
        entry = metadata.EntryPoint(name, f"sample_{name}:main", "tokenspeed_kernel.warmup")
        monkeypatch.setitem(sys.modules, f"sample_{name}", SimpleNamespace(main=function))
        entries.append(entry)
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == "tokenspeed_kernel.warmup" else [])


def test_warmup_passes_its_options_to_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    _warms_up(monkeypatch, two=lambda words: told.append(("two", words)), one=lambda words: told.append(("one", words)))
    assert call("warmup", "--", "--list", "decode") == "one (sample_one:main)\ntwo (sample_two:main)\n"
    assert told == [("one", ["--list", "decode"]), ("two", ["--list", "decode"])]
    told.clear()
    call("warmup", "--plugin", "two")
    assert told == [("two", [])]


def test_warmup_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    _warms_up(monkeypatch, a=lambda words: 1, b=lambda words: sys.exit(2), c=lambda words: 1 / 0, d=lambda words: done.append("d"))
    result = runner.invoke(app, ["warmup"])
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stderr
    assert done == ["d"]


def test_an_interrupted_warmup_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    _warms_up(monkeypatch, a=interrupted, b=lambda words: done.append("b"))
    assert "interrupted while a compiled" in call("warmup", code=130)
    _warms_up(monkeypatch, a=lambda words: 130, b=lambda words: done.append("b"))
    call("warmup", code=130)
    assert done == []


def test_warmup_without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    _warms_up(monkeypatch)
    assert call("warmup") == "no plugin that is installed has anything to compile\n"
    _warms_up(monkeypatch, nearly=lambda words: 0)
    assert "nearly" in refused("warmup", "--plugin", "nearlly")


# -- real processes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["tokenspeed_kernel", "doctor", "--json"],
        ["tokenspeed_kernel", "explain", "rmsnorm", "--json"],
        ["tokenspeed_kernel.workbench.numerics", "rmsnorm", "--case", "no rows", "--json"],
        ["tokenspeed_kernel.workbench.benchmark", "rmsnorm", "--case", "no rows", "--budget", "0.001", "--json"],
        ["tokenspeed_kernel.plugins", "--json"],
    ],
    ids=" ".join,
)
def test_modules_run_and_stdout_is_json(command: list[str]) -> None:
    done = process("-m", *command)
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)


def test_the_exit_code_reaches_the_shell() -> None:
    done = process("-m", "tokenspeed_kernel", "verify", "rmsnrom", "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: no kernel or operator 'rmsnrom'; did you mean 'rmsnorm'?\n"


def test_plugins_by_module_shows_the_plugins_that_the_core_loaded(tmp_path: Path) -> None:
    """A module that runs with ``-m`` is imported twice, once as ``__main__``. Only the other copy has loaded plugins, so the
    command must use that copy."""
    (tmp_path / "tiny_plugin.py").write_text("def register(): pass\n")
    info = tmp_path / "tiny_kernels-0.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-kernels\nVersion: 0.5\n")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\ntiny = tiny_plugin:register\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = process("-m", "tokenspeed_kernel.plugins", "--json", PYTHONPATH=path)
    assert ("tiny", "0.5") in [(p["name"], p["version"]) for p in json.loads(done.stdout)["loaded"]]


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_tools_one_line_says_what_to_install(missing: str) -> None:
    program = f"""
    import sys
    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == {missing!r}:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    sys.meta_path.insert(0, Blocker())
    sys.argv = ["tokenspeed-kernel", "doctor", "--json"]
    from tokenspeed_kernel_command import main
    main()
    """
    done = process("-c", textwrap.dedent(program))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"pip install 'tokenspeed-kernel[tools]=={__version__}'" in done.stderr


def test_a_missing_module_of_our_own_is_not_reported_as_a_missing_extra() -> None:
    program = """
    import sys
    sys.modules["tokenspeed_kernel.workbench.doctor"] = None
    sys.argv = ["tokenspeed-kernel", "doctor"]
    from tokenspeed_kernel_command import main
    main()
    """
    done = process("-c", textwrap.dedent(program))
    assert "pip install" not in done.stderr
    assert "tokenspeed_kernel.workbench.doctor" in done.stderr


def test_importing_the_core_imports_no_tools() -> None:
    tools = ["typer", "rich", "click"] + [f"tokenspeed_kernel.{name}" for name in ("numerics", "benchmark", "cli", "doctor")]
    done = process("-c", f"import sys, tokenspeed_kernel; print([t for t in {tools!r} if t in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_a_terminal_gets_colours_and_progress() -> None:
    pty = pytest.importorskip("pty")
    controller, terminal = pty.openpty()
    env = {k: v for k, v in os.environ.items() if not k.startswith(config.PREFIX) and k not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color", "COLUMNS": "200"}
    child = start_python("-m", "tokenspeed_kernel", "verify", "rmsnorm", stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    seen = bytearray()
    with contextlib.suppress(OSError):  # on Linux, this error means that the terminal's other end is closed
        while data := os.read(controller, 4096):
            seen += data
    os.close(controller)
    assert child.wait() == 0, seen.decode()
    assert b"\x1b[32mpassed" in seen
    assert b"verifying" in seen

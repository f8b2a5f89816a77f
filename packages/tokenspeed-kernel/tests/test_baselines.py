"""Tests baselines: third-party kernels that a file declares, and that are measured beside this project's kernels."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.workbench.benchmark import Baseline, Unsupported, baseline, bench_case, failure_of, load_baselines
from tokenspeed_kernel.workbench.benchmark.baselines import BaselineFileError, verify_baseline
from tokenspeed_kernel.workbench.numerics import Status
from tokenspeed_kernel_base.cases import Case

CPU = torch.device("cpu")


def _scale_body(x: Tensor, y: Tensor, factor: float = 2.0, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    y.add_(1)
    return x * factor if bias is None else x * factor + bias


@pytest.fixture
def scale(declare: Callable[..., Any]) -> Any:
    function = declare(_scale_body, formats=("x",), mutates=("y",))
    function.fake(lambda x: torch.empty_like(x))
    return function.operator


def case(**more: Any) -> Case:
    return Case("a case", lambda draw: {"x": draw.normal(4, 8), "y": draw.normal(3), **more})


def right(x: Tensor, y: Tensor) -> Tensor:
    y += 1
    return 2 * x


def test_a_right_peer_passes_and_is_timed(scale: Any) -> None:
    declared = baseline(scale.mode, name="theirs")(right)
    assert (declared.name, declared.operator, declared.solution) == ("theirs", str(scale), "theirs")
    assert verify_baseline(declared, case(), CPU).status is Status.PASSED
    row = bench_case(declared, case(), "cpu", budget_s=1e-9)
    assert (row.kernel, row.operator, row.solution, row.status) == ("theirs", str(scale), "theirs", "measured")
    assert row.timing is not None
    assert len(row.timing.rounds) == 7


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x, y: (y.add_(1), 3 * x)[1], "elements beyond tolerance"),
        (lambda x, y: 2 * x, "y: "),
        (lambda x, y: (y.add_(1), x.mul_(2))[1], "changes its input x"),
        (lambda x, y: (y.add_(1), (2 * x, x))[1], "2 tensors, expected one tensor"),
        (lambda x, y: None, "None"),
    ],
    ids=["value", "unwritten", "input", "count", "nothing"],
)
def test_a_wrong_peer_fails_and_is_not_timed(scale: Any, function: Callable[..., Any], said: str) -> None:
    declared = baseline(str(scale), name="theirs")(function)
    result = verify_baseline(declared, case(), CPU)
    assert result.status is Status.FAILED
    assert said in result.reason
    row = bench_case(declared, case(), "cpu", budget_s=1e-9)
    assert (row.status, row.timing) == ("failed", None)


def test_a_peer_may_refuse_or_break(scale: Any) -> None:
    @baseline(scale.mode)
    def refuses(x: Tensor, y: Tensor) -> Tensor:
        raise Unsupported("not on Sundays")

    @baseline(scale.mode)
    def breaks(x: Tensor, y: Tensor) -> Tensor:
        raise OSError("no such library")

    assert (verify_baseline(refuses, case(), CPU).status, verify_baseline(refuses, case(), CPU).reason) == (
        Status.SKIPPED,
        "not on Sundays",
    )
    broken = verify_baseline(breaks, case(), CPU)
    assert (broken.status, broken.reason) == (Status.ERROR, "OSError: no such library")
    assert "no such library" in broken.traceback


def test_a_peer_does_not_support_parameters_it_does_not_name(scale: Any) -> None:
    declared = baseline(scale.mode, name="theirs")(right)
    bias = torch.ones(8)
    assert verify_baseline(declared, case(factor=2.0), CPU).status is Status.PASSED, "the default says nothing"
    other = verify_baseline(declared, case(factor=3.0, bias=bias), CPU)
    assert (other.status, other.reason) == (Status.SKIPPED, "does not take factor, bias")
    without_y = baseline(scale.mode, name="less")(lambda x: 2 * x)
    assert verify_baseline(without_y, case(), CPU).reason == "does not take y"


def test_rest_takes_all_the_others(scale: Any) -> None:
    @baseline(scale.mode)
    def takes_all(x: Tensor, **rest: Any) -> Tensor:
        assert sorted(rest) == ["bias", "factor", "out", "y"]
        rest["y"].add_(1)
        return x * rest["factor"]

    assert verify_baseline(takes_all, case(factor=3.0), CPU).status is Status.PASSED


def test_setup_is_made_once_and_not_timed(scale: Any) -> None:
    made: list[str] = []

    @baseline(scale.mode, setup=True)
    def planned(x: Tensor, y: Tensor) -> Callable[[], Tensor]:
        made.append("plan")
        return lambda: (made.append("call"), y.add_(1), 2 * x)[2]

    row = bench_case(planned, case(), "cpu", budget_s=1e-9, rounds=1)
    assert row.status == "measured"
    assert made.count("plan") == 2, "verified once, timed once"
    assert made.count("call") > 10


def test_a_report_says_of_which_version_a_peer_is(scale: Any) -> None:
    for package, version in (("torch", importlib.metadata.version("torch")), ("no-such-package", ""), ("", "")):
        row = bench_case(baseline(scale.mode, name="theirs", package=package)(right), case(), "cpu", budget_s=1e-9, rounds=1)
        assert row.version == version


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (None, None),
        (Unsupported("too wide"), ("skipped", "too wide")),
        (ModuleNotFoundError("No module named 'one'"), ("absent", "No module named 'one'")),
        (TimeoutError("late"), ("no time", "late")),
        (KeyError("x"), ("error", "KeyError: 'x'")),
    ],
)
def test_the_reason_of_a_failed_step_is_reported(raised: Exception | None, told: tuple[str, str] | None) -> None:
    def step() -> None:
        assert not torch.is_grad_enabled()
        if raised is not None:
            raise raised

    assert failure_of(step, {TimeoutError: "no time"}) == told


def test_hints_may_be_left_out() -> None:
    @baseline("attention.mha_prefill", name="sdpa")
    def sdpa(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Tensor:
        if len(cu_seqlens) != 2:
            raise Unsupported("one sequence at a time")
        heads = [t.transpose(0, 1) for t in (q, k, v)]
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return attended.transpose(0, 1).contiguous()

    from tokenspeed_kernel_base.operator import get_operator

    cases = {each.name: each for each in get_operator("mha_prefill").all_cases()}
    assert verify_baseline(sdpa, cases["lengths known on the host"], CPU).reason == "one sequence at a time"
    assert verify_baseline(sdpa, cases["one token, float32"], CPU).status is Status.PASSED
    assert "does not take window_left" in verify_baseline(sdpa, cases["window of the token alone"], CPU).reason


def test_wrong_declarations_are_rejected(scale: Any) -> None:
    with pytest.raises(TypeError, match=r"takes queries, z, which .* lacks; .* x, y, factor, bias, out"):
        baseline(scale.mode, name="theirs")(lambda x, queries, z: x)
    with pytest.raises(KeyError, match="did you mean mha_prefill"):
        baseline("mha_prefil")(lambda q: q)


# -- files --------------------------------------------------------------------------------------------------------------------


def written(folder: Path, text: str) -> Path:
    file = folder / "baselines.py"
    file.write_text(textwrap.dedent(text))
    return file


def test_a_file_declares_baselines_in_order(tmp_path: Path) -> None:
    found = load_baselines(
        written(
            tmp_path,
            """
            from tokenspeed_kernel.workbench.benchmark import baseline

            @baseline("rmsnorm", name="second letter")
            def b(x, weight): return x

            @baseline("norm.rmsnorm")
            def a(x, weight): return x

            again = a
            """,
        )
    )
    assert [each.name for each in found] == ["second letter", "a"]
    assert all(isinstance(each, Baseline) and each.operator == "norm.rmsnorm" for each in found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "declares no baseline"),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library' (.*baselines.py:1)"),
        ("def f(:", "SyntaxError"),
        ("from tokenspeed_kernel.workbench.benchmark import baseline\nbaseline('rmsnorm')(lambda nothing: 1)", "takes nothing"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(BaselineFileError, match=said.replace("(", r"\(").replace(":1)", r":1\)")) as caught:
        load_baselines(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("none.py", "none.txt"):
        with pytest.raises(BaselineFileError, match="is no Python file"):
            load_baselines(tmp_path / name)

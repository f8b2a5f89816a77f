"""Tests that measured results decide the selection, by bucket of sizes, as long as they apply."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel.workbench.tuning import Candidate, TrialStatus, search, tune_case
from tokenspeed_kernel.workbench.tuning.search import by_merit
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import (
    kernel_override,
)
from tokenspeed_kernel_base.spec import RegistrationError

# -- the whole loop ------------------------------------------------------------------------------------------------------------


def test_a_tuned_choice_flips_by_bucket_survives_a_restart_and_goes_with_the_source(lab: Any, tmp_path: Path) -> None:
    lab.register("steady", "growing")
    assert [lab.serving(rows) for rows in (2, 64)] == ["steady", "steady"], "by priority"
    lab.tune_all()
    assert [lab.serving(rows) for rows in (2, 64, 33, 3)] == ["growing", "steady", "steady", "steady"]
    explanation = str(lab.lab.explain(torch.ones(2, 4)))
    assert re.search(r"^-> growing +tuned: [\d.]+ us vs [\d.]+, priority 9$", explanation, re.MULTILINE), explanation

    assert lab.in_a_new_process()[0] == "growing steady steady"

    clock = lab.folder / "lab_clock.py"
    clock.write_text(clock.read_text() + "# a helper of the kernels changed\n")
    served, note, entries = lab.in_a_new_process()
    assert served == "steady steady steady"
    assert "is not used: the source of growing changed" in note or "the source of steady changed" in note
    assert entries == "2", "stale entries stay until they are cleared or measured again"
    assert lab.in_a_new_process("tune")[0] == "growing steady steady"


def test_the_call_runs_the_tuned_kernel(lab: Any) -> None:
    lab.register("steady", "growing", "settable")
    lab.tune_all()
    x = torch.ones(2, 4)
    lab.calls().clear()
    assert torch.equal(lab.lab(x), x + 1)
    assert torch.equal(lab.lab(x), x + 1)
    assert lab.calls() == [("growing", {})] * 2
    assert lab.lab.bind(torch.ones(2, 4)) is lab.lab.bind(torch.ones(2, 4)), "the same decision"


def test_a_configuration_reaches_the_kernel_and_the_explanation(lab: Any) -> None:
    lab.register("settable")
    (outcome,) = tune_case("testing.lab", lab.lab.operator.all_cases()[0], "cpu", budget_s=1.0)
    assert outcome.untuned == "settable"
    assert dict(outcome.results[0].config) == {"wait": 300, "wrong": False}
    assert outcome.gain is not None
    assert outcome.gain > 2
    right = {"kernel": "settable", "config": {"wait": 300, "wrong": True}}
    (wrong,) = [t for t in outcome.trials if {"kernel": t.kernel, "config": dict(t.config)} == right]
    if wrong.status is TrialStatus.FAILED:  # noise could make the right configuration faster, which is then verified instead
        assert wrong.reason.startswith("verify: failed")
    x = torch.ones(2, 4)
    lab.calls().clear()
    assert torch.equal(lab.lab(x), x + 1)
    assert lab.calls() == [("settable", {"wait": 300, "wrong": False})]
    explanation = lab.lab.explain(x)
    assert dict(explanation.verdicts[0].config) == {"wait": 300, "wrong": False}
    reason = explanation.verdicts[0].reason
    assert "tuned: " in reason
    assert " vs " in reason
    assert "(wait=300, wrong=False)" in reason
    assert explanation.to_dict()["candidates"][0]["config"] == {"wait": 300, "wrong": False}


def test_a_wrong_configuration_never_wins(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register_kernel(
        "testing", "lab", name="settable", solution="lab", signatures=None, traits={"width": any},
        tunables={"wait": [300], "wrong": [True]},
    )("lab_kernels:settable")  # fmt: skip
    (outcome,) = tune_case("testing.lab", lab.lab.operator.all_cases()[0], "cpu", budget_s=0.5)
    assert [dict(result.config) for result in outcome.results] == [{}], "its own choice, although that is slower"
    assert [t.status for t in outcome.trials] == [TrialStatus.MEASURED, TrialStatus.FAILED]
    assert "verify: failed" in outcome.trials[1].reason


def test_a_configuration_can_be_forced(lab: Any) -> None:
    lab.register("steady", "settable")
    x = torch.ones(2, 4)
    lab.calls().clear()
    with kernel_override("testing", "lab", "settable", config={"wait": 1000, "wrong": False}):
        lab.lab(x)
        lab.lab(x, override="settable")
        assert "override" in str(lab.lab.explain(x))
    with kernel_override("testing", "lab", "settable", config={}):
        lab.lab(x)
    lab.lab(x, override="settable")
    waits = [values["wait"] for _, values in lab.calls()]
    assert waits == [1000, 1000, 3000, 3000]
    for wrong in ({"wait": 5, "wrong": False}, {"wait": 300}, {"wait": True, "wrong": False}):
        with (
            pytest.raises(ValueError, match="a configuration of settable"),
            kernel_override("testing", "lab", "settable", config=wrong),
        ):
            pass
    with pytest.raises(ValueError, match="steady has no tunables"), kernel_override("testing", "lab", "steady", config={"wait": 1}):
        pass


def test_an_override_runs_with_its_tuned_configuration(lab: Any) -> None:
    lab.register("steady", "growing", "settable")
    lab.tune_all(2.0)
    lab.calls().clear()
    lab.lab(torch.ones(64, 4), override="settable")
    assert [values["wait"] for _, values in lab.calls()] == [300]


def test_other_sizes_of_a_bucket_may_refuse_a_configuration(lab: Any) -> None:
    def only_even(request: Any, configuration: Any) -> str | None:
        return "an odd number of rows" if request.sizes["rows"] % 2 else None

    register_kernel(
        "testing", "lab", name="settable", solution="lab", signatures=None, traits={"width": any},
        tunables={"wait": [300], "wrong": [False]}, tunable_if=only_even,
    )("lab_kernels:settable")  # fmt: skip
    tune_case("testing.lab", lab.lab.operator.all_cases()[1], "cpu", budget_s=0.5)
    tables_say = {rows: lab.lab.explain(torch.ones(rows, 4)).verdicts[0] for rows in (64, 63)}
    assert dict(tables_say[64].config) == {"wait": 300, "wrong": False}
    assert dict(tables_say[63].config) == {}
    assert "runs as untuned: an odd number of rows" in tables_say[63].reason


# -- searching -----------------------------------------------------------------------------------------------------------------


def spending(lab: Any, us: float, seen: list[int]) -> Callable[[], None]:
    def call() -> None:
        seen.append(1)
        lab.spend(us)

    return call


def test_the_hopeless_are_stopped_early(lab: Any) -> None:
    seen: dict[int, list[int]] = {us: [] for us in (20_000, 300, 330, 600, 700, 800)}
    candidates = [Candidate("k", {"us": us} if us != 20_000 else {}, spending(lab, us, calls)) for us, calls in seen.items()]
    trials = search([candidates[1], *candidates[2:], candidates[0]], torch.device("cpu"), 0.4)
    best = by_merit(trials)[0]
    assert best.config in ({"us": 300}, {"us": 330})
    assert len(seen[20_000]) == 3
    assert trials[-1].status is TrialStatus.HOPELESS
    assert "times the best in the first calls" in trials[-1].reason
    assert len(seen[800]) < len(seen[300]) / 1.5, "the slower half goes after the first round"


def test_time_is_bounded_and_own_choices_always_seen(lab: Any) -> None:
    seen: list[list[int]] = [[] for _ in range(6)]
    candidates = [Candidate("k", {"n": i} if i else {}, spending(lab, 30_000, calls)) for i, calls in enumerate(seen)]
    trials = search([candidates[0], *candidates[1:]], torch.device("cpu"), 0.1)
    assert trials[0].status is TrialStatus.MEASURED
    assert TrialStatus.NOT_REACHED in {t.status for t in trials}
    assert all(not calls for calls, trial in zip(seen, trials, strict=True) if trial.status is TrialStatus.NOT_REACHED)


def test_a_candidate_that_raises_has_failed(lab: Any) -> None:
    def broken() -> None:
        raise RuntimeError("out of resources: shared memory\nRequired: 1")

    trials = search([Candidate("k", {}, spending(lab, 200, [])), Candidate("k", {"n": 1}, broken)], torch.device("cpu"), 0.1)
    assert trials[1].status is TrialStatus.FAILED
    assert trials[1].reason == "RuntimeError: out of resources: shared memory"
    assert by_merit(trials) == [trials[0]]


def test_its_own_choice_wins_unless_something_is_clearly_quicker() -> None:
    from tokenspeed_kernel.workbench.tuning import Trial

    own, near, far = (
        Trial("k", config, TrialStatus.MEASURED, us) for config, us in (({}, 101.0), ({"n": 1}, 100.0), ({"n": 2}, 90.0))
    )
    assert by_merit([own, near]) == [own, near]
    assert by_merit([own, near, far]) == [far, near, own]


# -- declarations --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tunables", "message"),
    [
        ({"wait": []}, "must have one or more values"),
        ({"wait": "ab"}, "must be a list"),
        ({"wait": [torch.float32]}, "of bool, int, float, str or None"),
        ({"a b": [1]}, "must be the name of a keyword"),
        ([1], "must be a dict"),
        ({"nothing": [1]}, "it does not take nothing"),
        ({"x": [1]}, "it does not take x"),
    ],
)
def test_wrong_tunables(lab: Any, tunables: Any, message: str) -> None:
    from lab_kernels import settable  # type: ignore[import-not-found]

    with pytest.raises(RegistrationError, match=message):
        register_kernel("testing", "lab", name="settable", solution="lab", signatures=None, tunables=tunables)(settable)


def test_tunables_are_checked_when_a_kernel_is_loaded(lab: Any) -> None:
    register_kernel("testing", "lab", name="steady", solution="lab", signatures=None, traits={"width": any}, tunables={"n": [1]})(
        "lab_kernels:steady"
    )
    with pytest.raises(RegistrationError, match=r"tunable as a keyword.*does not take n"):
        KernelRegistry.get().get_impl("steady")


@pytest.mark.nvidia
def test_candidates_are_timed_in_graphs_where_they_can_be_captured() -> None:
    device = torch.device("cuda")
    x = torch.ones(1 << 20, device=device)
    waits = Candidate("waits", {}, lambda: (x + 1, torch.cuda.synchronize()))
    trials = search([Candidate("launches", {}, lambda: x + 1), waits], device, 1.0)
    assert [trial.status for trial in trials] == [TrialStatus.MEASURED] * 2
    assert trials[0].uncaptured == ""
    assert "captur" in trials[1].uncaptured
    assert trials[0].to_dict().keys() ^ trials[1].to_dict().keys() == {"uncaptured"}
    assert trials[0].us is not None
    assert trials[0].us < 30, "a launch from Python is not in it"

"""Tests selection: effects of overrides, policies and measured results, and when decisions are invalidated.
`test_selection_oracle.py` compares whole selections. Here each rule is tested alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base import measured, memo, selection
from tokenspeed_kernel_base.config import ConfigurationError
from tokenspeed_kernel_base.platform import CapabilityRequirement, PlatformInfo, named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelLoadWarning, KernelRegistry, PriorityClashWarning
from tokenspeed_kernel_base.selection import (
    NoKernelFoundError,
    SelectedKernel,
    SelectionObjective,
    SelectionPolicy,
    SelectionStrategy,
    consider,
    explain_selection,
    kernel_override,
    make_request,
    select_kernel,
    selection_policy,
    set_selection_policy,
    warmup_selection,
)
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_base.spec import KernelSpec

X = format_signature(x=dense_tensor_format(torch.bfloat16))
BF16 = format_signatures("x", "dense", {torch.bfloat16})
NVIDIA = CapabilityRequirement(vendors=frozenset({"nvidia"}))


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU the current platform, even on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def add(registry: KernelRegistry) -> Callable[..., Callable[..., Any]]:
    """Returns a function that registers a kernel of ``norm.scale`` and returns the kernel's function. Without further declarations,
    the kernel is eligible for every call on a CPU."""

    def register(name: str, **facts: Any) -> Callable[..., Any]:
        def impl(*args: Any) -> str:
            return name

        defaults: dict[str, Any] = {"solution": "torch", "format_signatures": BF16, "origin": f"test:{name}"}
        registry.register(KernelSpec(name, facts.pop("family", "norm"), facts.pop("mode", "scale"), **{**defaults, **facts}), impl)
        return impl

    return register


@pytest.fixture
def three(add: Callable[..., Any]) -> None:
    add("fast", priority=12, solution="triton", traits={"sinks": any})
    add("plain", priority=4)
    add("gpu", priority=16, capability=NVIDIA)


def chosen(**request: Any) -> str:
    return select_kernel("norm", "scale", X, **request).name


# -- what is chosen ---------------------------------------------------------------------------------------------------------------


def test_priority_decides_among_kernels_that_can(three: None, hopper: PlatformInfo) -> None:
    assert chosen() == "fast"
    assert chosen(platform=hopper) == "gpu"
    assert chosen(solution="torch") == "plain"


def test_the_selected_kernel_is_callable_and_stable(add: Callable[..., Any]) -> None:
    impl = add("one")
    first = select_kernel("norm", "scale", X, traits={"head_dim": 64, "sinks": False})
    assert isinstance(first, SelectedKernel)
    assert first.impl is impl
    assert first(1, 2) == "one"
    assert select_kernel("norm", "scale", X, traits={"sinks": False, "head_dim": 64}) is first


def test_true_and_one_are_different_requests(add: Callable[..., Any]) -> None:
    add("flag", traits={"t": True})
    assert chosen(traits={"t": True}) == "flag"
    with pytest.raises(NoKernelFoundError, match="t=1 is not True"):
        chosen(traits={"t": 1})


def test_silence_is_not_support(add: Callable[..., Any]) -> None:
    add("silent", priority=19)
    add("able", priority=1, traits={"sinks": {True, False}})
    add("only", priority=2, traits={"sinks": True})
    assert chosen(traits={"sinks": False}) == "silent"
    assert chosen(traits={"sinks": True}) == "only"
    assert chosen() == "silent", "a kernel that exists for a feature does not serve a request that does not know of it"


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ("default", "quick"),
        ("determinism", "exact"),
        ("portability", "exact"),
        ("debug", "reference"),
        (SelectionObjective.DETERMINISM, "exact"),
    ],
)
def test_objectives(add: Callable[..., Any], hopper: PlatformInfo, objective: Any, expected: str) -> None:
    add("quick", priority=16, capability=CapabilityRequirement(vendors={"nvidia"}, required_features={"tma"}))  # type: ignore[arg-type]
    add("wide", priority=12, capability=NVIDIA)
    add("exact", priority=4, tags={"determinism"})
    add("reference", priority=0)
    assert chosen(platform=hopper, objective=objective) == expected


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float8_e4m3fn, "plain"), (torch.bfloat16, "quick")])
def test_accuracy_avoids_weights_in_fp8(add: Callable[..., Any], dtype: torch.dtype, expected: str) -> None:
    add("quick", priority=16, tags={"fp8_weights"}, format_signatures=None)
    add("plain", priority=4, format_signatures=None)
    signature = format_signature(q=dense_tensor_format(torch.bfloat16), k_cache=dense_tensor_format(dtype))
    assert select_kernel("norm", "scale", signature).name == "quick"
    assert select_kernel("norm", "scale", signature, objective="accuracy").name == expected


def test_an_unknown_objective_names_the_known_ones(three: None) -> None:
    with pytest.raises(ValueError, match="'fastest' is not a valid SelectionObjective"):
        chosen(objective="fastest")


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_deprecated_objectives_mean_the_default(three: None, objective: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"the objective '{objective}' is deprecated.*'default'"):
        assert chosen(objective=objective) == chosen()


def test_ties_are_reported(add: Callable[..., Any]) -> None:
    add("b")
    with pytest.warns(PriorityClashWarning):
        add("a")
    assert chosen() == "a"
    assert "ties with b (test:b) and precedes it by name" in explain_selection("norm", "scale", X)


# -- measurements, policy ---------------------------------------------------------------------------------------------------------


class Times:
    """A source of measured results: gives the microseconds of each kernel of one operator."""

    def __init__(self, **times: float) -> None:
        self.times = times

    def has_results(self, operator: str, platform: PlatformInfo) -> bool:
        return operator == "norm.scale"

    def find(self, operator: str, *request: Any) -> measured.Found:
        return measured.Found({name: measured.Tuned(us) for name, us in self.times.items()} if operator == "norm.scale" else {})


def test_measurements_precede_everything_but_overrides(add: Callable[..., Any]) -> None:
    add("fast", priority=12, tags={"determinism"})
    add("slow", priority=4)
    add("unmeasured", priority=19)
    assert chosen(objective="determinism") == "fast"
    measured.use(Times(fast=7.0, slow=3.0))
    assert chosen(objective="determinism") == "slow", "the decision made before was forgotten"
    assert "tuned: 3 us" in explain_selection("norm", "scale", X)
    assert chosen(override="fast") == "fast"
    measured.use(None)
    assert chosen() == "unmeasured"


def test_measurements_do_not_open_gates(three: None) -> None:
    measured.use(Times(gpu=1.0))
    assert chosen() == "fast"


def test_the_policys_objective_holds_where_a_request_has_none(three: None) -> None:
    set_selection_policy(SelectionPolicy(objective=SelectionObjective.DEBUG))
    assert chosen() == "plain"
    assert chosen(objective="default") == "fast"
    set_selection_policy(None)
    assert chosen() == "fast"


def test_strategies_by_operator() -> None:
    policy = SelectionPolicy(op_strategies={("norm", "scale"): SelectionStrategy.AUTOTUNE})
    set_selection_policy(policy)
    assert selection_policy().get_strategy("norm", "scale") is SelectionStrategy.AUTOTUNE
    assert selection_policy().get_strategy("norm", "other") is SelectionStrategy.HEURISTIC


def test_the_objective_from_the_settings(three: None, settings_from: Any, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('objective = "debug"\n')
    settings_from(CONFIG=str(file))
    assert chosen() == "plain"
    file.write_text('objective = "fastest"\n')
    settings_from()
    with pytest.raises(ConfigurationError, match=r"objective must be one of .*got 'fastest' .*toml"):
        chosen()


# -- overrides --------------------------------------------------------------------------------------------------------------------


def test_an_override_passes_by_traits_and_priority(three: None) -> None:
    assert chosen(override="plain") == "plain"
    assert chosen(override="plain", traits={"sinks": True}) == "plain"
    text = explain_selection("norm", "scale", X, override="plain", traits={"sinks": True})
    assert "override despite traits (does not declare the flag sinks" in text


def test_an_override_does_not_pass_platform_and_formats(add: Callable[..., Any], three: None) -> None:
    add("half", priority=1, format_signatures=format_signatures("x", "dense", {torch.float16}))
    with pytest.raises(NoKernelFoundError, match=r"gpu, which fails the platform gate: .*NVIDIA"):
        chosen(override="gpu")
    with pytest.raises(NoKernelFoundError, match=r"half, which fails the formats gate: x: bfloat16 .*float16"):
        chosen(override="half")
    with pytest.raises(NoKernelFoundError, match=r"fast, .*solution gate: is of solution triton, the request is for torch"):
        chosen(override="fast", solution="torch")


def test_an_override_of_nothing_known(add: Callable[..., Any], three: None) -> None:
    add("elsewhere", mode="other")
    with pytest.raises(NoKernelFoundError, match=r"override=: no kernel .* fsat; .* mean fast\?"):
        chosen(override="fsat")
    with pytest.raises(NoKernelFoundError, match=r"elsewhere, which implements norm.other, not norm.scale"):
        chosen(override="elsewhere")
    add("fasta", mode="other", priority=4)
    with pytest.raises(NoKernelFoundError, match=r"implements norm.other, not norm.scale; .* fast\?"):
        chosen(override="fasta")
    with pytest.raises(NoKernelFoundError, match=r"no kernel named fasty; did you mean fast\?"):
        chosen(override="fasty")
    with pytest.raises(NoKernelFoundError, match=r"no kernel named triton; .*solution triton"):
        chosen(override="triton")


def test_a_solution_that_the_operator_has_not(add: Callable[..., Any], three: None) -> None:
    add("elsewhere", mode="other", solution="tritom")
    with pytest.raises(NoKernelFoundError, match=r"no kernel .* solution tritom; .* mean triton\?"):
        chosen(solution="tritom")
    with pytest.raises(NoKernelFoundError, match=r"has solution fast; it is .*solution triton"):
        chosen(solution="fast")
    with pytest.raises(NoKernelFoundError, match=r"no kernel of this operator has solution qqq\n"):
        chosen(solution="qqq")


def test_kernel_override_holds_inside_the_block(three: None) -> None:
    with kernel_override("norm", "scale", "plain"):
        assert chosen() == "plain"
        assert chosen(override="fast") == "fast", "the call's own override is nearer"
        with kernel_override("norm", "scale", "fast"):
            assert chosen() == "fast"
        assert chosen() == "plain"
    assert chosen() == "fast"


def test_kernel_override_is_strict(add: Callable[..., Any], three: None) -> None:
    add("elsewhere", mode="other")
    with pytest.raises(KeyError, match=r"no kernel named fsat; did you mean fast\?"), kernel_override("norm", "scale", "fsat"):
        pass
    with (
        pytest.raises(ValueError, match=r"elsewhere implements norm.other, not norm.scale"),
        kernel_override("norm", "scale", "elsewhere"),
    ):
        pass
    with (
        kernel_override("norm", "scale", "gpu"),
        pytest.raises(NoKernelFoundError, match=r"kernel_override requests gpu, which fails the platform"),
    ):
        chosen()
    assert chosen() == "fast"


def test_kernel_override_ends_when_the_block_raises(three: None) -> None:
    with pytest.raises(RuntimeError), kernel_override("norm", "scale", "plain"):
        raise RuntimeError
    assert chosen() == "fast"


def test_kernel_override_is_of_one_thread(three: None) -> None:
    ready, done = threading.Event(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        ready.wait()
        seen.append(chosen())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with kernel_override("norm", "scale", "plain"):
        ready.set()
        done.wait()
        assert chosen() == "plain"
    thread.join()
    assert seen == ["fast"]


def test_kernel_override_is_of_one_task(three: None) -> None:
    async def wanting(name: str) -> list[str]:
        seen = []
        with kernel_override("norm", "scale", name):
            for _ in range(5):
                seen.append(chosen())
                await asyncio.sleep(0)
        return seen

    async def wanting_none() -> list[str]:
        seen = []
        for _ in range(5):
            seen.append(chosen())
            await asyncio.sleep(0)
        return seen

    async def all_at_once() -> list[list[str]]:
        return await asyncio.gather(wanting("plain"), wanting("fast"), wanting_none())

    assert asyncio.run(all_at_once()) == [["plain"] * 5, ["fast"] * 5, ["fast"] * 5]


def test_a_task_that_outlives_the_block_loses_the_override(three: None) -> None:
    """A task inherits the context in which it is created, here a ``with`` block with an override. After the block has ended, the
    override must not affect the task's calls. Decisions of these calls must not be remembered for other callers."""

    async def late(go: asyncio.Event) -> str:
        await go.wait()
        return chosen()

    async def main() -> tuple[str, str]:
        go = asyncio.Event()
        with kernel_override("norm", "scale", "plain"):
            task = asyncio.create_task(late(go))
            await asyncio.sleep(0)
        go.set()
        return await task, chosen()

    assert asyncio.run(main()) == ("fast", "fast")


def test_an_inherited_context_keeps_the_outer_override(three: None) -> None:
    with kernel_override("norm", "scale", "plain"):
        with kernel_override("norm", "scale", "fast"):
            inherited = contextvars.copy_context()
            assert inherited.run(chosen) == "fast"
        assert inherited.run(chosen) == "plain"
    assert inherited.run(chosen) == "fast"


def test_override_by_environment_and_file(three: None, settings_from: Any, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[overrides]\n"norm.scale" = "plain"\n')
    settings_from(CONFIG=str(file))
    assert chosen() == "plain"
    assert f"override plain ({file}: overrides.norm.scale)" in explain_selection("norm", "scale", X)
    settings_from(OVERRIDE_NORM_SCALE="gpu")
    with pytest.raises(NoKernelFoundError, match=r"OVERRIDE_NORM_SCALE requests gpu, which fails the platform"):
        chosen()
    with kernel_override("norm", "scale", "fast"):
        assert chosen() == "fast"
    settings_from(OVERRIDE_NORM_SCALE="nothing")
    with pytest.raises(NoKernelFoundError, match="OVERRIDE_NORM_SCALE: no kernel named nothing"):
        chosen()


def test_the_gates_are_listed_in_the_order_in_which_they_are_tried() -> None:
    tried = re.findall(r'return \(?"(\w+)",', inspect.getsource(selection.gate))
    assert tried == [*selection.GATES]


# -- explaining -------------------------------------------------------------------------------------------------------------------


def test_the_error_lists_every_candidate(add: Callable[..., Any]) -> None:
    add("gpu", capability=NVIDIA)
    add("half", format_signatures=format_signatures("x", "dense", {torch.float16}), priority=3)
    add("small", traits={"head_dim": {32, 64}}, priority=2)
    add("silent", priority=1)
    with pytest.raises(NoKernelFoundError) as caught:
        chosen(traits={"head_dim": 128, "sinks": True}, objective="determinism")
    text = str(caught.value)
    for line in (
        "no kernel serves norm.scale on ",
        "objective determinism",
        "formats  x: bfloat16",
        "traits   head_dim=128, sinks=True",
        " x gpu     platform: needs an NVIDIA device, this is a CPU",
        " x half    formats: x: bfloat16 wanted, float16 offered",
        " x small   traits: head_dim=128 is not one of 32, 64; does not declare the flag sinks, which the request sets",
        " x silent  traits: does not declare the flag sinks, which the request sets",
    ):
        assert line in text, line
    explanation = caught.value.explanation
    assert explanation is not None
    assert [(v.spec.name, v.gate, v.accepted) for v in explanation.verdicts] == [
        ("gpu", "platform", False),
        ("half", "formats", False),
        ("small", "traits", False),
        ("silent", "traits", False),
    ]


def test_kernels_rejected_for_one_reason_are_listed_together(add: Callable[..., Any]) -> None:
    names = [f"gpu_kernel_with_a_long_name_{index:02}" for index in range(12)]
    for priority, name in enumerate(names):
        add(name, capability=NVIDIA, priority=priority)
    add("silent", priority=12)
    with pytest.raises(NoKernelFoundError) as caught:
        chosen(traits={"sinks": True})
    lines = str(caught.value).splitlines()
    at = lines.index(" x 12 kernels  platform: needs an NVIDIA device, this is a CPU") + 1
    listed = re.findall(r"\w+", " ".join(line for line in lines[at:] if line.startswith("     ")))
    assert sorted(listed) == names, "every candidate is there, in one piece"
    assert " x silent  traits: does not declare the flag sinks, which the request sets" in lines
    assert max(map(len, lines)) <= 100


def test_no_kernel_at_all(registry: KernelRegistry) -> None:
    with pytest.raises(NoKernelFoundError, match="no kernel is registered for this operator"):
        chosen()


def test_explanations_as_data(three: None) -> None:
    explanation = consider(make_request("norm", "scale", X, traits={"sinks": True}))
    data = explanation.to_dict()
    assert data["chosen"] == "fast"
    assert data["traits"] == {"sinks": True}
    assert [(c["name"], c["accepted"], c["gate"]) for c in data["candidates"]] == [
        ("fast", True, None),
        ("gpu", False, "platform"),
        ("plain", False, "traits"),
    ]
    assert str(explanation) == explain_selection("norm", "scale", X, traits={"sinks": True})
    assert "-> fast" in str(explanation)


def test_explaining_never_raises_for_want_of_a_kernel(three: None) -> None:
    text = explain_selection("norm", "scale", X, override="gpu")
    assert "problem  override= requests gpu, which fails the platform gate" in text
    assert "->" not in text


def test_verbose_logs_each_new_decision_once(three: None, settings_from: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings_from(VERBOSE="1")
    with caplog.at_level(logging.INFO, "tokenspeed_kernel"):
        chosen()
        chosen()
    assert caplog.text.count("-> fast") == 1
    settings_from(VERBOSE="0")
    with caplog.at_level(logging.INFO, "tokenspeed_kernel"):
        chosen(traits={"head_dim": 1})
    assert caplog.text.count("-> fast") == 1


# -- forgetting -------------------------------------------------------------------------------------------------------------------


def test_changes_invalidate_decisions(add: Callable[..., Any], registry: KernelRegistry, hopper: PlatformInfo) -> None:
    add("plain", priority=4)
    assert chosen() == "plain"
    add("better", priority=8)
    assert chosen() == "better"
    registry.unregister("better")
    assert chosen() == "plain"
    add("gpu", priority=16, capability=NVIDIA)
    with use_platform(hopper) as platform:
        assert platform is hopper
        assert chosen() == "gpu"
    assert chosen() == "plain"


def test_a_decision_that_was_being_made_meanwhile_is_not_remembered(
    add: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add("plain", priority=4)
    really = selection.consider

    def interrupted(*args: Any) -> Any:
        explanation = really(*args)
        add("better", priority=8)
        monkeypatch.setattr(selection, "consider", really)
        return explanation

    monkeypatch.setattr(selection, "consider", interrupted)
    assert chosen() == "plain"
    assert chosen() == "better"


def test_a_kernel_that_goes_while_it_is_chosen(
    add: Callable[..., Any], registry: KernelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    add("plain", priority=4)
    add("going", priority=8)
    really = selection.consider

    def interrupted(*args: Any) -> Any:
        explanation = really(*args)
        monkeypatch.setattr(selection, "consider", really)
        registry.unregister("going")
        return explanation

    monkeypatch.setattr(selection, "consider", interrupted)
    assert chosen() == "plain"


def test_threads_select_while_others_register(add: Callable[..., Any], registry: KernelRegistry) -> None:
    add("plain", priority=4)
    stop, problems = threading.Event(), []

    def call() -> None:
        while not stop.is_set():
            try:
                name = chosen(traits={"head_dim": 64})
                if name not in ("plain", "coming"):
                    problems.append(name)
            except Exception as error:
                problems.append(repr(error))

    def overriding() -> None:
        while not stop.is_set():
            with kernel_override("norm", "scale", "plain"):
                if chosen() != "plain":
                    problems.append("override lost")

    threads = [threading.Thread(target=f) for f in (call, call, overriding)]
    for thread in threads:
        thread.start()
    for _ in range(150):
        add("coming", priority=8)
        if chosen() != "coming":
            problems.append("stale decision after register")
        registry.unregister("coming")
        if chosen() != "plain":
            problems.append("stale decision after unregister")
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []


# -- pretended platforms, warm-up -------------------------------------------------------------------------------------------------


def test_a_pretended_platform_never_launches(add: Callable[..., Any], settings_from: Any) -> None:
    add("gpu", priority=16, capability=NVIDIA)
    add("plain")
    selected = select_kernel("norm", "scale", X, platform=named_platform("sm_90"))
    assert selected.name == "gpu"
    with pytest.raises(RuntimeError, match=r"gpu was selected for NVIDIA H100 .*pretended"):
        selected()
    settings_from(PLATFORM="gfx950")
    with pytest.raises(RuntimeError, match=r"plain was selected for AMD .*MI355X \[gfx950\]"):
        select_kernel("norm", "scale", X)()


def test_a_pretended_platform_imports_nothing(registry: KernelRegistry) -> None:
    registry.register(
        KernelSpec("lazy", "norm", "scale", solution="torch", format_signatures=None, origin="here"), "absent_module:kernel"
    )
    assert select_kernel("norm", "scale", X, platform=named_platform("cpu")).name == "lazy"
    assert registry.is_lazy("lazy")


def test_an_emulated_platform_launches(add: Callable[..., Any], hopper: PlatformInfo) -> None:
    add("gpu", capability=NVIDIA)
    assert select_kernel("norm", "scale", X, platform=dataclasses.replace(hopper, emulated=True))() == "gpu"


def test_warming_up_named_requests(three: None) -> None:
    assert warmup_selection([("norm", "scale", X, None), ("norm", "scale", X, {"sinks": True})]) == ["fast", "fast"]
    assert len(selection._decisions) == 2
    with pytest.raises(NoKernelFoundError):
        warmup_selection([("norm", "absent", X, None)])


def test_warming_up_everything(three: None, registry: KernelRegistry) -> None:
    registry.register(KernelSpec("lazy", "norm", "other", solution="torch", format_signatures=None, origin="here"), "json:dumps")
    registry.register(
        KernelSpec("broken", "norm", "other", solution="b", format_signatures=None, priority=1, origin="here"), "absent_module:k"
    )
    with pytest.warns(KernelLoadWarning):
        assert warmup_selection() == ["lazy", "fast", "plain"]
    assert not registry.is_lazy("lazy")


def test_decisions_are_bounded(add: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MAX_ENTRIES", 8)
    add("one")
    for head_dim in range(50):
        assert chosen(traits={"head_dim": head_dim}) == "one"
        assert len(selection._decisions) <= 8

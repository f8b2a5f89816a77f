"""Tests that a failed step changes nothing: whichever call fails, every request gets the same tokens as without the failure."""

from __future__ import annotations

import itertools
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from gpt_oss_models import MODES, YARN, engine_state, make_config, random_prompts, tensors_of

import gpt_oss
from gpt_oss import Completion, Engine, Event, GptOss, PagedKVCache, Request, Sampling
from gpt_oss.batch import Phase

PACKAGE = str(Path(gpt_oss.__file__).parent)
LENGTHS = (19, 3, 1, 11, 6)
SAMPLINGS = (
    Sampling(),
    Sampling(0.8, seed=1, frequency_penalty=1.5),
    Sampling(1.2, top_k=20, seed=2),
    Sampling(1.0, top_p=0.9, seed=3),
    Sampling(repetition_penalty=1.5, logit_bias={4: 1.0}),
)


@pytest.fixture(scope="module")
def model() -> GptOss:
    config = make_config(rope=YARN)
    return GptOss(config, tensors_of(config), torch.float32)


@pytest.fixture(scope="module")
def requests(model: GptOss) -> list[Request]:
    prompts = random_prompts(LENGTHS, model.config.vocab_size)
    return [Request(p, 3 + i, s, keep_logits=True) for i, (p, s) in enumerate(zip(prompts, SAMPLINGS, strict=True))]


def make_engine(model: GptOss, mode: str = "eager") -> Engine:
    """Returns an engine with so few prefill tokens and pages that prompts are chunked, and requests wait for other requests'
    pages.
    """
    return Engine(model, PagedKVCache(model.config, 12, 4, torch.float32), prefill_tokens=9, max_sequences=4, **MODES[mode])


class Failing:
    """Wraps the operators, and makes one call raise an error, before or after the operator has run.

    ``at`` selects the call: the number of calls before it, or the operator's name.
    """

    def __init__(self, ops: Any, error: BaseException, after: bool) -> None:
        self._ops, self.error, self.after = ops, error, after
        self.calls = 0
        self.at: int | str | None = None
        self.failed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        if not hasattr(function, "operator"):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            fails = self.at in (self.calls, name)
            self.calls += 1
            result = function(*args, **kwargs) if self.after or not fails else None
            if fails:
                self.failed.add(name)
                raise self.error
            return result

        return call

    def set(self, at: int | str | None) -> None:
        self.calls, self.at = 0, at


def attempt(engine: Engine) -> tuple[list[Event], BaseException | None]:
    """Runs a step. Returns its events and None, or no events and the exception that the step raised."""
    try:
        return engine.step(), None
    except BaseException as error:
        return [], error


def collect(completions: dict[int, Completion], events: list[Event]) -> None:
    for event in events:
        completions[event.request].add(event)


def check_same(completions: dict[int, Completion], expected: list[Completion]) -> None:
    for completion, wanted in zip(completions.values(), expected, strict=True):
        assert completion.tokens == wanted.tokens
        assert completion.finish_reason == wanted.finish_reason
        assert torch.equal(torch.stack(completion.logits), torch.stack(wanted.logits))


ERRORS = [
    RuntimeError("a kernel failed"),
    torch.OutOfMemoryError("out of memory"),
    KeyboardInterrupt(),
    ValueError("a check failed"),
]
FAILURES = [
    *itertools.product(ERRORS, [False, True], ["eager"]),
    *itertools.product(ERRORS[::2], [True], [mode for mode in MODES if mode != "eager"]),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("error", "after", "mode"), FAILURES, ids=[f"{type(e).__name__} {'after' if a else 'before'}, {m}" for e, a, m in FAILURES]
)
def test_every_operator_call_of_every_step_fails_once(
    model: GptOss, requests: list[Request], monkeypatch: pytest.MonkeyPatch, error: BaseException, after: bool, mode: str
) -> None:
    expected = make_engine(model, mode).generate(requests)
    failing = Failing(model.ops, error, after)
    monkeypatch.setattr(model, "ops", failing)
    engine = make_engine(model, mode)
    completions = {engine.add(request): Completion(request) for request in requests}
    for _ in range(100):
        if engine.idle:
            break
        before = engine_state(engine)
        for at in itertools.count():
            failing.set(at)
            events, raised = attempt(engine)
            if raised is None:
                assert at == failing.calls, "the step went well because every one of its calls had failed before"
                collect(completions, events)
                break
            assert raised is error
            assert engine_state(engine) == before
    assert engine.idle
    check_same(completions, expected)
    assert all(engine.steps[phase] for phase in Phase)
    assert engine.cache.allocator.available == engine.cache.allocator.total
    assert failing.failed == {
        "adjust_logits",
        "argmax",
        "mha_decode_with_kvcache",
        "mha_extend_with_kvcache",
        "mha_prefill",
        "mha_with_kvcache",
        "mm",
        "moe_apply",
        "positions_to_slots",
        "rmsnorm",
        "rmsnorm_moe_topk",
        "rmsnorm_qkv_rope",
        "sample_top_k_top_p",
    }


def test_requests_come_and_go_between_a_failure_and_the_next_step(
    model: GptOss, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {number: make_engine(model).generate([request])[0].tokens for number, request in enumerate(requests)}
    failing = Failing(model.ops, RuntimeError("a kernel failed"), after=True)
    monkeypatch.setattr(model, "ops", failing)
    engine = make_engine(model)
    found: dict[int, list[int]] = {}
    queue = list(requests)
    failures = 0
    for name in itertools.islice(itertools.cycle(["argmax", "sample_top_k_top_p", "moe_apply"]), 200):
        if queue:
            engine.add(queue.pop(0))
        elif engine.idle:
            break
        failing.set(name)
        events, raised = attempt(engine)
        if raised is not None:
            assert raised is failing.error
            failures += 1
            failing.set(None)
            if name == "moe_apply" and len(queue) == 2:
                engine.cancel(2)  # without the failure, the step would have started this request
            events = engine.step()
        for event in events:
            found.setdefault(event.request, []).append(event.token)
    assert engine.idle
    assert failures > 5
    assert found == {number: tokens for number, tokens in expected.items() if number != 2}
    assert engine.cache.allocator.available == engine.cache.allocator.total


@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("start", [Engine.generate, lambda *arguments: list(Engine.stream(*arguments))], ids=["generate", "stream"])
def test_generate_and_stream_leave_the_engine_idle(
    model: GptOss,
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., object],
    error: BaseException,
) -> None:
    engine = make_engine(model)
    failing = Failing(model.ops, error, after=False)
    with monkeypatch.context() as patch:
        patch.setattr(model, "ops", failing)
        failing.set(40)  # a call in about the second step
        with pytest.raises(type(error)):
            start(engine, requests)
    assert engine.idle
    assert engine.cache.allocator.available == engine.cache.allocator.total
    expected = make_engine(model).generate(requests)
    assert [completion.tokens for completion in engine.generate(requests)] == [completion.tokens for completion in expected]


def test_a_stream_that_fails_cancels_only_what_it_queued(
    model: GptOss, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_engine(model).generate(requests[:1])[0].tokens
    engine = make_engine(model)
    earlier = engine.add(requests[0])
    with monkeypatch.context() as patch:
        failing = Failing(model.ops, RuntimeError("a kernel failed"), after=False)
        patch.setattr(model, "ops", failing)
        failing.set(3)
        with pytest.raises(RuntimeError, match="a kernel failed"):
            next(engine.stream(requests[1:]))
    events = []
    while not engine.idle:
        events += engine.step()
    assert [(event.request, event.token) for event in events] == [(earlier, token) for token in expected]


def traced(function: Callable[[], Any], interrupt_at: int | None = None) -> tuple[Any, str]:
    """Calls a function. If ``interrupt_at`` is n, raises KeyboardInterrupt before the n-th line of the package gpt_oss that runs.

    Returns:
        The function's result; or None and the text of the line before which it was interrupted.
    """
    lines, interrupted = 0, ""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines, interrupted
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            lines += 1
            if lines == interrupt_at:
                interrupted = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        return function(), ""
    except KeyboardInterrupt:
        return None, interrupted
    finally:
        sys.settrace(previous)


@pytest.mark.parametrize("mode", ["eager", "static, overlapping"])
@pytest.mark.parametrize("call", ["step", "add", "cancel"])
def test_an_interrupt_at_any_line_finds_all_or_nothing(call: str, mode: str) -> None:
    """An interrupt is raised before each line of the call, one line at a time. A second engine makes each call without interrupts,
    for the expected result."""
    config = make_config(layer_types=("full_attention",))
    model = GptOss(config, tensors_of(config), torch.float32)
    prompts = random_prompts((2, 7), config.vocab_size)
    engine, twin = (Engine(model, PagedKVCache(config, 5, 4, torch.float32), prefill_tokens=6, **MODES[mode]) for _ in range(2))

    def calls_of(e: Engine) -> dict[str, Callable[[], Any]]:
        request = Request(prompts[1], 4, Sampling(repetition_penalty=3.0, frequency_penalty=0.5, logit_bias={1: 0.5}))
        return {"step": e.step, "add": lambda: e.add(request), "cancel": lambda: e.cancel(0)}

    for number, name in enumerate(["add", "step", "step", "add", "step", "cancel", "step", "step", "step"]):
        wanted = calls_of(twin)[name]()
        got: Any = None
        for at in itertools.count(1) if name == call else ():
            before = engine_state(engine)
            got, interrupted = traced(calls_of(engine)[name], at)
            if interrupted and engine_state(engine) == before:
                continue
            # The last line of `step` and `add` returns the result, after the state change. `cancel` returns nothing. Elsewhere, an
            # interrupt must leave the state unchanged.
            assert not interrupted or interrupted.startswith("return "), f"call {number}, line {at}: {interrupted}"
            assert at > 3, "the call was traced"
            break
        else:
            got, interrupted = calls_of(engine)[name](), ""
        if not interrupted:
            assert got == wanted
        assert _told(engine) == _told(twin)


def _told(engine: Engine) -> dict[str, Any]:
    """Returns an engine's state, in a form that can be compared with another engine's state."""
    names = ("_waiting", "_running", "_added", "steps")
    flight = engine._in_flight
    return {
        **{name: getattr(engine, name) for name in names},
        "free": engine.cache.allocator.free_pages,
        "in flight": None if flight is None else (flight.rows, flight.tokens()),
    }

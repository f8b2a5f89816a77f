"""Tests the fast path: remembered calls, what distinguishes two calls, and when values in host memory are checked again."""

from __future__ import annotations

import dataclasses
import inspect
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tokenspeed_kernel_base import fast_path, memo, watch
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.generated import compile_source
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import kernel_override, set_selection_policy


@dataclasses.dataclass(frozen=True)
class Weights:
    main: Tensor
    bias: Tensor | None = None
    blocks: tuple[int, ...] = (1, 32)


@dataclasses.dataclass(frozen=True)
class Plan:
    size: int
    name: str = "plan"


def gathered(
    x: Tensor, lengths: Tensor | None = None, hint: list[int] | None = None, mode: str = "sum", out: Tensor | None = None
) -> Tensor:
    return x + 1


def weighed(x: Tensor, weights: Weights, plan: Plan, blocks: tuple[int, ...] = (1,), out: Tensor | None = None) -> Tensor:
    return x * weights.main


class Log:
    def __init__(self) -> None:
        self.decided: list[str] = []
        self.checked: list[Any] = []
        self.launched: list[str] = []


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def gather(declare: Callable[..., Any], log: Log, monkeypatch: pytest.MonkeyPatch) -> Any:
    function = declare(gathered, formats=("x",), hints=("hint",))

    @function.fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @function.check_values(host=("lengths",))
    def _(check: Checker, x: Tensor, lengths: Tensor | None, hint: list[int] | None) -> None:
        log.checked.append((None if lengths is None else lengths.tolist(), hint))
        check.require(lengths is None or int(lengths.sum()) <= x.shape[0], "lengths", f"at most {x.shape[0]} in sum", lengths)
        check.require(hint is None or lengths is None or hint == lengths.tolist(), "hint", "what lengths says", hint)

    return _observed(function, log)


@pytest.fixture
def weigh(declare: Callable[..., Any], log: Log) -> Any:
    function = declare(weighed, formats=("x",))

    @function.fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    return _observed(function, log)


def _observed(function: Any, log: Log) -> Any:
    """Logs the calls that take the slow path, and the arguments that reach a kernel."""
    op = function.operator
    check = function.operator.check_call

    def check_call(arguments: dict[str, Any], **options: Any) -> Checker:
        log.decided.append(op.mode)
        found: Checker = check(arguments, **options)
        return found

    op.check_call = check_call

    def spy(*args: Any) -> Any:
        log.launched.append(op.mode)
        return op.reference(*args)

    register_kernel("testing", op.mode, name=f"spy_{op.mode}", solution="spy", signatures=None, priority=19)(spy)
    return function


def test_the_second_call_is_not_decided(gather: Any, log: Log) -> None:
    for value in (1.0, 2.0, 3.0):
        assert torch.equal(gather(torch.full((3,), value)), torch.full((3,), value + 1))
    assert len(log.decided) == 1
    assert len(log.launched) == 3


@pytest.mark.parametrize(
    "other",
    [
        lambda f: f(torch.ones(4)),
        lambda f: f(torch.ones(1, 3)),
        lambda f: f(torch.ones(3, dtype=torch.float64)),
        lambda f: f(torch.ones(3), torch.tensor([1])),
        lambda f: f(torch.ones(3), mode="max"),
        lambda f: f(torch.ones(3), out=torch.empty(3)),
        lambda f: f(torch.ones(3), hint=[1]),
        lambda f: f(torch.ones(3), solution="reference"),
        lambda f: f(torch.ones(3), override=f"reference_{f.__name__}"),
        lambda f: f(torch.nn.Parameter(torch.ones(3), requires_grad=False)),
    ],
)
def test_another_description_is_decided_anew(gather: Any, log: Log, other: Callable[[Any], Any]) -> None:
    gather(torch.ones(3))
    other(gather)
    assert len(log.decided) == 2
    other(gather)
    gather(torch.ones(3))
    assert len(log.decided) == 2, "both are remembered"


def test_changes_that_invalidate(gather: Any, log: Log, hopper: Any) -> None:
    from tokenspeed_kernel_base.platform import use_platform

    def decisions() -> int:
        before = len(log.decided)
        gather(torch.ones(3))
        gather(torch.ones(3))
        return len(log.decided) - before

    assert decisions() == 1
    register_kernel("testing", gather.__name__, name="another", solution="x", signatures=None, priority=1)(
        gather.operator.reference
    )
    assert decisions() == 1
    KernelRegistry.get().unregister("another")
    assert decisions() == 1
    set_selection_policy(None)
    assert decisions() == 1
    with use_platform(hopper):
        assert decisions() == 1
    assert decisions() == 1
    with kernel_override("testing", gather.__name__, f"spy_{gather.__name__}"):
        assert decisions() == 2, "nothing is remembered while an override holds for one thread"

    def watcher(call: watch.Call, run: Callable[..., Any]) -> Callable[..., Any]:
        return run

    watch.start(watcher)
    assert decisions() == 2, "a watcher sees every call"
    watch.stop(watcher)
    assert decisions() == 1
    assert decisions() == 0


def test_a_remembered_call_of_a_kernel_that_is_gone(gather: Any, log: Log) -> None:
    gather(torch.ones(3))
    KernelRegistry.get().unregister(f"spy_{gather.__name__}")
    gather(torch.ones(3))
    assert len(log.launched) == 1


def test_descriptions_are_bounded(gather: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MAX_ENTRIES", 5)
    for n in range(1, 20):
        gather(torch.ones(n))
        assert len(gather.caller._memo) <= 5


# -- objects ----------------------------------------------------------------------------------------------------------------------


def test_objects_are_described_by_what_they_hold(weigh: Any, log: Log) -> None:
    x = torch.ones(3)
    weigh(x, Weights(torch.ones(3)), Plan(3))
    weigh(x, Weights(torch.zeros(3)), Plan(3))
    assert len(log.decided) == 1
    weigh(x, SimpleNamespace(main=torch.ones(3)), Plan(3))
    assert len(log.decided) == 1, "any object will do, and attributes with a default may be absent"
    for count, call in enumerate(
        [
            lambda: weigh(x, Weights(torch.ones(1)), Plan(3)),
            lambda: weigh(x, Weights(torch.ones(3).double()), Plan(3)),
            lambda: weigh(x, Weights(torch.ones(3), torch.ones(3)), Plan(3)),
            lambda: weigh(x, Weights(torch.ones(3), blocks=(1, 16)), Plan(3)),
            lambda: weigh(x, Weights(torch.ones(3)), Plan(4)),
            lambda: weigh(x, Weights(torch.ones(3)), Plan(3), (2,)),
        ],
        2,
    ):
        call()
        call()
        assert len(log.decided) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, Plan(1)), "weights must be Weights, got None"),
        ((SimpleNamespace(bias=None), Plan(1)), "weights must be an object with main, got "),
        ((SimpleNamespace(main=3), Plan(1)), "weights.main must be a tensor, got int 3"),
        ((Weights(torch.ones(1), bias="b"), Plan(1)), "weights.bias must be a tensor or None, got str 'b'"),  # type: ignore[arg-type]
        ((Weights(torch.ones(1), blocks=[1]), Plan(1)), r"weights.blocks must be tuple of int, got list \[1\]"),  # type: ignore[arg-type]
        ((Weights(torch.ones(1)), 3), "plan must be Plan, got int 3"),
        ((Weights(torch.ones(1)), None), "plan must be Plan, got None"),
        ((Weights(torch.ones(1)), Plan(1), [1]), r"blocks must be tuple of int, got list \[1\]"),
        ((Weights(torch.ones(1)), Plan(1), ("a",)), r"blocks must be tuple of int, got tuple \('a',\)"),
        ((Weights(torch.ones(1)), Plan(1), ([1],)), r"blocks must be tuple of int, got tuple \(\[1\],\)"),
    ],
)
def test_wrong_objects(weigh: Any, log: Log, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        weigh(torch.ones(3), *arguments)
    assert log.launched == []


# -- stand-ins --------------------------------------------------------------------------------------------------------------------


def test_fake_tensors_are_traced_not_run(gather: Any, log: Log) -> None:
    gather(torch.ones(3))
    with FakeTensorMode():
        fake = torch.ones(3)
        assert isinstance(gather(fake), FakeTensor)
        assert gather(fake).shape == (3,)
        out = torch.empty(3)
        assert gather(fake, out=out) is out
    assert len(log.launched) == 1


def test_fake_tensors_in_objects(weigh: Any, log: Log) -> None:
    with FakeTensorMode():
        assert weigh(torch.ones(3), Weights(torch.ones(3)), Plan(1)).shape == (3,)
    assert log.launched == []


def test_meta_tensors_are_traced_not_run(gather: Any, weigh: Any, log: Log) -> None:
    gather(torch.ones(3))
    weigh(torch.ones(3), Weights(torch.ones(3)), Plan(1))
    result = gather(torch.ones(3, device="meta"))
    assert result.is_meta
    assert result.shape == (3,)
    meta = torch.ones(3, device="meta")
    assert weigh(meta, Weights(meta), Plan(1)).is_meta
    assert len(log.launched) == 2, "also where CPU tensors of that description were seen before"


class Labelled(torch.Tensor):
    """A tensor subclass that does not intercept operations, like weights to which a loader is attached."""


class Distributed(torch.Tensor):
    """A tensor subclass that intercepts operations, as distributed and quantised tensors do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Distributed:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        seen.append(str(function))
        return function(*[a.inner if isinstance(a, Distributed) else a for a in arguments], **(keywords or {}))


seen: list[str] = []


def test_a_tensor_that_takes_operations_over_sees_the_operator(weigh: Any, log: Log) -> None:
    """Asserts that the subclass intercepts the operator even if it is not the first argument, and after calls with plain tensors of
    the same description."""
    weigh(torch.ones(3), Weights(torch.ones(3)), Plan(1))
    seen.clear()
    result = weigh(torch.ones(3), Weights(Distributed(torch.ones(3))), Plan(1))
    assert seen == [f"tokenspeed_kernel.{weigh.__name__}.default"]
    assert torch.equal(result, torch.ones(3))


def test_plain_subclasses_are_as_good_as_tensors(gather: Any, log: Log) -> None:
    gather(torch.ones(3))
    subclass = torch.ones(3).as_subclass(Labelled)
    assert torch.equal(torch.Tensor(gather(subclass)), torch.full((3,), 2.0))
    assert len(log.decided) == 2
    assert len(log.launched) == 2, "a subclass that leaves operations alone is as good as a tensor"


def test_autograd_does_not_follow_into_the_fast_path(gather: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        assert not gather(parameter).requires_grad


# -- values in host memory --------------------------------------------------------------------------------------------------------


def test_host_values_are_checked_when_they_may_have_changed(gather: Any, log: Log) -> None:
    x, lengths = torch.ones(4), torch.tensor([1, 2])
    gather(x, lengths)
    checked = len(log.checked)
    for _ in range(3):
        gather(x, lengths)
        gather(torch.zeros(4), lengths)
    assert len(log.checked) == checked, "the same tensor, not written to"

    lengths[0] = 2
    gather(x, lengths)
    assert len(log.checked) == checked + 1
    gather(x, lengths)
    assert len(log.checked) == checked + 1

    gather(x, lengths.clone())
    assert len(log.checked) == checked + 2, "another tensor"


def test_wrong_host_values_are_found_on_the_fast_path(gather: Any, log: Log) -> None:
    x, lengths = torch.ones(4), torch.tensor([1, 2])
    gather(x, lengths)
    launched = len(log.launched)
    lengths.fill_(9)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"lengths .* at most 4 in sum, got a int64"):
            gather(x, lengths)
    with pytest.raises(ValueError, match="lengths must be at most 4 in sum"):
        gather(x, torch.tensor([5, 5]))
    assert len(log.launched) == launched
    lengths.fill_(1)
    gather(x, lengths)


def test_values_under_inference_mode_are_always_checked(gather: Any, log: Log) -> None:
    with torch.inference_mode():
        x, lengths = torch.ones(4), torch.tensor([1, 2])
        gather(x, lengths)
        lengths.fill_(9)
        with pytest.raises(ValueError, match="lengths must be at most"):
            gather(x, lengths)
    ordinary = torch.tensor([1, 2])
    gather(x, ordinary)
    with pytest.raises(ValueError, match="lengths must be at most"):
        gather(x, lengths)


def test_hints_are_always_checked_and_never_decide(gather: Any, log: Log) -> None:
    x, lengths = torch.ones(4), torch.tensor([1, 2])
    gather(x, lengths, [1, 2])
    decided = len(log.decided)
    for wrong in ([1, 3], [2], []):
        with pytest.raises(ValueError, match="hint must be what lengths says"):
            gather(x, lengths, wrong)
    gather(x, lengths, [1, 2])
    assert len(log.decided) == decided
    gather(x, None, [7])


def test_a_bound_kernel_still_checks_host_values(gather: Any, log: Log) -> None:
    x, lengths = torch.ones(4), torch.tensor([1, 2])
    bound = gather.bind(x, lengths)
    bound(x, lengths, None, "sum", None)
    lengths.fill_(9)
    with pytest.raises(ValueError, match="lengths must be at most"):
        bound(x, lengths, None, "sum", None)


def test_two_threads_with_their_own_lengths(gather: Any) -> None:
    """The guard remembers the tensors of the last call. It must not mix the tensors of two threads that call in turn."""
    problems: list[str] = []

    def work(good: bool) -> None:
        x, lengths = torch.ones(4), torch.tensor([1, 2])
        for _ in range(300):
            lengths.fill_(1 if good else 9)
            try:
                gather(x, lengths)
                if not good:
                    problems.append("a wrong value passed")
            except ValueError:
                if good:
                    problems.append("a right value failed")

    threads = [threading.Thread(target=work, args=(good,)) for good in (True, False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


# -- generated source -------------------------------------------------------------------------------------------------------------


def test_tracebacks_show_the_generated_lines(gather: Any) -> None:
    with pytest.raises(TypeError) as caught:
        gather(3)
    lines = "".join(traceback.format_exception(caught.value))
    assert f"in {gather.__name__}" in lines
    assert "return _first(x, lengths, hint, mode, out, override, solution)" in lines
    assert "return _then(_key, (x, lengths, hint, mode, out,), override, solution)" in lines


def test_tracebacks_of_a_warm_call_show_how_the_kernel_was_found(gather: Any, log: Log) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("no driver")

    register_kernel("testing", gather.__name__, name="fails", solution="x", signatures=None, priority=1)(fails)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            gather(torch.ones(3), override="fails")
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert lines[1:] == [
        "return _first(x, lengths, hint, mode, out, override, solution)",
        "return _call(x, lengths, hint, mode, out)",
        'raise RuntimeError("no driver")',
    ]
    assert len(log.decided) == 1


def test_inspect_shows_each_generated_function(gather: Any) -> None:
    """Asserts that each generated function has its own source, even if two functions have the same operator and role."""
    made = []
    for arguments in ({}, {"lengths": torch.tensor([1, 2])}):
        gather(torch.ones(4), **arguments)
        made.append(gather.caller._comparisons[fast_path.FIRST])
    with_lengths, without = (inspect.getsource(function) for function in reversed(made))
    assert "(lengths is None)\n" in without
    assert "lengths is not None\n" in with_lengths
    assert "_check(x, lengths, hint, mode, out)" in with_lengths
    assert "_check(x" not in without
    assert inspect.getsource(gather).startswith(f"def {gather.__name__}(x, lengths=_default_lengths")


def test_equal_names_of_two_packages_have_their_own_source() -> None:
    made = [compile_source("made", f"def made():\n    return {value}\n", {}) for value in (1, 2, 1)]
    assert ["return 1" in inspect.getsource(function) for function in made] == [True, False, True]
    assert made[0].__code__.co_filename == made[2].__code__.co_filename, "equal source is kept once"

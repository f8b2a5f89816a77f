"""Tests the quick lookup with PyTorch's guards. The lookup agrees with the full description, reports a miss if in doubt, and is
optional."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base import fast_path, memo
from tokenspeed_kernel_base.calling import Caller
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm

RMSNORM = get_operator("rmsnorm")
CALLER = rmsnorm.caller


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Returns the list of the arguments of those calls of rmsnorm that take the slow path."""
    seen: list[tuple[Any, ...]] = []
    decide = CALLER.decide

    def counted(args: tuple[Any, ...], override: str | None, solution: str | None) -> Callable[..., Any]:
        seen.append(args)
        return decide(args, override, solution)

    monkeypatch.setattr(CALLER, "decide", counted)
    memo.invalidate()
    return seen


def _arguments() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 8), torch.ones(8)


def test_this_pytorch_has_usable_guards() -> None:
    assert fast_path.tensor_guards() is not None


def test_a_call_is_decided_once_by_description(decisions: list[tuple[Any, ...]]) -> None:
    for _ in range(3):
        rmsnorm(*_arguments())
    rmsnorm(torch.randn(4, 8), torch.ones(8))
    for _ in range(3):  # the first description is no longer in the quick lookup, but is still memoised
        rmsnorm(*_arguments())
    assert [args[0].shape[0] for args in decisions] == [3, 4]


@pytest.mark.parametrize(
    "other",
    [
        lambda x, w: (x[:2], w),
        lambda x, w: (x.double(), w),
        lambda x, w: (x, w.double()),
        lambda x, w: (x.unsqueeze(0), w),
    ],
    ids=["shape", "dtype", "dtype of the weight", "rank"],
)
def test_another_description_is_decided_for_itself(
    decisions: list[tuple[Any, ...]], other: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    arguments = _arguments()
    rmsnorm(*arguments)
    changed = other(*arguments)
    result = rmsnorm(*changed)
    assert (result.shape, result.dtype) == (changed[0].shape, changed[0].dtype)
    assert len(decisions) == 2


def test_a_wrong_call_is_refused_after_a_right_one() -> None:
    x, weight = _arguments()
    rmsnorm(x, weight)
    with pytest.raises(ValueError, match=r"weight must be of shape \[hidden\]"):
        rmsnorm(x, weight[:7])
    with pytest.raises(ValueError, match="weight must be on cpu like x"):
        rmsnorm(x, weight.to("meta"))
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        rmsnorm([1.0], weight)  # type: ignore[arg-type]


def test_other_strides_and_aliases_use_the_full_description(decisions: list[tuple[Any, ...]]) -> None:
    x, weight = torch.randn(8, 8), torch.ones(8)
    torch.testing.assert_close(rmsnorm(x.t(), weight), rmsnorm(x.t().contiguous(), weight))
    normed, total = rmsnorm(x, weight, residual=x)
    assert torch.equal(total, x + x)
    assert torch.equal(normed, rmsnorm(x + x, weight))
    assert len(decisions) == 2  # one without a residual, one with


def test_alternating_descriptions_use_the_quick_lookup(decisions: list[tuple[Any, ...]]) -> None:
    weight = torch.ones(8)
    calls = [
        lambda: rmsnorm(torch.randn(3, 8), weight),
        lambda: rmsnorm(torch.randn(5, 8), weight),
        lambda: rmsnorm(torch.randn(3, 8), weight, 0.5 / 3),  # a new object each time
        lambda: rmsnorm(torch.randn(3, 8), weight, residual=torch.randn(3, 8)),
    ]
    assert len(calls) == fast_path.CHAIN
    for call in calls:
        call()
    CALLER._memo.clear()  # otherwise the memo of full descriptions would find the calls
    for call in calls * 2:
        call()
    assert len(decisions) == len(calls)
    rmsnorm(torch.randn(7, 8), weight)
    calls[0]()
    assert len(decisions) == len(calls) + 2, "the oldest was given up"


def test_outputs_may_be_inputs_or_not_in_turns(decisions: list[tuple[Any, ...]]) -> None:
    (x, weight), residual = _arguments(), torch.randn(3, 8)
    wanted, total = rmsnorm(x, weight, residual=residual)
    for out, residual_out in ((torch.empty(3, 8), torch.empty(3, 8)), (x, residual)):
        rmsnorm(x, weight, residual=residual, out=out, residual_out=residual_out)
        CALLER._memo.clear()
        assert torch.equal(out, wanted)
        assert torch.equal(residual_out, total)
    assert len(decisions) == 2  # one call with outputs, one without


def test_an_option_that_cannot_be_compared_is_refused() -> None:
    x, weight = _arguments()
    rmsnorm(x, weight)
    for wrong in (torch.ones(2), numpy.ones(2), [1e-6], "1e-6", numpy.float32(1e-6)):
        with pytest.raises(TypeError, match="rmsnorm: eps must be float, got "):
            rmsnorm(x, weight, wrong)  # type: ignore[arg-type]


def test_inference_mode_is_supported(decisions: list[tuple[Any, ...]]) -> None:
    x, weight = _arguments()
    expected = rmsnorm(x, weight)
    with torch.inference_mode():
        assert torch.equal(rmsnorm(x, weight), expected)
        assert torch.equal(rmsnorm(x.clone(), weight.clone()), expected)
    assert len(decisions) == 1


def test_invalidation_forgets_it() -> None:
    rmsnorm(*_arguments())
    assert CALLER._comparisons
    memo.invalidate()
    assert not CALLER._comparisons
    with memo.exceptional():
        rmsnorm(*_arguments())
        assert not CALLER._comparisons


def test_optional_tensors_are_guarded_too() -> None:
    x, weight = _arguments()
    out = torch.empty(3, 8)
    assert rmsnorm(x, weight, out=out) is out
    with pytest.raises(ValueError, match=r"out must have shape \[3, 8\]"):
        rmsnorm(x, weight, out=torch.empty(3, 9))
    with pytest.raises(TypeError, match="residual must be a tensor of float32"):
        rmsnorm(x, weight, residual=x.double())


def test_without_guards_everything_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "tensor_guards", lambda: None)
    caller = Caller(RMSNORM, "without_guards")
    decided = []

    def decide(args: tuple[Any, ...], override: str | None, solution: str | None) -> Callable[..., Any]:
        decided.append((override, solution))
        return Caller.decide(CALLER, args, override, solution)

    monkeypatch.setattr(caller, "_memo", CALLER._memo)
    monkeypatch.setattr(caller, "decide", decide)
    memo.invalidate()
    x, weight = _arguments()
    wanted = RMSNORM.reference(x, weight, 1e-5, None, None, None)
    for _ in range(2):
        assert torch.equal(caller.function(x, weight), wanted)
    caller.function(x[:1], weight, solution="reference")
    assert decided == [(None, None), (None, "reference")]


def test_guards_that_do_otherwise_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._dynamo import guards

    class Agreeable:
        def __init__(self, *tensors: Tensor, **options: object) -> None:
            pass

        def check(self, *tensors: Tensor) -> bool:
            return True

    class Changed:
        def __init__(self) -> None:
            pass

    for stand_in in (Agreeable, Changed):
        monkeypatch.setattr(guards, "TensorGuards", stand_in)
        assert fast_path.tensor_guards.__wrapped__() is None
    monkeypatch.delattr(guards, "TensorGuards")
    assert fast_path.tensor_guards.__wrapped__() is None


def test_threads_with_different_shapes_each_get_their_own(decisions: list[tuple[Any, ...]]) -> None:
    wrong: list[str] = []

    def run(rows: int) -> None:
        x, weight = torch.full((rows, 8), float(rows)), torch.ones(8)
        for _ in range(300):
            result = rmsnorm(x, weight)
            if result.shape != x.shape:
                wrong.append(f"{rows} rows gave {list(result.shape)}")

    threads = [threading.Thread(target=run, args=(rows,)) for rows in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 4 <= len(decisions) <= 8

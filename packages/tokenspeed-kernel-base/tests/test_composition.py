"""Tests operators whose bodies call other operators (parts). The best kernel of each part is selected once for each description."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base import watch
from tokenspeed_kernel_base.calling import Caller
from tokenspeed_kernel_base.operator import operators
from tokenspeed_kernel_base.ops.attention.top_k_indices import top_k_indices
from tokenspeed_kernel_base.ops.gemm.mm import mm
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import kernel_override

X, NORM, WEIGHT = torch.randn(3, 8), torch.rand(8) + 0.5, torch.randn(8, 4)


def norm_mm(x: Tensor, weight: Tensor, b: Tensor, twice: bool = False, out: Tensor | None = None) -> Tensor:
    """A body that calls a normalisation and a GEMM; with ``twice``, a second GEMM."""
    normed = rmsnorm(x, eps=1e-6, weight=weight)
    product = mm(normed, b, out=out)
    return product + mm(normed, b) if twice else product


def growing(x: Tensor, weight: Tensor, rounds: int = 2, out: Tensor | None = None) -> Tensor:
    """A body that calls a part with several shapes, from a nested function. It also calls ``torch.mm``, which is not the operator
    `mm`."""

    def norm(x: Tensor) -> Tensor:
        return rmsnorm(*(torch.mm(x, torch.eye(8)), weight))

    x = norm(x)
    for _ in range(rounds):
        x = rmsnorm(torch.cat((x, x)), weight)
    return x


def unknown(x: Tensor, out: Tensor | None = None) -> Tensor:
    """A body that calls an operator with an unknown argument, and omits a required argument."""
    return rmsnorm(x, epsilon=1.0)  # type: ignore[call-arg]


def with_hooks(function: Any) -> Any:
    @function.check
    def _(check: Any, x: Tensor) -> None:
        check.tensor("x", x, "rows hidden", {torch.float32})

    @function.fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    return function


@pytest.fixture
def composed(declare: Callable[..., Any]) -> Any:
    function = declare(norm_mm, formats=("x",), parts=(rmsnorm, mm))

    @function.check
    def _(check: Any, x: Tensor, weight: Tensor, b: Tensor) -> None:
        check.tensor("x", x, "rows hidden", {torch.float32})
        check.tensor("weight", weight, "hidden", torch.float32)
        check.tensor("b", b, "hidden columns", torch.float32)

    @function.fake
    def _(x: Tensor, b: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], b.shape[1])

    return function


@pytest.fixture
def spied() -> list[tuple[int, ...]]:
    """Registers a kernel of `rmsnorm` that has the highest priority and returns zeros. Returns the list to which the kernel appends
    the shape of each call."""
    called: list[tuple[int, ...]] = []

    def spy(
        x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor | None, residual_out: Tensor | None
    ) -> Tensor:
        called.append(tuple(x.shape))
        return torch.zeros_like(x)

    register_kernel("norm", "rmsnorm", name="spy_rmsnorm", solution="spy", signatures=None, priority=19)(spy)
    return called


def expected(x: Tensor = X, twice: bool = False) -> Tensor:
    return rmsnorm(x, NORM, 1e-6, solution="reference") @ WEIGHT * (2 if twice else 1)


def test_parts_run_by_their_best_kernels(composed: Any, spied: list[tuple[int, ...]]) -> None:
    assert composed.explain(X, NORM, WEIGHT).chosen.solution == "composed"
    assert torch.equal(composed(X, NORM, WEIGHT), torch.zeros(3, 4))
    assert spied == [(3, 8)]


def test_the_reference_runs_the_references_of_the_parts(composed: Any, spied: list[tuple[int, ...]]) -> None:
    torch.testing.assert_close(composed(X, NORM, WEIGHT, solution="reference"), expected())
    assert spied == []
    assert composed.bind(X, NORM, WEIGHT, solution="reference") == composed.operator.reference


def test_a_kernel_for_the_whole_is_preferred(composed: Any) -> None:
    def whole(x: Tensor, weight: Tensor, b: Tensor, twice: bool, out: Tensor | None) -> Tensor:
        return torch.ones(3, 4)

    mode = composed.operator.mode
    register_kernel("testing", mode, name=f"whole_{mode}", solution="whole", signatures=None, priority=4)(whole)
    assert torch.equal(composed(X, NORM, WEIGHT), torch.ones(3, 4))
    torch.testing.assert_close(composed(X, NORM, WEIGHT, solution="composed"), expected())


@pytest.mark.parametrize("twice", [False, True])
def test_branches_and_parts_that_stand_twice(composed: Any, twice: bool) -> None:
    for x in (X, torch.cat((X, X)), X, X[:1]):
        torch.testing.assert_close(composed(x, NORM, WEIGHT, twice), expected(x, twice))
    torch.testing.assert_close(composed.bind(X, NORM, WEIGHT, twice)(X, NORM, WEIGHT, twice, None), expected(X, twice))


def test_each_part_is_decided_once_a_description(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[str] = []
    decide = Caller._decide

    def counted(self: Caller, *rest: Any) -> Any:
        decided.append(self.op.mode)
        return decide(self, *rest)

    monkeypatch.setattr(Caller, "_decide", counted)
    composed(X, NORM, WEIGHT)
    with monkeypatch.context() as patch:
        patch.setitem(norm_mm.__globals__, "mm", None)
        composed(X, NORM, WEIGHT)  # this call must not look up any part
    assert decided == [composed.operator.mode, "rmsnorm", "mm"]
    composed(torch.cat((X, X)), NORM, WEIGHT)
    assert decided[3:] == [composed.operator.mode, "rmsnorm", "mm"]


def test_decisions_are_invalidated_by_changes(composed: Any, spied: list[tuple[int, ...]]) -> None:
    assert torch.equal(composed(X, NORM, WEIGHT), torch.zeros(3, 4))
    with kernel_override("norm", "rmsnorm", "reference_rmsnorm"):
        torch.testing.assert_close(composed(X, NORM, WEIGHT), expected())
    assert torch.equal(composed(X, NORM, WEIGHT), torch.zeros(3, 4))
    KernelRegistry.get().unregister("spy_rmsnorm")
    torch.testing.assert_close(composed(X, NORM, WEIGHT), expected())


def test_whoever_watches_sees_the_whole_and_the_parts(composed: Any) -> None:
    composed(X, NORM, WEIGHT)
    seen: list[tuple[str, str]] = []

    def watcher(call: watch.Call, run: Callable[..., Any]) -> Callable[..., Any]:
        seen.append((call.mode, call.kernel))
        return run

    with watch.watch_calls(watcher):
        composed(X, NORM, WEIGHT)
        composed(X, NORM, WEIGHT)
    composed(X, NORM, WEIGHT)
    mode = composed.operator.mode
    best = {
        op.mode: op.function.explain(*given).chosen.name
        for op, given in ((rmsnorm.operator, (X, NORM)), (mm.operator, (X, WEIGHT)))
    }
    assert seen == 2 * [(mode, f"composed_{mode}"), ("rmsnorm", best["rmsnorm"]), ("mm", best["mm"])]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("solution", ["composed", "reference"])
def test_provided_outputs(composed: Any, twice: bool, solution: str) -> None:
    for _ in range(2):
        out = torch.empty(3, 4)
        assert composed(X, NORM, WEIGHT, twice, out=out, solution=solution) is out
        torch.testing.assert_close(out, expected(X, twice))


def test_parts_check_values_and_outputs_at_every_call(composed: Any) -> None:
    composed(X, NORM, WEIGHT, out=torch.empty(3, 4))
    memory = torch.randn(24)
    with pytest.raises(ValueError, match="out must not overlap x"):
        composed(memory[:24].view(3, 8), NORM, WEIGHT, out=memory[:12].view(3, 4))


def test_a_part_that_is_called_repeatedly_is_looked_up_at_every_call(
    declare: Callable[..., Any], spied: list[tuple[int, ...]]
) -> None:
    function = with_hooks(declare(growing, formats=("x",), parts=(rmsnorm,)))
    for _ in range(3):
        spied.clear()
        function(X, NORM)
        assert spied == [(3, 8), (6, 8), (12, 8)]


def test_an_error_shows_the_line_of_the_body(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(mm.operator, "reference", broken)
    with pytest.raises(RuntimeError, match="broken") as raised:
        composed(X, NORM, WEIGHT, solution="reference")
    lines = [linecache.getline(f.filename, f.lineno or 0).strip() for f in traceback.extract_tb(raised.value.__traceback__)]
    assert "product = mm(normed, b, out=out)" in lines


@pytest.mark.parametrize("parts", [(mm,), (rmsnorm,), (rmsnorm, mm, top_k_indices)])
def test_parts_are_the_operators_that_the_body_calls(declare: Callable[..., Any], parts: tuple[Any, ...]) -> None:
    stated = re.escape(str(sorted(part.operator.mode for part in parts)))
    with pytest.raises(TypeError, match=rf"parts= .*\['mm', 'rmsnorm'\], got {stated}"):
        declare(norm_mm, formats=("x",), parts=parts)


@pytest.mark.parametrize("solution", ["composed", "reference"])
def test_a_part_takes_its_own_arguments(declare: Callable[..., Any], solution: str) -> None:
    function = with_hooks(declare(unknown, formats=("x",), parts=(rmsnorm,)))
    with pytest.raises(TypeError, match=r"rmsnorm\(\) .*unexpected keyword .*'epsilon'"):
        function(X, solution=solution)


@pytest.mark.parametrize("op", [op for op in operators() if op.parts], ids=str)
def test_declared_compositions(op: Any) -> None:
    specs = KernelRegistry.get().get_for_operator(op.family, op.mode)
    assert [(s.name, s.priority, s.is_reference) for s in specs if s.universal] == [
        (f"composed_{op.mode}", 2, False),
        (f"reference_{op.mode}", 0, True),
    ]

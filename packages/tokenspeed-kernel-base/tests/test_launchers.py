"""Tests launchers. A launcher's parameters are those of the operator that it supports. A call that sets another parameter goes to
another kernel."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.registry import KernelRegistry, RegistrationError, describe_kernel, register_kernel
from tokenspeed_kernel_base.selection import NoKernelFoundError, kernel_override

X = torch.arange(4.0)


def scaled(x: Tensor, scale: float = 2.0, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    return x * scale if bias is None else x * scale + bias


def scaled_later(
    x: Tensor, scale: float = 2.0, limit: float | None = None, bias: Tensor | None = None, rows: int = -1, out: Tensor | None = None
) -> Tensor:
    """The operator `scaled` of a later release, with two more parameters."""
    result = scaled(x, scale, bias)
    return result if limit is None else result.clamp(max=limit)


def plain(out: Tensor | None, x: Tensor, scale: float) -> Tensor:
    """A launcher whose parameters are in another order than the operator's, without bias."""
    result = x * scale
    return result if out is None else out.copy_(result)


@pytest.fixture
def op(declare: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function: ``op(body, launcher)`` declares an operator and a kernel with this launcher."""

    def make(body: Callable[..., Any], launcher: Any = plain, **options: Any) -> Any:
        function = declare(body, formats=("x",), **options)
        function.fake(lambda x: torch.empty_like(x))
        mode = function.operator.mode
        register_kernel("testing", mode, name=f"plain_{mode}", solution="sample", signatures=None, priority=5)(launcher)
        return function

    return make


def chosen(function: Any, *args: Any, **options: Any) -> str:
    return function.explain(*args, **options).chosen.solution  # type: ignore[no-any-return]


def test_a_launcher_gets_the_parameters_it_names(op: Callable[..., Any]) -> None:
    function, out = op(scaled), torch.empty(4)
    assert torch.equal(function(X, 3.0), 3 * X)
    assert function(X, 3.0, out=out) is out
    assert torch.equal(out, 3 * X)
    assert chosen(function, X, 3.0) == "sample"
    bound = function.bind(X, 3.0)
    assert torch.equal(bound(X, 3.0, None, None), 3 * X)
    assert "ignored parameters" in describe_kernel(f"plain_{function.operator.mode}")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_give_it_what_it_names(op: Callable[..., Any], backend: str) -> None:
    function = op(scaled)
    assert torch.equal(torch.compile(lambda x: function(x, 3.0), backend=backend, fullgraph=True)(X), 3 * X)


def test_a_call_with_an_unnamed_parameter_goes_to_another_kernel(op: Callable[..., Any]) -> None:
    function = op(scaled)
    for _ in range(2):
        assert torch.equal(function(X), 2 * X)
        assert torch.equal(function(X, bias=X), 3 * X)
    found = function.explain(X, bias=X)
    verdict = next(each for each in found.verdicts if each.spec.solution == "sample")
    assert found.chosen.solution == "reference"
    assert (verdict.gate, verdict.reason) == ("parameters", "does not take bias")


def test_no_override_gets_past_that(op: Callable[..., Any]) -> None:
    function = op(scaled)
    name = f"plain_{function.operator.mode}"
    with pytest.raises(NoKernelFoundError, match="parameters gate: does not take bias"):
        function(X, bias=X, override=name)
    with kernel_override("testing", function.operator.mode, name), pytest.raises(NoKernelFoundError, match="does not take bias"):
        function(X, bias=X)


def test_a_new_parameter_of_an_operator_edits_no_kernel(op: Callable[..., Any]) -> None:
    function = op(scaled_later, bounds=("rows",))
    assert torch.equal(function(X, 3.0), 3 * X)
    assert chosen(function, X, 3.0) == "sample"
    assert chosen(function, X, rows=7) == "sample", "a bound decides nothing"
    assert chosen(function, X, limit=4.0) == "reference"
    assert torch.equal(function(X, 3.0, limit=4.0), (3 * X).clamp(max=4))


def test_equal_values_are_the_default_and_other_types_are_not(op: Callable[..., Any]) -> None:
    def only_x(x: Tensor, out: Tensor | None) -> Tensor:
        return x * 2

    function = op(scaled, only_x)
    assert [chosen(function, X, scale) for scale in (2.0, 2, 1.5)] == ["sample", "sample", "reference"]


def test_hints_may_be_ignored(op: Callable[..., Any]) -> None:
    def hinted(x: Tensor, lengths: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return x * 2

    def only_x(x: Tensor, out: Tensor | None) -> Tensor:
        return x * 2

    function = op(hinted, only_x, hints=("lengths",))
    assert chosen(function, X, X) == "sample"


def test_tunables_go_through(op: Callable[..., Any], declare: Callable[..., Any]) -> None:
    given = []

    def tuned(x: Tensor, out: Tensor | None, *, block: int = 8) -> Tensor:
        given.append(block)
        return x * 2

    function = declare(scaled, formats=("x",))
    mode = function.operator.mode
    register_kernel("testing", mode, name="tuned", solution="sample", signatures=None, priority=5, tunables={"block": [8, 16]})(
        tuned
    )
    with kernel_override("testing", mode, "tuned", config={"block": 16}):
        function(X)
    function(X)
    assert given == [16, 8]


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        (lambda x, sclae, out: x, r"testing\.scaled_\d+ has no parameter sclae; did you mean scale\?"),
        (lambda x, scale: x, r"testing\.scaled_\d+ may write to out, so an implementation must take it"),
        (lambda x, out, *, extra: x, r"testing\.scaled_\d+ has no parameter extra"),
    ],
)
def test_launchers_that_name_unknown_parameters(op: Callable[..., Any], launcher: Any, said: str) -> None:
    with pytest.raises(RegistrationError, match=said):
        op(scaled, launcher)


def test_a_lazy_launcher_is_judged_once_it_is_imported(declare: Callable[..., Any]) -> None:
    function = declare(scaled, formats=("x",))
    mode = function.operator.mode
    register_kernel("testing", mode, name="late", solution="sample", signatures=None, priority=5)(f"{__name__}:plain")
    assert chosen(function, X, bias=X) == "sample", "not known before"
    assert torch.equal(function(X, bias=X), 3 * X)
    assert torch.equal(function(X), 2 * X)
    assert chosen(function, X, bias=X) == "reference"
    assert KernelRegistry.get().ignored_parameters("late") == {"bias"}


def test_tracebacks_and_inspect_show_the_generated_function(op: Callable[..., Any]) -> None:
    def failing(x: Tensor, out: Tensor | None) -> Tensor:
        raise RuntimeError("no driver")

    function = op(scaled, failing)
    source = inspect.getsource(KernelRegistry.get().get_impl(f"plain_{function.operator.mode}"))
    assert "return _launcher(x, out)" in source
    with pytest.raises(RuntimeError) as caught:
        function(X)
    assert "return _launcher(x, out)" in "".join(traceback.format_exception(caught.value))

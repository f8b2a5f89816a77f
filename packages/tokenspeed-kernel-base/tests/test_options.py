"""Tests options at the limits of their range. Kernels and hooks get values that they can compute with, however the operator is
called. Every operator rejects meaningless values with its own message."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import Operator, operators, plain_function
from tokenspeed_kernel_base.parameters import NO_LIMIT, Kind, Parameter, tensor_arguments
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import NoKernelFoundError

INT32, INT64, FLOAT32 = 2**31 - 1, 2**63 - 1, torch.finfo(torch.float32).max
X = torch.arange(4.0)


@dataclasses.dataclass(frozen=True)
class Plan:
    factor: float = 1.0
    rows: int = 1


def windowed(x: Tensor, window: int = -1, scale: float = 1.0, plan: Plan = Plan(), out: Tensor | None = None) -> Tensor:
    return x * scale * plan.factor


Given = list[tuple[Any, ...]]


def _options(window: Any, scale: Any, plan: Plan) -> tuple[Any, ...]:
    return window, scale, type(scale), plan.factor, type(plan.factor)


@pytest.fixture
def given() -> Given:
    """Returns the list to which the kernel and the hooks of `op` append the options that they receive."""
    return []


@pytest.fixture
def op(declare: Callable[..., Any], given: Given) -> Iterator[Any]:
    function = declare(windowed, formats=("x",), traits={"sliding_window": bool}, unlimited=("window",))

    @function.traits
    def _(window: int, scale: float, plan: Plan) -> dict[str, Any]:
        given.append(_options(window, scale, plan))
        return {"sliding_window": window >= 0}

    @function.check
    def _(check: Checker, x: Tensor, window: int, scale: float, plan: Plan) -> None:
        given.append(_options(window, scale, plan))
        check.require(window >= -1, "window", "-1 or more", window)
        check.tensor("x", x, "rows")

    @function.check_values(host=("x",))
    def _(check: Checker, x: Tensor | None, window: int, scale: float, plan: Plan) -> None:
        given.append(_options(window, scale, plan))

    @function.fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def kernel(x: Tensor, window: int, scale: float, plan: Plan, out: Tensor | None) -> Tensor:
        given.append(_options(window, scale, plan))
        result = x * scale * plan.factor
        return result if out is None else out.copy_(result)

    mode = function.operator.mode
    register_kernel("testing", mode, name=f"no_window_{mode}", solution="sample", signatures=None, priority=5)(kernel)
    yield function
    KernelRegistry.get().unregister(f"no_window_{mode}")


CALLERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "call": lambda op: op,
    "bind": lambda op: lambda *args: op.bind(*args)(*args),
    "a wheel's own function": lambda op: plain_function(op, __name__.partition(".")[0]),
    "the custom operator": lambda op: lambda *args: op.caller.lowering.call(*args, None, None),
    "the reference": lambda op: lambda *args: op(*args, solution="reference"),
}


@pytest.mark.parametrize("caller", sorted(CALLERS.keys() - {"the reference"}))
@pytest.mark.parametrize("window", [-1, NO_LIMIT, INT32, INT32 + 1, INT64])
def test_kernels_and_hooks_see_no_window_that_is_larger_than_any_sequence(op: Any, given: Given, window: int, caller: str) -> None:
    call = CALLERS[caller](op)
    for _ in range(3):  # the first call takes the slow path, later calls the fast path
        assert torch.equal(call(X, window, 2.0, Plan(), None), 2 * X)
    assert set(given) == {(-1, 2.0, float, 1.0, float)}


def test_compiled_calls_see_no_window_either(op: Any, given: Given) -> None:
    compiled = torch.compile(lambda x: op(x, INT32, 2), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(X), 2 * X)
    assert set(given) == {(-1, 2.0, float, 1.0, float)}


@pytest.mark.parametrize("window", [0, NO_LIMIT - 1])
def test_windows_that_limit_stay_as_they_are(op: Any, given: Given, window: int) -> None:
    with pytest.raises(NoKernelFoundError, match="sliding_window"):
        op(X, window, solution="sample")
    assert torch.equal(op(X, window), X)  # the reference kernel runs
    assert {options[0] for options in given} == {window}


@pytest.mark.parametrize("caller", CALLERS)
def test_integers_for_floats_arrive_as_floats(op: Any, given: Given, caller: str) -> None:
    call = CALLERS[caller](op)
    for scale in (2, 2.0, 2**62, 3):
        assert torch.equal(call(X, -1, scale, Plan(factor=2), None), X * 2 * float(scale))
    assert {(options[2], options[4]) for options in given} == {(float, float)}
    if caller != "the custom operator":  # PyTorch passes integers to a custom operator as int64
        assert torch.equal(call(X, -1, 2**100, Plan(2**20), None), X * 2.0**120)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"window": INT64 + 1}, ValueError, f"window must be within the range of int64, got int {INT64 + 1}"),
        ({"window": -INT64 - 2}, ValueError, "window must be within the range of int64"),
        ({"window": -2}, ValueError, "window must be -1 or more, got -2"),
        ({"scale": 10**400}, ValueError, r"scale must be a float within ±3.4e\+38, got int 1000"),
        ({"scale": 1e39}, ValueError, r"scale must be a float within ±3.4e\+38, got float 1e\+39"),
        ({"plan": Plan(rows=2**64)}, ValueError, "plan.rows must be within the range of int64, got int"),
        ({"plan": Plan(factor=-(10**39))}, ValueError, r"plan.factor must be a float within ±3.4e\+38, got int -1000"),
        ({"plan": Plan(rows=1.5)}, TypeError, "plan.rows must be int, got float 1.5"),
    ],
)
def test_out_of_range_options_are_rejected(
    op: Any, given: Given, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    for call in (op, op.bind, op.explain):
        with pytest.raises(error, match=f"^{op.operator.mode}: {message}"):
            call(X, **changes)
    assert len(given) <= 3  # only the check hook ran


def test_infinity_and_nan_are_for_the_operator_to_judge(op: Any) -> None:
    assert op(X + 1, scale=math.inf).isinf().all()
    assert op(X, scale=math.nan).isnan().all()


def _bounded(x: Tensor, most: int, out: Tensor | None = None) -> Tensor:
    return x


def test_unlimited_options_must_be_integers_and_not_bounds(declare: Callable[..., Any]) -> None:
    for names, message in (
        (("scale",), "must be annotated as int"),
        (("nothing",), "nothing of the declaration are not parameters"),
    ):
        with pytest.raises(TypeError, match=message):
            declare(windowed, formats=("x",), unlimited=names)
    with pytest.raises(TypeError, match="must not be in bounds="):
        declare(_bounded, formats=("x",), bounds=("most",), unlimited=("most",))


# -- every operator ------------------------------------------------------------------------------------------------------------

OPERATORS = [op for op in operators() if op.body.__module__.startswith("tokenspeed_kernel_base.ops.")]
INTS = (-INT64 - 2, -1, 0, INT32, INT32 + 1, INT64, INT64 + 1, 10**30)
FLOATS = (-1, 0, 2**64, 10**400, FLOAT32, -FLOAT32, 1e39, math.inf, math.nan)


def _smallest(op: Operator[Any, Any]) -> Case:
    """Returns the smallest case with nonempty tensors."""

    def size(case: Case) -> float:
        tensors = [tensor.numel() for _, tensor in tensor_arguments(op.parameters, op.complete(case.build()))]
        return sum(tensors) if all(tensors) else math.inf

    return min((case for case in op.all_cases() if not case.large and case.world_size == 1), key=size)


def _edges(option: Parameter) -> list[Any]:
    if tuple in option.types:
        return [(value,) * 3 for value in INTS]
    return [*(INTS if int in option.types else FLOATS if float in option.types else ())]


def _changed(op: Operator[Any, Any], case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields calls in which one option, or one field of a plan, is at a limit of its range."""
    for parameter in op.parameters:
        for option in parameter.fields or (parameter,):
            for value in _edges(option) if parameter.kind is Kind.VALUE else ():
                arguments = op.complete(case.build())
                inner = {option.attribute: value}
                changed = dataclasses.replace(arguments[parameter.name], **inner) if parameter.fields else value
                yield f"{option.name}={value}", {**arguments, parameter.name: changed}


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.mode)
def test_an_operator_computes_or_rejects_with_its_own_message(op: Operator[Any, Any]) -> None:
    faults = []
    for change, arguments in _changed(op, _smallest(op)):
        try:
            results = lowering.as_list(op.function(**arguments))
        except NoKernelFoundError:  # the changed plan names a layout or kernel that does not exist
            continue
        except Exception as error:
            if not (isinstance(error, (TypeError, ValueError)) and str(error).startswith(f"{op.mode}: ")):
                faults.append(f"{change}: {type(error).__name__}: {error}")
            continue
        wanted = op.outputs_on_meta(arguments)
        if [(t.shape, t.dtype) for t in results] != [(t.shape, t.dtype) for t in wanted]:
            faults.append(f"{change}: outputs are not as promised")
    assert faults == []


WINDOWED = [op for op in OPERATORS if "window_left" in op.names]


def test_every_window_may_be_unlimited() -> None:
    assert len(WINDOWED) == 7
    assert [op.mode for op in WINDOWED if not next(p for p in op.parameters if p.name == "window_left").unlimited] == []


@pytest.mark.parametrize("op", WINDOWED, ids=lambda op: op.mode)
def test_a_window_beyond_every_sequence_is_no_window(op: Operator[Any, Any]) -> None:
    case = _smallest(op)
    expected = lowering.as_list(op.function(**{**case.build(), "window_left": -1}))
    for window in (NO_LIMIT - 1, NO_LIMIT, INT32, INT32 + 1, INT64):
        assert all(map(torch.equal, lowering.as_list(op.function(**{**case.build(), "window_left": window})), expected)), window


@pytest.mark.parametrize("op", [op for op in WINDOWED if "page_table" in op.names], ids=lambda op: op.mode)
@pytest.mark.parametrize("window", [-1, NO_LIMIT - 1, NO_LIMIT, INT32, INT64])
def test_no_page_is_free_where_a_window_hides_none(op: Operator[Any, Any], window: int) -> None:
    arguments = {**_smallest(op).build(), "window_left": window}
    arguments["page_table"] = torch.full_like(arguments["page_table"], -1)
    with pytest.raises(ValueError, match=rf"^{op.mode}: page_table\[0, 0\] .* page of .*, got -1"):
        op.function(**arguments)

"""Operators whose bodies call other operators.

The body defines the combined result of several steps, such as a normalisation and the GEMM that reads its output. A fused kernel
may do all steps in one launch. Without a fused kernel the body itself runs. Each operator that the body calls is a *part*, and is
dispatched to its best kernel. So the operator works everywhere, and model code need not know which kernels exist.

::

    @operator("gemm", "mm_add", formats=("a", "b"), parts=(mm,))
    def mm_add(a: Tensor, b: Tensor, residual: Tensor, out: Tensor | None = None) -> Tensor:
        return mm(a, b) + residual

Two kernels follow from the body. ``reference_mm_add`` runs the body with the reference of each part; fused kernels are compared
with this kernel. ``composed_mm_add`` runs the body with the parts' best kernels, and ranks below every other kernel of the operator
except the reference. Both kernels run the body's code, with other functions bound to the parts' names.

A call of a composed kernel costs no more than calling its parts one by one. The description of the operator's call determines
shapes, dtypes and options of all parts. So the kernel of each part is selected in the body's first run for a description. Later
runs for this description call that kernel without selecting again. A part's kernel is looked up at every call if the part has
bounds, or if the body calls the part more than once.

The description must determine the shapes, dtypes and options of all arguments that a body passes to its parts. So no branch of a
body may depend on values. The body's results are newly allocated contiguous tensors, or the outputs that its caller provided.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.generated import compile_source

COMPOSED = "composed"

# ``decide(part, arguments)`` returns the function that runs the part, and whether further calls of the same description may reuse
# this function.
Decide = Callable[[Any, tuple[Any, ...]], tuple[Callable[..., Any], bool]]


@functools.cache
def called_operators(body: Callable[..., Any]) -> dict[str, Any]:
    """Returns the operators that a body calls, by their names in the body. Includes calls in functions nested in the body, but not
    calls in other functions that the body calls."""

    def names(code: types.CodeType) -> Iterator[str]:
        yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from names(constant)

    found = {name: body.__globals__.get(name) for name in names(body.__code__)}
    return {name: function for name, function in found.items() if hasattr(function, "caller")}


def with_parts(body: Callable[..., Any], parts: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns a copy of the body in which the names in ``parts`` are bound to the given functions."""
    namespace = {**body.__globals__, **parts}
    return types.FunctionType(body.__code__, namespace, body.__name__, body.__defaults__, body.__closure__)


@functools.cache
def in_order(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator for functions that take all of an operator's parameters by position. The decorated function can be called
    like the operator, with keywords and defaults.
    """
    given = ", ".join(p.name if p.required else f"{p.name}=_default_{p.name}" for p in op.parameters)
    source = f"""\
def {op.mode}_part(_call):
    def {op.mode}({given}):
        return _call({", ".join(op.names)})

    return {op.mode}
"""
    return compile_source(f"{op.mode}_part", source, {f"_default_{p.name}": p.default for p in op.parameters})


def by_reference(body: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a copy of the body that calls the reference of each operator in the body."""
    return with_parts(body, {name: in_order(f.operator)(f.operator.reference) for name, f in called_operators(body).items()})


def decided(body: Callable[..., Any], decide: Decide) -> Callable[..., Any]:
    """Returns a function for calls of one description. The first run selects a kernel for each operator that the body calls.
    Further runs call these kernels directly.
    """
    run: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal run
        if run is not None:
            return run(*args)
        parts = {name: _Deciding(function, decide) for name, function in called_operators(body).items()}
        result = with_parts(body, {name: in_order(part.op)(part) for name, part in parts.items()})(*args)
        run = with_parts(body, {name: in_order(part.op)(part.calls[0]) for name, part in parts.items() if part.lasting})
        return result

    return call


class _Deciding:
    """One operator that the body calls, during the body's first run. Each call selects a kernel, and keeps the decision."""

    def __init__(self, function: Any, decide: Decide) -> None:
        self.op, self._function, self._decide = function.operator, function, decide
        self.calls: list[Callable[..., Any]] = []
        self._all_last = not self.op.bounds

    def __call__(self, *args: Any) -> Any:
        call, lasting = self._decide(self._function, args)
        self.calls.append(call)
        self._all_last &= lasting
        return call(*args)

    @property
    def lasting(self) -> bool:
        """Whether further runs of the body may call the selected kernel directly. True if the first run called this operator
        exactly once, and the decision may be reused.
        """
        return self._all_last and len(self.calls) == 1


class Composed:
    """The kernel that runs an operator's body with the best kernel of each part."""

    def __init__(self, op: Any) -> None:
        self._op = op

    def __call__(self, *args: Any) -> Any:
        """Runs the body once. Each operator that the body calls looks up its own kernel."""
        return self._into_outputs(self._op.body, args)(*args)

    def decided(self, decide: Decide, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Returns a function for all calls whose description equals that of ``args``. See the module's `decided`."""
        return self._into_outputs(decided(self._op.body, decide), args)

    def _into_outputs(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        given = [(index, at) for index, at in enumerate(self._op.output_positions(args)) if args[at] is not None]
        if not given:
            return call

        def into(*args: Any) -> Any:
            results = lowering.as_list(call(*args))
            for index, at in given:
                if results[index] is not args[at]:
                    args[at].copy_(results[index])
                    results[index] = args[at]
            return lowering.from_list(results)

        return into


def check_parts(where: str, body: Callable[..., Any], parts: Iterable[Any]) -> None:
    """Raises TypeError unless ``parts`` are exactly the operators that the body calls."""
    stated, called = ({function.operator.mode for function in each} for each in (parts, called_operators(body).values()))
    if stated != called:
        raise TypeError(
            f"{where}: parts= must list the operators that {body.__name__} calls: {sorted(called)}, got {sorted(stated)}"
        )

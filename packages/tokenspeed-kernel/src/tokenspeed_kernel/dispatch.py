"""The functions that a public call runs through, generated from an operator's parameters.

A call must cost about a microsecond, checks included, so nothing about it is computed twice. What checks, traits and selection
depend on is the *description* of the arguments: dtypes, shapes, devices, and the values of plain options. The generated
function builds that description as one tuple and looks it up; what it finds is the callable that was checked, selected and
resolved for exactly such a call. Only a description that was never seen takes the slow path, `Operator.decide`.

The source is generated because attribute reads are most of the cost: a loop over the parameters would double it.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tokenspeed_kernel.parameters import Kind, Parameter


def _compile(name: str, source: str, namespace: dict[str, Any]) -> Any:
    filename = f"<tokenspeed_kernel {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)  # the source is ours: parameter names only
    return namespace[name]


def _tensor_terms(expression: str, first: bool, optional: bool) -> str:
    terms = f"{expression}.dtype, {expression}.shape, {expression}.get_device()"
    if first:
        # Its class keeps tracing subclasses apart from plain tensors.
        return f"type({expression}), {terms}"
    return f"None if {expression} is None else ({terms})" if optional else terms


def _attribute(holder: Parameter, field: Parameter) -> str:
    """Source that reads an attribute. Any object passes for an OBJECT, so an attribute with a default may be absent."""
    if field.required or holder.kind is not Kind.OBJECT:
        return field.name
    return f"getattr({holder.name}, {field.attribute!r}, _absent_{field.identifier})"


def _absent_values(parameters: Sequence[Parameter]) -> dict[str, Any]:
    """What `_attribute` puts in the place of absent attributes, by the name it uses."""
    holders = [p for p in parameters if p.kind is Kind.OBJECT]
    return {f"_absent_{f.identifier}": f.default for p in holders for f in p.fields if not f.required}


def _key_terms(parameters: Sequence[Parameter]) -> str:
    terms = []
    first = next((p for p in parameters if p.is_tensor and not p.optional), None)
    for parameter in parameters:
        if parameter.kind is Kind.TENSOR:
            terms.append(_tensor_terms(parameter.name, parameter is first, parameter.optional))
        elif parameter.kind is Kind.OBJECT:
            reads = [(f, _attribute(parameter, f)) for f in parameter.fields]
            inner = [_tensor_terms(read, False, f.optional) if f.is_tensor else read for f, read in reads]
            group = f"({', '.join(inner)},)"
            terms.append(f"None if {parameter.name} is None else {group}" if parameter.optional else group)
        elif parameter.kind is Kind.HINT:
            terms.append(f"{parameter.name} is None")
        else:
            terms.append(parameter.name)
    return ", ".join(terms)


def build_public_function(
    name: str,
    parameters: Sequence[Parameter],
    memo: Mapping[Any, Callable[..., Any]],
    decide: Callable[..., Callable[..., Any]],
    lowered: Callable[..., Any],
) -> Callable[..., Any]:
    """The function that users call.

    Args:
        name: its name.
        parameters: those of the operator.
        memo: description to resolved callable.
        decide: ``decide(arguments, override, solution)`` resolves a call that ``memo`` does not know.
        lowered: what the call becomes while torch.compile traces it; takes all parameters, then override and solution.
    """
    names = ", ".join(p.name for p in parameters)
    declared = ", ".join(p.name if p.required else f"{p.name}=_default_{p.name}" for p in parameters)
    source = f"""\
def {name}({declared}, *, override=None, solution=None):
    if _is_dynamo_compiling():
        return _lowered({names}, override, solution)
    try:
        _call = _memo[{_key_terms(parameters)}, override, solution]
    except (KeyError, TypeError, AttributeError):
        _call = None
    if _call is None:
        _call = _decide(({names},), override, solution)
    return _call({names})
"""
    namespace: dict[str, Any] = {
        "_is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
        "_lowered": lowered,
        "_memo": memo,
        "_decide": decide,
        **{f"_default_{p.name}": p.default for p in parameters if not p.required},
        **_absent_values(parameters),
    }
    return _compile(name, source, namespace)  # type: ignore[no-any-return]


def build_key_function(name: str, parameters: Sequence[Parameter]) -> Callable[..., Any]:
    """``key(arguments, override, solution)``: the description under which `build_public_function` looks a call up."""
    names = ", ".join(p.name for p in parameters)
    source = f"""\
def {name}_key(_arguments, override, solution):
    ({names},) = _arguments
    return {_key_terms(parameters)}, override, solution
"""
    return _compile(f"{name}_key", source, _absent_values(parameters))  # type: ignore[no-any-return]


def build_value_guard(
    name: str, parameters: Sequence[Parameter], watched: Sequence[str], hints: Sequence[str]
) -> Callable[..., Any]:
    """A function ``guard(check, call)`` that gives ``call`` preceded by ``check``, a check of values that lie in host memory.

    A model's layers pass the same lengths and page table many times a step, so the check runs only when a watched tensor is
    another one than last time or was written to since (its version counter tells). With a hint given, it always runs.
    """
    names = ", ".join(p.name for p in parameters)
    same = [f"{w} is _seen[{i}] and {w}._version == _seen[{len(watched) + i}]" for i, w in enumerate(watched)]
    same += [f"{hint} is None" for hint in hints]
    source = f"""\
def guard(_check, _call):
    _seen = (None,) * {2 * len(watched)}

    def {name}({names}):
        nonlocal _seen
        try:
            _same = {" and ".join(same) or "False"}
        except RuntimeError:  # tensors made in inference mode count no versions
            _same = False
        if not _same:
            _check({names})
            _seen = _remember({", ".join(watched)})
        return _call({names})

    return {name}
"""

    def remember(*tensors: torch.Tensor) -> tuple[Any, ...]:
        if any(t.is_inference() for t in tensors):
            return (None,) * (2 * len(tensors))
        return (*tensors, *(t._version for t in tensors))

    return _compile("guard", source, {"_remember": remember})  # type: ignore[no-any-return]

"""The functions that a public call runs through, generated from an operator's parameters.

A call must cost about a microsecond, checks included, so nothing about it is computed twice. What checks, traits and selection
depend on is the *description* of the arguments: dtypes, shapes, devices, and the values of plain options. What was decided for a
description is remembered under it, in two places:

* ``recent``: the last decision for each combination of options, with a guard that compares the tensors to those it was made for.
  The guard is PyTorch's own, one call into C++ for all tensors, and costs half of reading their attributes. It is not public, so
  it is tried out when this module is imported and left alone where it is missing or does not do what is needed
  (`tensor_guards`). It errs on the safe side: other strides, or one tensor passed twice, and it says no.
* ``memo``: every decision, under dtypes, shapes, devices and options as one tuple.

Only a description that is in neither takes the slow path, `Operator.decide`. The source is generated because attribute reads are
most of the cost: a loop over the parameters would double it.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tokenspeed_kernel_base.parameters import Kind, Parameter

Guard = Callable[..., bool]


@functools.cache
def tensor_guards() -> Callable[..., Guard] | None:
    """``make(*tensors)`` gives ``guard(*tensors)``, which tells whether other tensors have the classes, dtypes, devices, shapes
    and strides of those. None where PyTorch's guards are missing or do otherwise."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None

    def make(*tensors: torch.Tensor) -> Guard:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    plain = torch.empty(2, 3, device="cpu")
    alike = torch.empty(2, 3, device="cpu")
    unlike = [
        torch.empty(2, 4, device="cpu"),
        torch.empty(6, device="cpu"),
        torch.empty(2, 3, dtype=torch.float16, device="cpu"),
        torch.empty(2, 3, device="meta"),
        torch.nn.Parameter(alike, requires_grad=False),
    ]
    try:
        guard = make(plain, torch.empty(1, device="cpu"))
        second = torch.empty(1, device="cpu")
        works = guard(alike, second) and not any(guard(other, second) or guard(plain, other) for other in unlike)
    except (TypeError, ValueError, RuntimeError):
        return None
    return make if works else None


def _compile(name: str, source: str, namespace: dict[str, Any]) -> Any:
    filename = f"<tokenspeed_kernel {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)  # the source is ours: parameter names only
    return namespace[name]


def _tensor_terms(expression: str, optional: bool) -> str:
    # The class keeps fake, distributed and quantised tensors apart from plain ones.
    terms = f"type({expression}), {expression}.dtype, {expression}.shape, {expression}.device"
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
    for parameter in parameters:
        if parameter.kind is Kind.TENSOR:
            terms.append(_tensor_terms(parameter.name, parameter.optional))
        elif parameter.kind is Kind.OBJECT:
            reads = [(f, _attribute(parameter, f)) for f in parameter.fields]
            inner = [_tensor_terms(read, f.optional) if f.is_tensor else read for f, read in reads]
            group = f"({', '.join(inner)},)"
            terms.append(f"None if {parameter.name} is None else {group}" if parameter.optional else group)
        elif parameter.kind is Kind.HINT:
            terms.append(f"{parameter.name} is None")
        else:
            terms.append(parameter.name)
    return ", ".join(terms)


def _guarded_tensors(parameters: Sequence[Parameter]) -> tuple[list[str], list[tuple[str, str]]]:
    """Source that reads the tensors that are always there; and that of the others, each with what holds where it is absent."""
    always: list[str] = []
    sometimes: list[tuple[str, str]] = []
    for parameter in parameters:
        for tensor in parameter.tensors():
            read = tensor.name if tensor is parameter else _attribute(parameter, tensor)
            absences = [f"{p} is None" for p, may in ((parameter.name, parameter.optional), (read, tensor.optional)) if may]
            if absences:
                sometimes.append((read, " or ".join(dict.fromkeys(absences))))
            else:
                always.append(read)
    return always, sometimes


def _option_terms(parameters: Sequence[Parameter]) -> str:
    """All of a description but the tensors: options by value, and which of the optional tensors are absent."""
    terms = [f"({absent})" for _, absent in _guarded_tensors(parameters)[1]]
    for parameter in parameters:
        if parameter.kind is Kind.VALUE:
            terms.append(parameter.name)
        elif parameter.kind is Kind.HINT:
            terms.append(f"{parameter.name} is None")
        elif parameter.kind is Kind.OBJECT:
            reads = [_attribute(parameter, field) for field in parameter.fields if not field.is_tensor]
            terms += [f"None if {parameter.name} is None else {read}" if parameter.optional else read for read in reads]
    return ", ".join([*terms, "override", "solution"])


def build_public_function(
    name: str,
    parameters: Sequence[Parameter],
    memo: Mapping[Any, Callable[..., Any]],
    recent: Mapping[Any, tuple[Any, ...]] | None,
    decide: Callable[..., Callable[..., Any]],
    lowered: Callable[..., Any],
) -> Callable[..., Any]:
    """The function that users call.

    Args:
        name: its name.
        parameters: those of the operator.
        memo: description to resolved callable.
        recent: options to what `build_entry_function` makes; None to do without.
        decide: ``decide(arguments, override, solution)`` resolves a call that neither knows.
        lowered: what the call becomes while torch.compile traces it; takes all parameters, then override and solution.
    """
    names = ", ".join(p.name for p in parameters)
    declared = ", ".join(p.name if p.required else f"{p.name}=_default_{p.name}" for p in parameters)
    always, sometimes = _guarded_tensors(parameters)
    guards = "".join(f"_guard_{i}, " for i in range(len(sometimes)))
    agree = [f"_guard({', '.join(always)})", *(f"({absent} or _guard_{i}({read}))" for i, (read, absent) in enumerate(sometimes))]
    look_at_recent = f"""
    try:
        _guard, {guards}_call = _recent[{_option_terms(parameters)}]
        if not ({" and ".join(agree)}):
            _call = None
    except (KeyError, TypeError, AttributeError):
        _call = None
    if _call is not None:
        return _call({names})"""
    source = f"""\
def {name}({declared}, *, override=None, solution=None):
    if _is_dynamo_compiling():
        return _lowered({names}, override, solution){"" if recent is None else look_at_recent}
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
        "_recent": recent,
        "_decide": decide,
        **{f"_default_{p.name}": p.default for p in parameters if not p.required},
        **_absent_values(parameters),
    }
    return _compile(name, source, namespace)  # type: ignore[no-any-return]


def build_entry_function(name: str, parameters: Sequence[Parameter], make_guard: Callable[..., Guard]) -> Callable[..., Any]:
    """``entry(arguments, override, solution, call)``: key and value under which a decision goes into ``recent``."""
    names = ", ".join(p.name for p in parameters)
    always, sometimes = _guarded_tensors(parameters)
    guards = "".join(f"None if {absent} else _make({read}), " for read, absent in sometimes)
    source = f"""\
def {name}_entry(_arguments, override, solution, _call):
    ({names},) = _arguments
    return ({_option_terms(parameters)}), (_make({", ".join(always)}), {guards}_call)
"""
    return _compile(f"{name}_entry", source, {"_make": make_guard, **_absent_values(parameters)})  # type: ignore[no-any-return]


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
def {name}_guard(_check, _call):
    _remembered = (None,) * {2 * len(watched)}

    def {name}({names}):
        nonlocal _remembered
        _seen = _remembered  # read once: another thread may replace it
        try:
            _same = {" and ".join(same) or "False"}
        except RuntimeError:  # tensors made in inference mode count no versions
            _same = False
        if not _same:
            _check({names})
            _remembered = _remember({", ".join(watched)})
        return _call({names})

    return {name}
"""

    def remember(*tensors: torch.Tensor) -> tuple[Any, ...]:
        if any(t.is_inference() for t in tensors):
            return (None,) * (2 * len(tensors))
        return (*tensors, *(t._version for t in tensors))

    return _compile(f"{name}_guard", source, {"_remember": remember})  # type: ignore[no-any-return]

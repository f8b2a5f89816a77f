"""The functions that a public call runs through, generated from an operator's parameters.

A call must cost about a microsecond, checks included, so nothing about it is computed twice. What checks, traits and selection
depend on is the *description* of the arguments: dtypes, shapes, devices, the values of plain options, and the keys of resources.
What was decided for a
description is remembered under it, in two places:

* ``recent``: the last decision for each combination of options, with a guard that compares the tensors to those it was made for.
  The guard is PyTorch's own, one call into C++ for all tensors, and costs half of reading their attributes. It is not public, so
  it is tried out when this module is imported and left alone where it is missing or does not do what is needed
  (`tensor_guards`). It errs on the safe side: other strides, or one tensor passed twice, and it says no.
* ``memo``: every decision, under dtypes, shapes, devices and options as one tuple.

Options are looked up with their types, because 1, 1.0 and True are one key to a dictionary and not one option. Bounds (the longest
sequence, say) are no part of a description: a decision holds for a range of them, which is compared.

Only a description that is in neither place takes the slow path, `Operator.decide`. The source is generated because attribute reads
are most of the cost: a loop over the parameters would double it.
"""

from __future__ import annotations

import functools
import linecache
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tokenspeed_kernel_base.memory import lies_like, span
from tokenspeed_kernel_base.parameters import Kind, Parameter

Guard = Callable[..., bool]


@functools.cache
def tensor_guards() -> Callable[..., Guard] | None:
    """``make(*tensors)`` gives ``guard(*tensors)``, which tells whether other tensors have the classes, dtypes, devices, shapes
    and strides of those, and need a gradient as those do. None where PyTorch's guards are missing or do otherwise."""
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
    with torch.enable_grad():
        unlike.append(torch.empty(2, 3, device="cpu", requires_grad=True))
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


# -- what is read of the arguments ---------------------------------------------------------------------------------------------


def _attribute(holder: Parameter, field: Parameter) -> str:
    """Source that reads an attribute. Any object passes for an OBJECT, so an attribute with a default may be absent."""
    if field.required or holder.kind is not Kind.OBJECT:
        return field.name
    return f"getattr({holder.name}, {field.attribute!r}, _default_{field.identifier})"


def _default_values(parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The defaults of options, and of attributes, by the names that the source has for them."""
    every = [field for parameter in parameters for field in (parameter, *parameter.fields)]
    return {f"_default_{p.identifier}": p.default for p in every if not p.required}


def _tensors(parameters: Sequence[Parameter]) -> list[tuple[str, str]]:
    """Source that reads each tensor, and that of a test whether it is absent; empty where it never is."""
    found = []
    for parameter in parameters:
        for tensor in parameter.tensors():
            read = tensor.name if tensor is parameter else _attribute(parameter, tensor)
            absences = [f"{p} is None" for p, may in ((parameter.name, parameter.optional), (read, tensor.optional)) if may]
            found.append((read, " or ".join(dict.fromkeys(absences))))
    return found


def _guarded(parameters: Sequence[Parameter]) -> tuple[list[str], list[tuple[str, str]]]:
    """The tensors that are always there; and the others, each with what holds where it is absent."""
    tensors = _tensors(parameters)
    return [read for read, absent in tensors if not absent], [(read, absent) for read, absent in tensors if absent]


def _value_terms(parameter: Parameter, read: str) -> str:
    """An option and its type; of a tuple, those of what it holds. A dtype, and an object of ours, is like no other. Most options
    are left out in most calls, so that the default itself is told first."""
    if tuple in parameter.types:
        told = f"({read}, {read} and tuple(map(type, {read})))"
    elif parameter.fields or parameter.types == (torch.dtype,):
        return read
    else:
        told = f"(type({read}), {read})"
    default = f"_default_{parameter.identifier}"
    return told if parameter.required else f"{default} if {read} is {default} else {told}"


def _option_terms(parameters: Sequence[Parameter]) -> str:
    """All of a description but the tensors: options by type and value, and which of the optional tensors are absent."""
    terms = [f"({absent})" for _, absent in _guarded(parameters)[1]]
    for parameter in parameters:
        if parameter.kind is Kind.HINT:
            terms.append(f"{parameter.name} is None")
        elif parameter.bound:
            terms += [f"{parameter.name} is None"] * parameter.optional
        elif parameter.kind is Kind.VALUE:
            terms.append(_value_terms(parameter, parameter.name))
        elif parameter.kind is Kind.RESOURCE:
            read = f"(type({parameter.name}), {parameter.name}.key)"
            terms.append(f"None if {parameter.name} is None else {read}" if parameter.optional else read)
        elif parameter.kind is Kind.OBJECT:
            reads = [_value_terms(field, _attribute(parameter, field)) for field in parameter.fields if not field.is_tensor]
            terms += [f"None if {parameter.name} is None else ({read})" if parameter.optional else read for read in reads]
    return ", ".join([*terms, "override", "solution"])


def _key_terms(parameters: Sequence[Parameter], written: Sequence[str]) -> str:
    """A whole description. Strides belong to it where the caller provides memory to write to, because whether tensors overlap
    depends on them. The class keeps fake, distributed and quantised tensors apart from plain ones."""
    tensors = _tensors(parameters)
    terms = []
    for read, absent in tensors:
        told = f"type({read}), {read}.dtype, {read}.shape, {read}.device, {read}.layout"
        terms.append(f"None if {absent} else ({told})" if absent else told)
    strides = ", ".join(f"None if {absent} else {read}.stride()" if absent else f"{read}.stride()" for read, absent in tensors)
    given = " and ".join(f"{name} is None" for name in written)
    if given:
        terms.append(f"None if {given} else ({strides},)")
    return ", ".join([*terms, _option_terms(parameters)])


def _bounds(parameters: Sequence[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if parameter.bound]


def _within_terms(parameters: Sequence[Parameter]) -> list[str]:
    """Tests that the bounds of a call are within what a decision holds for."""
    return [
        (f"({p.name} is None or " if p.optional else "(") + f"type({p.name}) is int and _least_{i} <= {p.name} <= _most_{i})"
        for i, p in enumerate(_bounds(parameters))
    ]


def _limit_names(parameters: Sequence[Parameter]) -> str:
    return "".join(f"_least_{i}, _most_{i}, " for i in range(len(_bounds(parameters))))


# -- the functions -------------------------------------------------------------------------------------------------------------


def build_public_function(
    name: str,
    parameters: Sequence[Parameter],
    written: Sequence[str],
    memo: Mapping[Any, Any],
    recent: Mapping[Any, tuple[Any, ...]] | None,
    decide: Callable[..., Callable[..., Any]],
    lowered: Callable[..., Any],
) -> Callable[..., Any]:
    """The function that users call.

    Args:
        name: its name.
        parameters: those of the operator.
        written: parameters whose memory it writes to.
        memo: description to the limits of the bounds, and the resolved callable.
        recent: options to what `build_entry_functions` makes; None to do without.
        decide: ``decide(arguments, override, solution)`` resolves a call that neither knows.
        lowered: what the call becomes while torch.compile traces it; takes all parameters, then override and solution.
    """
    names = ", ".join(p.name for p in parameters)
    declared = ", ".join(p.name if p.required else f"{p.name}=_default_{p.name}" for p in parameters)
    always, sometimes = _guarded(parameters)
    guards = "".join(f"_guard_{i}, " for i in range(len(sometimes)))
    # The guard reads strides, which a nested tensor has none of: the process would end there, without an exception.
    agree = [f"not ({' or '.join(f'{read}.is_nested' for read in always)})", f"_guard({', '.join(always)})"]
    agree += [f"({absent} or not {read}.is_nested and _guard_{i}({read}))" for i, (read, absent) in enumerate(sometimes)]
    look_at_recent = f"""
    try:
        _guard, {guards}{_limit_names(parameters)}_call = _recent[{_option_terms(parameters)}]
        if not ({" and ".join([*_within_terms(parameters), *agree])}):
            _call = None
    except (KeyError, TypeError, AttributeError):
        _call = None
    if _call is not None:
        return _call({names})"""
    source = f"""\
def {name}({declared}, *, override=None, solution=None):{"" if recent is None else look_at_recent}
    return _otherwise({names}, override, solution)
"""

    def otherwise(*args: Any) -> Any:
        """What is not in ``recent``. Compiled when it is first needed: importing the package would take longer by a tenth."""
        namespace["_otherwise"] = build_otherwise(name, parameters, written, memo, decide)
        return namespace["_otherwise"](*args)

    namespace: dict[str, Any] = {
        "_recent": recent,
        "_otherwise": otherwise,
        **_default_values(parameters),
    }
    function = _compile(name, source, namespace)
    # What torch.compile traces in the function's place: asking at every call whether it does would cost a tenth of the call.
    function._torchdynamo_inline = _traced(parameters, lowered)
    return function  # type: ignore[no-any-return]


def _traced(parameters: Sequence[Parameter], lowered: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes what the public one takes and calls ``lowered``, in terms that torch.compile can trace."""
    names = tuple(parameter.name for parameter in parameters)
    defaults = {parameter.name: parameter.default for parameter in parameters if not parameter.required}

    def traced(*args: Any, override: str | None = None, solution: str | None = None, **options: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **options}
        if len(args) > len(names) or len(given) != len(args) + len(options) or any(name not in names for name in options):
            raise TypeError("the arguments are not those of the operator; call it without torch.compile to see which")
        values = {**defaults, **given}
        return lowered(*(values[name] for name in names), override, solution)

    return traced


def build_otherwise(
    name: str,
    parameters: Sequence[Parameter],
    written: Sequence[str],
    memo: Mapping[Any, Any],
    decide: Callable[..., Callable[..., Any]],
) -> Callable[..., Any]:
    """A function of all parameters, override and solution, that looks the call up by its whole description, or decides it."""
    names = ", ".join(p.name for p in parameters)
    limits, within = _limit_names(parameters), " and ".join(_within_terms(parameters)) or "True"
    graded = " or ".join(f"{f'not ({absent}) and ' if absent else ''}{read}.requires_grad" for read, absent in _tensors(parameters))
    source = f"""\
def {name}({names}, override, solution):
    try:
        {limits or "*_, "}_call = _memo[{_key_terms(parameters, written)}]
        if not ({within}) or (_is_grad_enabled() and ({graded})):
            _call = None
    except (KeyError, TypeError, AttributeError, RuntimeError):
        _call = None
    if _call is None:
        _call = _decide(({names},), override, solution)
    return _call({names})
"""
    namespace = {"_is_grad_enabled": torch.is_grad_enabled, "_memo": memo, "_decide": decide, **_default_values(parameters)}
    return _compile(name, source, namespace)  # type: ignore[no-any-return]


def build_entry_functions(
    name: str, parameters: Sequence[Parameter], written: Sequence[str], make_guard: Callable[..., Guard] | None
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """``memo_entry(arguments, override, solution, limits, call)`` and the like for ``recent``: key and value under which a decision
    is remembered. ``limits``: least and most of each bound, one after another."""
    names = ", ".join(p.name for p in parameters)
    always, sometimes = _guarded(parameters)
    guards = "".join(f"None if {absent} else _make({read}), " for read, absent in sometimes)
    source = f"""\
def {name}_memo_entry(_arguments, override, solution, _limits, _call):
    ({names},) = _arguments
    return ({_key_terms(parameters, written)}), (*_limits, _call)


def {name}_recent_entry(_arguments, override, solution, _limits, _call):
    ({names},) = _arguments
    return ({_option_terms(parameters)}), (_make({", ".join(always)}), {guards}*_limits, _call)


{name}_entries = {name}_memo_entry, {name}_recent_entry
"""
    memo_entry, recent_entry = _compile(f"{name}_entries", source, {"_make": make_guard, **_default_values(parameters)})
    return memo_entry, recent_entry if make_guard is not None else None


def build_value_guard(
    name: str, parameters: Sequence[Parameter], watched: Sequence[str], hints: Sequence[str]
) -> Callable[..., Any]:
    """A function ``guard(check, call)`` that gives ``call`` preceded by ``check``, a check of values that lie in host memory.

    A model's layers pass the same lengths and page table many times a step, so the check runs only when a watched tensor is
    another one than last time or was written to since (its version counter tells; it does not count writes through NumPy or
    ``.data``), or a bound is another. With a hint given, it always runs. The tensors are not kept alive.
    """
    names = ", ".join(p.name for p in parameters)
    same = [f"{w} is _seen[{i}]() and {w}._version == _seen[{len(watched) + i}]" for i, w in enumerate(watched)]
    bounds = [parameter.name for parameter in parameters if parameter.bound]
    same += [f"{bound} == _seen[{2 * len(watched) + i}]" for i, bound in enumerate(bounds)]
    same += [f"{hint} is None" for hint in hints]
    source = f"""\
def {name}_guard(_check, _call):
    _remembered = _nothing

    def {name}({names}):
        nonlocal _remembered
        _seen = _remembered  # read once: another thread may replace it
        try:
            _same = {" and ".join(same) or "False"}
        except RuntimeError:  # tensors made in inference mode count no versions
            _same = False
        if not _same:
            _check({names})
            _remembered = (*_remember({", ".join(watched)}), {"".join(f"{bound}, " for bound in bounds)})
        return _call({names})

    return {name}
"""
    nothing = (lambda: _NOTHING,) * len(watched) + (None,) * (len(watched) + len(bounds))

    def remember(*tensors: torch.Tensor) -> tuple[Any, ...]:
        if any(t.is_inference() for t in tensors):
            return nothing[: 2 * len(watched)]
        return (*map(weakref.ref, tensors), *(t._version for t in tensors))

    return _compile(f"{name}_guard", source, {"_remember": remember, "_nothing": nothing})  # type: ignore[no-any-return]


_NOTHING = object()


def build_overlap_guard(
    name: str, parameters: Sequence[Parameter], pairs: Sequence[tuple[str, str, bool]], tensors: Mapping[str, torch.Tensor]
) -> Callable[..., Any]:
    """A function ``guard(check, call)`` that gives ``call`` preceded by ``check`` where tensors may overlap that must not.

    Where they lie is compared at every call, in terms of their addresses: a distance between two that was found to be right is
    right again, because shapes and strides are those of the description.

    Args:
        name: of the operator.
        parameters: those of the operator.
        pairs: names of a tensor that is written to, and of another; then whether they may be one tensor.
        tensors: those of a call of this description, by name.
    """
    names = ", ".join(p.name for p in parameters)
    reads = {tensor.name: tensor.name if tensor is p else _attribute(p, tensor) for p in parameters for tensor in p.tensors()}
    used = dict.fromkeys(tensor for pair in pairs for tensor in pair[:2])
    addresses = {tensor: f"_at_{i}" for i, tensor in enumerate(used)}
    lines = [f"        {address} = {reads[tensor]}.data_ptr()" for tensor, address in addresses.items()]
    known: dict[str, set[int]] = {}
    for index, (written, other, may_be_one) in enumerate(pairs):
        low, high = -span(tensors[other]), span(tensors[written])
        known[f"_right_{index}"] = {0} if may_be_one and lies_like(tensors[written], tensors[other]) else set()
        lines += [
            f"        _apart = {addresses[other]} - {addresses[written]}",
            f"        if {low} < _apart < {high} and _apart not in _right_{index}:",
            f"            _check({names})",
            f"            _right_{index}.add(_apart)",
        ]
    body = "\n".join(lines)
    source = f"""\
def {name}_apart(_check, _call):
    def {name}({names}):
{body}
        return _call({names})

    return {name}
"""
    return _compile(f"{name}_apart", source, {**known, **_default_values(parameters)})  # type: ignore[no-any-return]

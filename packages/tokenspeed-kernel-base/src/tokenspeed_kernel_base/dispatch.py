"""Source-generated functions that a public call runs through.

A call must cost about a microsecond, checks included, so nothing is computed twice. Checks, traits and selection depend only on the
call's *description*: dtypes, shapes, devices, values of plain options, and keys of resources. The decision for a description is
memoised in two caches:

* ``recent``, the fast path: comparisons with the last decided calls, which do not build the description. See
  `tokenspeed_kernel_base.recent`.
* ``memo``: every decision. Its key is the description as one tuple.

The key holds each option's type beside its value, because 1, 1.0 and True are equal dictionary keys but different options. Bounds
(the longest sequence, say) are not in the key: a decision holds for a range of each bound, and each call's bounds are compared with
that range.

A miss in both caches takes the slow path, `Caller.decide`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from tokenspeed_kernel_base.generated import compile_source
from tokenspeed_kernel_base.memory import lies_like, span
from tokenspeed_kernel_base.parameters import Parameter
from tokenspeed_kernel_base.terms import (
    attribute_of,
    bounds_of,
    default_values,
    key_terms,
    limit_names,
    tensor_reads,
    within_terms,
)

FIRST = "first"


def build_public_function(
    name: str,
    parameters: Sequence[Parameter],
    written: Sequence[str],
    memo: Mapping[Any, Any],
    recent: Mapping[str, Callable[..., Any]] | None,
    decide: Callable[..., Callable[..., Any]],
    lowered: Callable[..., Any],
) -> Callable[..., Any]:
    """The function that users call.

    Args:
        name: its name.
        parameters: the operator's.
        written: parameters whose memory the operator writes to.
        memo: maps a description to the limits of the bounds and the resolved callable.
        recent: holds under `FIRST` a function of all parameters, override and solution, which is tried first; None disables the
            fast path.
        decide: ``decide(arguments, override, solution)`` resolves a call that misses both caches.
        lowered: replaces the call while torch.compile traces it; takes all parameters, then override and solution.
    """
    names = ", ".join(p.name for p in parameters)
    declared = ", ".join(p.name if p.required else f"{p.name}=_default_{p.name}" for p in parameters)
    fast_path = f"""
    try:
        _first = _recent[{FIRST!r}]
    except KeyError:
        _first = _otherwise
    return _first({names}, override, solution)"""
    source = f"""\
def {name}({declared}, *, override=None, solution=None):{fast_path if recent is not None else ""}
    return _otherwise({names}, override, solution)
"""

    def otherwise(*args: Any) -> Any:
        """The path after a miss in ``recent``. Compiled on first use: compiling it at import would make the import a tenth
        slower."""
        namespace["_otherwise"] = build_otherwise(name, parameters, written, memo, decide)
        return namespace["_otherwise"](*args)

    namespace: dict[str, Any] = {
        "_recent": recent,
        "_otherwise": otherwise,
        **default_values(parameters),
    }
    function = compile_source(name, source, namespace)
    # torch.compile traces this in the function's stead. A test for tracing at every call would cost a tenth of the call.
    vars(function)["_torchdynamo_inline"] = _traced(parameters, lowered)
    return function


def _traced(parameters: Sequence[Parameter], lowered: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the public signature that calls ``lowered``, written so that torch.compile can trace it."""
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
    """A function of all parameters, override and solution. It looks the call up in ``memo`` by its description, and decides it on a
    miss."""
    names = ", ".join(p.name for p in parameters)
    limits, within = limit_names(parameters), " and ".join(within_terms(parameters)) or "True"
    graded = " or ".join(
        f"{f'not ({absent}) and ' if absent else ''}{read}.requires_grad" for read, absent in tensor_reads(parameters)
    )
    source = f"""\
def {name}({names}, override, solution):
    try:
        {limits or "*_, "}_call = _memo[{key_terms(parameters, written)}]
        if not ({within}) or (_is_grad_enabled() and ({graded})):
            _call = None
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
        _call = None
    if _call is None:
        _call = _decide(({names},), override, solution)
    return _call({names})
"""
    namespace = {"_is_grad_enabled": torch.is_grad_enabled, "_memo": memo, "_decide": decide, **default_values(parameters)}
    return compile_source(name, source, namespace, "by description")


def build_entry_function(name: str, parameters: Sequence[Parameter], written: Sequence[str]) -> Callable[..., Any]:
    """``entry(arguments, override, solution, limits, call)`` returns the memo's key and value for a decision. ``limits``: lower and
    upper limit of each bound, in order."""
    names = ", ".join(p.name for p in parameters)
    source = f"""\
def {name}_entry(_arguments, override, solution, _limits, _call):
    ({names},) = _arguments
    return ({key_terms(parameters, written)}), (*_limits, _call)
"""
    return compile_source(f"{name}_entry", source, default_values(parameters))


def build_replacing(name: str, parameters: Sequence[Parameter], names: Collection[str]) -> Callable[..., Any]:
    """``replacing(call, options)`` returns a function that calls ``call`` with the arguments of these names replaced by
    ``options``."""
    given = ", ".join(p.name for p in parameters)
    passed = ", ".join(f"_{p.name}" if p.name in names else p.name for p in parameters)
    unpacked = "\n".join(f"    _{option} = _options[{option!r}]" for option in names)
    source = f"""\
def {name}_replacing(_call, _options):
{unpacked}

    def {name}({given}):
        return _call({passed})

    return {name}
"""
    return compile_source(f"{name}_replacing", source, {})


# -- values in host memory -----------------------------------------------------------------------------------------------------


def value_check(parameters: Sequence[Parameter], watched: Sequence[str], hints: Sequence[str]) -> str:
    """Source that checks values in host memory before the kernel is called.

    A model's layers pass the same lengths and page table many times per step. So the check runs only when a watched tensor is
    another object, a watched tensor was written to since, or a bound changed. Writes are detected by the tensor's version counter,
    which misses writes through NumPy or ``.data``. The check always runs when a hint is given or nothing is watched. Watched
    tensors are held by weak reference.
    """
    names = ", ".join(p.name for p in parameters)
    if not watched:
        return f"        _check({names})"
    bounds = [parameter.name for parameter in bounds_of(parameters)]
    seen = [*(f"_seen_{w}" for w in watched), *(f"_version_{w}" for w in watched), *(f"_last_{bound}" for bound in bounds)]
    same = [f"{hint} is None" for hint in hints]
    same += [f"{w} is _seen_{w}() and {w}._version == _version_{w}" for w in watched]
    same += [f"{bound} == _last_{bound}" for bound in bounds]
    return f"""\
        ({", ".join(seen)},) = _seen[0]  # read once: another thread may replace it
        try:
            _same = {" and ".join(same)}
        except RuntimeError:  # tensors made in inference mode count no versions
            _same = False
        if not _same:
            _check({names})
            _seen[0] = _remember(({"".join(f"{w}, " for w in watched)}), ({"".join(f"{bound}, " for bound in bounds)}))"""


def nothing_checked(parameters: Sequence[Parameter], watched: Sequence[str]) -> tuple[Any, ...]:
    """The initial state of `value_check`, before any check."""
    return _never(len(watched)) + (None,) * len(bounds_of(parameters))


def _never(watched: int) -> tuple[Any, ...]:
    return (lambda: _NOTHING,) * watched + (None,) * watched


def remember_checked(tensors: tuple[torch.Tensor, ...], bounds: tuple[int | None, ...]) -> tuple[Any, ...]:
    """The state of `value_check` after a check of these tensors and bounds."""
    if any(t.is_inference() for t in tensors):
        return _never(len(tensors)) + bounds
    return (*map(weakref.ref, tensors), *(t._version for t in tensors), *bounds)


def build_value_guard(
    name: str, parameters: Sequence[Parameter], watched: Sequence[str], hints: Sequence[str]
) -> Callable[..., Any]:
    """``guard(check, call, seen)`` returns ``call`` preceded by ``check`` wherever `value_check` requires it. ``check`` tests
    values in host memory. ``seen`` is a one-element list with the state of the last check, initially `nothing_checked`."""
    names = ", ".join(p.name for p in parameters)
    source = f"""\
def {name}_guard(_check, _call, _seen):
    def {name}({names}):
{value_check(parameters, watched, hints)}
        return _call({names})

    return {name}
"""
    return compile_source(f"{name}_guard", source, {"_remember": remember_checked})


_NOTHING = object()


def build_overlap_guard(
    name: str, parameters: Sequence[Parameter], pairs: Sequence[tuple[str, str, bool]], tensors: Mapping[str, torch.Tensor]
) -> Callable[..., Any]:
    """``guard(check, call)`` returns ``call`` preceded by ``check``, which runs where tensors that must be disjoint may overlap.

    Every call compares the tensors' addresses. A distance between two addresses that passed the check once always passes, because
    shapes and strides are part of the description.

    Args:
        name: the operator's.
        parameters: the operator's.
        pairs: the name of a written tensor, the name of another tensor, and whether the two may be the same tensor.
        tensors: the tensors of one call of this description, by name.
    """
    names = ", ".join(p.name for p in parameters)
    reads = {tensor.name: tensor.name if tensor is p else attribute_of(p, tensor) for p in parameters for tensor in p.tensors()}
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
    return compile_source(f"{name}_apart", source, {**known, **default_values(parameters)})

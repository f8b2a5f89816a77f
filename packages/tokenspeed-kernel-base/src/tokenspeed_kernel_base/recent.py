"""The fast path: compares a call with the last decided calls, without building its description.

Each decided call gets a generated comparison function. A call hits if the same tensors and options are absent, its options are the
same objects or equal ones of the same types, and its tensors pass PyTorch's own guards. The guards are one C++ call for all
tensors, at half the cost of reading the tensors' attributes. A miss goes on to the comparison of the call decided before, and after
the last comparison to the memo (`dispatch.build_otherwise`).

The guards are private to PyTorch. `tensor_guards` tests them on first use; the fast path is disabled if they are missing or behave
differently. The guards err on the safe side: other strides, or one tensor passed twice, are a miss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tokenspeed_kernel_base.dispatch import remember_checked, value_check
from tokenspeed_kernel_base.generated import compile_source
from tokenspeed_kernel_base.parameters import Parameter
from tokenspeed_kernel_base.terms import (
    absences,
    default_values,
    limit_names,
    option_reads,
    tensor_reads,
    within_terms,
)

Guard = Callable[..., bool]

# Number of decided calls that a call is compared with. A model alternates between a few kinds of calls of an operator: layers with
# and without a window, or the GEMMs of a layer. Each failed comparison costs 0.2 us, and the look-up in the memo 1 us.
CHAIN = 4


@functools.cache
def tensor_guards() -> Callable[..., Guard] | None:
    """``make(*tensors)`` returns ``guard(*tensors)``, which tests whether other tensors have the same classes, dtypes, devices,
    shapes, strides and need for a gradient. None if PyTorch's guards are missing or behave differently."""
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


class Decided(NamedTuple):
    """The decision for a call.

    Attributes:
        call: the function to run; takes all parameters in order.
        limits: lower and upper limit of each bound, in order.
        watched: parameters whose values lie in host memory and are checked.
        hints: parameters that repeat a tensor's values on the host.
        check: checks these values; takes all parameters in order. None if there is nothing to check.
        seen: a one-element list with the state of the last check, shared by all comparisons with this decision.
    """

    call: Callable[..., Any]
    limits: Sequence[int] = ()
    watched: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    check: Callable[..., Any] | None = None
    seen: Sequence[Any] = ()


class _Pattern(NamedTuple):
    """The properties of a call that determine the source of its comparison: which `absences` hold, which options are None, which
    tensors share a guard, and which values are checked."""

    absent: tuple[bool, ...]
    unset: tuple[bool, ...]
    groups: tuple[tuple[int, ...], ...]
    watched: tuple[str, ...]
    checked: bool


class RecentCalls:
    """Builds comparisons with calls of one operator.

    Args:
        name: the operator's.
        parameters: the operator's.
        written: parameters whose memory the operator writes to.
        make_guard: see `tensor_guards`.
    """

    def __init__(
        self, name: str, parameters: Sequence[Parameter], written: Sequence[str], make_guard: Callable[..., Guard]
    ) -> None:
        self._name, self._parameters, self._make_guard = name, parameters, make_guard
        self._names = ", ".join(p.name for p in parameters)
        self._tensors = [read for read, _ in tensor_reads(parameters)]
        self._written = {index for index, read in enumerate(self._tensors) if read in written}
        self._absences, self._options = absences(parameters), option_reads(parameters)
        self._builders: dict[_Pattern, Callable[..., Any]] = {}
        self._read = self._build_read()

    def comparison(
        self, arguments: tuple[Any, ...], override: str | None, solution: str | None, decided: Decided
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """``make(otherwise)`` returns a function of all parameters, override and solution. It calls ``decided.call`` for a call
        like the one with these arguments, and ``otherwise`` for any other call."""
        absent, tensors, options, key = self._read(arguments, override, solution)
        groups = self._groups(tensors)
        unset = tuple(value is None for value in key)
        pattern = _Pattern(absent, unset, groups, decided.watched, decided.check is not None)
        if pattern not in self._builders:
            self._builders[pattern] = self._build(pattern, decided.hints)
        guards = [self._make_guard(*(tensors[index] for index in group)) for group in groups]
        return functools.partial(self._builders[pattern], guards, options, key, decided)

    def _groups(self, tensors: Sequence[torch.Tensor | None]) -> tuple[tuple[int, ...], ...]:
        """The indices of the tensors, grouped by guard. A guard rejects one tensor given twice. So written tensors and inputs are
        in different groups, because a written tensor may be an input in this call or in another."""
        groups: list[list[int]] = [[], []]
        for index, tensor in enumerate(tensors):
            if tensor is not None:
                fitting = groups[1:] if index in self._written else [groups[0], *groups[2:]]
                group = next((group for group in fitting if all(tensor is not tensors[other] for other in group)), None)
                if group is None:
                    group = []
                    groups.append(group)
                group.append(index)
        return tuple(tuple(group) for group in groups if group)

    # -- the source ------------------------------------------------------------------------------------------------------------

    def _build_read(self) -> Callable[..., Any]:
        """A function of a call that returns which `absences` hold, the tensors, the options, and the values that options are
        compared by."""
        absent = "".join(f"({test}), " for test in self._absences)
        tensors = "".join(f"({source}), " for source in _unless_absent(tensor_reads(self._parameters)))
        options = "".join(f"({o.unless_absent(o.read) if o.lasting else None}), " for o in self._options)
        key = "".join(f"({o.unless_absent(f'None if {o.read} is None else {o.key}')}), " for o in self._options)
        source = f"""\
def {self._name}_read(_arguments, override, solution):
    ({self._names},) = _arguments
    return ({absent}), ({tensors}), ({options}), ({key})
"""
        return compile_source(f"{self._name}_read", source, default_values(self._parameters))

    def _terms(self, pattern: _Pattern) -> list[str]:
        """Tests that a call is like the decided one. Tests that are cheap and fail for most other calls come first."""
        terms = [f"({test})" if absent else _negated(test) for test, absent in zip(self._absences, pattern.absent, strict=True)]
        for index, (option, unset) in enumerate(zip(self._options, pattern.unset, strict=True)):
            if unset:
                terms.append(f"({option.unless_absent(option.read)}) is None")
            else:
                # An equal option of another type is a different option, so that a type error does not depend on earlier calls.
                same = f"{option.read} is _option_{index} or " if option.lasting else ""
                terms.append(f"({same}{option.key} == _key_{index})")
        terms += within_terms(self._parameters)
        given = [self._tensors[index] for group in pattern.groups for index in group]
        if given:
            # The guard reads strides. A nested tensor has none, and reading them in the guard ends the process without an
            # exception.
            terms.append(f"not ({' or '.join(f'{read}.is_nested' for read in given)})")
        for index, group in enumerate(pattern.groups):
            terms.append(f"_guard_{index}({', '.join(self._tensors[one] for one in group)})")
        return terms

    def _build(self, pattern: _Pattern, hints: Sequence[str]) -> Callable[..., Any]:
        """Builds ``make(guards, options, key, decided, otherwise)`` for calls of one pattern; `comparison` binds all but
        ``otherwise``."""
        unpacked = {
            "guards": "".join(f"_guard_{index}, " for index in range(len(pattern.groups))),
            "options": "".join(f"_option_{index}, " for index in range(len(self._options))),
            "key": "".join(f"_key_{index}, " for index in range(len(self._options))),
            "decided.limits": limit_names(self._parameters),
        }
        setup = "\n".join(f"    ({names}) = _{value}" for value, names in unpacked.items() if names)
        check = value_check(self._parameters, pattern.watched, hints) if pattern.checked else ""
        made = f"{self._name}_like_{len(self._builders)}"
        source = f"""\
def {made}(_guards, _options, _key, _decided, _otherwise):
{setup}
    _call, _check, _seen = _decided.call, _decided.check, _decided.seen

    def {self._name}({self._names}, override, solution):
        try:
            _like = {" and ".join(self._terms(pattern))}
        except (AttributeError, TypeError, ValueError):
            _like = False
        if not _like:
            return _otherwise({self._names}, override, solution)
{check}
        return _call({self._names})

    return {self._name}
"""
        namespace = {"_remember": remember_checked, **default_values(self._parameters)}
        return compile_source(made, source, namespace)


def _unless_absent(reads: Sequence[tuple[str, str]]) -> list[str]:
    return [f"None if {absent} else {read}" if absent else read for read, absent in reads]


def _negated(test: str) -> str:
    """The test that a tensor or option is present. ``is not None`` is faster than a negated ``is None`` by nanoseconds."""
    return " and ".join(f"{part} is not None" for part in test.removesuffix(" is None").split(" is None or "))

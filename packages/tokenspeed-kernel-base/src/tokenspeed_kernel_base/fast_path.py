"""The fast path: functions, generated for each operator, that run calls whose kernel is already decided.

A call must cost about a microsecond, checks included. Reading tensors' attributes takes most of that time, and a loop over the
parameters would double it. So the source of these functions is generated from the operator's parameters, and everything else, in
`tokenspeed_kernel_base.calling`, is plain Python. A call uses the first of the following that has a decision for it:

1. **Comparisons** with the last decisions, newest first. A call hits if three conditions hold: the same tensors and options are
   absent, its options are the same objects or equal ones of equal types, and its tensors pass PyTorch's guards. The guards are one
   C++ call for all tensors, at half the cost of reading the tensors' attributes.
2. The memo of all decisions (`Caller._look_up`). Its key is the call's *description*: dtypes, shapes, devices, values of plain
   options, and keys of resources. The key holds each option's type beside its value, because 1, 1.0 and True are equal dictionary
   keys but different options. Bounds (the longest sequence, say) are not in the key: a decision holds for a range of each bound.
3. The slow path (`Caller.decide`).

`inspect` and tracebacks show the generated source. A debugger steps through it: see `tokenspeed_kernel_base.generated`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tokenspeed_kernel_base.generated import compile_source
from tokenspeed_kernel_base.parameters import Kind, Parameter

Guard = Callable[..., bool]

FIRST = "first"

# Number of the last decisions that a call is compared with. A model alternates between a few kinds of calls of an operator: layers
# with and without a window, or the GEMMs of a layer. Each failed comparison costs 0.2 us, and the look-up in the memo 1 us.
CHAIN = 4


# -- the public function -------------------------------------------------------------------------------------------------------


def build_public_function(
    name: str,
    parameters: Sequence[Parameter],
    comparisons: Mapping[str, Callable[..., Any]] | None,
    look_up: Callable[..., Any],
    lowered: Callable[..., Any],
) -> Callable[..., Any]:
    """Generates the function that users call.

    Args:
        name: the function's name.
        parameters: the operator's parameters.
        comparisons: holds the newest comparison under `FIRST`; None if there are no comparisons.
        look_up: runs a call that has no comparison; takes all parameters, then override and solution.
        lowered: function that is called with the same arguments instead, while torch.compile traces the call.
    """
    names = ", ".join(p.name for p in parameters)
    declared = ", ".join(p.name if p.required else f"{p.name}=_default_{p.name}" for p in parameters)
    compare = f"""\
    try:
        _first = _comparisons[{FIRST!r}]
    except KeyError:
        _first = _look_up
"""
    source = f"""\
def {name}({declared}, *, override=None, solution=None):
{compare if comparisons is not None else "    _first = _look_up"}
    return _first({names}, override, solution)
"""
    namespace = {"_comparisons": comparisons, "_look_up": look_up, **default_values(parameters)}
    function = compile_source(name, source, namespace)
    # torch.compile traces ``_traced`` instead of this function. A test for tracing at every call would cost a tenth of the call.
    vars(function)["_torchdynamo_inline"] = _traced(name, parameters, lowered)
    return function


def _traced(name: str, parameters: Sequence[Parameter], lowered: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that takes the public function's arguments and calls ``lowered``. torch.compile can trace the returned
    function. ``name``: the operator's name, for the error of a call with wrong arguments."""
    names = tuple(parameter.name for parameter in parameters)
    defaults = {parameter.name: parameter.default for parameter in parameters if not parameter.required}
    wrong = f"{name} takes ({', '.join(names)}), each at most once; without torch.compile the error names the wrong argument"

    def traced(*args: Any, override: str | None = None, solution: str | None = None, **options: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **options}
        if len(args) > len(names) or len(given) != len(args) + len(options) or any(each not in names for each in options):
            raise TypeError(wrong)
        values = {**defaults, **given}
        return lowered(*(values[each] for each in names), override, solution)

    return traced


# -- comparisons with the last decisions ---------------------------------------------------------------------------------------


@functools.cache
def tensor_guards() -> Callable[..., Guard] | None:
    """Returns ``make``. ``make(*tensors)`` returns a guard, ``guard(*tensors)``, which tests whether other tensors have the same
    classes, dtypes, devices, shapes, strides and need for a gradient.

    The guards are private to PyTorch. The result is None if they are missing or behave differently; then no comparisons are made. A
    guard may report a miss for valid tensors: other strides, or one tensor passed twice.
    """
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


class Limit(NamedTuple):
    """The range of a bound's values for which a decision holds. A bound is an integer limit, such as the longest sequence.

    Attributes:
        position: index of the bound among the operator's parameters.
        least, most: its lowest and highest value.
    """

    position: int
    least: int
    most: int


class Decision(NamedTuple):
    """The decision for a call.

    Attributes:
        call: the function to run; takes all parameters in order.
        limits: the limits of each bound that the call gives, in order.
        watched: parameters in host memory whose values are checked.
        check: checks these values; takes all parameters in order. None if there is nothing to check.
        seen: a one-element list with the state of the last check, shared by all comparisons with this decision.
    """

    call: Callable[..., Any]
    limits: tuple[Limit, ...] = ()
    watched: tuple[str, ...] = ()
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


class Comparisons:
    """Builds comparisons with calls of one operator.

    Args:
        name: the operator's name.
        parameters: the operator's parameters.
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
        self, arguments: tuple[Any, ...], override: str | None, solution: str | None, decision: Decision
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Returns ``make``. ``make(otherwise)`` returns a function of the operator's parameters, override and solution. For calls
        with the same description as these arguments, the function runs this decision. For any other call it runs ``otherwise``.
        """
        absent, tensors, options, key = self._read(arguments, override, solution)
        groups = self._groups(tensors)
        unset = tuple([value is None for value in key])
        pattern = _Pattern(absent, unset, groups, decision.watched, decision.check is not None)
        if pattern not in self._builders:
            self._builders[pattern] = self._build(pattern)
        guards = [self._make_guard(*[tensors[index] for index in group]) for group in groups]
        return functools.partial(self._builders[pattern], guards, options, key, decision)

    def _groups(self, tensors: Sequence[torch.Tensor | None]) -> tuple[tuple[int, ...], ...]:
        """The indices of the tensors, grouped by guard. A guard rejects calls that pass it one tensor twice. A written tensor may
        also be passed as an input, in this call or in another. So written tensors and inputs are in different groups."""
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

    def _build_read(self) -> Callable[..., Any]:
        """Generates a function that reads a call. The function returns which `absences` hold, the tensors, the options, and the
        values by which options are compared.
        """
        absent = "".join(f"({test}), " for test in self._absences)
        reads = (f"None if {absent} else {read}" if absent else read for read, absent in tensor_reads(self._parameters))
        tensors = "".join(f"({read}), " for read in reads)
        options = "".join(f"({o.unless_absent(o.read) if o.lasting else None}), " for o in self._options)
        key = "".join(f"({o.unless_absent(f'None if {o.read} is None else {o.key}')}), " for o in self._options)
        source = f"""\
def {self._name}_read(_arguments, override, solution):
    ({self._names},) = _arguments
    return ({absent}), ({tensors}), ({options}), ({key})
"""
        return compile_source(f"{self._name}_read", source, default_values(self._parameters))

    def _terms(self, pattern: _Pattern) -> list[str]:
        """The conditions under which a call matches the decided call, as source. Cheap conditions that most other calls fail come
        first.
        """
        terms = [f"({test})" if absent else _negated(test) for test, absent in zip(self._absences, pattern.absent, strict=True)]
        for index, (option, unset) in enumerate(zip(self._options, pattern.unset, strict=True)):
            if unset:
                terms.append(f"({option.unless_absent(option.read)}) is None")
            else:
                # An equal option of another type does not match. Otherwise earlier calls would decide whether this type is an
                # error.
                same = f"{option.read} is _option_{index} or " if option.lasting else ""
                terms.append(f"({same}{option.key} == _key_{index})")
        for index, bound in enumerate(self._bounds_given(pattern)):
            terms.append(f"type({bound}) is int and _least_{index} <= {bound} <= _most_{index}")
        given = [self._tensors[index] for group in pattern.groups for index in group]
        if given:
            # The guard reads strides. A nested tensor has none, and reading them in the guard ends the process without an
            # exception.
            terms.append(f"not ({' or '.join(f'{read}.is_nested' for read in given)})")
        for index, group in enumerate(pattern.groups):
            terms.append(f"_guard_{index}({', '.join(self._tensors[one] for one in group)})")
        return terms

    def _bounds_given(self, pattern: _Pattern) -> list[str]:
        absent = dict(zip(self._absences, pattern.absent, strict=True))
        return [bound.name for bound in _bounds(self._parameters) if not absent.get(f"{bound.name} is None")]

    def _build(self, pattern: _Pattern) -> Callable[..., Any]:
        """Builds ``make(guards, options, key, decision, otherwise)`` for calls of one pattern; `comparison` binds all but
        ``otherwise``."""
        unpacked = {
            "guards": "".join(f"_guard_{index}, " for index in range(len(pattern.groups))),
            "options": "".join(f"_option_{index}, " for index in range(len(self._options))),
            "key": "".join(f"_key_{index}, " for index in range(len(self._options))),
            "decision.limits": "".join(f"(_, _least_{i}, _most_{i}), " for i in range(len(self._bounds_given(pattern)))),
        }
        setup = "\n".join(f"    ({names}) = _{value}" for value, names in unpacked.items() if names)
        check = _value_check(self._parameters, pattern.watched) if pattern.checked else ""
        terms = "\n                and ".join(self._terms(pattern))
        made = f"{self._name}_like_{len(self._builders)}"
        source = f"""\
def {made}(_guards, _options, _key, _decision, _otherwise):
{setup}
    _call, _check, _seen = _decision.call, _decision.check, _decision.seen

    def {self._name}({self._names}, override, solution):
        try:
            _like = (
                {terms}
            )
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


def _negated(test: str) -> str:
    """Source that tests that a tensor or option is present, from the test of its absence. ``is not None`` is faster than a negated
    ``is None`` by nanoseconds.
    """
    return " and ".join(f"{part} is not None" for part in test.removesuffix(" is None").split(" is None or "))


# -- the memo's key ------------------------------------------------------------------------------------------------------------


def build_describing(name: str, parameters: Sequence[Parameter], written: Sequence[str]) -> Callable[..., Any]:
    """Generates ``describing``. ``describing(then)`` returns a function of the operator's parameters, override and solution. The
    function returns ``then(key, arguments, override, solution)``; ``key`` is the call's description, or None for some invalid
    calls.

    The key includes strides if the caller provides memory to write to, because they decide whether tensors overlap. A tensor's
    class distinguishes fake, distributed and quantised tensors from plain ones. The key tells whether a gradient is required,
    because such a call is invalid.
    """
    names = ", ".join(p.name for p in parameters)
    tensors = tensor_reads(parameters)
    terms = []
    for read, absent in tensors:
        key = f"type({read}), {read}.dtype, {read}.shape, {read}.device, {read}.layout"
        terms.append(f"None if {absent} else ({key})" if absent else key)
    graded = " or ".join(f"{f'not ({absent}) and ' if absent else ''}{read}.requires_grad" for read, absent in tensors)
    terms.append(f"_is_grad_enabled() and ({graded})")
    strides = ", ".join(f"None if {absent} else {read}.stride()" if absent else f"{read}.stride()" for read, absent in tensors)
    given = " and ".join(f"{each} is None" for each in written)
    if given:
        terms.append(f"None if {given} else ({strides},)")
    terms += [f"({absent})" for absent in absences(parameters)]
    for option in option_reads(parameters):
        # Most calls leave most options at their defaults, so identity with the default is tested first.
        key = f"{option.default} if {option.read} is {option.default} else {option.key}" if option.default else option.key
        terms.append(option.unless_absent(f"({key})"))
    lines = "\n".join(f"                {term}," for term in terms)
    source = f"""\
def {name}_describing(_then):
    def {name}({names}, override, solution):
        try:
            _key = (
{lines}
            )
        except (AttributeError, TypeError, ValueError, RuntimeError):
            _key = None
        return _then(_key, ({names},), override, solution)

    return {name}
"""
    namespace = {"_is_grad_enabled": torch.is_grad_enabled, **default_values(parameters)}
    return compile_source(f"{name}_describing", source, namespace)


# -- what precedes the kernel in every call ------------------------------------------------------------------------------------


def build_replacing(name: str, parameters: Sequence[Parameter], replaced: Sequence[str]) -> Callable[..., Any]:
    """Generates ``replacing(call, options)``, which returns ``call`` with the arguments ``replaced`` set to the values in
    ``options``.
    """
    given = ", ".join(p.name for p in parameters)
    passed = ", ".join(f"_{p.name}" if p.name in replaced else p.name for p in parameters)
    unpacked = "\n".join(f"    _{option} = _options[{option!r}]" for option in replaced)
    source = f"""\
def {name}_replacing(_call, _options):
{unpacked}

    def {name}({given}):
        return _call({passed})

    return {name}
"""
    return compile_source(f"{name}_replacing", source, {})


def build_value_guard(name: str, parameters: Sequence[Parameter], watched: Sequence[str]) -> Callable[..., Any]:
    """Generates ``guard(check, call, seen)``, which runs ``check`` before ``call`` if values in host memory may have changed.

    ``check`` tests the values of the parameters ``watched``. ``seen`` is a one-element list with the state of the last check,
    initially `nothing_checked`.
    """
    names = ", ".join(p.name for p in parameters)
    source = f"""\
def {name}_guard(_check, _call, _seen):
    def {name}({names}):
{_value_check(parameters, watched)}
        return _call({names})

    return {name}
"""
    return compile_source(f"{name}_guard", source, {"_remember": remember_checked})


def _value_check(parameters: Sequence[Parameter], watched: Sequence[str]) -> str:
    """Source that checks values in host memory before the kernel is called.

    A model's layers pass the same lengths and page table many times per step. So the check runs only if a watched tensor is another
    object than at the last check, a watched tensor has been written to since, or a bound has changed. Writes are detected by the
    tensor's version counter, which misses writes through NumPy or ``.data``. The check always runs when a hint is given or nothing
    is watched. Watched tensors are held by weak reference.
    """
    names = ", ".join(p.name for p in parameters)
    if not watched:
        return f"        _check({names})"
    bounds = [bound.name for bound in _bounds(parameters)]
    seen = [*(f"_seen_{w}" for w in watched), *(f"_version_{w}" for w in watched), *(f"_last_{bound}" for bound in bounds)]
    same = [f"{p.name} is None" for p in parameters if p.kind is Kind.HINT]
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
    """The state of a value check before any check."""
    return _never(len(watched)) + (None,) * len(_bounds(parameters))


_NOTHING = object()


def _never(watched: int) -> tuple[Any, ...]:
    return (lambda: _NOTHING,) * watched + (None,) * watched


def remember_checked(tensors: tuple[torch.Tensor, ...], bounds: tuple[int | None, ...]) -> tuple[Any, ...]:
    """The state of a value check after a check of these tensors and bounds."""
    if any(t.is_inference() for t in tensors):
        return _never(len(tensors)) + bounds
    return (*map(weakref.ref, tensors), *(t._version for t in tensors), *bounds)


def build_overlap_guard(name: str, parameters: Sequence[Parameter], tensors: Sequence[str]) -> Callable[..., Any]:
    """Generates ``guard(call, known, check)``, which returns a function that runs ``call``. If the addresses of ``tensors`` are not
    in the set ``known``, the function first runs ``check(addresses, arguments)``."""
    names = ", ".join(p.name for p in parameters)
    reads = {tensor.name: _attribute(p, tensor) for p in parameters for tensor in p.tensors()}
    source = f"""\
def {name}_apart(_call, _known, _check):
    def {name}({names}):
        _addresses = ({"".join(f"{reads[tensor]}.data_ptr(), " for tensor in tensors)})
        if _addresses not in _known:
            _check(_addresses, ({names},))
        return _call({names})

    return {name}
"""
    return compile_source(f"{name}_apart", source, default_values(parameters))


# -- source that reads arguments -----------------------------------------------------------------------------------------------


def _attribute(holder: Parameter, field: Parameter) -> str:
    """Source that reads a parameter or its attribute. An OBJECT argument may be of any class, and may lack an attribute that has a
    default. The source then reads the default."""
    if field is holder or field.required or holder.kind is not Kind.OBJECT:
        return field.name
    return f"getattr({holder.name}, {field.attribute!r}, _default_{field.identifier})"


def default_values(parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The default values of options and attributes, under their names in the source."""
    every = [field for parameter in parameters for field in (parameter, *parameter.fields)]
    return {f"_default_{p.identifier}": p.default for p in every if not p.required}


def tensor_reads(parameters: Sequence[Parameter]) -> list[tuple[str, str]]:
    """For each tensor, the source that reads it and the source that tests its absence. The test is empty for tensors that are never
    absent.
    """
    found = []
    for parameter in parameters:
        for tensor in parameter.tensors():
            read = _attribute(parameter, tensor)
            absences = [f"{p} is None" for p, may in ((parameter.name, parameter.optional), (read, tensor.optional)) if may]
            found.append((read, " or ".join(dict.fromkeys(absences))))
    return found


class Option(NamedTuple):
    """How generated source reads an option.

    Attributes:
        read: source that reads the option.
        key: source of the option's key. Equal options of the same type have equal keys; all others differ.
        absent: source that tests whether the option's object is absent; empty if the option has no object or the object is
            required.
        default: name of the default in the source; empty if the option has none.
        lasting: whether the same object is an equal option at every call. False for resources, which are compared by their keys.
    """

    read: str
    key: str
    absent: str = ""
    default: str = ""
    lasting: bool = True

    def unless_absent(self, source: str) -> str:
        return f"None if {self.absent} else {source}" if self.absent else source


def option_reads(parameters: Sequence[Parameter]) -> list[Option]:
    """Every input of a decision that is compared by value, with the source that reads it: all parameters but tensors, hints and
    bounds."""
    found = []
    for parameter in parameters:
        absent = f"{parameter.name} is None" if parameter.optional else ""
        if parameter.kind is Kind.VALUE and not parameter.bound:
            found.append(_value_read(parameter, parameter.name))
        elif parameter.kind is Kind.RESOURCE:
            found.append(Option(parameter.name, f"(type({parameter.name}), {parameter.name}.key)", absent, lasting=False))
        elif parameter.kind is Kind.OBJECT:
            attributes = [_value_read(field, _attribute(parameter, field)) for field in parameter.fields if not field.is_tensor]
            found += [option._replace(absent=absent) for option in attributes]
    return [*found, Option("override", "override"), Option("solution", "solution")]


def _value_read(parameter: Parameter, read: str) -> Option:
    """The key of an option includes its type; a tuple's key includes its elements' types. A dtype and a frozen dataclass equal no
    value of another type, so their keys need no type."""
    if tuple in parameter.types:
        key = f"({read}, {read} and tuple(map(type, {read})))"
    elif parameter.fields or parameter.types == (torch.dtype,):
        key = read
    else:
        key = f"(type({read}), {read})"
    return Option(read, key, default="" if parameter.required else f"_default_{parameter.identifier}")


def absences(parameters: Sequence[Parameter]) -> list[str]:
    """Source of the tests whether an input is absent, for inputs that are not compared by value: tensors, objects, hints and
    bounds."""
    found = [absent for _, absent in tensor_reads(parameters) if absent]
    for parameter in parameters:
        if parameter.kind is Kind.HINT or (parameter.optional and (parameter.bound or parameter.kind is Kind.OBJECT)):
            found += [f"{parameter.name} is None"]
    return list(dict.fromkeys(found))


def _bounds(parameters: Sequence[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if parameter.bound]

"""One declaration per operator, and everything that follows from it.

::

    @operator("norm", "rmsnorm", formats=("x",), varying=("rows",))
    def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-5, out: Tensor | None = None) -> Tensor:
        \"\"\"What it computes: shapes, dtypes, rounding, errors, source.\"\"\"
        ...plain PyTorch, without a thought for ``out``: the meaning, and the reference...

    @rmsnorm.traits                  # what a request asks of a kernel: flags and values, from the arguments
    def _(x): return {"hidden": x.shape[-1]}

    @rmsnorm.check                   # what makes a call wrong; depends on shapes, dtypes, devices and options only
    def _(check, x, weight): ...

    @rmsnorm.check_values(host=("lengths",))   # what makes values wrong, of tensors that lie in host memory
    def _(check, lengths): ...

    @rmsnorm.fake                    # every output, empty: shapes and dtypes, for torch.compile and for checking ``out``
    def _(x): return torch.empty_like(x)

    @rmsnorm.cases                   # named inputs, small and large
    def _(): return [Case("gpt-oss-120b prefill 4096", lambda draw: ...)]

    @rmsnorm.cost                    # work that cannot be avoided
    def _(x): return Cost(...)

    @rmsnorm.work                    # the values that decide how much there is to do, for a capture; may wait for the device
    def _(lengths): return {"lengths": lengths.tolist()}

    @rmsnorm.vary                    # arguments with other values, see `tokenspeed_kernel_base.variation`
    def _(variation, x, lengths): return {"x": ...}

    @rmsnorm.intermediates           # rarely: formats that values are rounded to on the way, which a tolerance has to allow for
    def _(): return (fp8_format(...),)

    @rmsnorm.prepare                 # rarely: the arguments that a kernel wants arranged before it is called, arranged for it
    def _(spec, weight): return {"weight": ...}

Each hook names the parameters that it wants, or takes all of them as ``**arguments``. The result is an ordinary function with
the body's signature plus the keywords ``override`` (a kernel's name) and ``solution``; it also carries the hooks, ``bind``,
``explain`` and ``operator``.

The body runs as solution ``reference``. It takes ``out`` in its signature only; writing into it is done here, for every
operator alike.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import torch

from tokenspeed_kernel_base import dispatch, lowering, memo, watch
from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.checks import Checker, describe
from tokenspeed_kernel_base.parameters import Kind, Parameter, check_types, kind_of, parse_parameters, tensor_arguments
from tokenspeed_kernel_base.platform import platform_of
from tokenspeed_kernel_base.registry import KernelRegistry, KernelSpec, Priority
from tokenspeed_kernel_base.selection import Explanation, Override, Request, consider, override_of_call, select, selection_policy
from tokenspeed_kernel_base.signature import FormatSignature, dense_tensor_format
from tokenspeed_kernel_base.variation import Variation

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Hook = TypeVar("Hook", bound=Callable[..., Any])

REFERENCE = "reference"


class OperatorFunction(Protocol[P, R_co]):
    """An operator as its users see it: a function, and what can be asked of it."""

    __name__: str
    __qualname__: str
    operator: Operator[Any, Any]

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, override: str | None, solution: str | None = ..., **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, *args: Any, solution: str | None, **kwargs: Any) -> R_co: ...

    def traits(self, hook: Hook) -> Hook: ...
    def check(self, hook: Hook) -> Hook: ...
    def check_values(self, *, host: Iterable[str]) -> Callable[[Hook], Hook]: ...
    def formats(self, hook: Hook) -> Hook: ...
    def fake(self, hook: Hook) -> Hook: ...
    def cases(self, hook: Hook) -> Hook: ...
    def cost(self, hook: Hook) -> Hook: ...
    def work(self, hook: Hook) -> Hook: ...
    def vary(self, hook: Hook) -> Hook: ...
    def intermediates(self, hook: Hook) -> Hook: ...
    def prepare(self, hook: Hook) -> Hook: ...
    def bind(self, *args: Any, override: str | None = None, solution: str | None = None, **kwargs: Any) -> Callable[..., R_co]: ...
    def explain(self, *args: Any, override: str | None = None, solution: str | None = None, **kwargs: Any) -> Explanation: ...


class Operator(Generic[P, R]):
    """A declaration and its hooks. Reached through the function's ``operator`` attribute, or by name from `operators`.

    Attributes:
        family, mode: its name.
        body: the PyTorch function that says what it computes; ignores provided outputs.
        parameters: parsed from the body's signature.
        outs: parameters that receive output 0, 1, ... when given.
        mutates: further parameters that it writes to.
        exact: every kernel must give the reference's values bit for bit.
        varying: sizes that change from call to call, the one that counts a batch's items first; all others are fixed by the model.
        capacity: sizes that say how much memory there is; no part of a request's sizes.
        bounds: integer options that bound a varying size, and vary like one.
        scales: parameters that multiply the values of another one: positive, and near 1 where they are drawn at random.
        function: what users call.
    """

    def __init__(
        self,
        family: str,
        mode: str,
        body: Callable[P, R],
        formats: Sequence[str],
        outs: Sequence[str],
        mutates: Sequence[str],
        hints: Sequence[str],
        exact: bool,
        reference_traits: Mapping[str, Any],
        fixed_traits: Iterable[str],
        varying: Sequence[str] = (),
        capacity: Iterable[str] = (),
        bounds: Sequence[str] = (),
        scales: Iterable[str] = (),
    ) -> None:
        self.family, self.mode, self.body = family, mode, body
        self.parameters = parse_parameters(body, hints)
        self.names = tuple(p.name for p in self.parameters)
        self.outs, self.mutates, self.exact = tuple(outs), tuple(mutates), exact
        self.scales = frozenset(scales)
        unknown = {*formats, *outs, *mutates, *hints, *self.scales} - set(self.names)
        if unknown:
            raise TypeError(f"{self}: {', '.join(sorted(unknown))} of the declaration are not parameters of {body.__name__}")
        if not any(t.required and not t.optional for p in self.parameters if not p.optional for t in p.tensors()):
            raise TypeError(f"{self} ({body.__name__}): an operator takes at least one tensor that may not be absent")
        self._formats, self._reference_traits = tuple(formats), dict(reference_traits)
        self.fixed_traits = frozenset(fixed_traits)
        self.varying, self.capacity, self.bounds = tuple(varying), frozenset(capacity), tuple(bounds)
        self._check_size_kinds()
        self._hooks: dict[str, Callable[..., Any]] = {}
        self._wanted: dict[str, tuple[str, ...]] = {}
        self._host_values: tuple[str, ...] = ()
        self._guards: dict[tuple[str, ...], Callable[..., Any]] = {}
        self._memo = memo.new_memo()
        self._recent = memo.new_memo() if dispatch.tensor_guards() is not None else None
        outputs = lowering.count_outputs(body)
        lowered = lowering.define(mode, self.parameters, outs, mutates, outputs, self._call_public, self.fake_outputs)
        self._lowered = lowered
        self.function = self._make_function(lowered)
        self._register_reference()

    def __str__(self) -> str:
        return f"{self.family}.{self.mode}"

    def _check_size_kinds(self) -> None:
        """Raises TypeError for a bound that is no integer option, and for a size that is declared to be of two kinds. Whether the
        check names the sizes is known only when it runs on a case."""
        options = {p.name for p in self.parameters if p.kind is Kind.VALUE and int in p.types}
        wrong = [name for name in self.bounds if name not in options]
        if wrong:
            raise TypeError(f"{self}: bounds must be integer parameters of {self.body.__name__}, got {', '.join(wrong)}")
        twice = (self.capacity & set(self.varying)) | (self.capacity.union(self.varying) & set(self.bounds))
        if twice:
            raise TypeError(f"{self}: {', '.join(sorted(twice))} must be declared as one of varying, capacity and bounds")

    # -- declaration -----------------------------------------------------------------------------------------------------------

    def _make_function(self, lowered: Callable[..., Any]) -> OperatorFunction[P, R]:
        function: Any = dispatch.build_public_function(self.mode, self.parameters, self._memo, self._recent, self.decide, lowered)
        signature = inspect.signature(self.body)
        keywords = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
            for n in ("override", "solution")
        ]
        function.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *keywords])
        function.__doc__, function.__module__ = self.body.__doc__, self.body.__module__
        function.__qualname__ = self.body.__qualname__
        # Resolved, because the generated function's globals are not the module's.
        function.__annotations__ = {**typing.get_type_hints(self.body), "override": str | None, "solution": str | None}
        for hook in ("traits", "check", "formats", "fake", "cases", "cost", "work", "vary", "intermediates", "prepare"):
            setattr(function, hook, functools.partial(self._add_hook, hook))
        function.check_values = self._add_check_values
        function.bind, function.explain, function.operator = self.bind, self.explain, self
        return function  # type: ignore[no-any-return]

    def _add_hook(self, name: str, hook: Hook) -> Hook:
        leading = 1 if name in ("check", "check_values", "vary", "prepare") else 0
        parameters = list(inspect.signature(hook).parameters.values())[leading:]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        wanted = self.names if takes_all else tuple(p.name for p in parameters)
        unknown = set(wanted) - set(self.names)
        if unknown:
            raise TypeError(f"{self}: its {name} hook asks for {', '.join(sorted(unknown))}, which are not parameters")
        self._hooks[name], self._wanted[name] = hook, wanted
        return hook

    def _add_check_values(self, *, host: Iterable[str]) -> Callable[[Hook], Hook]:
        self._host_values = tuple(host)
        return functools.partial(self._add_hook, "check_values")

    def _register_reference(self) -> None:
        registry = KernelRegistry.get()
        registry.declare_interface(self.family, self.mode, self.names)
        spec = KernelSpec(
            f"{REFERENCE}_{self.mode}",
            self.family,
            self.mode,
            solution=REFERENCE,
            format_signatures=None,
            traits=self._reference_traits,
            universal=True,
            priority=Priority.REFERENCE,
            tags=frozenset({"determinism"}),
            package=self.body.__module__.partition(".")[0],
            origin=f"{self.body.__code__.co_filename}:{self.body.__code__.co_firstlineno}",
        )
        registry.register(spec, self.reference)

    def run_hook(self, name: str, arguments: dict[str, Any], *leading: Any) -> Any:
        hook = self._hooks.get(name)
        return None if hook is None else hook(*leading, **{n: arguments[n] for n in self._wanted[name]})

    def has_hook(self, name: str) -> bool:
        return name in self._hooks

    # -- what is derived -------------------------------------------------------------------------------------------------------

    def reference(self, *args: Any) -> Any:
        """The body, with provided outputs written to. This is what solution ``reference`` runs."""
        arguments = dict(zip(self.names, args, strict=True))
        provided = [arguments[out] for out in self.outs]
        # Contiguous, as ``fake`` promises: torch.compile relies on it, and a body's result may follow a strided input's order.
        results = [result.contiguous() for result in lowering.as_list(self.body(*args))]  # type: ignore[call-arg]
        for index, output in enumerate(provided):
            if output is not None and index < len(results):
                output.copy_(results[index])
                results[index] = output
        return lowering.from_list(results)

    def all_cases(self) -> list[Case]:
        """The declared cases."""
        return list(self._hooks["cases"]()) if "cases" in self._hooks else []

    def cost_of(self, arguments: dict[str, Any]) -> Cost:
        """The work of a call. ``arguments`` are named; those left out take their defaults."""
        cost = self.run_hook("cost", self.complete(arguments))
        assert isinstance(cost, Cost), f"{self} declares no cost"
        return cost

    def varied(self, arguments: dict[str, Any], variation: Variation) -> dict[str, Any]:
        """What changes in (complete) arguments for a variation, by name; nothing where the operator has no ``vary`` hook."""
        return dict(self.run_hook("vary", arguments, variation) or {})

    def prepared(self, arguments: dict[str, Any], spec: KernelSpec) -> dict[str, Any]:
        """The (complete) arguments of a case as this kernel wants them: weights in its own layout, say. A copy where it differs."""
        return {**arguments, **(self.run_hook("prepare", arguments, spec) or {})}

    def complete(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name with the defaults filled in. Raises TypeError as a call would."""
        return self._bound((), arguments)

    def fake_outputs(self, arguments: dict[str, Any]) -> Any:
        """Empty outputs of the right shapes and dtypes, for arguments that may be fake."""
        return self.run_hook("fake", arguments)

    def request(self, arguments: dict[str, Any], solution: str | None = None, sizes: Mapping[str, int] | None = None) -> Request:
        """What a call with these (complete, checked) arguments asks of a kernel. ``sizes``: what `check_call` found, if it ran."""
        tensors = tensor_arguments(self.parameters, arguments)
        return Request(
            self.family,
            self.mode,
            self._signature(arguments),
            platform_of(tensors[0][1].device),
            self.run_hook("traits", arguments) or {},
            selection_policy().objective,
            solution,
            self.fixed_traits,
            self._sizes(arguments) if sizes is None else sizes,
            frozenset((*self.varying, *self.bounds)),
            tuple(self.run_hook("intermediates", arguments) or ()),
        )

    def _sizes(self, arguments: dict[str, Any], check: Checker | None = None) -> dict[str, int]:
        """How large a call is: the sizes that its ``check`` hook names, without capacities, and the bounds that are given."""
        if check is None:
            check = Checker(self.mode)
            self.run_hook("check", arguments, check)
        sizes = {name: size for name, size in check.sizes().items() if name not in self.capacity}
        return {**sizes, **{name: arguments[name] for name in self.bounds if arguments[name] is not None}}

    def _signature(self, arguments: dict[str, Any]) -> FormatSignature:
        if "formats" in self._hooks:
            signature = self.run_hook("formats", arguments)
            assert isinstance(signature, FormatSignature)
            return signature
        roles = ((name, arguments[name]) for name in self._formats)
        return FormatSignature(tuple((name, dense_tensor_format(t.dtype)) for name, t in roles if t is not None))

    def check_call(self, arguments: dict[str, Any], *, values: bool = True) -> dict[str, int]:
        """Raises TypeError or ValueError for a call that no kernel must see; ``values``: look at those in host memory too.

        Returns:
            How large the call is: sizes by name, for `request`.
        """
        check_types(self.mode, self.parameters, arguments)
        tensors = tensor_arguments(self.parameters, arguments)
        if tensors:
            first, device = tensors[0][0], tensors[0][1].device
            for name, tensor in tensors[1:]:
                if tensor.device != device:
                    raise ValueError(f"{self.mode}: {name} must be on {device} like {first}, got {describe(tensor)}")
        check = Checker(self.mode)
        self.run_hook("check", arguments, check)
        if any(arguments[out] is not None for out in self.outs):
            self._check_outputs(arguments)
        if values and self._host_values:
            self._check_values_now(*(arguments[name] for name in self.names))
        return self._sizes(arguments, check)

    def _check_outputs(self, arguments: dict[str, Any]) -> None:
        expected = lowering.as_list(self.fake_outputs(_on_meta(self.parameters, arguments)))
        for index, name in enumerate(self.outs):
            given = arguments[name]
            if given is None:
                continue
            if index >= len(expected):
                raise ValueError(f"{self.mode}: {name} must be None, because this call has no such output, got {describe(given)}")
            wanted = expected[index]
            if given.dtype != wanted.dtype:
                raise TypeError(f"{self.mode}: {name} must be {describe(wanted.dtype)}, got {describe(given)}")
            if given.shape != wanted.shape:
                raise ValueError(f"{self.mode}: {name} must have shape {list(wanted.shape)}, got {describe(given)}")

    def _check_values_now(self, *args: Any) -> None:
        arguments = dict(zip(self.names, args, strict=True))
        for name in self._host_values:
            value = arguments[name]
            if isinstance(value, torch.Tensor) and not _readable(value):
                arguments[name] = None
        self.run_hook("check_values", arguments, Checker(self.mode))

    # -- calling ---------------------------------------------------------------------------------------------------------------

    def _call_public(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def decide(self, args: tuple[Any, ...], override: str | None, solution: str | None) -> Callable[..., Any]:
        """Checks a call, chooses its kernel, and remembers the outcome for calls of the same description."""
        started = memo.epoch()
        arguments = dict(zip(self.names, args, strict=True))
        if _is_traced(self.parameters, arguments):
            return lambda *values: self._lowered(*values, override, solution)
        sizes = self.check_call(arguments, values=False)  # the guard looks at values, now and whenever they change
        wanted = self._wanted_kernel(override, solution)
        request = self.request(arguments, solution, sizes)
        selected = select(request, wanted, arguments)
        call = self._guarded(self._skip_if_empty(arguments) or selected.impl, arguments)
        if watch.watching():
            tensors = dict(tensor_arguments(self.parameters, arguments))
            key = self._key(args, override, solution), tuple(tensor.stride() for tensor in tensors.values())
            read_work = functools.partial(self.run_hook, "work", arguments)
            seen = watch.Call(
                self.family, self.mode, selected.name, request.signature, tensors, key, arguments, request.traits, read_work
            )
            return watch.watched(seen, call)
        if selected.provisional:
            return call
        memo.remember(self._memo, self._key(args, override, solution), call, started)
        if self._recent is not None:
            key, entry = self._entry(args, override, solution, call)
            memo.remember(self._recent, key, entry, started)
        return call

    def _skip_if_empty(self, arguments: dict[str, Any]) -> Callable[..., Any] | None:
        """A callable that launches nothing, for a call whose every output is empty; None for any other."""
        if any(arguments[name] is not None for name in self.mutates):
            return None
        if all(t.numel() for _, t in tensor_arguments(self.parameters, arguments)):
            return None
        outputs = lowering.as_list(self.fake_outputs(_on_meta(self.parameters, arguments)))
        if not outputs or any(t.numel() for t in outputs):
            return None
        positions = [self.names.index(out) for out in self.outs]

        def empty(*args: Any) -> Any:
            made = lowering.as_list(self.fake_outputs(dict(zip(self.names, args, strict=True))))
            for index, position in enumerate(positions):
                if args[position] is not None:
                    made[index] = args[position]
            return lowering.from_list(made)

        return empty

    def _guarded(self, call: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
        """``call``, preceded by the check of those values that lie in host memory, if there are any."""
        hints = tuple(p.name for p in self.parameters if p.kind is Kind.HINT)
        watched = tuple(n for n in self._host_values if n not in hints and arguments[n] is not None and _readable(arguments[n]))
        if not self.has_hook("check_values") or not (watched or any(arguments[hint] is not None for hint in hints)):
            return call
        if watched not in self._guards:
            self._guards[watched] = dispatch.build_value_guard(self.mode, self.parameters, watched, hints)
        return self._guards[watched](self._check_values_now, call)  # type: ignore[no-any-return]

    @functools.cached_property
    def _entry(self) -> Callable[..., Any]:
        make_guard = dispatch.tensor_guards()
        assert make_guard is not None
        return dispatch.build_entry_function(self.mode, self.parameters, make_guard)

    @functools.cached_property
    def _key(self) -> Callable[..., Any]:
        return dispatch.build_key_function(self.mode, self.parameters)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        signature = inspect.signature(self.body)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.mode}: {error}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def bind(self, *args: Any, override: str | None = None, solution: str | None = None, **kwargs: Any) -> Callable[..., R]:
        """The kernel that a call with these arguments would run, to be called directly.

        Takes what a call takes, checks it, and returns the implementation itself: a function of all parameters in order, for
        calls of the same description. Calling it costs nothing beyond the kernel, and checks nothing; only values that lie in
        host memory are still checked when they change, because there a wrong length costs the process, not an error.
        """
        arguments = self._bound(args, kwargs)
        sizes = self.check_call(arguments)
        selected = select(self.request(arguments, solution, sizes), self._wanted_kernel(override, solution), arguments)
        return self._guarded(self._skip_if_empty(arguments) or selected.impl, arguments)

    def explain(self, *args: Any, override: str | None = None, solution: str | None = None, **kwargs: Any) -> Explanation:
        """Which kernel a call with these arguments would run, and why not the others. Launches nothing."""
        arguments = self._bound(args, kwargs)
        sizes = self.check_call(arguments)
        wanted = self._wanted_kernel(override, solution)
        return consider(self.request(arguments, solution, sizes), wanted)

    def _wanted_kernel(self, override: str | None, solution: str | None) -> Override | None:
        for name, value in (("override", override), ("solution", solution)):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{self.mode}: {name} must be str or None, got {kind_of(value)}")
        return override_of_call(self.family, self.mode, override)


def _readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be read without a device."""
    return tensor.device.type == "cpu" and not _stands_in(tensor)


def _is_traced(parameters: Sequence[Parameter], arguments: dict[str, Any]) -> bool:
    """Whether the call is being traced rather than run: its tensors are stand-ins."""
    found = []
    for parameter in parameters:
        value = arguments[parameter.name]
        for tensor in parameter.tensors():
            inner = value if tensor is parameter else getattr(value, tensor.attribute, None)
            if isinstance(inner, torch.Tensor):
                found.append(inner)
    return any(map(_stands_in, found)) or (bool(found) and all(t.is_meta for t in found))


def _stands_in(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class takes operations over (fake, functional, distributed, quantised tensors), so that kernels must not
    see it. A subclass that does not, as of weights with a loader attached, is as good as a plain tensor."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _on_meta(parameters: Sequence[Parameter], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with tensors replaced by meta tensors, so that outputs can be described without being allocated."""

    def convert(value: Any) -> Any:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    converted = dict(arguments)
    for parameter in parameters:
        value = arguments[parameter.name]
        if value is None:
            continue
        if parameter.is_tensor:
            converted[parameter.name] = convert(value)
        elif parameter.kind is Kind.OBJECT:
            assert parameter.cls is not None
            inner = {f.attribute: f.read(value) for f in parameter.fields}
            inner = {k: convert(v) if isinstance(v, torch.Tensor) else v for k, v in inner.items()}
            converted[parameter.name] = parameter.cls(**inner)
    return converted


_operators: dict[tuple[str, str], Operator[Any, Any]] = {}


def operators() -> list[Operator[Any, Any]]:
    """Every declared operator, by family and mode."""
    return [_operators[key] for key in sorted(_operators)]


def get_operator(name: str) -> Operator[Any, Any]:
    """An operator by ``"mode"`` or ``"family.mode"``. Raises KeyError, naming the nearest, if there is none."""
    import difflib

    for op in _operators.values():
        if name in (op.mode, str(op)):
            return op
    near = difflib.get_close_matches(name, [n for op in _operators.values() for n in (op.mode, str(op))], n=1)
    raise KeyError(f"no operator {name}" + (f"; did you mean {near[0]}?" if near else ""))


def operator(
    family: str,
    mode: str,
    *,
    formats: Sequence[str] = (),
    outs: Sequence[str] = ("out",),
    mutates: Sequence[str] = (),
    hints: Sequence[str] = (),
    exact: bool = False,
    reference_traits: Mapping[str, Any] | None = None,
    fixed_traits: Iterable[str] = (),
    varying: Sequence[str] = (),
    capacity: Iterable[str] = (),
    bounds: Sequence[str] = (),
    scales: Iterable[str] = (),
) -> Callable[[Callable[P, R]], OperatorFunction[P, R]]:
    """Declares an operator; decorates its body. The module's docstring shows a whole declaration.

    Args:
        family, mode: its name; ``mode`` is unique.
        formats: parameters whose dtypes make the format signature. Where scales matter, the ``formats`` hook makes it instead.
        outs: parameters into which outputs are written when given, in the order of the outputs.
        mutates: other parameters that it writes to.
        hints: parameters that repeat on the host what a tensor says; they may spare work, and never decide.
        exact: kernels must match the body bit for bit.
        reference_traits: constraints of the body itself, where it does not serve everything the signature can say.
        fixed_traits: traits that say what the operands are; an override does not get past them.
        varying: sizes, as the ``check`` hook names them, that change from call to call: tokens, batch, rows. Measured results are
            found by the power of two above them, and by the exact value of every size that is not named here. The first one counts
            the items that a batch consists of: sequences, rows.
        capacity: sizes that only say how much memory there is: the pages of a cache. Nothing is found by them.
        bounds: integer parameters that bound a varying size. They vary, too.
        scales: parameters that hold scales of others: positive; uint8 ones are exponents (e8m0).
    """

    def declare(body: Callable[P, R]) -> OperatorFunction[P, R]:
        taken = next((op for op in _operators.values() if op.mode == mode), None)
        if taken is not None:
            raise TypeError(f"operator {mode} is declared twice: in {taken.body.__module__} and in {body.__module__}")
        given = [o for o in outs if o in inspect.signature(body).parameters]
        traits = reference_traits or {}
        kinds = (varying, capacity, bounds, scales)
        declared = Operator(family, mode, body, formats, given, mutates, hints, exact, traits, fixed_traits, *kinds)
        _operators[family, mode] = declared
        return declared.function

    return declare

"""How an operator is called: check, select a kernel, memoise, launch.

An operator may be called through several functions, each made by a `Caller`. The core's function selects among all kernels. The
function of a wheel that works alone selects among that wheel's kernels. All have the operator's signature, docstring and checks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel_base import dispatch, lowering, memo, recent, watch
from tokenspeed_kernel_base.alignment import copied_cache
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.composition import Composed
from tokenspeed_kernel_base.declaration import Operator
from tokenspeed_kernel_base.explanation import Explanation, Override, Request, SelectedKernel
from tokenspeed_kernel_base.hooks import STEPS
from tokenspeed_kernel_base.parameters import Kind, kind_of, resolved_annotations, resources_given, tensor_arguments
from tokenspeed_kernel_base.platform import PlatformInfo, current_platform, platform_of
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import consider, override_of_call, select, sizes_matter
from tokenspeed_kernel_base.stand_ins import is_traced, readable

_COMPARISONS = "comparisons"  # key of the last calls' comparison makers, newest first; `dispatch.FIRST` holds the built chain


class Caller:
    """One function that calls an operator.

    Attributes:
        op: the operator.
        package: the package whose kernels are candidates; None for all kernels.
        function: what users call: the operator's signature and docstring, and the keywords ``override`` and ``solution``.
        lowering: converts its calls to calls of a custom operator of PyTorch.
    """

    def __init__(self, op: Operator[Any, Any], package: str | None = None) -> None:
        self.op, self.package = op, package
        self._memo = memo.new_memo()
        self._recent = memo.new_memo() if recent.tensor_guards() is not None else None
        self._written = (*op.outs, *op.mutates)
        self._value_guards: dict[tuple[str, ...], Callable[..., Any]] = {}
        outputs = lowering.count_outputs(op.body)
        self.lowering = lowering.define(
            package or lowering.NAMESPACE,
            op.mode,
            op.parameters,
            op.outs,
            op.mutates,
            outputs,
            self._call,
            op.fake_outputs,
            op.named,
        )
        self.function = self._make_function()

    def _make_function(self) -> Any:
        op = self.op
        function: Any = dispatch.build_public_function(
            op.mode, op.parameters, self._written, self._memo, self._recent, self.decide, self.lowering.call
        )
        function.__doc__, function.__module__ = op.body.__doc__, op.body.__module__ if self.package is None else self.package
        function.__qualname__ = op.body.__qualname__
        # Resolved, because the generated function's globals are not the module's.
        function.__annotations__ = {**resolved_annotations(op.body), "override": str | None, "solution": str | None}
        function.bind, function.explain, function.operator, function.caller = self.bind, self.explain, op, self
        for step in STEPS:
            if op.has_hook(step):
                setattr(function, step, getattr(self, step))
        return function

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @functools.cached_property
    def _entry(self) -> Callable[..., Any]:
        return dispatch.build_entry_function(self.op.mode, self.op.parameters, self._written)

    @functools.cached_property
    def _comparisons(self) -> recent.RecentCalls | None:
        make_guard = recent.tensor_guards()
        return recent.RecentCalls(self.op.mode, self.op.parameters, self._written, make_guard) if make_guard is not None else None

    # -- deciding --------------------------------------------------------------------------------------------------------------

    def decide(self, args: tuple[Any, ...], override: str | None, solution: str | None) -> Callable[..., Any]:
        """Checks a call, selects its kernel, and memoises the decision for calls of the same description."""
        return self._decide(args, override, solution)[0]

    def _decide(self, args: tuple[Any, ...], override: str | None, solution: str | None) -> tuple[Callable[..., Any], bool]:
        """The function that `decide` returns, and whether it holds for further calls of the same description."""
        started = memo.epoch()
        op = self.op
        arguments = dict(zip(op.names, args, strict=True))
        if is_traced(op.parameters, arguments):
            return (lambda *values: self.lowering.call(*values, override, solution)), False
        check = op.check_call(arguments, values=False)  # the guard checks values, now and whenever they change
        request, selected = self._select(arguments, check, override, solution)
        decided = self._decided(
            selected, arguments, [limit for name in op.bounds for limit in _limits(name, arguments[name], check, request)]
        )
        call = self._with_value_guard(decided)
        key, entry = self._entry(args, override, solution, decided.limits, call)
        if watch.watching():
            tensors = dict(tensor_arguments(op.parameters, arguments))
            described = key, tuple(tensor.stride() for tensor in tensors.values())
            read_work = functools.partial(op.run_hook, "work", arguments)
            seen = watch.Call(
                op.family, op.mode, selected.name, request.signature, tensors, described, arguments, request.traits, read_work
            )
            return watch.watched(seen, call), False
        if not selected.provisional:
            memo.remember(self._memo, key, entry, started)
            self._remember_recent(args, override, solution, decided, started)
        return call, not selected.provisional

    def _remember_recent(
        self, args: tuple[Any, ...], override: str | None, solution: str | None, decided: recent.Decided, started: int
    ) -> None:
        """Puts a comparison with this call in front of those with the last decided calls."""
        if self._recent is None or self._comparisons is None:
            return
        made = (self._comparisons.comparison(args, override, solution, decided), *self._recent.get(_COMPARISONS, ()))[
            : recent.CHAIN
        ]
        first = self.function.__globals__["_otherwise"]
        for make in reversed(made):
            first = make(first)
        memo.remember(self._recent, _COMPARISONS, made, started)
        memo.remember(self._recent, dispatch.FIRST, first, started)

    def forget(self) -> None:
        """Clears the memo of calls, so that every call is decided afresh. Selections for requests stay memoised."""
        self._memo.clear()
        if self._recent is not None:
            self._recent.clear()

    def _select(
        self, arguments: dict[str, Any], check: Checker, override: str | None, solution: str | None
    ) -> tuple[Request, SelectedKernel]:
        request = self.op.request(arguments, solution, self.op.sizes(arguments, check), self.package)
        return request, select(request, self._wanted_kernel(override, solution), arguments)

    def _wanted_kernel(self, override: str | None, solution: str | None) -> Override | None:
        for name, value in (("override", override), ("solution", solution)):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{self.op.mode}: {name} must be str or None, got {kind_of(value)}")
        wanted = override_of_call(self.op.family, self.op.mode, override)
        if wanted is None or self.package is None or override:
            return wanted
        # An override from the environment or a block must not make a wheel's own function fail: ignore other wheels' kernels.
        own = {spec.name for spec in KernelRegistry.get().get_for_operator(self.op.family, self.op.mode, self.package)}
        return wanted if wanted.kernel in own else None

    # -- what precedes the kernel ----------------------------------------------------------------------------------------------

    def _decided(self, selected: SelectedKernel, arguments: dict[str, Any], limits: list[int]) -> recent.Decided:
        """The kernel, preceded by the overlap check that every call needs; and the check of values in host memory."""
        call = self._with_overlap_guard(self._launcher(selected, arguments), arguments)
        return self._with_check(call, arguments)._replace(limits=limits)

    def _launcher(self, selected: SelectedKernel, arguments: dict[str, Any]) -> Callable[..., Any]:
        """The function that runs calls of this description, without checks."""
        empty = self._skip_if_empty(arguments)
        if empty is not None:
            return empty
        impl = selected.impl
        if isinstance(impl, Composed):
            impl = impl.decided(_decide_part, tuple(arguments.values()))
        normal = self.op.normal(arguments)
        return dispatch.build_replacing(self.op.mode, self.op.parameters, normal)(impl, normal) if normal else impl

    def _skip_if_empty(self, arguments: dict[str, Any]) -> Callable[..., Any] | None:
        """A callable that launches nothing, for a call whose every output is empty; None for any other."""
        op = self.op
        if any(arguments[name] is not None for name in op.mutates):
            return None
        if all(t.numel() for _, t in tensor_arguments(op.parameters, arguments)):
            return None
        outputs = op.outputs_on_meta(arguments)
        if not outputs or any(t.numel() for t in outputs):
            return None
        positions = op.output_positions(tuple(arguments.values()))

        def empty(*args: Any) -> Any:
            made = lowering.as_list(op.fake_outputs(dict(zip(op.names, args, strict=True))))
            for index, position in enumerate(positions):
                if args[position] is not None:
                    made[index] = args[position]
            return lowering.from_list(made)

        return empty

    def _with_overlap_guard(self, call: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
        """``call``, preceded by the check that provided output memory overlaps no other argument, if the call provides any."""
        pairs = self.op.overlap_pairs(arguments)
        if not pairs:
            return call
        tensors = dict(tensor_arguments(self.op.parameters, arguments))
        guard = dispatch.build_overlap_guard(self.op.mode, self.op.parameters, pairs, tensors)
        return guard(self._checked_by(self.op.check_overlaps), call)  # type: ignore[no-any-return]

    def _with_check(self, call: Callable[..., Any], arguments: dict[str, Any]) -> recent.Decided:
        """``call``, with the check of values in host memory, if there are any."""
        op = self.op
        hints = tuple(p.name for p in op.parameters if p.kind is Kind.HINT)
        watched = tuple(n for n in op.host_values if n not in hints and arguments[n] is not None and readable(arguments[n]))
        if not op.has_hook("check_values") or not (watched or any(arguments[hint] is not None for hint in hints)):
            return recent.Decided(call)
        seen = [dispatch.nothing_checked(op.parameters, watched)]
        return recent.Decided(call, (), watched, hints, self._checked_by(op.check_values), seen)

    def _with_value_guard(self, decided: recent.Decided) -> Callable[..., Any]:
        """The decision as one function: the check of values in host memory, then the kernel."""
        if decided.check is None:
            return decided.call
        op, watched = self.op, decided.watched
        if watched not in self._value_guards:
            self._value_guards[watched] = dispatch.build_value_guard(op.mode, op.parameters, watched, decided.hints)
        return self._value_guards[watched](decided.check, decided.call, decided.seen)  # type: ignore[no-any-return]

    def _checked_by(self, check: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        names = self.op.names
        return lambda *args: check(dict(zip(names, args, strict=True)))

    # -- for users -------------------------------------------------------------------------------------------------------------

    def plan(
        self,
        *args: Any,
        device: torch.device | str | None = None,
        platform: PlatformInfo | None = None,
        override: str | None = None,
        solution: str | None = None,
        called: str | None = None,
        **facts: Any,
    ) -> Any:
        """Selects a kernel for calls before any tensor exists, and the layout that `prepare` converts objects to.

        Args:
            args, facts: the arguments of the operator's ``plan`` hook.
            device: where the tensors will be; by default the device of `current_platform`.
            platform: the platform to run on, instead of ``device``.
            override: only this kernel; the platform and format gates still apply.
            solution: only kernels of this solution.
            called: the function in whose name errors are raised; ``"<mode>.plan"`` if not given.

        Returns:
            The plan, for `prepare` and for calls. Needs no device and launches nothing.

        Raises:
            TypeError, ValueError: an argument is wrong; the message names it.
            NoKernelFoundError: no kernel is eligible; the message has each with its reason.
        Warns:
            ReferenceWarning: only the reference is eligible on a GPU.
        """
        called = called or f"{self.op.mode}.plan"
        check = Checker(called)
        if device is not None and platform is not None:
            check.fail("platform", "None where device is given", str(platform))
        for name, value, kind in (("override", override, str), ("solution", solution, str), ("platform", platform, PlatformInfo)):
            if value is not None and not isinstance(value, kind):
                check.fail(name, f"a {kind.__name__} or None", value, TypeError)

        def decide(plan: Any) -> Explanation:
            where = platform or (current_platform() if device is None else platform_of(torch.device(device)))
            return self.op.consider_plan(plan, where, solution, self._wanted_kernel(override, solution), self.package)

        return self.op.make_plan(args, facts, called, decide)

    def prepare(self, given: Any, plan: Any, *, called: str | None = None) -> Any:
        """Converts an object that outlives calls to the form that the plan's kernel reads. Call it once, when a model is loaded.

        Args:
            given: the object. It is not changed.
            plan: a plan made by `plan`.
            called: the function in whose name errors are raised; ``"<mode>.prepare"`` if not given.

        Returns:
            The object to pass to calls; ``given`` itself if it already has that form.

        Raises:
            TypeError, ValueError: the object does not fit the plan, or the plan's kernel is not registered; the message says which.
        """
        return self.op.prepare(given, plan, called or f"{self.op.mode}.prepare", self.package)

    def bind(self, *args: Any, override: str | None = None, solution: str | None = None, **kwargs: Any) -> Callable[..., Any]:
        """The kernel that a call with these arguments would run, for direct calls.

        Takes the arguments of a call, checks them, and returns the implementation itself: a function of all parameters in order,
        for calls of the same description. Calling it costs nothing beyond the kernel, and checks nothing. Only values in host
        memory are still checked when they change, because a wrong length there can end the process instead of raising an error.
        """
        arguments = self.op.bound_arguments(args, kwargs)
        check = self.op.check_call(arguments)
        _, selected = self._select(arguments, check, override, solution)
        return self._with_value_guard(self._with_check(self._launcher(selected, arguments), arguments))

    def explain(self, *args: Any, override: str | None = None, solution: str | None = None, **kwargs: Any) -> Explanation:
        """Which kernel a call with these arguments would run, and why each other kernel would not. Launches nothing."""
        arguments = self.op.bound_arguments(args, kwargs)
        check = self.op.check_call(arguments)
        wanted = self._wanted_kernel(override, solution)
        found = consider(self.op.request(arguments, solution, self.op.sizes(arguments, check), self.package), wanted)
        cards = {name: each.card for name, each in resources_given(self.op.parameters, arguments) if each.card}
        for name in found.chosen.aligned_caches if found.chosen else ():
            if copied := copied_cache(arguments[name]):
                cards[name] = copied
        return dataclasses.replace(found, cards=cards) if cards else found


def _decide_part(function: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], bool]:
    """The function that a part of a composed kernel calls, and whether further calls may reuse it."""
    caller: Caller = function.caller
    return caller._decide(args, None, None)


def _limits(name: str, value: int | None, check: Checker, request: Request) -> tuple[int, int]:
    """The values of a bound for which a decision holds: all that the check allows or, if the decision depends on sizes, those in
    the same bucket."""
    if value is None:
        return 0, 0
    least, most = check.ranges.get(name, (value, value))
    if not sizes_matter(request):
        return least, most
    high = request.buckets[name]
    return max(least, high // 2 + 1 if high > 1 else high), min(most, high)

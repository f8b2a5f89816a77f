"""Calls of operators: check the call, select a kernel, memoise the decision, launch.

An operator may have several public functions, each made by its own `Caller`. The core's function selects among all kernels. The
function of a wheel that works alone selects among that wheel's kernels. All these functions have the operator's signature,
docstring and checks.

A call whose kernel is decided takes the fast path, `tokenspeed_kernel_base.fast_path`. Any other call takes the slow path,
`Caller.decide`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tokenspeed_kernel_base import fast_path, lowering, memo, watch
from tokenspeed_kernel_base.alignment import copied_cache
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.composition import Composed
from tokenspeed_kernel_base.declaration import Operator
from tokenspeed_kernel_base.explanation import Explanation, Override, Request, SelectedKernel
from tokenspeed_kernel_base.fast_path import Decision, Limit
from tokenspeed_kernel_base.hooks import STEPS
from tokenspeed_kernel_base.memory import span
from tokenspeed_kernel_base.parameters import Kind, kind_of, resolved_annotations, resources_given, tensor_arguments
from tokenspeed_kernel_base.platform import PlatformInfo, current_platform, platform_of, use_platform
from tokenspeed_kernel_base.reach import misnamed
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import consider, override_of_call, select, sizes_matter
from tokenspeed_kernel_base.stand_ins import is_traced, readable, stands_in

# Key in the dictionary `Caller._comparisons`. Its value is a tuple of functions, newest first, each of which builds the comparison
# with one of the last decided calls. The chain of the built comparisons is under the key `fast_path.FIRST`.
_MAKERS = "makers"

# An overlap guard remembers at most this many tuples of tensor addresses that passed. Checking a new tuple takes a microsecond.
_MOST_ADDRESSES = 512


class Caller:
    """One function that calls an operator.

    Attributes:
        op: the operator.
        package: the package whose kernels are candidates; None for all kernels.
        function: the function for users, with the operator's signature and docstring, and the keywords ``override`` and
            ``solution``.
        lowering: converts calls of the function to calls of a custom operator of PyTorch.
    """

    def __init__(self, op: Operator[Any, Any], package: str | None = None) -> None:
        self.op, self.package = op, package
        self._memo = memo.new_memo()  # call description -> (limits of the decision, function that runs the call)
        self._comparisons = memo.new_memo() if fast_path.tensor_guards() is not None else None
        self._written = (*op.outs, *op.mutates)
        self._value_guard = functools.cache(functools.partial(fast_path.build_value_guard, op.mode, op.parameters))
        self._replacing = functools.cache(functools.partial(fast_path.build_replacing, op.mode, op.parameters))
        self._overlap_guard = functools.cache(functools.partial(fast_path.build_overlap_guard, op.mode, op.parameters))
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
        function: Any = fast_path.build_public_function(
            op.mode, op.parameters, self._comparisons, self._look_up, self.lowering.call
        )
        function.__doc__, function.__module__ = op.body.__doc__, op.body.__module__ if self.package is None else self.package
        function.__qualname__ = op.body.__qualname__
        # The annotations are resolved here, because the generated function's globals are not those of the body's module.
        function.__annotations__ = {**resolved_annotations(op.body), "override": str | None, "solution": str | None}
        function.bind, function.explain, function.operator, function.caller = self.bind, self.explain, op, self
        for step in STEPS:
            if op.has_hook(step):
                setattr(function, step, getattr(self, step))
        return function

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    # These functions are compiled on first use. Compiling them at import would make the import 10% slower.

    @functools.cached_property
    def _describing(self) -> Callable[..., Any]:
        return fast_path.build_describing(self.op.mode, self.op.parameters, self._written)

    @functools.cached_property
    def _describe(self) -> Callable[..., Any]:
        return self._describing(lambda key, *_: key)  # type: ignore[no-any-return]

    @functools.cached_property
    def _find(self) -> Callable[..., Any]:
        return self._describing(self._run)  # type: ignore[no-any-return]

    @functools.cached_property
    def _comparison(self) -> Callable[..., Callable[..., Any]]:
        make_guard = fast_path.tensor_guards()
        assert make_guard is not None
        return fast_path.Comparisons(self.op.mode, self.op.parameters, self._written, make_guard).comparison

    # -- deciding --------------------------------------------------------------------------------------------------------------

    def _look_up(self, *call: Any) -> Any:
        """Runs a call that matched none of the comparisons with the last few decisions (see `fast_path`). Looks the call up in the
        memo of all decisions, and decides it if the memo has no decision for it. ``call``: all arguments in order, then override
        and solution."""
        return self._find(*call)

    def _run(self, key: Any, args: tuple[Any, ...], override: str | None, solution: str | None) -> Any:
        """Runs the memoised decision for a call, or decides the call. ``key``: the call's description; None if the call is
        invalid."""
        try:
            limits, run = self._memo[key]
        except (KeyError, TypeError):  # no decision yet, or an option is not hashable: then `decide` raises an error
            run = None
        else:
            for position, least, most in limits:
                bound = args[position]
                if not (type(bound) is int and least <= bound <= most):
                    run = None
        if run is None:
            run = self.decide(args, override, solution)
        return run(*args)

    def decide(self, args: tuple[Any, ...], override: str | None, solution: str | None) -> Callable[..., Any]:
        """Checks a call, selects its kernel, and memoises the decision for calls of the same description. Returns the function that
        runs the call."""
        return self._decide(args, override, solution)[0]

    def _decide(self, args: tuple[Any, ...], override: str | None, solution: str | None) -> tuple[Callable[..., Any], bool]:
        """Returns the function that `decide` returns, and whether further calls of the same description may use it."""
        started = memo.epoch()
        op = self.op
        arguments = dict(zip(op.names, args, strict=True))
        if is_traced(op.parameters, arguments):
            return self._traced(args, arguments, override, solution), False
        check = op.check_call(arguments, values=False)  # the value guard checks values, in this call and whenever they change
        request, selected = self._select(arguments, check, override, solution)
        guarded = self._with_overlap_guard(self._launcher(selected, arguments), arguments)
        limits = tuple(_limit(name, op, arguments[name], check, request) for name in op.bounds if arguments[name] is not None)
        decision = self._with_check(guarded, arguments)._replace(limits=limits)
        call = self._with_value_guard(decision)
        key = self._describe(*args, override, solution)
        if watch.watching():
            read_work = functools.partial(op.run_hook, "work", arguments)
            return watch.watched(self._seen(selected.name, key, arguments, request, read_work), call), False
        if not selected.provisional and key is not None:
            memo.remember(self._memo, key, (limits, call), started)
            self._remember_comparison(args, override, solution, decision, started)
        return call, not selected.provisional

    def _traced(
        self, args: tuple[Any, ...], arguments: dict[str, Any], override: str | None, solution: str | None
    ) -> Callable[..., Any]:
        """Returns the function that runs a traced call. A call on meta tensors is passed to the watchers of traced calls. A call on
        other tensors without data belongs to a compiler, which may trace the same call several times."""

        def run(*values: Any) -> Any:
            return self.lowering.call(*values, override, solution)

        if not watch.watching(traced=True) or any(
            stands_in(tensor) for _, tensor in tensor_arguments(self.op.parameters, arguments)
        ):
            return run
        self.op.check_call(arguments, values=False)
        key = self._describe(*args, override, solution)
        with use_platform(current_platform()):  # the meta device does not tell the platform
            request = self.op.request(arguments)
        seen = self._seen("", key, arguments, request, lambda: None)
        return watch.watched(seen, run, traced=True)

    def _seen(self, kernel: str, key: Any, arguments: dict[str, Any], request: Request, read_work: Callable[[], Any]) -> watch.Call:
        op = self.op
        tensors = dict(tensor_arguments(op.parameters, arguments))
        described = key, tuple(tensor.stride() for tensor in tensors.values())
        return watch.Call(op.family, op.mode, kernel, request.signature, tensors, described, arguments, request.traits, read_work)

    def _remember_comparison(
        self, args: tuple[Any, ...], override: str | None, solution: str | None, decision: Decision, started: int
    ) -> None:
        """Prepends a comparison with this call to the chain of comparisons with the last decided calls."""
        if self._comparisons is None:
            return
        makers = (self._comparison(args, override, solution, decision), *self._comparisons.get(_MAKERS, ()))[: fast_path.CHAIN]
        first = self._find
        for make in reversed(makers):
            first = make(first)
        memo.remember(self._comparisons, _MAKERS, makers, started)
        memo.remember(self._comparisons, fast_path.FIRST, first, started)

    def forget(self) -> None:
        """Clears the memoised decisions of calls, so the next call of each description is decided again. Selections for requests
        stay memoised."""
        self._memo.clear()
        if self._comparisons is not None:
            self._comparisons.clear()

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
        # An override from the environment or a ``with`` block may name another wheel's kernel. A wheel's own function ignores such
        # an override instead of failing.
        own = {spec.name for spec in KernelRegistry.get().get_for_operator(self.op.family, self.op.mode, self.package)}
        if wanted.kernel in own:
            return wanted
        if problem := misnamed(wanted.kernel, str(self.op)):  # Python shows the same warning once
            warnings.warn(f"{wanted.source} is ignored by {self.package}.{self.op.mode}: {problem}", stacklevel=5)
        return None

    # -- what precedes the kernel ----------------------------------------------------------------------------------------------

    def _launcher(self, selected: SelectedKernel, arguments: dict[str, Any]) -> Callable[..., Any]:
        """Returns the function that runs calls of this description, without checks."""
        empty = self._skip_if_empty(arguments)
        if empty is not None:
            return empty
        impl = selected.impl
        if isinstance(impl, Composed):
            impl = impl.decided(_decide_part, tuple(arguments.values()))
        normal = self.op.normal(arguments)
        return self._replacing(tuple(normal))(impl, normal) if normal else impl

    def _skip_if_empty(self, arguments: dict[str, Any]) -> Callable[..., Any] | None:
        """Returns a function that makes the outputs and launches nothing, if all outputs of the call are empty and the call writes
        to nothing else. Returns None for all other calls."""
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
        """Returns ``call`` with an overlap check before it: memory that the call writes to must not overlap another argument.
        Returns ``call`` itself if the call writes to no argument.

        Shapes and strides are part of the description. So if two tensors passed the check once, two tensors at the same distance in
        memory pass it again. At a new tuple of addresses, the guard compares the tensors' distances with the distances that have
        passed.
        """
        op = self.op
        if not op.written(arguments):
            return call
        pairs = op.overlap_pairs(arguments)
        names = tuple(dict.fromkeys(name for pair in pairs for name in pair[:2]))
        tensors = {name: tensor for name, tensor in tensor_arguments(op.parameters, arguments) if name in names}
        spans = {name: span(tensor) for name, tensor in tensors.items()}

        def near(at: Mapping[str, int]) -> set[tuple[str, str, int]]:
            """Returns the pairs of tensors whose spans in memory overlap, with the distances between their addresses."""
            distances = ((written, other, at[other] - at[written]) for written, other, _ in pairs)
            return {each for each in distances if -spans[each[1]] < each[2] < spans[each[0]]}

        passed = near({name: tensor.data_ptr() for name, tensor in tensors.items()})
        known: set[tuple[int, ...]] = set()

        def check(addresses: tuple[int, ...], args: tuple[Any, ...]) -> None:
            found = near(dict(zip(names, addresses, strict=True)))
            if not found <= passed:
                op.check_overlaps(dict(zip(op.names, args, strict=True)))
                passed.update(found)
            if len(known) >= _MOST_ADDRESSES:
                known.clear()
            known.add(addresses)

        return self._overlap_guard(names)(call, known, check) if pairs else call

    def _with_check(self, call: Callable[..., Any], arguments: dict[str, Any]) -> Decision:
        """Returns the decision to run ``call``. If the arguments include values in host memory, the decision also has the check of
        these values."""
        op = self.op
        hints = [p.name for p in op.parameters if p.kind is Kind.HINT]
        watched = tuple(n for n in op.host_values if n not in hints and arguments[n] is not None and readable(arguments[n]))
        if not op.has_hook("check_values") or not (watched or any(arguments[hint] is not None for hint in hints)):
            return Decision(call)
        seen = [fast_path.nothing_checked(op.parameters, watched)]
        return Decision(call, (), watched, self._checked_by(op.check_values), seen)

    def _with_value_guard(self, decision: Decision) -> Callable[..., Any]:
        """Returns a function that checks the call's values in host memory, then runs the decision's kernel."""
        if decision.check is None:
            return decision.call
        return self._value_guard(decision.watched)(decision.check, decision.call, decision.seen)  # type: ignore[no-any-return]

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
        """Selects a kernel for calls before any tensor exists, and the layout to which `prepare` converts objects such as weights.

        Args:
            args, facts: the arguments of the operator's ``plan`` hook.
            device: the device of the tensors; by default the device of `current_platform`.
            platform: the platform to run on, instead of ``device``.
            override: select this kernel; the platform and format gates still apply.
            solution: select only kernels of this solution.
            called: the name of the called function, for error messages; ``"<mode>.plan"`` if not given.

        Returns:
            The plan, for `prepare` and for calls. Planning needs no device and launches nothing.

        Raises:
            TypeError, ValueError: an argument is wrong. The message names the argument.
            NoKernelFoundError: no kernel is eligible. The message gives the reason for each kernel.
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
        """Converts an object that outlives calls, such as weights, to the layout of the plan's kernel.

        Call this method once, when a model is loaded.

        Args:
            given: the object. The method does not change this object.
            plan: a plan made by `plan`.
            called: the name of the called function, for error messages; ``"<mode>.prepare"`` if not given.

        Returns:
            The object to pass to calls; ``given`` itself if it already has the layout.

        Raises:
            TypeError, ValueError: the object does not fit the plan, or the plan's kernel is not registered. The message has the
                reason.
        """
        return self.op.prepare(given, plan, called or f"{self.op.mode}.prepare", self.package)

    def bind(self, *args: Any, override: str | None = None, solution: str | None = None, **kwargs: Any) -> Callable[..., Any]:
        """Checks the arguments of a call, selects a kernel, and returns a function for direct calls of this kernel.

        The function has all parameters of the operator, in order, and is for calls of the same description. The function adds no
        overhead to the kernel's launch, except a check of values in host memory. These values are checked whenever they change,
        because a wrong length can crash the process.
        """
        arguments = self.op.bound_arguments(args, kwargs)
        check = self.op.check_call(arguments)
        _, selected = self._select(arguments, check, override, solution)
        return self._with_value_guard(self._with_check(self._launcher(selected, arguments), arguments))

    def explain(self, *args: Any, override: str | None = None, solution: str | None = None, **kwargs: Any) -> Explanation:
        """Explains which kernel a call with these arguments would run, and why every other kernel is rejected. Launches nothing."""
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
    """Decides a call of one operator in a composed kernel's body. Returns the function that runs the call, and whether further
    calls may reuse this function."""
    caller: Caller = function.caller
    return caller._decide(args, None, None)


def _limit(name: str, op: Operator[Any, Any], value: int, check: Checker, request: Request) -> Limit:
    """Returns the range of values of a bound, such as ``max_seqlen_k``, for which the selected kernel stays the same. If selection
    depends on sizes, the range is one bucket of sizes. Otherwise the range is every value that the ``check`` hook allows.
    """
    position = op.names.index(name)
    least, most = check.ranges.get(name, (value, value))
    if not sizes_matter(request):
        return Limit(position, least, most)
    high = request.buckets[name]
    return Limit(position, max(least, high // 2 + 1 if high > 1 else high), min(most, high))

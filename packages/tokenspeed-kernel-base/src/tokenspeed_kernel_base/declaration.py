"""Derives a call's request, checks, outputs and plan from an operator's declaration.

The decorator `tokenspeed_kernel_base.operator.operator` makes declarations. The docstring of its module shows a whole declaration.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from tokenspeed_kernel_base import lowering, planning, provided
from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.checks import Checker, describe, refuse_gradients
from tokenspeed_kernel_base.composition import COMPOSED, Composed, by_reference, check_parts
from tokenspeed_kernel_base.explanation import Explanation, NoKernelFoundError, Override, Request
from tokenspeed_kernel_base.hooks import Declaration
from tokenspeed_kernel_base.interface import Interface
from tokenspeed_kernel_base.names import did_you_mean
from tokenspeed_kernel_base.options import Options
from tokenspeed_kernel_base.parameters import (
    Kind,
    check_types,
    kind_of,
    on_meta,
    options_given,
    resource_arguments,
    resources_given,
    tensor_arguments,
)
from tokenspeed_kernel_base.platform import PlatformInfo, platform_of
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.resources import same_place, stated_by
from tokenspeed_kernel_base.selection import consider, selection_policy
from tokenspeed_kernel_base.signature import FormatSignature, dense_tensor_format
from tokenspeed_kernel_base.spec import CANONICAL, KernelSpec, Priority
from tokenspeed_kernel_base.stand_ins import readable
from tokenspeed_kernel_base.variation import Variation

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "reference"


class Operator(Declaration, Generic[P, R]):
    """An operator's declaration, and everything derived from the declaration for a call. The public function's attribute
    ``operator`` is this object; `get_operator` finds it by name.

    Attributes:
        body: see `Declaration`.
        interface: the names that declarations of the operator's kernels are checked against.
    """

    body: Callable[P, R]

    def __init__(self, options: Options, body: Callable[P, R]) -> None:
        super().__init__(options, body)
        if self.parts:
            check_parts(str(self), body, self.parts)
        stated = self.formats if isinstance(self.formats, Mapping) else dict.fromkeys(self.formats, ("dense",))
        holders = tuple(p.cls or p.types[0] for p in self.parameters if p.kind in (Kind.OBJECT, Kind.RESOURCE))
        operands = {name: tuple(each) for name, each in stated.items()}
        self.interface = Interface(self.names, self.traits, operands, self.layout, (*self.outs, *self.mutates), holders)

    # -- declaration -----------------------------------------------------------------------------------------------------------

    @property
    def plan_class(self) -> type:
        """The class of the operator's plans."""
        cls = next(p.cls for p in self.parameters if p.name == self.planned)
        assert cls is not None
        return cls

    def register_reference(self) -> None:
        """Registers the body as the reference kernel, unless it is registered already. A body that calls other operators is
        registered a second time, as the composed kernel; see `tokenspeed_kernel_base.composition`."""
        registry = KernelRegistry.get()
        registry.declare_interface(self.family, self.mode, self.interface)
        for spec, impl in self._bodies:
            if not registry.has(spec):
                registry.register(spec, impl)

    @functools.cached_property
    def _bodies(self) -> list[tuple[KernelSpec, Callable[..., Any]]]:
        """The kernels that the body is registered as: the spec and the implementation of each."""
        bodies: list[tuple[KernelSpec, Callable[..., Any]]] = [
            (self._body_spec(REFERENCE, Priority.REFERENCE, self.reference_traits, frozenset({"determinism"})), self.reference)
        ]
        if self.parts:
            bodies.append((self._body_spec(COMPOSED, Priority.COMPOSED, self.composed_traits), Composed(self)))
        return bodies

    def _body_spec(
        self, solution: str, priority: Priority, traits: Mapping[str, Any], tags: frozenset[str] = frozenset()
    ) -> KernelSpec:
        code = inspect.unwrap(self.body).__code__
        return KernelSpec(
            f"{solution}_{self.mode}",
            self.family,
            self.mode,
            solution=solution,
            format_signatures=None,
            traits=traits,
            universal=True,
            priority=priority,
            tags=tags,
            package=self.body.__module__.partition(".")[0],
            origin=f"{code.co_filename}:{code.co_firstlineno}",
        )

    # -- what is derived -------------------------------------------------------------------------------------------------------

    def normal(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The options, by name, whose normalised value differs from the value in the call. Kernels receive the normalised values;
        see `Parameter.normal`.
        """
        normal = {parameter.name: parameter.normal(arguments[parameter.name]) for parameter in self.parameters}
        return {name: value for name, value in normal.items() if value is not arguments[name]}

    @functools.cached_property
    def _reference_body(self) -> Callable[..., Any]:
        return by_reference(self.body) if self.parts else self.body

    def reference(self, *args: Any) -> Any:
        """Runs the body, and writes its results to provided outputs. Solution ``reference`` runs this function."""
        arguments = dict(zip(self.names, args, strict=True))
        args = tuple({**arguments, **self.normal(arguments)}.values())
        given = [arguments[out] for out in self.outputs_of(arguments)]
        # The ``fake`` hook promises contiguous outputs, and torch.compile relies on that. A body's result may have a strided
        # input's order of axes in memory.
        results = [result.contiguous() for result in lowering.as_list(self._reference_body(*args))]
        rows = slice(self.counted_rows(arguments))
        for index, output in enumerate(given):
            if output is not None and index < len(results):
                output[rows].copy_(results[index][rows])
                results[index] = output
        return lowering.from_list(results)

    def counted_rows(self, arguments: Mapping[str, Any]) -> int | None:
        """The number of leading rows of the outputs that are not padding; None without padding. Reads the value from the device."""
        return None if self.padded is None else int(arguments[self.padded][-1])

    def all_cases(self) -> list[Case]:
        """The declared cases."""
        return list(self._hooks["cases"]()) if "cases" in self._hooks else []

    def cost_of(self, arguments: dict[str, Any]) -> Cost:
        """The work of a call. ``arguments`` holds the arguments by name; omitted arguments take their defaults."""
        cost = self.run_hook("cost", self.complete(arguments))
        assert isinstance(cost, Cost), f"{self} declares no cost"
        return cost

    def varied(self, arguments: dict[str, Any], variation: Variation) -> dict[str, Any]:
        """Returns the new values of the arguments that a variation replaces, by name. Returns an empty dict if the operator has no
        ``vary`` hook. ``arguments`` must be complete.
        """
        return dict(self.run_hook("vary", arguments, variation) or {})

    def prepared(self, arguments: dict[str, Any], spec: KernelSpec) -> dict[str, Any]:
        """Returns a case's arguments in the form that the kernel ``spec`` reads: the plan is for this kernel, and the weights are
        in its layout. Returns ``arguments`` itself if the operator has no ``prepare`` hook. ``arguments`` must be complete.
        """
        if "prepare" not in self._hooks or self.planned is None:
            return arguments
        raw, _ = self._wanted["prepare"]
        plan = self.plan_for(arguments[self.planned], spec)
        return {**arguments, self.planned: plan, raw: self.prepare(arguments[raw], plan, self.mode)}

    def complete(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name with the defaults filled in. Raises TypeError as a call would."""
        return self.bound_arguments((), arguments)

    def bound_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, with the defaults filled in. Raises TypeError as a call would."""
        try:
            bound = inspect.signature(self.body).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.mode}: {error}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def fake_outputs(self, arguments: dict[str, Any]) -> Any:
        """Empty outputs of the right shapes and dtypes, for arguments that may be fake."""
        unfound = {n: arguments[n].find() for n in self._wanted.get("fake", ()) if isinstance(arguments[n], lowering.Unfound)}
        return self.run_hook("fake", {**arguments, **unfound} if unfound else arguments)

    def outputs_of(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of a call's outputs, in order; without an ``outputs`` hook, all of ``outs``."""
        return tuple(self.run_hook("outputs", arguments) if "outputs" in self._hooks else self.outs)

    def named(self, arguments: Mapping[str, Any], outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """A call's outputs, by the names of the parameters that receive them."""
        return provided.named(self.outputs_of(arguments), outputs)

    def output_positions(self, args: Sequence[Any]) -> list[int]:
        """The indices of the parameters that receive a call's outputs, in the outputs' order."""
        return [self.names.index(name) for name in self.outputs_of(dict(zip(self.names, args, strict=True)))]

    def outputs_on_meta(self, arguments: dict[str, Any]) -> list[torch.Tensor]:
        """The outputs of a call as meta tensors, without allocating memory."""
        return lowering.as_list(self.fake_outputs(on_meta(self.parameters, arguments)))

    def request(
        self,
        arguments: dict[str, Any],
        solution: str | None = None,
        sizes: Mapping[str, int] | None = None,
        package: str | None = None,
    ) -> Request:
        """The request of a call with these (complete, checked) arguments.

        Args:
            arguments: arguments of the call, by name.
            solution: only kernels of this solution.
            sizes: the sizes found by `check_call`, if it ran.
            package: only this package's kernels.
        """
        tensors = tensor_arguments(self.parameters, arguments)
        stated = {n: value for _, each in resources_given(self.parameters, arguments) for n, value in stated_by(each).items()}
        signature, traits = self._stated(arguments)
        return Request(
            self.family,
            self.mode,
            signature,
            platform_of(tensors[0][1].device),
            {**stated, **traits},
            selection_policy().objective,
            solution,
            frozenset((*self.fixed_traits, *stated)),
            self.sizes(arguments) if sizes is None else sizes,
            frozenset((*self.varying, *self.bounds)),
            tuple(self.run_hook("intermediates", arguments) or ()),
            package,
            options_given(self.parameters, arguments),
        )

    # -- planning --------------------------------------------------------------------------------------------------------------

    def make_plan(self, args: tuple[Any, ...], facts: dict[str, Any], called: str, consider: Callable[[Any], Explanation]) -> Any:
        """Makes a plan from facts about later calls. ``consider`` selects the plan's kernel.

        Args:
            args, facts: the arguments of the ``plan`` hook.
            called: the name of the function that error messages give.
            consider: returns the selection for a plan that names no kernel yet.

        Raises:
            TypeError, ValueError: a fact is wrong.
            NoKernelFoundError: no kernel is eligible.
        Warns:
            ReferenceWarning: the plan is for the reference, on a GPU.
        """
        hook, check = self._hooks["plan"], Checker(called)
        try:
            bound = inspect.signature(hook).bind(check, *args, **facts)
        except TypeError as error:
            # `bind` reports a missing argument before an unknown one, which is often the missing one misspelled.
            known = list(inspect.signature(hook).parameters)[1:]
            unknown = [f"got an unexpected keyword argument {n!r}{did_you_mean(n, known)}" for n in facts if n not in known]
            raise TypeError(f"{called}: {unknown[0] if unknown else error}") from None
        plan = self._by_name[self.planned or ""].normal(hook(*bound.args, **bound.kwargs))
        explanation = consider(plan)
        if explanation.chosen is None:
            raise NoKernelFoundError(explanation)
        planning.warn_of_reference(called, explanation)
        return self.plan_for(plan, explanation.chosen)

    def plan_for(self, plan: Any, spec: KernelSpec) -> Any:
        """A copy of the plan for the kernel ``spec``: the same computation, with the weight layout that this kernel needs."""
        layout = {} if self.layout is None else {self.layout: planning.wanted_layout(spec, self.layout)}
        return dataclasses.replace(plan, kernel=spec.name, **layout)

    def consider_plan(
        self, plan: Any, platform: PlatformInfo, solution: str | None, override: Override | None, package: str | None
    ) -> Explanation:
        """The selection for a plan. Each kernel is evaluated as if the weights were in the layout that it needs."""
        planned, trait = self.planned, self.layout
        assert planned is not None

        def request_in(layout: str) -> Request:
            arguments = {planned: plan if trait is None else dataclasses.replace(plan, **{trait: layout})}
            signature, traits = self._stated(arguments)
            return Request(
                self.family,
                self.mode,
                signature,
                platform,
                traits,
                selection_policy().objective,
                solution,
                frozenset(self.fixed_traits),
                package=package,
            )

        if trait is None:
            return consider(request_in(CANONICAL), override)
        specs = KernelRegistry.get().get_for_operator(self.family, self.mode, package)
        return planning.consider_layouts(request_in, specs, trait, override)

    def consider_prepared(self, request: Request, arguments: dict[str, Any], override: Override | None) -> Explanation:
        """The selection for a call with unprepared weights. Each kernel is evaluated as if the weights were in the layout that it
        needs.

        Args:
            request: the request of the call with unprepared weights.
            arguments: arguments of the call, by name.
            override: the kernel requested by name, if any.
        """
        planned, trait = self.planned, self.layout
        if planned is None or trait is None:
            return consider(request, override)

        def request_in(layout: str) -> Request:
            plan = dataclasses.replace(arguments[planned], **{trait: layout})
            traits = self.run_hook("traits", {**arguments, planned: plan}) or {}
            return dataclasses.replace(request, traits={**request.traits, **traits})

        specs = KernelRegistry.get().get_for_operator(self.family, self.mode, request.package)
        return planning.consider_layouts(request_in, specs, trait, override)

    def prepare(self, given: Any, plan: Any, called: str, package: str | None = None) -> Any:
        """Converts an object for the plan's kernel, with the ``prepare`` hook. Raises TypeError if ``plan`` is not of the
        operator's plan class."""
        check = Checker(called)
        if not isinstance(plan, self.plan_class):
            check.fail(
                self.planned or "", f"a {self.plan_class.__name__}, as {self.mode}.plan makes it", type(plan).__name__, TypeError
            )
        return self._hooks["prepare"](planning.Preparation(check, str(self), self.planned or "", package), given, plan)

    def sizes(self, arguments: dict[str, Any], check: Checker | None = None) -> dict[str, int]:
        """A call's sizes by name: the sizes that the ``check`` hook binds, except capacities, and the bounds that the call
        gives.
        """
        if check is None:
            check = Checker(self.mode)
            self.run_hook("check", arguments, check)
        sizes = {name: size for name, size in check.sizes().items() if name not in self.capacity}
        return {**sizes, **{name: arguments[name] for name in self.bounds if arguments[name] is not None}}

    def _stated(self, arguments: dict[str, Any]) -> tuple[FormatSignature, dict[str, Any]]:
        """A call's formats and traits, from the operator's hooks. Raises TypeError for undeclared formats or traits, because no
        kernel could declare them.
        """
        traits: dict[str, Any] = self.run_hook("traits", arguments) or {}
        if "formats" in self._hooks:
            signature = self.run_hook("formats", arguments)
            assert isinstance(signature, FormatSignature)
        else:
            roles = ((name, arguments[name]) for name in self.formats)
            signature = FormatSignature(tuple((name, dense_tensor_format(t.dtype)) for name, t in roles if t is not None))
        unstated = self.interface.unstated(traits, signature)
        if unstated:
            raise TypeError(f"{self}: its hooks give {', '.join(unstated)}, which traits= or formats= does not state")
        return signature, traits

    # -- checking --------------------------------------------------------------------------------------------------------------

    def check_call(self, arguments: dict[str, Any], *, values: bool = True) -> Checker:
        """Raises TypeError or ValueError for an invalid call. ``values``: whether to also check values in host memory.

        Returns:
            The checker, which holds the call's sizes and the ranges of its bounds.
        """
        check_types(self.mode, self.parameters, arguments)
        tensors = tensor_arguments(self.parameters, arguments)
        if tensors:
            first, device = tensors[0][0], tensors[0][1].device
            for name, tensor in tensors[1:]:
                if tensor.device != device:
                    raise ValueError(f"{self.mode}: {name} must be on {device} like {first}, got {describe(tensor)}")
            self._check_resources(arguments, first, device)
        refuse_gradients(self.mode, tensors)
        check = Checker(self.mode)
        self.run_hook("check", arguments, check)
        if any(arguments[out] is not None for out in self.outs):
            provided.check_provided(self.mode, self.outs, arguments, self.named(arguments, self.outputs_on_meta(arguments)))
        self.check_overlaps(arguments)
        if values and self.host_values:
            self.check_values(arguments)
        return check

    def _check_resources(self, arguments: dict[str, Any], first: str, device: torch.device) -> None:
        """Raises ValueError if a resource and the tensors are on different devices, and TypeError if a resource's key is not
        hashable."""
        for name, resource in resource_arguments(self.parameters, arguments):
            if resource.device is not None and not same_place(resource.device, device):
                what = f"a {type(resource).__name__} for {resource.device}"
                raise ValueError(f"{self.mode}: {name} must be for {device}, where {first} is, got {what}")
            try:
                hash(resource.key)
            except TypeError:
                raise TypeError(f"{self.mode}: the key of {name} must be hashable, got {kind_of(resource.key)}") from None

    def written(self, arguments: Mapping[str, Any]) -> list[str]:
        """Parameters whose memory a call writes to."""
        return [name for name in (*self.outs, *self.mutates) if arguments[name] is not None]

    def overlap_pairs(self, arguments: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
        """Pairs of tensors that must not overlap: a tensor that the call writes to, and another tensor. The third item is True if
        both may be the same tensor.
        """
        tensors = (name for name, _ in tensor_arguments(self.parameters, arguments))
        return provided.overlap_pairs(self.written(arguments), tensors, self.in_place)

    def check_overlaps(self, arguments: dict[str, Any]) -> None:
        """Raises ValueError if a tensor that a call writes to overlaps another argument, or has several elements at one address."""
        tensors = dict(tensor_arguments(self.parameters, arguments))
        provided.check_overlaps(self.mode, self.written(arguments), self.overlap_pairs(arguments), tensors)

    def check_values(self, arguments: dict[str, Any]) -> None:
        """Raises ValueError for invalid values of tensors in host memory, and of hints."""
        seen = dict(arguments)
        for name in self.host_values:
            value = seen[name]
            if isinstance(value, torch.Tensor) and not readable(value):
                seen[name] = None
        self.run_hook("check_values", seen, Checker(self.mode))

"""Plans: the kernel of an operator is chosen before any tensor exists, and what outlives its calls is prepared for it once.

Four steps, of which an operator that needs them declares the first two::

    @operator("moe", "moe_apply", planned="plan", layout="weight_layout", fixed_traits=("weight_layout",))
    def moe_apply(x: Tensor, weights: MoEWeights, ..., plan: MoEPlan, out: Tensor | None = None) -> Tensor: ...

    @moe_apply.plan                  # facts to a plan that names no kernel yet: a frozen dataclass with an attribute ``kernel``
    def _(check, num_experts, top_k): return MoEPlan(num_experts, top_k, kernel=UNDECIDED, weight_layout=CANONICAL)

    @moe_apply.prepare               # what the plan's kernel is to be given in place of the raw object
    def _(preparation, weights, plan): ...

    plan = moe_apply.plan(128, 4, device="cuda")       # once a layer: chooses
    weights = moe_apply.prepare(weights, plan)         # once a layer: arranges
    launch = moe_apply.bind(x, weights, ..., plan)     # if wanted, once a description
    moe_apply(x, weights, ..., plan)                   # as often as there are tokens

Kernels may want the same object in layouts of their own. A kernel names its layout by a trait, and has a ``weight_preprocessor``
that arranges the object. A plan compares each kernel as a call would, as if the object were in the layout that this kernel wants.
The hooks ``traits`` and ``formats`` of such an operator see the plan alone, so that plan and call ask the same of a kernel.

An operator that takes the plans of another one declares ``prepare`` and no ``plan``; its other hooks may see what they like.

Weights are a dataclass of tensors with an attribute ``layout``, for which functions take any object with its attributes in place:
`as_weights` makes it, and `Preparation.arranged` is all that a ``prepare`` hook has to do.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.parameters import check_types, fields_of, resolved_annotations
from tokenspeed_kernel_base.registry import KernelRegistry, load_object
from tokenspeed_kernel_base.resources import Resource
from tokenspeed_kernel_base.selection import Explanation, Override, Request, Verdict, consider
from tokenspeed_kernel_base.spec import CANONICAL, KernelSpec

# The kernel of a plan that is being made.
UNDECIDED = "undecided"

W = TypeVar("W")


class ReferenceWarning(UserWarning):
    """A plan for a GPU is for its operator's reference, because no kernel serves it there."""


def wanted_layout(spec: KernelSpec, trait: str) -> str:
    """The layout that an object is prepared in for a kernel: the one that it names beside canonical (the first by name of several),
    if it has a preprocessor or does not take the canonical one; else canonical.

    Args:
        spec: the kernel.
        trait: the trait that says the layout.
    """
    constraint = spec.traits.get(trait)
    if constraint is None or constraint.values is None:
        return CANONICAL
    own = sorted(value for value in constraint.values if isinstance(value, str) and value != CANONICAL)
    if not own or (CANONICAL in constraint.values and spec.weight_preprocessor is None):
        return CANONICAL
    return own[0]


def consider_layouts(
    request_in: Callable[[str], Request], specs: Iterable[KernelSpec], trait: str, override: Override | None
) -> Explanation:
    """One selection in which each kernel is asked for the layout that it wants.

    Args:
        request_in: what is asked, with the object in this layout.
        specs: the kernels that may be chosen.
        trait: the trait that says the layout.
        override: the kernel that is wanted by name, if any.
    """
    layouts = sorted({CANONICAL, *(wanted_layout(spec, trait) for spec in specs)})
    explanations = {layout: consider(request_in(layout), override) for layout in layouts}
    verdicts = [
        verdict
        for layout, explanation in explanations.items()
        for verdict in explanation.verdicts
        if wanted_layout(verdict.spec, trait) == layout
    ]
    accepted = _best_first(v for v in verdicts if v.accepted)
    rejected = sorted((v for v in verdicts if not v.accepted), key=lambda v: (-v.spec.priority, v.spec.name))
    chosen, problem = (accepted[0].spec if accepted else None), ""
    if override is not None and (chosen is None or chosen.name != override.kernel):
        layout = next((wanted_layout(v.spec, trait) for v in verdicts if v.spec.name == override.kernel), CANONICAL)
        chosen, problem = None, explanations[layout].problem
    return dataclasses.replace(explanations[CANONICAL], verdicts=(*accepted, *rejected), chosen=chosen, problem=problem)


def _best_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return sorted(verdicts, key=lambda verdict: (tuple(-part for part in verdict.rank), verdict.spec.name))


def warn_of_reference(called: str, explanation: Explanation) -> None:
    """Warns of a selection for a GPU that falls back to the reference, unless that was asked for by name.

    Args:
        called: the function that plans.
        explanation: the selection; something was chosen.

    Warns:
        ReferenceWarning: see above. Python shows the same text once.
    """
    request, chosen = explanation.request, explanation.chosen
    asked = explanation.override is not None or request.solution is not None
    accepted = sum(verdict.accepted for verdict in explanation.verdicts)
    if chosen is None or not chosen.is_reference or request.platform.is_cpu or asked or accepted > 1:
        return
    rejected = [verdict for verdict in explanation.verdicts if not verdict.accepted]
    nearest = next((verdict for verdict in rejected if verdict.gate == "traits"), rejected[0] if rejected else None)
    why = f"; {nearest.spec.name} is not eligible: {nearest.reason}" if nearest else ""
    warnings.warn(
        f"{called}: no kernel for {request.platform} serves this; {chosen.name} will, slowly{why}", ReferenceWarning, stacklevel=5
    )


def check_fields(check: Checker, plan: Any, prefix: str = "") -> None:
    """Raises TypeError or ValueError for an attribute of a plan that is not of the kind that it is annotated as. ``prefix`` stands
    before the names."""
    fields = [dataclasses.replace(field, name=prefix + field.attribute) for field in fields_of("plan", type(plan))]
    check_types(check.operator, fields, {field.name: getattr(plan, field.name.removeprefix(prefix)) for field in fields})


def layout_of(weights: Any) -> str:
    """The layout that any weights object is in."""
    return getattr(weights, "layout", CANONICAL)


def as_weights(check: Checker, argument: str, weights: Any, cls: type[W], layout: str | None = None) -> W:
    """A new object of a weights class with any object's tensors, in ``layout`` or the object's own; the object itself if it is a
    resource. What has a default in the class the object may lack.

    Raises:
        TypeError: an attribute is missing or is no tensor, or a resource is not derived from the class.
        ValueError: the tensors are on several devices, or a resource is in another layout.
    """
    values: dict[str, Any] = {}
    first = ""
    annotations, fields = resolved_annotations(cls), dataclasses.fields(cls)  # type: ignore[arg-type]
    for field in fields:
        name = field.name
        if name == "layout":
            continue
        if not hasattr(weights, name) and field.default is dataclasses.MISSING:
            check.fail(argument, f"an object with {name}", type(weights).__name__, TypeError)
        value = values[name] = getattr(weights, name, field.default)
        if value is None and annotations[name] is not Tensor:
            continue
        if not isinstance(value, Tensor):
            check.fail(f"{argument}.{name}", "a tensor", value, TypeError)
        first = first or name
        device = values[first].device
        if value.device != device:
            check.fail(f"{argument}.{name}", f"on {device} like {argument}.{first}", value)
    if not isinstance(weights, Resource):
        make: Callable[..., W] = cls
        return make(**values, layout=layout_of(weights) if layout is None else layout)
    if not isinstance(weights, cls):
        check.fail(argument, f"derived from {cls.__name__} if it is a Resource", type(weights).__name__, TypeError)
    if layout is not None and layout_of(weights) != layout:
        check.fail(f"the layout of {argument}", repr(layout), repr(layout_of(weights)))
    return weights


def check_layout(check: Checker, weights: Any, plan: Any, prepare: str) -> None:
    """Raises ValueError for a call's weights that are not in the layout that its plan wants. ``prepare``: what makes those."""
    layout = layout_of(weights)
    if layout != plan.weight_layout:
        wanted = f"{plan.weight_layout!r}, which {plan.kernel} of the plan wants: {prepare}(weights, plan) makes it"
        check.fail("weights.layout", wanted, repr(layout))


class Preparation(NamedTuple):
    """What a ``prepare`` hook works with.

    Attributes:
        check: raises errors in the name of the function that was called.
        operator: whose hook it is, ``"family.mode"``.
        planned: the operator's parameter that the plan is given as.
        package: the package whose kernels serve that function; None for all.
    """

    check: Checker
    operator: str
    planned: str
    package: str | None = None

    def arranged(
        self,
        weights: Any,
        plan: Any,
        cls: type[W],
        check_canonical: Callable[[Checker, Any, Any], None],
        normalised: Callable[[W], W] = lambda weights: weights,
    ) -> W:
        """Weights in the layout ``plan.weight_layout``, as a ``prepare`` hook gives them; those in it already stay as they are.

        Args:
            weights: any object with the attributes of ``cls``, in the canonical layout or the plan's.
            plan: the plan, already checked.
            cls: a dataclass of tensors with an attribute ``layout``. What is for its keywords alone is kept where the kernel's
                preprocessor leaves it out.
            check_canonical: raises unless canonical weights are what the plan says.
            normalised: canonical weights of the one dtype that preprocessors and kernels take, where several are canonical.

        Raises:
            TypeError, ValueError: see above, and `preprocess`.
        """
        check = self.check
        given = as_weights(check, "weights", weights, cls)
        layout = layout_of(given)
        if layout == plan.weight_layout != CANONICAL:
            return given
        if layout != CANONICAL:
            check.fail("weights.layout", f"{CANONICAL!r} or the plan's {plan.weight_layout!r}", repr(layout))
        check_canonical(check, given, plan)
        given = normalised(given)
        made = self.preprocess("weights", given, plan, plan.weight_layout)
        made = as_weights(check, f"what the weight_preprocessor of {plan.kernel} returns", made, cls, plan.weight_layout)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            # A preprocessor that need not change what is for keywords alone need not know it.
            kept = getattr(given, field.name)
            if field.kw_only and kept is not None and getattr(made, field.name) is None:
                setattr(made, field.name, kept)
        return made

    def preprocess(self, argument: str, given: Any, plan: Any, layout: str) -> Any:
        """What the ``weight_preprocessor`` of the plan's kernel makes of an object in the canonical layout; the object itself where
        the kernel has none and wants it as it is.

        Args:
            argument: what the object is called in messages.
            given: the object. A preprocessor must not write to it.
            plan: the plan, already checked.
            layout: the layout that the plan wants.

        Raises:
            ValueError: the plan's kernel is not registered or belongs to another package, or it wants a layout and has no
                preprocessor that makes it.
            ImportError, AttributeError: the preprocessor cannot be imported.
        """
        spec = self._kernel(plan)
        preprocessor = spec.weight_preprocessor
        if isinstance(preprocessor, str):
            preprocessor = load_object(preprocessor, f"the weight_preprocessor of {spec.name}")
        if preprocessor is not None:
            return preprocessor(given, plan)
        if layout != CANONICAL:
            because = f"kernel {spec.name} ({spec.origin}) wants that and has no weight_preprocessor"
            self.check.fail(f"{argument}.layout", f"{layout!r} already, because {because}", repr(CANONICAL))
        return given

    def _kernel(self, plan: Any) -> KernelSpec:
        argument = f"{self.planned}.kernel"
        try:
            spec = KernelRegistry.get().get_by_name(plan.kernel, self.operator)
        except KeyError as error:
            self.check.fail(argument, "a registered kernel", f"{plan.kernel!r}: {error.args[0]}")
        if self.package is not None and spec.package != self.package:
            self.check.fail(argument, f"a kernel of {self.package}", f"{plan.kernel!r} of {spec.package}")
        if self.package is None and not KernelRegistry.get().is_public(plan.kernel):
            self.check.fail(argument, "a kernel that serves everyone", f"{plan.kernel!r}, which serves {spec.package} alone")
        return spec

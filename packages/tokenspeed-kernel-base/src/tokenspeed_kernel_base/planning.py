"""Plans: an operator's kernel is selected before any tensor exists, and weights are converted to this kernel's layout once.

Planned calls take four steps. An operator with a plan declares the first two::

    @operator("moe", "moe_apply", planned="plan", layout="weight_layout", fixed_traits=("weight_layout",))
    def moe_apply(x: Tensor, weights: MoEWeights, ..., plan: MoEPlan, out: Tensor | None = None) -> Tensor: ...

    @moe_apply.plan                  # returns a plan that names no kernel yet: a frozen dataclass with an attribute ``kernel``
    def _(check, num_experts, top_k): return MoEPlan(num_experts, top_k, kernel=UNDECIDED, weight_layout=CANONICAL)

    @moe_apply.prepare               # converts the raw object to the form that the plan's kernel reads
    def _(preparation, weights, plan): ...

    plan = moe_apply.plan(128, 4, device="cuda")       # once per layer: selects the kernel
    weights = moe_apply.prepare(weights, plan)         # once per layer: converts the weights
    launch = moe_apply.bind(x, weights, ..., plan)     # optional, once per description
    moe_apply(x, weights, ..., plan)                   # at every step

Kernels may need the same object in different layouts. A kernel declares its layout as a trait, and has a ``weight_preprocessor``
that converts the object. The selection for a plan evaluates each kernel as if the object were already in that kernel's layout. The
hooks ``traits`` and ``formats`` of such an operator read only the plan. So the plan's selection and the later calls make the same
request.

An operator whose calls take another operator's plans declares ``prepare`` and no ``plan``. Its hooks may then read all arguments.

Weights are a dataclass of tensors with an attribute ``layout``. Functions also accept any other object with the same attributes,
which `as_weights` converts. For such weights, a ``prepare`` hook only needs to call `Preparation.arranged`.
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

# The kernel's name in a plan whose kernel is not selected yet.
UNDECIDED = "undecided"

W = TypeVar("W")


class ReferenceWarning(UserWarning):
    """A plan for a GPU falls back to its operator's reference, because no other kernel is eligible."""


def wanted_layout(spec: KernelSpec, trait: str) -> str:
    """The layout in which an object is prepared for a kernel.

    A kernel's own layout is a layout that it declares besides the canonical layout; if there are several, the first by name. That
    layout is returned if the kernel has a preprocessor or rejects the canonical layout. Otherwise the result is canonical.

    Args:
        spec: the kernel.
        trait: the trait that gives the layout.
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
    """Makes one selection. Each kernel is evaluated as if the object were in the layout that this kernel needs.

    Args:
        request_in: returns the request for an object in the given layout.
        specs: the candidate kernels.
        trait: the trait that gives the layout.
        override: the kernel requested by name, if any.
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
    """Warns if a selection for a GPU chose the reference, because no other kernel is eligible. Does not warn if the caller
    requested a kernel or a solution by name.

    Args:
        called: the planning function.
        explanation: the selection, with a chosen kernel.

    Warns:
        ReferenceWarning: see above. Python shows the same text only once.
    """
    request, chosen = explanation.request, explanation.chosen
    requested = explanation.override is not None or request.solution is not None
    accepted = sum(verdict.accepted for verdict in explanation.verdicts)
    if chosen is None or not chosen.is_reference or request.platform.is_cpu or requested or accepted > 1:
        return
    rejected = [verdict for verdict in explanation.verdicts if not verdict.accepted]
    nearest = next((verdict for verdict in rejected if verdict.gate == "traits"), rejected[0] if rejected else None)
    why = f"; {nearest.spec.name} is not eligible: {nearest.reason}" if nearest else ""
    warnings.warn(
        f"{called}: no kernel for {request.platform} is eligible, so {chosen.name} runs, slowly{why}",
        ReferenceWarning,
        stacklevel=5,
    )


def check_fields(check: Checker, plan: Any, prefix: str = "") -> None:
    """Raises TypeError or ValueError for a plan's attribute that does not match its annotation. Messages put ``prefix`` before the
    attribute's name."""
    fields = [dataclasses.replace(field, name=prefix + field.attribute) for field in fields_of("plan", type(plan))]
    check_types(check.operator, fields, {field.name: getattr(plan, field.name.removeprefix(prefix)) for field in fields})


def layout_of(weights: Any) -> str:
    """The layout of a weights object; canonical if the object does not state a layout."""
    return getattr(weights, "layout", CANONICAL)


def as_weights(check: Checker, argument: str, weights: Any, cls: type[W], layout: str | None = None) -> W:
    """Converts any object that has the tensors of the weights class ``cls`` to this class. The layout of the result is ``layout``,
    by default the object's own layout.

    A resource is returned unchanged. The object may lack attributes that have a default in ``cls``.

    Raises:
        TypeError: an attribute is missing or is no tensor, or a resource is not derived from the class.
        ValueError: the tensors are on several devices, or a resource's layout is not ``layout``.
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
    """Raises ValueError if a call's weights are not in the layout of its plan. ``prepare``: the name of the function that converts
    weights to a plan's layout.
    """
    layout = layout_of(weights)
    if layout != plan.weight_layout:
        wanted = f"{plan.weight_layout!r}, which the plan's kernel {plan.kernel} reads: {prepare}(weights, plan) converts to it"
        check.fail("weights.layout", wanted, repr(layout))


class Preparation(NamedTuple):
    """The tools of a ``prepare`` hook.

    Attributes:
        check: raises errors that name the called function.
        operator: the hook's operator, ``"family.mode"``.
        planned: the operator's parameter that takes the plan.
        package: the package whose kernels the called function dispatches to; None for all kernels.
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
        """Converts weights to the layout ``plan.weight_layout``. A ``prepare`` hook returns the result. Weights that already have
        this layout are returned without a conversion.

        Args:
            weights: any object with the attributes of ``cls``, in the canonical layout or in the plan's layout.
            plan: the plan, already checked.
            cls: a dataclass of tensors with an attribute ``layout``. Its keyword-only fields are copied if the kernel's
                preprocessor omits them.
            check_canonical: raises an error if canonical weights do not match the plan.
            normalised: converts canonical weights to the dtype that preprocessors and kernels expect, if the canonical layout
                allows several dtypes.

        Raises:
            TypeError, ValueError: the weights do not match ``cls`` or the plan; see also `preprocess`.
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
            # A preprocessor may omit keyword-only fields that it does not change.
            kept = getattr(given, field.name)
            if field.kw_only and kept is not None and getattr(made, field.name) is None:
                setattr(made, field.name, kept)
        return made

    def preprocess(self, argument: str, given: Any, plan: Any, layout: str) -> Any:
        """Converts an object in the canonical layout with the kernel's ``weight_preprocessor``. Returns the object itself if the
        kernel reads the canonical layout and has no preprocessor.

        Args:
            argument: the object's name, for error messages.
            given: the object. A preprocessor must not write to it.
            plan: the plan, already checked.
            layout: the layout that the plan requires.

        Raises:
            ValueError: the plan's kernel is not registered or belongs to another package; or it needs another layout and has no
                preprocessor.
            ImportError, AttributeError: the preprocessor cannot be imported.
        """
        spec = self._kernel(plan)
        preprocessor = spec.weight_preprocessor
        if isinstance(preprocessor, str):
            preprocessor = load_object(preprocessor, f"the weight_preprocessor of {spec.name}")
        if preprocessor is not None:
            return preprocessor(given, plan)
        if layout != CANONICAL:
            because = f"kernel {spec.name} ({spec.origin}) needs that layout and has no weight_preprocessor"
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
            self.check.fail(argument, "a public kernel", f"{plan.kernel!r}, which is private to {spec.package}")
        return spec

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
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.registry import KernelRegistry, load_object
from tokenspeed_kernel_base.selection import Explanation, Override, Request, Verdict, consider
from tokenspeed_kernel_base.spec import KernelSpec

# The layout in which an object is made and checked; every other one belongs to a kernel.
CANONICAL = "canonical"
# The kernel of a plan that is being made.
UNDECIDED = "undecided"


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

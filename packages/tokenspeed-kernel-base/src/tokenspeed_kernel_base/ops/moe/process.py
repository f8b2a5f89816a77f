"""Arranging weights for the kernel of a plan, once, when a model is loaded."""

from __future__ import annotations

from typing import Any

from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan, check_plan
from tokenspeed_kernel_base.ops.moe.weights import CANONICAL, MoEWeights, as_weights, check_canonical
from tokenspeed_kernel_base.registry import KernelRegistry, KernelSpec, load_object


def moe_process_weights(weights: Any, plan: MoEPlan) -> MoEWeights:
    """Checks a layer's weights against a plan and brings them into the layout that its kernel wants.

    The kernel's ``weight_preprocessor`` does the latter: a function ``(weights: MoEWeights, plan: MoEPlan)`` that returns an
    object with the six attributes of `MoEWeights`, and must not write to the tensors that it is given. Without one the tensors
    stay as they are. Weights that are in the plan's own layout already are returned as they are.

    Args:
        weights: any object with the six attributes of `MoEWeights`, in the canonical layout. It is not changed.
        plan: as `moe_plan` made it.

    Returns:
        New `MoEWeights`, whose ``layout`` is the plan's. Their tensors are those given where nothing had to be moved; the
        originals may be dropped otherwise.

    Raises:
        TypeError, ValueError: the weights do not fit the plan, the plan's kernel is not registered, or its preprocessor does not
            deliver. The message names attribute, got and expected.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import MoEWeights, moe_plan, moe_process_weights
        >>> plan = moe_plan(4, 2, hidden_size=8, intermediate_size=6, dtype=torch.float32, device="cpu", solution="reference")
        >>> weights = MoEWeights(torch.randn(4, 12, 8), None, None, torch.randn(4, 8, 6), None, None)
        >>> moe_process_weights(weights, plan).layout
        'canonical'
    """
    check = Checker("moe_process_weights")
    if not isinstance(plan, MoEPlan):
        check.fail("plan", "a MoEPlan, as moe_plan makes it", type(plan).__name__, TypeError)
    check_plan(check, plan, "plan.")
    given = as_weights(check, "weights", weights)
    if given.layout == plan.weight_layout != CANONICAL:
        return given
    if given.layout != CANONICAL:
        check.fail("weights.layout", f"{CANONICAL!r} or the plan's {plan.weight_layout!r}", repr(given.layout))
    check_canonical(check, given, plan)
    spec = _kernel_of(check, plan)
    preprocessor = spec.weight_preprocessor
    if isinstance(preprocessor, str):
        preprocessor = load_object(preprocessor, f"the weight_preprocessor of {spec.name}")
    if preprocessor is None:
        if plan.weight_layout != CANONICAL:
            because = f"kernel {spec.name} ({spec.origin}) wants that and has no weight_preprocessor"
            check.fail("weights.layout", f"{plan.weight_layout!r} already, because {because}", repr(given.layout))
        return given
    arranged = preprocessor(given, plan)
    return as_weights(check, f"what the weight_preprocessor of {spec.name} returns", arranged, plan.weight_layout)


def _kernel_of(check: Checker, plan: MoEPlan) -> KernelSpec:
    try:
        return KernelRegistry.get().get_by_name(plan.kernel)
    except KeyError as error:
        check.fail("plan.kernel", "a registered kernel", f"{plan.kernel!r}: {error.args[0]}")

"""The two steps before a layer's first call: `moe_plan` chooses a kernel, `moe_process_weights` arranges weights for it."""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.platform import PlatformInfo


def moe_plan(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    platform: PlatformInfo | None = None,
    weight_format: str = "dense",
    activation_dtype: str = "none",
    w13_interleaved: bool = False,
    bias: bool = False,
    activation: str = "swiglu",
    alpha: float = 1.0,
    limit: float | None = None,
    beta: float = 0.0,
    exact_activations: bool = False,
    override: str | None = None,
    solution: str | None = None,
) -> MoEPlan:
    """Decides, before weights are loaded, which kernel shall serve `moe_apply` and how it wants them arranged.

    It is `moe_apply.plan`. Kernels are compared as a call would compare them, each as if the weights were in the layout that it
    wants. `moe_apply` chooses again, among the kernels for the layout that was decided on here: as long as nothing was registered
    or configured in between, it arrives at ``plan.kernel``. To insist on that kernel, call it with ``override=plan.kernel``.

    Args:
        num_experts to exact_activations: see `MoEPlan`. float32, float64 and the halves are dtypes.
        device: where the tensors will be; by default what `current_platform` stands for.
        platform: where the kernel shall run, in place of device.
        override: only this kernel; the platform and format gates still hold.
        solution: only kernels made with this.

    Returns:
        The plan, for `moe_process_weights` and `moe_apply`. Needs no device and launches nothing.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        NoKernelFoundError: no kernel does this here; the message has each with its reason.
    Warns:
        ReferenceWarning: no kernel but the reference serves this on a GPU.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import moe_plan
        >>> plan = moe_plan(8, 2, 64, 32, dtype=torch.float32, device="cpu", solution="reference")
        >>> plan.kernel, plan.weight_layout
        ('reference_moe_apply', 'canonical')
    """
    plan: MoEPlan = moe_apply.plan(
        num_experts,
        top_k,
        hidden_size,
        intermediate_size,
        dtype=dtype,
        device=device,
        platform=platform,
        weight_format=weight_format,
        activation_dtype=activation_dtype,
        w13_interleaved=w13_interleaved,
        bias=bias,
        activation=activation,
        alpha=alpha,
        limit=limit,
        beta=beta,
        exact_activations=exact_activations,
        override=override,
        solution=solution,
        called="moe_plan",
    )
    return plan


def moe_process_weights(weights: Any, plan: MoEPlan) -> MoEWeights:
    """Checks a layer's weights against a plan and brings them into the layout that its kernel wants.

    It is `moe_apply.prepare`. The kernel's ``weight_preprocessor`` does the latter: a function ``(weights: MoEWeights, plan:
    MoEPlan)`` that returns an object with the six attributes of `MoEWeights`, and must not write to the tensors that it is given;
    an object of a class derived from `MoEWeights` and `Resource` may hold more. Scales of inputs that it lacks are added. e8m0
    scales are uint8 for it. Without a preprocessor the other tensors stay as they are. Weights that are in the plan's own layout
    already are returned as they are.

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
    if not isinstance(plan, MoEPlan):
        expected = "a MoEPlan, as moe_plan makes it"
        Checker("moe_process_weights").fail("plan", expected, type(plan).__name__, TypeError)
    processed: MoEWeights = moe_apply.prepare(weights, plan, called="moe_process_weights")
    return processed

"""The two steps before a layer's first call: `moe_plan` selects a kernel, `moe_process_weights` arranges weights for it."""

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
    """Selects, before weights are loaded, the kernel of `moe_apply` and its weight layout.

    The same as `moe_apply.plan`. Kernels are ranked as in a call, each as if the weights were in its own layout. `moe_apply`
    selects again, among the kernels for the plan's layout. It selects ``plan.kernel`` unless kernels were registered or settings
    changed in between. To force that kernel, call `moe_apply` with ``override=plan.kernel``.

    Args:
        num_experts to exact_activations: see `MoEPlan`. dtype is float16, bfloat16, float32 or float64.
        device: device of the tensors; by default that of `current_platform`.
        platform: platform that the kernel must support, instead of device.
        override: select only this kernel; the platform and format gates still apply.
        solution: select only kernels of this solution (backend).

    Returns:
        The plan, for `moe_process_weights` and `moe_apply`. The call needs no device and launches nothing.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        NoKernelFoundError: no kernel is eligible; the message lists each kernel with its reason.
    Warns: ReferenceWarning: only the reference is eligible on a GPU.

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
    """Checks a layer's weights against a plan and converts them to the layout of the plan's kernel.

    The same as `moe_apply.prepare`. The kernel's ``weight_preprocessor`` does the conversion. It is a function
    ``(weights: MoEWeights, plan: MoEPlan)`` that returns an object with the six attributes of `MoEWeights`, and must not write to
    its input tensors. An object of a class derived from `MoEWeights` and `Resource` may hold more. Input scales that the object
    lacks are added. The preprocessor gets e8m0 scales as uint8. Without a preprocessor the other tensors are unchanged. Weights
    that already are in the plan's layout are returned unchanged.

    Args:
        weights: any object with the six attributes of `MoEWeights`, in the canonical layout. Not modified.
        plan: the result of `moe_plan`.

    Returns:
        New `MoEWeights`, whose ``layout`` is the plan's. A tensor that needs no conversion is shared with the input; the
        originals of converted tensors may be freed.

    Raises:
        TypeError, ValueError: the weights do not match the plan, the plan's kernel is not registered, or its preprocessor returns
            something invalid. The message names the attribute, the expected and the actual value.

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

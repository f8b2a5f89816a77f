"""The two steps before a layer's first call: `linear_plan` chooses a kernel, `linear_process_weights` arranges weights for it."""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.ops.gemm.linear import linear
from tokenspeed_kernel_base.ops.gemm.linear_plan import LinearPlan
from tokenspeed_kernel_base.ops.gemm.linear_weights import LinearWeights
from tokenspeed_kernel_base.platform import PlatformInfo


def linear_plan(
    in_features: int,
    out_features: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    platform: PlatformInfo | None = None,
    weight_format: str = "dense",
    activation_dtype: str = "none",
    bias: bool = False,
    max_tokens: int | None = None,
    override: str | None = None,
    solution: str | None = None,
) -> LinearPlan:
    """Decides, before weights are loaded, which kernel shall serve `linear` and how it wants them arranged.

    It is `linear.plan`. Kernels are compared as a call would compare them, each as if the weights were in the layout that it wants.
    `linear` chooses again, among the kernels for the layout that was decided on here: as long as nothing was registered or
    configured in between, it arrives at ``plan.kernel``. To insist on that kernel, call it with ``override=plan.kernel``.

    Args:
        in_features to bias: see `LinearPlan`. float32 and float64 are dtypes of dense weights, the halves of all.
        max_tokens: the most tokens of a call; None: any number. Say it where it is certain: a worker that only decodes knows it.
            Then kernels are considered, too, that are for few tokens alone. A call with more raises ValueError.
        device: where the tensors will be; by default what `current_platform` stands for.
        platform: where the kernel shall run, in place of device.
        override: only this kernel; the platform and format gates still hold.
        solution: only kernels made with this.

    Returns:
        The plan, for `linear_process_weights` and `linear`. Needs no device and launches nothing.

    Raises:
        TypeError, ValueError: an argument is wrong, or tokens cannot be rounded so beside these weights; the message names it.
        NoKernelFoundError: no kernel does this here; the message has each with its reason.
    Warns:
        ReferenceWarning: no kernel but the reference serves this on a GPU.

    Example:
        >>> from tokenspeed_kernel import linear_plan
        >>> plan = linear_plan(64, 32, weight_format="nvfp4", device="cpu")
        >>> plan.kernel, plan.weight_layout
        ('composed_linear', 'canonical')
    """
    plan: LinearPlan = linear.plan(
        in_features,
        out_features,
        dtype=dtype,
        device=device,
        platform=platform,
        weight_format=weight_format,
        activation_dtype=activation_dtype,
        bias=bias,
        max_tokens=max_tokens,
        override=override,
        solution=solution,
        called="linear_plan",
    )
    return plan


def linear_process_weights(weights: Any, plan: LinearPlan) -> LinearWeights:
    """Checks a layer's weights against a plan and brings them into the layout that its kernel wants.

    It is `linear.prepare`. The kernel's ``weight_preprocessor`` does the latter: a function ``(weights: LinearWeights, plan:
    LinearPlan)`` that returns an object with the attributes of `LinearWeights`, and must not write to the tensors that it is given;
    an object of a class derived from `LinearWeights` and `Resource` may hold more. The scale of inputs is added where it lacks one.
    Without a preprocessor the tensors stay as they are. Weights that are in the plan's own layout already are returned as they are.

    Args:
        weights: any object with the attributes of `LinearWeights`, in the canonical layout. It is not changed.
        plan: as `linear_plan` made it.

    Returns:
        New `LinearWeights`, whose ``layout`` is the plan's. Their tensors are those given where nothing had to be moved; the
        originals may be dropped otherwise.

    Raises:
        TypeError, ValueError: the weights do not fit the plan, the plan's kernel is not registered, or its preprocessor does not
            deliver. The message names attribute, got and expected.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import LinearWeights, linear_plan, linear_process_weights
        >>> plan = linear_plan(8, 6, dtype=torch.float32, device="cpu")
        >>> linear_process_weights(LinearWeights(torch.randn(6, 8)), plan).layout
        'canonical'
    """
    if not isinstance(plan, LinearPlan):
        expected = "a LinearPlan, as linear_plan makes it"
        Checker("linear_process_weights").fail("plan", expected, type(plan).__name__, TypeError)
    processed: LinearWeights = linear.prepare(weights, plan, called="linear_process_weights")
    return processed

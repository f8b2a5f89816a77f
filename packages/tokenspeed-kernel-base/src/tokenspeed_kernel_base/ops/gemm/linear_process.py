"""The two steps before a layer's first call: `linear_plan` selects a kernel, `linear_process_weights` arranges weights for it."""

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
    """Selects, before weights are loaded, the kernel of `linear` and its weight layout.

    The same as `linear.plan`. Kernels are ranked as in a call, each as if the weights were in its own layout. `linear` selects
    again, among the kernels for the plan's layout. It selects ``plan.kernel`` unless kernels were registered or settings changed
    in between. To force that kernel, call `linear` with ``override=plan.kernel``.

    Args:
        in_features to bias: see `LinearPlan`. float16 and bfloat16 are possible with all weight formats, float32 and float64 with
            dense weights only.
        max_tokens: the largest number of tokens of a call; None: any number. Give it if it is certain, as in a decode-only
            worker: it makes kernels for few tokens eligible. A call with more tokens raises ValueError.
        device: device of the tensors; by default that of `current_platform`.
        platform: platform that the kernel must support, instead of device.
        override: select only this kernel; the platform and format gates still apply.
        solution: select only kernels of this solution (backend).

    Returns:
        The plan, for `linear_process_weights` and `linear`. The call needs no device and launches nothing.

    Raises:
        TypeError, ValueError: an argument is wrong, or the activation_dtype does not go with the weight_format; the message names
            it.
        NoKernelFoundError: no kernel is eligible; the message lists each kernel with its reason.
    Warns: ReferenceWarning: only the reference is eligible on a GPU.

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
    """Checks a layer's weights against a plan and converts them to the layout of the plan's kernel.

    The same as `linear.prepare`. The kernel's ``weight_preprocessor`` does the conversion. It is a function
    ``(weights: LinearWeights, plan: LinearPlan)`` that returns an object with the attributes of `LinearWeights`, and must not
    write to its input tensors. An object of a class derived from `LinearWeights` and `Resource` may hold more. An input scale
    that the object lacks is added. Without a preprocessor the tensors are unchanged. Weights that already are in the plan's
    layout are returned unchanged.

    Args:
        weights: any object with the attributes of `LinearWeights`, in the canonical layout. Not modified.
        plan: the result of `linear_plan`.

    Returns:
        New `LinearWeights`, whose ``layout`` is the plan's. A tensor that needs no conversion is shared with the input; the
        originals of converted tensors may be freed.

    Raises:
        TypeError, ValueError: the weights do not match the plan, the plan's kernel is not registered, or its preprocessor returns
            something invalid. The message names the attribute, the expected and the actual value.

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

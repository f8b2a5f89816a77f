"""The weights of a linear layer, and their check against a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.ops.gemm.linear_plan import BLOCKS, E4M3, STATIC, LinearPlan
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8
from tokenspeed_kernel_base.ops.quantization.formats import E8M0, bind_blocks, check_scalar
from tokenspeed_kernel_base.spec import CANONICAL


@dataclass
class LinearWeights:
    """The weights of a linear layer.

    Functions of this package accept any object with these attributes instead, for example `torch.nn.Linear`. Only ``weight`` is
    required: other missing attributes count as None, a missing ``layout`` as canonical. In the canonical layout the out-features
    come first. The shapes for ``n`` out-features and ``k`` in-features:

    * dense: weight of the plan's dtype ``[n, k]``; no scales.
    * fp8_channel: weight float8_e4m3fn ``[n, k]``; float32 scales (multipliers), one for each out-feature: ``[n, 1]``.
    * fp8_block: weight float8_e4m3fn ``[n, k]``; float32 scales, one for each 128 x 128 block: ``[ceil(n/128), ceil(k/128)]``.
    * mxfp4: weight uint8 ``[n, k/2]``, two e2m1 values in a byte, the lower nibble first; e8m0 scales (uint8 or float8_e8m0fnu)
      ``[n, k/32]``.
    * nvfp4: weight as in mxfp4; float8_e4m3fn scales ``[n, k/16]``, and a global scale.

    Attributes:
        weight: see above.
        weight_scale: the scales of weight, or None.
        weight_global_scale: float32 ``[]`` or ``[1]``, a factor of all weights in nvfp4, or None.
        bias: the bias ``[n]``, of the plan's dtype or float32; or None.
        layout: ``"canonical"``, or the name of the layout that `linear.prepare` converted the tensors to. The kernels
            that declare a layout define its shapes and dtypes.
        input_scale: float32 ``[1]``. The scale of the tokens if the plan's ``activation_dtype`` is ``"fp8_static"``, the tokens'
            global scale if it is ``"nvfp4"``, otherwise None.
    """

    weight: Tensor
    weight_scale: Tensor | None = None
    weight_global_scale: Tensor | None = None
    bias: Tensor | None = None
    layout: str = CANONICAL
    input_scale: Tensor | None = field(default=None, kw_only=True)


def check_canonical(check: Checker, weights: Any, plan: LinearPlan) -> None:
    """Raises ValueError or TypeError unless the weights match the plan and are in the canonical layout."""
    check.bind("in_features", plan.in_features, "plan.in_features")
    check.bind("out_features", plan.out_features, "plan.out_features")
    fmt = plan.weight_format
    scale, global_scale, bias, input_scale = (
        getattr(weights, name, None) for name in ("weight_scale", "weight_global_scale", "bias", "input_scale")
    )
    stated = f"plan.weight_format is {fmt!r}"
    _wanted(check, "weights.weight_scale", scale, fmt != "dense", stated)
    _wanted(check, "weights.weight_global_scale", global_scale, fmt == "nvfp4", stated)
    _wanted(check, "weights.bias", bias, plan.bias, f"plan.bias is {plan.bias}")
    rounded = f"plan.activation_dtype is {plan.activation_dtype!r}"
    _wanted(check, "weights.input_scale", input_scale, plan.activation_dtype in STATIC, rounded)
    if fmt in BLOCKS:
        codes, groups = (bind_blocks(check, "in_features", divisor) for divisor in (2, BLOCKS[fmt]))
        check.tensor("weights.weight", weights.weight, f"out_features {codes}", torch.uint8)
        dtypes = {E4M3} if fmt == "nvfp4" else E8M0
        check.tensor("weights.weight_scale", scale, f"out_features {groups}", dtypes)
    else:
        check.tensor("weights.weight", weights.weight, "out_features in_features", plan.dtype if fmt == "dense" else E4M3)
        shape = "out_features 1"
        if fmt == "fp8_block":
            shape = " ".join(bind_blocks(check, size, BLOCK_FP8) for size in ("out_features", "in_features"))
        check.tensor("weights.weight_scale", scale, shape, torch.float32)
    if global_scale is not None:
        check_scalar(check, "weights.weight_global_scale", global_scale)
    check.tensor("weights.bias", bias, "out_features", {plan.dtype} if plan.dtype == torch.float64 else {plan.dtype, torch.float32})
    check.tensor("weights.input_scale", input_scale, "1", torch.float32)


def _wanted(check: Checker, argument: str, value: Any, wanted: bool, because: str) -> None:
    if (value is not None) != wanted:
        check.fail(argument, f"{'a tensor' if wanted else 'None'}, because {because}", value)

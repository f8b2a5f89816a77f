"""The weights of a mixture-of-experts layer, and their check against a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.ops.moe.plan import BLOCKS, MoEPlan
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8
from tokenspeed_kernel_base.ops.quantization.formats import E8M0, bind_blocks
from tokenspeed_kernel_base.spec import CANONICAL


@dataclass
class MoEWeights:
    """The weights of all experts of a layer.

    Functions of this package accept any object with the first six attributes instead. Without the attribute ``layout`` the object
    counts as canonical; other missing attributes count as None. In the canonical layout the out-features come first, as in
    ``torch.nn.Linear``. The shapes for hidden size ``H`` and intermediate size ``I``:

    * dense: weights of the plan's dtype, w13 ``[experts, 2I, H]`` and w2 ``[experts, H, I]``; no scales.
    * fp8_channel: weights float8_e4m3fn of the same shapes; float32 scales (multipliers), one for each out-feature: w13
      ``[experts, 2I, 1]`` and w2 ``[experts, H, 1]``.
    * fp8_block: weights float8_e4m3fn of the same shapes; float32 scales (multipliers), one for each 128 x 128 block: w13
      ``[experts, ceil(2I/128), ceil(H/128)]`` and w2 ``[experts, ceil(H/128), ceil(I/128)]``.
    * mxfp8: weights float8_e4m3fn of the same shapes; e8m0 scales (uint8 or float8_e8m0fnu), w13 ``[experts, 2I, H/32]`` and w2
      ``[experts, H, I/32]``.
    * mxfp4: weights uint8, two e2m1 values in a byte, the lower nibble first, w13 ``[experts, 2I, H/2]`` and w2
      ``[experts, H, I/2]``; scales as in mxfp8.
    * nvfp4: weights as in mxfp4; scales float8_e4m3fn, w13 ``[experts, 2I, H/16]`` and w2 ``[experts, H, I/16]``; and a global
      scale for each projection.

    With the plan's ``w13_interleaved`` the rows of w13 are gate 0, up 0, gate 1, up 1, ...; otherwise all gate rows come before
    all up rows. The bias and the scales have the same order of rows, except that the scale blocks of fp8_block cover 128 stored
    rows each.

    Attributes:
        w13_weight: the fused gate and up projections.
        w13_weight_scale: the scales of w13_weight, or None.
        w13_weight_bias: float ``[experts, 2I]``, or None.
        w2_weight: the down projection.
        w2_weight_scale: the scales of w2_weight, or None.
        w2_weight_bias: float ``[experts, H]``, or None.
        layout: ``"canonical"``, or the name of the layout that `moe_apply.prepare` converted the tensors to. The kernels that
            declare a layout define its shapes and dtypes.
        w13_input_scale: float32 ``[1]``, the scale of the tokens if the plan's ``activation_dtype`` is ``"fp8_static"``, else
            None. If a checkpoint has one scale for each expert, use the largest.
        w2_input_scale: float32 ``[1]`` or None, like w13_input_scale, but for the input of the down projection.
        w13_weight_global_scale: float32 ``[experts]``, a factor of each expert's weights in nvfp4, or None. If a checkpoint has
            different global scales for gate and up, its weights must be requantised.
        w2_weight_global_scale: like w13_weight_global_scale, for w2.
    """

    w13_weight: Tensor
    w13_weight_scale: Tensor | None
    w13_weight_bias: Tensor | None
    w2_weight: Tensor
    w2_weight_scale: Tensor | None
    w2_weight_bias: Tensor | None
    layout: str = CANONICAL
    w13_input_scale: Tensor | None = field(default=None, kw_only=True)
    w2_input_scale: Tensor | None = field(default=None, kw_only=True)
    w13_weight_global_scale: Tensor | None = field(default=None, kw_only=True)
    w2_weight_global_scale: Tensor | None = field(default=None, kw_only=True)


def with_byte_scales(weights: MoEWeights) -> MoEWeights:
    """Returns the weights, with e8m0 scales viewed as uint8, as weight preprocessors expect them."""
    return replace(
        weights, w13_weight_scale=_byte_scales(weights.w13_weight_scale), w2_weight_scale=_byte_scales(weights.w2_weight_scale)
    )


def _byte_scales(scale: Tensor | None) -> Tensor | None:
    return scale.view(torch.uint8) if scale is not None and scale.dtype in E8M0 - {torch.uint8} else scale


def check_canonical(check: Checker, weights: Any, plan: MoEPlan) -> None:
    """Raises ValueError or TypeError unless the weights match the plan and are in the canonical layout."""
    check.bind("experts", plan.num_experts, "plan.num_experts")
    check.bind("hidden", plan.hidden_size, "plan.hidden_size")
    check.bind("intermediate", plan.intermediate_size, "plan.intermediate_size")
    check.bind("2*intermediate", 2 * plan.intermediate_size, "plan.intermediate_size")
    shapes = {"w13": ("2*intermediate", "hidden"), "w2": ("hidden", "intermediate")}
    for name, (rows, columns) in shapes.items():
        weight, scale, bias = (getattr(weights, f"{name}_weight{suffix}") for suffix in ("", "_scale", "_bias"))
        argument = f"weights.{name}_weight"
        if plan.weight_format == "dense":
            check.tensor(argument, weight, f"experts {rows} {columns}", plan.dtype)
            if scale is not None:
                check.fail(f"{argument}_scale", "None, because dense weights have no scales", scale)
        elif scale is None:
            check.fail(f"{argument}_scale", f"a tensor, because plan.weight_format is {plan.weight_format!r}", None)
        else:
            _check_scaled(check, argument, weight, scale, rows, columns, plan.weight_format)
        global_scale = getattr(weights, f"{name}_weight_global_scale", None)
        if (global_scale is not None) != (plan.weight_format == "nvfp4"):
            wanted = "None" if plan.weight_format != "nvfp4" else "a tensor"
            check.fail(f"{argument}_global_scale", f"{wanted}, because plan.weight_format is {plan.weight_format!r}", global_scale)
        check.tensor(f"{argument}_global_scale", global_scale, "experts", torch.float32)
        if plan.bias and bias is None:
            check.fail(f"{argument}_bias", "a tensor, because plan.bias is True; where only one has a bias give zeros", None)
        if not plan.bias and bias is not None:
            check.fail(f"{argument}_bias", "None, because plan.bias is False", bias)
        check.tensor(f"{argument}_bias", bias, f"experts {rows}", FLOATS)
        _check_input_scale(check, f"weights.{name}_input_scale", getattr(weights, f"{name}_input_scale", None), plan)


def _check_scaled(check: Checker, argument: str, weight: Any, scale: Any, rows: str, columns: str, weight_format: str) -> None:
    """Raises ValueError or TypeError unless a quantised projection matches its format. ``rows``, ``columns``: names of its
    sizes."""
    packed = weight_format in ("mxfp4", "nvfp4")
    shape = f"experts {rows} {bind_blocks(check, columns, 2) if packed else columns}"
    check.tensor(argument, weight, shape, torch.uint8 if packed else torch.float8_e4m3fn)
    dtypes: Any = {torch.float32}
    if weight_format == "fp8_channel":
        shape = f"experts {rows} 1"
    elif weight_format == "fp8_block":
        shape = f"experts {bind_blocks(check, rows, BLOCK_FP8)} {bind_blocks(check, columns, BLOCK_FP8)}"
    else:
        shape = f"experts {rows} {bind_blocks(check, columns, BLOCKS[weight_format])}"
        dtypes = {torch.float8_e4m3fn} if weight_format == "nvfp4" else E8M0
    check.tensor(f"{argument}_scale", scale, shape, dtypes)


def _check_input_scale(check: Checker, argument: str, scale: Any, plan: MoEPlan) -> None:
    static = plan.activation_dtype == "fp8_static"
    if (scale is not None) != static:
        wanted = "a tensor" if static else "None"
        check.fail(argument, f"{wanted}, because plan.activation_dtype is {plan.activation_dtype!r}", scale)
    check.tensor(argument, scale, "1", torch.float32)

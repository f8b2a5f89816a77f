"""RMSNorm of rows with an optional preceding residual add, fused with quantisation.

A program normalises `rmsnorm`'s tile of whole rows, rounds the result to x's dtype, and quantises it in registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import as_rows, has_rows, launch_options, may_overlap
from tokenspeed_kernel.triton.norm.rmsnorm import LONGEST_ROW, tile_for
from tokenspeed_kernel.triton.quantization._quantised_rows import (
    DECLARED,
    FP8_TRAITS,
    Form,
    as_bytes,
    fp8_form,
    fp8_with_scale_form,
    least_columns,
    mxfp8_form,
    nothing_to,
    nvfp4_form,
    rows_for,
    stored_for,
)
from tokenspeed_kernel.triton.quantization._rows import finish
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

_DECLARED = {**DECLARED, "tags": {"determinism", "batch_invariant"}}
_TRAITS: dict[str, Any] = {"hidden": at_most(LONGEST_ROW), "residual": any, "wide_residual": any}


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    form: Form,
    dtype: torch.dtype,
    given: Tensor | None,
    out: Tensor | None,
    scale_out: Tensor | None,
    residual_out: Tensor | None,
) -> tuple[Tensor, ...]:
    """Returns the quantised values, the scales if they are computed, and the sum with the residual if there is one.

    ``dtype``: dtype of the quantised values.
    """
    hidden = x.shape[-1]
    stored = stored_for(x, x.shape, form, dtype, out, scale_out)
    total = None
    if residual is not None:
        total = residual_out if residual_out is not None and has_rows(residual_out) else residual.new_empty(x.shape)
    if x.numel():
        tile = tile_for(hidden)
        block = max(tile.block, least_columns(form))
        rows_each = max(1, tile.rows * tile.block // block)
        source = as_rows(x)
        added, sums = (source, source) if residual is None or total is None else (as_rows(residual), as_rows(total))
        rows, early = rows_for(x, source.shape[0], form, rows_each), may_overlap(x.device)
        device_code.rmsnorm_quantize_kernel[(rows.programs * rows.matrices,)](
            source,
            added,
            weight,
            sums,
            as_bytes(stored.codes),
            as_bytes(stored.scales),
            given,
            rows.per_matrix,
            rows.programs,
            hidden,
            eps,
            source.stride(0),
            added.stride(0),
            weight.stride(0),
            sums.stride(0),
            HAS_RESIDUAL=residual is not None,
            ROWS=rows_each,
            BLOCK=block,
            FORM=form,
            EARLY=early,
            num_warps=tile.warps,
            **launch_options(early),
        )
    else:
        nothing_to(stored.scales)
    made = stored.finish(out, scale_out)
    return made if total is None else (*made, finish(total, residual_out))


@register_kernel(
    "norm",
    "rmsnorm_quantize_fp8",
    traits={**_TRAITS, **FP8_TRAITS},
    **_DECLARED,
)
def rmsnorm_quantize_fp8(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    granularity: str,
    block_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out: Tensor | None,
    scale_out: Tensor | None,
    residual_out: Tensor | None,
) -> tuple[Tensor, ...]:
    """See `tokenspeed_kernel.rmsnorm_quantize_fp8`."""
    form = fp8_form(x, granularity, block_size, dtype, scale_dtype)
    return _launch(x, weight, eps, residual, form, dtype, None, out, scale_out, residual_out)


@register_kernel("norm", "rmsnorm_quantize_fp8_with_scale", traits={**_TRAITS, "granularity": "tensor"}, **_DECLARED)
def rmsnorm_quantize_fp8_with_scale(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    eps: float,
    residual: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None,
    residual_out: Tensor | None,
) -> Tensor | tuple[Tensor, ...]:
    """See `tokenspeed_kernel.rmsnorm_quantize_fp8_with_scale`."""
    made = _launch(x, weight, eps, residual, fp8_with_scale_form(x, dtype), dtype, scale, out, None, residual_out)
    return made[0] if residual is None else made


@register_kernel(
    "norm", "rmsnorm_quantize_mxfp8", traits={**_TRAITS, "scales_rounded_up": any, "scales_in_tiles": any}, **_DECLARED
)
def rmsnorm_quantize_mxfp8(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    scale_rounding: str,
    scale_layout: str,
    out: Tensor | None,
    scale_out: Tensor | None,
    residual_out: Tensor | None,
) -> tuple[Tensor, ...]:
    """See `tokenspeed_kernel.rmsnorm_quantize_mxfp8`."""
    form = mxfp8_form(x, scale_rounding, scale_layout)
    return _launch(x, weight, eps, residual, form, torch.float8_e4m3fn, None, out, scale_out, residual_out)


@register_kernel("norm", "rmsnorm_quantize_nvfp4", traits={**_TRAITS, "scales_in_tiles": any}, **_DECLARED)
def rmsnorm_quantize_nvfp4(
    x: Tensor,
    weight: Tensor,
    global_scale: Tensor,
    eps: float,
    residual: Tensor | None,
    scale_layout: str,
    out: Tensor | None,
    scale_out: Tensor | None,
    residual_out: Tensor | None,
) -> tuple[Tensor, ...]:
    """See `tokenspeed_kernel.rmsnorm_quantize_nvfp4`."""
    form = nvfp4_form(x, scale_layout)
    return _launch(x, weight, eps, residual, form, torch.uint8, global_scale, out, scale_out, residual_out)

"""Prepares rows of activations for MMAs: rounds rows to narrow formats, or scales rows into float16's range."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")


def rounded(
    x: Tensor,
    activation_dtype: str,
    carrier: torch.dtype,
    row_count: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rounds x ``[rows, k]`` as `MoEPlan.activation_dtype` requires, and stores the result in dtype ``carrier``.

    Returns the rows, and their scales or None. ``row_count``: int32, one element, the number of valid rows of x.
    ``static_scale``: float32, the scale of all rows, for static activation scales.
    """
    if activation_dtype == "none":
        return x, None
    if activation_dtype in ("fp8", "fp8_static"):
        return _with_scales(x, "e4m3", carrier, row_count, static_scale)
    rows, columns = x.shape
    result = torch.empty(rows, columns, dtype=carrier, device=x.device)
    block = min(1024, next_power_of_2(columns))
    height = max(1, 2048 // block)
    grid = (cdiv(rows, height), cdiv(columns, block))
    device_code.round_rows_mxfp4_kernel[grid](x, *x.stride(), result, rows, columns, ROWS=height, BLOCK=block)
    return result, None


def fitted(x: Tensor, row_count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scales each row of x ``[rows, k]`` by a power of two into float16's range. Returns the float16 rows and their scales."""
    return _with_scales(x, "float16", torch.float16, row_count)


def _with_scales(
    x: Tensor, format: str, carrier: torch.dtype, row_count: Tensor | None, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    # Rounds rows to ``format`` with a float32 scale per row. Returns the rounded rows, divided by their scales, in dtype
    # ``carrier``, and the scales.
    #
    # ``row_count``: int32 on the device, the number of rows to round; None for all. ``given``: a static scale, or None for the
    # amax.
    rows, columns = x.shape
    result = torch.empty(rows, columns, dtype=carrier, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    device_code.round_rows_kernel[(rows,)](
        x,
        *x.stride(),
        result,
        scale,
        given,
        scale if row_count is None else row_count,
        columns,
        FORMAT=format,
        GIVEN=given is not None,
        COUNTED=row_count is not None,
        NATIVE=carrier == torch.float8_e4m3fn,
        BLOCK=min(4096, next_power_of_2(columns)),
    )
    return result, scale

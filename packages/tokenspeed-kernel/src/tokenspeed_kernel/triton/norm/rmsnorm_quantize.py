"""RMSNorm of rows, after an optional residual add, fused with quantisation.

A program normalises a tile of whole rows (the tile that `rmsnorm` chooses), rounds the result to x's dtype, and quantises it in
registers.
"""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.triton.common import as_rows, has_rows, launch_options, may_overlap
from tokenspeed_kernel.triton.norm.rmsnorm import LONGEST_ROW, tile_for
from tokenspeed_kernel.triton.quantization._quantised_rows import (
    DECLARED,
    KINDS,
    as_bytes,
    form_of,
    least_columns,
    nothing_to,
    rows_for,
    stored_for,
)
from tokenspeed_kernel.triton.quantization._rows import finish
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.lowering import from_list
from tokenspeed_kernel_base.ops.quantization.value import Quantization
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")


def rmsnorm_quantize(
    x: Tensor,
    weight: Tensor,
    quantization: Quantization,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    scale_out: Tensor | None,
    residual_out: Tensor | None,
) -> Tensor | tuple[Tensor, ...]:
    """Implements the operator `tokenspeed_kernel.rmsnorm_quantize`, which documents the arguments."""
    hidden, form = x.shape[-1], form_of(x, quantization)
    stored = stored_for(x, x.shape, form, quantization.dtype, out, scale_out)
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
            quantization.scale,
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
    result: Tensor | tuple[Tensor, ...] = from_list(made if total is None else (*made, finish(total, residual_out)))
    return result


for _kind, _traits in KINDS.items():
    register_kernel(
        "norm",
        "rmsnorm_quantize",
        name=f"triton_rmsnorm_quantize_{_kind}",
        traits={"quantization": _kind, **_traits, "hidden": at_most(LONGEST_ROW), "residual": any, "wide_residual": any},
        tags={"determinism", "batch_invariant"},
        **DECLARED,
    )(rmsnorm_quantize)

"""Root-mean-square normalisation of rows with a gate: one program a tile of rows, each of which is read once."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, dense, launch_options, may_overlap
from tokenspeed_kernel.triton.norm.rmsnorm import tile_for
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

# Two rows are held, the gate's beside x's: half of what `rmsnorm` keeps in registers.
_LONGEST_ROW = 16384


def _as_heads(x: Tensor) -> Tensor:
    """``[..., hidden]`` as ``[tokens, heads, hidden]``, so that heads of a slice are a view."""
    heads = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    return heads if heads.stride(2) == 1 else heads.contiguous()


@register_kernel(
    "norm",
    "rmsnorm_gated",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"hidden": at_most(_LONGEST_ROW), "activation": {"silu", "sigmoid"}, "gate_first": any},
    priority=Priority.PORTABLE,
    tags={"determinism", "batch_invariant"},
)
def rmsnorm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    activation: str = "silu",
    norm_before_gate: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """See `tokenspeed_kernel.rmsnorm_gated`."""
    result = out if out is not None and out.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        source, gates = _as_heads(x), _as_heads(gate)
        tokens, heads, hidden = source.shape
        tile = tile_for(hidden)
        early = may_overlap(x.device)
        device_code.rmsnorm_gated_kernel[(-(-tokens * heads // tile.rows),)](
            source,
            gates,
            dense(weight),
            result,
            tokens * heads,
            heads,
            hidden,
            eps,
            *source.stride()[:2],
            *gates.stride()[:2],
            SILU=activation == "silu",
            GATE_FIRST=not norm_before_gate,
            ROWS=tile.rows,
            BLOCK=tile.block,
            EARLY=early,
            num_warps=max(tile.warps, tile.rows * tile.block // 1024),
            **launch_options(early),
        )
    if out is not None and out is not result:
        return out.copy_(result)
    return result

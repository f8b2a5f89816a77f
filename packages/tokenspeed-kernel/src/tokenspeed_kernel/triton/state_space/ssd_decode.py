"""The state-space recurrence for decode. A program updates a range of rows of a head's state, token after token."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv, dense, next_power_of_2
from tokenspeed_kernel.triton.state_space._recurrence import FORMATS, TRAITS, shape_of
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")

# State elements per program: 16 per thread, which is four 16-byte loads in flight for float32 states.
_ELEMENTS, _WARPS = 2048, 4


@register_kernel(
    "state_space",
    "ssd_decode",
    solution="triton",
    capability=TRITON,
    signatures=FORMATS,
    traits={**TRAITS, "output_slots": any},
    priority=Priority.PORTABLE,
    tags={"determinism", "batch_invariant"},
)
def ssd_decode(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    state_slots: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    output_slots: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.ssd_decode`, which documents the arguments."""
    batch, tokens, heads, head_dim = x.shape
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    columns = next_power_of_2(B.shape[-1])
    rows = min(next_power_of_2(head_dim), max(1, _ELEMENTS // columns))
    device_code.ssd_decode_kernel[(batch, heads * cdiv(head_dim, rows))](
        x,
        dt,
        dense(A),
        B,
        C,
        states,
        state_slots,
        dense(D),
        z,
        dense(dt_bias),
        output_slots,
        out,
        tokens,
        float(dt_min),
        float(dt_max),
        *x.stride(),
        *dt.stride(),
        *B.stride(),
        *C.stride(),
        *states.stride(),
        state_slots.stride(0),
        *((0, 0, 0, 0) if z is None else z.stride()),
        *((0, 0) if output_slots is None else output_slots.stride()),
        *out.stride(),
        SHAPE=shape_of(x, B, dt_softplus),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=_WARPS,
    )
    return out

"""Layer normalisation of rows, after an optional residual add. Unlike RMSNorm, layer normalisation subtracts the mean and adds a
bias."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON
from tokenspeed_kernel.triton.norm.rmsnorm import launch_rows
from tokenspeed_kernel.triton.repeated import Repeated
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")
_launches = Repeated(lambda: device_code.layernorm_kernel)


@register_kernel(
    "norm",
    "layernorm",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"residual": any, "wide_residual": any},
    priority=Priority.PORTABLE,
    tags={"determinism", "batch_invariant"},
)
def layernorm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.layernorm`, which documents the arguments."""
    return launch_rows(
        _launches,
        x,
        weight,
        eps,
        residual,
        out,
        residual_out,
        x if bias is None else bias,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
    )

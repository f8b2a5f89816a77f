"""Deprecated names of quantising operators. Earlier releases had one operator for each format. Now `Quantization` selects the
format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenspeed_kernel_base.deprecation import deprecated_operator
from tokenspeed_kernel_base.ops.activation.swiglu_quantize import swiglu_quantize
from tokenspeed_kernel_base.ops.comm.all_reduce_rmsnorm_quantize import all_reduce_rmsnorm_quantize
from tokenspeed_kernel_base.ops.norm.rmsnorm_quantize import rmsnorm_quantize
from tokenspeed_kernel_base.ops.quantization.value import KINDS, WITH_SCALE, Quantization

_PLAIN: dict[str, Any] = {"alpha": 1.0, "limit": None, "beta": 0.0, "interleaved": False}

ALIASES: dict[str, tuple[str, str]] = {
    f"{first}_quantize_{kind}": (f"{'swiglu' if first == 'silu_and_mul' else first}_quantize", kind)
    for first, kinds in {
        "silu_and_mul": KINDS,
        "swiglu": KINDS,
        "rmsnorm": KINDS,
        "all_reduce_rmsnorm": ("fp8",),
    }.items()
    for kind in kinds
}
"""Deprecated name -> the replacing operator and the kind of quantisation."""


def alias(name: str) -> Callable[..., Any]:
    """Returns the function of a deprecated name. The function calls the replacing operator."""
    operator, kind = ALIASES[name]
    function = {op.operator.mode: op for op in (swiglu_quantize, rmsnorm_quantize, all_reduce_rmsnorm_quantize)}[operator]
    fixed = _PLAIN if name.startswith("silu_and_mul") else {}
    without = (*["scale_out"] * (kind == WITH_SCALE), *["scale_dtype"] * name.startswith("all_reduce"))
    return deprecated_operator(name, function, "quantization", getattr(Quantization, kind), without=without, fixed=fixed)

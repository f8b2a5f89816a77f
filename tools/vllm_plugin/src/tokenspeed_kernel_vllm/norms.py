"""The core's RMS norms as a provider of vLLM's IR. vLLM uses the provider if the option ``--ir-op-priority`` names it, for each
call that ``supports_args`` accepts; other providers run the other calls.

Importing this module registers the provider, which has no effect by itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor
from vllm import ir

from tokenspeed_kernel_vllm.settings import CORE, core_is_there

PROVIDER = "tokenspeed_kernel"
_INSTALLED = core_is_there()


def _served(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    """Returns whether our kernel supports the call: it normalises the whole row, and multiplies by a weight of x's dtype."""
    return weight is not None and weight.dtype == x.dtype and variance_size is None and x.stride(-1) == 1


def _serves_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _served(x, weight, variance_size)


def _serves_fused(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _served(x, weight, variance_size) and x_residual.dtype == x.dtype and x_residual.stride(-1) == 1


def _rmsnorm(*args: Any, **options: Any) -> Any:
    return import_module(CORE).rmsnorm(*args, **options)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Normalises each row and multiplies it by the weight.

    Args:
        x: ``[..., hidden]``.
        weight: ``[hidden]`` of x's dtype.
        epsilon: added to the mean of squares.
        variance_size: must be None.

    Returns:
        The result, with shape and dtype of x.
    """
    out: Tensor = _rmsnorm(x, weight, epsilon)
    return out


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Adds the residual to x. Returns the normalised sum, and the sum. See `rms_norm`."""
    out, total = _rmsnorm(x, weight, epsilon, residual=x_residual)
    return out, total


ir.ops.rms_norm.register_impl(PROVIDER, supported=_INSTALLED, supports_args=_serves_norm)(rms_norm)
ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supported=_INSTALLED, supports_args=_serves_fused)(fused_add_rms_norm)

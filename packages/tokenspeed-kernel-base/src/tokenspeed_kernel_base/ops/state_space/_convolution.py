"""Code that the causal convolutions of prefill and decode share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.traits import TraitKind

ACTIVATIONS = ("silu", None)
WIDTHS = (2, 3, 4)


def convolve(taps: Sequence[Tensor], weight: Tensor, bias: Tensor | None, activation: str | None, dtype: torch.dtype) -> Tensor:
    """Returns ``activation(bias + sum over i of taps[i] * weight[:, i])``, computed in float32 (float64 for float64 inputs),
    rounded to dtype once.

    Args:
        taps: ``[..., channels]`` each, the oldest inputs first.
        weight: ``[channels, width]``.
        bias: ``[channels]``.
        activation: ``"silu"`` or None.
        dtype: the dtype of the result.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    products = [tap.to(wide) * weight[:, i].to(wide) for i, tap in enumerate(taps)]
    total = reduce(torch.add, products if bias is None else [bias.to(wide), *products])
    return (torch.nn.functional.silu(total) if activation == "silu" else total).to(dtype).contiguous()


def check_convolution(
    check: Checker, x: Tensor, shape: str, weight: Tensor, states: Tensor, bias: Tensor | None, activation: str | None
) -> None:
    """Checks all arguments except slots. ``shape`` names the axes of x, channels last."""
    check.tensor("x", x, shape, FLOATS)
    check.tensor("weight", weight, "channels width", FLOATS)
    check.require(check["width"] in WIDTHS, "weight", "of shape [channels, width] with width 2, 3 or 4", str(list(weight.shape)))
    check.bind("width-1", check["width"] - 1, "weight")
    check.tensor("states", states, "slots width-1 channels", {x.dtype, torch.float32})
    check.tensor("bias", bias, "channels", FLOATS)
    check.one_of("activation", activation, ACTIVATIONS)


CONVOLUTION_KINDS: dict[str, TraitKind] = {"channels": int, "width": int, "bias": bool, "silu": bool}


def convolution_traits(weight: Tensor, bias: Tensor | None, activation: str | None) -> dict[str, object]:
    return {"channels": weight.shape[0], "width": weight.shape[1], "bias": bias is not None, "silu": activation == "silu"}

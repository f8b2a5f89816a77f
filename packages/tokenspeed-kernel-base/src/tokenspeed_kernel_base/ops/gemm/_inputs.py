"""Random operands of matrix products in each format, for cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw, recipe
from tokenspeed_kernel_base.checks import FLOATS
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8, BLOCK_MX, encode_fp8
from tokenspeed_kernel_base.ops.quantization.formats import blocks

Make = Callable[[Draw], dict[str, Any]]


@recipe
def dense(m: int, k: int, n: int, *, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.bfloat16, **options: Any) -> Make:
    """Activations of unit variance, and weights stored ``[n, k]`` as in models, passed transposed."""

    def make(draw: Draw) -> dict[str, Any]:
        a = draw.normal(*batch, m, k, dtype=dtype)
        return {"a": a, "b": _weight(draw, batch, k, n).to(dtype).mT, **_drawn(draw, n, options)}

    return make


@recipe
def fp8(
    m: int,
    k: int,
    n: int,
    *,
    a_scale: str,
    b_scale: str,
    batch: tuple[int, ...] = (),
    a_dtype: torch.dtype = torch.float8_e4m3fn,
    b_dtype: torch.dtype = torch.float8_e4m3fn,
    **options: Any,
) -> Make:
    """a_scale: tensor, token or block; b_scale: tensor, channel or block; a dense a_dtype makes it weight-only."""
    a_shapes = {"tensor": (1,), "token": (*batch, m, 1), "block": (*batch, m, blocks(k, BLOCK_FP8))}
    # As stored beside a weight [n, k]; what has two axes is passed transposed.
    b_shapes = {
        "tensor": (1,),
        "channel": (*batch, n, 1),
        "block": (*batch, blocks(n, BLOCK_FP8), blocks(k, BLOCK_FP8)),
    }
    unit = 100.0 * math.sqrt(max(k, 1))

    def make(draw: Draw) -> dict[str, Any]:
        a = draw.normal(*batch, m, k)
        scale = draw.uniform(*b_shapes[b_scale], low=0.5, high=2.0) / unit
        arguments = {
            "a": a.to(a_dtype) if a_dtype in FLOATS else encode_fp8(100.0 * a, a_dtype),
            "b": encode_fp8(unit * _weight(draw, batch, k, n), b_dtype).mT,
            "b_scale": scale if b_scale == "tensor" else scale.mT,
            **_drawn(draw, n, options),
        }
        if a_scale:
            arguments["a_scale"] = draw.uniform(*a_shapes[a_scale], low=0.005, high=0.02)
        return arguments

    return make


@recipe
def mx(m: int, k: int, n: int, *, a: str, b: str, batch: tuple[int, ...] = (), **options: Any) -> Make:
    """Formats mxfp8 and mxfp4; "dense" makes a bfloat16."""

    def operand(draw: Draw, fmt: str, rows: int) -> tuple[Tensor, Tensor]:
        scale = draw.integers(120, 128, *batch, rows, k // BLOCK_MX, dtype=torch.uint8)
        if fmt == "mxfp4":
            return draw.integers(0, 256, *batch, rows, k // 2, dtype=torch.uint8), scale
        return encode_fp8(draw.normal(*batch, rows, k, scale=3.0)), scale

    def make(draw: Draw) -> dict[str, Any]:
        weight, weight_scale = operand(draw, b, n)
        arguments = {"b": weight.mT, "b_scale": weight_scale.mT, **_drawn(draw, n, options)}
        if a == "dense":
            return {"a": draw.normal(*batch, m, k, dtype=torch.bfloat16), **arguments}
        values, scale = operand(draw, a, m)
        return {"a": values, "a_scale": scale, **arguments}

    return make


def _weight(draw: Draw, batch: tuple[int, ...], k: int, n: int) -> Tensor:
    return draw.normal(*batch, n, k, scale=1 / math.sqrt(max(k, 1)))


def _drawn(draw: Draw, n: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with a bias drawn in the dtype that is given for it."""
    if "bias" in options:
        return {**options, "bias": draw.normal(n, dtype=options["bias"])}
    return options

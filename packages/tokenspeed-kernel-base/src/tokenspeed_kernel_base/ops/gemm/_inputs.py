"""Draws random GEMM operands in each format, for cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw, recipe
from tokenspeed_kernel_base.checks import FLOATS
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8, BLOCK_MX, BLOCK_NVFP4, encode_fp8, pack_e8m0, swizzle
from tokenspeed_kernel_base.ops.quantization.formats import blocks

Make = Callable[[Draw], dict[str, Any]]


@recipe
def dense(m: int, k: int, n: int, *, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.bfloat16, **options: Any) -> Make:
    """Draws activations of unit variance, and weights that are stored ``[n, k]`` as in models and passed transposed."""

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
    block: int = BLOCK_FP8,
    scales: str = "float32",
    **options: Any,
) -> Make:
    """Draws fp8 operands. With a dense ``a_dtype`` only b is fp8 (weight-only quantisation).

    ``a_scale``: tensor, token or block. ``b_scale``: tensor, channel, block or block1d. ``scales``, for block scales: float32,
    e8m0 or packed."""
    along = blocks(k, block) if scales != "packed" else blocks(blocks(k, block), 4)
    a_shapes = {"tensor": (1,), "token": (*batch, m, 1), "block": (*batch, m, along)}
    # The shapes of scales as stored with a weight [n, k]. Scales with two axes are passed transposed.
    b_shapes = {
        "tensor": (1,),
        "channel": (*batch, n, 1),
        "block": (*batch, blocks(n, block), along),
        "block1d": (*batch, n, along),
    }
    unit = 100.0 * math.sqrt(max(k, 1))

    def make(draw: Draw) -> dict[str, Any]:
        a = draw.normal(*batch, m, k)
        scale = _scales(draw, scales, b_shapes[b_scale], 1 / unit)
        arguments = {
            "a": a.to(a_dtype) if a_dtype in FLOATS else encode_fp8(100.0 * a, a_dtype),
            "b": encode_fp8(unit * _weight(draw, batch, k, n), b_dtype).mT,
            "b_scale": scale if b_scale == "tensor" else scale.mT,
            **_drawn(draw, n, options),
        }
        if a_scale:
            arguments["a_scale"] = _scales(draw, scales, a_shapes[a_scale], 0.01)
        return arguments

    return make


@recipe
def micro(m: int, k: int, n: int, *, a: str, b: str, batch: tuple[int, ...] = (), layout: str = "linear", **options: Any) -> Make:
    """Draws operands in the formats mxfp8, mxfp4 and nvfp4, with scales in ``layout``; with ``a="dense"`` a is bfloat16."""

    def operand(draw: Draw, fmt: str, rows: int) -> tuple[Tensor, Tensor]:
        if fmt == "nvfp4":
            scale = draw.uniform(*batch, rows, k // BLOCK_NVFP4, low=0.25, high=4.0).to(torch.float8_e4m3fn)
        else:
            scale = draw.integers(120, 128, *batch, rows, k // BLOCK_MX, dtype=torch.uint8)
        if fmt == "mxfp8":
            return encode_fp8(draw.normal(*batch, rows, k, scale=3.0)), scale
        return draw.integers(0, 256, *batch, rows, k // 2, dtype=torch.uint8), scale

    def make(draw: Draw) -> dict[str, Any]:
        weight, weight_scale = operand(draw, b, n)
        arguments = {"b": weight.mT, **_drawn(draw, n, options)}
        arguments["b_scale"] = swizzle(weight_scale) if layout == "128x4" else weight_scale.mT
        if "nvfp4" in (a, b):
            arguments["alpha"] = draw.tensor([0.0123], torch.float32)
        if a == "dense":
            return {"a": draw.normal(*batch, m, k, dtype=torch.bfloat16), **arguments}
        values, scale = operand(draw, a, m)
        return {"a": values, "a_scale": swizzle(scale) if layout == "128x4" else scale, **arguments}

    return make


def _scales(draw: Draw, kind: str, shape: tuple[int, ...], about: float) -> Tensor:
    """Draws positive scales near ``about``; scales in an e8m0 format are powers of two."""
    if kind == "float32":
        return draw.uniform(*shape, low=0.5, high=2.0) * about
    exponent = 127 + round(math.log2(about))
    if kind == "e8m0":
        return draw.integers(exponent - 1, exponent + 2, *shape, dtype=torch.uint8)
    return pack_e8m0(draw.integers(exponent - 1, exponent + 2, *shape[:-1], 4 * shape[-1], dtype=torch.uint8))


def _weight(draw: Draw, batch: tuple[int, ...], k: int, n: int) -> Tensor:
    return draw.normal(*batch, n, k, scale=1 / math.sqrt(max(k, 1)))


def _drawn(draw: Draw, n: int, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options. If ``bias`` is given as a dtype, replaces it by a drawn bias of that dtype."""
    if "bias" in options:
        return {**options, "bias": draw.normal(n, dtype=options["bias"])}
    return options

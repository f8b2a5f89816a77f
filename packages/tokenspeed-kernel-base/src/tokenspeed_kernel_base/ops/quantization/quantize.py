"""Quantisation to the format that a `Quantization` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import Operator, operator
from tokenspeed_kernel_base.ops.quantization.fp8 import GRANULARITIES, STATIC_GRANULARITIES, quantize_fp8, quantize_fp8_with_scale
from tokenspeed_kernel_base.ops.quantization.mx import quantize_mxfp8
from tokenspeed_kernel_base.ops.quantization.nvfp4 import quantize_nvfp4
from tokenspeed_kernel_base.ops.quantization.value import KINDS, WITH_SCALE, Quantization, check_quantization, kind_of, options_of
from tokenspeed_kernel_base.traits import TraitKind
from tokenspeed_kernel_base.variation import Variation, Want

_QUANTIZERS: dict[str, Operator[Any, Any]] = {
    "fp8": quantize_fp8.operator,
    WITH_SCALE: quantize_fp8_with_scale.operator,
    "mxfp8": quantize_mxfp8.operator,
    "nvfp4": quantize_nvfp4.operator,
}
_TRAITS: dict[str, TraitKind] = {name: kind for each in _QUANTIZERS.values() for name, kind in each.traits.items()}
_TRAITS |= {"quantization": KINDS, "granularity": tuple(dict.fromkeys((*GRANULARITIES, *STATIC_GRANULARITIES)))}
_FLAGS = {name: False for name, kind in _TRAITS.items() if kind is bool}


@operator(
    "quantization",
    "quantize",
    formats=("x",),
    traits=_TRAITS,
    outs=("out", "scale_out"),
    exact=True,
    varying=("rows", "m"),
    parts=(quantize_mxfp8, quantize_nvfp4, quantize_fp8_with_scale, quantize_fp8),
)
def quantize(
    x: Tensor, quantization: Quantization, out: Tensor | None = None, scale_out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Quantises x to the format that ``quantization`` names.

    The format's operator does the work: `quantize_fp8`, `quantize_fp8_with_scale`, `quantize_mxfp8` or `quantize_nvfp4`. The
    docstring of that operator has the formula, the rounding and the reference.

    Args:
        x: float16, bfloat16 or float32 ``[..., k]``.
        quantization: the format, its scales and their layout; made by `Quantization.fp8` or another constructor of `Quantization`.
        out: receives q.
        scale_out: receives the scales; must be None if ``quantization`` has an fp8 scale.

    Returns:
        q and scale, with the dtypes and shapes of the format's operator; q alone if ``quantization`` has an fp8 scale.

    Raises:
        TypeError, ValueError: an argument violates a requirement above, or a requirement of the format's operator. Raised before
            anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import Quantization, quantize
        >>> q, scale = quantize(torch.full((1, 32), 3.0), Quantization.mxfp8())
        >>> q[0, 0].item(), scale.item()  # 384 * 2^(120 - 127)
        (384.0, 120)
        >>> quantize(torch.tensor([1.0, 1e6]), Quantization.fp8_with_scale(torch.tensor(0.5))).float()
        tensor([  2., 448.])

    Safe in CUDA graphs.
    """
    made: Tensor | tuple[Tensor, Tensor]
    if quantization.format == "mxfp8":
        made = quantize_mxfp8(x, quantization.scale_rounding, quantization.scale_layout, out=out, scale_out=scale_out)
    elif quantization.format == "nvfp4":
        assert quantization.scale is not None
        made = quantize_nvfp4(x, quantization.scale, quantization.scale_layout, out=out, scale_out=scale_out)
    elif quantization.scale is not None:
        made = quantize_fp8_with_scale(x, quantization.scale, quantization.dtype, out=out)
    else:
        made = quantize_fp8(
            x,
            quantization.granularity,
            quantization.block_size,
            quantization.dtype,
            quantization.scale_dtype,
            out=out,
            scale_out=scale_out,
        )
    return made


def _run_hook(hook: str, x: Tensor, quantization: Quantization, *leading: Any) -> Any:
    """Runs a hook of the operator that quantises to the format."""
    return _QUANTIZERS[kind_of(quantization)].run_hook(hook, {"x": x, **options_of(quantization)}, *leading)


@quantize.traits
def _(x: Tensor, quantization: Quantization) -> dict[str, object]:
    return {**_FLAGS, "quantization": kind_of(quantization), **_run_hook("traits", x, quantization)}


@quantize.check
def _(check: Checker, x: Tensor, quantization: Quantization) -> None:
    attributes = (*Quantization.__dataclass_fields__, "global_scale")
    with check.naming({name: f"quantization.{name.removeprefix('global_')}" for name in attributes}):
        check_quantization(check, quantization)
        _run_hook("check", x, quantization, check)


@quantize.fake
def _(x: Tensor, quantization: Quantization) -> Any:
    return _run_hook("fake", x, quantization)


@quantize.outputs
def _(quantization: Quantization) -> tuple[str, ...]:
    return ("out",) if kind_of(quantization) == WITH_SCALE else ("out", "scale_out")


@quantize.cost
def _(x: Tensor, quantization: Quantization) -> Cost:
    made: Cost = _run_hook("cost", x, quantization)
    return made


def vary_quantization(variation: Variation, quantization: Quantization) -> dict[str, Any]:
    """The ``vary`` hook of operators that quantise: draws the scale of the `Quantization` for a captured call."""
    scale = quantization.scale
    if variation.want is not Want.CAPTURED:
        return {}
    drawn = None if scale is None else variation.draw.uniform(*scale.shape, low=0.005, high=0.05, dtype=scale.dtype)
    attributes = {name: getattr(quantization, name) for name in Quantization.__dataclass_fields__}
    return {"quantization": Quantization(**{**attributes, "scale": drawn})}


quantize.vary(vary_quantization)


def draw_quantization(
    draw: Draw,
    kind: str,
    scale_shape: tuple[int, ...] = (1,),
    high: float = 0.05,
    global_scale: float = 0.002,
    to: torch.dtype | None = None,
    **options: Any,
) -> Quantization:
    """Draws a `Quantization` for a case.

    Args:
        draw: random numbers.
        kind: one of `KINDS`.
        scale_shape, high: the shape of given scales, and their largest value; the smallest is 0.005.
        global_scale: the global scale of nvfp4.
        to: the dtype of quantised values; None for float8_e4m3fn.
        options: further arguments of the kind's constructor.
    """
    if to is not None:
        options["dtype"] = to
    if kind == WITH_SCALE:
        options["scale"] = draw.uniform(*scale_shape, low=0.005, high=high)
    if kind == "nvfp4":
        options["global_scale"] = draw.tensor([global_scale], torch.float32)
    made: Quantization = getattr(Quantization, kind)(**options)
    return made


@recipe
def _inputs(kind: str, *shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        x = draw.normal(*shape, dtype=dtype, scale=4.0)
        return {"x": x, "quantization": draw_quantization(draw, kind, high=0.1, **options)}

    return make


@quantize.cases
def _() -> list[Case]:
    packed: dict[str, Any] = {"granularity": "block", "block_size": 32, "scale_dtype": torch.int32}
    return [
        Case("fp8: per token, float32", _inputs("fp8", 3, 33, dtype=torch.float32)),
        Case("fp8: tiles of 128 x 128", _inputs("fp8", 2, 140, 130, granularity="block2d")),
        Case("fp8: blocks of 32, packed e8m0", _inputs("fp8", 5, 200, **packed)),
        Case("fp8: no rows", _inputs("fp8", 0, 64)),
        Case("fp8_with_scale: scale [1], float16", _inputs("fp8_with_scale", 5, 96, dtype=torch.float16)),
        Case("mxfp8: scales rounded up", _inputs("mxfp8", 2, 3, 96, scale_rounding="up")),
        Case("nvfp4: scales in tiles", _inputs("nvfp4", 130, 48, scale_layout="128x4")),
        Case("fp8: llama-70b prefill 8192, per token", _inputs("fp8", 8192, 8192), large=True),
        Case("mxfp8: gpt-oss-120b prefill 16384", _inputs("mxfp8", 16384, 2880), large=True),
        Case("nvfp4: llama-70b prefill 8192", _inputs("nvfp4", 8192, 8192), large=True),
    ]

"""The format, scales and layout that a call quantises to, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.checks import FP8, Checker
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, BLOCK_NVFP4
from tokenspeed_kernel_base.ops.quantization.fp8 import check_scaling
from tokenspeed_kernel_base.ops.quantization.mx import SCALE_ROUNDINGS
from tokenspeed_kernel_base.signature import SCALE_LAYOUTS

FORMATS = ("fp8", "mxfp8", "nvfp4")

WITH_SCALE = "fp8_with_scale"
KINDS = ("fp8", WITH_SCALE, "mxfp8", "nvfp4")
"""Values of the trait ``quantization``: the format, and whether an fp8 scale is given."""


@dataclass(frozen=True, eq=False)
class Quantization:
    """The format, scales and layout to which `quantize`, `rmsnorm_quantize`, `swiglu_quantize` and `all_reduce_rmsnorm_quantize`
    quantise.

    Make a `Quantization` with `fp8`, `fp8_with_scale`, `mxfp8` or `nvfp4`, once per layer, because constructing it costs host time.
    Operators accept any object with these attributes.

    Attributes:
        format: ``"fp8"``, ``"mxfp8"`` or ``"nvfp4"``.
        granularity: the elements that share a scale: ``"tensor"``, ``"token"``, ``"block"`` or ``"block2d"``. ``"given"`` if an fp8
            scale is given: its shape determines the group.
        block_size: elements of a block along an axis, >= 1. Only ``"block"`` and ``"block2d"`` use it.
        dtype: dtype of the elements: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz; uint8 for nvfp4, two e2m1 values per byte.
        scale_dtype: float32; uint8 (e8m0) or int32 (four e8m0 packed) for fp8 in blocks; uint8 for mxfp8; float8_e4m3fn for nvfp4.
        scale_rounding: ``"nearest"``; for e8m0 scales ``"down"`` or ``"up"``.
        scale_layout: ``"linear"``; or ``"128x4"`` for scales of mxfp8 and nvfp4 in tiles, as `swizzle_scales` makes them.
        scale: float32; the given scale of fp8, or the global scale of nvfp4. None otherwise. Operators never write to it.

    Raises:
        ValueError, TypeError: the combination of attributes is invalid; the message names the wrong attribute.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import Quantization, quantize
        >>> q, scale = quantize(torch.tensor([[896.0, -2.0]]), Quantization.fp8())
        >>> q.float(), scale
        (tensor([[448.,  -1.]]), tensor([[2.]]))
    """

    format: str
    granularity: str
    block_size: int
    dtype: torch.dtype
    scale_dtype: torch.dtype
    scale_rounding: str
    scale_layout: str
    scale: Tensor | None

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # the operator checks the fields again
            check_quantization(Checker("Quantization"), self)

    @classmethod
    def fp8(
        cls,
        granularity: str = "token",
        block_size: int = 128,
        dtype: torch.dtype = torch.float8_e4m3fn,
        scale_dtype: torch.dtype = torch.float32,
    ) -> Quantization:
        """Returns a quantisation to 8-bit floats. Each scale is computed from the amax of the elements that share it. See
        `quantize_fp8`."""
        rounding = "nearest" if scale_dtype == torch.float32 else "up"
        return cls("fp8", granularity, block_size, dtype, scale_dtype, rounding, "linear", None)

    @classmethod
    def fp8_with_scale(cls, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Quantization:
        """Returns a quantisation to 8-bit floats with given scales, float32 ``[]``, ``[1]``, ``[..., 1]`` or ``[k]``; see
        `quantize_fp8_with_scale`."""
        return cls("fp8", "given", 1, dtype, torch.float32, "nearest", "linear", scale)

    @classmethod
    def mxfp8(cls, scale_rounding: str = "down", scale_layout: str = "linear") -> Quantization:
        """Returns a quantisation to e4m3 elements in blocks of 32 with e8m0 scales; see `quantize_mxfp8`."""
        return cls("mxfp8", "block", BLOCK_MX, torch.float8_e4m3fn, torch.uint8, scale_rounding, scale_layout, None)

    @classmethod
    def nvfp4(cls, global_scale: Tensor, scale_layout: str = "linear") -> Quantization:
        """Returns a quantisation to e2m1 elements in blocks of 16 with e4m3 scales and a global scale, float32 ``[]`` or ``[1]``;
        see `quantize_nvfp4`."""
        return cls("nvfp4", "block", BLOCK_NVFP4, torch.uint8, torch.float8_e4m3fn, "nearest", scale_layout, global_scale)


def kind_of(quantization: Quantization) -> str:
    """Returns the member of `KINDS` that a quantisation belongs to. The operator ``quantize_<kind>`` implements it."""
    return WITH_SCALE if quantization.format == "fp8" and quantization.scale is not None else quantization.format


def options_of(quantization: Quantization) -> dict[str, Any]:
    """Returns the options that a quantisation passes to ``quantize_<kind>``, by name."""
    kind, scale = kind_of(quantization), quantization.scale
    if kind == WITH_SCALE:
        return {"scale": scale, "dtype": quantization.dtype}
    if kind == "nvfp4":
        return {"global_scale": scale, "scale_layout": quantization.scale_layout}
    names = ("scale_rounding", "scale_layout") if kind == "mxfp8" else ("granularity", "block_size", "dtype", "scale_dtype")
    return {name: getattr(quantization, name) for name in names}


# Allowed values of the other attributes, by kind. `check_scaling` checks the combinations of "fp8".
_ALLOWED: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {"scale_layout": ("linear",)},
    WITH_SCALE: {
        "granularity": ("given",),
        "dtype": tuple(sorted(FP8, key=str)),
        "scale_dtype": (torch.float32,),
        "scale_rounding": ("nearest",),
        "scale_layout": ("linear",),
    },
    "mxfp8": {
        "granularity": ("block",),
        "block_size": (BLOCK_MX,),
        "dtype": (torch.float8_e4m3fn,),
        "scale_dtype": (torch.uint8,),
        "scale_rounding": SCALE_ROUNDINGS,
        "scale_layout": SCALE_LAYOUTS,
    },
    "nvfp4": {
        "granularity": ("block",),
        "block_size": (BLOCK_NVFP4,),
        "dtype": (torch.uint8,),
        "scale_dtype": (torch.float8_e4m3fn,),
        "scale_rounding": ("nearest",),
        "scale_layout": SCALE_LAYOUTS,
    },
}


def check_quantization(check: Checker, quantization: Quantization) -> None:
    """Raises ValueError or TypeError for an invalid combination of attributes, independent of the quantised tensor."""
    check.one_of("format", quantization.format, FORMATS)
    kind, scale = kind_of(quantization), quantization.scale
    if scale is not None and not isinstance(scale, Tensor):
        check.fail("scale", "a tensor or None", f"{type(scale).__name__} {scale!r}", TypeError)
    if kind in (WITH_SCALE, "nvfp4"):
        check.require(scale is not None, "scale", "a tensor", scale)
    else:
        check.require(scale is None, "scale", f"None for {kind}", scale)
    if kind == "fp8":
        options = options_of(quantization)
        check_scaling(check, **options)
        check.one_of(
            "scale_rounding", quantization.scale_rounding, ("nearest" if options["scale_dtype"] == torch.float32 else "up",)
        )
    for attribute, allowed in _ALLOWED[kind].items():
        check.one_of(attribute, getattr(quantization, attribute), allowed)

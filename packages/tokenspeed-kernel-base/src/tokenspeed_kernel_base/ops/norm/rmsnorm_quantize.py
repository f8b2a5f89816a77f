"""RMSNorm with an optional residual add before it and quantisation after it, for a GEMM that reads a quantised format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Case, Draw, recipe
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.ops.quantization.composed import Quantised, traits_with_quantize
from tokenspeed_kernel_base.ops.quantization.quantize import draw_quantization, quantize
from tokenspeed_kernel_base.ops.quantization.value import Quantization


@operator(
    "norm",
    "rmsnorm_quantize",
    formats=("x",),
    traits=traits_with_quantize(rmsnorm),
    outs=("out", "scale_out", "residual_out"),
    in_place={"residual_out": ("x", "residual")},
    varying=("rows",),
    parts=(rmsnorm, quantize),
)
def rmsnorm_quantize(
    x: Tensor,
    weight: Tensor,
    quantization: Quantization,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Applies `rmsnorm`, then `quantize`: returns normalised rows in the format that ``quantization`` names.

    The normalised rows are rounded to x's dtype, and then quantised.

    Args:
        x: float16, bfloat16 or float32 ``[..., hidden]``; hidden a multiple of 32 for mxfp8, of 16 for nvfp4.
        weight: float16, bfloat16, float32 or float64 ``[hidden]``.
        quantization: the format, its scales and their layout; made by `Quantization.fp8` or another constructor of `Quantization`.
        eps: added to the mean square, > 0.
        residual: x's shape ``[..., hidden]`` and dtype, or float32 if x is float16 or bfloat16. Added to x before the
            normalisation.
        out: receives q.
        scale_out: receives the scales; must be None if ``quantization`` has an fp8 scale.
        residual_out: receives the sum; may be the residual or x. Allowed only with a residual.

    Returns:
        q and scale as `quantize` returns them, or q alone if ``quantization`` has an fp8 scale. With a residual also the sum,
        contiguous, in the residual's dtype.

    Raises:
        TypeError, ValueError: an argument violates a requirement above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import Quantization, rmsnorm_quantize
        >>> x, weight = torch.tensor([[3.0, 6.0]]), torch.ones(2)
        >>> q, scale = rmsnorm_quantize(x, weight, Quantization.fp8())
        >>> q.float()
        tensor([[224., 448.]])
        >>> rmsnorm_quantize(x, weight, Quantization.fp8_with_scale(torch.tensor(0.01))).float()
        tensor([[ 64., 128.]])

    Safe in CUDA graphs.
    """
    normed, *total = lowering.as_list(rmsnorm(x, weight, eps, residual=residual, residual_out=residual_out))
    quantised = quantize(normed, quantization, out=out, scale_out=scale_out)
    result: Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] = lowering.from_list(
        [*lowering.as_list(quantised), *total]
    )
    return result


for _hook in Quantised.hooks:
    getattr(rmsnorm_quantize, _hook)(getattr(Quantised(rmsnorm), _hook))


@recipe
def _inputs(
    kind: str,
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    residual: bool = True,
    residual_dtype: torch.dtype | None = None,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments. `draw_quantization` explains ``options``."""

    def make(draw: Draw) -> dict[str, Any]:
        return {
            "x": draw.normal(*shape, dtype=dtype),
            "weight": 1 + draw.normal(shape[-1], scale=0.1, dtype=dtype),
            "quantization": draw_quantization(draw, kind, high=0.02, **options),
            "residual": draw.normal(*shape, dtype=residual_dtype or dtype) if residual else None,
        }

    return make


def _case(kind: str, name: str, *shape: int, large: bool = False, **options: Any) -> Case:
    return Case(f"{kind}: {name}", _inputs(kind, *shape, **options), large)


_PACKED: dict[str, Any] = {"granularity": "block", "scale_dtype": torch.int32}
_TILES: dict[str, Any] = {"scale_layout": "128x4"}


@rmsnorm_quantize.cases
def _() -> list[Case]:
    return [
        _case("fp8", "per token, float32", 3, 33, dtype=torch.float32),
        _case("fp8", "blocks of 128, short last block, without residual", 3, 300, residual=False, granularity="block"),
        _case("fp8", "per tensor, e5m2", 2, 3, 40, granularity="tensor", dtype=torch.float16, to=torch.float8_e5m2),
        _case("fp8", "no rows", 0, 64),
        _case("fp8", "blocks of 32, float16", 5, 96, dtype=torch.float16, granularity="block", block_size=32),
        _case("fp8", "blocks of 128, e8m0, without residual", 3, 300, residual=False, granularity="block", scale_dtype=torch.uint8),
        _case("fp8", "float32 residual, blocks of 128", 3, 200, residual_dtype=torch.float32, granularity="block"),
        _case("fp8", "blocks of 32, packed e8m0", 2, 3, 200, block_size=32, **_PACKED),
        _case("fp8", "one block of 128, packed e8m0, e5m2", 9, 72, to=torch.float8_e5m2, **_PACKED),
        _case("fp8", "qwen3-8b decode 64, per token", 64, 4096, large=True),
        _case("fp8", "llama-3-70b decode 64, per token", 64, 8192, large=True),
        _case("fp8", "llama-3-8b prefill 8192, per token", 8192, 4096, large=True),
        _case("fp8", "deepseek-v3 decode 128, blocks of 128", 128, 7168, granularity="block", large=True),
        _case("fp8", "deepseek-v3 prefill 4096, blocks of 128", 4096, 7168, granularity="block", large=True),
        _case("fp8", "deepseek-v3.1 decode 128, blocks of 128, packed e8m0", 128, 7168, **_PACKED, large=True),
        _case("fp8", "deepseek-v3.1 prefill 4096, blocks of 128, packed e8m0", 4096, 7168, **_PACKED, large=True),
        _case("fp8_with_scale", "scale [], float32", 3, 33, dtype=torch.float32, scale_shape=()),
        _case("fp8_with_scale", "scale [1], without residual", 2, 3, 200, residual=False, scale_shape=(1,)),
        _case("fp8_with_scale", "scale per channel, float16", 3, 40, dtype=torch.float16, scale_shape=(40,)),
        _case("fp8_with_scale", "no rows", 0, 64, scale_shape=(1,)),
        _case("fp8_with_scale", "e5m2, float16", 5, 96, dtype=torch.float16, scale_shape=(1,), to=torch.float8_e5m2),
        _case("fp8_with_scale", "llama-3-70b decode 64", 64, 8192, scale_shape=(1,), large=True),
        _case("fp8_with_scale", "llama-3-70b prefill 8192", 8192, 8192, scale_shape=(1,), large=True),
        _case("mxfp8", "one block, float32", 1, 32, dtype=torch.float32),
        _case("mxfp8", "without residual, scales rounded up", 3, 96, residual=False, scale_rounding="up"),
        _case("mxfp8", "no rows", 0, 64),
        _case("mxfp8", "three axes, float16", 2, 3, 160, dtype=torch.float16),
        _case("mxfp8", "scales in tiles", 130, 96, **_TILES),
        _case(
            "mxfp8",
            "scales in tiles, two matrices, without residual, rounded up",
            2,
            3,
            160,
            residual=False,
            scale_rounding="up",
            **_TILES,
        ),
        _case("mxfp8", "qwen3-32b decode 64, scales in tiles", 64, 5120, **_TILES, large=True),
        _case("mxfp8", "qwen3-32b prefill 8192, scales in tiles", 8192, 5120, **_TILES, large=True),
        _case("mxfp8", "qwen3-32b decode 64", 64, 5120, large=True),
        _case("mxfp8", "qwen3-32b prefill 8192", 8192, 5120, large=True),
        _case("nvfp4", "one block, float32", 1, 16, dtype=torch.float32, global_scale=0.002),
        _case("nvfp4", "without residual", 3, 96, residual=False, global_scale=0.001),
        _case("nvfp4", "no rows", 0, 64, global_scale=0.001),
        _case("nvfp4", "three axes, float16", 2, 3, 160, dtype=torch.float16, global_scale=0.001),
        _case("nvfp4", "scales in tiles, two matrices", 2, 130, 48, global_scale=0.001, **_TILES),
        _case("nvfp4", "qwen3-235b decode 64, scales in tiles", 64, 4096, global_scale=0.001, **_TILES, large=True),
        _case("nvfp4", "qwen3-235b prefill 8192, scales in tiles", 8192, 4096, global_scale=0.001, **_TILES, large=True),
        _case("nvfp4", "qwen3-235b decode 64", 64, 4096, global_scale=0.001, large=True),
        _case("nvfp4", "qwen3-235b prefill 8192", 8192, 4096, global_scale=0.001, large=True),
    ]

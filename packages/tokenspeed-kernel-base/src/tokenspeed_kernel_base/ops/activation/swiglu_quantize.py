"""A gated activation and quantisation of its result, in front of the down projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Draw, recipe
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.activation.swiglu import swiglu
from tokenspeed_kernel_base.ops.quantization.composed import Quantised, traits_with_quantize
from tokenspeed_kernel_base.ops.quantization.quantize import draw_quantization, quantize
from tokenspeed_kernel_base.ops.quantization.value import Quantization


@operator(
    "activation",
    "swiglu_quantize",
    formats=("x",),
    traits=traits_with_quantize(swiglu),
    outs=("out", "scale_out"),
    varying=("rows",),
    parts=(quantize, swiglu),
)
def swiglu_quantize(
    x: Tensor,
    quantization: Quantization,
    alpha: float = 1.702,
    limit: float | None = None,
    beta: float = 1.0,
    interleaved: bool = False,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Applies `swiglu`, then `quantize`: returns a gated activation in the format that ``quantization`` names.

    The activation's result is rounded to x's dtype, and then quantised. The activation is `silu_and_mul` if ``alpha=1``,
    ``beta=0``, there is no limit, and gate and up are two contiguous halves.

    Args:
        x: float16, bfloat16 or float32 ``[..., 2 * d]``: gate and up, see ``interleaved``; d a multiple of 32 for mxfp8, of 16 for
            nvfp4.
        quantization: the format, its scales and their layout; made by `Quantization.fp8` or another constructor of `Quantization`.
            A given fp8 scale has one of the shapes ``[]``, ``[1]``, ``[..., 1]`` and ``[d]``.
        alpha: slope of the sigmoid, finite.
        limit: bound of the clamp, > 0; None clamps nothing.
        beta: added to the clamped up, finite.
        interleaved: how gate and up share the last axis: in halves, or gate at the even indices and up at the odd ones.
        out: receives q; must not overlap x.
        scale_out: receives the scales; must be None if ``quantization`` has an fp8 scale.

    Returns:
        q and scale as `quantize` returns them for a ``[..., d]`` input; q alone if ``quantization`` has an fp8 scale.

    Raises:
        TypeError, ValueError: an argument violates a requirement above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import Quantization, swiglu_quantize
        >>> q, scale = swiglu_quantize(torch.full((1, 64), 8.0), Quantization.mxfp8())
        >>> q[0, 0].item(), scale.item()  # 288 * 2^(125 - 127)
        (288.0, 125)
        >>> gate_and_up, scale = torch.tensor([[0.0, 2.0, 5.0, 3.0]]), torch.tensor(0.1)
        >>> swiglu_quantize(gate_and_up, Quantization.fp8_with_scale(scale), alpha=1.0, beta=0.0).float()  # silu_and_mul
        tensor([[ 0., 52.]])

    Safe in CUDA graphs.
    """
    return quantize(swiglu(x, alpha, limit, beta, interleaved), quantization, out=out, scale_out=scale_out)


for _hook in Quantised.hooks:
    getattr(swiglu_quantize, _hook)(getattr(Quantised(swiglu, gated=True), _hook))


@recipe
def _inputs(kind: str, *shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    """Draws x and a quantisation. ``options`` are options of the activation and of `draw_quantization`."""
    own: dict[str, Any] = {name: options.pop(name) for name in ("alpha", "limit", "beta", "interleaved") if name in options}

    def make(draw: Draw) -> dict[str, Any]:
        x = draw.normal(*shape, dtype=dtype, scale=4.0)  # a standard deviation of 4 makes the clamp at 7 matter
        return {"x": x, "quantization": draw_quantization(draw, kind, **options), **own}

    return make


def _case(kind: str, name: str, *shape: int, large: bool = False, **options: Any) -> Case:
    return Case(f"{kind}: {name}", _inputs(kind, *shape, **options), large)


def _silu(kind: str, name: str, *shape: int, large: bool = False, **options: Any) -> Case:
    """Returns a case whose activation is that of `silu_and_mul`."""
    return Case(f"silu_and_mul, {kind}: {name}", _inputs(kind, *shape, alpha=1.0, beta=0.0, **options), large)


_PACKED: dict[str, Any] = {"granularity": "block", "scale_dtype": torch.int32}
_TILES: dict[str, Any] = {"scale_layout": "128x4"}
# The options of GPT-OSS's activation.
_GPT_OSS: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "beta": 1.0, "interleaved": True}


@swiglu_quantize.cases
def _() -> list[Case]:
    return [
        _case("fp8", "per token, float32", 3, 2 * 33, dtype=torch.float32, limit=7.0),
        _case("fp8", "gpt-oss, narrow, blocks of 128", 3, 2 * 180, granularity="block", **_GPT_OSS),
        _case("fp8", "no rows", 0, 2 * 64),
        _case("fp8", "gpt-oss, narrow, blocks of 32, packed e8m0", 5, 2 * 180, block_size=32, **_PACKED, **_GPT_OSS),
        _case("fp8", "interleaved, longer rows than are held", 1, 2 * 17000, interleaved=True),
        _case("fp8", "gpt-oss-120b decode 64, top-4, per token", 64 * 4, 2 * 2880, **_GPT_OSS, large=True),
        _case("fp8", "gpt-oss-120b prefill 4096, top-4, per token", 4096 * 4, 2 * 2880, **_GPT_OSS, large=True),
        _case("fp8_with_scale", "scale [], float32", 3, 2 * 33, dtype=torch.float32, limit=7.0, scale_shape=()),
        _case("fp8_with_scale", "gpt-oss, narrow, scale [1]", 3, 2 * 180, scale_shape=(1,), **_GPT_OSS),
        _case("fp8_with_scale", "no rows", 0, 2 * 64, scale_shape=(1,)),
        _case("fp8_with_scale", "gpt-oss-120b decode 64, top-4", 64 * 4, 2 * 2880, scale_shape=(1,), **_GPT_OSS, large=True),
        _case("mxfp8", "one block, float32", 1, 2 * 32, dtype=torch.float32, limit=7.0),
        _case("mxfp8", "gpt-oss, narrow", 3, 2 * 160, **_GPT_OSS),
        _case("mxfp8", "scales in tiles", 130, 2 * 96, scale_layout="128x4", **_GPT_OSS),
        _case("mxfp8", "gpt-oss-120b decode 64, top-4, scales in tiles", 256, 2 * 2880, **_TILES, **_GPT_OSS, large=True),
        _case("mxfp8", "gpt-oss-120b prefill 4096, top-4, scales in tiles", 16384, 2 * 2880, **_TILES, **_GPT_OSS, large=True),
        _case("mxfp8", "no rows", 0, 2 * 64),
        _case("mxfp8", "gpt-oss-120b decode 64, top-4", 64 * 4, 2 * 2880, **_GPT_OSS, large=True),
        _case("mxfp8", "gpt-oss-120b prefill 4096, top-4", 4096 * 4, 2 * 2880, **_GPT_OSS, large=True),
        _case("nvfp4", "one block, float32", 1, 2 * 16, dtype=torch.float32, limit=7.0, global_scale=0.002),
        _case("nvfp4", "gpt-oss, narrow", 3, 2 * 160, global_scale=0.002, **_GPT_OSS),
        _case("nvfp4", "two matrices, scales in tiles", 2, 20, 2 * 80, global_scale=0.002, **_TILES, **_GPT_OSS),
        _case("nvfp4", "no rows", 0, 2 * 64, global_scale=0.002),
        _case("nvfp4", "gpt-oss-120b decode 64, top-4", 64 * 4, 2 * 2880, global_scale=0.002, **_GPT_OSS, large=True),
        _case(
            "nvfp4",
            "gpt-oss-120b decode 64, top-4, scales in tiles",
            64 * 4,
            2 * 2880,
            global_scale=0.002,
            **_TILES,
            **_GPT_OSS,
            large=True,
        ),
        _silu("fp8", "per token, float32", 3, 2 * 33, dtype=torch.float32),
        _silu("fp8", "blocks of 128, short last block", 3, 2 * 300, granularity="block"),
        _silu("fp8", "per tensor, e5m2", 2, 3, 2 * 40, granularity="tensor", dtype=torch.float16, to=torch.float8_e5m2),
        _silu("fp8", "blocks of 32, float16", 5, 2 * 96, dtype=torch.float16, granularity="block", block_size=32),
        _silu("fp8", "longer rows than are held", 1, 2 * 17000),
        _silu("fp8", "blocks of 128, e8m0", 3, 2 * 300, granularity="block", scale_dtype=torch.uint8),
        _silu("fp8", "blocks of 128, packed e8m0", 2, 3, 2 * 1300, **_PACKED),
        _silu("fp8", "tiles of 32 x 32, e8m0", 40, 2 * 80, granularity="block2d", block_size=32, scale_dtype=torch.uint8),
        _silu("fp8", "deepseek-v3.1 expert, 512 rows, blocks of 128, packed e8m0", 512, 2 * 2048, **_PACKED, large=True),
        _silu("fp8", "deepseek-v3.1 prefill 4096, blocks of 128, packed e8m0", 4096, 2 * 18432, **_PACKED, large=True),
        _silu("fp8", "qwen3-8b decode 64, per token", 64, 2 * 12288, large=True),
        _silu("fp8", "qwen3-32b decode 64, per token", 64, 2 * 25600, large=True),
        _silu("fp8", "llama-3-8b prefill 8192, per token", 8192, 2 * 14336, large=True),
        _silu("fp8", "llama-3-70b decode 64, one of 8 ranks, per token", 64, 2 * 3584, large=True),
        _silu("fp8", "deepseek-v3 expert, 512 rows, blocks of 128", 512, 2 * 2048, granularity="block", large=True),
        _silu("fp8", "deepseek-v3 prefill 4096, blocks of 128", 4096, 2 * 18432, granularity="block", large=True),
        _silu("fp8_with_scale", "scale [], float32", 3, 2 * 33, dtype=torch.float32, scale_shape=()),
        _silu("fp8_with_scale", "scale per token", 2, 3, 2 * 40, scale_shape=(2, 3, 1)),
        _silu(
            "fp8_with_scale", "scale [1], e5m2, float16", 5, 2 * 1100, dtype=torch.float16, scale_shape=(1,), to=torch.float8_e5m2
        ),
        _silu("fp8_with_scale", "llama-3-70b decode 64, one of 8 ranks", 64, 2 * 3584, scale_shape=(1,), large=True),
        _silu("fp8_with_scale", "llama-3-8b prefill 8192", 8192, 2 * 14336, scale_shape=(1,), large=True),
        _silu("mxfp8", "scales rounded up", 3, 2 * 96, scale_rounding="up"),
        _silu("mxfp8", "three axes, float16", 2, 3, 2 * 160, dtype=torch.float16),
        _silu("mxfp8", "scales in tiles, two matrices", 2, 20, 2 * 32, **_TILES),
        _silu("mxfp8", "scales in tiles, rounded up, wide", 3, 2 * 1184, scale_rounding="up", **_TILES),
        _silu("mxfp8", "qwen3-32b decode 64, scales in tiles", 64, 2 * 25600, **_TILES, large=True),
        _silu("mxfp8", "qwen3-32b prefill 8192, scales in tiles", 8192, 2 * 25600, **_TILES, large=True),
        _silu("mxfp8", "qwen3-32b decode 64", 64, 2 * 25600, large=True),
        _silu("mxfp8", "qwen3-32b prefill 8192", 8192, 2 * 25600, large=True),
        _silu("nvfp4", "one block, float32", 1, 2 * 16, dtype=torch.float32, global_scale=0.002),
        _silu("nvfp4", "three axes, float16", 2, 3, 2 * 160, dtype=torch.float16, global_scale=0.002),
        _silu("nvfp4", "scales in tiles", 130, 2 * 48, global_scale=0.002, **_TILES),
        _silu("nvfp4", "qwen3-235b expert, 512 rows, scales in tiles", 512, 2 * 1536, global_scale=0.002, **_TILES, large=True),
        _silu("nvfp4", "qwen3-32b prefill 8192, scales in tiles", 8192, 2 * 25600, global_scale=0.002, **_TILES, large=True),
        _silu("nvfp4", "qwen3-235b expert, 512 rows", 512, 2 * 1536, global_scale=0.002, large=True),
        _silu("nvfp4", "qwen3-32b prefill 8192", 8192, 2 * 25600, global_scale=0.002, large=True),
    ]

"""Fused operators that quantise another operator's result: they equal the two operators in sequence, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.activation.silu_and_mul import silu_and_mul
from tokenspeed_kernel_base.ops.activation.swiglu import swiglu
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.ops.norm.rmsnorm_quantize import rmsnorm_quantize_fp8
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8, quantize_fp8_with_scale
from tokenspeed_kernel_base.ops.quantization.mx import quantize_mxfp8
from tokenspeed_kernel_base.ops.quantization.nvfp4 import quantize_nvfp4

SOLUTIONS = pytest.mark.parametrize("solution", ["composed", "reference"])
QUANTIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "quantize_fp8": (quantize_fp8, {"granularity": "block", "block_size": 32, "dtype": torch.float8_e5m2}),
    "quantize_fp8_with_scale": (quantize_fp8_with_scale, {"scale": torch.tensor([0.02]), "dtype": torch.float8_e4m3fnuz}),
    "quantize_mxfp8": (quantize_mxfp8, {"scale_rounding": "up", "scale_layout": "128x4"}),
    "quantize_nvfp4": (quantize_nvfp4, {"global_scale": torch.tensor(0.003)}),
}
each_quantizer = pytest.mark.parametrize("name", QUANTIZERS)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def same(got: Any, wanted: Any) -> None:
    got, wanted = (list(result) if isinstance(result, tuple) else [result] for result in (got, wanted))
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@SOLUTIONS
@pytest.mark.parametrize("with_residual", [False, True])
@each_quantizer
def test_normalised_rows(name: str, with_residual: bool, solution: str) -> None:
    second, options = QUANTIZERS[name]
    x, weight, residual = draw(3, 64), draw(64), draw(3, 64, seed=1) if with_residual else None
    normed = rmsnorm(x, weight, 0.1, residual=residual)
    quantised = second(normed[0] if isinstance(normed, tuple) else normed, **options)
    wanted = quantised if isinstance(quantised, tuple) else (quantised,)
    wanted = (*wanted, normed[1]) if isinstance(normed, tuple) else wanted
    fused = get_operator(f"rmsnorm_{name}").function
    same(fused(x, weight, eps=0.1, residual=residual, **options, solution=solution), wanted if len(wanted) > 1 else wanted[0])
    if residual is not None:
        got = fused(x, weight, eps=0.1, residual=residual, **options, residual_out=x, solution=solution)
        assert got[-1] is x
        same(got, wanted)


@SOLUTIONS
@pytest.mark.parametrize(
    ("first", "options"),
    [(silu_and_mul, {}), (swiglu, {"alpha": 1.5, "limit": 1.0, "beta": 0.5, "interleaved": True})],
    ids=["silu_and_mul", "swiglu"],
)
@each_quantizer
def test_gated_activations(name: str, first: Any, options: dict[str, Any], solution: str) -> None:
    second, quantised = QUANTIZERS[name]
    x = draw(2, 3, 2 * 64)
    wanted = second(first(x, **options), **quantised)
    fused = get_operator(f"{first.operator.mode}_{name}").function
    same(fused(x, **options, **quantised, solution=solution), wanted)
    out = torch.empty_like(wanted[0] if isinstance(wanted, tuple) else wanted)
    got = fused(x, **options, **quantised, out=out, solution=solution)
    assert (got[0] if isinstance(got, tuple) else got) is out
    same(got, wanted)


def test_rows_that_are_not_held_by_any_kernel_are_left_to_the_parts() -> None:
    x = draw(4, 64)
    for granularity in ("tensor", "block2d"):
        explained = rmsnorm_quantize_fp8.explain(x, draw(64), granularity=granularity)
        assert explained.chosen is not None
        assert explained.chosen.name == "composed_rmsnorm_quantize_fp8"
    same(rmsnorm_quantize_fp8(x, draw(64), granularity="tensor"), quantize_fp8(rmsnorm(x, draw(64)), "tensor"))  # type: ignore[arg-type]

"""Tests fused operators that quantise another operator's result: their results equal those of the two operators in sequence, bit
for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.activation.silu_and_mul import silu_and_mul
from tokenspeed_kernel_base.ops.activation.swiglu import swiglu
from tokenspeed_kernel_base.ops.activation.swiglu_quantize import swiglu_quantize
from tokenspeed_kernel_base.ops.comm.all_reduce_rmsnorm_quantize import all_reduce_rmsnorm_quantize
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.ops.norm.rmsnorm_quantize import rmsnorm_quantize
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8, quantize_fp8_with_scale
from tokenspeed_kernel_base.ops.quantization.mx import quantize_mxfp8
from tokenspeed_kernel_base.ops.quantization.nvfp4 import quantize_nvfp4
from tokenspeed_kernel_base.ops.quantization.value import Quantization

SOLUTIONS = pytest.mark.parametrize("solution", ["composed", "reference"])
QUANTIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8": (quantize_fp8, {"granularity": "block", "block_size": 32, "dtype": torch.float8_e5m2}),
    "fp8_with_scale": (quantize_fp8_with_scale, {"scale": torch.tensor([0.02]), "dtype": torch.float8_e4m3fnuz}),
    "mxfp8": (quantize_mxfp8, {"scale_rounding": "up", "scale_layout": "128x4"}),
    "nvfp4": (quantize_nvfp4, {"global_scale": torch.tensor(0.003)}),
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


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@SOLUTIONS
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("reduced", [False, True], ids=["rmsnorm", "all_reduce_rmsnorm"])
@each_quantizer
def test_normalised_rows(name: str, reduced: bool, with_residual: bool, solution: str) -> None:
    second, options = QUANTIZERS[name]
    x, weight, residual = draw(3, 64), draw(64), draw(3, 64, seed=1) if with_residual else None
    normed = as_tuple(rmsnorm(x, weight, 0.1, residual=residual))
    wanted = (*as_tuple(second(normed[0], **options)), *normed[1:])
    fused: Any = all_reduce_rmsnorm_quantize if reduced else rmsnorm_quantize
    given: dict[str, Any] = {"quantization": getattr(Quantization, name)(**options), "eps": 0.1, "residual": residual}
    if reduced:
        given["group"] = ProcessGroup.of()
    same(fused(x, weight, **given, solution=solution), wanted if len(wanted) > 1 else wanted[0])
    if residual is not None:
        got = fused(x, weight, **given, residual_out=x, solution=solution)
        assert got[-1] is x
        same(got, wanted)


@SOLUTIONS
@pytest.mark.parametrize(
    "options", [{"alpha": 1.0, "beta": 0.0}, {"alpha": 1.5, "limit": 1.0, "beta": 0.5, "interleaved": True}], ids=["silu", "swiglu"]
)
@each_quantizer
def test_gated_activations(name: str, options: dict[str, Any], solution: str) -> None:
    second, quantised = QUANTIZERS[name]
    x, quantization = draw(2, 3, 2 * 64), getattr(Quantization, name)(**quantised)
    wanted = second(swiglu(x, **options), **quantised)
    same(swiglu_quantize(x, quantization, **options, solution=solution), wanted)
    if "limit" not in options:
        same(wanted, second(silu_and_mul(x), **quantised))
    out = torch.empty_like(as_tuple(wanted)[0])
    got = swiglu_quantize(x, quantization, **options, out=out, solution=solution)
    assert as_tuple(got)[0] is out
    same(got, wanted)


def test_rows_that_are_not_held_by_any_kernel_are_left_to_the_parts() -> None:
    x = draw(4, 64)
    for granularity in ("tensor", "block2d"):
        explained = rmsnorm_quantize.explain(x, draw(64), Quantization.fp8(granularity))
        assert explained.chosen is not None
        assert explained.chosen.name == "composed_rmsnorm_quantize"
    wanted = quantize_fp8(rmsnorm(x, draw(64)), "tensor")  # type: ignore[arg-type]
    same(rmsnorm_quantize(x, draw(64), Quantization.fp8("tensor")), wanted)

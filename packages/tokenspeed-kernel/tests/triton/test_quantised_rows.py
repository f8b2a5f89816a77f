"""Kernels that quantise their results, beyond the shared cases: bitwise equality with their parts, layouts, non-finite values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.numerics.compare import same_bits
from tokenspeed_kernel.workbench.numerics.verify import default_device

DEVICE = default_device()
FP8: dict[str, Any] = {"granularity": "token", "dtype": torch.float8_e5m2}
QUANTIZERS: dict[str, list[dict[str, Any]]] = {
    "quantize_fp8": [
        FP8,
        {"granularity": "block", "block_size": 64},
        {"granularity": "block", "block_size": 32, "scale_dtype": torch.int32},
    ],
    "quantize_fp8_with_scale": [{"scale": torch.tensor([0.01], device=DEVICE)}],
    "quantize_mxfp8": [{}, {"scale_rounding": "up"}],
    "quantize_nvfp4": [{"global_scale": torch.tensor(0.002, device=DEVICE)}],
}
EACH = [(name, options) for name, listed in QUANTIZERS.items() for options in listed]
each_quantizer = pytest.mark.parametrize(
    ("name", "options"), EACH, ids=[f"{n}-{i}" for n, listed in QUANTIZERS.items() for i in range(len(listed))]
)


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


def _same(got: Any, wanted: Any) -> None:
    got, wanted = (list(result) if isinstance(result, tuple) else [result] for result in (got, wanted))
    assert len(got) == len(wanted)
    assert all(same_bits(one.contiguous(), other.contiguous()) for one, other in zip(got, wanted, strict=True))


def _strided(results: list[Tensor]) -> list[Tensor]:
    return [torch.empty((*t.shape[:-1], t.shape[-1] * 2), dtype=t.dtype, device=DEVICE)[..., ::2] for t in results]


@pytest.mark.parametrize("gate", [{}, {"limit": 2.0, "interleaved": True}], ids=["silu_and_mul", "swiglu"])
@each_quantizer
def test_gated_activations_have_the_bits_of_their_parts(name: str, options: dict[str, Any], gate: dict[str, Any]) -> None:
    first = "swiglu" if gate else "silu_and_mul"
    fused, quantise = getattr(tk, f"{first}_{name}"), getattr(tk, name)
    # Two tiles a row, the last one short.
    wide = _draw(3, 2, 2 * 1120 + 3).bfloat16()
    wide[0, 0, :8] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 6e4, -6e4, 90.0, -90.0], device=DEVICE)
    wide[1, :, :] = 0
    for x, given in ((wide[:, 0, : 2 * 1120], True), (wide[..., : 2 * 32], False)):  # strided rows, and several leading axes
        made = getattr(tk, first)(x, **gate, override=f"triton_{first}")
        wanted = quantise(made, **options, override=f"triton_{name}")
        places = _strided([*wanted] if isinstance(wanted, tuple) else [wanted])
        outs = dict(zip(fused.operator.outs, places, strict=True)) if given else {}
        got = fused(x, **gate, **options, **outs, override=f"triton_{first}_{name}")
        assert not given or (got[0] if isinstance(got, tuple) else got) is outs["out"]
        _same(got, wanted)


def test_rows_that_are_computed_twice_have_the_bits_of_their_parts() -> None:
    x = _draw(2, 2 * 16500).half()
    wanted = tk.quantize_fp8(tk.silu_and_mul(x, override="triton_silu_and_mul"), override="triton_quantize_fp8")
    _same(tk.silu_and_mul_quantize_fp8(x, override="triton_silu_and_mul_quantize_fp8"), wanted)


@pytest.mark.parametrize("name", ["quantize_mxfp8", "quantize_nvfp4"])
@pytest.mark.parametrize("first", ["rmsnorm", "silu_and_mul"])
def test_scales_in_tiles_are_those_in_rows(first: str, name: str) -> None:
    fused, options = getattr(tk, f"{first}_{name}"), QUANTIZERS[name][0]
    # Several matrices, one with a non-finite row beside columns that pad a tile; and a row that several programs share.
    several = _draw(2, 20, 2 * 80 if name == "quantize_nvfp4" else 2 * 96).bfloat16()
    several[1, 7, 5] = math.nan
    for x in (several,) if first == "rmsnorm" else (several, _draw(1, 2 * 1120).bfloat16()):
        given = {"weight": _draw(x.shape[-1])} if first == "rmsnorm" else {}
        codes, scale = fused(x, **given, **options, override=f"triton_{first}_{name}")
        wanted = codes, tk.swizzle_scales(scale, override="reference_swizzle_scales")
        place = torch.full(wanted[1].shape, 0x55, dtype=torch.uint8, device=DEVICE).view(scale.dtype)
        got = fused(x, **given, **options, scale_layout="128x4", scale_out=place, override=f"triton_{first}_{name}")
        assert got[1] is place
        _same(got, wanted)


@each_quantizer
def test_the_sum_may_overwrite_its_operands(name: str, options: dict[str, Any]) -> None:
    """The sum equals that of `rmsnorm` bit for bit, wherever it is written; quantised values and scales are the same each time."""
    fused = getattr(tk, f"rmsnorm_{name}")
    weight = _draw(96, 2)[:, 1]

    def run(x: Tensor, residual: Tensor, **outs: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = fused(
            x, weight, eps=0.1, residual=residual, **options, **outs, override=f"triton_rmsnorm_{name}"
        )
        return made

    x, residual = _draw(7, 96).bfloat16(), _draw(7, 96, seed=1).bfloat16()
    _, total = tk.rmsnorm(x, weight, residual=residual, override="triton_rmsnorm")
    wanted = run(x, residual)
    _same(wanted[-1], total)
    for target in ("x", "residual"):
        given = {"x": x.clone(), "residual": residual.clone()}
        got = run(**given, residual_out=given[target])
        assert got[-1] is given[target]
        _same(got, wanted)
    across = {"x": x.t().contiguous().t(), "residual": torch.cat((residual, x), 1)[:, :96]}
    outs = dict(zip(fused.operator.outs, _strided([*wanted]), strict=True))
    _same(run(**across, **outs), wanted)

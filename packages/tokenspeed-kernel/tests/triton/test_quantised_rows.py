"""Tests fused kernels that quantise their results, beyond the shared cases: bitwise equality with separate kernels, layouts,
non-finite values."""

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
PLAIN: dict[str, Any] = {"alpha": 1.0, "beta": 0.0}
FP8: dict[str, Any] = {"granularity": "token", "dtype": torch.float8_e5m2}
QUANTIZERS: dict[str, list[dict[str, Any]]] = {
    "fp8": [
        FP8,
        {"granularity": "block", "block_size": 64},
        {"granularity": "block", "block_size": 32, "scale_dtype": torch.int32},
    ],
    "fp8_with_scale": [{"scale": torch.tensor([0.01], device=DEVICE)}],
    "mxfp8": [{}, {"scale_rounding": "up"}],
    "nvfp4": [{"global_scale": torch.tensor(0.002, device=DEVICE)}],
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


def _quantization(name: str, options: dict[str, Any], **further: Any) -> tk.Quantization:
    made: tk.Quantization = getattr(tk.Quantization, name)(**options, **further)
    return made


@pytest.mark.sampled(6)
@pytest.mark.parametrize("gate", [PLAIN, {"limit": 2.0, "interleaved": True}], ids=["silu_and_mul", "swiglu"])
@each_quantizer
def test_gated_activations_have_the_bits_of_their_parts(name: str, options: dict[str, Any], gate: dict[str, Any]) -> None:
    quantise, quantization = getattr(tk, f"quantize_{name}"), _quantization(name, options)
    # Each row has two tiles, and the second tile is partial.
    wide = _draw(3, 2, 2 * 1120 + 3).bfloat16()
    wide[0, 0, :8] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 6e4, -6e4, 90.0, -90.0], device=DEVICE)
    wide[1, :, :] = 0
    for x, given in ((wide[:, 0, : 2 * 1120], True), (wide[..., : 2 * 32], False)):  # rows with gaps, and several axes
        plain = gate is PLAIN
        made = tk.silu_and_mul(x, override="triton_silu_and_mul") if plain else tk.swiglu(x, **gate, override="triton_swiglu")
        wanted = quantise(made, **options, override=f"triton_quantize_{name}")
        places = _strided([*wanted] if isinstance(wanted, tuple) else [wanted])
        outs = dict(zip(("out", "scale_out"), places, strict=False)) if given else {}
        got = tk.swiglu_quantize(x, quantization, **gate, **outs, override=f"triton_swiglu_quantize_{name}")
        assert not given or (got[0] if isinstance(got, tuple) else got) is outs["out"]
        _same(got, wanted)


def test_rows_that_are_computed_twice_have_the_bits_of_their_parts() -> None:
    x = _draw(2, 2 * 16500).half()
    wanted = tk.quantize_fp8(tk.silu_and_mul(x, override="triton_silu_and_mul"), override="triton_quantize_fp8")
    _same(tk.swiglu_quantize(x, tk.Quantization.fp8(), **PLAIN, override="triton_swiglu_quantize_fp8"), wanted)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("first", ["rmsnorm", "swiglu"])
def test_scales_in_tiles_are_those_in_rows(first: str, name: str) -> None:
    fused, options = getattr(tk, f"{first}_quantize"), QUANTIZERS[name][0]
    rows, tiles = _quantization(name, options), _quantization(name, options, scale_layout="128x4")
    # Two inputs: several matrices, one of them with a NaN; and a row that several CTAs share.
    several = _draw(2, 20, 2 * 80 if name == "nvfp4" else 2 * 96).bfloat16()
    several[1, 7, 5] = math.nan
    for x in (several,) if first == "rmsnorm" else (several, _draw(1, 2 * 1120).bfloat16()):
        given = {"weight": _draw(x.shape[-1])} if first == "rmsnorm" else PLAIN
        codes, scale = fused(x, **given, quantization=rows, override=f"triton_{first}_quantize_{name}")
        wanted = codes, tk.swizzle_scales(scale, override="reference_swizzle_scales")
        place = torch.full(wanted[1].shape, 0x55, dtype=torch.uint8, device=DEVICE).view(scale.dtype)
        got = fused(x, **given, quantization=tiles, scale_out=place, override=f"triton_{first}_quantize_{name}")
        assert got[1] is place
        _same(got, wanted)


@each_quantizer
def test_the_sum_may_take_the_place_of_what_was_added(name: str, options: dict[str, Any]) -> None:
    """The sum may overwrite x or the residual. It must be bitwise equal to the sum of `rmsnorm`, and quantised values and scales
    must not change."""
    weight, quantization = _draw(96, 2)[:, 1], _quantization(name, options)

    def run(x: Tensor, residual: Tensor, **outs: Tensor) -> tuple[Tensor, ...]:
        made: Any = tk.rmsnorm_quantize(x, weight, quantization, 0.1, residual, **outs, override=f"triton_rmsnorm_quantize_{name}")
        return tuple(made)

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
    op = tk.get_operator("rmsnorm_quantize")
    outs = op.named(op.complete({**across, "weight": weight, "quantization": quantization}), _strided([*wanted]))
    _same(run(**across, **outs), wanted)

"""Tests deprecated names of operators that quantise. Their functions take the old arguments, warn once, and call the replacing
operators."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.activation.silu_and_mul import silu_and_mul
from tokenspeed_kernel_base.ops.activation.swiglu import swiglu
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.ops.quantization.aliases import ALIASES, alias
from tokenspeed_kernel_base.ops.quantization.quantize import quantize
from tokenspeed_kernel_base.ops.quantization.value import Quantization

FP8 = "granularity='token', block_size=128, dtype=torch.float8_e4m3fn, scale_dtype=torch.float32"
GATE = "alpha=1.702, limit=None, beta=1.0, interleaved=False"
NORM = "eps=1e-05, residual=None"
OUT, RESIDUAL = "out=None, scale_out=None", "residual_out=None"
SIGNATURES = {
    "silu_and_mul_quantize_fp8": f"x, {FP8}, {OUT}",
    "silu_and_mul_quantize_fp8_with_scale": "x, scale, dtype=torch.float8_e4m3fn, out=None",
    "silu_and_mul_quantize_mxfp8": f"x, scale_rounding='down', scale_layout='linear', {OUT}",
    "silu_and_mul_quantize_nvfp4": f"x, global_scale, scale_layout='linear', {OUT}",
    "swiglu_quantize_fp8": f"x, {GATE}, {FP8}, {OUT}",
    "swiglu_quantize_fp8_with_scale": f"x, scale, {GATE}, dtype=torch.float8_e4m3fn, out=None",
    "swiglu_quantize_mxfp8": f"x, {GATE}, scale_rounding='down', scale_layout='linear', {OUT}",
    "swiglu_quantize_nvfp4": f"x, global_scale, {GATE}, scale_layout='linear', {OUT}",
    "rmsnorm_quantize_fp8": f"x, weight, {NORM}, {FP8}, {OUT}, {RESIDUAL}",
    "rmsnorm_quantize_fp8_with_scale": f"x, weight, scale, {NORM}, dtype=torch.float8_e4m3fn, out=None, {RESIDUAL}",
    "rmsnorm_quantize_mxfp8": f"x, weight, {NORM}, scale_rounding='down', scale_layout='linear', {OUT}, {RESIDUAL}",
    "rmsnorm_quantize_nvfp4": f"x, weight, global_scale, {NORM}, scale_layout='linear', {OUT}, {RESIDUAL}",
    "all_reduce_rmsnorm_quantize_fp8": f"x, weight, group, {NORM}, {FP8.rpartition(', ')[0]}, {OUT}, {RESIDUAL}",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fp8": {"granularity": "block", "block_size": 32},
    "fp8_with_scale": {"scale": torch.tensor([0.02]), "dtype": torch.float8_e5m2},
    "mxfp8": {"scale_rounding": "up"},
    "nvfp4": {"global_scale": torch.tensor(0.003), "scale_layout": "128x4"},
}
each_name = pytest.mark.parametrize("name", SIGNATURES)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def same(got: Any, wanted: Any) -> None:
    got, wanted = as_tuple(got), as_tuple(wanted)
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def call_of(name: str) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Returns the arguments of a call, and its expected results."""
    first, _, kind = name.partition("_quantize_")
    quantization = getattr(Quantization, kind)(**OPTIONS[kind])
    x = draw(3, 128)
    if first == "silu_and_mul":
        return {"x": x, **OPTIONS[kind]}, as_tuple(quantize(silu_and_mul(x), quantization))
    if first == "swiglu":
        return {"x": x, "limit": 2.0, **OPTIONS[kind]}, as_tuple(quantize(swiglu(x, limit=2.0), quantization))
    given: dict[str, Any] = {"x": x, "weight": draw(128), "eps": 0.1, "residual": draw(3, 128, seed=1)}
    normed, total = rmsnorm(**given)
    group = {"group": ProcessGroup.of()} if first.startswith("all_reduce") else {}
    return {**given, **group, **OPTIONS[kind]}, (*as_tuple(quantize(normed, quantization)), total)


@each_name
def test_it_is_called_as_it_was(name: str) -> None:
    shown = inspect.signature(alias(name))
    without = shown.replace(
        parameters=[p.replace(annotation=p.empty) for p in shown.parameters.values()], return_annotation=shown.empty
    )
    assert str(without) == f"({SIGNATURES[name]}, *, override=None, solution=None)"
    assert inspect.signature(alias(name), eval_str=True).parameters["x"].annotation is Tensor


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")
@each_name
def test_it_does_what_took_its_place(name: str) -> None:
    arguments, wanted = call_of(name)
    function = alias(name)
    same(function(**arguments), wanted if len(wanted) > 1 else wanted[0])
    names = list(inspect.signature(function).parameters)
    leading = [arguments[each] for each in names[: names.index("residual") + 1 if "residual" in names else 1]]
    rest = {each: value for each, value in arguments.items() if each not in names[: len(leading)]}
    same(function(*leading, **rest, solution="reference"), wanted if len(wanted) > 1 else wanted[0])
    out = torch.empty_like(wanted[0])
    assert as_tuple(function(**arguments, out=out, override=f"composed_{ALIASES[name][0]}"))[0] is out
    same(out, wanted[0])


@each_name
def test_it_warns_once_and_says_what_to_use(name: str) -> None:
    arguments, _ = call_of(name)
    function, (operator, kind) = alias(name), ALIASES[name]
    assert function.__name__ == name
    assert (function.__doc__ or "").startswith(f"Deprecated: use {operator}(..., Quantization.{kind}(...)")
    with pytest.warns(DeprecationWarning, match=rf"^{name} is deprecated: use {operator}\(") as caught:
        function(**arguments)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(**arguments)


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")
def test_it_takes_nothing_else() -> None:
    x = draw(3, 128)
    for wrong in ({"alpha": 2.0}, {"quantization": Quantization.mxfp8()}, {"scale": x}):
        with pytest.raises(TypeError, match="_quantize_mxfp8 takes x, scale_rounding, "):
            alias("silu_and_mul_quantize_mxfp8")(x, **wrong)
    with pytest.raises(TypeError, match=r"takes x, weight, .*each at most once"):
        alias("rmsnorm_quantize_fp8")(x, draw(128), x=x)
    with pytest.raises(TypeError, match=r"takes x, scale, dtype, out, .*got 5"):
        alias("silu_and_mul_quantize_fp8_with_scale")(x, x, torch.float8_e5m2, None, None)
    with pytest.raises(TypeError, match=r"missing .*scale"):
        alias("silu_and_mul_quantize_fp8_with_scale")(x)


def test_it_is_compiled() -> None:
    arguments, wanted = call_of("rmsnorm_quantize_fp8")
    function = alias("rmsnorm_quantize_fp8")
    same(torch.compile(lambda given: function(**given), fullgraph=True, backend="aot_eager")(arguments), wanted)


def test_no_operator_has_an_old_name() -> None:
    assert ALIASES.keys() == SIGNATURES.keys()
    for name, (operator, _) in ALIASES.items():
        assert get_operator(operator).mode == operator
        with pytest.raises(KeyError):
            get_operator(name)

"""Tests which attributes a `Quantization` may have, and that `quantize` calls the operator of the format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8, quantize_fp8_with_scale
from tokenspeed_kernel_base.ops.quantization.mx import quantize_mxfp8
from tokenspeed_kernel_base.ops.quantization.nvfp4 import quantize_nvfp4
from tokenspeed_kernel_base.ops.quantization.quantize import quantize
from tokenspeed_kernel_base.ops.quantization.value import Quantization, kind_of

BLOCKS: dict[str, Any] = {"granularity": "block", "block_size": 32}
EACH: list[tuple[str, Any, dict[str, Any]]] = [
    ("fp8", quantize_fp8, {}),
    ("fp8", quantize_fp8, {**BLOCKS, "dtype": torch.float8_e5m2}),
    ("fp8", quantize_fp8, {**BLOCKS, "scale_dtype": torch.int32}),
    ("fp8", quantize_fp8, {"granularity": "block2d", "block_size": 16}),
    ("fp8_with_scale", quantize_fp8_with_scale, {"scale": torch.tensor([0.02]), "dtype": torch.float8_e4m3fnuz}),
    ("mxfp8", quantize_mxfp8, {"scale_rounding": "up", "scale_layout": "128x4"}),
    ("nvfp4", quantize_nvfp4, {"global_scale": torch.tensor(0.003)}),
]
each = pytest.mark.parametrize(("kind", "second", "options"), EACH, ids=[f"{kind}-{i}" for i, (kind, *_) in enumerate(EACH)])
SCALE = torch.ones(1)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def same(got: Any, wanted: Any) -> None:
    got, wanted = (list(result) if isinstance(result, tuple) else [result] for result in (got, wanted))
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("solution", [None, "composed", "reference"])
@each
def test_quantize_is_the_operator_of_the_format(kind: str, second: Any, options: dict[str, Any], solution: str | None) -> None:
    quantization = getattr(Quantization, kind)(**options)
    assert kind_of(quantization) == kind
    x = draw(3, 64)
    wanted = second(x, **options)
    same(quantize(x, quantization, solution=solution), wanted)
    outs = dict(zip(("out", "scale_out"), wanted if isinstance(wanted, tuple) else (wanted,), strict=False))
    given = {name: torch.empty_like(output) for name, output in outs.items()}
    for _ in range(2):
        got = quantize(x, quantization, **given, solution=solution)
        assert all(one is other for one, other in zip(got if isinstance(got, tuple) else (got,), given.values(), strict=True))
        same(got, wanted)


@each
def test_it_passes_through_the_compiler(kind: str, second: Any, options: dict[str, Any], opcheck: Any) -> None:
    x, quantization = draw(3, 64), getattr(Quantization, kind)(**options)
    opcheck(quantize, quantize.operator.complete({"x": x, "quantization": quantization}))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: quantize(x, quantization), fullgraph=True, backend="aot_eager")
    same(compiled(x), second(x, **options))
    made = torch.compile(lambda x: quantize(x, getattr(Quantization, kind)(**options)), fullgraph=True, backend="aot_eager")
    same(made(x), second(x, **options))


def test_another_value_is_another_decision() -> None:
    """Asserts that a call with a new but equal `Quantization`, or with another scale tensor, needs no new decision."""
    x = draw(4, 64)
    for _ in range(2):
        for kind, second, options in EACH:
            same(quantize(x, getattr(Quantization, kind)(**options)), second(x, **options))
    given = torch.tensor([0.5])
    same(quantize(x, Quantization.fp8_with_scale(given)), quantize_fp8_with_scale(x, given))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Quantization.fp8("row"), ValueError, "granularity must be one of .*, got 'row'"),
        (lambda: Quantization.fp8(block_size=0), ValueError, "block_size must be at least 1, got 0"),
        (lambda: Quantization.fp8(dtype=torch.bfloat16), ValueError, "dtype must be one of .*, got bfloat16"),
        (
            lambda: Quantization.fp8(scale_dtype=torch.uint8),
            ValueError,
            "granularity must be 'block' or 'block2d' with .*, got token",
        ),
        (
            lambda: Quantization.fp8("block", dtype=torch.float8_e4m3fnuz, scale_dtype=torch.int32),
            ValueError,
            "dtype must be float8_e4m3fn or float8_e5m2 with .*, got float8_e4m3fnuz",
        ),
        (lambda: Quantization.fp8_with_scale(0.5), TypeError, "scale must be a tensor or None, got float"),  # type: ignore[arg-type]
        (lambda: Quantization.fp8_with_scale(SCALE, torch.uint8), ValueError, "dtype must be one of .*, got uint8"),
        (lambda: Quantization.mxfp8("nearest"), ValueError, "scale_rounding must be one of 'down', 'up', got 'nearest'"),
        (lambda: Quantization.mxfp8(scale_layout="8x4"), ValueError, "scale_layout must be one of .*, got '8x4'"),
        (lambda: Quantization.nvfp4(None), ValueError, "scale must be a tensor, got None"),  # type: ignore[arg-type]
        (
            lambda: Quantization("mxfp8", "block", 32, torch.float8_e4m3fn, torch.uint8, "down", "linear", SCALE),
            ValueError,
            "scale must be None for mxfp8, got a float32 tensor",
        ),
        (
            lambda: Quantization("nvfp4", "block", 32, torch.uint8, torch.float8_e4m3fn, "nearest", "linear", SCALE),
            ValueError,
            "block_size must be one of 16, got 32",
        ),
        (
            lambda: Quantization("fp4", "block", 32, torch.uint8, torch.float8_e4m3fn, "nearest", "linear", SCALE),
            ValueError,
            "format must be one of 'fp8', 'mxfp8', 'nvfp4', got 'fp4'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^Quantization: {message}"):
        make()

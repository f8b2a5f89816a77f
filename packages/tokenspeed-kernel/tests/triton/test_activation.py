"""Tests the activation kernels beyond the shared cases: non-finite and huge values, strides."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import gelu_and_mul, silu_and_mul, swiglu
from tokenspeed_kernel.workbench.numerics.verify import default_device

DEVICE = default_device()
ODD_VALUES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 7.0, -7.0, 7.5, -7.5, 90.0, -90.0, 1e30, -1e30, 1e-30]
OPTIONS: list[dict[str, Any]] = [{}, {"limit": 7.0}, {"limit": 7, "alpha": 1, "beta": 0}, {"alpha": -2.0, "beta": 0.5}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nonfinite_and_extreme_values(dtype: torch.dtype, options: dict[str, Any]) -> None:
    pairs = torch.tensor(list(itertools.product(ODD_VALUES, ODD_VALUES)), dtype=dtype, device=DEVICE)
    halves = torch.cat((pairs[:, 0], pairs[:, 1]))
    expected = swiglu(halves, **options, override="reference_swiglu")
    for x, interleaved in ((halves, False), (pairs.flatten(), True)):
        got = swiglu(x, **options, interleaved=interleaved, override="triton_swiglu")
        torch.testing.assert_close(got, expected, equal_nan=True)
    if not options:
        expected = silu_and_mul(halves, override="reference_silu_and_mul")
        torch.testing.assert_close(silu_and_mul(halves, override="triton_silu_and_mul"), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_nonfinite_and_extreme_values(dtype: torch.dtype, approximate: str) -> None:
    pairs = torch.tensor(list(itertools.product(ODD_VALUES, ODD_VALUES)), dtype=dtype, device=DEVICE)
    halves = torch.cat((pairs[:, 0], pairs[:, 1]))
    got, expected = (gelu_and_mul(halves, approximate, solution=solution) for solution in ("triton", "reference"))
    # The argument of the exponential is about 30 for a gate of -7. Its absolute error becomes the relative error of the
    # exponential.
    torch.testing.assert_close(got, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d", [1, 3, 64, 1500])
def test_strides(d: int, interleaved: bool) -> None:
    wide = torch.randn(3, 4, 2 * d + 3, generator=torch.Generator().manual_seed(d)).to(DEVICE)
    x = wide[:, 1:3, 1 : 1 + 2 * d]

    def run(x: Tensor, out: Tensor | None = None) -> Tensor:
        return swiglu(x, limit=1.0, interleaved=interleaved, out=out, override="triton_swiglu")

    expected = swiglu(x, limit=1.0, interleaved=interleaved, override="reference_swiglu")
    torch.testing.assert_close(run(x), expected)
    torch.testing.assert_close(run(x[0]), expected[0])
    torch.testing.assert_close(run(x[0, 0]), expected[0, 0])
    torch.testing.assert_close(run(x.mT.contiguous().mT), expected)
    for buffer in (torch.zeros(3, 2, d + 5), torch.zeros(2, d + 5, 3).permute(2, 0, 1)):
        buffer = buffer.to(DEVICE)
        out = buffer[..., :d]
        assert run(x, out) is out
        torch.testing.assert_close(out, expected)
        assert not buffer[..., d:].any()

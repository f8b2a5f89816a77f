"""Tests the kernels whose k the CTAs of a cluster split, without a GPU: `mm` of up to 32 tokens and `rmsnorm_moe_topk` of up to
256, on the emulator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
pytest.importorskip("sm90_emulator")
if torch.cuda.is_available():  # other tests in this process may launch programs on a GPU
    pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process", allow_module_level=True)

from sm90_emulator import emulated_sm90
from tokenspeed_kernel_base.ops.moe.rmsnorm_moe_topk import rmsnorm_moe_topk as operator
from tokenspeed_kernel_nvidia.sm90.gemm.split_k import launch as of_mm
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import SHARED_BYTES, every_config
from tokenspeed_kernel_nvidia.sm90.moe.route import config as route_config
from tokenspeed_kernel_nvidia.sm90.moe.route import launch as of_route

from .launched import as_operator

mm, rmsnorm_moe_topk = as_operator(of_mm.mm), as_operator(of_route.rmsnorm_moe_topk)
BF16 = torch.bfloat16


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 8, 3),  # one CTA of the cluster has all of k
        (16, 520, 1100),  # CTAs with different numbers of blocks; several tiles per warpgroup
        (17, 4096, 70),
        (32, 1032, 200),  # the last tile and the last block are partly filled
        pytest.param(32, 4096, 1100, marks=pytest.mark.slow),
    ],
)
def test_mm(m: int, k: int, n: int, seed: int) -> None:
    """With seed 0, warps run in order. With seed 1, warps, copies and wgmmas take random times."""
    for dtype, bias in ((BF16, normal(n)), (torch.float16, normal(n, dtype=torch.float32)), (BF16, None)):
        a, weights = normal(m, k, dtype=dtype), normal(n, k, scale=k**-0.5, dtype=dtype)
        out = torch.full((m, n), torch.nan, dtype=dtype)
        with emulated_sm90(multiprocessors=24, seed=seed):  # three clusters
            assert mm(a, weights.t(), bias=bias, out=out) is out
        wanted = a.double() @ weights.double().t() + (0 if bias is None else bias.double())
        assert float((out.double() - wanted).norm() / wanted.norm()) <= (4e-3 if dtype == BF16 else 6e-4)


def test_late_copies() -> None:
    """Asserts that results are correct if copies and wgmmas complete as late as possible."""
    a, weights = normal(9, 1100), normal(600, 1100, scale=0.03)
    with emulated_sm90(multiprocessors=8, copies="late"):
        got = mm(a[:, :1096], weights[:, :1096].t())
    wanted = a[:, :1096].double() @ weights[:, :1096].double().t()
    assert float((got.double() - wanted).norm() / wanted.norm()) <= 4e-3


def test_infinities_stay_in_their_rows() -> None:
    """Asserts that infinities and NaN affect only their rows and columns."""
    a, weights = normal(9, 328), normal(70, 328)
    weights[3, 7], weights[40, 327], a[2, 0] = torch.inf, torch.nan, torch.inf
    with emulated_sm90():
        got = mm(a, weights.t())
    wanted = (a.float() @ weights.float().t()).to(BF16)
    torch.testing.assert_close(got.isfinite(), wanted.isfinite())


def route(tokens: int, hidden: int, experts: int, top_k: int, multiprocessors: int, **given: Any) -> None:
    """Routes tokens whose experts' logits are so different that rounding does not change the selection."""
    arguments: dict[str, Any] = {
        "x": normal(tokens, hidden),
        "norm_weight": 1 + normal(hidden, scale=0.1),
        "router_weight": torch.zeros(experts, hidden, dtype=BF16).t(),
        "top_k": top_k,
        "eps": 1e-5,
        "residual": normal(tokens, hidden),
        "router_bias": (torch.randperm(experts) * 0.25 - 8).to(BF16),
        **given,
    }
    arguments["router_weight"] += normal(hidden, experts, scale=0.02 * hidden**-0.5)
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    wanted = operator.operator.reference(*operator.operator.complete(copies).values())
    with emulated_sm90(multiprocessors=multiprocessors, seed=1):
        got = rmsnorm_moe_topk(**arguments)
    assert torch.equal(got[2], wanted[2])
    torch.testing.assert_close(got[1], wanted[1], rtol=0.05, atol=1e-3)
    for index in (0, 3):
        if index < len(wanted):
            torch.testing.assert_close(got[index], wanted[index], rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "top_k", "multiprocessors"),
    [(1, 8, 3, 1, 132), (9, 2880, 128, 4, 132), (40, 264, 32, 8, 132), (20, 520, 65, 2, 8), (50, 4096, 128, 4, 16)],
)
def test_rmsnorm_moe_topk(tokens: int, hidden: int, experts: int, top_k: int, multiprocessors: int) -> None:
    """With few SMs, clusters have 32 tokens."""
    route(tokens, hidden, experts, top_k, multiprocessors)


def test_rmsnorm_moe_topk_in_place() -> None:
    """Asserts that results may be stored over x and over the residual, and that results may have any strides."""
    x, residual = normal(20, 264), normal(20, 264)
    route(20, 264, 32, 4, 132, x=x, residual=residual, residual_out=residual, out=x)
    weights, ids = torch.empty(4, 20).t(), torch.empty(20, 8, dtype=torch.int32)[:, ::2]
    route(20, 264, 32, 4, 132, weights_out=weights, ids_out=ids, out=torch.empty(264, 20, dtype=BF16).t(), residual=None)


def test_sizes_fit() -> None:
    for config in itertools.chain(every_config(), route_config.every_config()):
        assert config.shared_bytes <= SHARED_BYTES
        assert config.stages >= 4
    assert route_config.config_of("bfloat16", route_config.MAX_TOKENS, 2880, 15).tokens * 15 >= route_config.MAX_TOKENS

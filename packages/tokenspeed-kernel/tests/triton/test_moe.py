"""Routing and mixture-of-experts kernels where the cases that all kernels share do not look: odd values, odd strides, graphs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tokenspeed_kernel import moe_topk
from tokenspeed_kernel.numerics.verify import default_device
from tokenspeed_kernel.platform import current_platform

pytestmark = pytest.mark.skipif("triton" not in current_platform().features, reason="Triton kernels do not run here")

DEVICE = default_device()
ODD_VALUES = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, 1e-30, -1e30]


def _topk_agrees(logits: torch.Tensor, **options: Any) -> None:
    got = moe_topk(logits, **options, override="triton_moe_topk")
    expected = moe_topk(logits, **options, override="reference_moe_topk")
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("groups", [1, 4])
def test_odd_values_rank_as_the_reference_ranks_them(dtype: torch.dtype, groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, len(ODD_VALUES), (64, 12), generator=generator)
    logits = torch.tensor(ODD_VALUES)[chosen].to(dtype).to(DEVICE)
    for renormalize, scoring in itertools.product((True, False), ("softmax", "sigmoid")):
        _topk_agrees(
            logits, top_k=5, scoring=scoring, renormalize=renormalize, num_groups=groups, top_groups=2 if groups > 1 else 1
        )


def test_odd_values_with_a_correction_bias() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor(ODD_VALUES)[torch.randint(0, len(ODD_VALUES), (64, 12), generator=generator)].to(DEVICE)
    bias = torch.randint(-1, 2, (12,), generator=generator).float().to(DEVICE)
    bias[3] = float("inf")
    for groups, top_groups in ((1, 1), (4, 2), (6, 3), (12, 6)):
        _topk_agrees(
            logits, top_k=5, scoring="sigmoid", correction_bias=bias, num_groups=groups, top_groups=top_groups, scaling_factor=2.0
        )


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 2), (97, 33), (513, 9), (2048, 4)])
def test_any_count_of_experts(experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    for dtype in (torch.float32, torch.bfloat16):
        _topk_agrees(torch.randn(5, experts, generator=generator).to(dtype).to(DEVICE), top_k=top_k)


def test_strided_logits_bias_and_outputs() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(48, 7, generator=generator).to(DEVICE).t()
    bias = torch.randn(96, generator=generator).to(DEVICE)[::2]
    weights_out = torch.zeros(7, 8, device=DEVICE)[:, ::2]
    ids_out = torch.zeros(4, 7, dtype=torch.int32, device=DEVICE).t()
    expected = moe_topk(logits, 4, "sigmoid", correction_bias=bias, override="reference_moe_topk")
    got = moe_topk(
        logits, 4, "sigmoid", correction_bias=bias, weights_out=weights_out, ids_out=ids_out, override="triton_moe_topk"
    )
    assert got[0].data_ptr() == weights_out.data_ptr() and got[1].data_ptr() == ids_out.data_ptr()
    assert torch.equal(ids_out, expected[1])
    torch.testing.assert_close(weights_out, expected[0])

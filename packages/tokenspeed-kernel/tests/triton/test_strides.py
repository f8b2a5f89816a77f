"""Vectors that are not contiguous: lengths, offsets, sinks, scales, biases as every second element of something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics import compare
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.operator import get_operator

CASES = [
    ("mha_prefill", "window, cap, sinks and lse together"),
    ("mha_extend_with_kvcache", "window, cap, sinks and lse together"),
    ("mha_extend_with_kvcache", "fp8 e5m2 cache, a scale a kv head"),
    ("mha_decode_with_kvcache", "four new tokens, sinks and lse"),
    ("mha_decode_with_kvcache", "fp8 e5m2 cache, a scale a kv head"),
    ("mha_with_kvcache", "window, cap, sinks and lse together"),
    ("mha_with_kvcache", "fp8 e5m2 cache, a scale a kv head"),
    ("mla_prefill", "lengths 0 to 33, float32, lse"),
    ("mla_extend_with_kvcache", "fp8 q and cache, a scale each"),
    ("mla_decode_with_kvcache", "three new tokens"),
    ("mm", "fp8 per token and channel, bias"),
]


def _every_second(vector: Tensor) -> Tensor:
    """The vector, between elements that are no lengths, indices or finite numbers."""
    between = torch.full_like(vector, torch.nan if vector.dtype.is_floating_point else 2**20)
    return torch.stack([vector, between], 1).flatten()[::2]


@pytest.mark.parametrize(("mode", "name"), CASES, ids=[" ".join(case) for case in CASES])
def test_every_second_element(mode: str, name: str) -> None:
    op = get_operator(mode)
    (case,) = [case for case in op.all_cases() if case.name == name]
    arguments = op.complete(case.build(default_device()))
    wanted, plain = (op.function(**arguments, solution=solution) for solution in ("reference", "triton"))
    vectors = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and x.dim() == 1 and x.numel() > 1}
    assert vectors, "the case has something to try"
    changed: dict[str, Any] = {n: _every_second(x) for n, x in vectors.items()}
    got = op.function(**{**arguments, **changed}, solution="triton")
    for found, usual in zip(compare(got, wanted), compare(plain, wanted), strict=True):
        assert found.relative_error == usual.relative_error, found

"""Tests strided vectors (lengths, offsets, sinks, scales, biases) that are interleaved with other values, and strides of 2^30
elements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from tokenspeed_kernel.workbench.numerics import compare
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.attention import dsa_indexer_scores
from tokenspeed_kernel_base.ops.linear_attention import gated_delta_rule_decode, gated_delta_rule_prefill
from tokenspeed_kernel_base.ops.state_space import causal_conv1d_decode, causal_conv1d_prefill, ssd_decode, ssd_prefill
from tokenspeed_kernel_base.parameters import tensor_arguments

DEVICE = default_device()

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
    """Returns a vector of equal values with stride 2. The elements between them are NaN, or 2^20, which is no valid length or
    index."""
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


# In these cases, the axes that get a stride of 2^30 have 3 elements, because index 2 times this stride overflows 32 bits.
F32 = torch.float32
FAR = {
    "ssd_prefill": ssd_prefill._inputs([3], 3, 4, 4, 3, F32),
    "ssd_decode": ssd_decode._inputs(3, 3, 4, 4, 3, 3, F32),
    "causal_conv1d_prefill": causal_conv1d_prefill._inputs([3], 8, dtype=F32),
    "causal_conv1d_decode": causal_conv1d_decode._inputs(3, 8, 3, dtype=F32),
    "gated_delta_rule_prefill": gated_delta_rule_prefill._inputs([3], 3, 3, 16, 4, F32, initial=True),
    "gated_delta_rule_decode": gated_delta_rule_decode._inputs(3, 3, 3, 3, 16, 4, F32),
    "dsa_indexer_scores": dsa_indexer_scores._inputs([3], heads=3, head_dim=16, dtype=F32),
}


def _far(x: Tensor, axis: int, memory: Tensor) -> Tensor:
    """Returns the tensor with a stride of 2^30 elements along an axis."""
    strides = [*torch.empty(x.shape[:axis] + x.shape[axis + 1 :], device="meta").stride()]
    strides.insert(axis, 1 << 30)
    return memory.as_strided(x.shape, strides).copy_(x)


@pytest.mark.parametrize("mode", FAR)
def test_offsets_of_more_than_32_bits(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one axis after another, all tensors of a call get a stride of 2^30 elements along this axis. The results must not
    change."""
    at_most = 1 << 16  # elements of a tensor
    op = get_operator(mode)
    on_host = DEVICE.type == "cpu"
    if on_host:  # a 32-bit overflow is then an error instead of a wrong address
        monkeypatch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, debug=True))

    def run(axis: int) -> list[Tensor]:
        arguments = op.complete(FAR[mode](Draw(DEVICE)))
        tensors = dict(tensor_arguments(op.parameters, arguments))
        elements = (2 << 30) + len(tensors) * at_most
        file = str(tmp_path / str(axis))  # untouched pages take no memory
        memory = torch.from_file(file, shared=True, size=elements) if on_host else torch.empty(elements, device=DEVICE)
        for number, (name, x) in enumerate(tensors.items()):
            if 0 <= axis < x.dim() - 1 and x.shape[axis] == 3:
                assert x.dtype == F32
                assert x.numel() <= at_most
                arguments[name] = _far(x, axis, memory[number * at_most :])
        results = lowering.as_list(op.function(**arguments, solution="triton"))
        return [*results, *(arguments[name].clone(memory_format=torch.contiguous_format) for name in op.mutates)]

    near = run(-1)
    axes = max(x.dim() for _, x in tensor_arguments(op.parameters, op.complete(FAR[mode](Draw(DEVICE))))) - 1
    for axis in range(axes):
        torch.testing.assert_close(run(axis), near)

"""Tests every operator under torch.compile with the default backend, Inductor: with and without provided outputs, with fixed and
dynamic shapes. If there is a GPU, the operators run on the GPU, also in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base import lowering, ops
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import Operator, operators
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.platform import current_platform

PLATFORM = current_platform()
ON_GPU = not PLATFORM.is_cpu and not PLATFORM.pretended and not PLATFORM.emulated
OPERATORS = [op for op in operators() if op.body.__module__.startswith(ops.__name__ + ".")]

on_gpu = getattr(pytest.mark, PLATFORM.vendor) if ON_GPU else pytest.mark.skip("needs a GPU")
here = [on_gpu] if ON_GPU else []
MODES = [
    pytest.param({"dynamic": True}, id="dynamic", marks=here),
    pytest.param({}, id="fixed", marks=[*here, *([] if ON_GPU else [pytest.mark.slow])]),
    pytest.param({"mode": "reduce-overhead"}, id="graphs", marks=on_gpu),
]


def _small_cases(op: Operator[Any, Any]) -> list[Case]:
    return [case for case in op.all_cases() if not case.large]


def _first_case(op: Operator[Any, Any]) -> Case:
    """Returns the first small case with nonempty outputs."""
    small = _small_cases(op)
    return next((c for c in small if all(t.numel() for _, t in tensor_arguments(op.parameters, op.complete(c.build())))), small[0])


def _copied(op: Operator[Any, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with clones of the tensors to which the call writes."""
    return {n: v.clone() if n in (*op.outs, *op.mutates) and v is not None else v for n, v in arguments.items()}


def _same(op: Operator[Any, Any], arguments: dict[str, Any]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Returns a function that asserts that two results are equal: bit by bit if the kernel is deterministic, else within a
    tolerance."""
    chosen = op.function.explain(**arguments).chosen
    if "determinism" not in chosen.tags and ON_GPU:
        return lambda one, other: torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2, equal_nan=True)

    def same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
        left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
        assert torch.equal(left, right)

    return same_bits


def _check(op: Operator[Any, Any], case: Case, options: dict[str, Any], opcheck: Any) -> None:
    arguments = op.complete(case.build(default_device()))
    eager = _copied(op, arguments)
    wanted = lowering.as_list(op.function(**eager))
    if op.padded is not None and wanted and op.counted_rows(arguments) != wanted[0].shape[0]:
        pytest.skip("the rows behind the last sequence may have any values")
    provided = {**arguments, **{name: torch.zeros_like(t) for name, t in op.named(arguments, wanted).items()}}
    same = _same(op, arguments)
    if options.get("dynamic") and not ON_GPU:
        opcheck(op.function, arguments, compiled=True)
        opcheck(op.function, provided, compiled=True)

    torch._dynamo.reset()
    compiled = torch.compile(lambda one, two: (op.function(**one), op.function(**two)), fullgraph=True, **options)
    for _ in range(3 if "mode" in options else 1):  # the second call records a graph, and the third one replays it
        traced = _copied(op, arguments), _copied(op, provided)
        for given, results in zip(traced, compiled(*traced), strict=True):
            for one, other in zip(lowering.as_list(results), wanted, strict=True):
                assert one.dtype == other.dtype
                assert one.shape == other.shape
                same(one, other)
            for name in op.mutates:
                if arguments[name] is not None:
                    same(given[name], eager[name])
        for name, output in op.named(arguments, wanted).items():
            same(traced[1][name], output)


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_an_operator_is_compiled(op: Operator[Any, Any], options: dict[str, Any], opcheck: Any) -> None:
    _check(op, _first_case(op), options, opcheck)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "case"), [pytest.param(op, case, id=f"{op.mode}-{case.name}") for op in OPERATORS for case in _small_cases(op)]
)
def test_every_case_is_compiled(op: Operator[Any, Any], case: Case, opcheck: Any) -> None:
    _check(op, case, {"dynamic": True}, opcheck)


class Layer(torch.nn.Module):
    """A decoder layer of operators. PyTorch's own operations between them can be fused by Inductor."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, device: torch.device) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads

        def weight(*shape: int) -> torch.nn.Parameter:
            drawn = torch.randn(shape, device=device) / shape[0] ** 0.5
            return torch.nn.Parameter(drawn.to(torch.bfloat16), requires_grad=False)

        self.norm, self.post_norm = weight(hidden), weight(hidden)
        self.qkv, self.o = weight(hidden, (heads + 2 * kv_heads) * self.head_dim), weight(hidden, hidden)
        self.gate_up, self.down = weight(hidden, 4 * hidden), weight(2 * hidden, hidden)
        self.sinks = torch.nn.Parameter(torch.randn(heads, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        qkv = tk.mm(tk.rmsnorm(x * 0.5, self.norm), self.qkv)
        q, k, v = qkv.view(tokens, -1, self.head_dim).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        attended = tk.mha_prefill(q, k, v, cu_seqlens, window_left=7, sinks=self.sinks)
        normed, residual = tk.rmsnorm(tk.mm(attended.view(tokens, -1), self.o), self.post_norm, residual=x)
        activated = tk.silu_and_mul(tk.mm(normed, self.gate_up))
        return tk.mm(activated, self.down) + residual.sigmoid()


@pytest.mark.parametrize("options", MODES)
def test_a_model_is_compiled_in_one_graph(options: dict[str, Any]) -> None:
    device = default_device()
    torch.manual_seed(0)
    layer = Layer(128, 2, 1, device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, **options)
    for tokens in (9, 9, 9, 17, 30):
        x = torch.randn(tokens, 128, device=device).to(torch.bfloat16)
        cu_seqlens = torch.tensor([0, 4, tokens], dtype=torch.int32, device=device)
        # Inductor keeps float32 between operations, while eager PyTorch rounds to bfloat16 after each.
        torch.testing.assert_close(compiled(x, cu_seqlens), layer(x, cu_seqlens), rtol=3e-2, atol=3e-2)

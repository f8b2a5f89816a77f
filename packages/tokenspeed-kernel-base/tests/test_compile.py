"""Tests operators under torch.compile, export and fake tensors, with a declaration that has every kind of parameter.

The core's `test_declarations.py` compiles the real operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tokenspeed_kernel_base.lowering import count_outputs, schema
from tokenspeed_kernel_base.selection import kernel_override


@dataclasses.dataclass(frozen=True)
class Weights:
    main: Tensor
    bias: Tensor | None = None
    blocks: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class Plan:
    size: int
    kind: str = "plain"
    shape: tuple[int, ...] = (3,)


def everything(
    x: Tensor,
    weights: Weights,
    plan: Plan,
    count: int = 1,
    factor: float | None = None,
    flag: bool = False,
    mode: str = "add",
    dtype: torch.dtype | None = None,
    blocks: tuple[int, ...] = (1,),
    lengths: list[int] | None = None,
    cache: Tensor | None = None,
    out: Tensor | None = None,
    total_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    assert isinstance(blocks, tuple)
    assert isinstance(weights.blocks, tuple)
    assert isinstance(plan.shape, tuple)
    result = x * weights.main * count * (1.0 if factor is None else factor) + sum(blocks) + sum(weights.blocks) + plan.size
    if weights.bias is not None:
        result = result + weights.bias
    if cache is not None:
        cache.add_(1)
    result = result.to(dtype or x.dtype)
    return (result, result.sum(-1)) if flag else result


@pytest.fixture
def op(declare: Callable[..., Any]) -> Any:
    function = declare(everything, formats=("x",), outs=("out", "total_out"), mutates=("cache",), hints=("lengths",))

    @function.fake
    def _(x: Tensor, dtype: torch.dtype | None, flag: bool) -> Any:
        result = torch.empty_like(x, dtype=dtype or x.dtype)
        return (result, result.new_empty(x.shape[:-1])) if flag else result

    return function


W = Weights(torch.arange(3.0), torch.ones(3), (2, 3))
CALLS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "options": {"count": 3, "factor": 0.5, "mode": "mul", "dtype": torch.float64, "blocks": (4, 5)},
    "two outputs": {"flag": True},
    "hint": {"lengths": [2, 2]},
    "another plan": {"plan": Plan(7, "other", (1, 2))},
    "no bias": {"weights": Weights(torch.ones(3))},
}


def _same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_agree_with_eager_ones(op: Any, name: str) -> None:
    arguments = {"weights": W, "plan": Plan(1), **CALLS[name]}
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x, **arguments), fullgraph=True)
    for x in (torch.randn(4, 3), torch.randn(5, 3)):
        _same(compiled(x), op(x, **arguments))


@pytest.mark.parametrize("given", [("out",), ("total_out",), ("out", "total_out")])
def test_provided_outputs_in_compiled_code(op: Any, given: tuple[str, ...]) -> None:
    x = torch.randn(4, 3)
    wanted = op(x, W, Plan(1), flag=True)
    outputs = {"out": torch.empty(4, 3), "total_out": torch.empty(4)}
    outputs = {name: outputs[name] for name in given}
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, outputs: op(x, W, Plan(1), flag=True, **outputs), fullgraph=True)
    _same(compiled(x, outputs), wanted)
    for name, output in outputs.items():
        _same(output, wanted[("out", "total_out").index(name)])


def test_mutation_in_compiled_code(op: Any) -> None:
    cache = torch.zeros(2)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def step(x: Tensor, cache: Tensor) -> Tensor:
        op(x, W, Plan(1), cache=cache)
        return cache * 2

    assert step(torch.ones(1, 3), cache).tolist() == [2.0, 2.0]
    assert cache.tolist() == [1.0, 1.0]


def test_dynamic_shapes_do_not_recompile(op: Any) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x: op(x, W, Plan(1)), fullgraph=True, backend=counter, dynamic=True)
    for n in (2, 3, 7):
        x = torch.randn(n, 3)
        _same(compiled(x), op(x, W, Plan(1)))
    assert counter.frame_count == 1


def test_opcheck(op: Any) -> None:
    values = (
        torch.randn(4, 3),
        W.main,
        W.bias,
        W.blocks,
        None,
        1,
        "plain",
        (3,),
        2,
        0.5,
        True,
        "add",
        None,
        (1, 2),
        torch.zeros(2),
        None,
        None,
    )
    torch.library.opcheck(getattr(torch.ops.tokenspeed_kernel, op.__name__).out, (*values, None, None))


def test_override_and_solution_reach_compiled_calls(op: Any) -> None:
    x = torch.randn(4, 3)
    for keywords in ({"override": f"reference_{op.__name__}"}, {"solution": "reference"}):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, k=keywords: op(x, W, Plan(1), **k), fullgraph=True)
        _same(compiled(x), op(x, W, Plan(1)))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no kernel named absent"):
        torch.compile(lambda x: op(x, W, Plan(1), override="absent"), fullgraph=True)(x)
    with kernel_override("testing", op.__name__, f"reference_{op.__name__}"):
        torch._dynamo.reset()
        torch.compile(lambda x: op(x, W, Plan(1)), fullgraph=True)(x)


def test_wrong_calls_are_found_in_compiled_code_too(op: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, out: op(x, W, Plan(1), out=out), fullgraph=True)
    with pytest.raises(Exception, match="out must have shape"):
        compiled(torch.ones(4, 3), torch.empty(7))


def test_export(op: Any) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return op(x, W, Plan(1), flag=True)

    x = torch.randn(4, 3)
    program = torch.export.export(Module(), (x,))
    assert f"tokenspeed_kernel.{op.__name__}" in str(program.graph)
    _same(program.module()(x), op(x, W, Plan(1), flag=True))


def test_the_schema(op: Any) -> None:
    packet = getattr(torch.ops.tokenspeed_kernel, op.__name__)
    text = str(packet.out._schema)
    assert "Tensor(a15!)? out, Tensor(a16!)? total_out, str? override, str? solution) -> (Tensor, Tensor)" in text
    assert "Tensor weights_main, Tensor? weights_bias, SymInt[] weights_blocks, SymInt? weights_handle" in text
    assert "lengths" not in text
    assert not packet.default._schema.is_mutable
    assert {a.name for a in packet.out._schema.arguments} - {a.name for a in packet.default._schema.arguments} == {
        "cache", "out", "total_out",
    }  # fmt: skip
    assert schema("f", (), (), 0) == "f(str? override, str? solution) -> ()"
    assert count_outputs(everything) == 2


def add_one(x: Tensor, states: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    if states is not None:
        states.add_(x)
    return x + 1


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("given", [(), ("states",), ("out",), ("states", "out")], ids=" ".join)
def test_one_output_in_inductors_code(declare: Callable[..., Any], given: tuple[str, ...], dynamic: bool | None) -> None:
    """Inductor rejects an overload that returns one tensor and mutates no argument, if the overload's schema marks arguments as
    mutable."""
    function = declare(add_one, formats=("x",), mutates=("states",))
    function.fake(lambda x: torch.empty_like(x))
    x = torch.randn(4, 3)
    tensors = {name: torch.zeros_like(x) for name in given}
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, tensors: function(2 * x, **tensors) * 2, fullgraph=True, dynamic=dynamic)
    _same(compiled(x, tensors), (2 * x + 1) * 2)
    for name, wanted in (("states", 2 * x), ("out", 2 * x + 1)):
        if name in tensors:
            _same(tensors[name], wanted)

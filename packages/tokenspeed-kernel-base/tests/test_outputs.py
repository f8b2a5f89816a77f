"""Tests operators whose optional outputs precede other outputs. The ``outputs`` hook names the outputs of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel

X, WEIGHT = torch.arange(6.0).reshape(2, 3), torch.ones(3)
SOLUTIONS = pytest.mark.parametrize("solution", [None, "reference", "composed", "fused"])


def parts(
    x: Tensor,
    weight: Tensor,
    scaled: bool = True,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Returns the normalised rows; with a scale also their sums; and with a residual also the result of the addition."""
    made = [rmsnorm(x, weight)]
    if scaled:
        made.append(x.sum(-1))
    if residual is not None:
        made.append(x + residual)
    return made[0] if len(made) == 1 else tuple(made)  # type: ignore[return-value]


def made_by(scaled: bool, residual: Any) -> list[str]:
    return ["out", *["scale_out"] * scaled, *["residual_out"] * (residual is not None)]


@pytest.fixture
def several(declare: Callable[..., Any]) -> Any:
    """Declares the operator ``parts``, with a kernel that writes to all provided outputs."""
    function = declare(parts, formats=("x",), outs=("out", "scale_out", "residual_out"), varying=("rows",), parts=(rmsnorm,))
    function.outputs(made_by)
    op = function.operator

    @function.check
    def _(check: Any, x: Tensor) -> None:
        check.tensor("x", x, "rows hidden", torch.float32)

    @function.fake
    def _(x: Tensor, scaled: bool, residual: Tensor | None) -> Any:
        made = [torch.empty_like(x), *[x.new_empty(len(x))] * scaled, *[torch.empty_like(x)] * (residual is not None)]
        return made[0] if len(made) == 1 else tuple(made)

    def fused(
        x: Tensor,
        weight: Tensor,
        scaled: bool,
        residual: Tensor | None,
        out: Tensor | None,
        scale_out: Tensor | None,
        residual_out: Tensor | None,
    ) -> Any:
        return op.reference(x, weight, scaled, residual, out, scale_out, residual_out)

    register_kernel("testing", op.mode, name=f"fused_{op.mode}", solution="fused", signatures=None)(fused)
    yield function
    KernelRegistry.get().unregister(f"fused_{op.mode}")


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@SOLUTIONS
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rows", [2, 0])
def test_each_output_is_written_where_its_name_says(
    several: Any, scaled: bool, added: bool, rows: int, solution: str | None
) -> None:
    options: dict[str, Any] = {"scaled": scaled, "residual": X[:rows] + 1 if added else None, "solution": solution}
    names = made_by(scaled, options["residual"])
    wanted = as_tuple(several(X[:rows], WEIGHT, **options))
    assert len(wanted) == len(names)
    for given in ([names[-1]], names):
        outs = {name: torch.zeros_like(output) for name, output in zip(names, wanted, strict=True) if name in given}
        for _ in range(2):  # first on the slow path, then on the fast path
            for name, got, expected in zip(names, as_tuple(several(X[:rows], WEIGHT, **options, **outs)), wanted, strict=True):
                assert got is outs.get(name, got)
                torch.testing.assert_close(got, expected)


def test_an_output_that_a_call_does_not_make_is_refused(several: Any) -> None:
    with pytest.raises(ValueError, match=r"scale_out must be None, .* no such output"):
        several(X, WEIGHT, False, X, scale_out=torch.zeros(2))
    with pytest.raises(ValueError, match="residual_out must be None"):
        several(X, WEIGHT, residual_out=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"residual_out must have shape \[2, 3\]"):
        several(X, WEIGHT, False, X, residual_out=torch.zeros(3, 3))


@pytest.mark.parametrize("given", [(), ("residual_out",), ("out", "residual_out")])
def test_outputs_are_found_by_name_when_a_call_is_compiled(several: Any, given: tuple[str, ...], opcheck: Any) -> None:
    outs = {name: torch.zeros(2, 3) for name in given}
    opcheck(several, several.operator.complete({"x": X, "weight": WEIGHT, "scaled": False, "residual": X, **outs}))
    compiled = torch.compile(lambda x, **outs: several(x, WEIGHT, False, x, **outs), fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(X, **outs), several(X, WEIGHT, False, X), strict=True):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(outs.get("residual_out", X + X), X + X)


def test_without_the_hook_the_first_ones_are_made(several: Any) -> None:
    assert several.operator.outputs_of({"scaled": False, "residual": X}) == ("out", "residual_out")
    assert rmsnorm.operator.outputs_of({}) == ("out", "residual_out")
    assert [*rmsnorm.operator.named({}, [X])] == ["out"]

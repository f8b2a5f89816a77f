"""An operator and its kernels for the tests of tuning. Run as a program, the module prints the kernels that are selected for 2, 64
and 3 rows."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from tokenspeed_kernel.workbench import tuned
from tokenspeed_kernel.workbench.tuning import tune_case
from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.registry import register_kernel


@operator("testing", "lab", formats=("x",), traits={"width": int}, varying=("rows",))
def lab(x: Tensor, out: Tensor | None = None) -> Tensor:
    """``x + 1`` of ``[rows, width]``."""
    return x + 1


@lab.traits
def _(x: Tensor) -> dict[str, object]:
    return {"width": x.shape[1]}


@lab.check
def _(check: Checker, x: Tensor) -> None:
    check.tensor("x", x, "rows width", FLOATS)


@lab.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@lab.cases
def _() -> list[Case]:
    return [Case(f"{rows} rows", lambda draw, rows=rows: {"x": draw.normal(rows, 4)}) for rows in (2, 64)]


@lab.cost
def _(x: Tensor) -> Cost:
    return Cost(flops=x.numel(), bytes=8 * x.numel())


def register(*names: str) -> None:
    """Declares the kernels with these names; the first has the highest priority."""
    for place, name in enumerate(names):
        tunables = {"wait": [300, 1000], "wrong": [False, True]} if name == "settable" else None
        register_kernel(
            "testing",
            "lab",
            name=name,
            solution="lab",
            signatures=None,
            traits={"width": any},
            priority=10 - place,
            tunables=tunables,
        )(f"lab_kernels:{name}")


def tune_all(budget_s: float = 0.3) -> None:
    for case in lab.operator.all_cases():
        tune_case("testing.lab", case, "cpu", budget_s=budget_s)


def serving(rows: int) -> str:
    explanation = lab.explain(torch.ones(rows, 4))
    assert explanation.chosen is not None
    return explanation.chosen.name


def timekeepers() -> list[ModuleType]:
    """The modules that read the clock when kernels are measured."""
    return [import_module(f"tokenspeed_kernel.workbench.{name}") for name in ("benchmark.timing", "tuning.search")]


def use_clock() -> None:
    """Makes measurements use the laboratory's clock until this process ends."""
    for module in timekeepers():
        module.time = import_module("lab_clock").clock  # type: ignore[attr-defined]


if __name__ == "__main__":
    use_clock()
    register("steady", "growing")
    if "tune" in sys.argv:
        tune_all()
    print(serving(2), serving(64), serving(3))
    print(*lab.explain(torch.ones(2, 4)).notes, sep="\n")
    print(len(tuned.all_entries(lab.explain(torch.ones(2, 4)).request.platform)))

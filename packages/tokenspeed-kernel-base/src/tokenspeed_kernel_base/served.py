"""Code that the engines' plugins share: finds the kernel of a call, and makes the receipt that tells which layers run on which
kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel_base.explanation import NoKernelFoundError
from tokenspeed_kernel_base.platform import PlatformInfo, platform_of
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec


class NotServedError(ValueError):
    """No kernel of this project supports a layer or a batch; the message says why."""


def kernel_for(function: Callable[..., Any], arguments: dict[str, Any]) -> KernelSpec:
    """Returns the kernel that would run a call inside an engine's step.

    Args:
        function: a public operator, with ``explain``.
        arguments: the call's arguments. Values are not read.

    Raises:
        NotServedError: the operator rejects the call, or no kernel is eligible. On a GPU, the reference and kernels that wait for
            the device count as not eligible, because engines capture their steps in CUDA graphs.
    """
    name = getattr(function, "__name__", "")
    try:
        explanation = function.explain(**arguments)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:  # the operator's own checks reject the call
        raise NotServedError(f"{name}: {error}") from error
    chosen: KernelSpec | None = explanation.chosen
    if chosen is None:
        raise NotServedError(str(explanation))
    if _blocks_graphs(chosen, explanation.request.platform):
        raise NotServedError(f"{name}: {chosen.name} waits for the device\n{explanation}")
    return chosen


def plan_for(function: Any, *sizes: int, device: torch.device, **options: Any) -> Any:
    """Plans a layer's weights for a kernel that can run inside an engine's step. Returns the plan.

    Args:
        function: a public operator with ``plan``, such as `moe_apply`.
        sizes: the sizes that ``plan`` takes.
        device: the layer's device.
        options: further arguments of ``plan``.

    Raises:
        NotServedError: the operator rejects the arguments, or no kernel is eligible. As in `kernel_for`, kernels that wait for the
            device count as not eligible.
    """
    try:
        plan = function.plan(*sizes, device=device, **options)
    except (NoKernelFoundError, TypeError, ValueError) as error:
        raise NotServedError(str(error)) from error
    spec, platform = KernelRegistry.get().get_by_name(plan.kernel), platform_of(device)
    if _blocks_graphs(spec, platform):
        explanation = function.operator.consider_plan(plan, platform, solution=None, override=None, package=None)
        raise NotServedError(f"only {spec.name} is eligible, and it waits for the device:\n{explanation}")
    return plan


def _blocks_graphs(spec: KernelSpec, platform: PlatformInfo) -> bool:
    """Whether a kernel synchronises the host with a GPU. A CUDA graph cannot capture such a kernel."""
    return not platform.is_cpu and ("waits" in spec.tags or spec.solution == "reference")


@dataclass(frozen=True)
class Row:
    """One row of a receipt: a kind of layer of a model, and the kernels that run the layers of this kind.

    Attributes:
        part: the part of the plugin that handles these layers, such as ``"attention"`` or ``"norms"``.
        kind: the layers' class, and the layers' options, such as the window.
        layers: number of layers of this kind.
        kernels: the layer's operators, each with the kernel that is selected for one token; empty if the engine's own code runs.
        reason: why the engine's own code runs; empty if this project's kernels run.
    """

    part: str
    kind: str
    layers: int
    kernels: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Receipt:
    """Tells which layers of a model run on which kernels, and why other layers run the engine's own code. ``str()`` makes a table.

    Attributes:
        rows: one `Row` for each kind of layer.
        engine: the engine's name, for the table.
    """

    rows: tuple[Row, ...]
    engine: str

    def served(self, part: str) -> bool:
        """Returns True if a part of the plugin has layers, and all of these layers run on this project's kernels."""
        rows = [row for row in self.rows if row.part == part]
        return bool(rows) and all(row.kernels for row in rows)

    def __str__(self) -> str:
        head = ("part", "layers", "kind", "runs on")
        cells = [(row.part, str(row.layers), row.kind, self.outcome(row)) for row in self.rows]
        widths = [max(len(line[column]) for line in (head, *cells)) for column in range(3)]
        return "\n".join(
            "  ".join((*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[3])) for line in (head, *cells)
        )

    def outcome(self, row: Row) -> str:
        """Returns a row's kernels, or the reason why the engine's own code runs, in one line."""
        if row.kernels:
            return ", ".join(row.kernels)
        return f"{self.engine}'s own, because {' | '.join(line.strip() for line in row.reason.splitlines())}"

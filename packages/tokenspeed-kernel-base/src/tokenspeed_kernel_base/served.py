"""What plugins of engines share: which kernel would run a call, and the receipt of what runs on which kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed_kernel_base.spec import KernelSpec


class NotServedError(ValueError):
    """No kernel of ours supports a layer or a batch; the message says why."""


def kernel_for(function: Callable[..., Any], arguments: dict[str, Any]) -> KernelSpec:
    """Returns the kernel that runs a call inside an engine's step.

    Args:
        function: a public operator, with ``explain``.
        arguments: the call's arguments. Values are not read.

    Raises:
        NotServedError: the operator rejects the call, or no kernel is eligible. On a GPU, references and kernels that wait for the
            device count as not eligible, because engines capture their steps in graphs.
    """
    name = getattr(function, "__name__", "")
    try:
        explanation = function.explain(**arguments)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:  # the operator's own checks reject the call
        raise NotServedError(f"{name}: {error}") from error
    chosen: KernelSpec | None = explanation.chosen
    if chosen is None:
        raise NotServedError(str(explanation))
    if not explanation.request.platform.is_cpu and ("waits" in chosen.tags or chosen.solution == "reference"):
        raise NotServedError(f"{name}: {chosen.name} waits for the device\n{explanation}")
    return chosen


@dataclass(frozen=True)
class Row:
    """A kind of layer.

    Attributes:
        part: the plugin's part, such as ``"attention"`` or ``"norms"``.
        kind: the layers' class, and options such as the window.
        layers: number of layers of this kind.
        kernels: the operators, with the kernels that the core selects for one token; empty if the engine's own code runs.
        reason: the reason why the engine's own code runs; empty if our kernels run.
    """

    part: str
    kind: str
    layers: int
    kernels: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Receipt:
    """Which layers run on which kernels, and why other layers do not; ``str()`` is a table.

    Attributes:
        rows: one for each kind of layer.
        engine: the engine's name, for the table.
    """

    rows: tuple[Row, ...]
    engine: str

    def served(self, part: str) -> bool:
        """Returns whether a part has layers, and all of these layers run on our kernels."""
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
        """Returns a row's kernels, or the reason for the engine's own code, in one line."""
        if row.kernels:
            return ", ".join(row.kernels)
        return f"{self.engine}'s own, because {' | '.join(line.strip() for line in row.reason.splitlines())}"

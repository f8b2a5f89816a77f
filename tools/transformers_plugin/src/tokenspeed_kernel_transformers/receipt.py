"""The receipt: which layers run on which kernels, and why other layers do not run on our kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A kind of layer.

    Attributes:
        part: ``"attention"``, ``"experts"``, ``"norms"``, ``"gated MLPs"`` or ``"mixers"``.
        kind: the layers' class, and options such as the window.
        layers: number of layers of this kind.
        kernels: the operators, with the kernels that the core selects for one token; empty if transformers' own code runs.
        reason: the reason why transformers' own code runs; empty if our kernels run.
    """

    part: str
    kind: str
    layers: int
    kernels: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Receipt:
    """The result of `enable` for a model; ``str()`` is a table.

    Attributes:
        rows: one for each kind of layer.
    """

    rows: tuple[Row, ...]

    def served(self, part: str) -> bool:
        """Returns whether a part has layers, and all of these layers run on our kernels."""
        rows = [row for row in self.rows if row.part == part]
        return bool(rows) and all(row.kernels for row in rows)

    def __str__(self) -> str:
        head = ("part", "layers", "kind", "runs on")
        cells = [(row.part, str(row.layers), row.kind, _outcome(row)) for row in self.rows]
        widths = [max(len(line[column]) for line in (head, *cells)) for column in range(3)]
        return "\n".join(
            "  ".join((*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[3])) for line in (head, *cells)
        )


def _outcome(row: Row) -> str:
    if row.kernels:
        return ", ".join(row.kernels)
    return f"transformers' own, because {' | '.join(line.strip() for line in row.reason.splitlines())}"

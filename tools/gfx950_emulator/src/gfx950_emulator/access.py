"""Description of a memory instruction's access."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """A memory instruction, for wait counters, sanitizer, counters and timing.

    Attributes:
        space: ``"global"``, ``"lds"``, ``"scalar"``, ``"scratch"`` or ``"dma"`` (global memory to LDS).
        direction: ``"load"``, ``"store"``, ``"atomic"``, or ``"permute"`` (LDS instructions that touch no memory).
        size: bytes per lane (of the whole instruction for scalar loads).
        counter: the wait counter that the access increments: ``"vmcnt"`` or ``"lgkmcnt"``.
    """

    space: str
    direction: str
    size: int
    counter: str

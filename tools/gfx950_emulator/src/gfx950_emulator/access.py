"""Describes the memory access of an instruction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """The memory access of an instruction, as wait counters, sanitizer, counters and timing need it.

    Attributes:
        space: ``"global"``, ``"lds"``, ``"scalar"``, ``"scratch"``, ``"flat"`` (one of the others for each
            lane) or ``"dma"`` (global memory to LDS).
        direction: ``"load"``, ``"store"``, ``"atomic"``, or ``"permute"`` (LDS instructions that touch no memory).
        size: bytes per lane; for scalar loads, bytes of the whole instruction.
        counter: the wait counter that the access increments: ``"vmcnt"`` or ``"lgkmcnt"``.
    """

    space: str
    direction: str
    size: int
    counter: str

"""A kernel bound for execution: basic blocks of operations, and the control flow between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gfx950_emulator.assembly import Assembly, Instruction, parse
from gfx950_emulator.binding import Bound
from gfx950_emulator.decode import decode

ALWAYS = -1  # a register number that is always watched: the sanitizer handles all instructions with it (memory, waits)


@dataclass(frozen=True)
class Block:
    """A basic block: instructions ``[start, end)`` without a branch or barrier inside.

    Attributes:
        body: the functions that run the instructions, without the closing branch, barrier or end.
        checked: the same for the sanitizer: (function, registers that the instruction touches, index of the instruction).
        close: the closing instruction's `Bound`, or None if control falls through to the next block.
        next: index of the instruction after the block.
    """

    start: int
    end: int
    body: tuple[Any, ...]
    checked: tuple[Any, ...]
    close: Bound | None
    next: int


class Program:
    """A kernel's assembly with every instruction bound.

    Attributes:
        assembly: the kernel as written.
        bound: the `Bound` of each instruction.
        blocks: index of a block's first instruction -> the block.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.bound = [decode(instruction, assembly) for instruction in assembly.instructions]
        self._index = {id(bound): i for i, bound in enumerate(self.bound)}
        self.vectors = max(
            [assembly.vgprs + assembly.agprs]
            + [id_ + 1 for bound in self.bound for id_ in (*bound.writes, *bound.reads) if id_ < 1024]
        )
        self.leaders = self._leaders()
        self.blocks: dict[int, Block] = {}
        for start in self.leaders:
            self.blocks[start] = self._block(start)

    def instruction_of(self, bound: Bound) -> Instruction:
        """Returns the instruction that a `Bound` was made from."""
        return self.assembly.instructions[self._index[id(bound)]]

    def mnemonic_of(self, bound: Bound) -> str:
        return self.instruction_of(bound).mnemonic

    def _leaders(self) -> list[int]:
        leaders = {self.assembly.entry}
        # Code may enter a function through a register, so every function begins a block.
        leaders |= {index for label, index in self.assembly.labels.items() if not label.startswith(".L")}
        for index, bound in enumerate(self.bound):
            if bound.unit in ("branch", "barrier", "end"):
                leaders.add(index + 1)
            if bound.target is not None:
                leaders.add(bound.target)
        return sorted(leader for leader in leaders if leader < len(self.bound))

    def _block(self, start: int) -> Block:
        leaders = set(self.leaders)
        index, body, checked, close = start, [], [], None
        while index < len(self.bound):
            bound = self.bound[index]
            if bound.unit in ("branch", "barrier", "end"):
                close = bound
                index += 1
                break
            body.append(bound.run)
            touched = {*bound.reads, *bound.writes}
            if bound.memory is not None or bound.unit == "wait":
                touched.add(ALWAYS)
            checked.append((bound.run, frozenset(touched), index))
            index += 1
            if index in leaders:
                break
        return Block(start, index, tuple(body), tuple(checked), close, index)


@lru_cache(maxsize=256)
def load(text: str) -> Program:
    """Parses and binds a kernel's assembly text; the result is memoised."""
    return Program(parse(text))

"""What the sampling kernels share: rows cut into spans of tokens, and spans into groups.

A program works on one span of one row, so that few long rows fill a device too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, multiprocessors, next_power_of_2

# Programs a multiprocessor: enough that loads are in flight while others compute, and that the last ones to end are few.
_PROGRAMS_PER_MULTIPROCESSOR = 16
_SHORTEST_SPAN, _LONGEST_SPAN = 2048, 16384
# Spans begin at multiples of it, so that loads are wide.
_SPAN_UNIT = 512


@dataclass(frozen=True)
class Spans:
    """How rows are cut.

    Attributes:
        count: spans a row.
        length: tokens a span; the last one of a row may be shorter.
    """

    count: int
    length: int

    @property
    def block(self) -> int:
        """`count` as a power of two."""
        return int(next_power_of_2(self.count))


def spans_of(logits: Tensor) -> Spans:
    """The cut for logits ``[rows, vocab]``."""
    rows, vocab = logits.shape
    wanted = next_power_of_2(multiprocessors(logits.device) * _PROGRAMS_PER_MULTIPROCESSOR // rows // 2 + 1)
    length = min(max(cdiv(vocab, wanted), _SHORTEST_SPAN), _LONGEST_SPAN)
    length = cdiv(length, _SPAN_UNIT) * _SPAN_UNIT
    return Spans(cdiv(vocab, length), length)


# Bytes that a program that finds groups' maxima takes of a row at a time, and programs a multiprocessor below which spans are cut
# shorter.
_BLOCK_BYTES = 4096
_PROGRAMS = 8
_SPAN_OF_GROUPS = 8192
# Tokens of a group where that makes at most _MOST_GROUPS of a row.
_GROUP = 32
_MOST_GROUPS = 8192


@dataclass(frozen=True)
class Groups:
    """How a row is cut into groups, whose largest logits tell which of them to read again.

    Attributes:
        spans: programs a row.
        block: tokens that a program takes at a time.
        blocks: that a program takes, a power of two.
        run: neighbouring tokens of a block that a group has, a power of two; it has a run of every block of its span.
    """

    spans: int
    block: int
    blocks: int
    run: int

    @property
    def length(self) -> int:
        """Tokens a span."""
        return self.block * self.blocks

    @property
    def size(self) -> int:
        """Tokens a group."""
        return self.blocks * self.run

    @property
    def count(self) -> int:
        """Groups of a row."""
        return self.spans * (self.block // self.run)


def groups_of(logits: Tensor) -> Groups:
    """The cut for logits ``[rows, vocab]``."""
    rows, vocab = logits.shape
    block = _BLOCK_BYTES // logits.element_size()
    blocks = _SPAN_OF_GROUPS // block
    while blocks > 2 and rows * cdiv(vocab, block * blocks) < _PROGRAMS * multiprocessors(logits.device):
        blocks //= 2
    size = _GROUP * next_power_of_2(cdiv(vocab, _GROUP * _MOST_GROUPS))
    return Groups(cdiv(vocab, block * blocks), block, blocks, min(block, size // blocks))

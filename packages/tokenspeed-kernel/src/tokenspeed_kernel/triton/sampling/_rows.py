"""Splits rows into spans of tokens, and spans into groups, for all sampling kernels.

A program processes one span of one row, so that a few long rows also fill the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, next_power_of_2, sm_count_of

# Programs per SM/CU: enough to overlap loads with computation and to keep the tail of the launch short.
_PROGRAMS_PER_SM = 16
_SHORTEST_SPAN, _LONGEST_SPAN = 2048, 16384
# Spans start at multiples of this many tokens, so that loads can be vectorised.
_SPAN_MULTIPLE = 512


@dataclass(frozen=True)
class Spans:
    """The split of each row into spans of tokens.

    Attributes:
        count: spans per row.
        length: tokens per span; a row's last span may be shorter.
    """

    count: int
    length: int

    @property
    def block(self) -> int:
        """Returns `count` rounded up to a power of two."""
        return int(next_power_of_2(self.count))


def spans_of(logits: Tensor) -> Spans:
    """Returns the split into spans for logits ``[rows, vocab]``."""
    rows, vocab = logits.shape
    wanted = next_power_of_2(sm_count_of(logits.device) * _PROGRAMS_PER_SM // rows // 2 + 1)
    length = min(max(cdiv(vocab, wanted), _SHORTEST_SPAN), _LONGEST_SPAN)
    length = cdiv(length, _SPAN_MULTIPLE) * _SPAN_MULTIPLE
    return Spans(cdiv(vocab, length), length)


# For the kernel that finds group maxima: bytes of a row per block, and the number of programs per SM/CU below which spans become
# shorter.
_BLOCK_BYTES = 4096
_PROGRAMS = 8
_SPAN_OF_GROUPS = 8192
# Tokens per group, unless a row would have more than _MOST_GROUPS groups.
_GROUP = 32
_MOST_GROUPS = 8192


@dataclass(frozen=True)
class Groups:
    """The split of a row into groups. The group maxima tell which groups must be read again.

    A group consists of one run of neighbouring tokens in each block of its span.

    Attributes:
        spans: spans (programs) per row.
        block: tokens per block, which a program loads at once.
        blocks: number of blocks in each span, a power of two.
        run: tokens per run, a power of two.
    """

    spans: int
    block: int
    blocks: int
    run: int

    @property
    def length(self) -> int:
        """Returns the number of tokens per span."""
        return self.block * self.blocks

    @property
    def size(self) -> int:
        """Returns the number of tokens per group."""
        return self.blocks * self.run

    @property
    def count(self) -> int:
        """Returns the number of groups (of tokens) per row."""
        return self.spans * (self.block // self.run)


def groups_of(logits: Tensor) -> Groups:
    """Returns the split into groups for logits ``[rows, vocab]``."""
    rows, vocab = logits.shape
    block = _BLOCK_BYTES // logits.element_size()
    blocks = _SPAN_OF_GROUPS // block
    while blocks > 2 and rows * cdiv(vocab, block * blocks) < _PROGRAMS * sm_count_of(logits.device):
        blocks //= 2
    size = _GROUP * next_power_of_2(cdiv(vocab, _GROUP * _MOST_GROUPS))
    return Groups(cdiv(vocab, block * blocks), block, blocks, min(block, size // blocks))

"""What the sampling kernels share: rows cut into spans of tokens, keys that sort like logits, and a row's extremes.

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

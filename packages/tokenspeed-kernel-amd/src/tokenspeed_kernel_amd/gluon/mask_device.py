"""Attention masks: which keys a query row sees."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.aggregate
class Visible:
    """The key positions that each row of a tile sees.

    Attributes:
        begin, end: int32 [rows], the first visible key position of each row, and the position after its last.
        all_end: a position before which every row sees all keys that are inside its window.
        ends_differ: whether the last visible key differs between rows; otherwise ``end`` is unused, and every row sees the
            sequence's last key.
        windowed: whether there is a window; otherwise ``begin`` is unused, and every row sees the sequence's first key.
    """

    begin: gl.tensor
    end: gl.tensor
    all_end: gl.tensor
    ends_differ: gl.constexpr
    windowed: gl.constexpr


@gluon.jit
def hide_unseen(scores, visible, start, end, ENDS: gl.constexpr, LAST: gl.constexpr):
    """Masks the scores of the key block that begins at position ``start``: -inf where a row does not see a key.

    Args:
        visible: the keys that each row sees.
        end: a position from which on no row sees a key.
        ENDS: whether some row's ``visible.end`` may be in this block.
        LAST: whether ``end`` may be in this block.
    """
    if LAST or ENDS or visible.windowed:
        index = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        row_end = end
        if ENDS:
            row_end = visible.end
            if LAST:
                row_end = gl.minimum(row_end, end)
        if visible.windowed and (ENDS or LAST):
            # One unsigned comparison replaces two signed comparisons, because every comparison mask takes scalar registers. As
            # unsigned values, the negative distances of keys before the window are large.
            behind = index[None, :] - (visible.begin - start)[:, None]
            seen = behind.to(gl.uint32) < gl.maximum(row_end - visible.begin, 0).to(gl.uint32)[:, None]
        elif visible.windowed:
            seen = index[None, :] >= (visible.begin - start)[:, None]
        elif ENDS:
            seen = index[None, :] < (row_end - start)[:, None]
        else:
            seen = (index < end - start)[None, :]
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def hide_outside_band(scores, row, start, window_left, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr):
    """Masks the scores of the key block that begins at position ``start``: -inf where a row does not see a key.

    Used with MFMA instructions of 32 rows. Each row is one query token.

    Args:
        row: int32 [rows], the positions of the query tokens.
        CAUSAL: whether to hide the tokens after the query's own.
        WINDOWED: whether to hide the tokens more than ``window_left`` before the query's own.
    """
    if CAUSAL or WINDOWED:
        # In a lane's column indices, all bits except bit 2 are known at compile time. Bit 2 is the same for all columns of the
        # lane. With bit 2 moved to the other side of the comparison, the column indices become constants.
        column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))[None, :]
        newest = (row - start)[:, None] - (column & 4)
        if CAUSAL and WINDOWED:
            seen = ((column & ~4) <= newest) & ((column & ~4) >= newest - window_left)
        elif CAUSAL:
            seen = (column & ~4) <= newest
        else:
            seen = (column & ~4) >= newest - window_left
        scores = gl.where(seen, scores, float("-inf"))
    return scores

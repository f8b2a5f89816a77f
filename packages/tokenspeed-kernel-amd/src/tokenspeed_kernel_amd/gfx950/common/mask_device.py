"""Which keys a query row sees."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.aggregate
class Visible:
    """The positions that each row of a tile sees.

    Attributes:
        begin, end: int32 [rows], the first one and one beyond the last one.
        all_end: up to here no row ends.
        ends_differ: whether rows end at different positions; else ``end`` is not looked at, and all see everything.
        windowed: whether rows begin at different positions; else ``begin`` is not looked at.
    """

    begin: gl.tensor
    end: gl.tensor
    all_end: gl.tensor
    ends_differ: gl.constexpr
    windowed: gl.constexpr


@gluon.jit
def hide_unseen(scores, visible, start, end, ENDS: gl.constexpr, LAST: gl.constexpr):
    """Scores of the block that begins at position ``start``, with -inf where a row does not see a key.

    ENDS: rows may end in this block; LAST: ``end``, before which everything does, may be in it.
    """
    if LAST or ENDS or visible.windowed:
        place = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        row_end = end
        if ENDS:
            row_end = visible.end
            if LAST:
                row_end = gl.minimum(row_end, end)
        if visible.windowed and (ENDS or LAST):
            # One comparison, because its results fill scalar registers: without a sign, places before the window are large.
            behind = place[None, :] - (visible.begin - start)[:, None]
            seen = behind.to(gl.uint32) < gl.maximum(row_end - visible.begin, 0).to(gl.uint32)[:, None]
        elif visible.windowed:
            seen = place[None, :] >= (visible.begin - start)[:, None]
        elif ENDS:
            seen = place[None, :] < (row_end - start)[:, None]
        else:
            seen = (place < end - start)[None, :]
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def hide_outside_band(scores, row, start, window_left, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr):
    """Scores of the block that begins at position ``start``, with -inf where a row does not see a key.

    Row ``r`` [rows], a position, sees none behind itself, if CAUSAL, and ``window_left`` before itself, if WINDOWED. For matrix
    instructions of 32 rows.
    """
    if CAUSAL or WINDOWED:
        # A lane's columns are known but for bit 2, which is the same for all of them: split there, columns are constants.
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

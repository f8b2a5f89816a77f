"""Register layouts of vectors, an LDS layout, and the sizes from which layouts are computed."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def lanes_of_row(mfma):
    """Returns how many lanes hold the elements of one row. In a wave, this is 4 with 16-row MFMAs and 2 with 32-row MFMAs. The
    number is multiplied by the number of waves along a row."""
    return 64 // mfma.instr_shape[0] * mfma.warps_per_cta[1]


@gluon.constexpr_function
def everywhere_layout(size, warps):
    """Returns the layout of a vector of 64 or more elements that is replicated in every wave. A wave reduces such a vector without
    LDS, into scalar registers."""
    return gl.BlockedLayout([size // 64], [64], [warps], [0])


@gluon.constexpr_function
def log2(power):
    return power.bit_length() - 1


@gluon.constexpr_function
def key_width(dtype):
    """Returns the number of elements of ``dtype`` in 16 bytes, the width of a lane's LDS read of keys."""
    return 128 // dtype.primitive_bitwidth


@gluon.constexpr_function
def axis_layout(layout, rank, axis):
    """Returns the layout of a vector along axis ``axis`` of a tensor with ``rank`` axes and layout ``layout``."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def plain(rank):
    """Returns an LDS layout of ``rank`` axes without padding or swizzling; the last axis varies fastest."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))))

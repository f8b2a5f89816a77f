"""The CDNA3 (gfx942) instructions that this package's Gluon kernels use, and the register layouts that these instructions require.

`gfx950.instructions_device` has the same names for CDNA4, and more: gfx942 has neither MFMAs with scales, nor transposing LDS
reads, nor copies to LDS of more than 4 bytes per lane. Kernels import nothing else from Triton's ``amd`` namespace.

* ``mfma``: the matrix-core instructions. ``mfma_layout``: the register layout of their accumulators.
* ``buffer_load``, ``buffer_store``: memory accesses with a 32-bit offset and a bounds check.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3

VERSION = 3  # version of the MFMA instructions

mfma = cdna3.mfma
buffer_load, buffer_store = cdna3.buffer_load, cdna3.buffer_store


@gluon.constexpr_function
def mfma_layout(rows, warps):
    """Returns the register layout of the accumulators of 16-bit MFMAs with ``rows`` rows (16 or 32), whose rows are divided among
    waves. A lane holds groups of four adjacent columns of one row."""
    return gl.amd.AMDMFMALayout(VERSION, [rows, rows, 256 // rows], True, [warps, 1])

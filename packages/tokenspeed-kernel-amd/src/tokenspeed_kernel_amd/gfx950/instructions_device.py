"""The CDNA4 (gfx950) instructions that this package's Gluon kernels use, and the register layouts that these instructions require.

A port to another architecture provides a module with the same names. Kernels import nothing else from Triton's ``amd`` namespace.

* ``mfma``, ``mfma_scaled``: matrix-core instructions. ``mfma_scaled`` takes mxfp4, mxfp6 and fp8 operands with e8m0 scales.
* ``mfma_layout``, ``mfma_scale_layout``: register layouts of accumulators and of scales. ``padded_shared_layout``: an LDS layout
  that can be read as an MFMA operand without bank conflicts.
* ``buffer_load``, ``buffer_store``: memory accesses with a 32-bit offset and a bounds check.
* ``sched_barrier``: LLVM moves no instruction across it.
* ``wait_for_stores``: needed before a barrier after which a flag in global memory is set.
* ``copies``: asynchronous copies from global memory to LDS, and LDS loads before which the compiler inserts no wait for copies in
  flight.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy as copies
from triton.experimental.gluon.language.amd.hint import sched_barrier

__all__ = ["copies", "sched_barrier"]

VERSION = 4  # version of the MFMA instructions

mfma, mfma_scaled = cdna4.mfma, cdna4.mfma_scaled
mfma_scale_layout = cdna4.get_mfma_scale_layout
padded_shared_layout = cdna4.compute_efficient_padded_shared_layout
buffer_load, buffer_store = cdna4.buffer_load, cdna4.buffer_store


@gluon.jit
def wait_for_stores():
    """Waits until the wave's stores to global memory are complete in L2.

    ``gl.barrier`` does not wait for them, and a release by one wave waits for the stores of that wave only.
    """
    lane = gl.arange(0, 64 * gl.num_warps(), gl.BlockedLayout([1], [64], [gl.num_warps()], [0]))
    text: gl.constexpr = "s_waitcnt vmcnt(0)\n\tv_mov_b32 $0, $1"
    gl.inline_asm_elementwise(text, "=v,v,~{memory}", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def mfma_layout(shape, transposed, warps):
    """Returns the register layout of the accumulators of MFMAs of ``shape`` (m, n, k).

    Args:
        transposed: whether a lane holds adjacent columns of a row, not adjacent rows of a column.
        warps: numbers of waves along the rows and along the columns.
    """
    return gl.amd.AMDMFMALayout(VERSION, shape, transposed, warps)

"""Device code that the portable Triton kernels of several families share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
}
"""Triton's name of a dtype, for launchers that pass one to a kernel."""

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def wait_for_products() -> None:
    """Waits, on Hopper, until the matrix units are done with what they were given; elsewhere products are not asynchronous.

    To be called in a loop before the first operand of its product is computed (decoded weights, converted fp8). Such an operand
    stays in registers. Triton (3.6 to 3.9) lets the products of one turn run into the next, and the next turn's operand is then
    written over registers that they still read: results are wrong now and then, the more the busier the multiprocessor. Waiting
    here costs up to 2%, for other warps have work meanwhile.
    """
    if not _INTERPRETED and cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
        # Not pure: it must stay where it is.
        asm: tl.constexpr = "wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def start(EARLY: tl.constexpr) -> None:
    """Lets the next kernel be launched, and waits until the kernels before have ended and their writes are visible.

    The first call of a kernel that is launched early. The next kernel's own wait is for the end of this one, so it may be
    launched at any time; the sooner it is, the more of its start is over when this kernel ends.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(rows) -> None:
    """Has the L2 cache read the 128 bytes that each pointer of a tile points into. A hint: nothing is loaded, so what is there may
    still be written by the kernel before."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [rows], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_rows(rows, inside, width, stride, elsewhere, PADDED: tl.constexpr) -> None:
    """Prefetches rows to the L2 cache: one address for each 128 bytes of elements.

    Args:
        rows: pointers to the rows' first elements, ``[rows, 1]``.
        inside: which rows exist, ``[rows, 1]``.
        width: elements of a row.
        stride: from one element of a row to the next.
        elsewhere: an address of the same tensor, prefetched in place of what does not exist.
        PADDED: a power of two that is at least the width.
    """
    LINE: tl.constexpr = 1024 // elsewhere.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (PADDED + LINE - 1) // LINE  # a row may be shorter than a line
    line = tl.arange(0, LINES)[None, :] * LINE
    prefetch(tl.where(inside & (line < width), rows + line * stride, elsewhere))


@triton.jit
def bits_of(masks):
    """int32: how many bits of int64 masks are set."""
    twos = masks - ((masks >> 1) & 0x5555555555555555)
    fours = (twos & 0x3333333333333333) + ((twos >> 2) & 0x3333333333333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((eights * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def sequence_of(slot, cu_seqlens, batch, GROUP: tl.constexpr, ROWS, AT_ONCE: tl.constexpr):
    """The sequence that owns a slot of ROWS rows, where sequence b of GROUP rows a token has its slots from
    ``cu_seqlens[b] * GROUP // ROWS + b`` on: as many as its rows need, and at least one. AT_ONCE sequences are looked at at a
    time."""
    count = 0
    for start in range(0, batch, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        begins = tl.load(cu_seqlens + at, mask=at < batch, other=0)
        count += tl.sum(((begins * GROUP // ROWS + at <= slot) & (at < batch)).to(tl.int32))
    return count - 1


@triton.jit
def softplus(x):
    """``log(1 + exp(x))`` of float32, also where the exponential is out of range, and as precise as float32 where it is small."""
    # max(x, 0) + log(1 + e), e = exp(-|x|). The logarithm is e times a polynomial, to 2^-22 of itself: of the logarithm of a number
    # next to 1, as 1 + e is for small e, few digits would be left.
    e = tl.exp2(tl.abs(x) * -1.4426950408889634)
    series = e * 0.005126102361828089 - 0.029074065387248993
    series = series * e + 0.0775160863995552
    series = series * e - 0.13602247834205627
    series = series * e + 0.19076880812644958
    series = series * e - 0.2483539879322052
    series = series * e + 0.3331812024116516
    series = series * e - 0.4999944567680359
    series = series * e + 0.9999999403953552
    return tl.maximum(x, 0.0) + e * series

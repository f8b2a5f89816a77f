"""Device code shared by the portable Triton kernels of several families."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


class _NamedDtype(tl.dtype, str):  # type: ignore[misc]
    """A Triton dtype that is also its name.

    If an engine sets ``triton.knobs.runtime.jit_post_compile_hook``, Triton writes the constants of a kernel as JSON. Triton
    converts a constant that is a dtype, but not a dtype in a tuple, and JSON can store only strings.
    """


DTYPES = {
    torch.float16: _NamedDtype(tl.float16.name),
    torch.bfloat16: _NamedDtype(tl.bfloat16.name),
    torch.float32: _NamedDtype(tl.float32.name),
    torch.float8_e4m3fn: _NamedDtype(tl.float8e4nv.name),
}
"""Triton dtypes by PyTorch dtype, for launchers that pass a dtype to a kernel."""

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def wait_for_products() -> None:
    """Waits on Hopper until all outstanding WGMMAs have completed. Does nothing elsewhere.

    Call this function in a loop before computing the dot's first operand (dequantised weights, converted fp8). Such an operand is
    in registers. Triton (3.6 to 3.9) lets the WGMMAs of one iteration overlap the next iteration. The next operand then overwrites
    registers that a WGMMA still reads. Without this wait, results are wrong intermittently, more often on a busier SM. The wait
    costs at most 2%, because other warps have work meanwhile.
    """
    if not _INTERPRETED and cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
        # Declared impure, so that the compiler does not move or remove the wait.
        asm: tl.constexpr = "wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def start(EARLY: tl.constexpr) -> None:
    """PDL prologue: lets the next kernel launch, then waits until the preceding kernels' writes are visible.

    A kernel launched with PDL must call this first. From then on, the next kernel may launch at any time, because the next kernel
    waits for the end of this one. An earlier launch hides more of the next kernel's launch latency.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(rows) -> None:
    """Prefetches to L2 the 128-byte lines that a tile of pointers points into.

    The prefetch is a hint and loads nothing into registers, so the preceding kernel may still be writing the line.
    """
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [rows], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_rows(rows, inside, width, stride, elsewhere, PADDED: tl.constexpr) -> None:
    """Prefetches rows to L2: one address per 128-byte line.

    Args:
        rows: pointers to the rows' first elements, ``[rows, 1]``.
        inside: which rows exist, ``[rows, 1]``.
        width: elements in a row.
        stride: stride between the elements of a row, in elements.
        elsewhere: an address in the same tensor, to prefetch instead of lines that do not exist.
        PADDED: a power of two that is at least the width.
    """
    LINE: tl.constexpr = 1024 // elsewhere.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (PADDED + LINE - 1) // LINE  # a row may be shorter than a line
    line = tl.arange(0, LINES)[None, :] * LINE
    prefetch(tl.where(inside & (line < width), rows + line * stride, elsewhere))


@triton.jit
def bits_of(masks):
    """Returns the population counts of int64 masks, as int32."""
    twos = masks - ((masks >> 1) & 0x5555555555555555)
    fours = (twos & 0x3333333333333333) + ((twos >> 2) & 0x3333333333333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((eights * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def sequence_of(slot, cu_seqlens, batch, GROUP: tl.constexpr, ROWS, AT_ONCE: tl.constexpr):
    """Returns the sequence that owns work item ``slot``. A work item is ROWS query rows; a token has GROUP rows.

    The items of sequence b begin at ``cu_seqlens[b] * GROUP // ROWS + b``. A sequence gets at least one item, and at least as many
    as its rows need. The search compares AT_ONCE sequences at a time.
    """
    count = 0
    for start in range(0, batch, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        begins = tl.load(cu_seqlens + at, mask=at < batch, other=0)
        count += tl.sum(((begins * GROUP // ROWS + at <= slot) & (at < batch)).to(tl.int32))
    return count - 1


@triton.jit
def softplus(x):
    """Returns ``log(1 + exp(x))`` in float32, without overflow for large x and without cancellation where the result is small."""
    # max(x, 0) + log(1 + e) with e = exp(-|x|). A polynomial times e approximates log(1 + e) to a relative error of 2^-22.
    # tl.log(1 + e) would lose most digits for small e, because 1 + e is rounded.
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

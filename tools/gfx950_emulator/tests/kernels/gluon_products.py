"""Gluon matmul kernels: operands through LDS, direct loads to LDS in several buffers, block-scaled operands."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from .gluon_memory import tile_offsets


@gluon.constexpr_function
def mfma_layout(nonk, k_of_32, warps):
    """Returns the accumulator layout of the nonk x nonk MFMA. `k_of_32` is the k size of the 32 x 32 MFMA."""
    return gl.amd.AMDMFMALayout(4, [nonk, nonk, k_of_32 if nonk == 32 else 2 * k_of_32], True, list(warps))


@gluon.constexpr_function
def shared_layout(kind, shape, order):
    """Returns a shared layout of 16-bit elements by name. In each layout, the 16-byte vectors of a wave's 64 lanes are
    contiguous."""
    order = list(order)
    if kind == "padded":
        return gl.PaddedSharedLayout.with_identity_for([[512, 8]], shape, order)
    if kind == "swizzled":
        return gl.SwizzledSharedLayout(8, 1, 8, order)
    return gl.SwizzledSharedLayout(1, 1, 1, order)


@gluon.constexpr_function
def rows_of_eight(order, warps):
    """Returns a layout in which each of a wave's 64 lanes holds 8 adjacent elements. `order` names the contiguous dimension
    first."""
    order = list(order)
    if order[0] == 1:
        return gl.BlockedLayout([1, 8], [8, 8], [warps, 1], order)
    return gl.BlockedLayout([8, 1], [8, 8], [1, warps], order)


@gluon.jit
def matmul_through_lds(
    a_ptr, b_ptr, c_ptr, k, n, nonk: gl.constexpr, b_order: gl.constexpr, shared: gl.constexpr,
    block_m: gl.constexpr, block_n: gl.constexpr, block_k: gl.constexpr,
):  # fmt: skip
    """c [m, n] float32 = a [m, k] @ b [k, n]. Operands pass through registers and LDS. b's contiguous dimension is b_order[0]."""
    mfma: gl.constexpr = mfma_layout(nonk, 16, [2, 2])
    a_load: gl.constexpr = rows_of_eight([1, 0], 4)
    b_load: gl.constexpr = rows_of_eight(b_order, 4)
    if b_order[0] == 1:
        b_at = tile_offsets(block_k, block_n, n, 1, b_load) + gl.program_id(1) * block_n
        b_step = block_k * n
    else:
        b_at = tile_offsets(block_k, block_n, 1, k, b_load) + gl.program_id(1) * block_n * k
        b_step = block_k
    a_at = tile_offsets(block_m, block_k, k, 1, a_load) + gl.program_id(0) * block_m * k
    a_shared = gl.allocate_shared_memory(
        a_ptr.dtype.element_ty, [block_m, block_k], shared_layout(shared, [block_m, block_k], [1, 0])
    )
    b_shared = gl.allocate_shared_memory(
        b_ptr.dtype.element_ty, [block_k, block_n], shared_layout(shared, [block_k, block_n], b_order)
    )
    acc = gl.zeros([block_m, block_n], gl.float32, mfma)
    for _ in range(0, k, block_k):
        a_shared.store(cdna4.buffer_load(a_ptr, a_at))
        b_shared.store(cdna4.buffer_load(b_ptr, b_at))
        a = a_shared.load(gl.DotOperandLayout(0, mfma, 8))
        b = b_shared.load(gl.DotOperandLayout(1, mfma, 8))
        acc = cdna4.mfma(a, b, acc)
        a_at += block_k
        b_at += b_step
    c_at = tile_offsets(block_m, block_n, n, 1, mfma) + gl.program_id(0) * block_m * n + gl.program_id(1) * block_n
    cdna4.buffer_store(acc, c_ptr, c_at)


@gluon.jit
def matmul_async(
    a_ptr, b_ptr, c_ptr, k, n, nonk: gl.constexpr, shared: gl.constexpr, by_buffer: gl.constexpr, buffers: gl.constexpr,
    outstanding: gl.constexpr, block_m: gl.constexpr, block_n: gl.constexpr, block_k: gl.constexpr,
):  # fmt: skip
    """c [m, n] float32 = a [m, k] @ b [k, n] by direct loads to LDS into `buffers` buffers.

    Each step waits until at most `outstanding` groups of loads are in flight. The value buffers - 1 is correct; a larger value is a
    bug.
    """
    mfma: gl.constexpr = mfma_layout(nonk, 16, [2, 2])
    load: gl.constexpr = rows_of_eight([1, 0], 4)
    a_at = tile_offsets(block_m, block_k, k, 1, load) + gl.program_id(0) * block_m * k
    b_at = tile_offsets(block_k, block_n, n, 1, load) + gl.program_id(1) * block_n
    a_layout: gl.constexpr = shared_layout(shared, [block_m, block_k], [1, 0])
    b_layout: gl.constexpr = shared_layout(shared, [block_k, block_n], [1, 0])
    a_shared = gl.allocate_shared_memory(a_ptr.dtype.element_ty, [buffers, block_m, block_k], a_layout)
    b_shared = gl.allocate_shared_memory(b_ptr.dtype.element_ty, [buffers, block_k, block_n], b_layout)
    acc = gl.zeros([block_m, block_n], gl.float32, mfma)
    steps = k // block_k
    for step in range(-(buffers - 1), steps):
        ahead = step + buffers - 1
        if ahead < steps:
            if by_buffer:
                async_copy.buffer_load_to_shared(a_shared.index(ahead % buffers), a_ptr, a_at)
                async_copy.buffer_load_to_shared(b_shared.index(ahead % buffers), b_ptr, b_at)
            else:
                async_copy.global_load_to_shared(a_shared.index(ahead % buffers), a_ptr + a_at)
                async_copy.global_load_to_shared(b_shared.index(ahead % buffers), b_ptr + b_at)
            a_at += block_k
            b_at += block_k * n
        async_copy.commit_group()
        if step >= 0:
            async_copy.wait_group(outstanding)
            a = a_shared.index(step % buffers).load(gl.DotOperandLayout(0, mfma, 8))
            b = b_shared.index(step % buffers).load(gl.DotOperandLayout(1, mfma, 8))
            acc = cdna4.mfma(a, b, acc)
    c_at = tile_offsets(block_m, block_n, n, 1, mfma) + gl.program_id(0) * block_m * n + gl.program_id(1) * block_n
    cdna4.buffer_store(acc, c_ptr, c_at)


@gluon.jit
def matmul_warp_pipelined(a_ptr, b_ptr, c_ptr, k, n, block_m: gl.constexpr, block_n: gl.constexpr, block_k: gl.constexpr):
    """c [m, n] float32 = a [m, k] @ b [k, n]. Two halves of the waves alternate between loads and MFMAs."""
    mfma: gl.constexpr = mfma_layout(32, 16, [4, 2])
    load: gl.constexpr = rows_of_eight([1, 0], 8)
    a_at = tile_offsets(block_m, block_k, k, 1, load) + gl.program_id(0) * block_m * k
    b_at = tile_offsets(block_k, block_n, n, 1, load) + gl.program_id(1) * block_n
    a_layout: gl.constexpr = shared_layout("padded", [block_m, block_k], [1, 0])
    b_layout: gl.constexpr = shared_layout("padded", [block_k, block_n], [1, 0])
    a_shared = gl.allocate_shared_memory(a_ptr.dtype.element_ty, [2, block_m, block_k], a_layout)
    b_shared = gl.allocate_shared_memory(b_ptr.dtype.element_ty, [2, block_k, block_n], b_layout)
    async_copy.buffer_load_to_shared(a_shared.index(0), a_ptr, a_at)
    async_copy.buffer_load_to_shared(b_shared.index(0), b_ptr, b_at)
    async_copy.commit_group()
    acc = gl.zeros([block_m, block_n], gl.float32, mfma)
    last = k // block_k - 1
    async_copy.wait_group(0)
    for step in range(last + 1):
        with gl.amd.warp_pipeline_stage("load", priority=1):
            ahead = min(step + 1, last)
            a = a_shared.index(step % 2).load(gl.DotOperandLayout(0, mfma, 8))
            b = b_shared.index(step % 2).load(gl.DotOperandLayout(1, mfma, 8))
            async_copy.buffer_load_to_shared(a_shared.index((step + 1) % 2), a_ptr, a_at + ahead * block_k)
            async_copy.buffer_load_to_shared(b_shared.index((step + 1) % 2), b_ptr, b_at + ahead * block_k * n)
            async_copy.commit_group()
        async_copy.wait_group(0)
        with gl.amd.warp_pipeline_stage("multiply", priority=0):
            acc = cdna4.mfma(a, b, acc)
    c_at = tile_offsets(block_m, block_n, n, 1, mfma) + gl.program_id(0) * block_m * n + gl.program_id(1) * block_n
    cdna4.buffer_store(acc, c_ptr, c_at)


@gluon.jit
def scaled_matmul(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, k, n, a_format: gl.constexpr, b_format: gl.constexpr, nonk: gl.constexpr,
    block_m: gl.constexpr, block_n: gl.constexpr, block_k: gl.constexpr, warps: gl.constexpr,
):  # fmt: skip
    """c [m, n] float32 = (a [m, k] scaled) @ (b [n, k] scaled)^T by mfma_scaled. Operands are loaded from global memory to
    registers.

    The e8m0 scales are a_scale [m, k / 32] and b_scale [n, k / 32]; an "e2m1" operand holds two elements per byte.
    """
    mfma: gl.constexpr = mfma_layout(nonk, 64, warps)
    a_pack: gl.constexpr = 2 if a_format == "e2m1" else 1
    b_pack: gl.constexpr = 2 if b_format == "e2m1" else 1
    a_dot: gl.constexpr = gl.DotOperandLayout(0, mfma, 16)
    b_dot: gl.constexpr = gl.DotOperandLayout(1, mfma, 16)
    a_scale_layout: gl.constexpr = cdna4.get_mfma_scale_layout(a_dot, [block_m, block_k // 32])
    b_scale_layout: gl.constexpr = cdna4.get_mfma_scale_layout(b_dot, [block_n, block_k // 32])
    row, column = gl.program_id(0) * block_m, gl.program_id(1) * block_n
    a_at = tile_offsets(block_m, block_k // a_pack, k // a_pack, 1, a_dot) + row * (k // a_pack)
    b_at = tile_offsets(block_k // b_pack, block_n, 1, k // b_pack, b_dot) + column * (k // b_pack)
    a_scale_at = tile_offsets(block_m, block_k // 32, k // 32, 1, a_scale_layout) + row * (k // 32)
    b_scale_at = tile_offsets(block_n, block_k // 32, k // 32, 1, b_scale_layout) + column * (k // 32)
    acc = gl.zeros([block_m, block_n], gl.float32, mfma)
    for first in range(0, k, block_k):
        a = cdna4.buffer_load(a_ptr, a_at + first // a_pack)
        b = cdna4.buffer_load(b_ptr, b_at + first // b_pack)
        a_scale = cdna4.buffer_load(a_scale_ptr, a_scale_at + first // 32)
        b_scale = cdna4.buffer_load(b_scale_ptr, b_scale_at + first // 32)
        acc = cdna4.mfma_scaled(a, a_scale, a_format, b, b_scale, b_format, acc)
    cdna4.buffer_store(acc, c_ptr, tile_offsets(block_m, block_n, n, 1, mfma) + row * n + column)

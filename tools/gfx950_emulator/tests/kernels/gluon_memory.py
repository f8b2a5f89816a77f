"""Gluon kernels that use LDS and buffer memory: layouts, transposing reads, masks, atomics, conversions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4


@gluon.jit
def tile_offsets(rows: gl.constexpr, columns: gl.constexpr, row_stride, column_stride, layout: gl.constexpr):
    """Returns the int32 element offsets [rows, columns] of a tile."""
    row = gl.arange(0, rows, gl.SliceLayout(1, layout))
    column = gl.arange(0, columns, gl.SliceLayout(0, layout))
    return row[:, None] * row_stride + column[None, :] * column_stride


@gluon.jit
def through_shared(
    x_ptr, out_ptr, rows: gl.constexpr, columns: gl.constexpr, shared: gl.constexpr, source: gl.constexpr, target: gl.constexpr
):
    """out = x [rows, columns]. The elements are stored to LDS in one register layout, and read from LDS in another."""
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [rows, columns], shared)
    memory.store(gl.load(x_ptr + tile_offsets(rows, columns, columns, 1, source)))
    gl.store(out_ptr + tile_offsets(rows, columns, columns, 1, target), memory.load(target))


@gluon.jit
def transposed_view(
    x_ptr, out_ptr, rows: gl.constexpr, columns: gl.constexpr, shared: gl.constexpr, source: gl.constexpr, target: gl.constexpr
):
    """out [columns, rows] = x [rows, columns] transposed by a permuted view of LDS."""
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [rows, columns], shared)
    memory.store(gl.load(x_ptr + tile_offsets(rows, columns, columns, 1, source)))
    gl.store(out_ptr + tile_offsets(columns, rows, rows, 1, target), memory.permute([1, 0]).load(target))


@gluon.jit
def masked_buffers(x_ptr, out_ptr, n, block: gl.constexpr, width: gl.constexpr):
    """out = x + 1 for n elements by buffer instructions. Masked elements read as 41, and `width` of them are also stored."""
    layout: gl.constexpr = gl.BlockedLayout([width], [64], [gl.num_warps()], [0])
    at = gl.program_id(0) * block + gl.arange(0, block, layout)
    x = cdna4.buffer_load(x_ptr, at, mask=at < n, other=41)
    cdna4.buffer_store(x + 1, out_ptr, at, mask=at < n + width)


@gluon.jit
def buffer_atomics(x_ptr, sums_ptr, old_ptr, n, bins: gl.constexpr, block: gl.constexpr):
    """sums[i % bins] += x[i] for n elements; old receives the value before each addition."""
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [gl.num_warps()], [0])
    at = gl.program_id(0) * block + gl.arange(0, block, layout)
    x = cdna4.buffer_load(x_ptr, at, mask=at < n, other=0)
    old = cdna4.buffer_atomic_add(sums_ptr, at % bins, x, mask=at < n)
    cdna4.buffer_store(old, old_ptr, at, mask=at < n)


@gluon.jit
def buffer_bounds(x_ptr, low_ptr, high_ptr, n, block: gl.constexpr):
    """low[0] and high[0] become the smallest and the largest of n integers and of the old contents."""
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [gl.num_warps()], [0])
    at = gl.program_id(0) * block + gl.arange(0, block, layout)
    x = cdna4.buffer_load(x_ptr, at, mask=at < n, other=0)
    cdna4.buffer_atomic_min(low_ptr, at * 0, x, mask=at < n)
    cdna4.buffer_atomic_max(high_ptr, at * 0, x, mask=at < n)


@gluon.jit
def shared_gather(x_ptr, index_ptr, out_ptr, n: gl.constexpr):
    """out = x[index] by a gather from LDS. Then each element is scattered to its index."""
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [gl.num_warps()], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    at = gl.arange(0, n, layout)
    index = gl.load(index_ptr + at)
    memory = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [n], plain, gl.load(x_ptr + at))
    taken = memory.gather(index, 0)
    gl.store(out_ptr + at, taken)
    gl.barrier()
    memory.scatter(taken, index, 0)
    gl.barrier()
    gl.store(out_ptr + n + at, memory.load(layout))


@gluon.jit
def shared_counters(x_ptr, out_ptr, n: gl.constexpr, bins: gl.constexpr):
    """out[bin] = the number of n int32 values that equal the bin's index, by atomic additions in LDS."""
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [gl.num_warps()], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.int32, [bins], plain, gl.zeros([bins], gl.int32, layout))
    gl.barrier()
    x = gl.load(x_ptr + gl.arange(0, n, layout))
    memory.atomic_scatter_add(gl.full([n], 1, gl.int32, layout), x, 0)
    gl.barrier()
    gl.store(out_ptr + gl.arange(0, bins, layout), memory.load(layout))


@gluon.jit
def scaled_down(x_ptr, scale_ptr, out_ptr, rows: gl.constexpr, k: gl.constexpr, form: gl.constexpr):
    """out = x [rows, k] divided by its e8m0 scales [rows, k / 32], rounded to fp8 or fp4: `form` is "e4m3", "e5m2" or "e2m1"."""
    layout: gl.constexpr = gl.BlockedLayout([1, 32], [16, 4], [gl.num_warps(), 1], [1, 0])
    scales: gl.constexpr = gl.BlockedLayout([1, 1], [16, 4], [gl.num_warps(), 1], [1, 0])
    pack: gl.constexpr = 2 if form == "e2m1" else 1
    out: gl.constexpr = gl.BlockedLayout([1, 32 // pack], [16, 4], [gl.num_warps(), 1], [1, 0])
    x = gl.load(x_ptr + tile_offsets(rows, k, k, 1, layout))
    scale = gl.load(scale_ptr + tile_offsets(rows, k // 32, k // 32, 1, scales))
    small = cdna4.scaled_downcast(x, scale, form, 1)
    gl.store(out_ptr + tile_offsets(rows, k // pack, k // pack, 1, out), gl.convert_layout(small, out))


@gluon.jit
def scaled_up(x_ptr, scale_ptr, out_ptr, rows: gl.constexpr, k: gl.constexpr, fp4: gl.constexpr):
    """out [rows, k] = fp8 or fp4 x times its e8m0 scales [rows, k / 32], in out's dtype (bfloat16 or float16)."""
    pack: gl.constexpr = 2 if fp4 else 1
    layout: gl.constexpr = gl.BlockedLayout([1, 32 // pack], [16, 4], [gl.num_warps(), 1], [1, 0])
    out: gl.constexpr = gl.BlockedLayout([1, 32], [16, 4], [gl.num_warps(), 1], [1, 0])
    x = gl.load(x_ptr + tile_offsets(rows, k // pack, k // pack, 1, layout))
    row = gl.arange(0, rows, gl.SliceLayout(1, out))
    block = gl.arange(0, k, gl.SliceLayout(0, out)) // 32
    scale = gl.load(scale_ptr + row[:, None] * (k // 32) + block[None, :])
    if fp4:
        y = cdna4.scaled_upcast(x, scale, out_ptr.dtype.element_ty, 1)
    else:
        y = cdna4.scaled_upcast(x, scale, out_ptr.dtype.element_ty)
    gl.store(out_ptr + tile_offsets(rows, k, k, 1, out), gl.convert_layout(y, out))

"""Device code of `compact_kv_cache`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.kvcache._write_device import slot_of
from tokenspeed_kernel.triton.views_device import Cache, Pages, pages_of


@triton.jit
def _slots_of(pages, table, position, moved, PAGE_SIZE: tl.constexpr):
    """Returns the cache slots of a sequence's positions; valid only where ``moved``."""
    page = tl.load(pages + position // PAGE_SIZE * table.page_stride, mask=moved, other=0)
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def _move(cache, old, new, moved, program, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_C: tl.constexpr):
    # Copies BLOCK_C columns of all moved rows of a cache from their old slots to their new slots, which may be old slots of other
    # rows.
    column = program * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    head, inner = (column // DIM).to(tl.int64), column % DIM
    there = moved & (column < WIDTH)
    values = tl.load(slot_of(cache, old, head, PAGE_SIZE) + inner * cache.dim_stride, mask=there)
    tl.debug_barrier()  # all threads must have loaded before any thread stores
    tl.store(slot_of(cache, new, head, PAGE_SIZE) + inner * cache.dim_stride, values, mask=there)


@triton.jit(do_not_specialize=["nodes"])
def compact_kernel(
    k_cache,
    v_cache,
    page_table,
    cache_seqlens,
    path,
    counts,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    k_dim_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    v_dim_stride,
    page_table_stride_b,
    page_table_stride_p,
    cache_seqlens_stride,
    path_stride_b,
    path_stride_n,
    counts_stride,
    nodes,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Moves BLOCK_C columns of the keys, or of the values, of all accepted draft-tree nodes of a sequence to their new slots."""
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    PROGRAMS: tl.constexpr = (SHAPE.width + BLOCK_C - 1) // BLOCK_C  # number of programs that handle keys; all others handle values
    table = Pages(page_table, page_table_stride_b, page_table_stride_p)
    sequence = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    first = tl.load(cache_seqlens + sequence * cache_seqlens_stride) - nodes
    count = tl.minimum(tl.load(counts + sequence * counts_stride), nodes)
    if first < 0:
        return
    at = tl.arange(0, BLOCK_N)[:, None]
    node = tl.load(path + sequence * path_stride_b + at * path_stride_n, mask=at < count, other=-1)
    moved = (node >= 0) & (node < nodes) & (node != at)
    if tl.max(tl.max(moved.to(tl.int32), axis=1), axis=0) == 0:
        return
    pages = pages_of(table, sequence)
    old = _slots_of(pages, table, first + node, moved, PAGE_SIZE)
    new = _slots_of(pages, table, first + at, moved, PAGE_SIZE)
    if program < PROGRAMS:
        keys = Cache(k_cache, k_page_stride, k_slot_stride, k_head_stride, k_dim_stride)
        _move(keys, old, new, moved, program, SHAPE.dim, SHAPE.width, PAGE_SIZE, BLOCK_C)
    elif SHAPE.v_width > 0:
        values = Cache(v_cache, v_page_stride, v_slot_stride, v_head_stride, v_dim_stride)
        _move(values, old, new, moved, program - PROGRAMS, SHAPE.v_dim, SHAPE.v_width, PAGE_SIZE, BLOCK_C)

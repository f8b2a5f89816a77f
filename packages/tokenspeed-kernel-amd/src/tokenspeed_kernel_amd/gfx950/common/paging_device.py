"""A paged cache: the keys and values of one sequence and one KV head, and their copies to LDS."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950.instructions_device import copies
from tokenspeed_kernel_amd.gluon.layouts_device import log2

# Number of page-table entries that are loaded to LDS at once (512 bytes). The pipeline of key and value copies is drained before
# the next entries are loaded.
PAGES_AT_ONCE = gl.constexpr(128)


@gluon.aggregate
class PagedRows:
    """The paged keys, or the paged values, of one KV head, and their LDS buffers.

    Attributes:
        base: pointer to page 0 of this KV head in the cache.
        page_stride, token_stride: distance in elements from one page to the next, and from one slot of a page to the next.
        shared: LDS buffers for key or value blocks, [stages, block_n, head_dim].
        copy: the layout of copies to ``shared``, [block_n, head_dim].
    """

    base: gl.tensor
    page_stride: gl.constexpr
    token_stride: gl.tensor
    shared: gl.shared_memory_descriptor
    copy: gl.constexpr


@gluon.aggregate
class PagedCache:
    """The keys and values of one sequence and one KV head.

    Attributes:
        keys, values: the paged keys and the paged values, and their LDS buffers.
        table: pointer to the sequence's row of the page table.
        listed: LDS for PAGES_AT_ONCE entries of that row, see `list_pages`.
        length: number of the sequence's tokens in the cache.
        page_size: token slots per page.
    """

    keys: PagedRows
    values: PagedRows
    table: gl.tensor
    listed: gl.shared_memory_descriptor
    length: gl.tensor
    page_size: gl.constexpr


@gluon.constexpr_function
def page_span(page_size, block_n, pages=PAGES_AT_ONCE.value):
    """Returns the number of token positions for which one list of ``pages`` pages suffices, if the first position is a multiple of
    the smaller of page size and block size.
    """
    return (pages - (1 if page_size > block_n else 0)) * page_size


@gluon.jit
def allocate_page_list(dtype: gl.constexpr = gl.int32, PAGES: gl.constexpr = PAGES_AT_ONCE):
    """Allocates LDS for `PagedCache.listed`."""
    return gl.allocate_shared_memory(dtype, [PAGES], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def list_pages(cache, first, page_stride: gl.constexpr = 1):
    """Copies the page-table entries from position ``first`` on to LDS. Reads of this list do not wait for key copies in flight, as
    loads from global memory would.

    Args:
        page_stride: the list holds page indices times this number. MLA lists offsets of pages in 16-byte vectors (int64), which
            saves a multiplication in every copy. `PagedRows.page_stride` is then the number of elements per vector.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [gl.num_warps()], [0])
    last_page = (cache.length - 1) // cache.page_size
    at = gl.minimum(first // cache.page_size + gl.arange(0, PAGES_AT_ONCE, layout), last_page)
    cache.listed.store(gl.load(cache.table + at).to(cache.listed.dtype) * page_stride)


@gluon.jit
def find_pages(cache, first, start, rows):
    """Returns the page of each position of the block that begins at position ``start``, int64 [block_n]. ``first``: the position at
    which the list of pages in LDS begins; ``rows``: the cache's keys or values, for the layout of the result."""
    row = gl.arange(0, rows.shared.shape[1], gl.SliceLayout(1, rows.copy))
    return cache.listed.gather((start >> log2(cache.page_size)) - first // cache.page_size + row // cache.page_size, 0).to(gl.int64)


@gluon.jit
def copy_block(cache, rows, stage, page, start, CLAMPED: gl.constexpr):
    """Starts the copy of a block of keys or values to LDS.

    Args:
        cache, rows: the cache, and its keys or its values.
        stage: the LDS buffer's index.
        page: the page of each position, from `find_pages`.
        start: the first position, a multiple of the smaller of page size and block size.
        CLAMPED: whether to avoid reads of slots without a token, which may hold NaN. The last slot with a token, or an earlier
            slot, is read instead.
    """
    shared = rows.shared.index(stage)
    block_n: gl.constexpr = shared.shape[0]
    row = gl.arange(0, block_n, gl.SliceLayout(1, rows.copy))
    column = gl.arange(0, shared.shape[1], gl.SliceLayout(0, rows.copy))[None, :]
    base = rows.base
    if block_n <= cache.page_size:
        base += (start & (cache.page_size - 1)) * rows.token_stride
        offset = (row * rows.token_stride)[:, None] + column
        if CLAMPED:
            offset = gl.minimum(offset, (cache.length - 1 - start) * rows.token_stride + column)
    else:
        slot = row % cache.page_size
        if CLAMPED:
            over = cache.length - 1 - start
            last_slot = gl.where(row // cache.page_size < over // cache.page_size, cache.page_size - 1, over % cache.page_size)
            slot = gl.minimum(slot, last_slot)
        offset = (slot * rows.token_stride)[:, None] + column
    pointers = base + (page * rows.page_stride)[:, None] + offset
    copies.global_load_to_shared(shared, pointers)
    copies.commit_group()

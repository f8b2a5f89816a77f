"""Device code of attention to a paged cache: a tile of query rows against the keys of some blocks.

A row is one query head of one token. The rows of a tile share a key head, so that a key is fetched once for all of them. Blocks of
keys and values travel from global memory to LDS directly, STAGES of them at a time. A buffer of keys is filled again when the
scores of its block are computed, one of values when they are weighted. So one stage suffices where there are waves enough: while
keys arrive, the softmax and the second product run, and the other way round.

Probabilities never leave their lanes: the second product takes them in the order in which the first one left them (``k_width`` 4),
and the transposing LDS reads fetch values in that same order. Where these are single bytes, a read fetches two such runs of four.

Keys and values of fp8 are widened to q's dtype in registers, two at a time, behind the LDS reads. Of their scales, that of keys
goes into the softmax's, and that of values into the output. They come in blocks of 64, which are as many bytes as 32 of 16 bits.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy
from triton.language.extra.hip import libdevice

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# The maximum of a row before it sees a key. Finite, so that a row that never sees one has weights exp2(-inf - LEAST) = 0.
LEAST = gl.constexpr(-1e30)
# Pages that are looked up together; 512 bytes of LDS. The fetching of keys starts anew with every list.
PAGES_AT_ONCE = gl.constexpr(128)


@gluon.constexpr_function
def mfma_layout(warps):
    """Rows are spread over warps. 16 rows at once: decode has few."""
    return gl.amd.AMDMFMALayout(4, [16, 16, 32], True, [warps, 1])


@gluon.constexpr_function
def log2(power):
    return power.bit_length() - 1


@gluon.constexpr_function
def key_width(dtype):
    """Elements of a key in 16 bytes, which a lane takes at once."""
    return 128 // dtype.primitive_bitwidth


@gluon.constexpr_function
def query_layout(mfma, dtype):
    """Layout of queries, for keys of a dtype."""
    return gl.DotOperandLayout(0, mfma, key_width(dtype))


@gluon.constexpr_function
def byte_storage(head_dim):
    """LDS layout of keys or values [64, head_dim] of one byte, without bank conflicts in either kind of read.

    Banks repeat after 256 bytes, and padding is possible only behind the 1 KB that a wave copies at once. Lanes that read 16 bytes
    of their keys together want keys 1, 2 and 4 apart in different banks, those of a transposing read 1, 2, 4 and 16 apart. As many
    of these distances as fit are within 256 bytes, and each of the others begins another 1 KB.
    """
    columns = [[0, 1 << bit] for bit in range(log2(head_dim))]
    rows = [1, 2, 8, 32, 16, 4] if head_dim == 64 else [1, 8, 32, 16, 4, 2]
    return gl.PaddedSharedLayout([[1024, 16]], columns + [[row, 0] for row in rows], [], [64, head_dim])


@gluon.constexpr_function
def key_storage(mfma, block_n, head_dim, dtype):
    """LDS layout of keys [block_n, head_dim], without bank conflicts in reads along head_dim."""
    if dtype.primitive_bitwidth == 8:
        return byte_storage(head_dim)
    operand = gl.DotOperandLayout(1, mfma, 8)
    transposed = cdna4.compute_efficient_padded_shared_layout(operand, [head_dim, block_n], dtype, True)
    padding = [list(pair) for pair in transposed.interval_padding_pairs]
    return gl.PaddedSharedLayout(padding, [[n, d] for d, n in transposed.offset_bases], [], [block_n, head_dim])


@gluon.constexpr_function
def value_storage(mfma, block_n, head_dim, dtype):
    """LDS layout of values [block_n, head_dim], without bank conflicts in transposing reads."""
    if dtype.primitive_bitwidth == 8:
        return byte_storage(head_dim)
    operand = gl.DotOperandLayout(1, mfma, 4)
    return cdna4.compute_efficient_padded_shared_layout(operand, [block_n, head_dim], dtype, False)


@gluon.constexpr_function
def copy_layout(storage, dtype, warps):
    """Which element each lane copies to LDS: 16 bytes a lane, the 1 KB of a wave side by side, as direct copies want it."""
    bases = [list(basis) for basis in storage.offset_bases]
    lane = log2(key_width(dtype))
    warp = lane + 6
    after = warp + log2(warps)
    return gl.DistributedLinearLayout(bases[:lane] + bases[after:], bases[lane:warp], bases[warp:after], [], list(storage.shape))


@gluon.constexpr_function
def page_span(page_size, block_n):
    """Positions that a list of PAGES_AT_ONCE pages covers, from any multiple of the smaller of page and block on."""
    return (PAGES_AT_ONCE.value - (1 if page_size > block_n else 0)) * page_size


@gluon.jit
def list_pages(listed, pages, first, last_page):
    """Puts pages ``first``... of a sequence into LDS, where to look one up waits for no copy that is under way."""
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [gl.num_warps()], [0])
    at = gl.minimum(first + gl.arange(0, listed.shape[0], layout), last_page)
    listed.store(gl.load(pages + at))


@gluon.jit
def find_pages(listed, start, first_page, PAGE_SIZE: gl.constexpr, block_n: gl.constexpr, layout: gl.constexpr):
    """The page of each position from ``start`` on, int64 [block_n]; ``listed`` begins with ``first_page``."""
    row = gl.arange(0, block_n, gl.SliceLayout(1, layout))
    return listed.gather((start >> log2(PAGE_SIZE)) - first_page + row // PAGE_SIZE, 0).to(gl.int64)


@gluon.jit
def copy_block(
    shared, cache, page, start, end, page_stride, token_stride, PAGE_SIZE: gl.constexpr, CLAMPED: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Begins to copy positions ``start``... of a sequence to LDS; ``start`` is a multiple of the smaller of page and block.

    CLAMPED: slots at or beyond position ``end`` are not looked at, because they may hold NaN; the last one before ``end`` that is
    in the same page or before is copied in their place.
    """
    block_n: gl.constexpr = shared.shape[0]
    row = gl.arange(0, block_n, gl.SliceLayout(1, layout))
    column = gl.arange(0, shared.shape[1], gl.SliceLayout(0, layout))[None, :]
    if block_n <= PAGE_SIZE:
        cache += (start & (PAGE_SIZE - 1)) * token_stride
        offset = (row * token_stride)[:, None] + column
        if CLAMPED:
            offset = gl.minimum(offset, (end - 1 - start) * token_stride + column)
    else:
        slot = row % PAGE_SIZE
        if CLAMPED:
            over = end - 1 - start
            slot = gl.minimum(slot, gl.where(row // PAGE_SIZE < over // PAGE_SIZE, PAGE_SIZE - 1, over % PAGE_SIZE))
        offset = (slot * token_stride)[:, None] + column
    pointers = cache + (page * page_stride)[:, None] + offset
    async_copy.global_load_to_shared(shared, pointers)
    async_copy.commit_group()


@gluon.jit
def capped(scores, scale, cap):
    """``cap * tanh(scores * scale / cap)`` in units of log 2."""
    # tanh(x) = 1 - 2 / (1 + exp(2 x)), where exp may overflow to infinity and underflow to 0.
    grown = gl.exp2(scores * (2 * LOG2_E * scale / cap))
    # The division is v_rcp_f32, which errs by a unit in the last place; one by IEEE's rules is ten instructions.
    return cap * LOG2_E - libdevice.fast_dividef(2 * cap * LOG2_E, 1 + grown)


@gluon.jit
def attend(
    q, keys, values, listed, k_cache, v_cache, pages, begin, end, length, row_end, row_begin, plain_end,
    k_page, k_token, v_page, v_token, scale, cap,
    PAGE_SIZE: gl.constexpr, CAP: gl.constexpr, ROW_MASK: gl.constexpr, WINDOWED: gl.constexpr,
    M: gl.constexpr, mfma: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Attention of q's rows to positions ``begin`` to ``end``, at least one.

    Args:
        q: [M, head_dim] in `query_layout`.
        keys, values: LDS of a block each.
        listed: LDS of PAGES_AT_ONCE page numbers.
        pages: the sequence's row of the page table.
        begin: a multiple of the smaller of page and block.
        length: of the sequence.
        scale: the softmax's, times log2(e) unless CAP.
        cap: the logit cap; only with CAP.
        row_begin, row_end: int32 [M], the positions that a row sees; only with WINDOWED and ROW_MASK.
        plain_end: up to which position no row ends; only with ROW_MASK.
        ROW_MASK: rows end at different positions, some before the last block. Else all see everything up to ``end``.
        WINDOWED: rows begin at different positions.

    Returns:
        Unnormalised output [M, v_head_dim], maximum [M] of the scores in units of log 2, and sum [M] of exp2(score - maximum).
    """
    block_n: gl.constexpr = keys.shape[1]
    key_copy: gl.constexpr = copy_layout(keys.layout, keys.dtype, WARPS)
    value_copy: gl.constexpr = copy_layout(values.layout, values.dtype, WARPS)
    span: gl.constexpr = page_span(PAGE_SIZE, block_n)

    last_page = (length - 1) // PAGE_SIZE
    highest = gl.full([M], LEAST, gl.float32, gl.SliceLayout(1, mfma))
    totals = lane_sums(gl.zeros([M, block_n], gl.float32, mfma))
    acc = gl.zeros([M, values.shape[2]], gl.float32, mfma)
    for first in range(begin, end, span):
        first_page = first // PAGE_SIZE
        list_pages(listed, pages, first_page, last_page)
        stop = gl.minimum(first + span, end)
        blocks = (stop - first + block_n - 1) // block_n
        for stage in gl.static_range(STAGES):
            at = first + gl.minimum(stage, blocks - 1) * block_n  # something that is no NaN, where there are fewer blocks
            page = find_pages(listed, at, first_page, PAGE_SIZE, block_n, key_copy)
            copy_block(keys.index(stage), k_cache, page, at, length, k_page, k_token, PAGE_SIZE, False, key_copy)
            if key_copy != value_copy:
                page = find_pages(listed, at, first_page, PAGE_SIZE, block_n, value_copy)
            copy_block(values.index(stage), v_cache, page, at, length, v_page, v_token, PAGE_SIZE, True, value_copy)
        fetching = gl.maximum(blocks - STAGES, 0)
        if ROW_MASK:
            plain = gl.minimum((plain_end - first) // block_n, fetching)
            plain = gl.maximum(plain, 0)
            for block in range(plain):
                acc, highest, totals = step(
                    q, keys, values, listed, k_cache, v_cache, first, first_page, block, length, end, row_end, row_begin,
                    acc, highest, totals, k_page, k_token, v_page, v_token, scale, cap,
                    PAGE_SIZE, CAP, False, WINDOWED, M, mfma, STAGES, key_copy, value_copy,
                )  # fmt: skip
        else:
            plain = 0
        for block in range(plain, fetching):
            acc, highest, totals = step(
                q, keys, values, listed, k_cache, v_cache, first, first_page, block, length, end, row_end, row_begin,
                acc, highest, totals, k_page, k_token, v_page, v_token, scale, cap,
                PAGE_SIZE, CAP, ROW_MASK, WINDOWED, M, mfma, STAGES, key_copy, value_copy,
            )  # fmt: skip
        # What is fetched already. Beyond the end are blocks in which nothing is visible, where there are fewer than STAGES.
        for stage in gl.static_range(STAGES):
            start = first + (fetching + stage) * block_n
            buffer = (fetching + stage) % STAGES
            async_copy.wait_group(2 * (STAGES - stage) - 1)
            scores = products(q, keys.index(buffer), M, mfma)
            weights, acc, highest, totals = soften(
                scores, acc, highest, totals, start, stop, row_begin, row_end, scale, cap, CAP, True, ROW_MASK, WINDOWED, mfma
            )
            async_copy.wait_group(2 * (STAGES - stage) - 2)
            acc = weigh(weights, values.index(buffer), acc, q.dtype, mfma)
    return acc, highest, gl.convert_layout(gl.sum(totals, 1), gl.SliceLayout(1, mfma))


@gluon.jit
def step(
    q, keys, values, listed, k_cache, v_cache, first, first_page, block, length, end, row_end, row_begin, acc, highest, totals,
    k_page, k_token, v_page, v_token, scale, cap,
    PAGE_SIZE: gl.constexpr, CAP: gl.constexpr, ROW_MASK: gl.constexpr, WINDOWED: gl.constexpr, M: gl.constexpr,
    mfma: gl.constexpr, STAGES: gl.constexpr, key_copy: gl.constexpr, value_copy: gl.constexpr,
):  # fmt: skip
    """One block in the loop: its buffers are filled with the block that lies STAGES ahead as soon as they have been read."""
    block_n: gl.constexpr = keys.shape[1]
    start = first + block * block_n
    buffer = block % STAGES
    ahead = start + STAGES * block_n
    page = find_pages(listed, ahead, first_page, PAGE_SIZE, block_n, key_copy)
    async_copy.wait_group(2 * STAGES - 1)
    scores = products(q, keys.index(buffer), M, mfma)
    copy_block(keys.index(buffer), k_cache, page, ahead, length, k_page, k_token, PAGE_SIZE, False, key_copy)
    weights, acc, highest, totals = soften(
        scores, acc, highest, totals, start, end, row_begin, row_end, scale, cap, CAP, False, ROW_MASK, WINDOWED, mfma
    )
    async_copy.wait_group(2 * STAGES - 1)
    acc = weigh(weights, values.index(buffer), acc, q.dtype, mfma)
    if key_copy != value_copy:
        page = find_pages(listed, ahead, first_page, PAGE_SIZE, block_n, value_copy)
    copy_block(values.index(buffer), v_cache, page, ahead, length, v_page, v_token, PAGE_SIZE, True, value_copy)
    return acc, highest, totals


@gluon.jit
def larger(a, b):
    """The maximum, NaN if one is: the instruction of gfx950 for this wants no care for signalling NaNs before it."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def lane_sums(weights):
    """What each lane adds up of its own elements of a row, [M, 4]: a sum over lanes can wait until the end."""
    m: gl.constexpr = weights.shape[0]
    block_n: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([m, block_n // 16, 4, 4]), 3), 1)


@gluon.jit
def products(q, keys, M: gl.constexpr, mfma: gl.constexpr):
    """q @ keys^T, float32 [M, block]."""
    k = keys.permute([1, 0]).load(gl.DotOperandLayout(1, mfma, key_width(keys.dtype)))
    return cdna4.mfma(q, k.to(q.dtype), gl.zeros([M, keys.shape[0]], gl.float32, mfma))


@gluon.jit
def soften(
    scores, acc, highest, totals, start, end, row_begin, row_end, scale, cap,
    CAP: gl.constexpr, LAST: gl.constexpr, ROW_MASK: gl.constexpr, WINDOWED: gl.constexpr, mfma: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the weights of a block, and what was gathered before, scaled to the new maximum."""
    if CAP:
        scores = capped(scores, scale, cap)
    if LAST or ROW_MASK or WINDOWED:
        at = gl.arange(0, scores.shape[1], gl.SliceLayout(0, mfma))
        if not ROW_MASK:
            row_end = end
        elif LAST:
            row_end = gl.minimum(row_end, end)
        if WINDOWED and (ROW_MASK or LAST):
            # One comparison, because its results fill scalar registers: without a sign, places before the window are large.
            place = at[None, :] - (row_begin - start)[:, None]
            seen = place.to(gl.uint32) < gl.maximum(row_end - row_begin, 0).to(gl.uint32)[:, None]
        elif WINDOWED:
            seen = at[None, :] >= (row_begin - start)[:, None]
        elif ROW_MASK:
            seen = at[None, :] < (row_end - start)[:, None]
        else:
            seen = (at < end - start)[None, :]
        scores = gl.where(seen, scores, float("-inf"))
    top = gl.reduce(scores, 1, larger)
    if CAP:
        risen = larger(highest, top)
        weights = gl.exp2(scores - risen[:, None])
    else:
        risen = larger(highest, top * scale)
        weights = gl.exp2(scores * scale - risen[:, None])
    fade = gl.exp2(highest - risen)
    sums = lane_sums(weights)
    return (
        weights,
        acc * fade[:, None],
        risen,
        totals * gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None] + sums,
    )


@gluon.jit
def weigh(weights, values, acc, dtype: gl.constexpr, mfma: gl.constexpr):
    """acc + weights @ values."""
    p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, mfma, 4), assert_trivial=True)
    return cdna4.mfma(p, values.load(gl.DotOperandLayout(1, mfma, 4)).to(dtype), acc)


@gluon.jit
def scaled(x, scale, kv_head, stride: gl.constexpr):
    """x times the scale of a key head, if there are scales."""
    if scale is not None:
        x *= gl.load(scale + kv_head * stride)
    return x


@gluon.jit
def finish(acc, highest, total, sink):
    """The normalised output and the natural log-sum-exp, with a sink [M] in units of log 2, -inf for none."""
    top = gl.maximum(highest, sink)
    total = total * gl.exp2(highest - top) + gl.exp2(sink - top)
    seen = total > 0
    log_sum = top + gl.log2(total)
    acc = acc * gl.where(seen, gl.exp2(highest - log_sum), 0.0)[:, None]
    return acc, gl.where(seen, log_sum * LN_2, float("-inf"))

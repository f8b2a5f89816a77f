# mypy: ignore-errors
"""Sorts (token, expert) pairs by expert, divides them into tiles for the grouped GEMMs, and encodes tokens in the same launch.

The position of an expert's tiles in the list of tiles depends only on the number of pairs of earlier experts. So no expert's
workgroup waits for another expert's workgroup. With ``start`` such pairs, the tiles of expert ``e`` begin at entry ``start // rows
+ e``, where ``rows`` is the number of pairs per tile. Unused entries of the list have the expert -1. There is at most one unused
entry after each expert's tiles, and the list's end may be unused.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.moe.encode_device import encode_rows
from tokenspeed_kernel_amd.gluon.choose_device import choose, store_choice


@gluon.jit
def add(a, b):
    return a + b


@gluon.constexpr_function
def lanes_layout(warps):
    """Returns the register layout of the chunk of top-k ids that a workgroup loads at once."""
    return gl.BlockedLayout([4], [64], [warps], [0])


@gluon.jit
def schedule_expert(ids, pairs, order, tiles, entries, expert, num_experts, ROWS: gl.constexpr, CHUNK: gl.constexpr):
    """Writes one expert's pairs to ``order`` and its tiles to ``tiles``. Arguments: see `route_kernel`."""
    lane = gl.arange(0, CHUNK, lanes_layout(gl.num_warps()))
    found = isa.buffer_load(ids, lane, mask=lane < pairs, other=-1)
    before = ((found >= 0) & (found < expert)).to(gl.int32)
    own = (found == expert).to(gl.int32)
    for first in range(CHUNK, pairs, CHUNK):
        more = isa.buffer_load(ids, first + lane, mask=first + lane < pairs, other=-1)
        before += ((more >= 0) & (more < expert)).to(gl.int32)
        own += (more == expert).to(gl.int32)
    start = gl.sum(before, 0)
    count = gl.sum(own, 0)
    list_tiles(tiles, entries, start, count, expert, num_experts, lane, ROWS)
    if count > 0:
        row = list_pairs(found, lane, order, start, expert)
        for first in range(CHUNK, pairs, CHUNK):
            found = isa.buffer_load(ids, first + lane, mask=first + lane < pairs, other=-1)
            row = list_pairs(found, first + lane, order, row, expert)


@gluon.jit
def list_tiles(tiles, entries, start, count, expert, num_experts, lane, ROWS: gl.constexpr):
    """Writes the tiles of an expert with ``count`` pairs to ``tiles``. All earlier experts together have ``start`` pairs. For the
    last expert, also writes the unused entries at the end of the list. ``lane``: int32 [lanes], 0, 1, and so on."""
    lanes: gl.constexpr = lane.shape[0]
    entry = start // ROWS + expert
    after = (start + count) // ROWS + expert + 1
    if expert == num_experts - 1:
        gl.store(tiles + entries * 4, start + count)
        after = entries
    for first in range(0, after - entry, lanes):
        row = (first + lane) * ROWS
        at = (entry + first + lane) * 4
        inside = first + lane < after - entry
        isa.buffer_store(gl.where(row < count, expert, -1), tiles, at, mask=inside)
        isa.buffer_store(start + row, tiles, at + 1, mask=inside)
        isa.buffer_store(gl.minimum(count - row, ROWS), tiles, at + 2, mask=inside)


@gluon.jit
def list_pairs(found, pair, order, row, expert):
    """Writes the pairs that have ``expert`` to ``order``, beginning at index ``row``. Returns the index after the last pair.

    Args:
        found, pair: int32 [lanes], expert ids and the pairs that they belong to, in ascending order.
    """
    mine = (found == expert).to(gl.int32)
    until = gl.associative_scan(mine, 0, add)
    isa.buffer_store(pair, order, row + until - 1, mask=mine != 0)
    return row + gl.max(until, 0)


@gluon.jit(do_not_specialize=["entries", "tokens"])
def route_kernel(
    ids,
    order,
    tiles,
    entries,
    num_experts,
    x,
    x_stride,
    codes,
    scale,
    k,
    width,
    tokens,
    encoding: gl.constexpr,
    TOP_K: gl.constexpr,
    ROWS: gl.constexpr,
    CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr,
):
    """Sorts pairs and encodes tokens. The first ``num_experts`` workgroups each write one expert's pairs and tiles. The other
    workgroups encode tokens, one per warp.

    Args:
        ids: int32 [pairs], TOP_K expert ids for each token. Pairs whose id is not in 0 ... num_experts - 1 are left out.
        order: int32 [pairs], receives the pairs sorted by expert; an expert's pairs are in ascending order.
        tiles: int32 [entries + 1, 4], receives each tile's expert, first index in ``order`` and number of pairs. The last entry
            receives the number of sorted pairs.
        x: [tokens, k], rows x_stride apart.
        codes, scale, k, width, CHUNKS: the memory for encoded tokens and the sizes of a row, see `encode_rows`.
        ROWS: the most pairs of a tile.
        CHUNK: number of ids that a workgroup loads at once.
    """
    program = gl.program_id(0)
    if program < num_experts:
        # The compiler sees that the number of pairs is a multiple of TOP_K, and loads several ids with one instruction.
        schedule_expert(ids, tokens * TOP_K, order, tiles, entries, program, num_experts, ROWS, CHUNK)
    else:
        first = (program - num_experts) * gl.num_warps()
        encode_rows(x, x_stride, k, codes, scale, width, tokens, first, tokens, encoding, CHUNKS)


@gluon.jit(do_not_specialize=["entries", "tokens"])
def choose_and_route_kernel(
    logits,
    logits_stride,
    scaling,
    ids_out,
    weights_out,
    order,
    tiles,
    entries,
    num_experts,
    x,
    x_stride,
    codes,
    scale,
    k,
    width,
    tokens,
    encoding: gl.constexpr,
    routing: gl.constexpr,
    ROWS: gl.constexpr,
    CHUNKS: gl.constexpr,
):
    """Does what `route_kernel` does, but each expert's workgroup also routes all tokens from their router logits. The first
    workgroup stores the routing. There are at most ``routing.rows`` tokens.

    Args:
        logits, logits_stride, scaling, routing: the router's logits and the routing's parameters, see `choose`.
        ids_out, weights_out: receive the top-k ids and weights, contiguous [tokens, top_k].
        others: see `route_kernel`.
    """
    program = gl.program_id(0)
    if program < num_experts:
        ids, weights = choose(logits, logits_stride, tokens, num_experts, scaling, routing)
        if program == 0:
            store_choice(ids, weights, ids_out, weights_out, tokens, routing)
        lanes: gl.constexpr = routing.rows * routing.slots
        layout: gl.constexpr = lanes_layout(gl.num_warps())
        lane = gl.arange(0, lanes, layout)
        real = (lane % routing.slots < routing.top_k) & (lane < tokens * routing.slots)
        found = gl.where(real, gl.convert_layout(ids.reshape(lanes), layout), -1)
        start = gl.sum(((found >= 0) & (found < program)).to(gl.int32), 0)
        count = gl.sum((found == program).to(gl.int32), 0)
        list_tiles(tiles, entries, start, count, program, num_experts, lane, ROWS)
        if count > 0:
            list_pairs(found, lane // routing.slots * routing.top_k + lane % routing.slots, order, start, program)
    else:
        first = (program - num_experts) * gl.num_warps()
        encode_rows(x, x_stride, k, codes, scale, width, tokens, first, tokens, encoding, CHUNKS)

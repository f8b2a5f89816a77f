# mypy: ignore-errors
"""Routing: pairs of tokens and slots sorted by expert and cut into tiles, and tokens encoded in the same launch.

Where an expert's tiles are listed follows from how many pairs go to experts before it, so that no expert's program waits for
another's: with ``start`` such pairs, tiles of expert ``e`` begin at entry ``start // rows + e`` of the list. Entries that are not
used in between, at most one an expert, and those beyond the last one have the expert -1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from tokenspeed_kernel_amd.gfx950.moe.encode_device import encode_row


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def schedule_expert(ids, pairs, order, tiles, entries, expert, num_experts, ROWS: gl.constexpr, CHUNK: gl.constexpr):
    """Lists an expert's pairs and tiles. Arguments: see `route_kernel`."""
    layout: gl.constexpr = gl.BlockedLayout([CHUNK // (64 * gl.num_warps())], [64], [gl.num_warps()], [0])
    lane = gl.arange(0, CHUNK, layout)
    before = gl.zeros([CHUNK], gl.int32, layout)
    own = gl.zeros([CHUNK], gl.int32, layout)
    for first in range(0, pairs, CHUNK):
        found = cdna4.buffer_load(ids, first + lane, mask=first + lane < pairs, other=-1)
        before += ((found >= 0) & (found < expert)).to(gl.int32)
        own += (found == expert).to(gl.int32)
    start = gl.sum(before, 0)
    count = gl.sum(own, 0)
    entry = start // ROWS + expert
    after = (start + count) // ROWS + expert + 1
    if expert == num_experts - 1:
        gl.store(tiles + entries * 4, start + count)
        after = entries
    for first in range(0, after - entry, CHUNK):
        row = (first + lane) * ROWS
        at = (entry + first + lane) * 4
        inside = first + lane < after - entry
        cdna4.buffer_store(gl.where(row < count, expert, -1), tiles, at, mask=inside)
        cdna4.buffer_store(start + row, tiles, at + 1, mask=inside)
        cdna4.buffer_store(gl.minimum(count - row, ROWS), tiles, at + 2, mask=inside)
    if count > 0:
        row = start
        for first in range(0, pairs, CHUNK):
            found = cdna4.buffer_load(ids, first + lane, mask=first + lane < pairs, other=-1)
            mine = (found == expert).to(gl.int32)
            place = row + gl.associative_scan(mine, 0, add) - 1
            cdna4.buffer_store(first + lane, order, place, mask=mine != 0)
            row += gl.sum(mine, 0)


@gluon.jit(do_not_specialize=["pairs", "entries", "tokens"])
def route_kernel(
    ids,
    pairs,
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
    ROWS: gl.constexpr,
    CHUNK: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """Programs: first those of experts, each of which lists its pairs, then those of tokens, each of which encodes one.

    Args:
        ids: int32 [pairs], the experts; those that are not in 0 ... num_experts - 1 are left out.
        order: int32 [pairs], receives the pairs by expert, ascending within one.
        tiles: int32 [entries + 1, 4], receives expert, first row and number of rows of each tile; at the end the number of rows.
        x: [tokens, k], rows x_stride apart.
        codes, scale, k, width: see `encode_row`.
        ROWS: of a tile.
    """
    program = gl.program_id(0)
    if program < num_experts:
        schedule_expert(ids, pairs, order, tiles, entries, program, num_experts, ROWS, CHUNK)
    else:
        token = (program - num_experts).to(gl.int64)
        row_bytes = width // (2 if encoding.format == "e2m1" else 1)
        row_scales = 1 if encoding.by_token else width // 32
        encode_row(
            x + token * x_stride, k, codes + token * row_bytes, tokens.to(gl.int64) * row_bytes, scale + token * row_scales,
            tokens.to(gl.int64) * row_scales, width, encoding, BLOCK,
        )  # fmt: skip

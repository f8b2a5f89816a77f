"""Device code of the split-KV merge of MLA decode: partial results in global memory, and their sum.

A workgroup stores the normalised output and the LSE of its split of a tile (`store_partial`). The last workgroup of the tile to
arrive weights the partial results by their LSEs, and adds them (`merge`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gluon.softmax_device import LOWEST, SoftmaxState, larger, normalise


@gluon.jit
def packed_offsets(m: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr):
    """Returns the offsets of the elements of a partial result [m, columns] in memory. Elements are ordered by wave, register and
    lane. So each access of a wave is 1 KB of contiguous memory, and the accesses of a lane differ by small constants, which are
    part of the instruction.
    """
    row = gl.arange(0, m, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, columns, gl.SliceLayout(0, layout))[None, :]
    wave = column // 16 % 4
    return wave * (m * columns // 4) + column // 64 * (16 * m) + column // 4 % 4 * (4 * m) + row * 4 + column % 4


@gluon.jit
def store_partial(partial, part, state):
    """Stores the normalised state and its LSE as the partial result with index ``part``."""
    layout: gl.constexpr = state.acc.type.layout
    m: gl.constexpr = state.acc.shape[0]
    columns: gl.constexpr = state.acc.shape[1]
    result, log_sum = normalise(state, None)
    part = part.to(gl.int64)
    isa.buffer_store(result, partial.results + part * (m * columns), packed_offsets(m, columns, layout))
    isa.buffer_store(log_sum, partial.log_sums + part * m, gl.arange(0, m, gl.SliceLayout(1, layout)))


@gluon.jit
def merge_some(partial, state, first_part, first, splits, tiles, AT_ONCE: gl.constexpr):
    """Returns the `summed` state of AT_ONCE splits of a tile, from split number ``first`` on, without those after the last one.
    Other arguments: see `merge`."""
    layout: gl.constexpr = state.acc.type.layout
    m: gl.constexpr = state.acc.shape[0]
    columns: gl.constexpr = state.acc.shape[1]
    offsets = packed_offsets(m, columns, layout)
    row = gl.arange(0, m, gl.SliceLayout(1, layout))
    log_sums_at = partial.log_sums + first_part.to(gl.int64) * m
    results_at = partial.results + first_part.to(gl.int64) * (m * columns)
    # Loads return in order. LSEs are loaded early, because every weight depends on all of them, but after the first output: it
    # keeps the L2 busy during the computation of their addresses.
    results = (isa.buffer_load(results_at, first * tiles * (m * columns) + offsets),)
    log_sums = (isa.buffer_load(log_sums_at, first * tiles * m + row),)
    for i in gl.static_range(1, AT_ONCE):
        part = gl.minimum(first + i, splits - 1) * tiles
        log_sums += (isa.buffer_load(log_sums_at, part * m + row),)
    for i in gl.static_range(1, AT_ONCE):
        part = gl.minimum(first + i, splits - 1) * tiles
        results += (isa.buffer_load(results_at, part * (m * columns) + offsets),)
    top = larger(log_sums[0], gl.full_like(log_sums[0], LOWEST))
    for i in gl.static_range(1, AT_ONCE):
        top = larger(top, log_sums[i])
    row_sum = gl.exp2(log_sums[0] - top)
    acc = results[0] * row_sum[:, None]
    for i in gl.static_range(1, AT_ONCE):
        weight = gl.where(first + i < splits, gl.exp2(log_sums[i] - top), 0.0)
        acc += results[i] * weight[:, None]
        row_sum += weight
    return SoftmaxState(acc, top, row_sum)


@gluon.jit
def merge(partial, state, first_part, splits, tiles, AT_ONCE: gl.constexpr):
    """Merges the partial results ``first_part + i * tiles`` of a tile's splits, where i counts the splits. Returns the `summed`
    state.

    Args:
        state: a state of the same shape and layout; its values are not used.
    """
    # The first AT_ONCE splits are merged before the loop; usually there are no others. A loop over all splits would need an initial
    # state, and the instructions that make it would come before the first loads.
    state = merge_some(partial, state, first_part, 0, splits, tiles, AT_ONCE)
    for first in range(AT_ONCE, splits, AT_ONCE):
        others = merge_some(partial, state, first_part, first, splits, tiles, AT_ONCE)
        top = larger(state.row_max, others.row_max)
        shrink = gl.exp2(state.row_max - top)
        weight = gl.exp2(others.row_max - top)
        acc = state.acc * shrink[:, None] + others.acc * weight[:, None]
        state = SoftmaxState(acc, top, state.row_sum * shrink + others.row_sum * weight)
    return state

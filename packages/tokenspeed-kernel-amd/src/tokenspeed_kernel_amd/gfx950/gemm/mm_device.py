# mypy: ignore-errors
"""Device code of `mm`: a tile of the result, or one split of a tile along k. ``mm`` explains the tiles, the LDS and the splits.

`operands_device` moves both operands from global memory through LDS to MFMA registers. There are two mainloops: `multiply`, in
which a wave reads a block of k from LDS and then multiplies it, and `ahead_device.multiply_ahead`, in which a wave reads the next
block during the MFMAs of the current one. `result_device` has the epilogue and the merge of splits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.common.split_device import last_to_arrive
from tokenspeed_kernel_amd.gfx950.gemm.ahead_device import multiply_ahead, store_parts
from tokenspeed_kernel_amd.gfx950.gemm.nvfp4_device import products
from tokenspeed_kernel_amd.gfx950.gemm.operands_device import (
    STEP,
    accumulator_layout,
    copy_blocks,
    empty_accumulator,
    is_dense,
    load_chunk,
    open_column_scales,
    open_lines,
    open_row_scales,
    open_scales,
    read_block,
    read_factors,
    read_scales,
    store_chunk,
    unit_scales,
)
from tokenspeed_kernel_amd.gfx950.gemm.result_device import fragment_offsets, load_factors, merge, store_tile, sum_of_waves
from tokenspeed_kernel_amd.gfx950.instructions_device import copies

XCDS = gl.constexpr(8)
GROUP = gl.constexpr(8)  # rows of tiles that are rasterised together, for reuse of operands in L2


@gluon.jit
def tile_of(number, m, config: gl.constexpr, shape: gl.constexpr):
    """The first row and the first column of tile ``number``. Tiles are numbered by rows within groups of GROUP rows of tiles."""
    tiles_n: gl.constexpr = (shape.n + config.block_n - 1) // config.block_n
    group = number // (GROUP * tiles_n)
    rows = gl.minimum((m + config.block_m - 1) // config.block_m - group * GROUP, GROUP)
    inside = number % (GROUP * tiles_n)
    if rows == GROUP:  # the usual case, without a division
        row = inside % GROUP
        column = inside // GROUP
    else:
        row = inside % rows
        column = inside // rows
    return (group * GROUP + row) * config.block_m, column * config.block_n


@gluon.jit
def add_block(acc, a, b, a_scales, b_scales, stage, index, config: gl.constexpr, shape: gl.constexpr):
    """Adds the dot products of the block of k in LDS buffer ``stage`` to the accumulator. ``index``: the block's index within its
    chunk of scales."""
    STEPS: gl.constexpr = config.block_k // config.waves_k // STEP
    a_block = read_block(a, stage)
    if is_dense(shape.a_format):
        acc = isa.mfma(a_block, read_block(b, stage), acc)
    elif shape.scales == "nvfp4":
        b_block = read_block(b, stage)
        a_block = products(a_block, a_scales, index, acc.type.layout, 0)
        acc = isa.mfma(a_block, products(b_block, b_scales, index, acc.type.layout, 1), acc)
    elif shape.scales == "mx":
        a_scale = read_scales(a_scales, index, STEPS)
        b_block = read_block(b, stage)
        b_scale = read_scales(b_scales, index, STEPS)
        acc = isa.mfma_scaled(a_block, a_scale, shape.a_format, b_block, b_scale, shape.b_format, acc)
    else:
        b_block = read_block(b, stage)
        a_scale = unit_scales(a, config.block_m, STEPS)
        b_scale = unit_scales(b, config.block_n, STEPS)
        if shape.scales == "blocks":
            gl.static_assert(STEPS == 1, "a wave's part of a block of k has one scale")
            part = isa.mfma_scaled(a_block, a_scale, shape.a_format, b_block, b_scale, shape.b_format, gl.zeros_like(acc))
            factors, _ = gl.broadcast(read_factors(a_scales, index), acc)
            acc = gl.fma(part, factors, acc)
        else:
            acc = isa.mfma_scaled(a_block, a_scale, shape.a_format, b_block, b_scale, shape.b_format, acc)
    return acc


@gluon.jit
def multiply(a, b, a_scales, b_scales, mfma: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Returns the dot products of a tile over a split of k, float32 [rows, columns]. ``a_scales``, ``b_scales``: None without block
    scales.

    Blocks of k go through ``config.stages`` LDS buffers, of which all but one are in flight. Scales are loaded to registers a whole
    chunk of blocks ahead, and stored to LDS when the previous chunk has been used.
    """
    stages: gl.constexpr = config.stages
    blocks: gl.constexpr = (shape.split_k + config.block_k - 1) // config.block_k
    per_chunk: gl.constexpr = config.chunk // config.block_k
    ahead: gl.constexpr = blocks if blocks <= stages else stages - 1  # blocks in flight
    scaled: gl.constexpr = shape.scales == "mx" or shape.scales == "blocks" or shape.scales == "nvfp4"
    acc = empty_accumulator(mfma, config)
    if scaled:
        a_words, b_words = load_chunk(a_scales, b_scales, 0)
    for first in gl.static_range(ahead):
        copy_blocks(a, b, first, first, shape)
    for block in range(blocks - ahead):
        if scaled:  # noqa: SIM102  (a compile-time condition, and one at run time)
            if block % per_chunk == 0:
                store_chunk(a_scales, b_scales, a_words, b_words)
                a_words, b_words = load_chunk(a_scales, b_scales, block // per_chunk + 1)
        copies.wait_group(ahead - 1)
        gl.barrier()  # all waves have read the previous block: its buffer is free
        copy_blocks(a, b, block + ahead, (block + ahead) % stages, shape)
        acc = add_block(acc, a, b, a_scales, b_scales, block % stages, block % per_chunk, config, shape)
    # Drain the pipeline.
    for last in gl.static_range(blocks - ahead, blocks):
        if scaled and last % per_chunk == 0:
            store_chunk(a_scales, b_scales, a_words, b_words)
            if last + per_chunk < blocks:
                a_words, b_words = load_chunk(a_scales, b_scales, last // per_chunk + 1)
        copies.wait_group(blocks - 1 - last)
        acc = add_block(acc, a, b, a_scales, b_scales, last % stages, last % per_chunk, config, shape)
    return acc if config.waves_k == 1 else sum_of_waves(acc)


@gluon.jit(do_not_specialize=["m", "per_xcd"])
def mm_kernel(a, b, m, per_xcd, out, bias, partial, config: gl.constexpr, shape: gl.constexpr):
    """Computes one split of a tile. The grid is [tiles, splits]. Consecutive workgroups run on different XCDs. Neighbouring tiles,
    and the splits of a tile, run on one XCD, whose L2 holds their operands.

    Args:
        a, b, partial, config, shape: see `mm`.
        m: number of rows.
        per_xcd: number of tiles per XCD.
    """
    BM: gl.constexpr = config.block_m
    BN: gl.constexpr = config.block_n
    tiles_n: gl.constexpr = (shape.n + BN - 1) // BN
    mfma: gl.constexpr = accumulator_layout(config, shape.a_format)
    tile = gl.program_id(0)
    tiles = tiles_n
    if shape.one_row:
        first_row = 0
        first_column = tile * BN
    else:
        tile = tile % XCDS * per_xcd + tile // XCDS
        tiles = (m + BM - 1) // BM * tiles_n
        first_row, first_column = tile_of(tile, m, config, shape)
    split = gl.program_id(1)
    if tile < tiles:
        lines_a = open_lines(a, m, first_row, split, mfma, 0, config, shape)
        a_scales = None
        b_scales = None
        if shape.scales == "mx" or shape.scales == "nvfp4":
            a_scales = open_scales(a, m, first_row, split, lines_a.layout, 0, config, shape)
        lines_b = open_lines(b, shape.n, first_column, split, mfma, 1, config, shape)
        if shape.scales == "mx" or shape.scales == "nvfp4":
            b_scales = open_scales(b, shape.n, first_column, split, lines_b.layout, 1, config, shape)
        if shape.scales == "blocks":
            a_scales = open_row_scales(a, m, first_row, split, mfma, config, shape)
            b_scales = open_column_scales(b, first_column, split, a_scales, config, shape)
        if config.parts_m:
            gl.static_assert(shape.splits == 1)
            epilogue = (bias, a, b, first_row, first_column, m)
            accs, pending, last, factors = multiply_ahead(lines_a, lines_b, a_scales, b_scales, epilogue, mfma, config, shape)
            store_parts(out, accs, pending, last, factors, first_row, first_column, m, config, shape)
            return
        acc = multiply(lines_a, lines_b, a_scales, b_scales, mfma, config, shape)
        if shape.splits > 1:
            results = partial.results + tile.to(gl.int64) * (shape.splits * BM * BN)
            isa.buffer_store(acc, results + split * (BM * BN), fragment_offsets(BM, BN, acc.type.layout))
            if last_to_arrive(partial.arrived + tile, shape.splits):
                gl.store(partial.arrived + tile, 0)
                acc = merge(results, acc, shape.splits)
                factors = load_factors(acc, bias, a, b, first_row, first_column, m, shape)
                store_tile(out, acc, factors, first_row, first_column, m, shape)
        else:
            factors = load_factors(acc, bias, a, b, first_row, first_column, m, shape)
            store_tile(out, acc, factors, first_row, first_column, m, shape)

# mypy: ignore-errors
"""A tile of `mm` for one wave per SIMD: MFMAs of a block of k alternate with copies and reads of later blocks."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.gemm.operands_device import (
    STEP,
    copy_block,
    copy_blocks,
    line_storage,
    load_chunk,
)
from tokenspeed_kernel_amd.gfx950.gemm.result_device import load_factors, store_tile
from tokenspeed_kernel_amd.gfx950.instructions_device import copies
from tokenspeed_kernel_amd.gluon.layouts_device import log2, plain


@gluon.constexpr_function
def tile_scale_storage(operand, lines, scales, blocks=0):
    """Returns the LDS layout of the e8m0 scales of an operand: [lines, scales] for one block of k, [blocks, lines, scales] if
    ``blocks`` is given. The scales that a lane needs for all MFMAs of a block are adjacent."""
    found = isa.mfma_scale_layout(operand, [lines, scales])
    bases = [list(basis) for bases in (found.reg_bases, found.lane_bases, found.warp_bases) for basis in bases if any(basis)]
    if blocks:
        bases = [[0, *basis] for basis in bases] + [[1 << bit, 0, 0] for bit in range(log2(blocks))]
    return gl.SharedLinearLayout(bases, alignment=16)


@gluon.jit
def store_tile_scales(scales, words, STEPS: gl.constexpr):
    """Stores a chunk of scales, int32 [lines, steps], for `read_tile_scales`. ``STEPS``: steps of a block of k."""
    lines: gl.constexpr = words.shape[0]
    blocks: gl.constexpr = words.shape[1] // STEPS
    storage: gl.constexpr = tile_scale_storage(scales.layout, lines, 4 * STEPS, blocks)
    scale = gl.join(gl.join(words, words >> 16), gl.join(words >> 8, words >> 24)).to(gl.uint8)
    scale = scale.reshape(lines, blocks, 4 * STEPS).permute(1, 0, 2)
    scales.shared.reinterpret(gl.uint8, [blocks, lines, 4 * STEPS], storage).store(scale)


@gluon.jit
def read_tile_scales(lines, scales, index, PARTS: gl.constexpr, STEPS: gl.constexpr, BLOCKS: gl.constexpr):
    """Reads the e8m0 scales of an operand for one block of k from LDS. Returns a tuple with the scales of PARTS equal parts of the
    lines. If the operand has no e8m0 scales, they are 1."""
    count: gl.constexpr = lines.shared.shape[1]
    layout: gl.constexpr = isa.mfma_scale_layout(lines.layout, [count // PARTS, 4 * STEPS])
    if scales is None:
        found = (gl.full([count // PARTS, 4 * STEPS], 127, gl.uint8, layout),) * PARTS
    else:
        whole: gl.constexpr = isa.mfma_scale_layout(lines.layout, [count, 4 * STEPS])
        storage: gl.constexpr = tile_scale_storage(lines.layout, count, 4 * STEPS)
        shared = scales.shared.reinterpret(gl.uint8, [BLOCKS, count * 4 * STEPS], plain(1)).index(index)
        scale = shared.reinterpret(gl.uint8, [count, 4 * STEPS], storage).load(whole)
        found = ()
        for half in gl.static_range(2):
            pair = gl.split(scale.reshape(2, count // 2, 4 * STEPS).permute(1, 2, 0))[half]
            if PARTS == 2:
                found += (gl.convert_layout(pair, layout, assert_trivial=True),)
            else:
                for quarter in gl.static_range(2):
                    part = gl.split(pair.reshape(2, count // 4, 4 * STEPS).permute(1, 2, 0))[quarter]
                    found += (gl.convert_layout(part, layout, assert_trivial=True),)
    return found


@gluon.jit
def read_part(lines, stage, part: gl.constexpr, PARTS: gl.constexpr):
    """Reads a part of an operand's lines, of a block of k, from LDS."""
    count: gl.constexpr = lines.shared.shape[1] // PARTS
    size: gl.constexpr = lines.shared.shape[2]
    stages: gl.constexpr = lines.shared.shape[0]
    shared = lines.shared.reinterpret(lines.dtype, [stages * PARTS, count, size], plain(2)).index(stage * PARTS + part)
    shared = shared.reinterpret(lines.dtype, [count, size], line_storage(1, count, size))
    if lines.index == 1:
        shared = shared.permute([1, 0])
    return copies.load_shared_relaxed(shared, lines.layout)


@gluon.jit
def in_order(acc):
    """Returns the accumulator. The compiler moves neither MFMAs that compute it or use the result nor reads from LDS across this
    point."""
    isa.sched_barrier()
    return gl.inline_asm_elementwise("", "=v,0", [acc], dtype=acc.dtype, is_pure=False, pack=1)


@gluon.jit
def add_part(acc, operands, group: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Adds the dot products of a part of the rows and a part of the columns to their accumulator. ``operands``: as in
    `step_ahead`."""
    a_parts, a_scale, b_parts, b_scale = operands
    i: gl.constexpr = group % config.parts_m
    j: gl.constexpr = group // config.parts_m
    acc = in_order(acc)
    return in_order(isa.mfma_scaled(a_parts[i], a_scale[i], shape.a_format, b_parts[j], b_scale[j], shape.b_format, acc))


@gluon.jit
def step_ahead(
    accs, operands, a, b, a_scales, b_scales, block, slot: gl.constexpr, ahead: gl.constexpr, flight: gl.constexpr,
    config: gl.constexpr, shape: gl.constexpr,
):  # fmt: skip
    """Adds the dot products of a block of k in registers to the accumulators. Meanwhile, starts the copy of a later block, and
    reads the next one from LDS: each group of MFMAs is preceded by one copy or read.

    Args:
        accs: the accumulators, parts_m x parts_n.
        operands: the block's parts of a, their scales, the parts of b, and their scales.
        block, slot: the block's index, and the pipeline stage that contained it.
        ahead: number of blocks in flight. The block to copy is ``block + ahead``.
        flight: number of blocks in flight after the next one. If it is less than ``ahead - 1``, there is no block to copy.
    """
    STEPS: gl.constexpr = config.block_k // STEP
    BLOCKS: gl.constexpr = config.chunk // config.block_k
    PM: gl.constexpr = config.parts_m
    PN: gl.constexpr = config.parts_n
    COPY: gl.constexpr = flight == ahead - 1
    stages: gl.constexpr = config.stages
    gl.static_assert(PM * PN == 2 + PM + PN)
    a_next = ()
    b_next = ()
    after = ()
    for group in gl.static_range(PM * PN):
        if group == 0 and COPY:
            copy_block(a, block + ahead, (slot + ahead) % stages, shape)
        elif group == 1 and COPY:
            copy_block(b, block + ahead, (slot + ahead) % stages, shape)
            copies.commit_group()
        elif group == 2:
            copies.wait_group(flight)
            gl.barrier()  # all waves have the next block, and have read the block before: its buffer is free
            a_scale_next = read_tile_scales(a, a_scales, (block + 1) % BLOCKS, PM, STEPS, BLOCKS)
            b_scale_next = read_tile_scales(b, b_scales, (block + 1) % BLOCKS, PN, STEPS, BLOCKS)
        if group >= 2 and group < 2 + PM:
            a_next += (read_part(a, (slot + 1) % stages, group - 2, PM),)
        elif group >= 2 + PM:
            b_next += (read_part(b, (slot + 1) % stages, group - 2 - PM, PN),)
        after += (add_part(accs[group], operands, group, config, shape),)
    return after, (a_next, a_scale_next, b_next, b_scale_next)


@gluon.jit
def read_parts(a, b, a_scales, b_scales, config: gl.constexpr):
    """Reads the first block of k from LDS, as `step_ahead` reads the next one."""
    STEPS: gl.constexpr = config.block_k // STEP
    BLOCKS: gl.constexpr = config.chunk // config.block_k
    a_parts = ()
    b_parts = ()
    for part in gl.static_range(config.parts_m):
        a_parts += (read_part(a, 0, part, config.parts_m),)
    for part in gl.static_range(config.parts_n):
        b_parts += (read_part(b, 0, part, config.parts_n),)
    a_scale = read_tile_scales(a, a_scales, 0, config.parts_m, STEPS, BLOCKS)
    return a_parts, a_scale, b_parts, read_tile_scales(b, b_scales, 0, config.parts_n, STEPS, BLOCKS)


@gluon.jit
def store_tile_chunk(a_scales, b_scales, a_words, b_words, STEPS: gl.constexpr):
    """Stores a chunk of the scales of both operands for `read_tile_scales`."""
    store_tile_scales(a_scales, a_words, STEPS)
    store_tile_scales(b_scales, b_words, STEPS)


@gluon.jit
def multiply_ahead(a, b, a_scales, b_scales, mfma: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Does what `multiply` does, with one wave per SIMD: MFMAs read one block of k from registers, while the next one is read from
    LDS. Returns the accumulators without the last block, and the last block."""
    stages: gl.constexpr = config.stages
    blocks: gl.constexpr = (shape.split_k + config.block_k - 1) // config.block_k
    per_chunk: gl.constexpr = config.chunk // config.block_k
    ahead: gl.constexpr = blocks if blocks <= stages else stages - 1  # blocks in flight
    steady: gl.constexpr = (blocks - ahead) // stages * stages
    STEPS: gl.constexpr = config.block_k // STEP
    scaled: gl.constexpr = shape.scales == "mx"
    if scaled:
        a_words, b_words = load_chunk(a_scales, b_scales, 0)
    for first in gl.static_range(ahead):
        copy_blocks(a, b, first, first, shape)
    accs = ()
    for _ in gl.static_range(config.parts_m * config.parts_n):
        accs += (in_order(gl.zeros([config.block_m // config.parts_m, config.block_n // config.parts_n], gl.float32, mfma)),)
    if scaled:
        store_tile_chunk(a_scales, b_scales, a_words, b_words, STEPS)
        if per_chunk < blocks:
            a_words, b_words = load_chunk(a_scales, b_scales, 1)
    copies.wait_group(ahead - 1)
    gl.barrier()
    operands = read_parts(a, b, a_scales, b_scales, config)
    for first in range(0, steady, stages):
        for i in gl.static_range(stages):
            if scaled and i == stages - 1:  # noqa: SIM102  (a compile-time condition, and one at run time)
                if (first + stages) % per_chunk == 0:
                    store_tile_chunk(a_scales, b_scales, a_words, b_words, STEPS)
                    a_words, b_words = load_chunk(a_scales, b_scales, (first + stages) // per_chunk + 1)
            accs, operands = step_ahead(accs, operands, a, b, a_scales, b_scales, first + i, i, ahead, ahead - 1, config, shape)
    for block in gl.static_range(steady, blocks - 1):
        if scaled and (block + 1) % per_chunk == 0:
            store_tile_chunk(a_scales, b_scales, a_words, b_words, STEPS)
            if block + 1 + per_chunk < blocks:
                a_words, b_words = load_chunk(a_scales, b_scales, (block + 1) // per_chunk + 1)
        accs, operands = step_ahead(
            accs, operands, a, b, a_scales, b_scales, block, block % stages, ahead, min(ahead - 1, blocks - 2 - block), config,
            shape,
        )  # fmt: skip
    return accs, operands


@gluon.jit
def store_parts(out, bias, accs, operands, a, b, first_row, first_column, m, config: gl.constexpr, shape: gl.constexpr):
    """Adds the last block of k to the accumulators, and stores each part of the tile during the MFMAs of the next part."""
    PM: gl.constexpr = config.parts_m
    rows: gl.constexpr = config.block_m // PM
    columns: gl.constexpr = config.block_n // config.parts_n
    factors = ()
    for group in gl.static_range(len(accs)):
        row = first_row + group % PM * rows
        column = first_column + group // PM * columns
        factors += (load_factors(accs[group], bias, a, b, row, column, m, shape),)
    last = ()
    for group in gl.static_range(len(accs)):
        last += (add_part(accs[group], operands, group, config, shape),)
        if group > 0:
            row = first_row + (group - 1) % PM * rows
            column = first_column + (group - 1) // PM * columns
            store_tile(out, last[group - 1], factors[group - 1], row, column, m, shape)
    row = first_row + (len(accs) - 1) % PM * rows
    column = first_column + (len(accs) - 1) // PM * columns
    store_tile(out, last[len(accs) - 1], factors[len(accs) - 1], row, column, m, shape)

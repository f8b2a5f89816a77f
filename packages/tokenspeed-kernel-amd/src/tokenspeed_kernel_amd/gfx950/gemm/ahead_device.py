# mypy: ignore-errors
"""A tile of `mm` for one wave per SIMD: MFMAs of a block of k alternate with copies and reads of later blocks.

With one wave per SIMD, no other wave hides the latency of memory. So the mainloop works on three blocks of k at once: MFMAs
multiply a block in registers, the next block is read from LDS to registers, and a later block is copied from global memory directly
to LDS.

The tile is divided into ``parts_m`` x ``parts_n`` parts with an accumulator each. The MFMAs of one part are a *group*. One copy or
one read precedes each group. A block of k has two copies (a and b) and a read for each part of a and of b, so there must be
``2 + parts_m + parts_n`` groups. `in_order` keeps the compiler from moving MFMAs and reads across the boundaries of groups.

With float32 block scales, the MFMAs of a group start from 0. The VALU multiplies the result by the scales and adds it to the
accumulator during the MFMAs of the next group. So the result of one group is always *pending*.
"""

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
    store_chunk,
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
def read_part_factors(scales, index, PARTS: gl.constexpr):
    """Reads the scales of a block of k from LDS: for each row, a's scale times b's scale. Returns a tuple of PARTS tensors, one for
    each part of the tile's rows: float32 [rows of the part], in the accumulator's layout."""
    count: gl.constexpr = scales.shared.shape[1] // PARTS
    shared = scales.shared.reinterpret(gl.float32, [scales.shared.shape[0] * PARTS, count], plain(1))
    found = ()
    for part in gl.static_range(PARTS):
        found += (shared.index(index * PARTS + part).load(gl.SliceLayout(1, scales.layout)),)
    return found


@gluon.jit
def read_part(lines, stage, part: gl.constexpr, PARTS: gl.constexpr):
    """Reads part number ``part`` of PARTS equal parts of an operand's lines from LDS, for one block of k."""
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
    """Multiplies a part of the rows by a part of the columns, and adds the result to ``acc``. ``operands``: as in `step_ahead`."""
    a_parts, a_scale, b_parts, b_scale, _ = operands
    i: gl.constexpr = group % config.parts_m
    j: gl.constexpr = group // config.parts_m
    return in_order(isa.mfma_scaled(a_parts[i], a_scale[i], shape.a_format, b_parts[j], b_scale[j], shape.b_format, acc))


@gluon.jit
def multiply_part(like, operands, group: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Multiplies a part of the rows by a part of the columns, over one block of k. Returns the result without block scales, and the
    scales of the rows. ``like``: an accumulator of the same shape."""
    a_parts, a_scale, b_parts, b_scale, factors = operands
    i: gl.constexpr = group % config.parts_m
    j: gl.constexpr = group // config.parts_m
    acc = gl.zeros_like(like)
    part = isa.mfma_scaled(a_parts[i], a_scale[i], shape.a_format, b_parts[j], b_scale[j], shape.b_format, acc)
    return part, factors[i]


@gluon.jit
def add_scaled(acc, pending):
    """Adds the result of `multiply_part` to the accumulator."""
    part, factors = pending
    wide, _ = gl.broadcast(factors[:, None], acc)
    return in_order(gl.fma(part, wide, acc))


@gluon.jit
def step_ahead(
    accs, pending, operands, a, b, a_scales, b_scales, block, slot: gl.constexpr, ahead: gl.constexpr, flight: gl.constexpr,
    config: gl.constexpr, shape: gl.constexpr,
):  # fmt: skip
    """Adds the dot products of a block of k in registers to the accumulators. Meanwhile, starts the copy of a later block, and
    reads the next one from LDS: each group of MFMAs is preceded by one copy or read.

    Args:
        accs: the accumulators, parts_m x parts_n.
        pending: with block scales, the result of `multiply_part` of the previous block's last group, which is not in the
            accumulator yet; otherwise not used.
        operands: the block's parts of a, their scales, the parts of b, and their scales; and a tuple of the float32 scales of the
            parts of a, empty without block scales.
        block, slot: the block's index, and the pipeline stage that contained it.
        ahead: number of blocks in flight. The block to copy is ``block + ahead``.
        flight: number of blocks in flight after the next one. If it is less than ``ahead - 1``, there is no block to copy.
    """
    BLOCKS: gl.constexpr = config.chunk // config.block_k
    PM: gl.constexpr = config.parts_m
    PN: gl.constexpr = config.parts_n
    COPY: gl.constexpr = flight == ahead - 1
    stages: gl.constexpr = config.stages
    gl.static_assert(PM * PN == 2 + PM + PN)
    a_next = ()
    b_next = ()
    factors_next = ()
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
            a_scale_next, b_scale_next, factors_next = read_part_scales(
                a, b, a_scales, b_scales, (block + 1) % BLOCKS, config, shape
            )
        if group >= 2 and group < 2 + PM:
            a_next += (read_part(a, (slot + 1) % stages, group - 2, PM),)
        elif group >= 2 + PM:
            b_next += (read_part(b, (slot + 1) % stages, group - 2 - PM, PN),)
        if shape.scales == "blocks":
            # The VALU adds a group's dot products during the MFMAs of the next group.
            following = multiply_part(accs[group], operands, group, config, shape)
            if group == 0:
                last = add_scaled(accs[PM * PN - 1], pending)
            else:
                after += (add_scaled(accs[group - 1], pending),)
            pending = following
        else:
            after += (add_part(accs[group], operands, group, config, shape),)
    if shape.scales == "blocks":
        after += (last,)
    return after, pending, (a_next, a_scale_next, b_next, b_scale_next, factors_next)


@gluon.jit
def read_part_scales(a, b, a_scales, b_scales, index, config: gl.constexpr, shape: gl.constexpr):
    """Reads the scales of the block of k with index ``index`` of its chunk, as `step_ahead` needs them."""
    STEPS: gl.constexpr = config.block_k // STEP
    BLOCKS: gl.constexpr = config.chunk // config.block_k
    if shape.scales == "blocks":
        gl.static_assert(STEPS == 1, "a block of k has one scale")
        a_scale = read_tile_scales(a, None, index, config.parts_m, STEPS, BLOCKS)
        b_scale = read_tile_scales(b, None, index, config.parts_n, STEPS, BLOCKS)
        factors = read_part_factors(a_scales, index, config.parts_m)
    else:
        a_scale = read_tile_scales(a, a_scales, index, config.parts_m, STEPS, BLOCKS)
        b_scale = read_tile_scales(b, b_scales, index, config.parts_n, STEPS, BLOCKS)
        factors = ()
    return a_scale, b_scale, factors


@gluon.jit
def read_parts(a, b, a_scales, b_scales, config: gl.constexpr, shape: gl.constexpr):
    """Reads the first block of k from LDS, as `step_ahead` reads the next one."""
    a_parts = ()
    b_parts = ()
    for part in gl.static_range(config.parts_m):
        a_parts += (read_part(a, 0, part, config.parts_m),)
    for part in gl.static_range(config.parts_n):
        b_parts += (read_part(b, 0, part, config.parts_n),)
    a_scale, b_scale, factors = read_part_scales(a, b, a_scales, b_scales, 0, config, shape)
    return a_parts, a_scale, b_parts, b_scale, factors


@gluon.jit
def store_tile_chunk(a_scales, b_scales, a_words, b_words, STEPS: gl.constexpr):
    """Stores a chunk of the scales of both operands for `read_part_scales`."""
    if a_words.dtype == gl.float32:
        store_chunk(a_scales, b_scales, a_words, b_words)
    else:
        store_tile_scales(a_scales, a_words, STEPS)
        store_tile_scales(b_scales, b_words, STEPS)


@gluon.jit
def multiply_ahead(
    a, b, a_scales, b_scales, epilogue, mfma: gl.constexpr, config: gl.constexpr, shape: gl.constexpr
):  # fmt: skip
    """Does what `multiply` does, with one wave per SIMD: MFMAs read one block of k from registers, while the next one is read from
    LDS.

    ``epilogue``: the arguments of `load_part_factors`. Returns the accumulators without the last block of k, the ``pending`` group
    of `step_ahead`, the last block in registers, and the result of `load_part_factors`. `store_parts` takes all four."""
    stages: gl.constexpr = config.stages
    blocks: gl.constexpr = (shape.split_k + config.block_k - 1) // config.block_k
    per_chunk: gl.constexpr = config.chunk // config.block_k
    ahead: gl.constexpr = blocks if blocks <= stages else stages - 1  # blocks in flight
    steady: gl.constexpr = (blocks - ahead) // stages * stages
    STEPS: gl.constexpr = config.block_k // STEP
    scaled: gl.constexpr = shape.scales == "mx" or shape.scales == "blocks"
    if scaled:
        a_words, b_words = load_chunk(a_scales, b_scales, 0)
    for first in gl.static_range(ahead):
        copy_blocks(a, b, first, first, shape)
        if first == 0:  # the wait for the first block must not include later loads
            factors = load_part_factors(epilogue, mfma, config, shape)
    accs = ()
    for _ in gl.static_range(config.parts_m * config.parts_n):
        accs += (in_order(gl.zeros([config.block_m // config.parts_m, config.block_n // config.parts_n], gl.float32, mfma)),)
    if scaled:
        store_tile_chunk(a_scales, b_scales, a_words, b_words, STEPS)
        if per_chunk < blocks:
            a_words, b_words = load_chunk(a_scales, b_scales, 1)
    copies.wait_group(ahead - 1)
    gl.barrier()
    operands = read_parts(a, b, a_scales, b_scales, config, shape)
    pending = ()
    if shape.scales == "blocks":
        rows = gl.zeros([config.block_m // config.parts_m], gl.float32, gl.SliceLayout(1, mfma))
        pending = (gl.zeros_like(accs[0]), rows)
    for first in range(0, steady, stages):
        for i in gl.static_range(stages):
            if scaled and i == stages - 1:  # noqa: SIM102  (a compile-time condition, and one at run time)
                if (first + stages) % per_chunk == 0:
                    store_tile_chunk(a_scales, b_scales, a_words, b_words, STEPS)
                    a_words, b_words = load_chunk(a_scales, b_scales, (first + stages) // per_chunk + 1)
            accs, pending, operands = step_ahead(
                accs, pending, operands, a, b, a_scales, b_scales, first + i, i, ahead, ahead - 1, config, shape
            )
    for block in gl.static_range(steady, blocks - 1):
        if scaled and (block + 1) % per_chunk == 0:
            store_tile_chunk(a_scales, b_scales, a_words, b_words, STEPS)
            if block + 1 + per_chunk < blocks:
                a_words, b_words = load_chunk(a_scales, b_scales, (block + 1) // per_chunk + 1)
        accs, pending, operands = step_ahead(
            accs, pending, operands, a, b, a_scales, b_scales, block, block % stages, ahead,
            min(ahead - 1, blocks - 2 - block), config, shape,
        )  # fmt: skip
    return accs, pending, operands, factors


@gluon.jit
def load_part_factors(epilogue, mfma: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Loads the operands of the epilogues of all parts of a tile: a tuple with a result of `load_factors` per part."""
    bias, a, b, first_row, first_column, m = epilogue
    rows: gl.constexpr = config.block_m // config.parts_m
    columns: gl.constexpr = config.block_n // config.parts_n
    like = gl.zeros([rows, columns], gl.float32, mfma)
    factors = ()
    for group in gl.static_range(config.parts_m * config.parts_n):
        row = first_row + group % config.parts_m * rows
        column = first_column + group // config.parts_m * columns
        factors += (load_factors(like, bias, a, b, row, column, m, shape),)
    return factors


@gluon.jit
def store_parts(out, accs, pending, operands, factors, first_row, first_column, m, config: gl.constexpr, shape: gl.constexpr):
    """Adds the last block of k to the accumulators, and stores each part of the tile during the MFMAs of the next part."""
    PM: gl.constexpr = config.parts_m
    rows: gl.constexpr = config.block_m // PM
    columns: gl.constexpr = config.block_n // config.parts_n
    last = ()
    for group in gl.static_range(len(accs)):
        if shape.scales == "blocks":
            following = multiply_part(accs[group], operands, group, config, shape)
            if group == 0:
                final = add_scaled(accs[len(accs) - 1], pending)
            else:
                last += (add_scaled(accs[group - 1], pending),)
            pending = following
        else:
            last += (add_part(accs[group], operands, group, config, shape),)
        if group > 0:
            row = first_row + (group - 1) % PM * rows
            column = first_column + (group - 1) // PM * columns
            store_tile(out, last[group - 1], factors[group - 1], row, column, m, shape)
    if shape.scales == "blocks":
        last += (add_scaled(final, pending),)
    row = first_row + (len(accs) - 1) % PM * rows
    column = first_column + (len(accs) - 1) // PM * columns
    store_tile(out, last[len(accs) - 1], factors[len(accs) - 1], row, column, m, shape)

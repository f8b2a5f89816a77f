# mypy: ignore-errors
"""Device code of `dense`: GEMMs of bf16 tokens and bf16 weights in the checkpoint's layout, [experts, rows, k].

Few pairs: the left operand of the MFMAs (16 x 16 x 32) is 16 rows of weights per wave, which a wave loads from global memory to
registers, without LDS. The right operand is 16 rows of tokens, the columns of the accumulator. The waves of a workgroup have
different ranges of k, or different experts, so each wave needs other tokens. The 16 columns are divided among the waves: a column
has the tokens of one wave, and its dot products with the weights of other waves are discarded. This costs no time, because the GEMM
is memory-bound.

Many pairs: a workgroup copies tokens and weights directly to LDS, a *step* of k at a time, ``config.stages - 1`` steps ahead.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.common.layouts_device import copy_layout, key_storage
from tokenspeed_kernel_amd.gfx950.instructions_device import copies
from tokenspeed_kernel_amd.gfx950.moe.grouped_device import row_of_column
from tokenspeed_kernel_amd.gfx950.moe.schedule_device import schedule_expert
from tokenspeed_kernel_amd.gfx950.moe.tile_device import activated

ROWS = gl.constexpr(16)  # rows and columns of an MFMA
SPLIT = gl.constexpr(4)  # waves of a workgroup of `first_kernel`, among which k is split
PAIRS = gl.constexpr(4)  # pairs of one expert that a workgroup of `first_kernel` computes: each has a column per split
STEP = gl.constexpr(256)  # elements of k that a wave loads at once
WIDTH = gl.constexpr(8)  # elements in 16 bytes


@gluon.jit
def add(a, b):
    return a + b


@gluon.constexpr_function
def steps_of(k, split):
    """Returns the number of MFMA steps along k in each part, if k is divided into ``split`` parts."""
    return -(-k // (STEP.value * split))


@gluon.jit
def weight_row(row, features, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, UP: gl.constexpr):
    """Returns the rows of w13 with gate (up if ``UP``) of the features ``row``. The rows of w2 are its features."""
    if GATED and INTERLEAVED:
        row = 2 * row + UP
    elif GATED and UP:
        row = row + features
    return row


@gluon.jit
def load_step(base, offsets, place, step, k: gl.constexpr, some, SPLIT: gl.constexpr):
    """Loads a step of an operand of a GEMM.

    Args:
        offsets: the first step's offsets from ``base``.
        place: the positions of the first step's elements in k.
        some: mask of the elements to load. All other elements, and elements beyond k, are zeros.
    """
    mask = some
    if k % (STEP * SPLIT) != 0:
        mask = mask & (place < k - step * STEP)
    return isa.buffer_load(base + step * STEP, offsets, mask=mask)


# -- few pairs -----------------------------------------------------------------------------------------------------------------


@gluon.jit
def first_kernel(operands, pairs, features, swiglu, shape: gl.constexpr):
    """Computes the gate/up GEMM. Workgroups are numbered by (token, expert) pair and by block of 16 features; the block varies
    fastest. The workgroups of an expert's first pair compute up to PAIRS (4) pairs of the expert. The workgroups of its fifth pair
    compute the next PAIRS pairs, and so on. All other workgroups exit at once.

    Args:
        operands, swiglu, shape: the tensors, the activation's parameters and the constants of the GEMM, see `dense`.
        pairs: number of pairs, at most 64.
        features: the intermediate size.
    """
    blocks = features // ROWS
    pair = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    lane = gl.arange(0, 64, gl.BlockedLayout([1], [64], [gl.num_warps()], [0]))
    expert = gl.load(operands.ids + pair)
    own = (isa.buffer_load(operands.ids, lane, mask=lane < pairs, other=-1) == expert).to(gl.int32)
    earlier = gl.sum(gl.where(lane < pair, own, 0), axis=0)
    if (expert >= 0) & (expert < shape.num_experts) & (earlier % PAIRS == 0):
        # Positions of the expert's pairs, counted from 1 at the workgroup's own pair.
        position = gl.where(own != 0, gl.associative_scan(own, 0, add) - earlier, 0)
        multiply_pairs(operands, position, lane, expert, block * ROWS, features, swiglu, shape)


@gluon.jit
def pair_of(position, lane, index, count):
    """Returns the pair whose position is ``index`` + 1, or the last one, of ``count``."""
    return gl.max(gl.where(position == gl.minimum(count, index + 1), lane, 0), axis=0)


@gluon.jit
def multiply_pairs(operands, position, lane, expert, first_feature, features, swiglu, shape: gl.constexpr):
    """Computes 16 features of the gate/up GEMM, and the activation, for up to PAIRS pairs of ``expert``. Wave ``w`` has the range
    ``w`` of k, and so have the columns ``c`` with ``c % SPLIT == w``; the columns of a pair are adjacent.

    Args:
        position: int32 [64], the position of the lane's pair among the expert's pairs, counted from 1 at the workgroup's own pair;
            at most 0 for other pairs.
        lane: int32 [64], the lane's pair.
        first_feature: the first of the 16 features.
        operands, features, swiglu, shape: see `first_kernel`.
    """
    k: gl.constexpr = shape.k
    steps: gl.constexpr = steps_of(k, SPLIT)
    mfma: gl.constexpr = isa.mfma_layout([16, 16, 32], False, [SPLIT, 1])
    left: gl.constexpr = gl.DotOperandLayout(0, mfma, WIDTH)
    right: gl.constexpr = gl.DotOperandLayout(1, mfma, WIDTH)
    count = gl.max(position, axis=0)
    column = gl.arange(0, ROWS, gl.SliceLayout(0, right))
    token = column * 0
    for index in gl.static_range(PAIRS):
        token = gl.where(column // SPLIT == index, pair_of(position, lane, index, count) // shape.top_k, token)
    x_place = gl.arange(0, STEP, gl.SliceLayout(1, right))[:, None] + (column % SPLIT * (steps * STEP))[None, :]
    x_offsets = x_place + (token * k)[None, :]
    x_some, _ = gl.broadcast((column // SPLIT < count)[None, :], x_offsets)
    row = gl.arange(0, ROWS * SPLIT, gl.SliceLayout(1, left))
    feature = first_feature + row % ROWS
    place = gl.arange(0, STEP, gl.SliceLayout(0, left))[None, :] + (row // ROWS * (steps * STEP))[:, None]
    gate_offsets = place + (weight_row(feature, features, True, shape.interleaved, False) * k)[:, None]
    up_offsets = place + (weight_row(feature, features, True, shape.interleaved, True) * k)[:, None]
    every, _ = gl.broadcast((row >= 0)[:, None], gate_offsets)
    weight = operands.weight + expert.to(gl.int64) * features * (2 * k)
    gate = gl.zeros([ROWS * SPLIT, ROWS], gl.float32, mfma)
    up = gl.zeros([ROWS * SPLIT, ROWS], gl.float32, mfma)
    loaded = ()
    for step in gl.static_range(min(2, steps)):
        loaded += (
            load_step(operands.x, x_offsets, x_place, step, k, x_some, SPLIT),
            load_step(weight, gate_offsets, place, step, k, every, SPLIT),
            load_step(weight, up_offsets, place, step, k, every, SPLIT),
        )
    for step in gl.static_range(steps):
        gate = isa.mfma(loaded[1], loaded[0], gate)
        up = isa.mfma(loaded[2], loaded[0], up)
        loaded = loaded[3:]
        if step + 2 < steps:
            loaded += (
                load_step(operands.x, x_offsets, x_place, step + 2, k, x_some, SPLIT),
                load_step(weight, gate_offsets, place, step + 2, k, every, SPLIT),
                load_step(weight, up_offsets, place, step + 2, k, every, SPLIT),
            )
    gate = sum_of_splits(gate)
    up = sum_of_splits(up)
    layout: gl.constexpr = gate.type.layout
    feature = first_feature + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if shape.bias:
        bias = operands.bias + expert * (2 * features)
        gate += gl.load(bias + weight_row(feature, features, True, shape.interleaved, False)).to(gl.float32)[:, None]
        up += gl.load(bias + weight_row(feature, features, True, shape.interleaved, True)).to(gl.float32)[:, None]
    index = gl.arange(0, PAIRS, gl.SliceLayout(0, layout))
    out_row = index * 0
    for other in gl.static_range(PAIRS):
        out_row = gl.where(index == other, pair_of(position, lane, other, count), out_row)
    result = activated(gate, up, swiglu, shape.limited).to(operands.out.dtype.element_ty)
    exists, _ = gl.broadcast((index < count)[None, :], result)
    isa.buffer_store(result, operands.out, feature[:, None] + (out_row * features)[None, :], mask=exists)


@gluon.jit
def sum_of_splits(acc):
    """Returns the sum over the parts of k, [16, PAIRS]. Part ``w`` is in the rows of wave ``w`` and in the columns ``c`` with
    ``c % SPLIT == w``; all other elements of the accumulator are discarded."""
    row = gl.arange(0, ROWS * SPLIT, gl.SliceLayout(1, acc.type.layout))
    column = gl.arange(0, ROWS, gl.SliceLayout(0, acc.type.layout))
    own = gl.where((row // ROWS)[:, None] == (column % SPLIT)[None, :], acc, 0.0)
    return gl.sum(gl.sum(own.reshape(SPLIT, ROWS, PAIRS, SPLIT), 3), 0)


@gluon.jit
def second_kernel(operands, features, shape: gl.constexpr):
    """Computes the down projection and the sum over slots. The grid is [blocks of 16 features, tokens]. Each wave has one part of k
    of one slot, and so has each column: only the 16 rows of wave ``w`` in column ``w`` are used.

    Args:
        operands, shape: the tensors and the constants of the GEMM, see `dense`.
        features: the hidden size.
    """
    k: gl.constexpr = shape.k
    warps: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = shape.split
    top_k: gl.constexpr = shape.top_k
    steps: gl.constexpr = steps_of(k, PARTS)
    mfma: gl.constexpr = isa.mfma_layout([16, 16, 32], False, [warps, 1])
    left: gl.constexpr = gl.DotOperandLayout(0, mfma, WIDTH)
    right: gl.constexpr = gl.DotOperandLayout(1, mfma, WIDTH)
    first_feature = gl.program_id(0) * ROWS
    token = gl.program_id(1)
    column = gl.arange(0, ROWS, gl.SliceLayout(0, right))
    x_place = gl.arange(0, STEP, gl.SliceLayout(1, right))[:, None] + (column % PARTS * (steps * STEP))[None, :]
    x_offsets = x_place + ((token * top_k + column // PARTS) * k)[None, :]
    x_some, _ = gl.broadcast((column // PARTS < top_k)[None, :], x_offsets)
    row = gl.arange(0, ROWS * warps, gl.SliceLayout(1, left))
    slot = gl.minimum(row // ROWS // PARTS, top_k - 1)
    expert = gl.load(operands.ids + token * top_k + slot)
    known = (row // ROWS // PARTS < top_k) & (expert >= 0) & (expert < shape.num_experts)
    place = gl.arange(0, STEP, gl.SliceLayout(0, left))[None, :] + (row // ROWS % PARTS * (steps * STEP))[:, None]
    offsets = place + ((gl.where(known, expert, 0) * features + first_feature + row % ROWS) * k)[:, None]
    some, _ = gl.broadcast(known[:, None], offsets)
    acc = gl.zeros([ROWS * warps, ROWS], gl.float32, mfma)
    row = gl.arange(0, ROWS * warps, gl.SliceLayout(1, mfma))
    column = gl.arange(0, ROWS, gl.SliceLayout(0, mfma))
    slot = gl.minimum(row // ROWS // PARTS, top_k - 1)
    expert = gl.load(operands.ids + token * top_k + slot)
    known = (row // ROWS // PARTS < top_k) & (expert >= 0) & (expert < shape.num_experts)
    weight = gl.load(operands.topk_weights + token * top_k + slot)
    bias = weight * 0.0
    if shape.bias:
        at = gl.where(known, expert, 0) * features + first_feature + row % ROWS
        bias = gl.load(operands.bias + at, mask=row // ROWS % PARTS == 0, other=0.0).to(gl.float32)
    loaded = ()
    for step in gl.static_range(min(3, steps)):
        loaded += (
            load_step(operands.x, x_offsets, x_place, step, k, x_some, PARTS),
            load_step(operands.weight, offsets, place, step, k, some, PARTS),
        )
    for step in gl.static_range(steps):
        acc = isa.mfma(loaded[1], loaded[0], acc)
        loaded = loaded[2:]
        if step + 3 < steps:
            loaded += (
                load_step(operands.x, x_offsets, x_place, step + 3, k, x_some, PARTS),
                load_step(operands.weight, offsets, place, step + 3, k, some, PARTS),
            )
    result = gl.sum(gl.where((row // ROWS)[:, None] == column[None, :], acc, 0.0), axis=1)
    result = gl.where(known, (result + bias) * weight, 0.0)  # the weight of an unknown expert may be NaN
    total = gl.sum(result.reshape(warps, ROWS), axis=0)
    feature = gl.arange(0, ROWS, total.type.layout)
    out = operands.out + token.to(gl.int64) * operands.out_stride + first_feature
    isa.buffer_store(total.to(operands.out.dtype.element_ty), out, feature)


# -- many pairs ----------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["entries", "tokens"])
def sort_kernel(ids, order, tiles, entries, num_experts, tokens, TOP_K: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr):
    """Sorts pairs by expert, and lists the tiles. Each workgroup does this for one expert. Arguments: see `schedule_device`."""
    schedule_expert(ids, tokens * TOP_K, order, tiles, entries, gl.program_id(0), num_experts, ROWS, CHUNK)


@gluon.constexpr_function
def tile_layout(config):
    """Returns the register layout of the accumulators of a tile, [tokens, features]. A lane holds four adjacent features."""
    return isa.mfma_layout(list(config.mfma), True, list(config.waves))


@gluon.jit
def copy_step(base, offsets, shared, step, stage):
    """Starts the copy of a step of k to LDS buffer ``stage``."""
    width: gl.constexpr = shared.shape[2]
    copies.buffer_load_to_shared(shared.index(stage), base + step * width, offsets)


@gluon.jit
def copy_all(tokens, token_offsets, token_shared, weight, first_offsets, first_shared, second_offsets, second_shared, step, stage):
    """Starts the copies of a step of tokens and of both halves of the weights to LDS buffer ``stage``, as one group of copies."""
    copy_step(tokens, token_offsets, token_shared, step, stage)
    copy_step(weight, first_offsets, first_shared, step, stage)
    copy_step(weight, second_offsets, second_shared, step, stage)
    copies.commit_group()


@gluon.jit
def multiply_step(first, second, token_shared, first_shared, second_shared, stage):
    """Adds a step's dot products of tokens and both halves of the weights to the accumulators."""
    mfma: gl.constexpr = first.type.layout
    a = copies.load_shared_relaxed(token_shared.index(stage), gl.DotOperandLayout(0, mfma, WIDTH))
    right: gl.constexpr = gl.DotOperandLayout(1, mfma, WIDTH)
    first = isa.mfma(a, copies.load_shared_relaxed(first_shared.index(stage).permute([1, 0]), right), first)
    second = isa.mfma(a, copies.load_shared_relaxed(second_shared.index(stage).permute([1, 0]), right), second)
    return first, second


@gluon.jit
def grouped_kernel(operands, features, blocks, swiglu, shape: gl.constexpr, config: gl.constexpr):
    """Computes a tile of one grouped GEMM. Workgroups are numbered by tile of tokens and by block of features; the block varies
    fastest. The accumulators ``first`` and ``second`` are gate and up, or the halves of the block's features.

    Args:
        operands, swiglu, shape, config: the tensors, the activation's parameters, the GEMM's constants and the tile, see `dense`.
        features: number of features of the result.
        blocks: number of blocks of features.
    """
    k: gl.constexpr = shape.k
    GATED: gl.constexpr = shape.gated
    COLUMNS: gl.constexpr = config.columns
    HALF: gl.constexpr = config.features
    dtype: gl.constexpr = operands.x.dtype.element_ty
    mfma: gl.constexpr = tile_layout(config)
    token_storage: gl.constexpr = key_storage(mfma, COLUMNS, config.step, dtype)
    storage: gl.constexpr = key_storage(mfma, HALF, config.step, dtype)
    token_copy: gl.constexpr = copy_layout(token_storage, dtype, gl.num_warps())
    copy: gl.constexpr = copy_layout(storage, dtype, gl.num_warps())
    steps: gl.constexpr = k // config.step
    ahead: gl.constexpr = min(config.stages - 1, steps)
    tile = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    first_feature = block * (HALF if GATED else 2 * HALF)
    expert = gl.load(operands.tiles + tile * 4)
    if (expert >= 0) & (first_feature < features):
        first_row = gl.load(operands.tiles + tile * 4 + 1)
        count = gl.load(operands.tiles + tile * 4 + 2)
        token = row_of_column(operands.order, first_row, count, shape.top_k, GATED, COLUMNS, gl.SliceLayout(1, token_copy))
        token_offsets = (token * k)[:, None] + gl.arange(0, config.step, gl.SliceLayout(0, token_copy))[None, :]
        row = first_feature + gl.arange(0, HALF, gl.SliceLayout(1, copy))
        place = gl.arange(0, config.step, gl.SliceLayout(0, copy))[None, :]
        last = features - 1  # rows beyond it are read in place of rows that do not exist
        first_offsets = (weight_row(gl.minimum(row, last), features, GATED, shape.interleaved, False) * k)[:, None] + place
        other = row if GATED else row + HALF
        second_offsets = (weight_row(gl.minimum(other, last), features, GATED, shape.interleaved, True) * k)[:, None] + place
        weight = operands.weight + expert.to(gl.int64) * features * (2 * k if GATED else k)
        token_shared = gl.allocate_shared_memory(dtype, [config.stages, COLUMNS, config.step], token_storage)
        first_shared = gl.allocate_shared_memory(dtype, [config.stages, HALF, config.step], storage)
        second_shared = gl.allocate_shared_memory(dtype, [config.stages, HALF, config.step], storage)
        first = gl.zeros([COLUMNS, HALF], gl.float32, mfma)
        second = gl.zeros([COLUMNS, HALF], gl.float32, mfma)
        for step in gl.static_range(ahead):
            copy_all(
                operands.x, token_offsets, token_shared, weight, first_offsets, first_shared, second_offsets, second_shared,
                step, step,
            )  # fmt: skip
        for step in range(steps - ahead):
            copies.wait_group(ahead - 1)
            gl.barrier()  # all waves have read the previous step: its buffer is free
            copy_all(
                operands.x, token_offsets, token_shared, weight, first_offsets, first_shared, second_offsets, second_shared,
                step + ahead, (step + ahead) % config.stages,
            )  # fmt: skip
            first, second = multiply_step(first, second, token_shared, first_shared, second_shared, step % config.stages)
        for step in gl.static_range(steps - ahead, steps):
            copies.wait_group(steps - 1 - step)
            first, second = multiply_step(first, second, token_shared, first_shared, second_shared, step % config.stages)
        store_tile(operands, first, second, expert, first_row, count, first_feature, features, swiglu, shape)


@gluon.jit
def store_tile(operands, first, second, expert, first_row, count, first_feature, features, swiglu, shape: gl.constexpr):
    """Stores a tile's accumulators: in the gate/up GEMM after the activation, in the down projection directly."""
    layout: gl.constexpr = first.type.layout
    HALF: gl.constexpr = first.shape[1]
    dtype: gl.constexpr = operands.out.dtype.element_ty
    column = gl.arange(0, first.shape[0], gl.SliceLayout(1, layout))
    feature = first_feature + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    if shape.bias:
        bias = operands.bias + expert * (2 * features if shape.gated else features)
        inside = feature < features
        at = weight_row(feature, features, shape.gated, shape.interleaved, False)
        first += gl.load(bias + at, mask=inside, other=0.0).to(gl.float32)[None, :]
        other = feature if shape.gated else feature + HALF
        at = weight_row(other, features, shape.gated, shape.interleaved, True)
        second += gl.load(bias + at, mask=other < features, other=0.0).to(gl.float32)[None, :]
    exists = (column < count)[:, None]
    if shape.gated:
        result = activated(first, second, swiglu, shape.limited).to(dtype)
        offsets = ((first_row + column) * features)[:, None] + feature[None, :]
        isa.buffer_store(result, operands.out, offsets, mask=exists & (feature < features)[None, :])
    else:
        pair = gl.load(operands.order + first_row + gl.minimum(column, count - 1))
        offsets = (pair * features)[:, None] + feature[None, :]
        isa.buffer_store(first.to(dtype), operands.out, offsets, mask=exists & (feature < features)[None, :])
        isa.buffer_store(second.to(dtype), operands.out, offsets + HALF, mask=exists & (feature + HALF < features)[None, :])

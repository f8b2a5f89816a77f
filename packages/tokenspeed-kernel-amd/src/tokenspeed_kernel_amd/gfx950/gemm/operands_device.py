# mypy: ignore-errors
"""The operands of a tile of `mm`, and their scales, on their way from global memory through LDS to MFMA registers.

A *line* is a row of a, or a column of b. A *block* of k is one pipeline stage, a *step* is the 128 elements of one MFMA, and a
*chunk* is the elements whose scales are in LDS at once.

* Lines: asynchronous copies, 16 bytes per lane, write them from global memory directly to LDS. The copies write LDS in the order of
  lanes, so the swizzle is applied to the addresses in global memory (`swizzled_place`) and to the reads (`line_storage`).
* Scales: loaded to registers, packed to 32-bit words, and stored to LDS. A word has the scales of one line and one step (nvfp4:
  half a step).
* Waves may divide k (``waves_k``). Each wave then has its own part of each block, and its own accumulator.
* *Folds*: a tile with fewer lines than an MFMA has rows puts several ranges of k side by side, as if they were further lines.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.instructions_device import copies
from tokenspeed_kernel_amd.gluon.layouts_device import log2, plain

BLOCK = gl.constexpr(32)  # elements of k that share a scale
STEP = gl.constexpr(128)  # elements of k of an MFMA; a word has their four scales


@gluon.constexpr_function
def bytes_of(elements, format):
    """Returns the number of bytes of ``elements`` elements along k."""
    return elements // 2 if format in ("e2m1", "nvfp4") else 2 * elements if is_dense(format) else elements


@gluon.constexpr_function
def is_dense(format):
    """Whether elements are 16-bit floats. Lines of these elements are copied as bytes, like quantised lines."""
    return format == "bf16" or format == "fp16"


@gluon.constexpr_function
def register_dtype(format):
    """Returns the dtype of an operand's elements in registers, before the MFMAs or `nvfp4_device`."""
    if format == "nvfp4":
        return gl.int32  # eight codes, see `nvfp4_device`
    return {"e2m1": gl.uint8, "e4m3": gl.float8e4nv, "e5m2": gl.float8e5, "bf16": gl.bfloat16, "fp16": gl.float16}[format]


@gluon.constexpr_function
def swizzle_of(size):
    """XOR masks that permute the 16-byte chunks of a line of ``size`` bytes in LDS: one for each of the four lowest bits of the
    line's index.

    A wave reads one chunk of each of 16 lines at once. Lines 0 to 3 and 12 to 15 are read together with the next chunk of lines 4
    to 11. The masks move all 16 chunks to different banks.
    """
    return {64: [0, 0, 32, 48], 128: [0, 16, 32, 64], 256: [16, 32, 64, 128]}[min(size, 256)]


@gluon.constexpr_function
def line_storage(waves_k, lines, size, width=1):
    """LDS layout of lines of ``size`` elements of ``width`` bytes, [lines, size], without padding and bank conflicts. If waves
    divide k, the layout is [waves_k, lines, size]."""
    masks = [mask // width for mask in swizzle_of(size * width)]
    bases = [[0, 1 << bit] for bit in range(log2(size))]
    bases += [[1 << bit, masks[bit] if bit < 4 else 0] for bit in range(log2(lines))]
    if waves_k > 1:
        bases = [[0, *basis] for basis in bases] + [[1 << bit, 0, 0] for bit in range(log2(waves_k))]
    return gl.SharedLinearLayout(bases, alignment=16)


@gluon.constexpr_function
def accumulator_layout(config, format):
    """The register layout of a tile's accumulator, [rows, columns]. If waves divide k, each wave has an accumulator of its own,
    [waves_k, rows, columns]."""
    waves = [config.waves_m, config.waves_n] if config.waves_k == 1 else [config.waves_k, 1, 1]
    return isa.mfma_layout([16, 16, 32 if is_dense(format) or format == "nvfp4" else 128], True, waves)


@gluon.constexpr_function
def block_layout(format, index, mfma, waves_k, lines):
    """The register layout in which an operand's block of k is read from LDS: of MFMA operands, or of words of eight nvfp4 codes,
    [waves_k, lines, words]: 32 adjacent elements per lane."""
    if format != "nvfp4":
        return gl.DotOperandLayout(index, mfma, 8 if is_dense(format) else 16)
    registers = [[0, 0, 1], [0, 0, 2]] + [[0, 1 << bit, 0] for bit in range(4, log2(lines))]
    lanes = [[0, 1 << bit, 0] for bit in range(4)] + [[0, 0, 4], [0, 0, 8]]
    waves = [[1 << bit, 0, 0] for bit in range(log2(waves_k))]
    return gl.DistributedLinearLayout(registers, lanes, waves, [], [waves_k, lines, 16])


@gluon.constexpr_function
def scale_block(shape):
    """Returns the number of elements of k that share a one-byte scale."""
    return 16 if shape.scales == "nvfp4" else 32


@gluon.jit
def empty_accumulator(mfma: gl.constexpr, config: gl.constexpr):
    """Returns zeros, float32 [block_m, block_n]; if waves divide k, [waves_k, block_m, folds * block_n]."""
    if config.waves_k == 1:
        acc = gl.zeros([config.block_m, config.block_n], gl.float32, mfma)
    else:
        acc = gl.zeros([config.waves_k, config.block_m, config.folds * config.block_n], gl.float32, mfma)
    return acc


@gluon.constexpr_function
def scale_layout(operand, waves_k, lines, scales):
    """The register layout of an operand's scales, uint8 [lines, scales]; if waves divide k, [waves_k, lines, scales]."""
    if waves_k == 1:
        return isa.mfma_scale_layout(operand, [lines, scales])
    one_wave = gl.DotOperandLayout(operand.operand_index, isa.mfma_layout([16, 16, 128], True, [1, 1]), 16)
    found = isa.mfma_scale_layout(one_wave, [lines, scales])
    registers, lanes = ([[0, *basis] for basis in bases] for bases in (found.reg_bases, found.lane_bases))
    waves = [[1 << bit, 0, 0] for bit in range(log2(waves_k))]
    return gl.DistributedLinearLayout(list(registers), list(lanes), waves, [], [waves_k, lines, scales])


@gluon.constexpr_function
def line_copy_layout(lines, size, warps):
    """The layout of a copy from global memory to LDS, [lines, size]: each lane copies 16 bytes, and a wave writes 1 KB of
    contiguous LDS. If there are fewer KB than waves, several waves have the same elements."""
    bases = [[0, 1 << bit] for bit in range(log2(size))] + [[1 << bit, 0] for bit in range(log2(lines))]
    after = 10 + log2(warps)
    bases += [[0, 0]] * (after - len(bases))
    return gl.DistributedLinearLayout(bases[:4] + bases[after:], bases[4:10], bases[10:after], [], [lines, size])


@gluon.jit
def swizzled_place(lines: gl.constexpr, size: gl.constexpr, layout: gl.constexpr):
    """Returns the byte of its line that each element of LDS holds, int32 [lines, size]."""
    MASKS: gl.constexpr = swizzle_of(size)
    line = gl.arange(0, lines, gl.SliceLayout(1, layout))
    mask = line * 0
    for bit in gl.static_range(4):
        mask ^= (line >> bit & 1) * MASKS[bit]
    place = gl.arange(0, size, gl.SliceLayout(0, layout))[None, :] ^ mask[:, None]
    return gl.max_contiguous(gl.multiple_of(place, [1, 16]), [1, 16])


@gluon.constexpr_function
def fold_length(k, config):
    """Returns the number of elements of k per fold, see `Config`."""
    each = config.folds * config.block_k
    return (k + each - 1) // each * config.block_k


@gluon.constexpr_function
def scale_copy_layout(lines, steps, warps, bytes, tiles):
    """The register layout of a chunk of scales on their way to LDS, int32 [lines, steps]; or the words' bytes, uint8 [lines, 4 *
    steps].

    Args:
        bytes: bytes per word: 4, or 1 for whole words.
        tiles: whether a lane has words of several lines, as `store_tile_scales` needs them. Otherwise, a lane has 4 words of a
            line, which it loads at once.
    """
    if not tiles:
        return gl.BlockedLayout([1, 4 * bytes], [256 // steps, steps // 4], [warps, 1], [1, 0])
    rows = [[1 << bit, 0] for bit in range(log2(lines))]
    words = rows[:3] + [[0, bytes << bit] for bit in range(log2(steps))] + rows[3:]
    after = 6 + log2(warps)
    words += [[0, 0]] * (after - len(words))
    registers = [[0, 1 << bit] for bit in range(log2(bytes))] + words[after:]
    return gl.DistributedLinearLayout(registers, words[:6], words[6:after], [], [lines, steps * bytes])


@gluon.aggregate
class Lines:
    """An operand's lines in a workgroup's tile: rows of a, or columns of b, contiguous along k; and their LDS.

    Attributes:
        base: pointer to the tile's first line, at the first element of the workgroup's split of k.
        offsets: int32 [waves_k * lines, bytes], offsets of the first block of k from ``base``. Each wave along k has a part of a
            block, of ``bytes`` bytes.
        place: int32 [waves_k * lines, bytes], the index of each byte of the first block within its line.
        end: number of bytes of a line from ``base`` to the end of k.
        shared: LDS, [stages, waves_k * lines, bytes]; reads have layout `line_storage`.
        index: 0 for a, 1 for b.
        waves_k: number of waves that divide k.
        layout: the operand's layout in registers.
        dtype: the elements' dtype in registers. uint8 has two e2m1 elements.
    """

    base: gl.tensor
    offsets: gl.tensor
    place: gl.tensor
    end: gl.tensor
    shared: gl.shared_memory_descriptor
    index: gl.constexpr
    waves_k: gl.constexpr
    layout: gl.constexpr
    dtype: gl.constexpr


@gluon.aggregate
class Scales:
    """The block scales of an operand's lines in a workgroup's tile, and LDS for a chunk of them.

    A word is a line's scales of one step: four e8m0 scales, or the float32 scale of 128 elements. With nvfp4, a word has the four
    scales of half a step.

    Attributes:
        base: pointer to the first scale of the tile's first line, in the workgroup's split of k; or to its first word.
        offsets: int32 [lines, scales or words of a chunk], the offsets of the first chunk from ``base``.
        place: int32 [1 or lines, scales or words of a chunk], the index of each of these within its line.
        end: number of scales or words from ``base`` to the end of k.
        shared: LDS, int32 [steps / waves_k, waves_k * lines]. A word has a line's scales of one step.
        waves_k, layout: as in `Lines`.
    """

    base: gl.tensor
    offsets: gl.tensor
    place: gl.tensor
    end: gl.tensor
    shared: gl.shared_memory_descriptor
    waves_k: gl.constexpr
    layout: gl.constexpr


@gluon.jit
def open_lines(operand, count, first, split, mfma: gl.constexpr, INDEX: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Returns the `Lines` of a tile, with newly allocated LDS.

    Args:
        operand: see `mm.Operand`.
        count: number of the operand's lines.
        first: the tile's first line.
        split: the workgroup's split of k.
    """
    format: gl.constexpr = shape.b_format if INDEX else shape.a_format
    stride: gl.constexpr = shape.b_stride if INDEX else shape.a_stride
    block: gl.constexpr = config.block_n if INDEX else config.block_m
    lines: gl.constexpr = block * config.folds
    waves_k: gl.constexpr = config.waves_k
    size: gl.constexpr = bytes_of(config.block_k // waves_k, format)
    fold: gl.constexpr = bytes_of(fold_length(shape.k, config), format)
    copy: gl.constexpr = line_copy_layout(waves_k * lines, size, gl.num_warps())
    # Lines beyond the last one repeat it.
    row = gl.arange(0, waves_k * lines, gl.SliceLayout(1, copy))
    line = gl.minimum(row % block, count - 1 - first)
    begin = row // lines * size + row // block % config.folds * fold
    place = swizzled_place(waves_k * lines, size, copy) + begin[:, None]
    return Lines(
        operand.codes + gl.to_tensor(first).to(gl.int64) * stride + split * bytes_of(shape.split_k, format),
        line[:, None] * stride + place,
        place,
        bytes_of(shape.k, format) - split * bytes_of(shape.split_k, format),
        gl.allocate_shared_memory(operand.codes.dtype.element_ty, [config.stages, waves_k * lines, size], plain(2)),
        INDEX,
        waves_k,
        block_layout(format, INDEX, mfma, waves_k, lines),
        register_dtype(format),
    )


@gluon.jit
def open_scales(operand, count, first, split, layout: gl.constexpr, INDEX: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Returns the `Scales` of a tile, with newly allocated LDS. Other arguments: see `open_lines`."""
    stride: gl.constexpr = shape.b_scale_stride if INDEX else shape.a_scale_stride
    WORDS: gl.constexpr = shape.b_scale_words if INDEX else shape.a_scale_words
    block: gl.constexpr = config.block_n if INDEX else config.block_m
    lines: gl.constexpr = block * config.folds
    each: gl.constexpr = scale_block(shape)
    steps: gl.constexpr = config.chunk // (4 * each)  # words of a line
    unit: gl.constexpr = 4 if WORDS else 1  # bytes of an element of ``base``
    copy: gl.constexpr = scale_copy_layout(lines, steps, gl.num_warps(), 4 // unit, config.parts_m > 0)
    row = gl.arange(0, lines, gl.SliceLayout(1, copy))
    line = gl.minimum(row % block, count - 1 - first)
    place = gl.arange(0, steps * 4 // unit, gl.SliceLayout(0, copy))[None, :]
    if config.folds > 1:
        place += (row // block * (fold_length(shape.k, config) // each // unit))[:, None]
    base = operand.scale + gl.to_tensor(first).to(gl.int64) * stride + split * (shape.split_k // each)
    if WORDS:
        base = base.to(gl.pointer_type(gl.int32))
    return Scales(
        base,
        line[:, None] * (stride // unit) + place,
        place,
        (shape.k // each + unit - 1) // unit - split * (shape.split_k // each // unit),
        gl.allocate_shared_memory(gl.int32, [steps // config.waves_k, config.waves_k * lines], plain(1)),
        config.waves_k,
        layout,
    )


@gluon.jit
def open_row_scales(operand, count, first, split, layout: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Returns the `Scales` of the rows of a, which have one float32 scale for each 128 elements of k. ``layout``: the layout of the
    accumulator."""
    steps: gl.constexpr = config.chunk // STEP
    copy: gl.constexpr = scale_copy_layout(config.block_m, steps, gl.num_warps(), 1, False)
    line = gl.minimum(gl.arange(0, config.block_m, gl.SliceLayout(1, copy)), count - 1 - first)
    place = gl.arange(0, steps, gl.SliceLayout(0, copy))[None, :]
    return Scales(
        operand.scale + gl.to_tensor(first).to(gl.int64) * shape.a_scale_stride + split * (shape.split_k // STEP),
        line[:, None] * shape.a_scale_stride + place,
        place,
        (shape.k + STEP - 1) // STEP - split * (shape.split_k // STEP),
        gl.allocate_shared_memory(gl.int32, [steps // config.waves_k, config.waves_k * config.block_m], plain(1)),
        config.waves_k,
        layout,
    )


@gluon.jit
def open_column_scales(operand, first, split, rows, config: gl.constexpr, shape: gl.constexpr):
    """Returns the `Scales` of b's 128 columns with a float32 scale per 128 elements: one line, because the columns of a tile share
    all scales. They have no LDS of their own. ``rows``: the `Scales` of a."""
    return Scales(
        operand.scale + gl.to_tensor(first).to(gl.int64) // STEP * shape.b_scale_stride + split * (shape.split_k // STEP),
        rows.place,
        rows.place,
        rows.end,
        rows.shared,
        config.waves_k,
        rows.layout,
    )


@gluon.jit
def copy_block(lines, block, stage, shape: gl.constexpr):
    """Starts the copy of a block of k to LDS. Elements beyond the end of k are zeros."""
    shared = lines.shared.index(stage)
    size: gl.constexpr = shared.shape[1] * lines.waves_k  # of a block of k
    mask = None
    if shape.ragged:
        mask = lines.place < lines.end - block * size
    copies.buffer_load_to_shared(shared, lines.base + block * size, lines.offsets, mask=mask)


@gluon.jit
def load_scales(scales, chunk):
    """Loads a chunk of scales as words, int32 or float32 [lines, steps]. Scales beyond the end of k are zeros.

    A loop must not carry the scales as bytes: each byte would take a register.
    """
    count: gl.constexpr = scales.offsets.shape[1]
    mask, _ = gl.broadcast(scales.place < scales.end - chunk * count, scales.offsets)
    found = isa.buffer_load(scales.base + chunk * count, scales.offsets, mask=mask)
    if scales.base.dtype.element_ty == gl.uint8:
        even, odd = gl.split(found.to(gl.int32).reshape(found.shape[0], count // 4, 2, 2))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        found = first | second << 8 | third << 16 | fourth << 24
    return found


@gluon.jit
def store_scales(scales, words):
    """Stores a chunk of scales, int32 [lines, steps], to LDS."""
    shared = scales.shared.reinterpret(words.dtype, [words.shape[1], words.shape[0]], plain(2))
    shared.store(words.permute(1, 0))


@gluon.jit
def load_chunk(a_scales, b_scales, chunk):
    """Loads a chunk of the scales of both operands."""
    return load_scales(a_scales, chunk), load_scales(b_scales, chunk)


@gluon.jit
def store_chunk(a_scales, b_scales, a_words, b_words):
    """Stores a chunk of scales of both operands to LDS. Float32 scales of a and b are multiplied first, and stored as one."""
    if a_words.dtype == gl.float32:
        store_scales(a_scales, a_words * b_words)
    else:
        store_scales(a_scales, a_words)
        store_scales(b_scales, b_words)


@gluon.jit
def read_block(lines, stage):
    """Reads a block of k from LDS as an MFMA operand."""
    shared = lines.shared.index(stage)
    waves_k: gl.constexpr = lines.waves_k
    width: gl.constexpr = lines.dtype.primitive_bitwidth // 8
    count: gl.constexpr = shared.shape[0] // waves_k
    size: gl.constexpr = shared.shape[1] // width
    storage: gl.constexpr = line_storage(waves_k, count, size, width)
    if waves_k == 1:
        shared = shared.reinterpret(lines.dtype, [count, size], storage)
        if lines.index == 1:
            shared = shared.permute([1, 0])
    else:
        shared = shared.reinterpret(lines.dtype, [waves_k, count, size], storage)
        if lines.index == 1 and lines.dtype != gl.int32:
            shared = shared.permute([0, 2, 1])
    return copies.load_shared_relaxed(shared, lines.layout)


@gluon.jit
def read_step(scales, row):
    """Reads the scales of one step from LDS in the layout of an MFMA of that step. Every lane reads its line's word, and keeps the
    byte of its own 32 elements."""
    words = scales.shared.index(row)
    waves_k: gl.constexpr = scales.waves_k
    count: gl.constexpr = words.shape[0] // waves_k
    layout: gl.constexpr = scale_layout(scales.layout, waves_k, count, 4)
    if waves_k == 1:
        shift = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :] * 8
        word = words.load(gl.SliceLayout(1, layout))[:, None]
    else:
        shift = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :] * 8
        word = words.reinterpret(gl.int32, [waves_k, count], plain(2)).load(gl.SliceLayout(2, layout))[:, :, None]
    return (word >> shift).to(gl.uint8)


@gluon.jit
def read_scales(scales, block, STEPS: gl.constexpr):
    """Reads the scales of a block of k from LDS. ``block``: the block's index within the chunk. ``STEPS``: steps of a wave's part
    of a block, 1 or 2."""
    found = read_step(scales, block * STEPS)
    if STEPS == 2:
        rows: gl.constexpr = found.shape[0]
        both = gl.join(found, read_step(scales, block * STEPS + 1)).permute(0, 2, 1).reshape(rows, 8)
        found = gl.convert_layout(both, isa.mfma_scale_layout(scales.layout, [rows, 8]), assert_trivial=True)
    return found


@gluon.jit
def read_factors(scales, row):
    """Reads a step's float32 scales (a's scale times b's scale) from LDS, float32 [rows, 1] in the accumulator's layout."""
    words = scales.shared.index(row)
    waves_k: gl.constexpr = scales.waves_k
    count: gl.constexpr = words.shape[0] // waves_k
    layout: gl.constexpr = scales.layout
    if waves_k == 1:
        found = words.reinterpret(gl.float32, [count], plain(1)).load(gl.SliceLayout(1, layout))[:, None]
    else:
        found = words.reinterpret(gl.float32, [waves_k, count], plain(2)).load(gl.SliceLayout(2, layout))[:, :, None]
    return found


@gluon.jit
def copy_blocks(a, b, block, stage, shape: gl.constexpr):
    """Starts the copies of a block of k of both operands."""
    copy_block(a, block, stage, shape)
    copy_block(b, block, stage, shape)
    copies.commit_group()


@gluon.jit
def unit_scales(lines, count: gl.constexpr, STEPS: gl.constexpr):
    """Returns block scales of 1 for an operand's ``count`` lines: the scaled MFMA then computes plain dot products."""
    layout: gl.constexpr = scale_layout(lines.layout, lines.waves_k, count, 4 * STEPS)
    if lines.waves_k == 1:
        scales = gl.full([count, 4 * STEPS], 127, gl.uint8, layout)
    else:
        scales = gl.full([lines.waves_k, count, 4 * STEPS], 127, gl.uint8, layout)
    return scales

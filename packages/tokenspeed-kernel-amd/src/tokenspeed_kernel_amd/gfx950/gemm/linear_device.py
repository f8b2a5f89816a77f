# mypy: ignore-errors
"""Device code of `linear`: quantises tokens in registers, and multiplies them with prepared weights. ``linear`` explains when."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.gemm.operands_device import (
    STEP,
    accumulator_layout,
    bytes_of,
    copy_block,
    empty_accumulator,
    line_storage,
    load_scales,
    open_lines,
    open_scales,
    read_block,
    read_scales,
    register_dtype,
    scale_layout,
    store_scales,
    unit_scales,
)
from tokenspeed_kernel_amd.gfx950.instructions_device import copies
from tokenspeed_kernel_amd.gfx950.moe.encode_device import (
    activation_layout,
    encode_e4m3,
    load_activations,
    magnitudes,
    token_step,
)
from tokenspeed_kernel_amd.gfx950.moe.tile_device import axis_layout, plain
from tokenspeed_kernel_amd.gluon.layouts_device import log2

BLOCK_K = gl.constexpr(512)  # elements of k that are quantised at once: a step of each of four waves
WAVES = gl.constexpr(4)
ROWS_OF_MFMA = gl.constexpr(16)


@gluon.jit
def quantize_by_block(values, format: gl.constexpr):
    """Quantises 16-bit floats [rows, blocks, 32] like `quantize_mxfp8` (``format`` e4m3) and `quantize_mxfp4` (e2m1).

    The codes of a block with an infinity or NaN are not those of the operators, but its scale is NaN, too.

    Returns uint8 [rows, blocks, 32] (e2m1: packed to [rows, blocks, 16]), and the e8m0 scales, int32 [rows, blocks]."""
    largest = gl.max(magnitudes(values), axis=2).to(gl.int16).to(values.dtype, bitcast=True).to(gl.float32)
    field = largest.to(gl.int32, bitcast=True) >> 23
    exponents = gl.maximum(field - (2 if format == "e2m1" else 8), 0)
    values = values.to(gl.float32)
    if format == "e2m1":
        low, high = gl.split(values.reshape(values.shape[0], values.shape[1], 16, 2))
        # The instruction reads the exponent field of the scale. Scales with a field of 0 are 2^-127 there, too.
        scale, _ = gl.broadcast((exponents << 23).to(gl.float32, bitcast=True)[:, :, None], values)
        scale, _ = gl.split(scale.reshape(values.shape[0], values.shape[1], 16, 2))
        codes = gl.inline_asm_elementwise(
            "v_mov_b32 $0, 0\n\tv_cvt_scalef32_pk_fp4_f32 $0, $1, $2, $3", "=&v,v,v,v", [low, high, scale],
            dtype=gl.int32, is_pure=True, pack=1,
        ).to(gl.uint8)  # fmt: skip
    else:
        reciprocal = ((254 - exponents) << 23).to(gl.float32, bitcast=True)
        codes = (values * reciprocal[:, :, None]).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    return codes, gl.where(field != 255, exponents, 255)


@gluon.jit
def steps_of_row(values):
    """Views a chunk of 512 elements of each row, [rows, 16, 32], as rows of one step: [4 * rows, 4, 32]."""
    return values.reshape(values.shape[0] * 4, 4, 32)


@gluon.jit
def static_step(static, values):
    """Repeats the static scale for each row of ``values``: float32 [rows]."""
    rows: gl.constexpr = values.shape[0]
    return gl.full([rows], 1.0, gl.float32, axis_layout(values.type.layout, 3, 0)) * static


# -- few tokens: one launch ----------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def repeated_layout(rows, size):
    """The register layout of a step of an MFMA's left operand, [4 waves, 16 / rows, rows, size]. ``size``: bytes of a line's step:
    128 (fp8) or 64 (e2m1)."""
    registers = [[0, 0, 0, 1 << bit] for bit in range(4)] + [[0, 0, 0, 64]] * (size == 128)
    return gl.DistributedLinearLayout(
        registers, [*row_lanes(rows), [0, 0, 0, 16], [0, 0, 0, 32]], wave_bases(4), [], [4, 16 // rows, rows, size]
    )


@gluon.constexpr_function
def repeated_scale_layout(rows):
    """The register layout of a step's e8m0 scales of the left operand, uint8 [4 waves, 16 / rows, rows, 4]."""
    lanes = [*row_lanes(rows), [0, 0, 0, 1], [0, 0, 0, 2]]
    return gl.DistributedLinearLayout([], lanes, wave_bases(4), [], [4, 16 // rows, rows, 4])


@gluon.constexpr_function
def repeated_factor_layout(rows):
    """The register layout of a value per row of an accumulator, [4 waves, 16 / rows, rows]."""
    lanes = [basis[:3] for basis in row_lanes(rows)] + [[0, 0, 0]] * 2
    return gl.DistributedLinearLayout([], lanes, wave_bases(3), [], [4, 16 // rows, rows])


@gluon.constexpr_function
def row_lanes(rows):
    """The bases of the lanes that number the 16 rows of an MFMA: rows of the tokens, which repeat."""
    bits = log2(rows)
    return [[0, 0, 1 << bit, 0] if bit < bits else [0, 1 << (bit - bits), 0, 0] for bit in range(4)]


@gluon.constexpr_function
def wave_bases(rank):
    return [[1 << bit] + [0] * (rank - 1) for bit in range(2)]


@gluon.aggregate
class Tokens:
    """The quantised tokens of a workgroup in LDS. The MFMAs' 16 rows repeat them.

    Attributes:
        codes: uint8 [blocks of 512, 4 * rows, bytes of a step], in `line_storage`.
        scales: LDS with a value of each row and step: uint8 [blocks of 512, 16 * rows] (e8m0), or float32 [blocks of 512, 4 *
            rows].
            Without scales of blocks of k, the codes again.
        columns: float32 [blocks of 512, 4], the scales of the weights' steps if these are float32; otherwise the codes again.
        rows: number of rows, a power of two from 4 to 16.
    """

    codes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    columns: gl.shared_memory_descriptor
    rows: gl.constexpr


@gluon.jit
def store_codes(tokens, block: gl.constexpr, codes):
    """Stores the quantised elements of a block of k, uint8 [rows, 4, bytes of a step]."""
    size: gl.constexpr = codes.shape[2]
    storage: gl.constexpr = line_storage(WAVES, tokens.rows, size)
    tokens.codes.index(block).reinterpret(gl.uint8, [WAVES, tokens.rows, size], storage).store(codes.permute(1, 0, 2))


@gluon.jit
def read_codes(tokens, block, format: gl.constexpr, operand: gl.constexpr):
    """Reads a block of k as the MFMAs' left operand, [4 waves, 16, bytes of a step]."""
    rows: gl.constexpr = tokens.rows
    size: gl.constexpr = tokens.codes.shape[2]
    layout: gl.constexpr = repeated_layout(rows, size)
    shared = tokens.codes.index(block).reinterpret(gl.uint8, [WAVES, rows, size], line_storage(WAVES, rows, size))
    once = shared.load(gl.SliceLayout(1, layout))[:, None, :, :]
    often, _ = gl.broadcast(once, gl.zeros([WAVES, ROWS_OF_MFMA // rows, rows, size], gl.uint8, layout))
    found = gl.convert_layout(often.reshape(WAVES, ROWS_OF_MFMA, size), operand, assert_trivial=True)
    return found.to(register_dtype(format), bitcast=True)


@gluon.jit
def read_token_scales(tokens, block, operand: gl.constexpr):
    """Reads the e8m0 scales of a block of k in the layout of the MFMAs, uint8 [4 waves, 16, 4]."""
    rows: gl.constexpr = tokens.rows
    layout: gl.constexpr = repeated_scale_layout(rows)
    words = tokens.scales.index(block).reinterpret(gl.int32, [WAVES, rows], plain(2))
    word = words.load(gl.SliceLayout(1, gl.SliceLayout(3, layout)))[:, None, :][:, :, :, None]
    shift = gl.arange(0, 4, axis_layout(layout, 4, 3))[None, None, None, :] * 8
    once = (word >> shift).to(gl.uint8)
    often, _ = gl.broadcast(once, gl.zeros([WAVES, ROWS_OF_MFMA // rows, rows, 4], gl.uint8, layout))
    target: gl.constexpr = scale_layout(operand, WAVES, ROWS_OF_MFMA, 4)
    return gl.convert_layout(often.reshape(WAVES, ROWS_OF_MFMA, 4), target, assert_trivial=True)


@gluon.jit
def read_factors(tokens, block, acc):
    """Reads the float32 scales of a block of k, those of both operands multiplied, in the layout of the accumulator."""
    rows: gl.constexpr = tokens.rows
    layout: gl.constexpr = repeated_factor_layout(rows)
    mfma: gl.constexpr = acc.type.layout
    shared = tokens.scales.index(block).reinterpret(gl.float32, [WAVES, rows], plain(2))
    once = shared.load(gl.SliceLayout(1, layout))[:, None, :]
    often, _ = gl.broadcast(once, gl.zeros([WAVES, ROWS_OF_MFMA // rows, rows], gl.float32, layout))
    of_rows = gl.convert_layout(often.reshape(WAVES, ROWS_OF_MFMA), gl.SliceLayout(2, mfma), assert_trivial=True)
    of_columns = tokens.columns.index(block).load(gl.SliceLayout(1, gl.SliceLayout(2, mfma)))
    factors, _ = gl.broadcast((of_rows * of_columns[:, None])[:, :, None], acc)
    return factors


@gluon.jit
def store_tokens(tokens, chunks, static, dtype: gl.constexpr, quantization: gl.constexpr, format: gl.constexpr):
    """Quantises tokens into LDS. Returns the scales of rows, float32 [rows]; 1 if blocks of k have scales.

    Args:
        chunks: `load_activations` of each block of k.
        static: the static scale, if there is one.
        quantization: ``"mx"``, ``"block"`` (128 elements), ``"token"`` or ``"static"``.
    """
    rows: gl.constexpr = tokens.rows
    size: gl.constexpr = tokens.codes.shape[2]
    step = gl.full([rows], 1.0, gl.float32, axis_layout(chunks[0].type.layout, 3, 0))
    if quantization == "static":
        step = static_step(static, chunks[0])
    if quantization == "token":
        largest = magnitudes(chunks[0])
        for block in gl.static_range(1, len(chunks)):
            largest = gl.maximum(largest, magnitudes(chunks[block]))
        step = token_step(largest, dtype)
    for block in gl.static_range(len(chunks)):
        values = chunks[block]
        if quantization == "mx":
            codes, exponents = quantize_by_block(values, format)
            placed = exponents.to(gl.uint8).reshape(rows, WAVES, 4).permute(1, 0, 2)
            tokens.scales.index(block).reinterpret(gl.uint8, [WAVES, rows, 4], plain(3)).store(placed)
        elif quantization == "block":
            values = steps_of_row(values)
            of_steps = token_step(magnitudes(values), dtype)
            codes = encode_e4m3(values.to(gl.float32), of_steps, True)
            shared = tokens.scales.index(block).reinterpret(gl.float32, [WAVES, rows], plain(2))
            shared.store(of_steps.reshape(rows, WAVES).permute(1, 0))
        else:
            codes = encode_e4m3(values.to(gl.float32), step, True)
        store_codes(tokens, block, codes.reshape(rows, WAVES, size))
    return step


@gluon.jit
def allocate_tokens(ROWS: gl.constexpr, quantization: gl.constexpr, shape: gl.constexpr):
    blocks: gl.constexpr = (shape.k + BLOCK_K - 1) // BLOCK_K
    codes = gl.allocate_shared_memory(gl.uint8, [blocks, WAVES * ROWS, bytes_of(STEP, shape.a_format)], plain(2))
    scales = codes
    columns = codes
    if quantization == "mx":
        scales = gl.allocate_shared_memory(gl.uint8, [blocks, WAVES * ROWS * 4], plain(1))
    if quantization == "block":
        scales = gl.allocate_shared_memory(gl.float32, [blocks, WAVES * ROWS], plain(1))
        columns = gl.allocate_shared_memory(gl.float32, [blocks, WAVES], plain(1))
    return Tokens(codes, scales, columns, ROWS)


@gluon.jit
def add_block(
    acc, tokens, b, b_scales, block, stage, index, operand: gl.constexpr, quantization: gl.constexpr, shape: gl.constexpr
):
    """Adds the dot products of block ``block`` of k, in LDS buffer ``stage`` of the weights, to the accumulator. ``index``: the
    block's index within its chunk of the weights' scales."""
    a_block = read_codes(tokens, block, shape.a_format, operand)
    b_block = read_block(b, stage)
    columns: gl.constexpr = acc.shape[2]
    if quantization == "mx":
        a_scale = read_token_scales(tokens, block, operand)
        b_scale = read_scales(b_scales, index, 1)
        acc = isa.mfma_scaled(a_block, a_scale, shape.a_format, b_block, b_scale, shape.b_format, acc)
    else:
        a_scale = gl.full([WAVES, ROWS_OF_MFMA, 4], 127, gl.uint8, scale_layout(operand, WAVES, ROWS_OF_MFMA, 4))
        b_scale = unit_scales(b, columns, 1)
        if quantization == "block":
            part = isa.mfma_scaled(a_block, a_scale, shape.a_format, b_block, b_scale, shape.b_format, gl.zeros_like(acc))
            acc = gl.fma(part, read_factors(tokens, block, acc), acc)
        else:
            acc = isa.mfma_scaled(a_block, a_scale, shape.a_format, b_block, b_scale, shape.b_format, acc)
    return acc


@gluon.jit(do_not_specialize=["m"])
def linear_kernel(
    x, x_stride, static, b, m, out, bias, ROWS: gl.constexpr, quantization: gl.constexpr, config: gl.constexpr, shape: gl.constexpr
):
    """Computes a tile of columns for all tokens. The grid is [tiles].

    Loads return in order. So tokens and scales are loaded first, and are quantised while the weights are on their way.

    Args:
        x, x_stride: the tokens, and their row stride in elements.
        static: pointer to the static scale of the tokens, or None.
        b, config, shape: see `mm`.
        m: number of tokens, at most ROWS.
        quantization: see `store_tokens`.
    """
    BN: gl.constexpr = config.block_n
    stages: gl.constexpr = config.stages
    blocks: gl.constexpr = (shape.k + BLOCK_K - 1) // BLOCK_K
    per_chunk: gl.constexpr = config.chunk // BLOCK_K
    ahead: gl.constexpr = blocks if blocks <= stages else stages - 1
    mfma: gl.constexpr = accumulator_layout(config, shape.a_format)
    operand: gl.constexpr = gl.DotOperandLayout(0, mfma, 16)
    layout: gl.constexpr = activation_layout(ROWS, WAVES)
    result: gl.constexpr = gl.SliceLayout(0, mfma)
    first_column = gl.program_id(0) * BN
    split = gl.program_id(1)  # 0
    token = gl.minimum(gl.arange(0, ROWS, axis_layout(layout, 3, 0)), m - 1)
    chunks = ()
    for block in gl.static_range(blocks):
        chunks += (load_activations(x, token * x_stride, block * BLOCK_K, shape.k, BLOCK_K, layout),)
    column = gl.arange(0, BN, gl.SliceLayout(0, result))
    exists = column < shape.n - first_column
    if quantization == "token" or quantization == "static":
        column_scale = gl.load(b.scale + (first_column + column) * shape.b_scale_stride, mask=exists, other=0.0)
    if bias is not None:
        added = isa.buffer_load(bias + first_column, column, mask=exists, other=0.0).to(gl.float32)
    if quantization == "static":
        static = gl.load(static)
    tokens = allocate_tokens(ROWS, quantization, shape)
    lines = open_lines(b, shape.n, first_column, split, mfma, 1, config, shape)
    b_scales = None
    if quantization == "mx":
        b_scales = open_scales(b, shape.n, first_column, split, lines.layout, 1, config, shape)
        words = load_scales(b_scales, 0)
    if quantization == "block":
        of_columns = load_column_scales(b, first_column, tokens, shape)
    gl.inline_asm("", "~{memory}")  # otherwise the compiler may move loads behind the copies
    for first in gl.static_range(ahead):
        copy_block(lines, first, first, shape)
        copies.commit_group()
    step = store_tokens(tokens, chunks, static, x.dtype.element_ty, quantization, shape.a_format)
    if quantization == "block":
        store_column_scales(tokens, of_columns)
    acc = empty_accumulator(mfma, config)
    for block in range(blocks - ahead):
        if quantization == "mx":  # noqa: SIM102  (a compile-time condition, and one at run time)
            if block % per_chunk == 0:
                store_scales(b_scales, words)
                words = load_scales(b_scales, block // per_chunk + 1)
        copies.wait_group(ahead - 1)
        gl.barrier()  # all waves have read the previous block: its buffer is free
        copy_block(lines, block + ahead, (block + ahead) % stages, shape)
        copies.commit_group()
        acc = add_block(acc, tokens, lines, b_scales, block, block % stages, block % per_chunk, operand, quantization, shape)
    for last in gl.static_range(blocks - ahead, blocks):
        if quantization == "mx" and last % per_chunk == 0:
            store_scales(b_scales, words)
            if last + per_chunk < blocks:
                words = load_scales(b_scales, last // per_chunk + 1)
        copies.wait_group(blocks - 1 - last)
        acc = add_block(acc, tokens, lines, b_scales, last, last % stages, last % per_chunk, operand, quantization, shape)
    total = gl.sum(acc, axis=0)
    if quantization == "token" or quantization == "static":
        total = total * by_row(step, result)[:, None] * column_scale[None, :]
    if bias is not None:
        total += added[None, :]
    row = gl.arange(0, ROWS_OF_MFMA, gl.SliceLayout(1, result))
    inside = (row < m)[:, None] & exists[None, :]
    isa.buffer_store(
        total.to(out.dtype.element_ty), out + first_column, row[:, None] * shape.out_stride + column[None, :], mask=inside
    )


@gluon.jit
def by_row(values, layout: gl.constexpr):
    """Repeats a value per token, [rows], for the 16 rows of a result with this layout."""
    rows: gl.constexpr = values.shape[0]
    wide: gl.constexpr = gl.BlockedLayout([1, 1], [64 // rows, rows], [WAVES, 1], [1, 0])
    once = gl.convert_layout(values, gl.SliceLayout(0, wide))[None, :]
    often, _ = gl.broadcast(once, gl.zeros([ROWS_OF_MFMA // rows, rows], values.dtype, wide))
    return gl.convert_layout(often.reshape(ROWS_OF_MFMA), gl.SliceLayout(1, layout))


@gluon.jit
def load_column_scales(b, first_column, tokens, shape: gl.constexpr):
    """Loads the scales of the 128 columns that a tile lies in, float32 [4 * blocks, padded to a power of two]. A step beyond the
    end of k has the scale 0."""
    SIZE: gl.constexpr = power_of_two(4 * tokens.columns.shape[0])
    step = gl.arange(0, SIZE, gl.BlockedLayout([1], [64], [WAVES], [0]))
    base = b.scale + first_column // STEP * shape.b_scale_stride
    return isa.buffer_load(base, step, mask=step < (shape.k + STEP - 1) // STEP)


@gluon.jit
def store_column_scales(tokens, of_columns):
    tokens.columns.reinterpret(gl.float32, [of_columns.shape[0]], plain(1)).store(of_columns)


@gluon.constexpr_function
def power_of_two(count):
    return 1 << (count - 1).bit_length()


# -- many tokens: a launch before `mm_kernel` ----------------------------------------------------------------------------------


@gluon.jit
def quantize_kernel(x, x_stride, static, m, k, codes, scale, scale_stride, quantization: gl.constexpr, format: gl.constexpr):
    """Quantises four tokens. The grid is [tokens / 4, blocks of 512 elements], or [tokens / 4, 1] with a scale per token.

    Args:
        x, x_stride: the tokens, and their row stride in elements.
        static: pointer to the static scale of the tokens, or None.
        codes: contiguous [m, k], or [m, k / 2] in e2m1.
        scale, scale_stride: float32 [m, 1] ("token"), float32 [m, blocks of 128] ("block"), or uint8 [m, blocks of 32, padded with
            zeros to a multiple of 4] ("mx"); contiguous, and the row stride.
        quantization: see `store_tokens`.
    """
    layout: gl.constexpr = activation_layout(WAVES, WAVES)
    first_row = gl.program_id(0) * WAVES
    x += first_row.to(gl.int64) * x_stride
    codes += first_row.to(gl.int64) * (k // 2 if format == "e2m1" else k)
    row = gl.arange(0, WAVES, axis_layout(layout, 3, 0))
    left = m - first_row
    begins = gl.minimum(row, left - 1) * x_stride
    if quantization == "token":
        largest = magnitudes(load_activations(x, begins, 0, k, BLOCK_K, layout))
        for first in range(BLOCK_K, k, BLOCK_K):
            largest = gl.maximum(largest, magnitudes(load_activations(x, begins, first, k, BLOCK_K, layout)))
        step = token_step(largest, x.dtype.element_ty)
        gl.store(scale + first_row + row, step, mask=row < left)
        for first in range(0, k, BLOCK_K):
            values = load_activations(x, begins, first, k, BLOCK_K, layout).to(gl.float32)
            store_rows(encode_e4m3(values, step, True), codes, first, left, k)
    else:
        first = gl.program_id(1) * BLOCK_K
        values = load_activations(x, begins, first, k, BLOCK_K, layout)
        if quantization == "mx":
            quantised, exponents = quantize_by_block(values, format)
            store_scale_rows(exponents.to(gl.uint8), scale, first_row, scale_stride, first // 32, left, scale_stride)
            store_rows(quantised, codes, first // 2 if format == "e2m1" else first, left, k // 2 if format == "e2m1" else k)
        elif quantization == "block":
            values = steps_of_row(values)
            step = token_step(magnitudes(values), x.dtype.element_ty)
            quantised = encode_e4m3(values.to(gl.float32), step, True)
            store_scale_rows(step.reshape(WAVES, 4), scale, first_row, scale_stride, first // STEP, left, (k + STEP - 1) // STEP)
            store_rows(quantised.reshape(WAVES, 16, 32), codes, first, left, k)
        else:
            step = static_step(gl.load(static), values)
            store_rows(encode_e4m3(values.to(gl.float32), step, True), codes, first, left, k)


@gluon.jit
def store_rows(quantised, codes, first, rows, size):
    """Stores a chunk of quantised rows, uint8 [4, 16, bytes of a block], from byte ``first`` of each row on. A row has ``size``
    bytes."""
    layout: gl.constexpr = quantised.type.layout
    width: gl.constexpr = quantised.shape[2]
    row = gl.arange(0, WAVES, axis_layout(layout, 3, 0))[:, None, None]
    block = gl.arange(0, 16, axis_layout(layout, 3, 1))[None, :, None]
    place = first + block * width + gl.arange(0, width, axis_layout(layout, 3, 2))[None, None, :]
    isa.buffer_store(quantised, codes, row * size + place, mask=(row < rows) & (place < size))


@gluon.jit
def store_scale_rows(found, scale, first_row, stride, first, rows, count):
    """Stores scales of four rows, [4, scales], from scale ``first`` of each row on. A row has ``count`` scales."""
    layout: gl.constexpr = found.type.layout
    row = gl.arange(0, WAVES, gl.SliceLayout(1, layout))[:, None]
    place = first + gl.arange(0, found.shape[1], gl.SliceLayout(0, layout))[None, :]
    isa.buffer_store(found, scale + first_row.to(gl.int64) * stride, row * stride + place, mask=(row < rows) & (place < count))

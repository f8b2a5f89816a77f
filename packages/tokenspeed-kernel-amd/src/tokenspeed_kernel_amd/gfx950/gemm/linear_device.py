# mypy: ignore-errors
"""Device code of `linear` for few tokens, in one launch.

Tokens are copied to LDS without being quantised. A wave quantises them when it reads them from LDS as the operands of its MFMAs.
Waves divide each block of k. So every wave quantises the elements that its own MFMAs multiply, in the layout of the MFMAs' operand,
and neither the codes nor most scales go through LDS again.

An MFMA has 16 rows, but a tile has only 4 or 8 tokens. The other rows hold other slices of k, the *folds*: with two folds, rows 0
to 7 are the first halves of 8 tokens, and rows 8 to 15 are the second halves. So no lane quantises an element that another lane
quantises too. Columns are folded in the same way. The accumulator then has the dot products of all pairs of folds. The dot products
of equal folds are added at the end, and the others are discarded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.gemm.operands_device import (
    STEP,
    Lines,
    accumulator_layout,
    copy_block,
    empty_accumulator,
    fold_length,
    line_copy_layout,
    line_storage,
    load_scales,
    open_lines,
    open_scales,
    read_block,
    read_scales,
    register_dtype,
    scale_layout,
    store_scales,
    swizzled_place,
    unit_scales,
)
from tokenspeed_kernel_amd.gfx950.gemm.result_device import sum_layout, sum_of_waves
from tokenspeed_kernel_amd.gfx950.instructions_device import copies
from tokenspeed_kernel_amd.gluon.layouts_device import axis_layout, log2, plain
from tokenspeed_kernel_base.ops.quantization.encodings import SMALLEST_NORMAL

BLOCK_K = gl.constexpr(512)  # elements of k of a fold that are in LDS at once: a step of each of four waves
WAVES = gl.constexpr(4)
ROWS_OF_MFMA = gl.constexpr(16)
_SMALLEST_NORMAL = gl.constexpr(SMALLEST_NORMAL)


@gluon.constexpr_function
def token_layout(format):
    """Returns the register layout of pairs of elements of a block of k of the tokens, [4 waves, 16 rows, 64]. A lane holds the
    elements that it holds in the left operand of MFMAs with this ``format``."""
    adjacent = 4 if format == "e2m1" else 3
    registers = [[0, 0, 1 << bit] for bit in range(adjacent)] + [[0, 0, 32]] * (format != "e2m1")
    lanes = [[0, 1 << bit, 0] for bit in range(4)] + [[0, 0, 1 << (adjacent + bit)] for bit in range(2)]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [4, 16, 64])


@gluon.jit
def open_rows(x, x_stride, m, first, buffers: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Returns the `Lines` of a tile's tokens and folds of k, as bytes, with newly allocated LDS for ``buffers`` blocks of k.
    ``first``: the first token."""
    tokens: gl.constexpr = ROWS_OF_MFMA // config.folds
    fold: gl.constexpr = fold_length(shape.k, config)
    size: gl.constexpr = 2 * STEP
    lines: gl.constexpr = WAVES * ROWS_OF_MFMA
    copy: gl.constexpr = line_copy_layout(lines, size, WAVES)
    # Rows beyond the last one repeat it.
    row = gl.arange(0, lines, gl.SliceLayout(1, copy))
    begin = row // ROWS_OF_MFMA * size + row // tokens % config.folds * (2 * fold)
    place = swizzled_place(lines, size, copy) + begin[:, None]
    return Lines(
        x.to(gl.pointer_type(gl.uint8)),
        gl.minimum(first + row % tokens, m - 1)[:, None] * (2 * x_stride) + place,
        place,
        gl.to_tensor(2 * shape.k),
        gl.allocate_shared_memory(gl.uint8, [buffers, lines, size], plain(2)),
        0,
        WAVES,
        token_layout(shape.a_format),
        gl.int32,
    )


@gluon.jit
def read_rows(rows, block: gl.constexpr):
    """Reads a block of k of the tokens from LDS, as pairs of adjacent elements: int32 [16 tokens * 4 waves, blocks of 32, 16]."""
    storage: gl.constexpr = line_storage(WAVES, ROWS_OF_MFMA, STEP // 2, 4)
    shared = rows.shared.index(block).reinterpret(gl.int32, [WAVES, ROWS_OF_MFMA, STEP // 2], storage)
    pairs = copies.load_shared_relaxed(shared, rows.layout).permute(1, 0, 2)
    return pairs.reshape(ROWS_OF_MFMA * WAVES, STEP // 32, 16)


@gluon.jit
def larger(a, b):
    """Returns the elementwise maximum of `pair_magnitudes`: two 16-bit maxima per instruction."""
    return gl.inline_asm_elementwise("v_pk_max_u16 $0, $1, $2", "=v,v,v", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def pair_magnitudes(pairs):
    """Returns the bits of pairs without the sign bits. As integers, they compare as the magnitudes do, with NaN largest."""
    return pairs & 0x7FFF7FFF


@gluon.jit
def largest_of_blocks(pairs, adjacent: gl.constexpr):
    """Returns the amax of each block of 32 elements, as the bits of a 16-bit float: int32 [64, blocks]. ``pairs``: the result of
    `pair_magnitudes`, of which a lane holds ``adjacent`` neighbouring words."""
    found = pairs
    for _ in gl.static_range(log2(adjacent)):
        first, second = gl.split(found.reshape(found.shape[0], found.shape[1], found.shape[2] // 2, 2))
        found = larger(first, second)
    largest = gl.max(gl.maximum(found & 0xFFFF, found >> 16), axis=2)
    return gl.convert_layout(largest, gl.SliceLayout(2, pairs.type.layout), assert_trivial=True)


@gluon.jit
def as_float(bits, dtype: gl.constexpr):
    """Converts the bits of 16-bit floats, int32, to float32."""
    return bits.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def repeated(of_blocks, like):
    """Repeats a value per block, [64, blocks], for the elements of ``like``."""
    found, _ = gl.broadcast(
        gl.convert_layout(of_blocks, gl.SliceLayout(2, like.type.layout), assert_trivial=True)[:, :, None], like
    )
    return found


@gluon.jit
def encode_pairs(pairs, exponents, dtype: gl.constexpr, format: gl.constexpr):
    """Quantises pairs of elements, int32 [64, blocks, 16], with a power of two per block, to e4m3 (saturating) or e2m1. Returns
    uint8 [64, blocks, 32], or [64, blocks, 16] of packed e2m1. ``exponents``: int32 [64, blocks], biased by 127."""
    rows: gl.constexpr = pairs.shape[0]
    blocks: gl.constexpr = pairs.shape[1]
    wide: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    even, odd = gl.split(pairs.reshape(rows, blocks, 8, 2))
    if format == "e2m1":
        convert: gl.constexpr = "v_cvt_scalef32_pk_fp4_" + wide
        text: gl.constexpr = (
            convert + " $0, $1, $5\n\t" + convert + " $0, $2, $5 op_sel:[0,0,1,0]\n\t"
            + convert + " $0, $3, $5 op_sel:[0,0,0,1]\n\t" + convert + " $0, $4, $5 op_sel:[0,0,1,1]"
        )  # fmt: skip
        first, third = gl.split(even.reshape(rows, blocks, 4, 2))
        second, fourth = gl.split(odd.reshape(rows, blocks, 4, 2))
        scale = repeated(exponents << 23, first)
        operands: gl.constexpr = "=&v,v,v,v,v,v"
        words = gl.inline_asm_elementwise(
            text, operands, [first, second, third, fourth, scale], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        convert: gl.constexpr = "v_cvt_scalef32_pk_fp8_" + wide
        text: gl.constexpr = convert + " $0, $1, $3\n\t" + convert + " $0, $2, $3 op_sel:[0,0,1]"
        scale = repeated(exponents << 23, even)
        words = gl.inline_asm_elementwise(text, "=&v,v,v,v", [even, odd, scale], dtype=gl.int32, is_pure=True, pack=1)
    codes = gl.join(gl.join(words, words >> 16), gl.join(words >> 8, words >> 24)).to(gl.uint8)
    return codes.reshape(rows, blocks, words.shape[2] * 4)


@gluon.jit
def encode_quotients(pairs, step, dtype: gl.constexpr):
    """Divides pairs of elements by the scales of rows, and quantises them to e4m3, as `encode_e4m3` does: uint8 [64, blocks,
    32]."""
    low = as_float(pairs, dtype).to(gl.uint32, bitcast=True)
    high = as_float(pairs >> 16, dtype).to(gl.uint32, bitcast=True)
    values = low.to(gl.int64) | (high.to(gl.int64) << 32)
    divisor, _ = gl.broadcast(step.to(gl.uint32, bitcast=True).to(gl.int64)[:, None, None], values)
    factor, _ = gl.broadcast((1.0 / step).to(gl.uint32, bitcast=True).to(gl.int64)[:, None, None], values)
    # Both lanes read the low half of an operand with op_sel_hi 0.
    quotient = gl.inline_asm_elementwise(
        "v_pk_mul_f32 $0, $1, $2 op_sel_hi:[1,0]", "=v,v,v", [values, factor], dtype=gl.int64, is_pure=True, pack=1
    )
    # With these signs, -0 stays -0.
    error = gl.inline_asm_elementwise(
        "v_pk_fma_f32 $0, $1, $2, $3 op_sel_hi:[1,0,1] neg_lo:[0,0,1] neg_hi:[0,0,1]", "=v,v,v,v", [quotient, divisor, values],
        dtype=gl.int64, is_pure=True, pack=1,
    )  # fmt: skip
    quotient = gl.inline_asm_elementwise(
        "v_pk_fma_f32 $0, $1, $2, $3 op_sel_hi:[1,0,1] neg_lo:[1,0,0] neg_hi:[1,0,0]", "=v,v,v,v", [error, factor, quotient],
        dtype=gl.int64, is_pure=True, pack=1,
    )  # fmt: skip
    low = quotient.to(gl.int32).to(gl.float32, bitcast=True)
    high = (quotient >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    codes = gl.join(low, high).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    return codes.reshape(pairs.shape[0], pairs.shape[1], 32)


@gluon.jit
def by_wave(found, layout: gl.constexpr, TRIVIAL: gl.constexpr):
    """Rearranges values [16 tokens * 4 waves, ...] to [4 waves, 16 tokens, columns], in a given layout. If there is one value for
    each token and wave, the result is [4 waves, 16 tokens]."""
    if len(found.shape) == 1:
        found = found.reshape(ROWS_OF_MFMA, WAVES).permute(1, 0)
    else:
        columns: gl.constexpr = found.numel // (ROWS_OF_MFMA * WAVES)
        found = found.reshape(ROWS_OF_MFMA, WAVES, columns).permute(1, 0, 2)
    return gl.convert_layout(found, layout, assert_trivial=TRIVIAL)


@gluon.jit
def quantize_rows(pairs, step, mfma: gl.constexpr, quantization: gl.constexpr, dtype: gl.constexpr, format: gl.constexpr):
    """Quantises a block of k as `read_rows` returns it, with the results of `quantize_mxfp8`, `quantize_mxfp4` and `quantize_fp8`.

    Args:
        step: float32 [64], the tokens' scales; not used by ``"mx"`` and ``"block"``, which compute scales of blocks.
        dtype: the tokens' dtype.

    Returns the MFMAs' left operand, its e8m0 scales, and the float32 scales, [64]. If a block contains infinity or NaN, its scale
    is NaN, as the operators' scale is, but its codes differ from the operators' codes."""
    operand: gl.constexpr = gl.DotOperandLayout(0, mfma, 16)
    scales: gl.constexpr = scale_layout(operand, WAVES, ROWS_OF_MFMA, 4)
    adjacent: gl.constexpr = 16 if format == "e2m1" else 8
    if quantization == "mx":
        largest = largest_of_blocks(pair_magnitudes(pairs), adjacent)
        field = as_float(largest, dtype).to(gl.int32, bitcast=True) >> 23
        exponents = gl.maximum(field - (2 if format == "e2m1" else 8), 0)
        codes = encode_pairs(pairs, exponents, dtype, format)
        scale = by_wave(gl.where(field != 255, exponents, 255).to(gl.uint8), scales, format == "e2m1")
    else:
        if quantization == "block":
            largest = gl.max(largest_of_blocks(pair_magnitudes(pairs), adjacent), axis=1)
            step = step_of(gl.convert_layout(largest, axis_layout(pairs.type.layout, 3, 0), assert_trivial=True), dtype)
        codes = encode_quotients(pairs, step, dtype)
        scale = gl.full([WAVES, ROWS_OF_MFMA, 4], 127, gl.uint8, scales)
    return by_wave(codes, operand, True).to(register_dtype(format), bitcast=True), scale, step


@gluon.jit
def step_of(largest, dtype: gl.constexpr):
    """Returns the fp8 scale for the largest magnitude, whose bits are given. It equals the scale of `quantize_fp8`, except for a
    NaN."""
    found = as_float(largest, dtype)
    return gl.maximum(gl.div_rn(found, gl.full_like(found, 448.0)), _SMALLEST_NORMAL)


@gluon.jit
def step_of_rows(chunks, static, quantization: gl.constexpr, dtype: gl.constexpr, config: gl.constexpr):
    """Returns the float32 scale of each row's token, [16 rows * 4 waves]; 1 if blocks of k have scales. ``chunks``: all blocks of k
    for ``"token"``, at least one otherwise."""
    layout: gl.constexpr = axis_layout(chunks[0].type.layout, 3, 0)
    if quantization == "token":
        largest = pair_magnitudes(chunks[0])
        for block in gl.static_range(1, len(chunks)):
            largest = larger(largest, pair_magnitudes(chunks[block]))
        parts = gl.max(largest_of_blocks(largest, 8), axis=1).reshape(config.folds, ROWS_OF_MFMA // config.folds, WAVES)
        found, _ = gl.broadcast(gl.max(gl.max(parts, axis=2), axis=0)[None, :, None], parts)
        step = step_of(gl.convert_layout(found.reshape(ROWS_OF_MFMA * WAVES), layout), dtype)
    else:
        step = gl.full([ROWS_OF_MFMA * WAVES], 1.0, gl.float32, layout)
        if quantization == "static":
            step = step * static
    return step


@gluon.jit
def load_column_factors(b, first_column, mfma: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Loads the float32 scales of the tile's columns: for each block of k, a tuple with [4 waves] for each fold. A step beyond the
    end of k has the scale 0."""
    base = b.scale + first_column // STEP * shape.b_scale_stride
    fold: gl.constexpr = fold_length(shape.k, config)
    found = ()
    for block in gl.static_range(fold // BLOCK_K):
        of_folds = ()
        for i in gl.static_range(config.folds):
            step = i * (fold // STEP) + block * WAVES + gl.arange(0, WAVES, gl.SliceLayout(1, gl.SliceLayout(2, mfma)))
            of_folds += (isa.buffer_load(base, step, mask=step < (shape.k + STEP - 1) // STEP),)
        found += (of_folds,)
    return found


@gluon.jit
def block_factors(of_rows, of_folds, acc, config: gl.constexpr):
    """Returns the factors of a block's partial sums, in the accumulator's layout: the float32 scales of rows, ``of_rows`` [4 waves,
    16], times the scales of columns, ``of_folds``, a tuple of [4 waves] per fold."""
    column = gl.arange(0, acc.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, acc.type.layout)))[None, None, :]
    factors, _ = gl.broadcast((of_rows * of_folds[0][:, None])[:, :, None], acc)
    for i in gl.static_range(1, config.folds):
        others = (of_rows * of_folds[i][:, None])[:, :, None]
        factors = gl.where(column < i * config.block_n, factors, others)
    return factors


@gluon.jit
def unfolded(acc, config: gl.constexpr):
    """Returns the sum of the accumulator over waves, and over equal folds of rows and columns: float32 [tokens, columns]."""
    folds: gl.constexpr = config.folds
    parts = acc.reshape(WAVES, folds, ROWS_OF_MFMA // folds, folds, config.block_n)
    layout: gl.constexpr = parts.type.layout
    of_row = gl.arange(0, folds, axis_layout(layout, 5, 1))[None, :, None, None, None]
    of_column = gl.arange(0, folds, axis_layout(layout, 5, 3))[None, None, None, :, None]
    equal, _ = gl.broadcast(of_row == of_column, parts)
    return sum_of_waves(gl.sum(gl.sum(gl.where(equal, parts, 0.0), axis=3), axis=1))


@gluon.jit
def load_ends(b, bias, first_column, result: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Loads a tuple of the columns' float32 scales, and a tuple of the bias, [columns]; empty where the layer has none."""
    column = gl.arange(0, config.block_n, gl.SliceLayout(0, result))
    exists = column < shape.n - first_column
    scales = ()
    added = ()
    if shape.scales == "lines":
        scales = (gl.load(b.scale + (first_column + column) * shape.b_scale_stride, mask=exists, other=0.0),)
    if bias is not None:
        added = (isa.buffer_load(bias + first_column, column, mask=exists, other=0.0).to(gl.float32),)
    return scales, added


@gluon.jit
def store_result(out, total, of_rows, ends, first_row, first_column, m, shape: gl.constexpr):
    """Multiplies a tile by its float32 scales, adds the bias, and stores the rows and columns that exist.

    Args:
        of_rows: a tuple with the scales of the rows; empty: there are none.
        ends: the scales of the columns and the bias, see `load_ends`.
    """
    result: gl.constexpr = total.type.layout
    row = gl.arange(0, total.shape[0], gl.SliceLayout(1, result))
    column = gl.arange(0, total.shape[1], gl.SliceLayout(0, result))
    scales, added = ends
    if len(of_rows) == 1:
        total = total * of_rows[0][:, None] * scales[0][None, :]
    if len(added) == 1:
        total += added[0][None, :]
    inside = (row < m - first_row)[:, None] & (column < shape.n - first_column)[None, :]
    place = (first_row + row)[:, None] * shape.out_stride + column[None, :]
    isa.buffer_store(total.to(out.dtype.element_ty), out + first_column, place, mask=inside)


@gluon.jit(do_not_specialize=["m"])
def linear_kernel(x, x_stride, static, b, m, out, bias, quantization: gl.constexpr, config: gl.constexpr, shape: gl.constexpr):
    """Computes a tile of tokens and columns. The grid is [tiles]: consecutive workgroups have the same tokens.

    Args:
        x, x_stride: the tokens, and their row stride in elements.
        static: pointer to the static scale of the tokens, or None.
        b, config, shape: see `mm`.
        m: number of tokens.
        quantization: ``"mx"``, ``"block"`` (128 elements), ``"token"`` or ``"static"``.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    stages: gl.constexpr = config.stages
    blocks: gl.constexpr = fold_length(shape.k, config) // BLOCK_K
    tiles_n: gl.constexpr = (shape.n + config.block_n - 1) // config.block_n
    # Blocks in flight: more would delay the first reads from LDS.
    ahead: gl.constexpr = min(blocks, 2 if stages > 2 or stages >= blocks else 1)
    mfma: gl.constexpr = accumulator_layout(config, shape.a_format)
    acc = empty_accumulator(mfma, config)
    result: gl.constexpr = gl.SliceLayout(0, sum_layout(WAVES, ROWS_OF_MFMA // config.folds, config.block_n))
    first_column = gl.program_id(0) % tiles_n * config.block_n
    first_row = gl.program_id(0) // tiles_n * (ROWS_OF_MFMA // config.folds)
    split = gl.program_id(1)  # 0
    # The scale of a token depends on all of its blocks of k.
    buffers: gl.constexpr = blocks if quantization == "token" else stages
    rows = open_rows(x, x_stride, m, first_row, buffers, config, shape)
    copy_block(rows, 0, 0, shape)
    copies.commit_group()
    lines = open_lines(b, shape.n, first_column, split, mfma, 1, config, shape)
    b_scales = None
    columns = ()
    if quantization == "mx":
        b_scales = open_scales(b, shape.n, first_column, split, lines.layout, 1, config, shape)
        words = load_scales(b_scales, 0)
        gl.inline_asm("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1", "")  # conversions to fp8 saturate
    if quantization == "block":
        columns = load_column_factors(b, first_column, mfma, config, shape)
    if quantization == "static":
        static = gl.load(static)
    ends = load_ends(b, bias, first_column, result, config, shape)
    for block in gl.static_range(ahead):
        if block > 0:
            copy_block(rows, block, block, shape)
            copies.commit_group()
        copy_block(lines, block, block, shape)
        copies.commit_group()
    chunks = ()
    if quantization == "token":
        for block in gl.static_range(ahead, blocks):
            copy_block(rows, block, block, shape)
            copies.commit_group()
        for block in gl.static_range(blocks):
            copies.wait_group(2 * ahead + blocks - ahead - 1 - (2 * block if block < ahead else block + ahead))
            gl.barrier()
            chunks += (read_rows(rows, block % buffers),)
    for block in gl.static_range(blocks):
        if quantization != "token":
            copies.wait_group(2 * min(block + ahead, blocks) - 1 - 2 * block)
            gl.barrier()
            chunks += (read_rows(rows, block % buffers),)
        if block + ahead < blocks:
            if quantization != "token":
                copy_block(rows, block + ahead, (block + ahead) % buffers, shape)
                copies.commit_group()
            copy_block(lines, block + ahead, (block + ahead) % stages, shape)
            copies.commit_group()
        if block == 0:
            step = step_of_rows(chunks, static, quantization, dtype, config)
        a_block, a_scale, factor = quantize_rows(chunks[block], step, mfma, quantization, dtype, shape.a_format)
        if quantization == "mx" and block == 0:
            store_scales(b_scales, words)
        copies.wait_group(min(ahead, blocks - 1 - block) * (1 if quantization == "token" else 2))
        gl.barrier()
        b_block = read_block(lines, block % stages)
        if quantization == "mx":
            b_scale = read_scales(b_scales, block, 1)
        else:
            b_scale = unit_scales(lines, config.folds * config.block_n, 1)
        if quantization == "block":
            part = isa.mfma_scaled(a_block, a_scale, shape.a_format, b_block, b_scale, shape.b_format, gl.zeros_like(acc))
            of_rows = by_wave(factor, gl.SliceLayout(2, mfma), True)
            acc = gl.fma(part, block_factors(of_rows, columns[block], acc, config), acc)
        else:
            acc = isa.mfma_scaled(a_block, a_scale, shape.a_format, b_block, b_scale, shape.b_format, acc)
    of_rows = ()
    if quantization == "token" or quantization == "static":
        of_tokens = step.reshape(config.folds, ROWS_OF_MFMA // config.folds, WAVES)
        of_rows = (gl.convert_layout(gl.max(gl.max(of_tokens, axis=2), axis=0), gl.SliceLayout(1, result)),)
    store_result(out, unfolded(acc, config), of_rows, ends, first_row, first_column, m, shape)

# mypy: ignore-errors
"""Quantises activations for the MMAs. ``encoding`` defines the quantised values.

A tile of activations is [rows, blocks, 32], because a block of 32 neighbours along k shares a scale.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.hip import libdevice

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gluon.layouts_device import axis_layout
from tokenspeed_kernel_base.ops.quantization.encodings import SMALLEST_NORMAL

_SMALLEST_NORMAL = gl.constexpr(SMALLEST_NORMAL)
_SIGNS = gl.constexpr(0x80808080 - 2**32)  # the highest bits of four bytes
ENOUGH = gl.constexpr(24)  # a block needs no exact passes if the planes represent this many of its 32 elements exactly


@gluon.constexpr_function
def activation_layout(rows, warps):
    """Returns the register layout of activations [rows, blocks, 32]: 8 adjacent elements per lane. If there are fewer rows than
    warps, several warps divide the blocks of a row; otherwise each warp has whole rows.
    """
    along = min(rows, warps)
    return gl.BlockedLayout([1, 1, 8], [1, 16, 4], [along, warps // along, 1], [2, 1, 0])


@gluon.jit
def places(first, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Returns the indices of BLOCK consecutive elements of a row, beginning with ``first``: int32 [1, BLOCK / 32, 32]."""
    block = gl.arange(0, BLOCK // 32, axis_layout(layout, 3, 1))
    return first + block[None, :, None] * 32 + gl.arange(0, 32, axis_layout(layout, 3, 2))[None, None, :]


@gluon.jit
def load_activations(x, row, first, k, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Loads BLOCK consecutive elements of each row of x, beginning with element ``first``, in x's dtype: [rows, BLOCK / 32, 32].
    Elements from k on are 0. The buffer load itself returns 0 for masked elements; an explicit ``other`` would take further
    instructions.

    Args:
        row: int32 [rows], offsets of the rows' first elements from ``x``, in elements.
        k: number of elements of a row, a scalar or int32 [rows, 1, 1].
    """
    at = places(first, BLOCK, layout)
    return isa.buffer_load(x, row[:, None, None] + at, mask=at < k)


@gluon.jit
def magnitudes(values):
    """Returns the bits of the values without the sign bit, as integers. Integers compare as the magnitudes do, with NaN largest,
    but take fewer instructions."""
    short: gl.constexpr = values.dtype.primitive_bitwidth == 16
    bits = values.to(gl.int16 if short else gl.int32, bitcast=True)
    return bits & (0x7FFF if short else 0x7FFFFFFF)


@gluon.jit
def token_step(largest, dtype: gl.constexpr, SPLIT: gl.constexpr = 1):
    """Computes the fp8 scale of each token, float32 [rows]. The scale is that of `quantize_fp8`, except for tokens with a NaN.

    Args:
        largest: `magnitudes` of a tile of activations, or the elementwise maximum of the magnitudes of several tiles.
        dtype: the activations' dtype.
        SPLIT: number of adjacent rows of the tile that belong to one token; they get the same scale.
    """
    rows: gl.constexpr = largest.shape[0]
    bits = gl.max(largest.reshape(rows, largest.shape[1] * 32), axis=1)
    if SPLIT > 1:
        parts = bits.reshape(rows // SPLIT, SPLIT)
        bits, _ = gl.broadcast(gl.max(parts, axis=1)[:, None], parts)
        bits = gl.convert_layout(bits.reshape(rows), axis_layout(largest.type.layout, 3, 0))
    else:
        bits = gl.convert_layout(bits, axis_layout(largest.type.layout, 3, 0), assert_trivial=True)
    if dtype.primitive_bitwidth == 16:
        bits = bits.to(gl.int16)
    found = bits.to(dtype, bitcast=True).to(gl.float32)
    return gl.maximum(gl.div_rn(found, gl.full_like(found, 448.0)), _SMALLEST_NORMAL)


@gluon.jit
def e2m1_codes(values):
    """Converts float32 to e2m1, ties to even, saturating. Returns the 4-bit patterns as int32 from 0 to 15."""
    magnitude = gl.minimum(gl.abs(values), 6.0)
    # Adding a constant of the right size rounds to a multiple of the constant's ulp, to nearest even, and leaves the multiple in
    # the low bits. For magnitudes less than 2, the constant's ulp is 0.5 (results are codes 0 to 4). For magnitudes from 2 to less
    # than 4, the ulp is 1 (codes 4 to 6). For magnitudes from 4 to 6, the ulp is 2 (codes 6 and 7).
    aligned = gl.where(magnitude < 2.0, 4194304.0, gl.where(magnitude < 4.0, 8388610.0, 16777224.0))
    code = (magnitude + aligned).to(gl.int32, bitcast=True) & 7
    return code | ((values.to(gl.int32, bitcast=True) >> 28) & 8)


@gluon.jit
def encode_e4m3(values, step, EXACT: gl.constexpr):
    """Quantises values [rows, blocks, 32] to e4m3, saturating. ``step``: float32 [rows], the rows' scales. Returns uint8.

    A division takes ten times as many instructions as a multiplication by the reciprocal. The reciprocal's error matters only if
    the quotient is halfway between two e4m3 values, as for one in some thousands of 16-bit floats. If EXACT is true, two more
    instructions correct the quotient.
    """
    reciprocal = (1.0 / step)[:, None, None]
    quotient = values * reciprocal
    if EXACT:
        divisor, _ = gl.broadcast(step[:, None, None], values)
        factor, _ = gl.broadcast(reciprocal, values)
        # With these signs, -0 stays -0.
        quotient = gl.fma(-gl.fma(quotient, divisor, -values), factor, quotient)
    return quotient.to(gl.float8e4nv).to(gl.uint8, bitcast=True)


@gluon.jit
def block_exponents(values, encoding: gl.constexpr):
    """Returns the exponent of the block scale of the first plane (biased by 127) for each block, int32 [rows, blocks], and whether
    all elements of the block are finite."""
    packed: gl.constexpr = encoding.format == "e2m1"
    # The bits of finite floats sort as the magnitudes do; infinities and NaN lie above.
    field = gl.max(magnitudes(values), axis=2) >> 23
    return gl.maximum(field - (2 if packed else 7), 0 if packed else smallest_exponent(encoding)), field != 255


@gluon.jit
def split_by_block(values, exponents, finite, encoding: gl.constexpr):
    """Splits float32 values into planes. Returns a tuple with the e4m3 values [rows, blocks, 32] of each plane, and the residual:
    ``values`` minus the sum of all planes, divided by the last plane's scale.

    Args:
        exponents, finite: each block's scale exponent, and whether its values are finite, from `block_exponents`. Blocks with a
            value that is not finite give zeros.
    """
    reciprocal = gl.where(finite, (254 - exponents) << 23, 0).to(gl.float32, bitcast=True)
    left = gl.where(finite[:, :, None], values * reciprocal[:, :, None], 0.0)
    planes = ()
    for plane in gl.static_range(encoding.planes):
        if plane > 0:
            left *= 32.0
        rounded = left.to(gl.float8e4nv)
        planes += (rounded,)
        left -= rounded.to(gl.float32)
    return planes, left


@gluon.jit
def encode_by_block(values, encoding: gl.constexpr):
    """Quantises float32 values with block scales. Returns two tuples with an entry per plane: the quantised values, uint8 [rows,
    blocks, 32] (e2m1: packed to [rows, blocks, 16]), and the e8m0 scales, uint8 [rows, blocks].

    A block with a NaN or an infinity gets the scale 255, so the whole block is NaN.
    """
    exponents, finite = block_exponents(values, encoding)
    codes = ()
    scales = ()
    if encoding.format == "e2m1":
        reciprocal = gl.where(finite, (254 - exponents) << 23, 0).to(gl.float32, bitcast=True)
        rounded = e2m1_codes(gl.where(finite[:, :, None], values * reciprocal[:, :, None], 0.0))
        low, high = gl.split(rounded.reshape(rounded.shape[0], rounded.shape[1], 16, 2))
        codes += ((low | (high << 4)).to(gl.uint8),)
    else:
        planes, _ = split_by_block(values, exponents, finite, encoding)
        for plane in gl.static_range(encoding.planes):
            codes += (planes[plane].to(gl.uint8, bitcast=True),)
    for plane in gl.static_range(encoding.planes):
        scales += (gl.where(finite, exponents - 5 * plane, 255).to(gl.uint8),)
    return codes, scales


@gluon.jit
def residual_of(values, encoding: gl.constexpr):
    """Returns what remains of float32 values [rows, blocks, 32] after the sum of all planes is subtracted. The residual is exact,
    and zero in blocks with an infinity or NaN."""
    exponents, finite = block_exponents(values, encoding)
    _, left = split_by_block(values, exponents, finite, encoding)
    last: gl.constexpr = 5 * (encoding.planes - 1)
    return left * 2.0**-last * (exponents << 23).to(gl.float32, bitcast=True)[:, :, None]


@gluon.constexpr_function
def smallest_exponent(encoding):
    """Returns the smallest block exponent of the first plane for which the last plane's exponent is not negative."""
    return 5 * (encoding.planes - 1)


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def held_at_least(codes, exponents, encoding: gl.constexpr):
    """Tests quickly whether rows may need exact passes (see ``exact_device``). Returns int32 [lanes of the workgroup].

    The test computes a lower bound of the number of elements of each block that the planes represent exactly. A lane holds elements
    of several blocks, and its result is the minimum over these blocks. If `passes_for` is not 0 for some block, the result is below
    ENOUGH.

    Args:
        codes, exponents: the first plane's e4m3 values as uint8, in an `activation_layout`, and its block scales.
    """
    warps: gl.constexpr = gl.num_warps()
    rows: gl.constexpr = codes.shape[0]
    blocks: gl.constexpr = codes.shape[1]
    # Four e4m3 bytes at a time: after the subtraction, bit 7 of a byte is set if the byte without its sign is at least ``least``.
    # The planes represent elements that large exactly.
    quarters = codes.reshape(rows, blocks, 4, 2, 4)
    byte = gl.arange(0, 4, axis_layout(quarters.type.layout, 5, 4))[None, None, None, None, :]
    words = gl.reduce(quarters.to(gl.int32) << (8 * byte), 4, either)
    least: gl.constexpr = 0x01010101 * (5 if encoding.planes == 2 else 3)
    held = gl.sum(libdevice.popc(((words | _SIGNS) - least) & _SIGNS), axis=3)
    held, _ = gl.broadcast(gl.sum(held, axis=2)[:, :, None], held)
    exponents = gl.convert_layout(exponents, gl.SliceLayout(2, held.type.layout), assert_trivial=True)[:, :, None]
    held = gl.where(exponents > smallest_exponent(encoding), held, 32)
    # A lane holds eight elements of every ``apart``-th block.
    apart: gl.constexpr = 16 * (warps // rows)
    held = gl.min(held.reshape(rows, blocks // apart, apart, 4), axis=1).reshape(rows * apart * 4)
    return gl.convert_layout(held, gl.BlockedLayout([1], [64], [warps], [0]), assert_trivial=True)


@gluon.jit
def store_encoded(values, step, first, row, output, held, encoding: gl.constexpr):
    """Encodes (quantises) and stores one chunk of the rows: ``values`` begins at element ``first`` of each row. Returns the minimum
    of ``held`` and the chunk's `held_at_least`.

    Args:
        step: float32 [rows], the rows' scales, if scales are per token or static.
        row: int32 [rows], indices of the rows in ``output``.
        output: the memory to write to, see `Output`.
    """
    BLOCK: gl.constexpr = values.shape[1] * 32
    layout: gl.constexpr = values.type.layout
    at = places(first, BLOCK, layout)
    exists = row < output.rows
    values = values.to(gl.float32)
    if encoding.scales != "block":
        offsets = (row * output.width)[:, None, None] + at
        codes = encode_e4m3(values, step, encoding.scales == "token")
        isa.buffer_store(codes, output.codes, offsets, mask=exists[:, None, None] & (at < output.width))
    else:
        planes, exponents = encode_by_block(values, encoding)
        if encoding.planes > 1 and not encoding.exact:
            held = gl.minimum(held, held_at_least(planes[0], exponents[0], encoding))
        # A lane of an MMA reads the scales of every fourth block along k. So those scales are stored contiguously.
        block = first // 32 + gl.arange(0, BLOCK // 32, axis_layout(layout, 3, 1))[None, :]
        scale_at = block // 16 * 16 + block % 4 * 4 + block % 16 // 4
        scale_row = gl.convert_layout(row, gl.SliceLayout(1, gl.SliceLayout(2, layout)), assert_trivial=True)[:, None]
        scale_exists = (scale_row < output.rows) & (block * 32 < output.width)
        scale_at = scale_row * (output.width // 32) + scale_at
        for plane in gl.static_range(encoding.planes):
            if encoding.format == "e2m1":
                stored: gl.constexpr = planes[plane].type.layout
                half_row = gl.convert_layout(row, axis_layout(stored, 3, 0), assert_trivial=True)[:, None, None]
                half_block = gl.arange(0, BLOCK // 32, axis_layout(stored, 3, 1))
                half = gl.arange(0, 16, axis_layout(stored, 3, 2))
                half_at = first // 2 + half_block[None, :, None] * 16 + half[None, None, :]
                half_exists = (half_row < output.rows) & (half_at < output.width // 2)
                isa.buffer_store(planes[plane], output.codes, half_row * (output.width // 2) + half_at, mask=half_exists)
            else:
                offsets = (row * output.width)[:, None, None] + at
                codes = output.codes + plane * output.plane_codes
                isa.buffer_store(planes[plane], codes, offsets, mask=exists[:, None, None] & (at < output.width))
            isa.buffer_store(exponents[plane], output.scale + plane * output.plane_scales, scale_at, mask=scale_exists)
    return held


@gluon.aggregate
class Output:
    """The memory to which a workgroup writes encoded rows.

    Attributes:
        codes, scale: pointers to the values and scales of the workgroup's first row in the first plane.
        plane_codes, plane_scales: distance from one plane to the next, in elements of codes and of scale.
        width: elements per row: k, padded.
        rows: number of rows from the workgroup's first row to the last row that is encoded.
    """

    codes: gl.tensor
    scale: gl.tensor
    plane_codes: gl.tensor
    plane_scales: gl.tensor
    width: gl.tensor
    rows: gl.tensor


@gluon.jit
def encode_rows(x, stride, k, codes, scale, width, rows, first_row, count, encoding: gl.constexpr, CHUNKS: gl.constexpr):
    """Encodes one row of activations per warp, so that no warp waits for another.

    Args:
        x: points to row 0; the elements of a row are contiguous, rows are ``stride`` elements apart.
        k: number of elements per row.
        codes, scale: pointers to the encoded rows' tensors, see `encoding`.
        width: elements per encoded row: k, padded to a multiple of 512.
        rows: the number of rows that ``codes`` and ``scale`` have memory for.
        first_row: the row of the first warp.
        count: the number of rows to encode, from row 0 on, over all workgroups.
        CHUNKS: number of 512-element chunks of a row, which are all kept in registers; or 0: the row is read twice.
    """
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = activation_layout(warps, warps)
    row = gl.arange(0, warps, axis_layout(layout, 3, 0))
    wide = first_row.to(gl.int64)
    row_bytes = width // (2 if encoding.format == "e2m1" else 1)
    row_scales = 1 if encoding.scales == "token" else 0 if encoding.scales == "tensor" else width // 32
    output = Output(
        codes + wide * row_bytes, scale + wide * row_scales, rows.to(gl.int64) * row_bytes, rows.to(gl.int64) * row_scales,
        gl.to_tensor(width), count - first_row,
    )  # fmt: skip
    x += wide * stride
    begins = gl.minimum(row, output.rows - 1) * stride
    step = gl.full([warps], 1.0, gl.float32, axis_layout(layout, 3, 0))
    if encoding.scales == "tensor":
        step = step * gl.load(scale)
    lanes = gl.full([warps * 64], 32, gl.int32, gl.BlockedLayout([1], [64], [warps], [0]))
    if CHUNKS:
        chunks = ()
        for chunk in gl.static_range(CHUNKS):
            chunks += (load_activations(x, begins, chunk * 512, k, 512, layout),)
        if encoding.scales == "token":
            largest = magnitudes(chunks[0])
            for chunk in gl.static_range(1, CHUNKS):
                largest = gl.maximum(largest, magnitudes(chunks[chunk]))
            step = token_step(largest, x.dtype.element_ty)
        for chunk in gl.static_range(CHUNKS):
            lanes = store_encoded(chunks[chunk], step, chunk * 512, row, output, lanes, encoding)
    else:
        if encoding.scales == "token":
            largest = magnitudes(load_activations(x, begins, 0, k, 512, layout))
            for first in range(512, k, 512):
                largest = gl.maximum(largest, magnitudes(load_activations(x, begins, first, k, 512, layout)))
            step = token_step(largest, x.dtype.element_ty)
        for first in range(0, width, 512):
            values = load_activations(x, begins, first, k, 512, layout)
            lanes = store_encoded(values, step, first, row, output, lanes, encoding)
    if encoding.scales == "token":
        gl.store(output.scale + row, step, mask=row < output.rows)
    if encoding.planes > 1 and not encoding.exact:
        least = gl.min(lanes.reshape(warps, 64), axis=1)
        row = gl.arange(0, warps, least.type.layout)
        held = scale + encoding.planes * output.plane_scales + wide
        gl.store(held + row, least.to(gl.uint8), mask=row < output.rows)


@gluon.jit(do_not_specialize=["rows"])
def encode_kernel(x, count, codes, scale, k, width, rows, encoding: gl.constexpr, CHUNKS: gl.constexpr):
    """Encodes the first rows of x, contiguous [rows, k]. Each warp encodes one row. ``count`` points to the number of rows to
    encode. Other arguments: see `encode_rows`."""
    first = gl.program_id(0) * gl.num_warps()
    count = gl.load(count)
    if first < count:
        encode_rows(x, k, k, codes, scale, width, rows, first, count, encoding, CHUNKS)

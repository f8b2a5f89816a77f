"""Device code of `words`: GEMMs of few rows of a with e2m1 weights, four values per 16-bit word.

Grid: [output tiles, splits of k]. The MMAs are swap-AB: a tile computes [TILE.n columns of b, TILE.m rows of a]. `_decode` turns a
tile of words [n, k / 4] into four tiles of weights: those of the elements ``4j``, ``4j + 1``, ``4j + 2`` and ``4j + 3``. Unless a
is arranged, each of the four is multiplied by the matching quarter of a, and the four MMAs alternate between two accumulators. If a
is arranged, the four tiles are concatenated along k, because a has the same order of k in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start, wait_for_products
from tokenspeed_kernel.triton.gemm._tiles_device import Output, store_tile, tile_of
from tokenspeed_kernel.triton.quantization._encode_device import decode_e2m1, decode_e8m0, decode_fp8, swizzled_in_tile

# Register $4 holds two 16-bit words. Each line extracts one e2m1 value of both words to a bfloat16 pair. The sign goes to bit 15,
# the other bits to bits 8 to 6. The bfloat16 is 2^-126 times the e2m1 value. One integer multiplication shifts the sign and the
# other bits at once. The mask clears all remaining bits.
_IN_BFLOAT16 = (
    "and.b32 a, $4, 0x000F000F; mul.lo.u32 a, a, 4160; and.b32 a, a, 0x81C081C0;",
    "and.b32 a, $4, 0x00F000F0; mul.lo.u32 a, a, 260; and.b32 a, a, 0x81C081C0;",
    "shr.u32 a, $4, 2; shl.b32 s, $4, 4; and.b32 s, s, 0x80008000; lop3.b32 a, a, 0x01C001C0, s, 0xEA;",
    "shr.u32 a, $4, 6; and.b32 s, $4, 0x80008000; lop3.b32 a, a, 0x01C001C0, s, 0xEA;",
)
# For float16, the bits other than the sign go to bits 11 to 9. The float16 is 2^-14 times the e2m1 value.
_IN_FLOAT16 = (
    "shl.b32 a, $4, 9; shl.b32 s, $4, 12; and.b32 s, s, 0x80008000; lop3.b32 a, a, 0x0E000E00, s, 0xEA;",
    "shl.b32 a, $4, 5; shl.b32 s, $4, 8; and.b32 s, s, 0x80008000; lop3.b32 a, a, 0x0E000E00, s, 0xEA;",
    "shl.b32 a, $4, 1; shl.b32 s, $4, 4; and.b32 s, s, 0x80008000; lop3.b32 a, a, 0x0E000E00, s, 0xEA;",
    "shr.u32 a, $4, 3; and.b32 s, $4, 0x80008000; lop3.b32 a, a, 0x0E000E00, s, 0xEA;",
)


def _decoding(codes: tuple[str, ...], scaling: str) -> tl.constexpr:
    """Returns PTX that dequantises two 16-bit words of four e2m1 values each to the registers $0 to $3.

    Each line of ``codes`` extracts one value of both words to register a.

    ``scaling`` multiplies register a by the scales of both words, in $5, and writes the output register, TO.
    """
    made = (code + scaling.replace("TO", f"${i}") for i, code in enumerate(codes))
    return tl.constexpr("{ .reg .b32 a, s, c, z; mov.b32 c, 0x7E807E80; mov.b32 z, 0x80008000; " + "".join(made) + " }")


# e2m1 values times one-byte scales have few significant bits. So all results are exact. e8m0 scales need two multiplications,
# because a scale times 2^126 would overflow.
_E8M0 = _decoding(_IN_BFLOAT16, "fma.rn.bf16x2 a, a, c, z; fma.rn.bf16x2 TO, a, $5, z;")
_E4M3 = _decoding(_IN_BFLOAT16, "fma.rn.bf16x2 TO, a, $5, z;")
_E4M3_FLOAT16 = _decoding(_IN_FLOAT16, "mul.rn.f16x2 TO, a, $5;")


@triton.jit
def _decode(word, scale, BLOCK: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr):
    """Dequantises a tile of words, of four e2m1 values each, to four tiles of weights. ``scale``: the words' float32 scales.

    With ``PTX`` and e4m3 scales, the results are 2^-8 times the weights. This factor keeps the adjusted scale within the dtype's
    range.
    """
    if PTX and tl.bfloat16 == COMPUTE:
        if BLOCK == 16:
            scale *= 2.0**118
        return tl.inline_asm_elementwise(
            _E4M3 if BLOCK == 16 else _E8M0,
            "=&r,=&r,=&r,=&r,r,r",
            [word, scale.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    if PTX and tl.float16 == COMPUTE:
        return tl.inline_asm_elementwise(
            _E4M3_FLOAT16,
            "=&r,=&r,=&r,=&r,r,r",
            [word, (scale * 2.0**6).to(tl.float16)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    bits = word.to(tl.int32)
    return (
        (decode_e2m1(bits) * scale).to(COMPUTE),
        (decode_e2m1(bits >> 4) * scale).to(COMPUTE),
        (decode_e2m1(bits >> 8) * scale).to(COMPUTE),
        (decode_e2m1(bits >> 12) * scale).to(COMPUTE),
    )


@triton.jit
def _quarter(four, INDEX: tl.constexpr, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    """Unpacks the 16-bit float at position INDEX (0 to 3) of each int64, and converts it from DTYPE to COMPUTE."""
    return (four >> (16 * INDEX)).to(tl.int16).to(DTYPE, bitcast=True).to(COMPUTE)


@triton.jit
def _beside(left, right, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Concatenates two tiles ``[ROWS, COLUMNS]`` to ``[ROWS, 2 * COLUMNS]``."""
    return tl.join(left, right).permute(0, 2, 1).reshape(ROWS, 2 * COLUMNS)


@triton.jit
def _weights(words, scales, present, scale_present, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Loads and dequantises b for one step along k. Returns four tiles of weights. With ``PTX`` and e4m3 scales, these are 2^-8
    times the weights, see `_decode`."""
    ROWS: tl.constexpr = TILE.n
    WORDS: tl.constexpr = TILE.k // 4
    STEP_BLOCKS: tl.constexpr = TILE.k // BLOCK
    COMPUTE: tl.constexpr = TILE.compute
    PTX: tl.constexpr = TILE.ptx
    if TILE.even_k:
        word = tl.load(words)
        byte = tl.load(scales)
    else:
        word = tl.load(words, mask=present, other=0)
        byte = tl.load(scales, mask=scale_present, other=0)
    if BLOCK == 32:
        scale = decode_e8m0(byte)
    else:
        scale = decode_fp8(byte, "e4m3fn", TILE.native)
    scale = tl.broadcast_to(scale[:, :, None], (ROWS, STEP_BLOCKS, BLOCK // 4)).reshape(ROWS, WORDS)
    return _decode(word, scale, BLOCK, COMPUTE, PTX)


@triton.jit
def words_mm_kernel(
    a_ptr,
    b_ptr,
    b_scale_ptr,
    alpha_ptr, bias_ptr, out_ptr,
    M, N, K,
    stride_am, stride_bn,
    stride_bsn, stride_bsk,
    stride_out_m, stride_out_n, stride_split: tl.int64,
    steps,
    BLOCK: tl.constexpr, SWIZZLED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes one output tile (grid axis 0) over one split of k (grid axis 1) of ``steps * TILE.k`` elements.

    ``BLOCK``: elements along k that share a scale. a is unchanged or arranged, see `words`.
    """
    ROWS: tl.constexpr = TILE.n
    COLUMNS: tl.constexpr = TILE.m
    BLOCK_K: tl.constexpr = TILE.k
    WORDS: tl.constexpr = BLOCK_K // 4
    COMPUTE: tl.constexpr = TILE.compute
    PTX: tl.constexpr = TILE.ptx
    ARRANGED: tl.constexpr = TILE.arranged
    EVEN_K: tl.constexpr = TILE.even_k
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty
    start(TILE.early)
    tiles_m, tiles_n = tl.cdiv(M, COLUMNS), tl.cdiv(N, ROWS)
    tile_m, tile_n = tile_of(tl.program_id(0), tiles_m, tiles_n, 8)
    m = tile_m * COLUMNS + tl.arange(0, COLUMNS)
    n = tile_n * ROWS + tl.arange(0, ROWS)
    # Columns beyond N recompute column N - 1, and are not stored.
    own = tl.minimum(n, N - 1)
    split = tl.program_id(1)
    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BLOCK_K))
    lane = tl.arange(0, WORDS)
    words = b_ptr.to(tl.pointer_type(tl.int16)) + own.to(tl.int64)[:, None] * (stride_bn // 2) + lane[None, :]
    if ARRANGED:
        fours = a_ptr + m.to(tl.int64)[None, :] * stride_am + tl.arange(0, BLOCK_K)[:, None]
    else:
        fours = a_ptr.to(tl.pointer_type(tl.int64)) + m.to(tl.int64)[None, :] * (stride_am // 4) + lane[:, None]
    if SWIZZLED:
        scales = b_scale_ptr + (own // 128).to(tl.int64)[:, None] * stride_bsn
    else:
        scales = b_scale_ptr + own.to(tl.int64)[:, None] * stride_bsn
    acc0 = tl.zeros([ROWS, COLUMNS], tl.float32)
    if not ARRANGED:
        acc1 = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(first, last):
        if TILE.asynchronous:
            wait_for_products()
        at = step * (BLOCK_K // BLOCK) + tl.arange(0, BLOCK_K // BLOCK)[None, :]
        if SWIZZLED:
            location = scales + (swizzled_in_tile(own[:, None], at) + at // 4 * stride_bsk)
        else:
            location = scales + at * stride_bsk
        present = step * WORDS + lane < K // 4
        w0, w1, w2, w3 = _weights(words + step * WORDS, location, present[None, :], at < K // BLOCK, BLOCK, TILE)
        within = (m < M)[None, :]
        if not (EVEN_K or ARRANGED):  # the arranged copy of a is padded with zeros
            within = (m < M)[None, :] & present[:, None]
        if ARRANGED:
            x = tl.load(fours + step * BLOCK_K, mask=within, other=0.0).to(COMPUTE)
            acc0 = tl.dot(_beside(_beside(w0, w1, ROWS, WORDS), _beside(w2, w3, ROWS, WORDS), ROWS, 2 * WORDS), x, acc0)
        else:
            four = tl.load(fours + step * WORDS, mask=within, other=0)
            acc0 = tl.dot(w0, _quarter(four, 0, DTYPE, COMPUTE), acc0)
            acc1 = tl.dot(w1, _quarter(four, 1, DTYPE, COMPUTE), acc1)
            acc0 = tl.dot(w2, _quarter(four, 2, DTYPE, COMPUTE), acc0)
            acc1 = tl.dot(w3, _quarter(four, 3, DTYPE, COMPUTE), acc1)
    acc = acc0
    if not ARRANGED:
        acc += acc1
    if PTX and BLOCK == 16:  # `_decode` returns 2^-8 times the weights
        acc *= 256.0
    if alpha_ptr is not None:
        acc *= tl.load(alpha_ptr)
    target = out_ptr + split * stride_split
    store_tile(acc, Output(target, stride_out_m, stride_out_n, bias_ptr), m[None, :], n[:, None], M, N, TILE.interpreted)

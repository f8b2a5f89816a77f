# mypy: ignore-errors
"""nvfp4 operands of `mm`: codes multiplied by their scales, in float16.

The MFMAs' scales are powers of two for 32 elements, so that they cannot be nvfp4's e4m3 scales for 16 elements. A product of a code
and its scale has six significant bits, and lies between 2^-10 and 2688: float16 represents it exactly.

A lane reads 32 adjacent elements of a line at once, but an MFMA takes 8 of them. So the MFMAs' order of k is not that of memory; it
is the same for both operands. Codes become float16s by table look-ups: by the timing model, 12 instructions for 8 codes take 48
cycles, and 4 conversions 64.

The VALU limits few rows: 16 x 2048 x 4096 takes 1.89 us by the timing model, where mxfp4 takes 1.09. Every workgroup multiplies the
codes of all 16 rows of a, as many as those of its own columns. Workgroups of more columns would share that, but then fewer CUs have
work, and splits of k would cost a merge of 0.8 us. Two scales share a register; ``op_sel`` of the packed multiplication selects
one of them. Copying a scale to both halves of a register took 0.03 us longer. Not tried: MFMAs of 16 elements, whose partial sums
are multiplied by the scales.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gluon.layouts_device import axis_layout, plain


@gluon.jit
def scale_pairs(scales, block, like):
    """Reads the scales of a block of k from LDS. Returns float16s, two scales in a word: int32 of the shape and layout of ``like``,
    [waves_k, lines, 4, 2], where a lane's words of codes with one of the scales are adjacent."""
    waves: gl.constexpr = like.shape[0]
    lines: gl.constexpr = like.shape[1]
    # Axis 2 selects a word of four scales, axis 3 the half of this word that holds two of them, and axis 4 one of the two words of
    # codes to which this pair of scales belongs.
    layout: gl.constexpr = like.reshape(waves, lines, 2, 2, 2).type.layout
    pairs: gl.constexpr = gl.SliceLayout(4, layout)
    count: gl.constexpr = scales.shared.shape[0] * scales.shared.shape[1] // (2 * waves * lines)
    shared = scales.shared.reinterpret(gl.int32, [count, 2 * waves * lines], plain(1)).index(block)
    shared = shared.reinterpret(gl.int32, [waves, 2, lines], plain(3)).permute([0, 2, 1])
    word = shared.load(gl.SliceLayout(3, pairs))[:, :, :, None]
    shift = gl.arange(0, 2, axis_layout(pairs, 4, 3))[None, None, None, :] * 16
    both = gl.inline_asm_elementwise(
        "v_cvt_scalef32_pk_f16_fp8 $0, $1, 1.0", "=v,v", [word >> shift], dtype=gl.int32, is_pure=True, pack=1
    )
    found, _ = gl.broadcast(both[:, :, :, :, None], like.reshape(waves, lines, 2, 2, 2))
    return gl.convert_layout(found.reshape(waves, lines, 4, 2), like.type.layout, assert_trivial=True)


@gluon.jit
def scaled_codes(words, scale, HALF: gl.constexpr):
    """Converts words of eight codes to float16s, and multiplies them by a scale. Returns four int32 tensors, with the codes' pairs.
    ``HALF``: which float16 of ``scale`` is the scale."""
    # The compiler would take 17 instructions for the first 12. Registers $1 and $3: the upper bytes of four float16s each, of the
    # lower and of the upper codes of each byte.
    use: gl.constexpr = " op_sel:[0,1]" if HALF else " op_sel_hi:[1,0]"
    text: gl.constexpr = (
        "v_and_b32 $0, 0x07070707, $4\n\tv_lshrrev_b32 $2, 4, $4\n\tv_and_b32 $2, 0x07070707, $2\n\t"
        "v_perm_b32 $0, $6, $7, $0\n\tv_perm_b32 $2, $6, $7, $2\n\t"
        "v_lshlrev_b32 $1, 4, $4\n\tv_and_or_b32 $1, $1, $8, $0\n\tv_and_or_b32 $3, $4, $8, $2\n\t"
        "v_perm_b32 $0, $1, $1, $9\n\tv_and_b32 $1, 0xff00ff00, $1\n\t"
        "v_perm_b32 $2, $3, $3, $9\n\tv_and_b32 $3, 0xff00ff00, $3\n\t"
        "v_pk_mul_f16 $0, $0, $5" + use + "\n\tv_pk_mul_f16 $1, $1, $5" + use + "\n\t"
        "v_pk_mul_f16 $2, $2, $5" + use + "\n\tv_pk_mul_f16 $3, $3, $5" + use
    )
    return gl.inline_asm_elementwise(
        text, "=&v,=&v,=&v,=&v,v,v,v,v,v,v",
        [
            words,
            scale,
            gl.full_like(words, 0x46444240),  # the upper bytes of the float16s 6, 4, 3 and 2
            gl.full_like(words, 0x3E3C3800),  # 1.5, 1, 0.5 and 0
            gl.full_like(words, 0x80808080 - 2**32),
            gl.full_like(words, 0x020C000C),  # bytes 0 and 2 to the upper bytes of two float16s
        ],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def together(even, odd):
    """Joins words of the two scales of a lane, [waves_k, lines, 4, 2] each, in the order of k: [waves_k, lines, 16]."""
    return gl.join(even, odd).permute(0, 1, 2, 4, 3).reshape(even.shape[0], even.shape[1], 16)


@gluon.jit
def products(words, scales, block, mfma: gl.constexpr, INDEX: gl.constexpr):
    """Returns the codes of a block of k, multiplied by their scales, as an MFMA operand: float16 [waves_k, lines, 128], or with
    INDEX 1 [waves_k, 128, lines].

    Args:
        words: eight codes each, int32 [waves_k, lines, 16], in `block_layout`.
        scales: the operand's `Scales`.
        block: the block's index within the chunk of scales.
        mfma: the accumulator's layout.
        INDEX: 0 for a, 1 for b.
    """
    waves: gl.constexpr = words.shape[0]
    lines: gl.constexpr = words.shape[1]
    even, odd = gl.split(words.reshape(waves, lines, 4, 2, 2).permute(0, 1, 2, 4, 3))
    scale = scale_pairs(scales, block, even)
    first, second, third, fourth = scaled_codes(even, scale, 0)
    first_odd, second_odd, third_odd, fourth_odd = scaled_codes(odd, scale, 1)
    first, second = together(first, first_odd), together(second, second_odd)
    third, fourth = together(third, third_odd), together(fourth, fourth_odd)
    pairs = gl.join(gl.join(first, third), gl.join(second, fourth))
    found = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(gl.float16, bitcast=True)
    # An MFMA takes one word of each lane: four words of a lane are adjacent.
    found = found.reshape(waves, lines, 4, 4, 8).permute(0, 1, 3, 2, 4).reshape(waves, lines, 128)
    if INDEX == 1:
        found = found.permute(0, 2, 1)
    return gl.convert_layout(found, gl.DotOperandLayout(INDEX, mfma, 8), assert_trivial=True)

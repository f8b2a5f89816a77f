"""Device code shared by the Triton GEMMs: the tile order, the scales, and the epilogue."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import decode_e8m0, round_to


class Operand(NamedTuple):
    """One matrix of a GEMM operand, as lines along k: a line is a row of a, or a column of b. See `_operands.Operand`.

    Fields:
        data: a pointer to the matrix's first element, or a tensor descriptor; None if the kernel uses only the scales.
        line_stride, k_stride: strides between lines and along k, of the data.
        scale: a pointer to the scales; not read if the operand has no scales.
        scale_line_stride, scale_k_stride: strides between lines and between blocks along k, of the scales.
    """

    data: Any
    line_stride: Any
    k_stride: Any
    scale: Any
    scale_line_stride: Any
    scale_k_stride: Any


class Output(NamedTuple):
    """One matrix of the result, ``[M, N]``, and the bias, ``[N]`` or None."""

    first: Any  # a pointer to the first element
    m_stride: Any
    n_stride: Any
    bias: Any


@triton.jit
def tile_of(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Returns the row and column of output tile ``index``, in tiles.

    Tiles are ordered column by column within ``GROUP`` rows of tiles, so that loads of b hit L2.
    """
    in_group = GROUP * tiles_n
    first = index // in_group * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    return first + index % in_group % size, index % in_group // size


@triton.jit
def scale_of_lines(operand, line, inside, SCALING: tl.constexpr):
    """Loads the scales that apply after the reduction over k: one per line, or one for the whole operand."""
    if SCALING == "line":
        scale = tl.load(operand.scale + line.to(tl.int64) * operand.scale_line_stride, mask=inside, other=0.0)
    else:
        scale = tl.load(operand.scale)
    return scale


@triton.jit
def scale_by_lines(acc, operand, line, inside, SCALING: tl.constexpr):
    """Multiplies the accumulator by `scale_of_lines`, if the operand has one scale per line or one for all lines. Otherwise returns
    the accumulator unchanged.
    """
    if SCALING == "line" or SCALING == "whole":
        acc *= scale_of_lines(operand, line, inside, SCALING)
    return acc


@triton.jit
def scale_of_block(operand, line, block, inside, STORED: tl.constexpr):
    """Loads the scales of lines, or of groups of lines that share a scale, for block number ``block`` along k, as float32."""
    at = operand.scale + line.to(tl.int64) * operand.scale_line_stride
    if STORED == "packed":
        word = tl.load(at + block // 4 * operand.scale_k_stride, mask=inside, other=0)
        scale = decode_e8m0((word >> (block % 4 * 8)) & 0xFF)
    elif STORED == "e8m0":
        scale = decode_e8m0(tl.load(at + block * operand.scale_k_stride, mask=inside, other=0))
    else:
        scale = tl.load(at + block * operand.scale_k_stride, mask=inside, other=0.0)
    return scale


@triton.jit
def store_tile(acc, out, m, n, M, N, INTERPRETED: tl.constexpr):
    """Runs the epilogue: adds the bias, rounds to the output dtype, and stores the tile.

    ``m`` and ``n`` are the indices of the tile's rows and columns, which broadcast to acc's shape.
    """
    if out.bias is not None:
        acc += tl.load(out.bias + n, mask=n < N, other=0.0).to(tl.float32)
    value = round_to(acc, out.first.dtype.element_ty, INTERPRETED)
    tl.store(out.first + m.to(tl.int64) * out.m_stride + n.to(tl.int64) * out.n_stride, value, mask=(m < M) & (n < N))

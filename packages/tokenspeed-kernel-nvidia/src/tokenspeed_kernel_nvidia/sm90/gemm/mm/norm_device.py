"""Residual add and RMSNorm as the prologue of a GEMM, in chunks of 16 bytes of a token.

A kernel has two ways to apply the norm. With `Norm.scaled_chunk`, the GEMM's operand is (token + residual) times the norm's
weights, and the epilogue divides the results by the root mean square. So the MMAs need not wait for the sum of squares. With
`Norm.normed_chunk`, the operand is the normalised token, rounded to the tokens' dtype.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.registers_device import float_of, pack, widened
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import LOAD_BYTES
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Matrix, Vector


@dataclass(frozen=True)
class NormWork:
    """Parameters of residual add and RMSNorm.

    Attributes:
        residual, total: the rows of the residual, and of the output for token plus residual; address 0 without a residual.
        norm: the RMSNorm's weights.
        eps: the RMSNorm's epsilon, added to the mean square.
        hidden: elements of a token.
    """

    residual: Matrix
    total: Matrix
    norm: Vector
    eps: Float32
    hidden: Int32


class Norm:
    """The loads and the arithmetic of the prologue. A kernel's class derives from this class.

    Attributes:
        dtype: dtype of tokens.
    """

    def norm_weights(self, work: NormWork, words: list[Any]) -> list[Any]:
        """Converts eight of the norm's weights to float32. ``words``: eight loaded words; 16-bit weights are in the first four."""
        half = [each for word in words[:4] for each in widened(cutlass.Float16, word)]
        brain = [each for word in words[:4] for each in widened(cutlass.BFloat16, word)]
        return [
            cutlass.select_(work.norm.kind == 1, float_of(words[at]), cutlass.select_(work.norm.kind == 2, brain[at], half[at]))
            for at in range(8)
        ]

    def sources_of(self, x: Matrix, work: NormWork, token: Int32, chunk: Int32, live: Boolean) -> tuple:
        """Returns the global addresses of chunk number ``chunk``, 16 bytes, of a token, of its residual, and twice of the norm's
        weights: 16-bit weights are at the first of these two addresses, float32 weights at both. Each result is a pair of an
            address
        and whether to load from it.

        Args:
            live: whether the token and the chunk exist.
        """
        at = Int64(chunk * LOAD_BYTES)
        size = cutlass.select_(work.norm.kind == 1, Int32(4), Int32(2))
        norm_at = work.norm.address + Int64(chunk * (LOAD_BYTES // 2) * size)
        return (
            (x.row(token) + at, live),
            (work.residual.row(token) + at, live & (work.residual.address != 0)),
            (norm_at, live),
            (norm_at + LOAD_BYTES, live & (work.norm.kind == 1)),
        )

    def scaled_chunk(self, raw: cute.Tensor, scales: list, square: Float32) -> tuple:
        """Returns a chunk's words of (token + residual) times the norm's weights, its words of token + residual, and ``square``
        plus the squares of these sums.

        Args:
            raw: the chunk's words of the token, ``raw[0, word]``, and of the residual, ``raw[1, word]``; zeros without a residual.
            scales: the norm's eight weights of the chunk, float32.
            square: the token's sum of squares so far.
        """
        scaled, sums = [], []
        for word in range(4):
            pair, other = widened(self.dtype, raw[0, word]), widened(self.dtype, raw[1, word])
            total = pack(self.dtype, pair[0] + other[0], pair[1] + other[1])
            pair = widened(self.dtype, total)
            square += pair[0] * pair[0] + pair[1] * pair[1]
            scaled.append(pack(self.dtype, pair[0] * scales[2 * word], pair[1] * scales[2 * word + 1]))
            sums.append(total)
        return scaled, sums, square

    def normed_chunk(self, raw: cute.Tensor, scales: list, factor: Float32) -> list:
        """Returns the words of a normalised chunk. ``factor``: the token's reciprocal root mean square. Other arguments: see
        `scaled_chunk`."""
        _, sums, _ = self.scaled_chunk(raw, scales, Float32(0.0))
        pairs = [widened(self.dtype, total) for total in sums]
        return [
            pack(self.dtype, low * factor * scales[2 * at], high * factor * scales[2 * at + 1])
            for at, (low, high) in enumerate(pairs)
        ]

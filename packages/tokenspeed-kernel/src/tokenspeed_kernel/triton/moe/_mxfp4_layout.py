"""The layout ``"triton_mxfp4"`` of mxfp4 expert weights, which `moe_apply_mxfp4` reads. Weights are converted to this layout once,
when a model is loaded.

A projection ``[rows, k]`` is ``rows / 2`` pairs of rows. One program computes both rows of a pair. A pair is gate and up of a
feature in w13, and rows ``r`` and ``r + rows / 2`` in w2. ``k`` is split into chunks of 64 elements, which are two blocks of 32. A
16-bit word holds four e2m1 values of one pair of rows, at position ``j`` (0 to 31) of a block. The order of the values is (first
row, block 0), (first row, block 1), (second row, block 0), (second row, block 1). A tile of words therefore becomes four tiles of
weights. Each tile of weights is in order along k, and lies within one block of scales.

    weight  int16    [experts, chunks, pairs, 32]    a tile of many pairs and one chunk is contiguous
    scale   int32    [experts, chunks, pairs]        four exponents, byte i for value i; relative to the largest scale of the row
    bias    float32  [experts, 4, pairs]             largest scales of both rows, biases of both rows

The bit positions within a word minimise instructions. The sign and magnitude bits (s, e, e, m) of an e2m1 value go to bits 15 and 8
to 6 of a bfloat16. This bfloat16 is the e2m1 value times 2^-126.

    bit    15  14  13  12   11 10 9    8 7 6      5 4 3      2 1 0
    value  0s  2s  3s  1s   3 e e m    0 e e m    1 e e m    2 e e m

A scale byte is the exponent field of a bfloat16 that multiplies such a value. For the row's largest scale the byte is 253 (2^126).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, e8m0_to_float

LAYOUT = "triton_mxfp4"
CHUNK = 2 * BLOCK_MX
_LARGEST = 253
# Bit positions in a word: the sign of each value, and the lowest of the value's three other bits.
_SIGN_BITS = (15, 12, 14, 13)
_LOW_BITS = (6, 3, 0, 9)
# Experts that one step of the conversion converts. A step of one expert would be bound by launch latency.
_AT_ONCE = 4


def prepare_weights(weights: MoEWeights, plan: MoEPlan) -> MoEWeights:
    """Converts canonical mxfp4 weights to this module's layout."""
    gate_up = _row_pairs(2 * plan.intermediate_size, plan.w13_interleaved, weights.w13_weight.device)
    halves = _row_pairs(plan.hidden_size, False, weights.w2_weight.device)
    w13 = _prepare(weights.w13_weight, weights.w13_weight_scale, weights.w13_weight_bias, gate_up)
    w2 = _prepare(weights.w2_weight, weights.w2_weight_scale, weights.w2_weight_bias, halves)
    return MoEWeights(*w13, *w2, layout=LAYOUT)


def _row_pairs(rows: int, interleaved: bool, device: torch.device) -> Tensor:
    """Returns the indices, in the canonical weight, of the first and the second row of each pair: ``[2, rows / 2]``."""
    index = torch.arange(rows, device=device)
    return index.view(rows // 2, 2).t() if interleaved else index.view(2, rows // 2)


def _prepare(codes: Tensor, scale: Tensor | None, bias: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Returns the words, exponents and epilogue factors of one projection. ``rows``: the result of `_row_pairs`.
    assert scale is not None
    experts, _, half_k = codes.shape
    pairs, chunks = rows.shape[1], -(-half_k * 2 // CHUNK)
    weight = torch.empty(experts, chunks, pairs, BLOCK_MX, dtype=torch.int16, device=codes.device)
    exponents = torch.empty(experts, chunks, pairs, dtype=torch.int32, device=codes.device)
    epilogue = torch.zeros(experts, 4, pairs, dtype=torch.float32, device=codes.device)
    for some in (slice(first, first + _AT_ONCE) for first in range(0, experts, _AT_ONCE)):
        weight[some] = _words(codes[some][:, rows], chunks)
        exponents[some], epilogue[some, :2] = _exponents(scale[some][:, rows], chunks)
        if bias is not None:
            epilogue[some, 2:] = bias[some].float()[:, rows]
    return weight, exponents, epilogue


def _words(codes: Tensor, chunks: int) -> Tensor:
    """Converts uint8 ``[experts, 2, pairs, k / 2]`` to words, int16 ``[experts, chunks, pairs, 32]``."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    four = _four_of(nibbles, chunks * CHUNK, (chunks, 2, BLOCK_MX)).short()
    word = torch.zeros_like(four[0])
    for code, sign, low in zip(four, _SIGN_BITS, _LOW_BITS, strict=True):
        word |= (code & 8) << sign - 3 | (code & 7) << low
    return word


def _exponents(scale: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Converts uint8 scales ``[experts, 2, pairs, k / 32]`` to relative exponents and row factors.

    Returns int32 ``[experts, chunks, pairs]``, and float32 ``[experts, 2, pairs]``, the largest scale of each row.

    A scale 2^253 times smaller than its row's largest becomes 0. A NaN scale makes all results of its row NaN, as any NaN does.
    """
    scale = scale.int()
    largest = scale.amax(-1)
    relative = (scale - largest.unsqueeze(-1) + _LARGEST).clamp(min=0)
    four = _four_of(relative, 2 * chunks, (chunks, 2, 1)).squeeze(-1)
    return four[0] | four[1] << 8 | four[2] << 16 | four[3] << 24, e8m0_to_float(largest.to(torch.uint8))


def _four_of(values: Tensor, padded: int, shape: tuple[int, int, int]) -> Tensor:
    """Splits ``[experts, 2, pairs, k]`` into ``[4, experts, chunks, pairs, n]``: the two blocks of a chunk, for both rows of a
    pair.

    k is padded to ``padded`` and viewed as ``shape``, which is ``(chunks, 2, n)``.
    """
    values = torch.nn.functional.pad(values, (0, padded - values.shape[-1]))
    return values.view(*values.shape[:-1], *shape).permute(1, 4, 0, 3, 2, 5).flatten(0, 1)

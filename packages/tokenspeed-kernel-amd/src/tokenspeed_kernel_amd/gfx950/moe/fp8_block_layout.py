"""The layout ``"gfx950_fp8_block"`` of fp8 expert weights with block scales, which this folder's kernels read. Weights are put into
this layout once, when a model is loaded.

Strips and their rows are as in `mxfp4_layout`. A lane has 16 bytes as in that layout, but these bytes are 16 elements of k:

    weight  float8_e4m3fn  [experts, strips, chunks, 2, 64, 16]   chunks of 64 elements of k; byte ``b`` of lane ``16 g + r`` has
                                                                  element ``16 g + b`` of row ``r`` of the strip's half
    scale   float32        [experts, strips, quads, 2, 4]         of each half, for each 128 elements of k; 0 beyond the last
    bias    float32        [experts, 32 * strips]                 as in `mxfp4_layout`
The 16 rows of a half share a scale, because they lie in one block of 128 rows of the canonical weights. There, they are 16
consecutive rows, or every second row of 32 rows if gate and up rows alternate. A scale block is one step (128 elements) along k.
Elements of k are padded to a multiple of 64 with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_amd.gfx950.moe.mxfp4_layout import (
    HALF,
    QUAD,
    STEP,
    order_of_rows,
    padded_columns,
    quads_of,
    strips_of,
)
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8

LAYOUT = "gfx950_fp8_block"
_PIECE = 64  # elements of each row, along k, that the lanes of a wave load at once
_LANES_K = 4
_BYTES = 16  # bytes that a lane loads at once


def prepare_weights(weights: MoEWeights, plan: MoEPlan) -> MoEWeights:
    """Copies canonical fp8 weights with block scales to the layout above, one expert at a time. The copied weights take as many
    bytes as the given weights, plus padding. They have a scale per 16 rows instead of one per 128."""
    w13_rows, w2_rows = order_of_rows(plan, weights.w13_weight.device)
    w13 = _arranged(weights.w13_weight, weights.w13_weight_scale, weights.w13_weight_bias, w13_rows)
    w2 = _arranged(weights.w2_weight, weights.w2_weight_scale, weights.w2_weight_bias, w2_rows)
    return MoEWeights(*w13, *w2, LAYOUT, w13_input_scale=weights.w13_input_scale, w2_input_scale=weights.w2_input_scale)


def _arranged(given: Tensor, scale: Tensor | None, bias: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the weight, the scale and the bias of one projection in this module's layout. ``rows``: for each row of the strips,
    in the strips' order, the index of the given row to store there."""
    assert scale is not None  # checked by the operator
    codes = given.view(torch.uint8)
    experts, count, k = codes.shape
    strips, pieces, quads = strips_of(count), -(-k // _PIECE), quads_of(k)
    weight = codes.new_empty(experts, strips, pieces, 2, _LANES_K * HALF, _BYTES)
    for expert in range(experts):
        padded = padded_columns(codes[expert].index_select(0, rows), pieces * _PIECE)
        # [strip, half, r, chunk, g, b] -> [strip, chunk, half, g, r, b]
        lanes = padded.view(strips, 2, HALF, pieces, _LANES_K, _BYTES).permute(0, 3, 1, 4, 2, 5)
        weight[expert].view(strips, pieces, 2, _LANES_K, HALF, _BYTES).copy_(lanes)
    halves = scale.index_select(1, rows[::HALF] // BLOCK_FP8)  # [experts, halves, blocks of k]
    halves = torch.nn.functional.pad(halves, (0, quads * QUAD * STEP // BLOCK_FP8 - halves.shape[2]))
    arranged = halves.view(experts, strips, 2, quads, QUAD).transpose(2, 3).contiguous()
    return weight.view(torch.float8_e4m3fn), arranged, None if bias is None else bias.float().index_select(1, rows).contiguous()

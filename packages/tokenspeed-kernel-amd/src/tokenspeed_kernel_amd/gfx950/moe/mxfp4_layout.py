"""The layout ``"gfx950_mxfp4"`` of mxfp4 expert weights, which this folder's kernels read. The layout is made once, when a model is
loaded.

A projection ``[rows, k]`` is cut into *strips* of 32 rows and *steps* of 128 elements of k. A wave reads the tile of a strip and a
step contiguously, 16 bytes per lane, twice. The two reads are the A operands of two MFMAs of 16 x 16 x 128. In w13, the first 16
rows of a strip are the gates of 16 features, and the other 16 rows their ups. So one lane has both gate and up of a feature. In w2,
a strip is 32 consecutive rows.

    weight  uint8    [experts, strips, steps, 2, 64, 16]     byte ``b`` of lane ``16 g + r`` has elements ``32 g + 2 b`` and the
                                                             next one of row ``r`` of the strip's half
    scale   uint8    [experts, strips, quads, 2, 64, 4]      of four steps each, lanes as above; beyond the last step 0
    bias    float32  [experts, 32 * strips]                  rows as above, or None

Elements of k are padded to a multiple of 128 with code 0. The padding's scale is 0 (2^-127).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX

LAYOUT = "gfx950_mxfp4"
STRIP = 32  # rows
HALF = 16  # rows of a matrix instruction
STEP = 128  # elements of k of a matrix instruction
QUAD = 4  # number of steps whose scales a lane reads at once
_LANES_K = 4  # lanes along k, 32 elements each
_BYTES = 16  # bytes that a lane loads at once


def strips_of(rows: int) -> int:
    """Strips of an expert. Rows are a multiple of 32, because they are k of the other projection, and mxfp4 requires that of k."""
    return rows // STRIP


def steps_of(k: int) -> int:
    """Number of steps of k; the last step may be padded."""
    return -(-k // STEP)


def quads_of(k: int) -> int:
    """Number of groups of four steps; the last group may have fewer steps."""
    return -(-k // (QUAD * STEP))


def prepare_weights(weights: MoEWeights, plan: MoEPlan) -> MoEWeights:
    """Canonical mxfp4 weights in the layout above, an expert at a time. The result has the bytes of the weights, and padding."""
    w13_rows, w2_rows = order_of_rows(plan, weights.w13_weight.device)
    w13 = _arranged(weights.w13_weight, weights.w13_weight_scale, weights.w13_weight_bias, w13_rows)
    w2 = _arranged(weights.w2_weight, weights.w2_weight_scale, weights.w2_weight_bias, w2_rows)
    return MoEWeights(*w13, *w2, LAYOUT, w13_input_scale=weights.w13_input_scale, w2_input_scale=weights.w2_input_scale)


def order_of_rows(plan: MoEPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns, for w13 and for w2, the canonical row for each row of the strips."""
    features = torch.arange(2 * plan.intermediate_size, device=device)
    gate_up = features.view(-1, 2).t() if plan.w13_interleaved else features.view(2, -1)  # [2, features]
    return gate_up.reshape(2, -1, HALF).transpose(0, 1).flatten(), torch.arange(plan.hidden_size, device=device)


def _arranged(codes: Tensor, scale: Tensor | None, bias: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """One projection. ``rows``: the canonical row for each row of the strips, in the strips' order."""
    assert scale is not None  # checked by the operator
    experts, count, half_k = codes.shape
    strips, steps, quads = strips_of(count), steps_of(2 * half_k), quads_of(2 * half_k)
    weight = codes.new_empty(experts, strips, steps, 2, _LANES_K * HALF, _BYTES)
    exponents = scale.new_empty(experts, strips, quads, 2, _LANES_K * HALF, QUAD)
    for expert in range(experts):
        padded = padded_columns(codes[expert].index_select(0, rows), steps * STEP // 2)
        # [strip, half, r, step, g, b] -> [strip, step, half, g, r, b]
        lanes = padded.view(strips, 2, HALF, steps, _LANES_K, _BYTES).permute(0, 3, 1, 4, 2, 5)
        weight[expert].view(strips, steps, 2, _LANES_K, HALF, _BYTES).copy_(lanes)
        padded = padded_columns(scale[expert].index_select(0, rows), quads * QUAD * STEP // BLOCK_MX)
        # [strip, half, r, quad, step, g] -> [strip, quad, half, g, r, step]
        lanes = padded.view(strips, 2, HALF, quads, QUAD, _LANES_K).permute(0, 3, 1, 5, 2, 4)
        exponents[expert].view(strips, quads, 2, _LANES_K, HALF, QUAD).copy_(lanes)
    arranged = None if bias is None else bias.float().index_select(1, rows).contiguous()
    return weight, exponents, arranged


def padded_columns(rows: Tensor, columns: int) -> Tensor:
    """Pads rows with zeros to a number of columns."""
    return torch.nn.functional.pad(rows, (0, columns - rows.shape[1]))

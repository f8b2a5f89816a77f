"""The layout ``"gfx950_mxfp4"`` of mxfp4 expert weights, which this folder's kernels read. Weights are put into this layout once,
when a model is loaded.

A projection's weight ``[rows, k]`` is divided into *strips* of 32 rows and *steps* of 128 elements of k. Four steps are a *quad*. A
strip has two *halves* of 16 rows. The tile of one strip and one step is contiguous. A wave reads the tile with two loads of 16
bytes per lane, one per half. The two loads are the left operands of two MFMAs of 16 x 16 x 128. In w13, the first half of a strip
holds the gate rows of 16 features, and the second half their up rows. So one lane has both gate and up of a feature. In w2, a strip
is 32 consecutive rows.

    weight  uint8    [experts, strips, steps, 2, 64, 16]     byte ``b`` of lane ``16 g + r`` has elements ``32 g + 2 b`` and the
                                                             next one of row ``r`` of the strip's half
    scale   uint8    [experts, strips, quads, 2, 64, 4]      a lane's scales of the quad's four steps; 0 beyond the last step
    bias    float32  [experts, 32 * strips]                  in the strips' order of rows, or None
Weights are padded with zeros to a multiple of 128 elements of k. The padding's scale is 0 (2^-127).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX

LAYOUT = "gfx950_mxfp4"
STRIP = 32  # rows of weights per strip
HALF = 16  # rows of an MFMA
STEP = 128  # elements of k of an MFMA
QUAD = 4  # number of steps whose scales a lane reads at once
_LANES_K = 4  # lanes along k, 32 elements each
_BYTES = 16  # bytes that a lane loads at once


def strips_of(rows: int) -> int:
    """Returns the number of strips of a projection with this many rows per expert. The number of rows is a multiple of 32: it is
    the other projection's k, or twice that k, and mxfp4 requires that k is a multiple of 32."""
    return rows // STRIP


def steps_of(k: int) -> int:
    """Returns the number of 128-element steps along k; the last step may be padded."""
    return -(-k // STEP)


def quads_of(k: int) -> int:
    """Returns the number of quads (four steps, 512 elements) along k; the last quad may have fewer steps."""
    return -(-k // (QUAD * STEP))


def prepare_weights(weights: MoEWeights, plan: MoEPlan) -> MoEWeights:
    """Copies canonical mxfp4 weights to the layout above, one expert at a time. The copied weights take as many bytes as the given
    weights, plus padding."""
    w13_rows, w2_rows = order_of_rows(plan, weights.w13_weight.device)
    w13 = _arranged(weights.w13_weight, weights.w13_weight_scale, weights.w13_weight_bias, w13_rows)
    w2 = _arranged(weights.w2_weight, weights.w2_weight_scale, weights.w2_weight_bias, w2_rows)
    return MoEWeights(*w13, *w2, LAYOUT, w13_input_scale=weights.w13_input_scale, w2_input_scale=weights.w2_input_scale)


def order_of_rows(plan: MoEPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns, for w13 and for w2, which row of the canonical weights each row of the strips holds."""
    features = torch.arange(2 * plan.intermediate_size, device=device)
    gate_up = features.view(-1, 2).t() if plan.w13_interleaved else features.view(2, -1)  # [2, features]
    return gate_up.reshape(2, -1, HALF).transpose(0, 1).flatten(), torch.arange(plan.hidden_size, device=device)


def _arranged(codes: Tensor, scale: Tensor | None, bias: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns one projection's weight, scale and bias in the layout above. ``rows``: the canonical row for each row of the strips,
    in the strips' order."""
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
    """Pads each row with zeros to ``columns`` elements."""
    return torch.nn.functional.pad(rows, (0, columns - rows.shape[1]))

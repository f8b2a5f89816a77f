"""A mixture-of-experts layer with mxfp4 weights in the layout of `_mxfp4_layout`, and tokens in bfloat16 or float16.

The kernel runs two grouped GEMMs and a weighted sum. Both GEMMs are swap-AB: weights are the left operand, features are rows and
tokens are columns. Few tokens then fill a narrow tile, and weights dequantised in registers stay there, because WGMMA on Hopper
accepts a left operand in registers. A tile of 16-bit words becomes four tiles of weights: two blocks of k for each of two rows. The
two rows have separate accumulators. In the first GEMM the two rows are gate and up of a feature, so the activation runs before the
store.

For few tokens, each program searches all ids for the pairs of its expert. For many tokens, `block_schedule` makes a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv, common_device, for_architecture, next_power_of_2
from tokenspeed_kernel.triton.moe._combine import combine, slots_for
from tokenspeed_kernel.triton.moe._mxfp4_layout import CHUNK, LAYOUT, prepare_weights
from tokenspeed_kernel.triton.moe._rounding import fitted, rounded
from tokenspeed_kernel.triton.moe._routing import BlockSchedule, block_schedule
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.formats import mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


class Tile(NamedTuple):
    """How a grouped GEMM is tiled and pipelined.

    Attributes:
        rows: pairs of weight rows in a tile.
        columns: (token, slot) pairs of one expert in a tile.
        warps, stages: a program's warps and pipeline stages.
        unroll: the largest number of chunks of k per loop iteration. An iteration has fewer chunks if ``unroll`` does not divide
            the number of chunks.
        split_k: among how many programs k is split; another kernel adds their partial sums.
        tail: blocks with at most ``tail`` pairs use a tile of ``tail`` columns; 0 for one tile size. If ``tail`` is at least 32,
            blocks with at most ``tail / 2`` pairs use ``tail / 2`` columns.
        separate: whether the two blocks of a chunk have separate accumulators, which shortens the dependency chains of MMAs and
            takes more registers.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    unroll: int = 1
    split_k: int = 1
    tail: int = 0
    separate: bool = True


class Options(NamedTuple):
    """Compile-time options of `mxfp4_gemm_kernel`.

    Attributes:
        scaled: whether inputs have scales.
        gated: whether this is the first GEMM, whose inputs are gathered from the tokens.
        activated: whether the epilogue applies the activation.
        limited: whether gate and up are clamped.
        dtype: Triton's dtype of the MMA operands.
        ptx, drain: whether inline PTX decodes the weights, and whether decoding first waits for outstanding WGMMAs; see
            `_mxfp4_decode_device.decode`.
    """

    scaled: bool
    gated: bool
    activated: bool
    limited: bool
    dtype: Any
    ptx: bool
    drain: bool


class Program(NamedTuple):
    """Compile-time tile sizes of `mxfp4_gemm_kernel`, from a `Tile`.

    ``tail`` equals ``columns`` if there is one tile size. ``unroll`` divides the number of chunks. ``whole_k``: whether the chunk
    size divides the weight's k.
    """

    rows: int
    columns: int
    tail: int
    split_k: int
    whole_k: bool
    separate: bool
    unroll: int
    stages: int


class Regime(NamedTuple):
    """The tiles of both GEMMs for calls with a mean of at most ``pairs_per_expert`` (token, slot) pairs per expert."""

    pairs_per_expert: float
    first: Tile
    second: Tile


# Up to this many (token, slot) pairs, each program searches all expert ids for its pairs. The search is cheaper than a separate
# launch.
_DIRECT_PAIRS = 64

# Up to this many pairs, the grid does not fill the device without split-K.
_FEW_PAIRS = 8

# Times are microseconds of the first and the second GEMM of a GPT-OSS-120B layer on an H200. Times in brackets belong to
# alternatives. With two warps, `tl.dot` compiles to mma.sync. WGMMA, unlike mma.sync, needs waits. So mma.sync is faster while
# weight loads bound the time. (16 tokens: 164 and 88 with 64 x 16 and four warps, 121 and 67 with 64 x 8 and two warps.)
_FEW = {
    # One token: 14 and 10 us; the second GEMM and the reduction of its partial sums take 17 us (without split-K: 18 and 18 us).
    "sm_90": Regime(0, Tile(64, 8, 2, 4, split_k=5), Tile(64, 8, 2, 4, split_k=5)),
    "any": Regime(0, Tile(32, 16, 2, 2, split_k=4), Tile(32, 16, 2, 2, split_k=4)),
}
_REGIMES = {
    "sm_90": (
        # 4 tokens: 41 and 22 us (28 us without split-K).
        Regime(0.3, Tile(64, 8, 2, 3, unroll=3), Tile(64, 8, 2, 4, split_k=2)),
        # 16 tokens: 122 and 67 us (unrolled 124 and 72 us); 64 tokens: 230 and 127 us.
        Regime(3, Tile(64, 8, 2, 4), Tile(64, 8, 2, 4)),
        # 256 tokens: 305 and 167 us (four stages: 325 and 173 us; one tile size: 341 and 184 us; WGMMA with 128 x 16: 341 and 183
        # us).
        Regime(20, Tile(64, 16, 2, 6, tail=8), Tile(64, 16, 2, 6, tail=8)),
        # 1024 tokens: 532 and 268 us (tiles of 64 x 32: 615 and 296 us). 2048 tokens: 781 and 411 us (tiles of 64 x 128: 823 and
        # 442 us).
        Regime(100, Tile(64, 64, 4, 4, tail=32, separate=False), Tile(64, 64, 4, 4, tail=32, separate=False)),
        # 8192 tokens: 2234 and 1100 us (tiles of 128 x 128 with eight warps: 2305 and 1245 us; one tile size: 2512 and 1173 us).
        Regime(math.inf, Tile(64, 128, 4, 3, tail=64, separate=False), Tile(64, 128, 4, 4, tail=64, separate=False)),
    ),
    # Not measured: tiles that compile for every target without register spills.
    "any": (
        Regime(10, Tile(64, 16, 4, 2, separate=False), Tile(64, 16, 4, 2, separate=False)),
        Regime(40, Tile(64, 32, 4, 2, separate=False), Tile(64, 32, 4, 2, separate=False)),
        Regime(math.inf, Tile(64, 64, 4, 2, separate=False), Tile(64, 64, 4, 2, separate=False)),
    ),
}


def _suits_number_of_pairs(request: Any, config: Mapping[str, Any]) -> str | None:
    """Returns why the tunable regime does not suit the call's number of (token, slot) pairs; None if it does.

    Split-K is rejected for many pairs, because the memory for partial sums grows with the number of pairs. Wide tiles are rejected
    for few pairs, because most of their columns would be empty.
    """
    pairs = request.sizes["tokens"] * request.traits["top_k"]
    if config["regime_index"] < 2 and pairs > 256:
        return f"sums in parts of {pairs} pairs"
    if config["regime_index"] > 3 and pairs < 64:
        return f"tiles for many pairs, and there are {pairs}"
    return None


@register_kernel(
    "moe",
    "moe_apply",
    name="triton_moe_apply_mxfp4",
    solution="triton",
    capability=TRITON,
    signatures={
        format_signature(x=dense_tensor_format(dtype), w13=mxfp4_format(), w2=mxfp4_format())
        for dtype in (torch.float16, torch.bfloat16)
    },
    traits={
        "weight_layout": LAYOUT,
        "processed_weights": True,
        "activation": "swiglu",
        "bias": any,
        "w13_interleaved": any,
        "swiglu_limit": any,
        "swiglu_alpha_beta": any,
        "fp8_activations": any,
        "static_fp8_activations": any,
        "mxfp4_activations": any,
        "wide_activations": any,
        "exact_activations": any,
    },
    priority=Priority.PORTABLE + 1,  # ranked above the kernel that reads canonical weights
    tags={"determinism"},
    weight_preprocessor=prepare_weights,
    tunables={"regime_index": [0, 1, 2, 3, 4, 5]},
    tunable_if=_suits_number_of_pairs,
)
def moe_apply(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None,
    *,
    regime_index: int | None = None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.moe_apply`. Weights are in the layout of `prepare_weights`.

    ``regime_index``: index of the architecture's regime, ordered by rising numbers of pairs; clamped to the last regime.
    """
    pairs = topk_ids.numel()
    if regime_index is not None:
        regimes = (for_architecture(_FEW, x.device), *for_architecture(_REGIMES, x.device))
        regime = regimes[min(regime_index, len(regimes) - 1)]
    elif pairs <= _FEW_PAIRS:
        regime = for_architecture(_FEW, x.device)
    else:
        regime = next(r for r in for_architecture(_REGIMES, x.device) if pairs <= r.pairs_per_expert * plan.num_experts)
    return moe_apply_as(regime, x, weights, topk_weights, topk_ids, plan, out)


def moe_apply_as(
    regime: Regime,
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
) -> Tensor:
    """Computes `moe_apply` with the tiles of ``regime``."""
    tokens, hidden = x.shape
    pairs = topk_ids.numel()
    if out is None:
        out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not pairs:
        return out
    first, second = regime.first, regime.second
    # For each number of columns of a block: the schedule, or None if programs search the ids themselves.
    schedules: dict[int, BlockSchedule | None] = {
        columns: None if pairs <= _DIRECT_PAIRS else block_schedule(topk_ids, plan.num_experts, columns)
        for columns in {first.columns, second.columns}
    }
    wide = torch.float32 if plan.wide_activations else x.dtype
    activated = torch.empty((1, pairs, plan.intermediate_size), dtype=wide, device=x.device)
    gate_up = activated
    if first.split_k > 1:  # partial sums stay float32
        shape = (first.split_k, pairs, 2 * plan.intermediate_size)
        gate_up = torch.empty(shape, dtype=torch.float32, device=x.device)
    w13 = (weights.w13_weight, weights.w13_weight_scale, weights.w13_weight_bias)
    # 16-bit floats represent e4m3 values exactly, and also the results of rounding 16-bit floats to mxfp4.
    tokens_in = rounded(x, plan.activation_dtype, x.dtype, static_scale=weights.w13_input_scale)
    _project(first, schedules[first.columns], tokens_in, w13, gate_up, topk_ids, plan, gated=True)
    if first.split_k > 1:
        _activate(gate_up, activated, plan)
    scaled = plan.activation_dtype in ("fp8", "fp8_static")
    carrier = x.dtype if scaled else wide
    rows, row_scale = rounded(activated[0], plan.activation_dtype, carrier, static_scale=weights.w2_input_scale)
    if plan.wide_activations and not scaled:
        rows, row_scale = fitted(rows)
    slots = slots_for(x, pairs, second.split_k)
    w2 = (weights.w2_weight, weights.w2_weight_scale, weights.w2_weight_bias)
    _project(second, schedules[second.columns], (rows, row_scale), w2, slots, topk_ids, plan, gated=False)
    combine(slots, topk_weights, topk_ids, plan.num_experts, out)
    return out


def _activate(gate_up: Tensor, activated: Tensor, plan: MoEPlan) -> None:
    # Adds the first GEMM's split-K partial sums ``[parts, pairs, 2 * features]``, and writes the activation to ``activated``.
    parts, pairs, _ = gate_up.shape
    features = plan.intermediate_size
    block = min(512, next_power_of_2(features))
    device_code.activate_kernel[(pairs, cdiv(features, block))](
        gate_up,
        activated,
        pairs,
        features,
        plan.alpha,
        0.0 if plan.limit is None else plan.limit,
        plan.beta,
        LIMITED=plan.limit is not None,
        PARTS=parts,
        BLOCK=block,
        num_warps=4,
    )


def _project(
    tile: Tile,
    schedule: BlockSchedule | None,
    rows_and_scale: tuple[Tensor, Tensor | None],
    projection: tuple[Tensor, Tensor | None, Tensor | None],
    out: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    *,
    gated: bool,
) -> None:
    """Launches one grouped GEMM of the layer. ``out`` is ``[parts, pairs, features]``, with one part per split of k."""
    x, x_scale = rows_and_scale
    weight, scale, epilogue = projection
    pairs, k = topk_ids.numel(), x.shape[1]
    _, chunks, rows, _ = weight.shape
    row_tiles = cdiv(rows, tile.rows)
    blocks = pairs if schedule is None else schedule.capacity
    # Triton's interpreter computes bfloat16 dots wrongly.
    dtype = for_architecture({"cpu": torch.float32, "any": x.dtype}, x.device)
    native = for_architecture({"nvidia": True, "any": False}, x.device)
    asynchronous = for_architecture({"sm_90": True, "any": False}, x.device)
    lists = (topk_ids,) * 4 if schedule is None else _lists(schedule)
    device_code.mxfp4_gemm_kernel[(row_tiles * blocks, tile.split_k)](
        x,
        x.stride(0),
        x.stride(1),
        x if x_scale is None else x_scale,
        weight,
        scale,
        epilogue,
        out,
        out.stride(0),
        out.stride(1),
        topk_ids,
        *topk_ids.stride(),
        *lists,
        pairs,
        topk_ids.shape[1],
        plan.num_experts,
        rows,
        k,
        chunks,
        row_tiles,
        plan.alpha,
        0.0 if plan.limit is None else plan.limit,
        plan.beta,
        OPTIONS=Options(
            scaled=x_scale is not None,
            gated=gated,
            activated=gated and tile.split_k == 1,
            limited=plan.limit is not None,
            dtype=common_device.DTYPES[dtype],
            ptx=native,
            drain=asynchronous and tile.warps % 4 == 0,
        ),
        TILE=Program(
            rows=tile.rows,
            columns=tile.columns,
            tail=tile.tail or tile.columns,
            split_k=tile.split_k,
            whole_k=k % CHUNK == 0,
            separate=tile.separate,
            unroll=next(u for u in range(tile.unroll, 0, -1) if chunks % u == 0),
            stages=tile.stages,
        ),
        PAIRS=0 if schedule is not None else 16 if pairs <= 16 else _DIRECT_PAIRS,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _lists(schedule: BlockSchedule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return schedule.order, schedule.expert_start, schedule.block_expert, schedule.block_row

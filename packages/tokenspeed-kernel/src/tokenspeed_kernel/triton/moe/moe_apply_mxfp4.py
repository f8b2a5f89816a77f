"""Mixture of experts with mxfp4 weights in the layout of `_mxfp4_layout`, tokens in bfloat16 or float16.

Two grouped products and a sum. In both products weights are the left operand: features are rows, tokens columns, so that a few
tokens fill a narrow tile, and the codes, which are decoded in registers, stay there (on Hopper the left operand of a matrix
instruction may). A tile of 16-bit words becomes four tiles of weights, two blocks of k for each of two rows, which have
accumulators of their own. In the first product these are gate and up of a feature, so that the activation happens before anything
is stored.

A few tokens find the pairs of their expert among all ids by themselves; many get a schedule from `block_schedule`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.common import for_architecture
from tokenspeed_kernel.triton.moe._combine import combine
from tokenspeed_kernel.triton.moe._mxfp4_decode import decode
from tokenspeed_kernel.triton.moe._mxfp4_layout import CHUNK
from tokenspeed_kernel.triton.moe._rounding import round_rows_fp8_kernel, round_rows_mxfp4_kernel
from tokenspeed_kernel.triton.moe._routing import BlockSchedule, block_schedule
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights


@dataclass(frozen=True)
class Tile:
    """What a program computes, and how.

    Attributes:
        rows: pairs of weight rows.
        columns: (token, slot) pairs of one expert.
        warps, stages: of the program and its pipeline of loads.
        unroll: chunks of k a turn of the loop, at most; fewer where their number is no multiple.
        split_k: programs that share k; the parts are summed by another kernel.
        tail: columns of blocks that have no more (from 32 on, also half as many); 0 for one size.
        separate: whether the two blocks of a chunk have accumulators of their own: shorter chains of products, more registers.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    unroll: int = 1
    split_k: int = 1
    tail: int = 0
    separate: bool = True


@dataclass(frozen=True)
class Regime:
    """Tiles of both products, used up to so many (token, slot) pairs an expert."""

    pairs_per_expert: float
    first: Tile
    second: Tile


_FORMATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Where pairs are this few, programs look for theirs among all ids: cheaper than a launch before.
_DIRECT_PAIRS = 64

# Up to so many pairs, programs that each sum over all of k do not fill the device.
_FEW_PAIRS = 8

# Microseconds are those of both products of GPT-OSS-120B's layer on an H200, in brackets of what else was tried. With two warps
# products are those of the Ampere generation, which leave no waiting to do: better while weights are what is waited for. (64 x 16
# with four warps: 164 and 88 at 16 tokens, where 64 x 8 with two took 121 and 67.)
_FEW = {
    # One token: 14 and 10, the parts' sum included 17 (whole sums over k: 18 and 18).
    "sm_90": Regime(0, Tile(64, 8, 2, 4, split_k=5), Tile(64, 8, 2, 4, split_k=5)),
    "any": Regime(0, Tile(32, 16, 2, 2, split_k=4), Tile(32, 16, 2, 2, split_k=4)),
}
_REGIMES = {
    "sm_90": (
        # 4 tokens: 41 and 22 (whole sums 28).
        Regime(0.3, Tile(64, 8, 2, 3, unroll=3), Tile(64, 8, 2, 4, split_k=2)),
        # 16: 122 and 67 (unrolled 124 and 72); 64: 230 and 127.
        Regime(3, Tile(64, 8, 2, 4), Tile(64, 8, 2, 4)),
        # 256: 305 and 167 (four stages 325 and 173, one size 341 and 184, asynchronous products 128 x 16 341 and 183).
        Regime(20, Tile(64, 16, 2, 6, tail=8), Tile(64, 16, 2, 6, tail=8)),
        # 1024: 532 and 268 (64 x 32 615 and 296); 2048: 781 and 411 (64 x 128 823 and 442).
        Regime(100, Tile(64, 64, 4, 4, tail=32, separate=False), Tile(64, 64, 4, 4, tail=32, separate=False)),
        # 8192: 2234 and 1100 (128 x 128 with eight warps 2305 and 1245, one size 2512 and 1173).
        Regime(math.inf, Tile(64, 128, 4, 3, tail=64, separate=False), Tile(64, 128, 4, 4, tail=64, separate=False)),
    ),
    # Never timed: tiles that compile for every target without spilling.
    "any": (
        Regime(10, Tile(64, 16, 4, 2, separate=False), Tile(64, 16, 4, 2, separate=False)),
        Regime(40, Tile(64, 32, 4, 2, separate=False), Tile(64, 32, 4, 2, separate=False)),
        Regime(math.inf, Tile(64, 64, 4, 2, separate=False), Tile(64, 64, 4, 2, separate=False)),
    ),
}


def moe_apply(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
    *,
    regime_index: int | None = None,
) -> Tensor:
    """See the operator. Weights are in the layout that `prepare_weights` makes.

    ``regime_index``: which of the architecture's regimes, from those for few pairs to those for many; the last if there are fewer.
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
    """`moe_apply` with these tiles."""
    tokens, hidden = x.shape
    pairs = topk_ids.numel()
    if out is None:
        out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not pairs:
        return out
    first, second = regime.first, regime.second
    # A schedule, or None for each product whose programs do without.
    schedules: dict[int, BlockSchedule | None] = {
        columns: None if pairs <= _DIRECT_PAIRS else block_schedule(topk_ids, plan.num_experts, columns)
        for columns in {first.columns, second.columns}
    }
    activated = torch.empty((1, pairs, plan.intermediate_size), dtype=x.dtype, device=x.device)
    gate_up = activated
    if first.split_k > 1:  # parts of a sum stay float32
        shape = (first.split_k, pairs, 2 * plan.intermediate_size)
        gate_up = torch.empty(shape, dtype=torch.float32, device=x.device)
    w13 = (weights.w13_weight, weights.w13_weight_scale, weights.w13_weight_bias)
    _product(first, schedules[first.columns], _rounded(x, plan), w13, gate_up, topk_ids, plan, gated=True)
    if first.split_k > 1:
        _activate(gate_up, activated, plan)
    partial = torch.float32 if second.split_k > 1 else x.dtype
    slots = torch.empty((second.split_k, pairs, hidden), dtype=partial, device=x.device)
    w2 = (weights.w2_weight, weights.w2_weight_scale, weights.w2_weight_bias)
    _product(second, schedules[second.columns], _rounded(activated[0], plan), w2, slots, topk_ids, plan, gated=False)
    combine(slots, topk_weights, topk_ids, plan.num_experts, out)
    return out


def _rounded(x: Tensor, plan: MoEPlan) -> tuple[Tensor, Tensor | None]:
    """What the plan rounds an activation to, in its own dtype, and the rows' scales; 16-bit floats hold e4m3 and e2m1 exactly."""
    if plan.activation_dtype == "none":
        return x, None
    rows, columns = x.shape
    rounded = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if plan.activation_dtype == "mxfp4":
        block = min(1024, triton.next_power_of_2(columns))
        height = max(1, 2048 // block)
        grid = (triton.cdiv(rows, height), triton.cdiv(columns, block))
        round_rows_mxfp4_kernel[grid](x, *x.stride(), rounded, rows, columns, ROWS=height, BLOCK=block)
        return rounded, None
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(columns))
    round_rows_fp8_kernel[(rows,)](x, *x.stride(), rounded, scale, scale, columns, COUNTED=False, NATIVE=False, BLOCK=block)
    return rounded, scale


def _activate(gate_up: Tensor, activated: Tensor, plan: MoEPlan) -> None:
    parts, pairs, _ = gate_up.shape
    features = plan.intermediate_size
    block = min(512, triton.next_power_of_2(features))
    _activate_kernel[(pairs, triton.cdiv(features, block))](
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


def _product(
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
    """One grouped product; ``out`` is ``[parts, pairs, features]``."""
    x, x_scale = rows_and_scale
    weight, scale, epilogue = projection
    pairs, k = topk_ids.numel(), x.shape[1]
    _, chunks, rows, _ = weight.shape
    row_tiles = triton.cdiv(rows, tile.rows)
    blocks = pairs if schedule is None else schedule.capacity
    # The interpreter's products of bfloat16 are wrong.
    dtype = for_architecture({"cpu": tl.float32, "any": _FORMATS[x.dtype]}, x.device)
    native = for_architecture({"nvidia": True, "any": False}, x.device)
    asynchronous = for_architecture({"sm_90": True, "any": False}, x.device)
    lists = (topk_ids,) * 4 if schedule is None else _lists(schedule)
    _product_kernel[(row_tiles * blocks, tile.split_k)](
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
        SCALED=x_scale is not None,
        GATED=gated,
        ACTIVATED=gated and tile.split_k == 1,
        LIMITED=plan.limit is not None,
        PAIRS=0 if schedule is not None else 16 if pairs <= 16 else _DIRECT_PAIRS,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        TAIL=tile.tail or tile.columns,
        SPLIT_K=tile.split_k,
        WHOLE_K=k % CHUNK == 0,
        DTYPE=dtype,
        PTX=native,
        DRAIN=asynchronous and tile.warps % 4 == 0,
        SEPARATE=tile.separate,
        UNROLL=next(u for u in range(tile.unroll, 0, -1) if chunks % u == 0),
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _lists(schedule: BlockSchedule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return schedule.order, schedule.expert_start, schedule.block_expert, schedule.block_row


@triton.jit
def _own_pairs(ids_ptr, stride_token, stride_slot, me, pairs, top_k, PAIRS: tl.constexpr, COLUMNS: tl.constexpr):
    """The expert of pair ``me``, and a block of the pairs that have it too, which ``me`` is the first of; else expert -1."""
    other = tl.arange(0, PAIRS)
    token = other // top_k
    ids = tl.load(ids_ptr + token * stride_token + (other - token * top_k) * stride_slot, mask=other < pairs, other=-1)
    expert = tl.sum(tl.where(other == me, ids, 0), 0)
    same = (ids == expert).to(tl.int32)
    before = tl.sum(tl.where(other < me, same, 0), 0)
    column = tl.arange(0, COLUMNS)
    place = tl.where(same != 0, tl.cumsum(same, 0) - 1 - before, -1)
    pair = tl.sum(tl.where(place[:, None] == column[None, :], other[:, None], 0), 0)
    valid = column < tl.sum(same, 0) - before
    return tl.where(before % COLUMNS == 0, expert, -1), pair, valid


@triton.jit
def _activated(gate, up, alpha, limit, beta, LIMITED: tl.constexpr):
    if LIMITED:  # comparisons that leave NaN as it is
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + beta) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def _tile(
    x_ptr,
    x_stride_row,
    x_stride_k,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    epilogue_ptr,
    out_ptr,
    out_stride_pair,
    pair,
    valid,
    row_tile,
    part,
    first_chunk,
    last_chunk,
    rows,
    k,
    top_k,
    alpha,
    limit,
    beta,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    LIMITED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE_K: tl.constexpr,
    DTYPE: tl.constexpr,
    PTX: tl.constexpr,
    DRAIN: tl.constexpr,
    SEPARATE: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of one expert's product; pointers are the expert's. ``pair``, ``valid``: a column's pair, and whether there is one."""
    row = row_tile * ROWS + tl.arange(0, ROWS)
    # Rows beyond the last compute it again, and are not stored.
    own = tl.minimum(row, rows - 1)
    lane = tl.arange(0, 32)
    wide = tl.arange(0, 64)
    words = weight_ptr + (first_chunk.to(tl.int64) * rows * 32) + own[:, None] * 32 + lane[None, :]
    exponents = scale_ptr + first_chunk.to(tl.int64) * rows + own
    source_row = pair // top_k if GATED else pair
    source = source_row.to(tl.int64) * x_stride_row
    values = x_ptr + source[None, :] + (first_chunk * 64 + lane[:, None]).to(tl.int64) * x_stride_k
    inputs = x_ptr + source[None, :] + (first_chunk * 64 + wide[:, None]).to(tl.int64) * x_stride_k
    acc0 = tl.zeros([ROWS, COLUMNS], tl.float32)
    acc1 = tl.zeros([ROWS, COLUMNS], tl.float32)
    if SEPARATE:
        acc2 = tl.zeros([ROWS, COLUMNS], tl.float32)
        acc3 = tl.zeros([ROWS, COLUMNS], tl.float32)
    for chunk in tl.range(first_chunk, last_chunk, UNROLL, num_stages=STAGES):
        for ahead in tl.static_range(UNROLL):
            word = tl.load(words + ahead * rows * 32)
            a0, a1, b0, b1 = decode(word, tl.load(exponents + ahead * rows)[:, None], DTYPE, PTX, DRAIN)
            if SEPARATE:
                x0 = tl.load(values + ahead * 64 * x_stride_k, mask=valid[None, :], other=0.0).to(DTYPE)
                present = valid[None, :] if WHOLE_K else valid[None, :] & ((chunk + ahead) * 64 + 32 + lane[:, None] < k)
                x1 = tl.load(values + (ahead * 64 + 32) * x_stride_k, mask=present, other=0.0).to(DTYPE)
                acc0 = tl.dot(a0, x0, acc0)
                acc1 = tl.dot(b0, x0, acc1)
                acc2 = tl.dot(a1, x1, acc2)
                acc3 = tl.dot(b1, x1, acc3)
            else:
                present = valid[None, :] if WHOLE_K else valid[None, :] & ((chunk + ahead) * 64 + wide[:, None] < k)
                x = tl.load(inputs + ahead * 64 * x_stride_k, mask=present, other=0.0).to(DTYPE)
                acc0 = tl.dot(tl.reshape(tl.permute(tl.join(a0, a1), 0, 2, 1), (ROWS, 64)), x, acc0)
                acc1 = tl.dot(tl.reshape(tl.permute(tl.join(b0, b1), 0, 2, 1), (ROWS, 64)), x, acc1)
        words += UNROLL * rows * 32
        exponents += UNROLL * rows
        values += UNROLL * 64 * x_stride_k
        inputs += UNROLL * 64 * x_stride_k
    if SEPARATE:
        acc0 += acc2
        acc1 += acc3
    factors = epilogue_ptr + own
    acc0 *= tl.load(factors)[:, None]
    acc1 *= tl.load(factors + rows)[:, None]
    if SCALED:
        step = tl.load(x_scale_ptr + source_row)[None, :]
        acc0 *= step
        acc1 *= step
    if part == 0:
        acc0 += tl.load(factors + 2 * rows)[:, None]
        acc1 += tl.load(factors + 3 * rows)[:, None]
    mask = (row < rows)[:, None] & valid[None, :]
    target = out_ptr + pair.to(tl.int64)[None, :] * out_stride_pair + row[:, None]
    if ACTIVATED:
        result = _activated(acc0, acc1, alpha, limit, beta, LIMITED)
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(target, acc0.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(target + rows, acc1.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pairs", "row_tiles", "chunks"])
def _product_kernel(
    x_ptr,
    x_stride_row,
    x_stride_k,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    epilogue_ptr,
    out_ptr,
    out_stride_part,
    out_stride_pair,
    ids_ptr,
    ids_stride_token,
    ids_stride_slot,
    order_ptr,
    expert_start_ptr,
    block_expert_ptr,
    block_row_ptr,
    pairs,
    top_k,
    num_experts,
    rows,
    k,
    chunks,
    row_tiles,
    alpha,
    limit,
    beta,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    LIMITED: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAIL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
    DTYPE: tl.constexpr,
    PTX: tl.constexpr,
    DRAIN: tl.constexpr,
    SEPARATE: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of one product. GATED: the first, whose tokens are gathered and whose result is activated. PAIRS: if there is no
    schedule, how many pairs there are at most. TAIL: columns of blocks that have no more."""
    block = tl.program_id(0) // row_tiles
    row_tile = tl.program_id(0) % row_tiles
    part = tl.program_id(1)
    steps = chunks // UNROLL
    first_chunk = steps * part // SPLIT_K * UNROLL
    last_chunk = steps * (part + 1) // SPLIT_K * UNROLL
    out_ptr += part.to(tl.int64) * out_stride_part
    if PAIRS > 0:
        expert, pair, valid = _own_pairs(ids_ptr, ids_stride_token, ids_stride_slot, block, pairs, top_k, PAIRS, COLUMNS)
        if expert >= num_experts:
            return
    else:
        expert = tl.load(block_expert_ptr + block)
    if expert < 0:
        return
    weight_ptr += expert.to(tl.int64) * chunks * rows * 32
    scale_ptr += expert.to(tl.int64) * chunks * rows
    epilogue_ptr += expert.to(tl.int64) * 4 * rows
    if PAIRS > 0:
        _tile(
            x_ptr, x_stride_row, x_stride_k, x_scale_ptr, weight_ptr, scale_ptr, epilogue_ptr, out_ptr, out_stride_pair,
            pair, valid, row_tile, part, first_chunk, last_chunk, rows, k, top_k, alpha, limit, beta,
            SCALED, GATED, ACTIVATED, LIMITED, ROWS, COLUMNS, WHOLE_K, DTYPE, PTX, DRAIN, SEPARATE, UNROLL, STAGES,
        )  # fmt: skip
    else:
        first_row = tl.load(block_row_ptr + block)
        count = tl.load(expert_start_ptr + expert + 1) - first_row
        order_ptr += first_row
        if TAIL >= 32 and TAIL < COLUMNS and count <= TAIL // 2:
            fewest = tl.arange(0, TAIL // 2) < count
            fewest_pairs = tl.load(order_ptr + tl.arange(0, TAIL // 2), mask=fewest, other=0)
            _tile(
                x_ptr, x_stride_row, x_stride_k, x_scale_ptr, weight_ptr, scale_ptr, epilogue_ptr, out_ptr, out_stride_pair,
                fewest_pairs, fewest, row_tile, part, first_chunk, last_chunk, rows, k, top_k, alpha, limit, beta,
                SCALED, GATED, ACTIVATED, LIMITED, ROWS, TAIL // 2, WHOLE_K, DTYPE, PTX, DRAIN, SEPARATE, UNROLL, STAGES,
            )  # fmt: skip
        elif TAIL < COLUMNS and count <= TAIL:
            few = tl.arange(0, TAIL) < count
            few_pairs = tl.load(order_ptr + tl.arange(0, TAIL), mask=few, other=0)
            _tile(
                x_ptr, x_stride_row, x_stride_k, x_scale_ptr, weight_ptr, scale_ptr, epilogue_ptr, out_ptr, out_stride_pair,
                few_pairs, few, row_tile, part, first_chunk, last_chunk, rows, k, top_k, alpha, limit, beta,
                SCALED, GATED, ACTIVATED, LIMITED, ROWS, TAIL, WHOLE_K, DTYPE, PTX, DRAIN, SEPARATE, UNROLL, STAGES,
            )  # fmt: skip
        else:
            all_valid = tl.arange(0, COLUMNS) < count
            all_pairs = tl.load(order_ptr + tl.arange(0, COLUMNS), mask=all_valid, other=0)
            _tile(
                x_ptr, x_stride_row, x_stride_k, x_scale_ptr, weight_ptr, scale_ptr, epilogue_ptr, out_ptr, out_stride_pair,
                all_pairs, all_valid, row_tile, part, first_chunk, last_chunk, rows, k, top_k, alpha, limit, beta,
                SCALED, GATED, ACTIVATED, LIMITED, ROWS, COLUMNS, WHOLE_K, DTYPE, PTX, DRAIN, SEPARATE, UNROLL, STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["pairs"])
def _activate_kernel(
    gate_up_ptr, out_ptr, pairs, features, alpha, limit, beta, LIMITED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The activation where the first product is in parts ``[parts, pairs, 2, features]``."""
    pair = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = feature < features
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        source = gate_up_ptr + (part * pairs.to(tl.int64) + pair) * 2 * features + feature
        gate += tl.load(source, mask=mask, other=0.0)
        up += tl.load(source + features, mask=mask, other=0.0)
    result = _activated(gate, up, alpha, limit, beta, LIMITED)
    tl.store(out_ptr + pair * features + feature, result.to(out_ptr.dtype.element_ty), mask=mask)

"""A mixture-of-experts layer with weights as they lie in a checkpoint: dense, fp8 blocks or mxfp4.

Five launches at most besides the schedule, none of which the host waits for: round the tokens (where activations are narrow), first
projection with the activation, round again (fp8 only: its scale is a whole row's), second projection, combine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenspeed_kernel.ops.moe.plan import MoEPlan
from tokenspeed_kernel.ops.moe.triton._grouped_gemm import DENSE, FP8, FP8_BITS, MXFP4, combine_kernel, grouped_gemm_kernel
from tokenspeed_kernel.ops.moe.triton._rounding import round_rows_fp8_kernel, round_rows_mxfp4_kernel
from tokenspeed_kernel.ops.moe.triton._routing import BlockSchedule, block_schedule
from tokenspeed_kernel.ops.moe.weights import MoEWeights
from tokenspeed_kernel.ops.quantization.triton._encode import abilities
from tokenspeed_kernel.ops.triton_common import for_architecture


@dataclass(frozen=True)
class Tile:
    """How one projection is cut.

    Attributes:
        features: out-features of a program.
        k: of a step. A divisor of 128 for fp8 blocks: a step has one scale.
        warps, stages: of a program, and of its pipeline.
        group: blocks that take the same features in turn.
        rows_first: sums lie as ``[rows, features]``.
    """

    features: int
    k: int
    warps: int
    stages: int
    group: int = 4
    rows_first: bool = False
    tma: bool = False


@dataclass(frozen=True)
class Blocks:
    """How rows are cut into blocks, and the tiles of both projections that go with it.

    Attributes:
        rows: of a block's main part, a power of two from 16.
        extra: rows beyond it that a block may have; they cost a second, small product by the same weights. 0 for none.
        tail: blocks with no more rows than this take a smaller tile; 0 for none.
        first, second: tiles of the projections. The first sums gate and up at once, so its features count twice.
    """

    rows: int
    extra: int
    tail: int
    first: Tile
    second: Tile


# tf32 holds float16 and mxfp4 values exactly.
_EXACT_FLOAT32 = {"nvidia": "tf32", "any": "ieee"}

_HOPPER = {
    16: Blocks(16, 0, 0, Tile(64, 128, 4, 4), Tile(64, 128, 4, 5)),
    32: Blocks(32, 0, 0, Tile(64, 128, 4, 4), Tile(64, 128, 4, 5)),
    64: Blocks(64, 0, 0, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    128: Blocks(128, 0, 0, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4)),
}
_SMALL_MEMORY = {
    16: Blocks(16, 0, 0, Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    32: Blocks(32, 0, 0, Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    64: Blocks(64, 0, 0, Tile(64, 32, 4, 2), Tile(128, 32, 4, 2)),
    128: Blocks(128, 0, 0, Tile(64, 32, 8, 2), Tile(128, 32, 8, 2)),
}
# 16-bit operands. Without TMA or large shared memory a tile has to be smaller.
_BLOCKS = {"sm_90": _HOPPER, "sm_100": _HOPPER, "any": _SMALL_MEMORY}


def moe_apply(
    x: Tensor, weights: MoEWeights, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan, out: Tensor | None
) -> Tensor:
    """See the operator."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, hidden = x.shape
    if tokens == 0:
        return out
    formats = _Formats.of(plan, x.device)
    blocks = _blocks_for(plan, tokens, formats, x.device)
    schedule = block_schedule(topk_ids, plan.num_experts, blocks.rows + blocks.extra)

    pairs = tokens * plan.top_k
    rows, row_scale = _rounded(x, plan, formats, None)
    # Rounded to 16 bits first, one in twenty e4m3 codes would come out as its neighbour.
    between_dtype = {"none": x.dtype, "fp8": torch.float32, "mxfp4": formats.carrier}[plan.activation_dtype]
    between = x.new_empty(pairs, plan.intermediate_size, dtype=between_dtype)
    _project(rows, row_scale, weights, "w13", between, schedule, plan, formats, blocks, blocks.first)
    rows, row_scale = (between, None) if plan.activation_dtype == "mxfp4" else _rounded(between, plan, formats, schedule)
    slots = x.new_empty(pairs, hidden)
    _project(rows, row_scale, weights, "w2", slots, schedule, plan, formats, blocks, blocks.second)
    block_hidden = min(1024, triton.next_power_of_2(hidden))
    combine_kernel[(tokens, triton.cdiv(hidden, block_hidden))](
        slots,
        topk_weights,
        *topk_weights.stride(),
        topk_ids,
        *topk_ids.stride(),
        out,
        *out.stride(),
        hidden,
        plan.num_experts,
        plan.top_k,
        BLOCK_H=block_hidden,
        INTERPRETED=abilities(x.device).interpreted,
    )
    return out


@dataclass(frozen=True)
class _Formats:
    """What is multiplied, and how.

    Attributes:
        weight: the kernel's name for the weights' format.
        compute: both operands of the products.
        precision: of float32 products.
        carrier: what rounded activations are stored as; their values are exact in it.
    """

    weight: tl.constexpr
    compute: tl.dtype
    precision: str
    carrier: torch.dtype

    @staticmethod
    def of(plan: MoEPlan, device: torch.device) -> _Formats:
        # Where the matrix units do not know e4m3, codes are decoded by integer operations and multiplied in the tokens' format.
        able = abilities(device)
        weight = {"dense": DENSE, "fp8_block": FP8 if able.native else FP8_BITS, "mxfp4": MXFP4}[plan.weight_format]
        if plan.dtype == torch.float32:
            return _Formats(weight, tl.float32, "ieee", torch.float32)
        if weight is FP8 and plan.activation_dtype == "fp8":
            return _Formats(weight, tl.float8e4nv, "ieee", torch.float8_e4m3fn)
        # mxfp4 has bfloat16's range and two bits; e4m3 fits both 16-bit formats.
        wants_range = plan.activation_dtype == "mxfp4" or plan.weight_format == "mxfp4"
        half_tokens = plan.dtype == torch.float16 and plan.activation_dtype == "none"
        half_weights = plan.dtype == torch.float16 and plan.weight_format == "dense"
        if wants_range and (half_tokens or half_weights):
            return _Formats(weight, tl.float32, for_architecture(_EXACT_FLOAT32, device), torch.float32)
        if wants_range or plan.dtype == torch.bfloat16:
            # The interpreter's products of bfloat16 are wrong.
            return _Formats(weight, tl.float32 if able.interpreted else tl.bfloat16, "ieee", torch.bfloat16)
        return _Formats(weight, tl.float16, "ieee", torch.float16)


def _blocks_for(plan: MoEPlan, tokens: int, formats: _Formats, device: torch.device) -> Blocks:
    """Blocks about as long as an expert has rows, if tokens spread evenly."""
    share = tokens * plan.top_k / plan.num_experts
    table = for_architecture(_BLOCKS, device)
    blocks = next((table[rows] for rows in sorted(table) if share <= 0.75 * rows), table[max(table)])
    return replace(blocks, first=_fitted(blocks.first, plan, formats), second=_fitted(blocks.second, plan, formats))


def _fitted(tile: Tile, plan: MoEPlan, formats: _Formats) -> Tile:
    """A tile for 16-bit operands, made to suit others."""
    if formats.weight is FP8 and formats.compute is tl.float8e4nv:
        return replace(tile, k=128)
    if formats.weight is FP8 or formats.weight is FP8_BITS:  # decoded on the way: registers are short
        tile = replace(tile, k=min(tile.k, 64), stages=min(tile.stages, 3))
    if formats.compute is tl.float32:
        return replace(tile, features=max(32, tile.features // 2), k=32, stages=min(tile.stages, 2))
    return tile


def _rounded(
    x: Tensor, plan: MoEPlan, formats: _Formats, schedule: BlockSchedule | None
) -> tuple[Tensor, Tensor | None]:
    """x as the products take it, with its scales. ``schedule``: x has only as many rows as that says."""
    if plan.activation_dtype == "none":
        return x, None
    rows, columns = x.shape
    rounded = torch.empty(rows, columns, dtype=formats.carrier, device=x.device)
    if plan.activation_dtype == "mxfp4":
        block = min(1024, triton.next_power_of_2(columns))
        height = max(1, 2048 // block)
        grid = (triton.cdiv(rows, height), triton.cdiv(columns, block))
        round_rows_mxfp4_kernel[grid](x, *x.stride(), rounded, rows, columns, ROWS=height, BLOCK=block)
        return rounded, None
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    round_rows_fp8_kernel[(rows,)](
        x,
        *x.stride(),
        rounded,
        scale,
        scale if schedule is None else schedule.expert_start[-1:],
        columns,
        COUNTED=schedule is not None,
        NATIVE=formats.carrier == torch.float8_e4m3fn,
        BLOCK=min(4096, triton.next_power_of_2(columns)),
    )
    return rounded, scale


def _project(
    x: Tensor,
    x_scale: Tensor | None,
    weights: MoEWeights,
    name: str,
    y: Tensor,
    schedule: BlockSchedule,
    plan: MoEPlan,
    formats: _Formats,
    blocks: Blocks,
    tile: Tile,
) -> None:
    """One projection of all rows: the first from tokens to rows by expert, with the activation, the second from those to slots."""
    gated = name == "w13"
    weight, scale, bias = (getattr(weights, f"{name}_weight{suffix}") for suffix in ("", "_scale", "_bias"))
    if formats.weight is FP8_BITS:
        weight = weight.view(torch.uint8)
    features, k = (plan.intermediate_size, plan.hidden_size) if gated else (plan.hidden_size, plan.intermediate_size)
    weight_at, up_at, expert_rows, up_offset = weight, None, 0, 0
    if tile.tma:
        block = [tile.features, tile.k]
        flat = weight.view(-1, k)
        if gated and plan.w13_interleaved:
            weight_at, up_at = (TensorDescriptor.from_tensor(flat[i::2], block) for i in range(2))
            expert_rows = features
        else:
            weight_at = up_at = TensorDescriptor.from_tensor(flat, block)
            expert_rows, up_offset = weight.shape[1], features
    grid = (schedule.capacity * triton.cdiv(features, tile.features),)
    grouped_gemm_kernel[grid](
        x,
        *x.stride(),
        x_scale,
        weight_at,
        up_at,
        expert_rows,
        up_offset,
        *weight.stride(),
        scale,
        *((0, 0, 0) if scale is None else scale.stride()),
        bias,
        *((0, 0) if bias is None else bias.stride()),
        y,
        y.stride(0),
        schedule.order,
        schedule.expert_start,
        schedule.block_expert,
        schedule.block_row,
        schedule.capacity,
        features,
        k,
        plan.top_k,
        float(plan.alpha),
        0.0 if plan.limit is None else float(plan.limit),
        float(plan.beta),
        GATED=gated,
        INTERLEAVED=plan.w13_interleaved,
        GATHER=gated,
        FORMAT=formats.weight.value,
        BIAS=bias is not None,
        LIMIT=plan.limit is not None,
        X_SCALE=x_scale is not None,
        ROUND_MXFP4=gated and plan.activation_dtype == "mxfp4",
        INTERPRETED=abilities(x.device).interpreted,
        COMPUTE=formats.compute,
        PRECISION=formats.precision,
        ROWS_FIRST=tile.rows_first,
        TMA=tile.tma,
        BLOCK_T=blocks.rows,
        EXTRA_T=blocks.extra,
        TAIL_T=blocks.tail,
        BLOCK_N=tile.features,
        BLOCK_K=tile.k,
        EVEN_K=k % tile.k == 0,
        GROUP=tile.group,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )

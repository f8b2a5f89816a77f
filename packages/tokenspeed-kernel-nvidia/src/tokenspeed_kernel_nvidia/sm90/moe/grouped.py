"""Experts for many tokens, with mxfp4 weights, on Hopper: two grouped products, and a weighted sum over slots.

Pairs of tokens and slots are sorted by expert on the device and cut into tiles of several widths, the widest first, so that a
captured graph stays right when the routing changes. In both products weights are the left operand of wgmma, decoded in registers,
and pairs are columns: a tile is 192 rows of weights, which divide both projections of GPT-OSS, times up to 64 or 160 columns. One
warp of a CTA streams weights by bulk copies, three gather the columns of tokens, and three warpgroups compute. Bias and activation
happen in registers, where gate and up of a feature have met; the sum over slots is a kernel of its own, in the order of slots.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_nvidia._machine import multiprocessors
from tokenspeed_kernel_nvidia._programs import Launch, program
from tokenspeed_kernel_nvidia._rows import aligned, deliver, to_write
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.moe.grouped_config import (
    RECORD,
    Combine,
    Product,
    Schedule,
    columns_for,
    every_combine,
    every_product,
    every_schedule,
    most_tiles,
)
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import STRIP

_ALIGNED = 256  # bytes at whose multiples parts of the memory begin


@program(arch="sm_90a", configs=every_schedule)
def schedule_program(config: Schedule) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.moe import grouped_schedule_device

    return grouped_schedule_device.host(config), grouped_schedule_device.fake_arguments(config)


@program(arch="sm_90a", configs=every_product)
def product_program(config: Product) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.moe import grouped_device

    return grouped_device.host(config), grouped_device.fake_arguments(config)


@program(arch="sm_90a", configs=every_combine)
def combine_program(config: Combine) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.moe import grouped_combine_device

    return grouped_combine_device.host(config), grouped_combine_device.fake_arguments(config)


class _Programs(NamedTuple):
    schedule: Launch
    first: Launch
    second: Launch
    combine: Launch
    processors: int


@functools.cache
def _programs_of(dtype: torch.dtype, columns: int, double: bool, device: int) -> _Programs:
    """The programs, and the CTAs of a product."""
    name = DTYPES[dtype]
    first, second = (product_program(Product(name, gated, columns, double)) for gated in (True, False))
    return _Programs(schedule_program(Schedule(columns)), first, second, combine_program(Combine(name)), multiprocessors(device))


def moe_apply_many(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
    *,
    columns: int | None = None,
    double: bool = True,
) -> Tensor:
    """`moe_apply` on checked arguments, weights in the layout of `mxfp4_layout`.

    Args:
        columns: the widest tile, one of those in `grouped_config`; chosen by the number of pairs if None.
        double: see `grouped_config.Product`.
    """
    tokens, hidden = x.shape
    pairs, experts = tokens * plan.top_k, plan.num_experts
    written = to_write(out, x, x.shape)
    if not pairs:
        return deliver(written, out)
    columns = columns or columns_for(pairs, experts)
    device = x.get_device()
    programs = _programs_of(x.dtype, columns, double, device)
    # One allocation. What a launch leaves in it only the launches of this call read.
    tiles = most_tiles(pairs, experts, columns)
    lengths = (pairs * plan.intermediate_size * 2, pairs * hidden * 2, pairs * 4, pairs * 4, tiles * RECORD * 4, 4)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + -(-length // _ALIGNED) * _ALIGNED)
    memory = torch.empty(offsets[-1], dtype=torch.uint8, device=x.device)
    at = memory.data_ptr()
    _, _, sources, positions, tiles_at, tile_count, _ = (at + offset for offset in offsets)
    activated = memory[: lengths[0]].view(x.dtype).view(pairs, plan.intermediate_size)
    results = memory[offsets[1] : offsets[1] + lengths[1]].view(x.dtype).view(pairs, hidden)
    limit = math.inf if plan.limit is None else plan.limit
    swiglu = plan.alpha, limit, plan.beta
    schedule = sources, tiles_at, tile_count
    programs.schedule(topk_ids, sources, positions, tiles_at, tile_count, experts)
    w13, w2 = weights.w13_weight, weights.w2_weight
    programs.first(
        aligned(x), activated, w13.data_ptr(), *schedule, plan.intermediate_size * 2 // STRIP, programs.processors, *swiglu
    )
    programs.second(activated, results, w2.data_ptr(), *schedule, hidden // STRIP, programs.processors, *swiglu)
    topk_weights = topk_weights.contiguous()
    programs.combine(results, written, positions, topk_weights.data_ptr(), plan.top_k)
    return deliver(written, out)

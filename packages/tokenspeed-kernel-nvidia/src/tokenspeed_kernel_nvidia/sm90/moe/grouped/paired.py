"""MoE experts for many tokens, where two CTAs of a cluster share columns: the launches of `moe_apply` with `Gemm.paired` GEMMs.

With many columns, the GEMMs of `launch` are bound by the bytes that SMs read from L2: each work item reads its own weights and
columns. A layer of GPT-OSS-120B with 8192 tokens reads 14.4 GB with bfloat16 activations, which would take 2.5 ms at 5.7 TB/s, and
9.8 GB with fp8 activations. So the two CTAs of a cluster compute the same tile of columns for neighbouring tiles of weights. Each
CTA loads half of the columns, and multicasts them to both. The layer then reads 8.1 GB and 6.6 GB.

cp.async, which gathers columns in `launch`, cannot multicast, but bulk copies can. So a kernel first gathers the columns of the
first GEMM in the layout of shared memory (`packing_device`). With fp8 activations, this kernel also quantises the columns, for both
GEMMs. Otherwise the first GEMM stores its results packed, as columns of the second.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import Launch
from tokenspeed_kernel_nvidia._rows import deliver, to_write
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import STRIP
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import (
    CODES,
    COLUMN_BYTES,
    GROUP,
    PAIR,
    PAIRED,
    PLAIN,
    RECORD,
    Combine,
    Gemm,
    Rounding,
    Schedule,
    most_tiles,
    sorting_ctas,
)
from tokenspeed_kernel_nvidia.sm90.moe.grouped.launch import (
    Memory,
    combine_program,
    gemm_program,
    rounding_program,
    schedule_program,
)


class _Programs(NamedTuple):
    """The kernels that a call launches, in this order.

    Attributes:
        schedule: sorts pairs by expert and divides them into tiles.
        pack: packs, and with fp8 activations quantises, the columns of a GEMM.
        w13, w2: the two GEMMs.
        combine: adds up the weighted slots of each token.
        ctas: the number of CTAs of a GEMM.
    """

    schedule: Launch
    pack: Launch
    w13: Launch
    w2: Launch
    combine: Launch
    ctas: int


@functools.cache
def _programs_of(dtype: torch.dtype, kind: str, sorting: int, device: int) -> _Programs:
    name = DTYPES[dtype]
    w13, w2 = (gemm_program(Gemm(name, gated, PAIRED[kind], kind, paired=True)) for gated in (True, False))
    pack, combine = rounding_program(Rounding(name, kind, packed=True)), combine_program(Combine(name))
    return _Programs(schedule_program(Schedule(sorting)), pack, w13, w2, combine, sm_count_of(device) // PAIR * PAIR)


def rows_of(pairs: int, experts: int) -> int:
    """Returns the number of rows of packed columns: the pairs, with gaps, because each expert's pairs begin at a multiple of
    `GROUP`."""
    return -(-(pairs + (GROUP - 1) * min(experts, pairs)) // GROUP) * GROUP


def packed_bytes(rows: int, k: int, kind: str) -> int:
    """Returns the bytes of packed columns with ``k`` elements each."""
    return -(-k * (1 if kind == CODES else 2) // COLUMN_BYTES) * COLUMN_BYTES * rows


def moe_apply_paired(
    x: Tensor, weights: MoEWeights, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan, out: Tensor | None = None
) -> Tensor:
    """Computes `moe_apply` like `launch.moe_apply_many`, for sizes and dtypes that `config.can_pair` accepts. With fp8 activations,
    float8_e5m2 must represent the weights of all experts exactly. For the arguments see `launch.moe_apply_many`."""
    (tokens, hidden), intermediate = x.shape, plan.intermediate_size
    pairs, experts = tokens * plan.top_k, plan.num_experts
    written = to_write(out, x, x.shape)
    if not pairs:
        return deliver(written, out)
    kind = CODES if plan.activation_dtype == "fp8" else PLAIN
    programs = _programs_of(x.dtype, kind, sorting_ctas(pairs), x.get_device())
    rows, columns = rows_of(pairs, experts), PAIRED[kind]
    tiles = most_tiles(pairs, experts, columns)
    # Quantised columns of both GEMMs use the same memory. The first GEMM's results that are not quantised are packed columns, too.
    columns_bytes = max(packed_bytes(rows, k, kind) for k in (hidden, intermediate))
    activated_bytes = packed_bytes(rows, intermediate, kind) if kind == PLAIN else rows * intermediate * x.itemsize
    lengths = [columns_bytes, activated_bytes, rows * hidden * x.itemsize]
    memory = Memory(x.device, [*lengths, rows * 4, pairs * 4, tiles * RECORD * 4, 4, rows * 4])
    packed_at, _, _, sources, positions, tiles_at, tile_count, scales = map(memory.at, range(8))
    results = memory.rows(2, x.dtype, rows, hidden)
    limit = math.inf if plan.limit is None else plan.limit
    given = aligned(x)
    programs.schedule(topk_ids, sources, positions, tiles_at, tile_count, experts, columns, GROUP)
    common = scales, 0, sources, tiles_at, tile_count
    swiglu = plan.alpha, limit, plan.beta
    packed_dtype = torch.uint8 if kind == CODES else x.dtype
    programs.pack(given, packed_at, rows, scales, positions, plan.top_k)
    activated = memory.rows(1, x.dtype, rows, intermediate)
    w13, w2 = weights.w13_weight.data_ptr(), weights.w2_weight.data_ptr()
    columns_of_w13 = memory.rows(0, packed_dtype, rows, hidden)
    programs.w13(columns_of_w13, activated, w13, *common, 2 * intermediate // STRIP, programs.ctas, *swiglu)
    columns_of_w2 = activated
    if kind == CODES:
        programs.pack(activated, packed_at, rows, scales, 0, plan.top_k)
        columns_of_w2 = memory.rows(0, packed_dtype, rows, intermediate)
    programs.w2(columns_of_w2, results, w2, *common, hidden // STRIP, programs.ctas, *swiglu)
    programs.combine(results, written, positions, topk_weights.contiguous().data_ptr(), plan.top_k)
    return deliver(written, out)

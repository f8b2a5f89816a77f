"""MoE experts for many tokens, with mxfp4 weights, on Hopper: two grouped GEMMs, and a weighted sum over slots.

A call launches several kernels. The first sorts the (token, slot) pairs by expert and divides them into tiles of columns, the
widest first. The device sorts the pairs, so a captured graph stays valid when the routing changes. The two GEMMs follow, each after
a kernel that converts its input rows, if they need conversion. The last kernel sums over slots, in slot order.

Both GEMMs are swap-AB: weights, dequantised in registers, are the A operand, and pairs are the columns. A work item is one tile of
columns by 128, 192, 384 or 576 rows of an expert's weights: few rows with many columns, many rows with few columns. With 384 and
576 rows, a warpgroup processes two or three panels of weights. The row counts of both GPT-OSS projections are multiples of 192 and
of 576. In a CTA, one producer warp streams weights by bulk copies, and three warps gather the columns. Two or three warpgroups
issue MMAs. Bias and activation are applied in registers, because one thread has gate and up of a feature.

With few pairs, dequantising weights would take most of the time. A kernel before each GEMM then splits bfloat16 values into two
float8_e4m3fn values, which together represent all but small values exactly (`PARTS`). The MMAs are then fp8, for which dequantising
the weights takes a third of the instructions. Block scales multiply the partial sums over 32 elements of k. Rows with outliers lose
small values. If more than a quarter of a row's elements are too small, one more kernel after the GEMM recomputes the row's tiles
with 16-bit MMAs.

With fp8 activations, a kernel before each GEMM quantises its rows. With a mean of up to 32 pairs per expert, all experts use fp8
MMAs. With up to 56, all experts use 16-bit MMAs on the quantised values. With more, experts whose weights float8_e5m2 represents
exactly use fp8 MMAs, and the other experts use 16-bit MMAs (`moe_apply_rounded`).

With very many pairs, reads of L2 bound the GEMMs, and two CTAs share columns (`paired`).

With float16, results of slots are float32, because they may exceed float16's range. If no limit keeps the activation in range, the
activation is float32 as well. A kernel then scales each row into float16's range by a power of two (`FITTED`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import Launch, program
from tokenspeed_kernel_nvidia._rows import deliver, to_write
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import STRIP
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.weights import require_rounded
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import (
    CODES,
    FEW_ROUNDED_COLUMNS,
    FITTED,
    MANY_COLUMNS,
    PARTS,
    PLAIN,
    RECORD,
    SORTING_CTAS,
    SPLIT,
    VALUES,
    Combine,
    Gemm,
    Rounding,
    Schedule,
    codes_for,
    columns_for,
    every_combine,
    every_gemm,
    every_rounding,
    every_schedule,
    inputs_for,
    is_few_rounded,
    most_tiles,
    repair_of,
    sorting_ctas,
)
from tokenspeed_kernel_nvidia.sm90.target import ARCH

_ROUNDED_BYTES = {PLAIN: 2, CODES: 1, VALUES: 2, PARTS: 2}  # bytes of a converted element; `PLAIN` is converted only to `FITTED`
_ALIGNED = 256  # alignment in bytes of each part of `Memory`


@program(arch=ARCH, configs=every_schedule)
def schedule_program(config: Schedule) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.moe.grouped import schedule_device

    return schedule_device.host(config), schedule_device.fake_arguments(config)


@program(arch=ARCH, configs=every_gemm)
def gemm_program(config: Gemm) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.moe.grouped import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@program(arch=ARCH, configs=every_combine)
def combine_program(config: Combine) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.moe.grouped import combine_device

    return combine_device.host(config), combine_device.fake_arguments(config)


@program(arch=ARCH, configs=every_rounding)
def rounding_program(config: Rounding) -> tuple[Any, tuple[Any, ...]]:
    """Returns the kernel that converts a GEMM's input rows, to rows or to packed columns, and its placeholder arguments."""
    from tokenspeed_kernel_nvidia.sm90.moe.grouped import packing_device, rounding_device

    if config.packed:
        return packing_device.PackRows(config), packing_device.fake_arguments(config)
    return rounding_device.host(config), rounding_device.fake_arguments(config)


class _Programs(NamedTuple):
    """The kernels that a call launches.

    Attributes:
        schedules: the kernels that sort pairs by expert and divide them into tiles, by their number of CTAs.
        rounding: for each kind of inputs, the two kernels that convert the rows of the first and second GEMM; None if a GEMM reads
            its rows unconverted.
        gemms: for each kind of inputs, the first and second GEMM.
        repairs: the first and second GEMM that recompute tiles with rows that `PARTS` cannot represent; empty without `PARTS`.
        combine: the kernel that adds up the weighted slots of each token.
        sm_count: the number of SMs, which is the number of CTAs of a GEMM.
    """

    schedules: dict[int, Launch]
    rounding: tuple[tuple[Launch | None, Launch | None], ...]
    gemms: tuple[tuple[Launch, Launch], ...]
    repairs: tuple[Launch, ...]
    combine: Launch
    sm_count: int


@functools.cache
def _programs_of(dtype: torch.dtype, columns: int, inputs: tuple[str, ...], wide: bool, device: int) -> _Programs:
    """Returns the kernels of a call. ``wide``: whether the results of the activation function may exceed the range of ``dtype``."""
    name = DTYPES[dtype]
    rounding: list[tuple[Launch | None, Launch | None]] = []
    gemms: list[tuple[Launch, Launch]] = []
    for part, kind in enumerate(inputs):
        first = second = None
        gemm_input = kind
        if kind != PLAIN:
            # The first conversion follows the schedule kernel, which does not write the conversion's input rows. So the two kernels
            # overlap.
            first = rounding_program(Rounding(name, kind, early=part == 0))
            second = rounding_program(Rounding(name, kind, wide=wide))
        elif wide:
            second, gemm_input = rounding_program(Rounding(name, FITTED, wide=True)), VALUES
        rounding.append((first, second))
        w13, w2 = Gemm(name, True, columns, kind, wide), Gemm(name, False, columns, gemm_input, Combine(name).wide)
        gemms.append((gemm_program(w13), gemm_program(w2)))
    return _Programs(
        {ctas: schedule_program(Schedule(ctas)) for ctas in (1, SORTING_CTAS)},
        tuple(rounding),
        tuple(gemms),
        tuple(gemm_program(repair_of(name, gated)) for gated in (True, False)) if inputs == (PARTS,) else (),
        combine_program(Combine(name)),
        sm_count_of(device),
    )


class Memory:
    """The buffers between the kernels of a single call: parts of one allocation, numbered from 0.

    Attributes:
        offsets: the offset in bytes of each part, and at the end the number of bytes of all parts.
        bytes: the allocation, uint8.
    """

    def __init__(self, device: torch.device, lengths: list[int]) -> None:
        self.offsets = [0]
        for length in lengths:
            self.offsets.append(self.offsets[-1] + -(-length // _ALIGNED) * _ALIGNED)
        self.bytes = torch.empty(self.offsets[-1], dtype=torch.uint8, device=device)

    def at(self, part: int) -> int:
        """Returns the address of a part."""
        return self.bytes.data_ptr() + self.offsets[part]

    def rows(self, part: int, dtype: torch.dtype, count: int, k: int) -> Tensor:
        """Returns a part as a tensor ``[count, k]``."""
        begin = self.offsets[part]
        return self.bytes[begin : begin + count * k * dtype.itemsize].view(dtype).view(count, k)


def moe_apply_many(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
    *,
    columns: int | None = None,
    inputs: tuple[str, ...] | None = None,
    exact: Tensor | None = None,
) -> Tensor:
    """Computes `moe_apply` of arguments that the operator has checked. Returns the output: ``out``, or a new tensor like ``x``.

    Args:
        x: bfloat16 or float16 ``[tokens, hidden]``. Rows that are not aligned are copied.
        weights: the experts' weights in the layout of `mxfp4.layout`.
        topk_weights, topk_ids: float32 and int32 ``[tokens, top_k]``. A negative id skips the slot.
        plan: the layer's sizes and options.
        out: receives the output, if given.
        columns: the maximum number of columns of a tile, one of the numbers in `config`. None chooses by the number of pairs. At
            most `MANY_COLUMNS` is used if results of the activation function may exceed float16's range.
        inputs: the kinds of GEMM inputs: `PLAIN` (as given), `CODES` (fp8), `VALUES` (fp8 values in 16 bits) or `PARTS` (two fp8
            values per element), see `config`. With several kinds, each kind is for some of the experts. If activations are fp8,
            None means `VALUES`. Otherwise None means `PLAIN` if ``columns`` is given or the plan needs exact activations. In all
            other cases, None chooses by the number of pairs.
        exact: int32 ``[experts]``, 1 for experts that the `CODES` GEMMs compute, 0 for experts that the `VALUES` GEMMs compute;
            None if ``inputs`` has only one kind.
    """
    tokens, hidden = x.shape
    pairs, experts, intermediate = tokens * plan.top_k, plan.num_experts, plan.intermediate_size
    written = to_write(out, x, x.shape)
    if not pairs:
        return deliver(written, out)
    if inputs is None:
        inputs = (VALUES,)
        if plan.activation_dtype == "none":
            plain = columns or plan.exact_activations
            inputs = (PLAIN,) if plain else inputs_for(DTYPES[x.dtype], pairs, experts)
    wide = plan.wide_activations
    columns = columns or columns_for(pairs, experts, inputs)
    if wide:
        columns = min(columns, MANY_COLUMNS)  # `VALUES` have no wider tile
    programs = _programs_of(x.dtype, columns, inputs, wide, x.get_device())
    tiles = most_tiles(pairs, experts, columns)
    # Bytes of the buffers for converted rows, one buffer for each kind of inputs. Both GEMMs use the same buffers.
    most = max(tokens * hidden, pairs * intermediate)
    activated_as = torch.float32 if wide else x.dtype
    results_as = torch.float32 if x.dtype == torch.float16 else x.dtype
    lengths = [pairs * intermediate * activated_as.itemsize, pairs * hidden * results_as.itemsize]
    lengths += [pairs * 4, pairs * 4, tiles * RECORD * 4, 4, pairs * 4]
    needed = [most * _ROUNDED_BYTES[kind] if kind != PLAIN or wide else 0 for kind in inputs]
    memory = Memory(x.device, lengths + needed)
    activated, results = memory.rows(0, activated_as, pairs, intermediate), memory.rows(1, results_as, pairs, hidden)
    sources, positions, tiles_at, tile_count, scales = (memory.at(part) for part in range(2, 7))
    limit = math.inf if plan.limit is None else plan.limit
    swiglu = plan.alpha, limit, plan.beta
    schedule = sources, tiles_at, tile_count
    # If x must be copied, do it before the schedule kernel. The first conversion overlaps the kernel that precedes it (PDL), so
    # that kernel must not write the rows.
    given = aligned(x)
    programs.schedules[sorting_ctas(pairs)](topk_ids, sources, positions, tiles_at, tile_count, experts, columns, 1)
    exact_at = 0 if exact is None else exact.data_ptr()
    w13, w2 = weights.w13_weight.data_ptr(), weights.w2_weight.data_ptr()
    for second, (rows, result, weight, features) in enumerate(
        ((given, activated, w13, 2 * intermediate), (activated, results, w2, hidden))
    ):
        for part, (kind, rounding, gemms) in enumerate(zip(inputs, programs.rounding, programs.gemms, strict=True)):
            gemm_input = rows
            if (launch := rounding[second]) is not None:
                count, k = rows.shape
                input_dtype = x.dtype if kind in (VALUES, PLAIN) else torch.uint8
                gemm_input = memory.rows(len(lengths) + part, input_dtype, count * (SPLIT if kind == PARTS else 1), k)
                launch(rows, gemm_input, scales)
            gemm_args = weight, scales, exact_at, *schedule, features // STRIP, programs.sm_count, *swiglu
            gemms[second](gemm_input, result, *gemm_args)
            for repair in programs.repairs[second : second + 1]:
                repair(rows, result, *gemm_args)
    topk_weights = topk_weights.contiguous()
    programs.combine(results, written, positions, topk_weights.data_ptr(), plan.top_k)
    return deliver(written, out)


def moe_apply_rounded(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
    *,
    codes: bool | None = None,
    columns: int | None = None,
) -> Tensor:
    """Runs `moe_apply_many` with fp8 activations. ``weights`` must be `RoundedWeights`; otherwise raises TypeError.

    Args:
        codes: True uses fp8 MMAs for experts whose weights float8_e5m2 represents exactly. False uses 16-bit MMAs on the quantised
            values. None chooses fp8 MMAs for few and for many pairs. The partial sums of fp8 MMAs are accumulated in float32 every
            256 elements of k. fp8 MMAs took 2317 us where 16-bit MMAs took 3109 us, with the same error (GPT-OSS-120B, 8192 tokens,
            H200).
        columns: the maximum number of columns of a tile, see `moe_apply_many`. With `FEW_ROUNDED_COLUMNS`, all experts use fp8
            MMAs, because block scales multiply partial sums and not the weights.
    """
    rounded = require_rounded(weights)
    inputs: tuple[str, ...] = (VALUES,)
    pairs, experts = topk_ids.numel(), plan.num_experts
    if codes is None and columns is None and is_few_rounded(pairs, experts):
        columns = FEW_ROUNDED_COLUMNS
    if codes is None:
        codes = codes_for(pairs, experts)
    if columns == FEW_ROUNDED_COLUMNS:
        inputs = (CODES,)
    elif codes and rounded.inexact < plan.num_experts:
        inputs = (CODES, VALUES) if rounded.inexact else (CODES,)
    exact = rounded.exact if len(inputs) > 1 else None
    return moe_apply_many(x, weights, topk_weights, topk_ids, plan, out, columns=columns, inputs=inputs, exact=exact)

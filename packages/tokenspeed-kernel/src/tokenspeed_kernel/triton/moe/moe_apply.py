"""A mixture-of-experts layer with weights in the checkpoint's layout: dense, fp8, mxfp8, mxfp4 or nvfp4.

Besides the schedule, a call takes at most five launches, without host synchronisation: round the tokens (for narrow activations),
first projection with the activation, round again (for per-row scales), second projection, combine.

Both projections are one grouped-GEMM kernel, see `_grouped_gemm_device`. `_Formats` chooses a dtype of its MMAs that represents
weights and rounded activations exactly. `_blocks_for` chooses the tiles by the mean number of rows per expert, because the host
does not read the routing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import (
    FLOATS,
    TRITON,
    cdiv,
    common_device,
    for_architecture,
    tensor_descriptor,
)
from tokenspeed_kernel.triton.moe._combine import combine, slots_for
from tokenspeed_kernel.triton.moe._rounding import fitted, rounded
from tokenspeed_kernel.triton.moe._routing import BlockSchedule, block_schedule
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel_base.checks import HALVES
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.moe.plan import BLOCKS, MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format, mxfp8_format, nvfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority

grouped_gemm_device = DeviceModule("tokenspeed_kernel.triton.moe._grouped_gemm_device")


class Tile(NamedTuple):
    """The tile sizes of the GEMM of one projection.

    Attributes:
        features: output features per program.
        k: elements along k per step. With fp8 block scales, a divisor of 128, because the elements of a step share one scale.
        warps, stages: a program's warps and pipeline stages.
    """

    features: int
    k: int
    warps: int
    stages: int


class Blocks(NamedTuple):
    """How rows are split into blocks, and the tiles of both projections.

    Attributes:
        rows: rows of a block's main tile, a power of two, at least 16.
        extra: largest number of rows that a block may have in addition to ``rows``. These extra rows cost a second, small MMA
            with the same weight tile. 0 for none.
        tail: blocks with at most this many rows use a smaller tile; 0 for none.
        first, second: tiles of the projections. The first projection has two accumulators per feature: gate and up.
        descriptors: whether dense weights are loaded through tensor descriptors (TMA), if their strides allow it.
    """

    rows: int
    extra: int
    tail: int
    first: Tile
    second: Tile
    descriptors: bool = False


_SCALES = {
    "dense": "none",
    "fp8_channel": "channels",
    "fp8_block": "blocks",
    "mxfp8": "e8m0",
    "mxfp4": "e8m0",
    "nvfp4": "e4m3",
}


class Options(NamedTuple):
    """Compile-time options of `grouped_gemm_kernel`.

    Attributes:
        gated: True for the first projection, which applies the activation; False for the second.
        interleaved: whether gate and up rows of the weight alternate.
        format: format of the weight's elements: ``"dense"``, ``"e2m1"`` (packed), ``"fp8"`` (e4m3), or ``"fp8 in bits"``,
            which is dequantised by integer operations if the device does not convert e4m3 in hardware.
        scales: scales of the weight: ``"none"``, ``"channels"`` (float32, per row), ``"blocks"`` (float32, per 128 x 128),
            ``"e8m0"``, or ``"e4m3"`` with a float32 global scale.
        block: how many elements of a row share a one-byte scale; 0 for other scales.
        bias, limit, x_scale: whether there is a bias, a clamp limit, or a scale per input row.
        round_mxfp4: whether results are rounded to mxfp4 values.
        interpreted: whether Triton's interpreter runs the kernel.
        compute, precision: Triton's dtype of the MMA operands, and ``input_precision`` of float32 dot products.
        descriptor: whether the weight is loaded through tensor descriptors.
    """

    gated: bool
    interleaved: bool
    format: str
    scales: str
    block: int
    bias: bool
    limit: bool
    x_scale: bool
    round_mxfp4: bool
    interpreted: bool
    compute: Any
    precision: str
    descriptor: bool


class Program(NamedTuple):
    """Compile-time tile sizes of `grouped_gemm_kernel`.

    ``block_t``, ``extra_t`` and ``tail_t`` are ``rows``, ``extra`` and ``tail`` of `Blocks`; ``block_n`` and ``block_k`` are
    ``features`` and ``k`` of `Tile`. ``even_k``: whether ``block_k`` divides the weight's k. ``group``: how many consecutive blocks
    compute the same features one after another.
    """

    block_t: int
    extra_t: int
    tail_t: int
    block_n: int
    block_k: int
    even_k: bool
    group: int


# tf32 represents float16 and mxfp4 values exactly.
_EXACT_FLOAT32 = {"nvidia": "tf32", "any": "ieee"}

# How many consecutive blocks compute the same features. For the layer described below with 4096 tokens and blocks of 128 rows: 2425
# us with 4, 2589 us with 1, 2432 us with 16.
_GROUP = 4

# The blocks by the mean number of rows per expert: a key is the largest mean for which its value is used. Measured on an H200:
# the whole layer in a CUDA graph, dense bfloat16 weights, 128 experts, top-4, 2880 features. Reading all weights takes 1464 us and
# bounds the time with few rows. With a mean of about 128 rows, half of the experts do not fit into one block of 128 rows. Such
# experts' weights would be read and multiplied twice for a few rows. "extra" avoids this. With many more rows per expert, "extra"
# is no longer faster. "tail" then makes an expert's last block cheaper than a full block. MMAs without swap-AB were 7% slower (128
# rows, features 128 and 256).
_LARGE_MEMORY = {
    # 1 token 67 us (78 with features 32, 75 with k 64), 16 tokens 545 us, 64 tokens 1268 us.
    11: Blocks(16, 0, 0, Tile(64, 128, 4, 3), Tile(64, 128, 4, 4)),
    # 512 tokens 1478 us (1530 with k 128, 1544 without tail, 1709 with blocks of 16).
    22: Blocks(32, 0, 16, Tile(64, 64, 4, 6), Tile(64, 64, 4, 8)),
    # 1024 tokens 1535 us (1551 with 32 rows and 16 extra, 1685 with k 128).
    45: Blocks(64, 0, 32, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4)),
    # 2048 tokens 1630 us (1693 with 128 rows and a tail of 64, 1902 with 64 rows and no extra).
    90: Blocks(64, 16, 0, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    # 4096 tokens 1997 us (2058 without descriptors, 2242 without extra, 2281 with extra 64).
    190: Blocks(128, 32, 0, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4), descriptors=True),
    # 8192 tokens: 3721 us, also with extra 32 and descriptors. 16384 tokens 6809 us (7786 with extra 32 and descriptors, 6949 with
    # extra 64 and 3 stages).
    math.inf: Blocks(128, 0, 32, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4)),
}
# These blocks fit into 64 KB of shared memory, the maximum of some devices. Devices with more shared memory than that, but not
# listed in _BLOCKS, were not measured.
_SMALL_MEMORY = {
    11: Blocks(16, 0, 0, Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    22: Blocks(32, 0, 0, Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    90: Blocks(64, 0, 0, Tile(64, 32, 4, 2), Tile(128, 32, 4, 2)),
    math.inf: Blocks(128, 0, 0, Tile(64, 32, 8, 2), Tile(128, 32, 8, 2)),
}
# For Triton's interpreter, which takes equally long for small and large tiles.
_INTERPRETED = {
    22: Blocks(16, 0, 0, Tile(128, 128, 4, 1), Tile(128, 128, 4, 1)),
    math.inf: Blocks(64, 16, 32, Tile(128, 128, 4, 1), Tile(128, 128, 4, 1)),
}
_BLOCKS = {"sm_90": _LARGE_MEMORY, "sm_100": _LARGE_MEMORY, "cpu": _INTERPRETED, "any": _SMALL_MEMORY}

# Both operands are fp8. A step's partial sum is scaled before it is added to the accumulator, and takes as many registers as the
# accumulator does. Tiles therefore have fewer features. DeepSeek-V3, 128 tokens, 32 of 256 experts on this rank: 346 us with the
# tiles below, 358 with 4 stages, 355 with blocks of 32 without a tail, 376 with blocks of 64. The host computes a mean of 32 rows
# per expert; the true mean is 4. Reading the weights takes 324 us.
_LARGE_MEMORY_FP8 = {
    11: Blocks(16, 0, 0, Tile(64, 128, 4, 5), Tile(128, 128, 4, 5)),
    45: Blocks(32, 0, 16, Tile(64, 128, 4, 5), Tile(128, 128, 4, 5)),
    # Qwen3-235B, 1024 tokens (mean of 64 rows): 810 us (987 with features 64 and 128, 4 warps and 5 stages).
    90: Blocks(64, 0, 16, Tile(128, 128, 8, 4), Tile(128, 128, 8, 4)),
    # Qwen3-235B, 8192 tokens: 4006 us (4312 with features 64 and 4 stages, 4606 with blocks of 64). DeepSeek-V3 with the same three
    # settings: 1409 us, 1573 us, 1661 us.
    math.inf: Blocks(128, 0, 32, Tile(128, 128, 8, 3), Tile(128, 128, 8, 4)),
}
_SMALL_MEMORY_FP8 = {
    22: Blocks(16, 0, 0, Tile(64, 128, 4, 2), Tile(64, 128, 4, 2)),
    math.inf: Blocks(64, 0, 16, Tile(64, 128, 4, 2), Tile(64, 128, 4, 2)),
}
_BLOCKS_FP8 = {"sm_90": _LARGE_MEMORY_FP8, "sm_100": _LARGE_MEMORY_FP8, "any": _SMALL_MEMORY_FP8}

# fp8 weights that are dequantised to the tokens' 16-bit dtype. Dequantising costs instructions, because each warpgroup of a tile
# dequantises all features of the tile. A second CTA per SM hides more of that latency than a deeper pipeline. The figures are
# microseconds on an H200, for Qwen3-235B (128 experts, top-8) and DeepSeek-V3 (32 of 256 experts on this rank, so 8 times fewer
# rows than the host's mean).
_LARGE_MEMORY_FP8_DECODED = {
    # Qwen3, 64 tokens: 816 us. DeepSeek, 16 tokens: 211 us. The same two calls with 4 stages: 915 and 245 us; with 5 stages: 996
    # and 255 us; with k 64 and 3 stages: 980 and 271 us.
    11: Blocks(16, 0, 0, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3)),
    # Qwen3, 256 tokens: 1037 us; with k 128 and 4 stages 1054 us, with blocks of 16 rows 1164 us.
    22: Blocks(32, 0, 16, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    45: Blocks(64, 0, 32, Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)),
    # Qwen3, 1024 tokens: 1529 us; with k 128 and no extra 1834 us, with 4 stages and features 64 1890 us.
    90: Blocks(64, 16, 0, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
    # 8192 tokens, Qwen3 and DeepSeek: 9620 and 3232 us; with features 64 and 128 and 8 warps 11853 and 4071 us, with k 64 10193 and
    # 3472 us, with blocks of 64 rows 11496 and 3788 us. DeepSeek, 1024 tokens: 1300 us, with blocks of 64 rows 856 us.
    math.inf: Blocks(128, 0, 32, Tile(64, 32, 4, 4), Tile(128, 64, 8, 4)),
}
_BLOCKS_FP8_DECODED = {**_BLOCKS, "sm_90": _LARGE_MEMORY_FP8_DECODED}


@register_kernel(
    "moe",
    "moe_apply",
    solution="triton",
    capability=TRITON,
    signatures=[
        format_signature(x=dense_tensor_format(dtype), w13=weight, w2=weight)
        for dtype in FLOATS
        for weight in (
            dense_tensor_format(dtype),
            fp8_format(torch.float8_e4m3fn, "channel"),
            fp8_format(torch.float8_e4m3fn, "block", (128, 128)),
            mxfp8_format(),
            mxfp4_format(),
            nvfp4_format(),
        )
    ],
    traits={
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
        "weight_layout": "canonical",
    },
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def moe_apply(x: Tensor, weights: MoEWeights, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.moe_apply`, which documents the arguments."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens = len(x)
    if tokens == 0:
        return out
    formats = _Formats.of(plan, x.device)
    blocks = _blocks_for(plan, tokens, formats, x.device)
    schedule = block_schedule(topk_ids, plan.num_experts, blocks.rows + blocks.extra)

    pairs = tokens * plan.top_k
    rows, row_scale = rounded(x, plan.activation_dtype, formats.carrier, static_scale=getattr(weights, "w13_input_scale", None))
    wide = torch.float32 if plan.wide_activations else x.dtype
    # If activations were first rounded to 16 bits, one in twenty e4m3 values would change by one step.
    between_dtype = {"none": wide, "mxfp4": formats.carrier}.get(plan.activation_dtype, torch.float32)
    between = x.new_empty(pairs, plan.intermediate_size, dtype=between_dtype)
    _project(rows, row_scale, weights, "w13", between, schedule, plan, formats, blocks, blocks.first)
    row_count = schedule.expert_start[-1:]
    if plan.activation_dtype in ("fp8", "fp8_static"):
        static_scale = getattr(weights, "w2_input_scale", None)
        rows, row_scale = rounded(between, plan.activation_dtype, formats.carrier, row_count, static_scale)
    elif plan.activation_dtype == "none" and plan.wide_activations:
        rows, row_scale = fitted(between, row_count)
    else:
        rows, row_scale = between, None
    slots = slots_for(x, pairs)
    _project(rows, row_scale, weights, "w2", slots[0], schedule, plan, formats, blocks, blocks.second)
    combine(slots, topk_weights, topk_ids, plan.num_experts, out)
    return out


class _Formats(NamedTuple):
    """The formats of the weights and of the MMA operands in a grouped GEMM.

    Attributes:
        weight, scales: formats of the weight and its scales, see `Options`.
        compute: dtype of both MMA operands.
        precision: ``input_precision`` of float32 dot products.
        carrier: dtype that stores the rounded activations exactly.
    """

    weight: str
    scales: str
    compute: torch.dtype
    precision: str
    carrier: torch.dtype

    @staticmethod
    def of(plan: MoEPlan, device: torch.device) -> _Formats:
        # Without native e4m3, weights are dequantised by integer operations and multiplied in the tokens' dtype.
        able = abilities(device)
        weight = "dense" if plan.weight_format == "dense" else "fp8" if able.native else "fp8 in bits"
        if plan.weight_format in ("mxfp4", "nvfp4"):
            weight = "e2m1"
        scales = _SCALES[plan.weight_format]
        stored = weight, scales
        if plan.dtype == torch.float32:
            return _Formats(*stored, torch.float32, "ieee", torch.float32)
        # One-byte block scales multiply the weights. The scaled weights are no longer e4m3 values.
        if weight == "fp8" and scales != "e8m0" and plan.activation_dtype in ("fp8", "fp8_static"):
            return _Formats(*stored, torch.float8_e4m3fn, "ieee", torch.float8_e4m3fn)
        # e8m0 scales have bfloat16's range, and elements have at most four significant bits. e4m3 values, and e2m1 values times
        # e4m3 scales, are exact in float16 and bfloat16.
        wants_range = plan.activation_dtype == "mxfp4" or scales == "e8m0"
        half_tokens = plan.dtype == torch.float16 and plan.activation_dtype == "none"
        half_weights = plan.dtype == torch.float16 and plan.weight_format == "dense"
        if wants_range and (half_tokens or half_weights):
            return _Formats(*stored, torch.float32, for_architecture(_EXACT_FLOAT32, device), torch.float32)
        if wants_range or plan.dtype == torch.bfloat16:
            # Triton's interpreter computes bfloat16 dots wrongly.
            return _Formats(*stored, torch.float32 if able.interpreted else torch.bfloat16, "ieee", torch.bfloat16)
        return _Formats(*stored, torch.float16, "ieee", torch.float16)


def _blocks_for(plan: MoEPlan, tokens: int, formats: _Formats, device: torch.device) -> Blocks:
    """Returns the `Blocks` for a call, by its mean number of rows per expert. The mean assumes that all experts of a token are on
    this rank.
    """
    mean_rows = tokens * plan.top_k / plan.num_experts
    decoded = formats.weight == "fp8" and formats.scales == "blocks" and formats.compute in HALVES
    tables = _BLOCKS_FP8 if formats.compute == torch.float8_e4m3fn else _BLOCKS_FP8_DECODED if decoded else _BLOCKS
    table = for_architecture(tables, device)
    blocks = next(blocks for most, blocks in table.items() if mean_rows <= most)
    if abilities(device).interpreted or table is _LARGE_MEMORY_FP8_DECODED:
        return blocks
    return blocks._replace(
        first=_fitted(blocks.first, formats, 64, plan.hidden_size),
        second=_fitted(blocks.second, formats, 128, plan.intermediate_size),
    )


def _fitted(tile: Tile, formats: _Formats, features: int, k: int) -> Tile:
    """Adapts a tile that was chosen for dense 16-bit weights to other weight formats.

    ``features``: the largest number of features whose accumulators fit into registers beside the values that are being dequantised.
    ``k``: elements of a weight row.
    """
    if formats.compute == torch.float32:
        return tile._replace(features=max(32, tile.features // 2), k=32, stages=min(tile.stages, 2))
    if formats.weight != "dense" and formats.compute != torch.float8_e4m3fn:
        # Rows that are not aligned to 16 bytes are loaded one byte at a time, each byte in its own register. 64 bytes per row would
        # spill registers.
        most = 32 if formats.scales == "channels" and k % 16 else 64
        return tile._replace(features=min(tile.features, features), k=min(tile.k, most), stages=min(tile.stages, 3))
    return tile


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
    """Launches the grouped GEMM of one projection. The first projection (w13) maps tokens to rows sorted by expert, and includes
    the activation. The second projection (w2) maps these rows to (token, slot) pairs.
    """
    gated = name == "w13"
    weight, scale, bias = (getattr(weights, f"{name}_weight{suffix}") for suffix in ("", "_scale", "_bias"))
    if formats.weight == "fp8 in bits":
        weight = weight.view(torch.uint8)
    if formats.scales in ("e8m0", "e4m3"):
        scale = scale.view(torch.uint8)
    global_scale = getattr(weights, f"{name}_weight_global_scale", None)
    features, k = (plan.intermediate_size, plan.hidden_size) if gated else (plan.hidden_size, plan.intermediate_size)
    by_rows = _descriptors(weight, gated and plan.w13_interleaved, tile) if blocks.descriptors and scale is None else None
    grid = (schedule.capacity * cdiv(features, tile.features),)
    grouped_gemm_device.grouped_gemm_kernel[grid](
        x,
        *x.stride(),
        x_scale,
        *(by_rows or (weight, weight)),
        features if gated and plan.w13_interleaved else weight.shape[1],
        features if gated and not plan.w13_interleaved else 0,
        *weight.stride(),
        scale,
        *((0, 0, 0) if scale is None else scale.stride()),
        global_scale,
        0 if global_scale is None else global_scale.stride(0),
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
        OPTIONS=Options(
            gated=gated,
            interleaved=plan.w13_interleaved,
            format=formats.weight,
            scales=formats.scales,
            block=BLOCKS.get(plan.weight_format, 0),
            bias=bias is not None,
            limit=plan.limit is not None,
            x_scale=x_scale is not None,
            round_mxfp4=gated and plan.activation_dtype == "mxfp4",
            interpreted=abilities(x.device).interpreted,
            compute=common_device.DTYPES[formats.compute],
            precision=formats.precision,
            descriptor=by_rows is not None,
        ),
        TILE=Program(
            block_t=blocks.rows,
            extra_t=blocks.extra,
            tail_t=blocks.tail,
            block_n=tile.features,
            block_k=tile.k,
            even_k=k % tile.k == 0,
            group=_GROUP,
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _descriptors(weight: Tensor, interleaved: bool, tile: Tile) -> tuple[Any, Any] | None:
    """Returns tensor descriptors of the gate rows and of the up rows of all experts of a dense weight.

    Returns None if the weight's strides or alignment do not allow descriptors.
    """
    experts, rows, columns = weight.shape
    unaligned = weight.data_ptr() % 16 or weight.stride(1) * weight.element_size() % 16
    if unaligned or weight.stride(2) != 1 or weight.stride(0) != rows * weight.stride(1):
        return None
    flat = weight.as_strided((experts * rows, columns), weight.stride()[1:])
    block = [tile.features, tile.k]
    if not interleaved:
        every = tensor_descriptor.TensorDescriptor.from_tensor(flat, block)
        return every, every
    return tensor_descriptor.TensorDescriptor.from_tensor(flat[0::2], block), tensor_descriptor.TensorDescriptor.from_tensor(
        flat[1::2], block
    )

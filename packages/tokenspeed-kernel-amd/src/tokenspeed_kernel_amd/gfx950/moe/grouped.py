"""`moe_apply` for many (token, expert) pairs: two grouped GEMMs. Weights are in the layout of `mxfp4_layout` or
`fp8_block_layout`.

A call takes five launches: sort pairs by expert and encode tokens; gate/up GEMM with the activation; encode its result (with static
scales the GEMM's epilogue does this); down projection; sum over the slots of each token. With more than 32 columns per tile and
unrounded activations, one more launch follows each GEMM, see ``grouped_exact_device``. The grid of a GEMM covers the most tiles
that any routing can need; the host never reads the schedule.

The waves of a workgroup share a tile of tokens in LDS. Each wave prefetches its own strips of weights into registers. So an
expert's weights are loaded once for each tile of the expert's tokens. The workgroups of these tiles run one after another on the
same XCD, and find the weights in its L2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._rows import deliver, rows, rows_to_write
from tokenspeed_kernel_amd.gfx950.moe.encoding import Encoded, Encoding, encoding_of, room_for
from tokenspeed_kernel_amd.gfx950.moe.mxfp4_layout import QUAD, STEP, quads_of, strips_of
from tokenspeed_kernel_amd.gluon.choose import Router, padded_experts, power_of_two
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights

device = DeviceModule(__name__ + "_device")
wide_device = DeviceModule("tokenspeed_kernel_amd.gfx950.moe.wide_device")
exact_device = DeviceModule("tokenspeed_kernel_amd.gfx950.moe.grouped_exact_device")
schedule_device = DeviceModule("tokenspeed_kernel_amd.gfx950.moe.schedule_device")
encode_device = DeviceModule("tokenspeed_kernel_amd.gfx950.moe.encode_device")

_XCDS = 8  # accelerator dies; consecutive workgroups run on consecutive XCDs
# Up to this many router logits, each expert's sorting workgroup routes all tokens by itself. With 64 tokens and 128 experts, this
# takes 2.5 us in one launch. Separate launches for routing and sorting would take 1.1 and 1.2 us, and a further launch costs 2.3
# us. With 128 tokens, one launch takes 4.6 us.
_MOST_LOGITS = 8192
_CHOOSING_WARPS = 4
_ENCODED = 4  # rows that a workgroup of the encoding launch encodes, one per warp


@dataclass(frozen=True)
class Tile:
    """The tile that a workgroup computes.

    Attributes:
        columns: number of tokens of a tile.
        warps: number of warps, and of strips of weights of a tile, one per warp.
        wide: whether ``wide_device`` computes the tile. The warps of a wide tile read tokens from LDS in chunks of 32.
        blocks: number of tiles, for the same tokens and consecutive strips, that a workgroup of the wide kernel computes in turn.
        waves_per_simd: the compiler uses at most as many registers as this occupancy leaves; 0: as many as a workgroup leaves.
    """

    columns: int
    warps: int
    wide: bool = False
    blocks: int = 1
    waves_per_simd: int = 0


# Each tile is used up to this average number of pairs per expert. Figures are microseconds of both GEMMs by the emulator's timing
# model, at GPT-OSS-120B's hidden and intermediate sizes with fp8 activations and 8 experts.
_TILES = (
    (12.0, Tile(16, 4)),
    # 32 pairs per expert: 14.6 us, of which memory takes 14.1; 15.5 us with 16 columns, 24.9 us with a wide tile of 64 columns.
    (48.0, Tile(32, 4)),
)
# With 256 pairs per expert, 32 columns take 1.33 times as long as this tile, 1.7 times with two planes, 2.4 times with mxfp4.
_WIDE = Tile(128, 8, wide=True, blocks=3)
# The tile of 32 columns for two planes and mxfp4 weights. GPT-OSS-120B with 32 pairs per expert: the GEMMs take 146 and 77 us, the
# times of memory; 203 and 105 us with a narrow tile, which reads two planes of four steps at once, and leaves registers for one
# workgroup per CU only. With 64 pairs per expert, the first GEMM takes 248 us, and 245 us with 128 columns. With three planes,
# scalar registers would spill.
_OF_TWO = Tile(32, 4, wide=True, blocks=3, waves_per_simd=2)
_EXACT_COLUMNS = 32  # with more columns, the mainloop of the wide kernel leaves no registers for exact passes
# With fp8 weights, a narrow tile computes more slowly: 128 experts of 2048 x 512 with 32 pairs each take 57.2 us with 32 columns,
# and 54.9 us, the time of memory, with a wide tile; with 96 pairs 113.2 us and 63.8 us.
_FP8_NARROW = 24.0
_WIDE_OF_THREE = Tile(64, 8, wide=True, blocks=3)  # 64 columns, because three planes of 128 columns do not fit into LDS


class Operands(NamedTuple):
    """Tensors of a GEMM.

    Attributes:
        order, tiles: the schedule, made by ``schedule_device``: the (token, slot) pairs sorted by expert, and the list of tiles.
        weight, weight_scale, bias: the projection's tensors, in the layout of `mxfp4_layout` or `fp8_block_layout`.
        codes, scale: the encoded (quantised) activations and their scales, see `encoding`.
        x, x_stride: the unencoded activations, and the stride of their rows in elements.
        out: the result of the GEMM, [pairs, features].
        out_static: the static scale of the gate/up GEMM's result, or None.
    """

    order: Tensor
    tiles: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    codes: Tensor
    scale: Tensor
    x: Tensor
    x_stride: int
    out: Tensor
    out_static: Tensor | None


class Swiglu(NamedTuple):
    """Parameters of the activation ``(up + beta) * gate * sigmoid(alpha * gate)``, see `MoEPlan`. ``limit`` clamps gate and up; 0
    for no clamp."""

    alpha: float
    limit: float
    beta: float


class Shape(NamedTuple):
    """Compile-time constants of a GEMM.

    Attributes:
        columns: number of (token, slot) pairs in a tile, each a column of the MMAs.
        blocks: number of tiles that a workgroup of the wide kernel computes in turn, see `Tile`.
        top_k: slots of a token.
        gated: True for the gate/up GEMM, which gathers the pairs' rows of x. Its epilogue applies the activation function. False
            for the down projection.
        bias: whether the projection has a bias.
        limited: whether gate and up are clamped.
        padded: whether encoded rows are padded to a multiple of 512 elements.
        encoding: encoding of the activations.
        exact: whether the wide kernel itself computes the rows that need exact passes. If False, a further launch does.
    """

    columns: int
    blocks: int
    top_k: int
    gated: bool
    bias: bool
    limited: bool
    padded: bool
    encoding: Encoding
    exact: bool


class Schedule(NamedTuple):
    """The (token, slot) pairs sorted by expert, and the list of tiles, see ``schedule_device``. ``entries``: the most tiles that
    the list may have."""

    order: Tensor
    tiles: Tensor
    entries: int


def tile_for(pairs: int, plan: MoEPlan) -> Tile:
    """Returns the tile for a call with this many (token, expert) pairs."""
    encoding = encoding_of(plan)
    planes = encoding.planes
    if plan.weight_format == "fp8_block":
        if planes > 2:
            return _TILES[0][1]  # 32 columns would spill registers
        if planes == 1 and pairs > _FP8_NARROW * plan.num_experts:
            return _WIDE
    for most, tile in _TILES:
        if pairs <= most * plan.num_experts:
            two = planes == 2 and encoding.tested and plan.weight_format == "mxfp4"
            return _OF_TWO if two and tile.columns == _OF_TWO.columns else tile
    # The wide kernel has no exact encoding, and only one plane with fp8 weights.
    if plan.weight_format == "fp8_block" or encoding.exact:
        return _TILES[-1][1]
    return _WIDE if planes < 3 else _WIDE_OF_THREE


def moe_apply_many(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
    tile: Tile | None = None,
    router: Router | None = None,
) -> Tensor:
    """Implements the operator `moe_apply`. Weights are in the layout of `mxfp4_layout` or `fp8_block_layout`.

    If ``tile`` is None, `tile_for` selects the tile. With a ``router``, the routing is written to ``topk_weights`` and
    ``topk_ids``, which must be contiguous, and `few_enough_to_route` must be True.
    """
    tokens, hidden = x.shape
    pairs, features = topk_ids.numel(), plan.intermediate_size
    written = rows_to_write(out, x, tokens, hidden)
    if not pairs:
        return deliver(written, out)
    most = most_tokens(plan)
    if tokens > most:
        for first in range(0, tokens, most):
            some = slice(first, first + most)
            moe_apply_many(x[some], weights, topk_weights[some], topk_ids[some], plan, written[some], tile)
        return deliver(written, out)
    if tile is None:
        tile = tile_for(pairs, plan)
    encoding = encoding_of(plan)
    x, topk_ids, topk_weights = rows(x), topk_ids.contiguous(), topk_weights.contiguous()
    scales = static_scales(weights, encoding)
    schedule, encoded = _route(x, topk_weights, topk_ids, plan, tile, encoding, scales[0], router)
    activated = x.new_empty(pairs, features, dtype=between(encoding, plan))
    _launch_gemm(tile, encoding, schedule, weights, x, encoded, activated, plan, gated=True, out_static=scales[1])
    if scales[1] is not None:
        encoded = Encoded(activated.view(torch.uint8)[None], scales[1])
    else:
        encoded = room_for(encoding, pairs, features, x.device, None)
        encode(activated, schedule.tiles[-1], encoded, encoding)
    slots = x.new_empty(pairs, hidden, dtype=of_slots(plan))
    _launch_gemm(tile, encoding, schedule, weights, activated, encoded, slots, plan, gated=False)
    block = min(1024, max(256, power_of_two(hidden)))
    device.combine_kernel[(tokens, -(-hidden // block))](
        slots, topk_weights, topk_ids, written, hidden, written.stride(0), plan.num_experts, TOP_K=plan.top_k, BLOCK=block
    )
    return deliver(written, out)


def few_enough_to_route(tokens: int, plan: MoEPlan) -> bool:
    """Returns whether the launch that sorts pairs may also route tokens, because a workgroup can hold all router logits in
    registers."""
    return power_of_two(tokens) * padded_experts(plan.num_experts) <= _MOST_LOGITS


def static_scales(weights: MoEWeights, encoding: Encoding) -> tuple[Tensor | None, Tensor | None]:
    """Returns the static scales of the inputs of the gate/up and of the down projection; two None if the encoding has no static
    scales."""
    return (weights.w13_input_scale, weights.w2_input_scale) if encoding.scales == "tensor" else (None, None)


def between(encoding: Encoding, plan: MoEPlan) -> torch.dtype:
    """Returns the dtype of the gate/up GEMM's result: fp8 with a static scale; float32 if float16 may overflow, or if fp8
    block-scaled weights have quantised activations; otherwise the plan's dtype.

    Rounding the result to 16 bits before it is quantised changes quantised values. With fp8 block-scaled weights, the error of the
    output would be 1.5e-2 instead of 2e-3, so the result is float32. With mxfp4 weights the portable kernel has that error too, and
    16-bit results save half of the memory traffic.
    """
    if encoding.scales == "tensor":
        return torch.float8_e4m3fn
    rounded = plan.weight_format == "fp8_block" and plan.activation_dtype != "none"
    return torch.float32 if rounded or plan.wide_activations else plan.dtype


def of_slots(plan: MoEPlan) -> torch.dtype:
    """Returns the dtype of the down projection's result for each slot: float32 if the plan's dtype is float16, whose range is too
    small; otherwise the plan's dtype."""
    return torch.float32 if plan.dtype == torch.float16 else plan.dtype


def most_tokens(plan: MoEPlan) -> int:
    """Returns the largest number of tokens per launch: byte offsets within the tensors of their pairs must fit in 32 bits."""
    results = plan.intermediate_size * between(encoding_of(plan), plan).itemsize, plan.hidden_size * of_slots(plan).itemsize
    widest = max(padded(max(plan.hidden_size, plan.intermediate_size)), *results)
    return (2**31 - 1) // (plan.top_k * widest)


def padded(k: int) -> int:
    """Returns the number of elements of an encoded row: k, rounded up to a multiple of 512."""
    return quads_of(k) * QUAD * STEP


def encode(x: Tensor, count: Tensor, encoded: Encoded, encoding: Encoding) -> None:
    """Launches the encoding of the first ``count[0]`` rows of x, contiguous [rows, k], to ``encoded``. ``count``: int32, on
    device."""
    room, k = x.shape
    encode_device.encode_kernel[(-(-room // _ENCODED),)](
        x, count, *encoded, k, padded(k), room, encoding=encoding, CHUNKS=_chunks(k), num_warps=_ENCODED
    )


def _chunks(k: int) -> int:
    """Returns the number of 512-element chunks of a row of k elements that stays in registers while it is encoded; 0 if the row is
    too long."""
    return quads_of(k) if quads_of(k) <= 16 else 0


def _route(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    tile: Tile,
    encoding: Encoding,
    static: Tensor | None,
    router: Router | None,
) -> tuple[Schedule, Encoded]:
    """Launches the sorting of pairs by expert and the encoding of tokens; with a router, also the routing. Returns the schedule and
    the encoded tokens. ``static``: the static scale of the tokens, or None.
    """
    tokens, hidden = x.shape
    pairs = topk_ids.numel()
    entries = pairs // tile.columns + plan.num_experts
    schedule = Schedule(
        torch.empty(pairs, dtype=torch.int32, device=x.device),
        torch.empty(entries + 1, 4, dtype=torch.int32, device=x.device),
        entries,
    )
    encoded = room_for(encoding, tokens, hidden, x.device, static)
    common = (
        schedule.order, schedule.tiles, entries, plan.num_experts, x, x.stride(0), *encoded, hidden, padded(hidden), tokens,
    )  # fmt: skip
    if router is not None:
        warps = _CHOOSING_WARPS
        schedule_device.choose_and_route_kernel[(plan.num_experts + -(-tokens // warps),)](
            router.logits, router.logits.stride(0), router.scaling, topk_ids, topk_weights, *common,
            encoding=encoding, routing=router.routing, ROWS=tile.columns, CHUNKS=_chunks(hidden), num_warps=warps,
        )  # fmt: skip
        return schedule, encoded
    # All top-k ids are loaded at once if they fit in registers: 4096 ids take 2.2 us with 8 warps, 2.3 us with 4, and 3.6 us in
    # chunks of 1024. 1024 ids take 1.2 us with 4 warps, 1.6 us with 8.
    warps = 4 if pairs <= 1024 else 8
    ids_at_once = min(512 * warps, max(1024, power_of_two(pairs)))
    schedule_device.route_kernel[(plan.num_experts + -(-tokens // warps),)](
        topk_ids, *common,
        encoding=encoding, TOP_K=plan.top_k, ROWS=tile.columns, CHUNK=ids_at_once, CHUNKS=_chunks(hidden), num_warps=warps,
    )  # fmt: skip
    return schedule, encoded


def projection(weights: MoEWeights, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns a projection's weight, scale and bias. mxfp4 scales are viewed as int32."""
    weight, scale, bias = (getattr(weights, name + part) for part in ("", "_scale", "_bias"))
    return weight, scale.view(torch.int32) if scale.dtype == torch.uint8 else scale, bias


def _launch_gemm(
    tile: Tile,
    encoding: Encoding,
    schedule: Schedule,
    weights: MoEWeights,
    x: Tensor,
    encoded: Encoded,
    out: Tensor,
    plan: MoEPlan,
    *,
    gated: bool,
    out_static: Tensor | None = None,
) -> None:
    """Launches one grouped GEMM: the gate/up projection with the activation if ``gated``, otherwise the down projection."""
    k = plan.hidden_size if gated else plan.intermediate_size
    features = 2 * plan.intermediate_size if gated else plan.hidden_size
    name = "w13_weight" if gated else "w2_weight"
    weight, weight_scale, bias = projection(weights, name)
    codes = encoded.codes if encoding.format == "e2m1" else encoded.codes.view(torch.float8_e4m3fn)
    strips = strips_of(features)
    # A multiple of the number of XCDs. So the workgroups of all token tiles of an expert that read the same strips run on one XCD,
    # and share its L2.
    blocks = -(-strips // (tile.warps * tile.blocks * _XCDS)) * _XCDS
    limited, whole = gated and plan.limit is not None, encoded.codes.shape[2] == encoding.row_bytes(k)
    exact = tile.wide and encoding.tested and tile.columns <= _EXACT_COLUMNS
    shape = Shape(tile.columns, tile.blocks, plan.top_k, gated, bias is not None, limited, whole, encoding, exact)
    kernels = [wide_device.wide_kernel] if tile.wide else [device.grouped_kernel]
    if tile.wide and encoding.tested and not shape.exact:
        kernels.append(exact_device.exact_kernel)
    arguments = (
        Operands(
            schedule.order,
            schedule.tiles,
            weight,
            weight_scale,
            bias,
            codes,
            encoded.scale,
            x,
            x.stride(0),
            out,
            out_static,
        ),
        *encoded.codes.shape[1:],
        strips,
        k,
        blocks,
        Swiglu(plan.alpha, 0.0 if plan.limit is None else plan.limit, plan.beta),
    )
    for kernel in kernels:
        kernel[(schedule.entries * blocks,)](*arguments, shape=shape, num_warps=tile.warps, waves_per_eu=tile.waves_per_simd)

"""`moe_apply` with bf16 weights in the checkpoint's layout, on CDNA4.

Up to 64 (token, expert) pairs take two launches: the gate/up GEMM with the activation, whose workgroups find the pairs of their
expert by themselves, and the down projection with the sum over the slots of a token. Their waves load weights from global memory
into the MFMAs' registers, and k is split among them, so that enough loads are in flight. More pairs take four launches: sort pairs
by expert, both grouped GEMMs, sum over slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._rows import deliver, rows_to_write
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.moe import grouped
from tokenspeed_kernel_amd.gfx950.moe.grouped import Swiglu
from tokenspeed_kernel_amd.gluon.choose import power_of_two
from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import CANONICAL, Priority
from tokenspeed_kernel_base.traits import multiple_of

device = DeviceModule(__name__ + "_device")

_MAX_PAIRS, _MAX_TOP_K = 64, 8  # of `_few`: one pair per lane, and one wave per slot
_WARPS = 4  # of the first kernel of `_few`
_XCDS = 8
_LARGEST = 2**31 - 1  # offsets in bytes within a tensor have 32 bits


@dataclass(frozen=True)
class Tile:
    """The tile of a grouped GEMM that a workgroup computes.

    Attributes:
        columns: number of tokens.
        features: features per accumulator. There are two: gate and up, or two halves of the features.
        step: elements of k that are copied to LDS at once.
        stages: LDS buffers; all but one are in flight.
        waves: waves along tokens and along features.
        mfma: shape of the MFMAs.
    """

    columns: int
    features: int
    step: int
    stages: int
    waves: tuple[int, int]
    mfma: tuple[int, int, int]


# By the largest mean number of pairs per expert.
_TILES = (
    (24.0, Tile(32, 64, 64, 4, (1, 4), (16, 16, 32))),
    (64.0, Tile(64, 64, 64, 4, (1, 4), (16, 16, 32))),
)
_WIDE = Tile(128, 128, 64, 3, (2, 4), (32, 32, 16))


class Operands(NamedTuple):
    """Tensors of a GEMM.

    Attributes:
        ids, topk_weights: the operator's topk_ids and topk_weights, contiguous.
        order, tiles: the schedule, see ``schedule_device``; None for few pairs.
        x: the input of the GEMM, contiguous.
        weight, bias: the projection's tensors, contiguous.
        out, out_stride: the result of the GEMM, and its row stride in elements.
    """

    ids: Tensor
    topk_weights: Tensor
    order: Tensor | None
    tiles: Tensor | None
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    out_stride: int


class Shape(NamedTuple):
    """A GEMM's compile-time constants.

    Attributes:
        k: the inner dimension.
        split: number of parts of k in the down projection of few pairs.
        top_k, num_experts: as in the plan.
        gated: True for the gate/up GEMM.
        interleaved: whether rows of gate and up alternate.
        bias: whether the projection has a bias.
        limited: whether gate and up are clamped.
    """

    k: int
    split: int
    top_k: int
    num_experts: int
    gated: bool
    interleaved: bool
    bias: bool
    limited: bool


@register_kernel(
    "moe",
    "moe_apply",
    name="gluon_moe_apply_dense",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures={format_signature(**dict.fromkeys(("x", "w13", "w2"), dense_tensor_format(torch.bfloat16)))},
    traits={
        "activation": "swiglu",
        "bias": any,
        "w13_interleaved": any,
        "swiglu_limit": any,
        "swiglu_alpha_beta": any,
        "exact_activations": any,
        "weight_layout": CANONICAL,
        "hidden_size": multiple_of(64),
        "intermediate_size": multiple_of(64),
    },
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)
def moe_apply_dense(
    x: Tensor, weights: MoEWeights, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan, out: Tensor | None = None
) -> Tensor:
    """Implements the operator `tokenspeed_kernel_amd.moe_apply`, which has checked the arguments."""
    written = rows_to_write(out, x, *x.shape)
    x, topk_weights, topk_ids = aligned(x.contiguous()), topk_weights.contiguous(), topk_ids.contiguous()
    pairs = topk_ids.numel()
    few = pairs <= _MAX_PAIRS and plan.top_k <= _MAX_TOP_K and 2 * weights.w2_weight.numel() <= _LARGEST
    most = _LARGEST // (2 * plan.top_k * max(plan.hidden_size, plan.intermediate_size))
    for first in range(0, len(x) if pairs else 0, most):
        some = slice(first, first + most)
        launch = _few if few else _many
        launch(x[some], weights, topk_weights[some], topk_ids[some], plan, written[some])
    return deliver(written, out)


def _operands(weights: MoEWeights, name: str) -> tuple[Tensor, Tensor | None]:
    weight, bias = getattr(weights, name), getattr(weights, f"{name}_bias")
    return aligned(weight.contiguous()), None if bias is None else bias.contiguous()


def _shape(plan: MoEPlan, *, gated: bool, split: int = 1) -> Shape:
    k = plan.hidden_size if gated else plan.intermediate_size
    limited = gated and plan.limit is not None
    return Shape(k, split, plan.top_k, plan.num_experts, gated, plan.w13_interleaved, plan.bias, limited)


def _swiglu(plan: MoEPlan) -> Swiglu:
    return Swiglu(plan.alpha, 0.0 if plan.limit is None else plan.limit, plan.beta)


def _few(x: Tensor, weights: MoEWeights, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan, out: Tensor) -> None:
    """Computes a call of up to `_MAX_PAIRS` pairs in two launches."""
    tokens, hidden = x.shape
    pairs, features = topk_ids.numel(), plan.intermediate_size
    activated = x.new_empty(pairs, features)
    w13, w2 = (_operands(weights, name) for name in ("w13_weight", "w2_weight"))
    device.first_kernel[(pairs * (features // 16),)](
        Operands(topk_ids, topk_weights, None, None, x, *w13, activated, features),
        pairs, features, _swiglu(plan),
        shape=_shape(plan, gated=True), num_warps=_WARPS,
    )  # fmt: skip
    slots = power_of_two(plan.top_k)
    split = max(1, 8 // slots) if features > 256 else 1
    device.second_kernel[(hidden // 16, tokens)](
        Operands(topk_ids, topk_weights, None, None, activated, *w2, out, out.stride(0)), hidden,
        shape=_shape(plan, gated=False, split=split), num_warps=slots * split,
    )  # fmt: skip


def tile_for(pairs: int, plan: MoEPlan) -> Tile:
    """Returns the tile for a call with this many (token, expert) pairs."""
    return next((tile for most, tile in _TILES if pairs <= most * plan.num_experts), _WIDE)


def _many(
    x: Tensor, weights: MoEWeights, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan, out: Tensor, tile: Tile | None = None
) -> None:
    """Computes a call of any number of pairs in four launches."""
    tokens, hidden = x.shape
    pairs, features = topk_ids.numel(), plan.intermediate_size
    tile = tile or tile_for(pairs, plan)
    entries = pairs // tile.columns + plan.num_experts
    order = topk_ids.new_empty(pairs, dtype=torch.int32)
    tiles = topk_ids.new_empty(entries + 1, 4, dtype=torch.int32)
    warps = 4 if pairs <= 1024 else 8
    device.sort_kernel[(plan.num_experts,)](
        topk_ids, order, tiles, entries, plan.num_experts, tokens,
        TOP_K=plan.top_k, ROWS=tile.columns, CHUNK=min(512 * warps, max(1024, power_of_two(pairs))), num_warps=warps,
    )  # fmt: skip
    activated, slots = x.new_empty(pairs, features), x.new_empty(pairs, hidden)
    steps = ((x, "w13_weight", activated, True), (activated, "w2_weight", slots, False))
    for rows, name, result, gated in steps:
        width = result.shape[1]
        # A multiple of the number of XCDs: workgroups of one expert that read the same weights share an XCD's L2.
        blocks = -(-width // (tile.features * (1 if gated else 2) * _XCDS)) * _XCDS
        device.grouped_kernel[(entries * blocks,)](
            Operands(topk_ids, topk_weights, order, tiles, rows, *_operands(weights, name), result, width),
            width, blocks, _swiglu(plan),
            shape=_shape(plan, gated=gated), config=tile, num_warps=tile.waves[0] * tile.waves[1],
        )  # fmt: skip
    block = min(1024, max(256, power_of_two(hidden)))
    grouped.device.combine_kernel[(tokens, -(-hidden // block))](
        slots, topk_weights, topk_ids, out, hidden, out.stride(0), plan.num_experts, TOP_K=plan.top_k, BLOCK=block
    )

"""`moe_apply` for the smallest batches: two launches.

With few tokens, loading weights and launching kernels take most of the time. So no separate launch sorts pairs or encodes
activations. Each workgroup of the gate/up GEMM finds its (token, expert) pairs among all top-k ids, and encodes their rows into LDS
while its first weights are in flight. An expert rarely has more pairs than one workgroup processes. If an expert has more, another
workgroup reads the same weights and processes the further pairs. In the down projection, one workgroup computes all top-k slots of
a token, and sums over them. If the router's logits are given, each workgroup of the gate/up projection routes by itself.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenspeed_kernel_amd._rows import deliver, rows, rows_to_write
from tokenspeed_kernel_amd.gfx950.moe.encoding import Encoding, encoding_of
from tokenspeed_kernel_amd.gfx950.moe.grouped import Swiglu, between, padded, projection, static_scales
from tokenspeed_kernel_amd.gfx950.moe.mxfp4_layout import HALF, QUAD, STEP, quads_of, strips_of
from tokenspeed_kernel_amd.gluon.choose import Router, power_of_two, room_for_choice, routing_for
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights

device = DeviceModule(__name__ + "_device")

MAX_TOP_K = 8
_MAX_PAIRS = 64  # one pair per lane
_PAIRS_AT_ONCE = 4  # pairs of one expert that a workgroup computes together; few experts have more
# The most elements of a padded row that is encoded in registers, by weight format.
_MAX_K = {"mxfp4": 4096, "fp8_block": 8192}
_LDS_BYTES = 80 * 1024  # the most LDS of a workgroup if two workgroups are to fit on a CU


class Operands(NamedTuple):
    """Tensors of a GEMM.

    Attributes:
        ids, topk_weights: the operator's topk_ids and topk_weights, contiguous.
        x, x_stride: the input of the GEMM, and its row stride in elements. The input of the gate/up projection is the tokens; the
            input of the down projection is the gate/up projection's result.
        weight, weight_scale, bias: the projection's tensors, in the layout of `mxfp4_layout` or `fp8_block_layout`.
        out, out_stride: the result of the GEMM, and its row stride in elements.
        static, out_static: the static scales of the GEMM's input and of the gate/up projection's result; or None.
    """

    ids: Tensor
    topk_weights: Tensor
    x: Tensor
    x_stride: int
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    out: Tensor
    out_stride: int
    static: Tensor | None
    out_static: Tensor | None


class Shape(NamedTuple):
    """A GEMM's compile-time constants.

    Attributes:
        rows: how many rows a workgroup encodes: one per pair of the expert in the gate/up projection. In the down projection, one
            per slot of the token and split of k.
        split: number of splits of k within a workgroup, each with its own warps.
        block: elements of a row (or of one split of it), padded; a power of two if there are more warps than rows.
        top_k, num_experts: slots of a token, and number of experts, as in the plan.
        bias: whether the projection has a bias.
        limited: whether gate and up are clamped.
        encoding: the encoding of the GEMM's input.
    """

    rows: int
    split: int
    block: int
    top_k: int
    num_experts: int
    bias: bool
    limited: bool
    encoding: Encoding


def few_enough(tokens: int, plan: MoEPlan, weights: MoEWeights) -> bool:
    """Returns whether `moe_apply_few` supports a call with this many tokens."""
    k = max(plan.hidden_size, plan.intermediate_size)
    encoding = encoding_of(plan)
    # Encoded rows in LDS: in the gate/up GEMM those of some pairs of an expert, in the down projection those of a token's slots.
    rows = _PAIRS_AT_ONCE * encoding.row_bytes(_block(plan.hidden_size))
    rows = max(rows, power_of_two(plan.top_k) * encoding.row_bytes(_block(plan.intermediate_size)))
    return (
        plan.top_k <= MAX_TOP_K
        and tokens * plan.top_k <= _MAX_PAIRS
        and _block(k) <= _MAX_K[plan.weight_format]
        and encoding.planes * rows * 17 // 16 <= _LDS_BYTES
        and weights.w2_weight.numel() < 2**31
    )


def few_enough_to_choose(tokens: int, plan: MoEPlan) -> bool:
    """Returns whether `moe_topk_apply_few` supports a call for which `few_enough` is True."""
    return power_of_two(tokens) * power_of_two(plan.top_k) <= _MAX_PAIRS


def moe_apply_few(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
) -> Tensor:
    """Implements the operator `moe_apply`. Weights are in the layout of `mxfp4_layout` or `fp8_block_layout`. `few_enough` must be
    True."""
    written = rows_to_write(out, x, *x.shape)
    if topk_ids.numel():
        _gemms(rows(x), weights, topk_weights.contiguous(), topk_ids.contiguous(), plan, written, None)
    return deliver(written, out)


def moe_topk_apply_few(
    x: Tensor,
    logits: Tensor,
    weights: MoEWeights,
    plan: MoEPlan,
    renormalize: bool,
    scaling: float,
    out: Tensor | None = None,
) -> Tensor:
    """Implements the operator `moe_topk_apply`. Weights are in the layout of `mxfp4_layout` or `fp8_block_layout`. `few_enough` and
    `few_enough_to_choose` must be True."""
    written = rows_to_write(out, x, *x.shape)
    if len(x):
        slots = _MAX_PAIRS // power_of_two(len(x))
        router = Router(rows(logits), scaling, routing_for(len(x), slots, plan.num_experts, plan.top_k, renormalize))
        _gemms(rows(x), weights, *room_for_choice(logits, plan.top_k), plan, written, router)
    return deliver(written, out)


def _gemms(
    x: Tensor, weights: MoEWeights, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan, written: Tensor, router: Router | None
) -> None:
    """Launches both GEMMs. With a router, the first launch routes, and writes ``topk_ids`` and ``topk_weights``. Without a router,
    both launches read them."""
    tokens, hidden = x.shape
    features = plan.intermediate_size
    encoding = encoding_of(plan)
    warps = 4
    encoded = min(_PAIRS_AT_ONCE, power_of_two(tokens))
    shape = Shape(
        rows=encoded,
        split=1,
        block=_block(hidden) if encoded < warps else padded(hidden),
        top_k=plan.top_k,
        num_experts=plan.num_experts,
        bias=plan.bias,
        limited=plan.limit is not None,
        encoding=encoding,
    )
    scales = static_scales(weights, encoding)
    activated = x.new_empty(tokens * plan.top_k, features, dtype=between(encoding, plan))
    strips = strips_of(2 * features)
    blocks = -(-strips // warps)
    w13 = projection(weights, "w13_weight")
    operands = Operands(topk_ids, topk_weights, x, x.stride(0), *w13, activated, features, *scales)
    common = (strips, hidden, blocks, Swiglu(plan.alpha, 0.0 if plan.limit is None else plan.limit, plan.beta))
    grid = (tokens * plan.top_k * blocks,)
    if router is None:
        device.first_kernel[grid](operands, tokens * plan.top_k, *common, shape=shape, num_warps=warps)
    else:
        device.routed_first_kernel[grid](
            operands, router.logits, router.logits.stride(0), router.scaling, tokens, *common,
            shape=shape, routing=router.routing, num_warps=warps,
        )  # fmt: skip
    w2 = projection(weights, "w2_weight")
    # With one token there are fewer workgroups than CUs. Then the latency of a single workgroup matters, so k is split among warps.
    split = 2 if tokens == 1 and quads_of(features) > 1 else 1
    warps = power_of_two(plan.top_k) * split
    part = -(-quads_of(features) // split) * QUAD * STEP
    device.second_kernel[(hidden // HALF, tokens)](
        Operands(topk_ids, topk_weights, activated, features, *w2, written, written.stride(0), scales[1], None),
        strips_of(hidden), features,
        shape=shape._replace(rows=warps, split=split, block=part), num_warps=warps,
    )  # fmt: skip


def _block(k: int) -> int:
    return max(2048, power_of_two(padded(k)))

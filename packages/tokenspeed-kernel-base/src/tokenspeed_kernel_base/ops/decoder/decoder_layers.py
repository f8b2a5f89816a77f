"""Consecutive decoder layers of a decode step: attention and a mixture of experts, each after a norm and added to the residual."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, nbytes
from tokenspeed_kernel_base.checks import FP8, HALVES, Checker
from tokenspeed_kernel_base.explanation import bucket
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention._cost import visible_pairs
from tokenspeed_kernel_base.ops.attention.mha_decode_with_kvcache import mha_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.rmsnorm_qkv_rope import WEIGHT_FORMATS, rmsnorm_qkv_rope
from tokenspeed_kernel_base.ops.comm.all_reduce import all_reduce
from tokenspeed_kernel_base.ops.decoder._inputs import (
    DRAWN,
    draw_as_rank,
    draw_caches,
    draw_layers,
    draw_pages,
    drawn_format,
    layer_inputs,
    newest_slots,
)
from tokenspeed_kernel_base.ops.decoder.weights import DENSE, EXPERTS, DecoderLayer, DecoderWeights
from tokenspeed_kernel_base.ops.gemm.mm import mm
from tokenspeed_kernel_base.ops.gemm.operands import recognise
from tokenspeed_kernel_base.ops.kvcache.slots import check_slots
from tokenspeed_kernel_base.ops.moe.moe_apply import drawn_as, moe_apply
from tokenspeed_kernel_base.ops.moe.plan import OPERAND_FORMATS, PLAN_KINDS, MoEPlan, intermediates_of, signature_of, traits_of
from tokenspeed_kernel_base.ops.moe.rmsnorm_moe_topk import rmsnorm_moe_topk
from tokenspeed_kernel_base.planning import Preparation
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat, dense_tensor_format
from tokenspeed_kernel_base.spec import CANONICAL
from tokenspeed_kernel_base.variation import Variation, Want

# The rounded intermediates of a layer: the normalised input, qkv, attention's output, its projection, the residual, the normalised
# residual, the logits, and the sum over the experts. Each counts twice, because later layers amplify its rounding error: if each
# counted once, an element of 48 layers would reach 95% of the tolerance in one of 41 draws (hidden size 128, one token).
_ROUNDED = 2 * 8
_SUMMED = 2 * 2  # likewise, if ranks share the layers: the sums over ranks of the projection and of the experts


@operator(
    "decoder",
    "decoder_layers",
    formats={"k_cache": ("dense",), **dict.fromkeys(("qkv", "projection"), WEIGHT_FORMATS), **OPERAND_FORMATS},
    traits={
        "tokens": int,
        "layers": int,
        "kv_heads": int,
        "gqa_ratio": int,
        "head_dim": int,
        "rotary_dim": int,
        "page_size": int,
        "sliding_window": bool,
        "sinks": bool,
        "attention_bias": bool,
        "router_bias": bool,
        "over_ranks": bool,
        "world_size": int,
        "link": str,
        **PLAN_KINDS,
    },
    reference_traits={"weight_layout": CANONICAL},
    fixed_traits=("weight_layout", "processed_weights"),
    mutates=("k_cache", "v_cache"),
    in_place={"out": ("x",)},
    varying=("tokens", "batch"),
    capacity=("pages", "max_pages", "max_positions"),
    planned="plan",
    layout="weight_layout",
    parts=(rmsnorm_qkv_rope, mha_decode_with_kvcache, mm, rmsnorm_moe_topk, moe_apply, all_reduce),
)
def decoder_layers(
    x: Tensor,
    weights: DecoderWeights,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    plan: MoEPlan,
    eps: float = 1e-5,
    out: Tensor | None = None,
) -> Tensor:
    """Runs consecutive decoder layers on the newest token of every sequence.

    The operator is a composition. For each layer: `rmsnorm_qkv_rope` adds the preceding layer's experts to the residual stream,
    normalises it, computes q, k and v, and stores k and v in the cache; `mha_decode_with_kvcache` attends to the cache; `mm`
    projects the result; `rmsnorm_moe_topk` adds the projection to the residual stream, normalises it, and routes; `moe_apply` runs
    the experts. At the end the last experts are added. If the weights have a group of ranks that share the layers, `all_reduce`
    sums the projection and the experts' output over ranks; every rank must make the same calls, with the same x. A fused kernel
    rounds at the same points. It selects the same experts, unless another order of summation changes a rounding that decides the
    selection. But a fused kernel may add a sum over ranks to the residual stream before it rounds.

    Args:
        x: the plan's dtype ``[tokens, hidden]``: the residual stream before the first layer. Each token is the last token of its
            own sequence, at position ``cache_seqlens - 1``.
        weights: the layers' weights. Their experts are in the plan's ``weight_layout``, as `moe_apply.prepare` makes them.
        k_cache: x's dtype ``[layers, pages, page_size, kv_heads, head_dim]``, written to. A page index means the same page in every
            layer.
        v_cache: the value cache, like k_cache.
        page_table: int32 ``[tokens, max_pages]``, as in `mha_decode_with_kvcache`.
        cache_seqlens: int32 ``[tokens]``, number of tokens of each sequence, with the new one; at least 1, at most
            ``max_positions`` and ``max_pages * page_size``. Checked for CPU tensors only.
        slot_mapping: int32 or int64 ``[tokens]``: the slot ``page * page_size + offset`` of the token's position in the page table.
            Negative: nothing is stored, for a row that only pads the batch; the output of this row has no meaning. Slots that are
            not negative must be distinct.
        cos_sin_cache: float32 ``[max_positions, rotary_dim]``, as for `apply_rope`.
        plan: the plan of the experts of every layer, from `moe_apply.plan`.
        eps: added to the mean square of every norm, > 0.
        out: receives the result; may be x.

    Returns:
        ``[tokens, hidden]`` in x's dtype: the residual stream after the last layer, with all its experts added.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched. Also raised at the first
            call, if another rank makes a different call.
        RuntimeError: at the first call, another rank did not make the call within the time limit ``group.time_limit_s``.
        NoKernelFoundError: no registered kernel supports the plan and the layout of the experts.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import DecoderLayer, DecoderWeights, MoEWeights, decoder_layers, moe_apply
        >>> plan = moe_apply.plan(4, 2, hidden_size=8, intermediate_size=6, dtype=torch.float32, device="cpu")
        >>> experts = MoEWeights(torch.randn(4, 12, 8), None, None, torch.randn(4, 8, 6), None, None)
        >>> experts = moe_apply.prepare(experts, plan)
        >>> norm, qkv, projection, router = torch.ones(8), torch.randn(8, 8), torch.randn(8, 4), torch.randn(4, 8)
        >>> weights = DecoderWeights([DecoderLayer(norm, qkv, projection, norm, router, experts)])
        >>> k_cache, v_cache = torch.zeros(2, 1, 3, 4, 1, 2)  # one layer, 3 pages of 4 tokens, one head of 2 elements
        >>> page_table, cache_seqlens = torch.tensor([[2]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        >>> cos_sin_cache = torch.ones(16, 2)
        >>> decoder_layers(
        ...     torch.randn(1, 8), weights, k_cache, v_cache, page_table, cache_seqlens, torch.tensor([8]), cos_sin_cache, plan
        ... ).shape
        torch.Size([1, 8])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads lengths and ids on the host. With
    a fused kernel, call the operator once with the same weights and caches before a capture.
    """
    max_seqlen_k = page_table.shape[1] * k_cache.shape[2]
    kv_heads, head_dim = k_cache.shape[3:]
    positions = (cache_seqlens - 1).clamp(min=0)
    hidden: Tensor = x
    residual: Tensor | None = None
    for index, layer in enumerate(weights.layers):
        found: Any = rmsnorm_qkv_rope(
            hidden,
            layer.input_norm,
            layer.qkv.t(),
            positions,
            cos_sin_cache,
            kv_heads,
            head_dim,
            eps=eps,
            residual=residual,
            bias=layer.qkv_bias,
            k_cache=k_cache[index],
            v_cache=v_cache[index],
            slot_mapping=slot_mapping,
            qkv_weight_scale=_transposed(layer.qkv_scale),
        )
        qkv, residual = (found, hidden) if residual is None else found
        q = qkv.unflatten(1, (-1, head_dim))[:, : -2 * kv_heads]
        attended: Any = mha_decode_with_kvcache(
            q,
            k_cache[index],
            v_cache[index],
            page_table,
            cache_seqlens,
            max_seqlen_k,
            window_left=layer.window_left,
            sinks=layer.sinks,
        )
        scale = _transposed(layer.projection_scale)
        projected = mm(attended.flatten(1), layer.projection.t(), b_scale=scale, bias=layer.projection_bias)
        if weights.group is not None:
            projected = all_reduce(projected, weights.group, projected)
        routed_to: Any = rmsnorm_moe_topk(
            projected, layer.norm, layer.router.t(), plan.top_k, eps=eps, residual=residual, router_bias=layer.router_bias
        )
        normed, topk_weights, topk_ids, residual = routed_to
        hidden = moe_apply(normed, layer.experts, topk_weights, topk_ids, plan)
        if weights.group is not None:
            hidden = all_reduce(hidden, weights.group, hidden)
    return torch.add(hidden, residual, out=out)  # type: ignore[arg-type]


def _transposed(scale: Tensor | None) -> Tensor | None:
    """Returns the scale of a weight stored out-features first as `mm` takes it. A scale per tensor has one axis."""
    return scale if scale is None or scale.ndim < 2 else scale.mT


@decoder_layers.formats
def _(x: Tensor, weights: DecoderWeights, k_cache: Tensor, plan: MoEPlan) -> FormatSignature:
    first = weights.layers[0]
    dense = {name: _weight_format(x, first, name) for name in ("qkv", "projection")}
    return FormatSignature((*signature_of(plan).roles, *dense.items(), ("k_cache", dense_tensor_format(k_cache.dtype))))


def _weight_format(x: Tensor, layer: DecoderLayer, name: str) -> TensorFormat:
    """Returns the format of a layer's weight of qkv or of the projection."""
    weight, scale = getattr(layer, name), _transposed(getattr(layer, f"{name}_scale"))
    check, label = Checker("decoder_layers"), f"weights.layers[0].{name}"
    inputs = weight.shape[-1] * (2 if weight.dtype == torch.uint8 else 1)
    with check.naming({"b": f"{label}, transposed,", "b_scale": f"{label}_scale, transposed,"}):
        a = torch.empty(1, inputs, dtype=x.dtype, device="meta")
        return recognise(check, a, weight.mT, None, scale).format_for("b")


def _heads_of(layer: DecoderLayer, kv_heads: int, head_dim: int) -> int:
    """Returns the number of query heads."""
    return layer.qkv.shape[0] // head_dim - 2 * kv_heads


@decoder_layers.intermediates
def _(x: Tensor, weights: DecoderWeights, plan: MoEPlan) -> tuple[TensorFormat, ...]:
    rounded = _ROUNDED if weights.group is None else _ROUNDED + _SUMMED
    return (dense_tensor_format(x.dtype),) * (rounded * len(weights.layers)) + intermediates_of(plan)


@decoder_layers.traits
def _(x: Tensor, weights: DecoderWeights, k_cache: Tensor, cos_sin_cache: Tensor, plan: MoEPlan) -> dict[str, object]:
    first, (kv_heads, head_dim) = weights.layers[0], k_cache.shape[3:]
    return {
        "tokens": bucket(x.shape[0]),
        "layers": len(weights.layers),
        "kv_heads": kv_heads,
        "gqa_ratio": _heads_of(first, kv_heads, head_dim) // kv_heads,
        "head_dim": head_dim,
        "rotary_dim": cos_sin_cache.shape[1],
        "page_size": k_cache.shape[2],
        "sliding_window": any(window >= 0 for window in weights.windows),
        "sinks": first.sinks is not None,
        "attention_bias": first.qkv_bias is not None,
        "router_bias": first.router_bias is not None,
        "over_ranks": weights.group is not None,
        "world_size": weights.world_size,
        "link": "one rank" if weights.group is None else str(weights.group.traits["link"]),
        **traits_of(plan),
    }


@decoder_layers.check
def _(
    check: Checker,
    x: Tensor,
    weights: DecoderWeights,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    plan: MoEPlan,
    eps: float,
) -> None:
    check.bind("layers", len(weights.layers), "weights")
    check.tensor("k_cache", k_cache, "layers pages page_size kv_heads head_dim", x.dtype)
    check.tensor("v_cache", v_cache, "layers pages page_size kv_heads head_dim", x.dtype)
    for size in ("kv_heads", "head_dim"):
        check.require(check[size] > 0, "k_cache", f"of a {size} > 0", str(list(k_cache.shape)))
    check.tensor("cache_seqlens", cache_seqlens, "tokens", torch.int32)
    first, kv_heads, head_dim = weights.layers[0], check["kv_heads"], check["head_dim"]
    projected = {"x": x, "qkv_weight": first.qkv.mT, "norm_weight": first.input_norm, "bias": first.qkv_bias}
    projected["qkv_weight_scale"] = _transposed(first.qkv_scale)
    cached = {"k_cache": k_cache[0], "v_cache": v_cache[0], "slot_mapping": slot_mapping}
    rope = {"positions": cache_seqlens, "cos_sin_cache": cos_sin_cache, "kv_heads": kv_heads, "head_dim": head_dim}
    names = {"qkv_weight": "weights.layers[0].qkv, transposed,", "norm_weight": "weights.layers[0].input_norm"}
    names["qkv_weight_scale"] = "weights.layers[0].qkv_scale, transposed,"
    with check.naming({**names, "bias": "weights.layers[0].qkv_bias", "positions": "cache_seqlens"}):
        _check_part(check, rmsnorm_qkv_rope, {**projected, **cached, **rope, "eps": eps})
    heads = _heads_of(first, kv_heads, head_dim)
    attention = {"page_table": page_table, "cache_seqlens": cache_seqlens, "sinks": first.sinks, "max_seqlen_k": 0}
    q = torch.empty(x.shape[0], heads, head_dim, dtype=x.dtype, device="meta")
    with check.naming({"sinks": "weights.layers[0].sinks", "q": "weights.layers[0].qkv"}):
        _check_part(check, mha_decode_with_kvcache, {"q": q, **cached, **attention})
    check.bind("width", heads * head_dim, "weights.layers[0].qkv")
    _check_projection(check, x, first)
    check.tensor("weights.layers[0].projection_bias", first.projection_bias, "hidden", x.dtype)
    for name in ("input_norm", "norm"):
        check.dtype(f"weights.layers[0].{name}", getattr(first, name), x.dtype)
    check.tensor("weights.layers[0].sinks", first.sinks, "heads", torch.float32)
    _check_experts(check, x, first, plan, eps)


def _check_projection(check: Checker, x: Tensor, layer: DecoderLayer) -> None:
    """Checks the weight of the projection, which has ``width`` input features, and its scale."""
    weight, scale, name = layer.projection, layer.projection_scale, "weights.layers[0].projection"
    if weight.dtype not in FP8 | {torch.uint8}:
        check.tensor(name, weight, "hidden width", x.dtype)
        check.require(scale is None, f"{name}_scale", "None with a projection of x's dtype", scale)
        return
    check.dtype("x", x, HALVES)
    check.tensor(name, weight, f"hidden {check['width'] // 2}" if weight.dtype == torch.uint8 else "hidden width")
    found = _weight_format(x, layer, "projection")
    check.require(found.format in WEIGHT_FORMATS, name, f"in one of the formats {', '.join(WEIGHT_FORMATS)}", found.format)


def _check_experts(check: Checker, x: Tensor, layer: DecoderLayer, plan: MoEPlan, eps: float) -> None:
    """Checks the router and the experts of a layer."""
    check.bind("experts", plan.num_experts, "plan.num_experts")
    routing = {"x": x, "norm_weight": layer.norm, "router_weight": layer.router.mT, "router_bias": layer.router_bias, "eps": eps}
    names = {"norm_weight": "weights.layers[0].norm", "router_weight": "weights.layers[0].router, transposed,"}
    with check.naming({**names, "router_bias": "weights.layers[0].router_bias", "top_k": "plan.top_k"}):
        _check_part(check, rmsnorm_moe_topk, {**routing, "top_k": plan.top_k})
    chosen = {
        "topk_weights": torch.empty(len(x), plan.top_k, dtype=torch.float32, device="meta"),
        "topk_ids": torch.empty(len(x), plan.top_k, dtype=torch.int32, device="meta"),
    }
    _check_part(check, moe_apply, {"x": x, "weights": layer.experts, "plan": plan, **chosen})


def _check_part(check: Checker, part: Any, given: dict[str, Any]) -> None:
    """Runs the ``check`` hook of a part, with defaults for the arguments that are not given."""
    defaults = {parameter.name: None if parameter.required else parameter.default for parameter in part.operator.parameters}
    known = {name: value for name, value in given.items() if name in defaults}
    part.operator.run_hook("check", {**defaults, **known}, check)


@decoder_layers.check_values(host=("page_table", "cache_seqlens", "slot_mapping"))
def _(
    check: Checker,
    weights: DecoderWeights,
    k_cache: Tensor,
    page_table: Tensor | None,
    cache_seqlens: Tensor | None,
    slot_mapping: Tensor | None,
    cos_sin_cache: Tensor,
) -> None:
    check_slots(check, slot_mapping, k_cache[0])
    if cache_seqlens is None or not cache_seqlens.numel():
        return
    shortest, longest = (int(bound) for bound in cache_seqlens.aminmax())
    check.require(shortest >= 1, "cache_seqlens", "at least 1", shortest)
    most = len(cos_sin_cache)
    check.require(longest <= most, "cache_seqlens", f"at most {most}, the positions of cos_sin_cache", longest)
    if page_table is not None:
        most = page_table.shape[1] * k_cache.shape[2]
        check.require(longest <= most, "cache_seqlens", f"at most {most}, the tokens that the pages of page_table hold", longest)
        paging = {"page_table": page_table, "cache_seqlens": cache_seqlens, "max_seqlen_k": most, "max_seqlen_q": 1}
        window = -1 if -1 in weights.windows else max(weights.windows)
        mha_decode_with_kvcache.operator.run_hook("check_values", {**paging, "k_cache": k_cache[0], "window_left": window}, check)


@decoder_layers.prepare
def _(preparation: Preparation, weights: Any, plan: MoEPlan) -> DecoderWeights:
    """Prepares the experts of every layer for the plan's kernel; all other weights are shared with the given object."""
    if not isinstance(weights, DecoderWeights):
        preparation.check.fail("weights", "a DecoderWeights", type(weights).__name__, TypeError)
    made: dict[int, Any] = {}  # layers may share their experts
    for layer in weights.layers:
        if id(layer.experts) not in made:
            given = {"weights": layer.experts, "plan": plan}
            made[id(layer.experts)] = moe_apply.operator.run_hook("prepare", given, preparation)
    layers = [dataclasses.replace(layer, experts=made[id(layer.experts)]) for layer in weights.layers]
    return DecoderWeights(layers, weights.group)


@decoder_layers.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@decoder_layers.cases
def _() -> list[Case]:
    small, wider = (96, 1, 3, 64, 8, 4, 64), (128, 1, 3, 64, 8, 4, 64)
    full, half_of_full = (2880, 8, 8, 64, 128, 4, 2880), (2880, 4, 8, 64, 128, 4, 1440)
    half = torch.float16
    experts: dict[str, Any] = {"weight_format": "mxfp4", "w13_interleaved": True, "alpha": 1.702, "limit": 7.0, "beta": 1.0}
    return [
        Case(
            "float32, dense experts, no sinks",
            layer_inputs([3, 9], [-1, 3], 32, 2, 2, 8, 4, 2, 24, torch.float32, 4, sinks=False),
        ),
        Case("gpt-oss layers, narrow, one token", layer_inputs([40], [9, -1], *small, **experts)),
        Case("gpt-oss layers, narrow, one token in many pages", layer_inputs([300], [-1, 127], *small, **experts)),
        Case("gpt-oss layers, narrow, 3 tokens", layer_inputs([33, 1, 150], [15, -1], *small, **experts)),
        Case("gpt-oss layers, narrow, 8 tokens", layer_inputs([5, 17, 1, 40, 2, 16, 33, 64], [-1, 7], *small, **experts)),
        Case("one layer, narrow, pages of 64", layer_inputs([70], [-1], 64, 1, 2, 64, 8, 2, 96, page_size=64, **experts)),
        Case("gpt-oss layers, narrow, fp8 dense weights, one token", layer_inputs([40], [9, -1], *wider, weights="fp8", **experts)),
        Case(
            "gpt-oss layers, narrow, fp8 dense weights, 3 tokens",
            layer_inputs([33, 1, 90], [-1, 15], *wider, weights="fp8", **experts),
        ),
        Case(
            "gpt-oss layers, narrow, fp8 dense weights, 6 tokens",
            layer_inputs([5, 17, 1, 40, 2, 16], [-1, 7], *wider, weights="fp8", **experts),
        ),
        Case("gpt-oss layers, narrow, mxfp4 dense weights", layer_inputs([21, 4], [9, -1], *small, weights="mxfp4", **experts)),
        Case("no bias of attention, float16", layer_inputs([9, 20], [-1, 5], 64, 2, 2, 32, 4, 2, 32, half, 8, bias=False)),
        Case("partial rotation, pages of 5", layer_inputs([11, 4, 2], [2, -1], 48, 2, 1, 16, 4, 1, 32, page_size=5, rotary_dim=8)),
        Case("no tokens", layer_inputs([], [-1, 4], 32, 2, 2, 8, 4, 2, 24, torch.float32, 4)),
        *(
            Case(
                f"gpt-oss-120b, 4 layers, decode {n} x 1024",
                layer_inputs([1024] * n, [127, -1] * 2, *full, page_size=64, **experts),
                large=True,
            )
            for n in (1, 2, 4, 8)
        ),
        *(
            Case(
                f"gpt-oss-120b, 4 layers, fp8 dense weights, decode {n} x 1024",
                layer_inputs([1024] * n, [127, -1] * 2, *full, page_size=64, weights="fp8", **experts),
                large=True,
            )
            for n in (1, 2, 4)
        ),
        Case(
            "gpt-oss layers, narrow, 2 tokens, 2 ranks",
            layer_inputs([40, 9], [9, -1], *small, ranks=True, **experts),
            world_size=2,
        ),
        *(
            Case(
                f"gpt-oss-120b, 2 layers, decode {n} x 1024, 2 ranks",
                layer_inputs([1024] * n, [127, -1], *half_of_full, page_size=64, ranks=True, **experts),
                large=True,
                world_size=2,
            )
            for n in (1, 4)
        ),
    ]


@decoder_layers.work
def _(weights: DecoderWeights, k_cache: Tensor, cache_seqlens: Tensor) -> dict[str, list[int]]:
    # A capture does not describe the weights. So record the properties of the weights that no other argument determines.
    first, head_dim = weights.layers[0], k_cache.shape[4]
    given = [first.sinks is not None, first.qkv_bias is not None, first.router_bias is not None]
    heads = _heads_of(first, k_cache.shape[3], head_dim)
    return {
        "kv_lens": cache_seqlens.tolist(), "windows": list(weights.windows), "heads": [heads], "given": list(map(int, given)),
        "ranks": [int(weights.group is not None)],
        "weights": [drawn_format(first.qkv)],
    }  # fmt: skip


@decoder_layers.vary
def _(
    variation: Variation, k_cache: Tensor, page_table: Tensor, cache_seqlens: Tensor, slot_mapping: Tensor, plan: MoEPlan
) -> dict[str, Any]:
    page_size = k_cache.shape[2]
    if variation.want is Want.CAPTURED:
        batch, width = page_table.shape
        layers, _, _, kv_heads, head_dim = k_cache.shape
        paging, held = draw_pages(variation.draw, variation.values("kv_lens", batch, width * page_size), page_size, width)
        windows, (heads,) = variation.values("windows", layers, -1), variation.values("heads", 1, kv_heads)
        sinks, bias, router_bias = map(bool, variation.values("given", 3, 1))
        ranks, (format,) = bool(*variation.values("ranks", 1, 0)), variation.values("weights", 1, 0)
        sizes, options = drawn_as(plan)
        drawn = draw_as_rank(
            lambda: draw_layers(
                variation.draw, windows, heads, kv_heads, head_dim, sizes, sinks, bias, router_bias, options, shared=True,
                weights=DRAWN[format],
            ),
            ranks,
        )  # fmt: skip
        paging["slot_mapping"] = paging["slot_mapping"].to(slot_mapping.dtype)
        return {**drawn, **paging, **draw_caches(variation.draw, held, layers, kv_heads, head_dim, k_cache.dtype)}
    if variation.want is Want.UNUSED or not cache_seqlens.numel():
        return {}
    shorter = (cache_seqlens * 2 // 3).clamp(min=1)
    return {"cache_seqlens": shorter, "slot_mapping": newest_slots(page_table, shorter, page_size).to(slot_mapping.dtype)}


@decoder_layers.cost
def _(x: Tensor, weights: DecoderWeights, k_cache: Tensor, cache_seqlens: Tensor, plan: MoEPlan) -> Cost:
    # Assumes uniform routing, like `moe_topk_apply`: the logits of the layers are not computed.
    tokens, count = x.shape[0], len(weights.layers)
    first, (kv_heads, head_dim) = weights.layers[0], k_cache.shape[3:]
    dense = [getattr(first, name) for name in DENSE]
    width, hidden = _heads_of(first, kv_heads, head_dim) * head_dim, x.shape[1]
    matrices = (first.qkv.shape[0] + width + first.router.shape[0]) * hidden
    hit = 1 - (1 - plan.top_k / plan.num_experts) ** tokens
    experts = nbytes(*(getattr(first.experts, name, None) for name in EXPERTS)) * hit
    lengths = cache_seqlens.tolist()
    seen = sum(visible_pairs(1, length, True, window) for window in weights.windows for length in lengths)
    flops = count * tokens * (2.0 * matrices + 6.0 * plan.top_k * plan.hidden_size * plan.intermediate_size)
    cached = (seen + count * tokens) * 2 * kv_heads * head_dim * k_cache.element_size()
    return Cost(flops + 4.0 * seen * width, count * (nbytes(*dense) + experts) + cached + 2 * nbytes(x))

"""Draws layers and decode steps, for the cases and captured calls of `decoder_layers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw, recipe
from tokenspeed_kernel_base.checks import FP8
from tokenspeed_kernel_base.ops.attention._inputs import draw_cache, draw_paging
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.decoder.weights import REPLICATED, DecoderLayer, DecoderWeights
from tokenspeed_kernel_base.ops.gemm import _inputs as operands
from tokenspeed_kernel_base.ops.moe.moe_apply import _inputs as expert_inputs

# The formats of drawn weights of qkv and of the projection, by the number that stands for them in captures.
DRAWN = ("dense", "fp8", "mxfp4")


def newest_slots(page_table: Tensor, cache_seqlens: Tensor, page_size: int) -> Tensor:
    """Returns the slot of each sequence's last position, int64 ``[tokens]``.

    A length of 0 counts as 1. The operator's check rejects such a call later. Without this, the page index would be -1. On a GPU,
    an index out of range triggers a device-side assertion, after which the process cannot use the GPU.
    """
    newest = (cache_seqlens - 1).long().clamp(min=0)
    pages = page_table.gather(1, (newest // page_size)[:, None])[:, 0].long()
    return pages * page_size + newest % page_size


def draw_pages(draw: Draw, kv_lens: Sequence[int], page_size: int, width: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """Draws page table, lengths and slots. Returns these, and a mask ``[pages, page_size]`` of slots that hold a token."""
    page_table, cache_seqlens, held = draw_paging(draw, kv_lens, page_size, width)
    slots = newest_slots(page_table, cache_seqlens, page_size)
    return {"page_table": page_table, "cache_seqlens": cache_seqlens, "slot_mapping": slots}, held


def draw_caches(draw: Draw, held: Tensor, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draws the caches of all layers. Slots without a token hold NaN."""
    every = held.expand(layers, *held.shape)
    return {name: draw_cache(draw, every, kv_heads, head_dim, dtype=dtype, stale=True) for name in ("k_cache", "v_cache")}


def draw_layers(
    draw: Draw,
    windows: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    sizes: Sequence[int],
    sinks: bool,
    bias: bool,
    router_bias: bool,
    options: dict[str, Any],
    shared: bool = False,
    weights: str = "dense",
) -> dict[str, Any]:
    """Draws the layers' weights, and returns them with the plan of their experts.

    The router's bias determines which experts are selected, in each layer other ones: it is 0 for these experts, and -12 for all
    others. So errors of the residual stream do not change the selection. The bias of selected experts is 0, because larger logits
    are rounded more coarsely: with a bias of 6, the rounding to bfloat16 changed whole rows of the result by up to 2%.

    Args:
        windows: the ``window_left`` of each layer.
        sizes: ``num_experts``, ``top_k``, ``hidden_size`` and ``intermediate_size``.
        bias: whether attention has biases.
        options: further fields of the plan.
        shared: whether all layers have the same experts, to save memory.
        weights: the format of the weights of qkv and of the projection, one of `DRAWN`; fp8 has a scale per output channel.
    """
    (experts, top_k, hidden, _), dtype = sizes, options["dtype"]
    width, columns = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    expert_weights = expert_inputs(0, *sizes, **options)

    def dense(*shape: int, scale: float = 1.0) -> Tensor:
        return draw.normal(*shape, dtype=dtype, scale=scale)

    def projection(name: str, rows: int, inputs: int) -> dict[str, Tensor]:
        if weights == "dense":
            return {name: dense(rows, inputs, scale=inputs**-0.5)}
        if weights == "mxfp4":
            made = operands.micro(0, inputs, rows, a="dense", b="mxfp4")(draw)
        else:
            made = operands.fp8(0, inputs, rows, a_scale="", b_scale="channel", a_dtype=dtype)(draw)
        return {name: made["b"].mT, f"{name}_scale": made["b_scale"].mT}

    drawn: dict[str, Any] = {}
    layers = []
    for window in windows:
        drawn = drawn if shared and drawn else expert_weights(draw)
        selected = draw.permutation(experts) < top_k
        layer = DecoderLayer(
            input_norm=1 + dense(hidden, scale=0.1),
            **projection("qkv", columns, hidden),
            **projection("projection", hidden, width),
            norm=1 + dense(hidden, scale=0.1),
            router=dense(experts, hidden, scale=hidden**-0.5),
            experts=drawn["weights"],
            window_left=window,
            qkv_bias=dense(columns, scale=0.5) if bias else None,
            projection_bias=dense(hidden, scale=0.1) if bias else None,
            sinks=draw.normal(heads) if sinks else None,
            router_bias=torch.where(selected, 0.0, -12.0).to(dtype) if router_bias else None,
        )
        layers.append(layer)
    return {"weights": DecoderWeights(layers), "plan": drawn["plan"]}


def draw_as_rank(drawn: Callable[[], dict[str, Any]], ranks: bool) -> dict[str, Any]:
    """Returns ``drawn()``; with ``ranks``, as a rank of the default group: every rank draws for all ranks, and keeps its own."""
    if not ranks:
        return drawn()
    group = ProcessGroup.with_peer_memory()
    found = [drawn() for _ in range(group.world_size)]
    own = found[group.rank]
    layers = [
        dataclasses.replace(layer, **{name: getattr(first, name) for name in REPLICATED})
        for layer, first in zip(own["weights"].layers, found[0]["weights"].layers, strict=True)
    ]
    return {**own, "weights": DecoderWeights(layers, group)}


@recipe
def layer_inputs(
    kv_lens: Sequence[int],
    windows: Sequence[int],
    hidden: int,
    kv_heads: int,
    gqa_ratio: int,
    head_dim: int,
    experts: int,
    top_k: int,
    intermediate: int,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 16,
    rotary_dim: int | None = None,
    sinks: bool = True,
    bias: bool = True,
    ranks: bool = False,
    weights: str = "dense",
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws layers and a decode step of one token for each sequence.

    Args:
        windows: the ``window_left`` of each layer.
        bias: whether attention has biases.
        ranks: whether the ranks of the default group share the layers. All other sizes are those of one rank.
        weights: see `draw_layers`.
        options: further fields of the plan.
    """
    tokens = len(kv_lens)

    def make(draw: Draw) -> dict[str, Any]:
        paging, held = draw_pages(draw, kv_lens, page_size, None)
        sizes = experts, top_k, hidden, intermediate
        drawn = draw_as_rank(
            lambda: draw_layers(
                draw, windows, kv_heads * gqa_ratio, kv_heads, head_dim, sizes, sinks, bias, True, {"dtype": dtype, **options},
                weights=weights,
            ),
            ranks,
        )  # fmt: skip
        rotated = head_dim if rotary_dim is None else rotary_dim
        angles = draw.uniform(max(kv_lens, default=0) + 1, rotated // 2, high=6.0)
        return {
            "x": draw.normal(tokens, hidden, dtype=dtype),
            **drawn,
            **draw_caches(draw, held, len(windows), kv_heads, head_dim, dtype),
            **paging,
            "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), 1),
        }

    return make


def drawn_format(weight: Tensor) -> int:
    """Returns the index in `DRAWN` of the format that stands for a weight's format in a captured call."""
    return DRAWN.index("mxfp4" if weight.dtype == torch.uint8 else "fp8" if weight.dtype in FP8 else "dense")

"""The layers of a decode step of few tokens on Hopper, in one persistent launch.

For each layer the kernel normalises, computes queries, keys and values, rotates queries and keys, writes the cache, computes
attention, adds the output projection to the layer's input, normalises, routes, runs the mxfp4 experts, and adds their weighted sum.
Weights of all these steps pass through one ring buffer per SM, so the producer need not stop between steps. No operator uses the
kernel yet.

Rounding is as in `rmsnorm`, `mm`, `apply_rope`, `rmsnorm_moe_topk` and `moe_apply`. Results have the same bits in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.cutedsl.launch import LOG2_E
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import LAYOUT
from tokenspeed_kernel_nvidia.sm90.layers.config import (
    EVENTS,
    EXPERTS,
    FAILED,
    GROUP_HEADS,
    HEAD_DIM,
    HEAD_WORDS,
    HIDDEN,
    KEYS,
    LAYER_COUNTERS,
    MOST_LAYERS,
    PAIRS,
    PARTIAL_WORDS,
    ROUTER_BYTES,
    SPLITS,
    TOKENS,
    WIDTH,
    Config,
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.layers.layout import arranged
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import MMA_WARPS
from tokenspeed_kernel_nvidia.sm90.target import ARCH

_EVERY_KEY = 1 << 30  # the window of layers without a window
POLLS = 4_000_000  # a poll takes about 0.5 us, so a warp gives up after about two seconds


@program(arch=ARCH, configs=every_config, usual=list[Config])  # no operator uses these configurations
def persistent_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.layers import kernel_device, trace_device

    host = trace_device.host if config.trace else kernel_device.host
    return host(config), kernel_device.fake_arguments(config)


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer, all contiguous.

    Attributes:
        input_norm: bfloat16 ``[hidden]``.
        qkv, qkv_bias: bfloat16 ``[(heads + 2 kv_heads) 64, hidden]`` and ``[(heads + 2 kv_heads) 64]``: query heads, key heads,
            value heads.
        sinks: float32 ``[heads]``: each head's logit of a key without a value; -inf for none.
        window: the number of keys that a token sees, with its own; None: all.
        projection, projection_bias: bfloat16 ``[hidden, heads 64]`` and ``[hidden]``.
        norm: bfloat16 ``[hidden]``.
        router, router_bias: bfloat16 ``[experts, hidden]`` and ``[experts]``.
        experts: weights in the layout of `mxfp4.layout`.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    sinks: Tensor
    window: int | None
    projection: Tensor
    projection_bias: Tensor
    norm: Tensor
    router: Tensor
    router_bias: Tensor
    experts: MoEWeights

    def arranged(self, ctas: int) -> LayerWeights:
        """Returns these weights with copies of the weights of qkv and of the projection, in the layout of `layout`."""
        return replace(self, qkv=arranged(self.qkv, ctas), projection=arranged(self.projection, ctas))

    def row(self, k_cache: Tensor, v_cache: Tensor) -> list[int]:
        """Returns the layer's row of the kernel's table of layers."""
        before = (self.input_norm, self.qkv, self.qkv_bias, self.sinks, k_cache, v_cache)
        after = (self.projection, self.projection_bias, self.norm, self.router, self.router_bias)
        experts = (self.experts.w13_weight, self.experts.w2_weight)
        addresses = [tensor.data_ptr() for tensor in (*before, *after, *experts)]
        return [*addresses[: len(before)], _EVERY_KEY if self.window is None else self.window, *addresses[len(before) :]]


class PersistentLayers:
    """Some layers' weights and caches, and the memory that their launches share. Launches of one object must not overlap.

    The object has its own copies of the weights of qkv and of the projection, in the layout of `layout`.

    Args:
        weights: each layer's weights.
        caches: each layer's keys and values, bfloat16 ``[pages, page_size, kv_heads, 64]``, all with the same strides.
        tokens: the number of tokens of a launch, one of each sequence.
        table: cosines and sines of the rotary embedding, float32 ``[positions, 64]``.
        plan: the plan of the experts.
        scale: the softmax scale.
        eps: added to the mean square.
        config: the configuration; None for that of `config_of`.
        ctas: the number of CTAs; None for one per SM.
        polls: how often a warp polls before it gives up.

    Raises:
        ValueError: a size is not supported.
    """

    def __init__(
        self,
        weights: Sequence[LayerWeights],
        caches: Sequence[tuple[Tensor, Tensor]],
        tokens: int,
        table: Tensor,
        plan: MoEPlan,
        scale: float = HEAD_DIM**-0.5,
        eps: float = 1e-5,
        config: Config | None = None,
        ctas: int | None = None,
        polls: int = POLLS,
    ) -> None:
        layers, device = len(weights), weights[0].qkv.device
        keys = caches[0][0]
        kv_heads = keys.shape[2]
        heads = weights[0].projection.shape[1] // HEAD_DIM
        config = config or config_of(min(tokens, max(TOKENS)))
        self.ctas = sm_count_of(weights[0].qkv.get_device()) if ctas is None else ctas
        _check(plan, layers, tokens, heads, kv_heads, self.ctas, config)
        for layer in weights:
            if layer.experts.layout != LAYOUT:
                raise ValueError(f"persistent layers: experts must have the layout {LAYOUT!r}, got {layer.experts.layout!r}")
        for cache in (cache for both in caches for cache in both):
            alike = cache.shape == keys.shape and cache.stride() == keys.stride() and cache.dtype == torch.bfloat16
            if not alike or cache.stride(3) != 1:
                raise ValueError("persistent layers: all caches must be bfloat16 of one shape, with the same strides")
        page_size, head_dim = keys.shape[1], keys.shape[3]
        if page_size % KEYS or head_dim != HEAD_DIM:
            raise ValueError(f"persistent layers: pages must be a multiple of {KEYS} by 64, got {page_size} by {head_dim}")
        hidden, pairs, width = plan.hidden_size, tokens * plan.top_k, heads * HEAD_DIM
        weights = [layer.arranged(self.ctas) for layer in weights]
        self._weights, self._caches, self._table_of_angles = tuple(weights), tuple(caches), table
        self._shape = tokens, hidden
        self._program = persistent_program(config)
        rows = [layer.row(*cache) for layer, cache in zip(weights, caches, strict=True)]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)
        split_bits = split_bits_of(tokens, kv_heads, self.ctas)
        # The trace follows the counters.
        self._counters = HEAD_WORDS + (layers + 1) * LAYER_COUNTERS
        self._trace_shape = (self.ctas if config.trace else 0, layers + 1, len(EVENTS))
        sizes = (
            4 * self._counters + 8 * math.prod(self._trace_shape), 4 * tokens * hidden, 4 * tokens * hidden,
            4 * tokens * plan.num_experts, 4 * pairs * plan.intermediate_size, 8 * pairs * hidden,
            2 * self.ctas * config.sent_bytes,
            4 * tokens * (heads + 2 * kv_heads) * HEAD_DIM, 8 * (tokens * heads << split_bits) * PARTIAL_WORDS, 4 * tokens * width,
        )  # fmt: skip
        self._memory = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        self._numbers = (
            width, plan.num_experts, plan.intermediate_size, plan.top_k, self.ctas, polls, eps,
            plan.alpha, math.inf if plan.limit is None else plan.limit, plan.beta,
        )  # fmt: skip
        self._pitches = keys.stride()[:3]
        self._attention = page_size, kv_heads, heads // kv_heads, split_bits, scale * LOG2_E

    def __call__(self, x: Tensor, out: Tensor, lengths: Tensor, pages: Tensor, slots: Tensor) -> None:
        """Runs all layers on the current stream.

        Args:
            x: bfloat16 ``[tokens, hidden]``, contiguous: the first layer's input.
            out: bfloat16 ``[layers, tokens, hidden]``, contiguous; receives each layer's output, which is the next layer's input.
            lengths: int32 ``[tokens]``: the length of each token's sequence, with the token itself, which is the last.
            pages: int32 ``[tokens, most pages]``: the pages of each sequence.
            slots: int32 or int64 ``[tokens]``: ``page * page_size + offset`` where key and value are stored; negative: nowhere.

        Raises:
            ValueError: a tensor has the wrong dtype, shape or strides.
        """
        tokens, hidden = self._shape
        wanted: tuple[tuple[str, Tensor, tuple[int, ...], tuple[torch.dtype, ...]], ...] = (
            ("x", x, (tokens, hidden), (torch.bfloat16,)),
            ("out", out, (len(self._weights), tokens, hidden), (torch.bfloat16,)),
            ("lengths", lengths, (tokens,), (torch.int32,)),
            ("pages", pages, (tokens, pages.shape[-1]), (torch.int32,)),
            ("slots", slots, (tokens,), (torch.int32, torch.int64)),
        )
        for name, given, shape, dtypes in wanted:
            if given.shape != shape or given.dtype not in dtypes:
                raise ValueError(f"persistent layers: {name} must be {dtypes[0]} {shape}, got {given.dtype} {tuple(given.shape)}")
            if given.stride(-1) != 1 or (name != "pages" and not given.is_contiguous()):
                raise ValueError(f"persistent layers: {name} must be contiguous, got strides {given.stride()}")
        head, *memory = (each.data_ptr() for each in self._memory)
        outputs, totals, logits, activated, partial_slots, sent, qkv, partials, attended = memory
        self._program(
            x, out, self._table.data_ptr(), head, outputs, totals, logits, activated, partial_slots, sent, *self._numbers,
            qkv, partials, attended, lengths.data_ptr(), pages.data_ptr(), slots.data_ptr(), self._table_of_angles.data_ptr(),
            *self._pitches, pages.stride(0), slots.element_size() // 4, self._table_of_angles.stride(0), *self._attention,
        )  # fmt: skip

    @property
    def failed(self) -> bool:
        """Whether a launch has given up waiting for other CTAs. Reading this property waits for the device."""
        return bool(self._head[FAILED])

    @property
    def counters_are_zero(self) -> bool:
        """Whether the last launch has reset the counters of layers. Reading this property waits for the device."""
        return not self._head[HEAD_WORDS : self._counters].any()

    @property
    def trace(self) -> Tensor:
        """The last launch's events with `Config.trace`: int64 ``[ctas, layers + 1, len(EVENTS)]``, in cycles of each SM's clock.

        The last row has the clock and the global timer (in nanoseconds) at the CTA's start, and again at the CTA's end.
        """
        return self._head[self._counters :].view(torch.int64).view(self._trace_shape)

    def reset(self) -> None:
        """Makes the next launch independent of a failed launch."""
        for memory in self._memory:
            memory.zero_()

    @property
    def _head(self) -> Tensor:
        return self._memory[0].view(torch.int32)


def split_bits_of(tokens: int, kv_heads: int, ctas: int) -> int:
    """Returns the base-2 logarithm of the number of CTAs that share the keys of a token and a key head: the largest for which there
    are enough CTAs."""
    return min(ctas // (tokens * kv_heads), SPLITS).bit_length() - 1


def _check(plan: MoEPlan, layers: int, tokens: int, heads: int, kv_heads: int, ctas: int, config: Config) -> None:
    """Raises ValueError for sizes that the kernel does not support."""
    hidden, experts = plan.hidden_size, plan.num_experts
    qkv_rows = (heads + 2 * kv_heads) * HEAD_DIM
    most = {
        "layers": (layers, MOST_LAYERS),
        "tokens": (tokens, config.tokens),
        "heads * 64": (heads * HEAD_DIM, WIDTH),
        "heads of a key head": (heads // kv_heads, GROUP_HEADS),
        "tokens * kv_heads": (tokens * kv_heads, ctas),
        "hidden_size": (hidden, HIDDEN),
        "intermediate_size": (plan.intermediate_size, HIDDEN),
        "num_experts": (experts, EXPERTS),
        "tokens * top_k": (tokens * plan.top_k, PAIRS),
        "rows of qkv on a CTA": (-(-qkv_rows // ctas), config.rows_of_cta),
        "tokens * rows of qkv on a CTA": (tokens * -(-qkv_rows // ctas), 32 * MMA_WARPS),
        "rows of the projection on a CTA": (-(-hidden // ctas), config.rows_of_cta),
        "experts of a CTA": (-(-experts // ctas), config.rows_of_cta),
        "bytes of the router on a CTA": (-(-experts // ctas) * hidden * 2, ROUTER_BYTES),
    }
    for name, (size, limit) in most.items():
        if size > limit:
            raise ValueError(f"persistent layers: {name} must be at most {limit}, got {size}")
    for name, size, factor in (("heads", heads, kv_heads), ("num_experts", experts, 4)):
        if size % factor:
            raise ValueError(f"persistent layers: {name} must be a multiple of {factor}, got {size}")

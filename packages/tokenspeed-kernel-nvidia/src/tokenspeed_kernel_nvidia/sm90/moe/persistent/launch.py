"""Layers of a decode step of few tokens on Hopper, from the output projection to the experts, in one persistent launch.

For each layer the kernel adds the attention's output projection to the residual stream, normalises, routes, runs the mxfp4 experts,
and adds their weighted sum. Weights of all these steps pass through one ring buffer per SM, so the producer need not stop between
steps. The attention's outputs of all layers are arguments: attention itself is not part of the kernel yet. No operator uses the
kernel yet.

Rounding is as in `mm`, `rmsnorm_moe_topk` and `moe_apply`. Results have the same bits in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import LAYOUT
from tokenspeed_kernel_nvidia.sm90.moe.persistent.config import (
    EVENTS,
    EXPERTS,
    FAILED,
    HEAD_WORDS,
    HIDDEN,
    LAYER_COUNTERS,
    PAIRS,
    PART_BYTES,
    ROUTER_BYTES,
    TILE,
    TILES,
    TOKENS,
    WIDTH,
    Config,
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.target import ARCH

POLLS = 4_000_000  # a poll takes about 0.5 us, so a warp gives up after about two seconds


@program(arch=ARCH, configs=every_config, usual=list[Config])  # no operator uses these configurations
def persistent_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.moe.persistent import kernel_device, trace_device

    host = trace_device.host if config.trace else kernel_device.host
    return host(config), kernel_device.fake_arguments(config)


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer, all contiguous.

    Attributes:
        projection, projection_bias: bfloat16 ``[hidden, width]`` and ``[hidden]``.
        norm: bfloat16 ``[hidden]``.
        router, router_bias: bfloat16 ``[experts, hidden]`` and ``[experts]``.
        experts: weights in the layout of `mxfp4.layout`.
    """

    projection: Tensor
    projection_bias: Tensor
    norm: Tensor
    router: Tensor
    router_bias: Tensor
    experts: MoEWeights

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order of the table's columns."""
        experts = self.experts.w13_weight, self.experts.w2_weight
        return self.projection, self.projection_bias, self.norm, self.router, self.router_bias, *experts


class PersistentLayers:
    """Some layers' weights, and the memory that their launches share. Launches of one object must not overlap.

    Args:
        weights: each layer's weights.
        attended: bfloat16 ``[layers, tokens, width]``, contiguous: the attention's outputs, which launches read.
        plan: the plan of the experts.
        eps: added to the mean square.
        config: the configuration; None for that of `config_of`.
        ctas: the number of CTAs; None for one per SM.
        ahead: how many bytes of the next layer's projection a CTA prefetches into L2 while experts are being chosen.
        polls: how often a warp polls before it gives up.

    Raises:
        ValueError: a size is not supported.
    """

    def __init__(
        self,
        weights: Sequence[LayerWeights],
        attended: Tensor,
        plan: MoEPlan,
        eps: float = 1e-5,
        config: Config | None = None,
        ctas: int | None = None,
        ahead: int = 0,
        polls: int = POLLS,
    ) -> None:
        layers, tokens, width = attended.shape
        device = attended.device
        self.ctas = sm_count_of(attended.get_device()) if ctas is None else ctas
        _check(plan, tokens, width, self.ctas)
        for layer in weights:
            if layer.experts.layout != LAYOUT:
                raise ValueError(f"persistent layers: experts must have the layout {LAYOUT!r}, got {layer.experts.layout!r}")
        hidden, pairs = plan.hidden_size, tokens * plan.top_k
        self._weights, self._attended, self._plan = tuple(weights), attended, plan
        config = config or config_of(tokens)
        self._program = persistent_program(config)
        rows = [[tensor.data_ptr() for tensor in (*layer.tensors, output)] for layer, output in zip(weights, attended, strict=True)]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)
        # The trace follows the counters.
        self._counters = HEAD_WORDS + layers * LAYER_COUNTERS
        self._trace_shape = (self.ctas if config.trace else 0, layers + 1, len(EVENTS))
        sizes = (
            4 * self._counters + 8 * math.prod(self._trace_shape), 4 * tokens * hidden, 4 * tokens * plan.num_experts,
            2 * pairs * plan.intermediate_size, 4 * pairs * hidden,
        )  # fmt: skip
        self._memory = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        self._numbers = (
            width, plan.num_experts, plan.intermediate_size, plan.top_k, self.ctas, ahead, polls, eps,
            plan.alpha, math.inf if plan.limit is None else plan.limit, plan.beta,
        )  # fmt: skip

    def __call__(self, residual: Tensor, out: Tensor) -> None:
        """Runs all layers on the current stream.

        Args:
            residual: bfloat16 ``[tokens, hidden]``, contiguous.
            out: bfloat16 ``[layers, tokens, hidden]``, contiguous; receives each layer's output, which is the next layer's
                residual.
        """
        for name, given in (("residual", residual), ("out", out)):
            if not given.is_contiguous():
                raise ValueError(f"persistent layers: {name} must be contiguous, got strides {given.stride()}")
        memory = (each.data_ptr() for each in self._memory)
        self._program(residual, out, self._table.data_ptr(), *memory, *self._numbers)

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


def _check(plan: MoEPlan, tokens: int, width: int, ctas: int) -> None:
    """Raises ValueError for sizes that the kernel does not support."""
    hidden, experts = plan.hidden_size, plan.num_experts
    most = {
        "tokens": (tokens, max(TOKENS)),
        "width": (width, WIDTH),
        "hidden_size": (hidden, HIDDEN),
        "intermediate_size": (plan.intermediate_size, HIDDEN),
        "num_experts": (experts, EXPERTS),
        "tokens * top_k": (tokens * plan.top_k, PAIRS),
        "rows of the projection on a CTA": (-(-hidden // ctas), TILES * TILE),
        "experts of a CTA": (-(-experts // ctas), TILES * TILE),
        "bytes of the router on a CTA": (-(-experts // ctas) * hidden * 2, ROUTER_BYTES),
    }
    for name, (size, limit) in most.items():
        if size > limit:
            raise ValueError(f"persistent layers: {name} must be at most {limit}, got {size}")
    for name, size, factor in (("width", width, PART_BYTES // 2), ("num_experts", experts, 4)):
        if size % factor:
            raise ValueError(f"persistent layers: {name} must be a multiple of {factor}, got {size}")

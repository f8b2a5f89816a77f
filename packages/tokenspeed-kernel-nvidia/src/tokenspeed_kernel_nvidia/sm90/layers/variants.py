"""Launches of the persistent kernel with any configuration, to test and to measure variants of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.decoder.weights import DecoderLayer
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia.sm90.layers.config import (
    EVENTS,
    FAILED,
    HEAD_DIM,
    HEAD_WORDS,
    LAYER_COUNTERS,
    TOKENS,
    Config,
    config_of,
)
from tokenspeed_kernel_nvidia.sm90.layers.launch import (
    POLLS,
    Step,
    check_layer,
    check_pages,
    copies_of,
    dense_of,
    distances,
    launch_of,
    table_of,
)


class PersistentLayers:
    """Some layers' weights and caches, and the memory that their launches share, to test and to measure variants of the kernel.
    Launches of one object must not overlap.

    Args:
        weights: each layer's weights.
        caches: each layer's keys and values, bfloat16 ``[pages, page_size, kv_heads, 64]``, all with the same strides.
        tokens: the number of tokens of a launch, one of each sequence.
        table: cosines and sines of the rotary embedding, float32 ``[positions, 64]``.
        plan: the plan of the experts.
        scale: the softmax scale.
        eps: added to the mean square of the norms.
        config: the configuration; None for that of `config_of`. With several ranks, the sizes and weights are this rank's.
        ctas: the number of CTAs; None for one per SM.
        polls: the number of polls after which a wait gives up.
        rank: this object's rank, if the configuration has several ranks. Then call `connect` before the first launch.
        memory: zeroed int32 words for the scratch memory; None to allocate them.

    Raises:
        ValueError: a size is not supported.
    """

    def __init__(
        self,
        weights: Sequence[DecoderLayer],
        caches: Sequence[tuple[Tensor, Tensor]],
        tokens: int,
        table: Tensor,
        plan: MoEPlan,
        scale: float = HEAD_DIM**-0.5,
        eps: float = 1e-5,
        config: Config | None = None,
        ctas: int | None = None,
        polls: int = POLLS,
        rank: int = 0,
        memory: Tensor | None = None,
    ) -> None:
        layers, keys = len(weights), caches[0][0]
        heads = weights[0].projection.shape[1] // HEAD_DIM
        config = config or config_of(min(tokens, max(TOKENS)), dense=dense_of(weights[0]))
        if config.dense != dense_of(weights[0]):
            raise ValueError(
                f"persistent layers: the configuration is for dense weights in {config.dense}, not {dense_of(weights[0])}"
            )
        ctas = sm_count_of(weights[0].qkv.get_device()) if ctas is None else ctas
        self._launch = launch_of(plan, layers, tokens, heads, keys.shape[2], ctas, config, eps, scale, polls)
        for index, layer in enumerate(weights):
            check_layer(index, layer)
        for cache in (cache for both in caches for cache in both):
            alike = cache.shape == keys.shape and cache.stride() == keys.stride() and cache.dtype == torch.bfloat16
            if not alike or cache.stride(3) != 1:
                raise ValueError("persistent layers: all caches must be bfloat16 of one shape, with the same strides")
        check_pages(keys.shape[1], keys.shape[3])
        self._weights, self._caches, self._angles = tuple(weights), tuple(caches), table
        self._shape = tokens, plan.hidden_size
        self._copies = copies_of(weights, ctas)
        self._table = table_of(weights, self._copies, caches)
        words = self._launch.nbytes // 4
        if memory is not None and len(memory) < words:
            raise ValueError(f"persistent layers: memory must be of at least {words} words, got {len(memory)}")
        self._memory = torch.zeros(words, dtype=torch.int32, device=keys.device) if memory is None else memory[:words]
        self._rank, self._others = rank, self._memory[:0].long()
        self._counters = HEAD_WORDS + (layers + 1) * LAYER_COUNTERS
        self._trace_shape = (ctas if config.trace else 0, layers + 1, len(EVENTS))

    def connect(self, addresses: Sequence[int]) -> None:
        """Sets the addresses of the scratch memory of all ranks that share the layers, in order of ranks."""
        others = [address for rank, address in enumerate(addresses) if rank != self._rank]
        self._others = distances(self.address, others, self._memory.device)

    @property
    def address(self) -> int:
        """The address of the scratch memory."""
        return self._memory.data_ptr()

    @property
    def ctas(self) -> int:
        """The number of CTAs."""
        return self._launch.ctas

    def __call__(self, x: Tensor, out: Tensor, lengths: Tensor, pages: Tensor, slots: Tensor) -> None:
        """Runs all layers on the current stream.

        Args:
            x: bfloat16 ``[tokens, hidden]``, contiguous: the first layer's input.
            out: bfloat16 ``[layers, tokens, hidden]``, contiguous; receives each layer's output, which is the next layer's input.
                With several ranks, receives only the last layer's output.
            lengths, pages, slots: see `Step`.

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
        step = Step(lengths, pages, slots, self._angles)
        self._launch(x, out, self._table, self.address, self._caches[0][0], step, self._rank, self._others.data_ptr())

    @property
    def failed(self) -> bool:
        """Whether a launch has given up waiting for other CTAs. Reading this property waits for the device."""
        return bool(self._memory[FAILED])

    @property
    def counters_are_zero(self) -> bool:
        """Whether the last launch has reset the counters of layers. Reading this property waits for the device."""
        return not self._memory[HEAD_WORDS : self._counters].any()

    @property
    def trace(self) -> Tensor:
        """The last launch's events with `Config.trace`: int64 ``[ctas, layers + 1, len(EVENTS)]``, in cycles of each SM's clock.

        The last row has the clock and the global timer (in nanoseconds) at the CTA's start, and again at the CTA's end.
        """
        count = 2 * math.prod(self._trace_shape)
        return self._memory[self._counters : self._counters + count].view(torch.int64).view(self._trace_shape)

    def reset(self) -> None:
        """Makes the next launch independent of a failed launch."""
        self._memory.zero_()

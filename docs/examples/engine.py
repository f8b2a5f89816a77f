"""An engine for Llama and Qwen3: a paged KV cache, chunked prefill, continuous batching, sampling, and CUDA graphs for decode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel import (
    mha_decode_with_kvcache,
    mha_extend_with_kvcache,
    mm,
    positions_to_slots,
    qk_rmsnorm_rope_store_kv_cache,
    rmsnorm,
    sample_top_k_top_p,
    silu_and_mul,
)


@dataclass(frozen=True)
class Config:
    """The sizes of the model that do not follow from the shapes of its weights. For scaled RoPE, as in Llama 3.1, set ``inv_freq``,
    which replaces ``rope_theta``.
    """

    layers: int
    kv_heads: int
    head_dim: int = 128
    eps: float = 1e-5
    rope_theta: float = 500000.0
    inv_freq: Tensor | None = None
    max_positions: int = 8192


@dataclass(eq=False)
class Request:
    """A prompt, and the options for the generated tokens. A temperature of 0 means greedy; a top_k of 0 keeps all tokens."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: Sequence[int] = ()
    output: list[int] = field(default_factory=list)
    cached: int = 0  # number of the prompt's tokens in the cache
    seat: int = -1  # the request's row in the tensors of decode passes; -1 before the request starts
    pages: list[int] = field(default_factory=list)


class Model:
    """A model: its weights, and a forward pass. Weights are named as in Hugging Face checkpoints. Dtype and device are those of the
    embedding."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        left, self.eps = dict(weights), config.eps
        take = left.pop
        self.embedding = take("model.embed_tokens.weight")
        self.unembedding = take("lm_head.weight", self.embedding).t()
        self.norm = take("model.norm.weight")
        self.layers: list[dict[str, Any]] = []
        for prefix in (f"model.layers.{index}." for index in range(config.layers)):
            layer: dict[str, Any] = {"norm": take(prefix + "input_layernorm.weight")}
            layer["mlp_norm"] = take(prefix + "post_attention_layernorm.weight")
            layer["qkv"] = torch.cat([take(f"{prefix}self_attn.{x}_proj.weight") for x in "qkv"]).t()
            layer["qk_norm"] = [take(f"{prefix}self_attn.{x}_norm.weight", None) for x in "qk"]  # only Qwen3 has these weights
            layer["output"] = take(prefix + "self_attn.o_proj.weight").t()
            layer["gate_up"] = torch.cat([take(f"{prefix}mlp.{x}_proj.weight") for x in ("gate", "up")]).t()
            layer["down"] = take(prefix + "mlp.down_proj.weight").t()
            self.layers.append(layer)
        if left:
            raise ValueError(f"this model has no use for {', '.join(left)}")
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        inv_freq = config.rope_theta**-exponents if config.inv_freq is None else config.inv_freq.cpu()
        angles = torch.outer(torch.arange(config.max_positions), inv_freq)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(self.embedding.device)

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, caches: Tensor, attend: Callable[..., Tensor], rows: Tensor | slice
    ) -> Tensor:
        """Returns the logits of the tokens in ``rows``. Keys and values are written to the cache slots ``slots``; ``attend``
        computes the attention of q to a layer's caches.
        """
        hidden = self.embedding[tokens]
        residual = torch.zeros_like(hidden)
        for layer, (k_cache, v_cache) in zip(self.layers, caches, strict=True):
            normed, residual = rmsnorm(hidden, layer["norm"], self.eps, residual)
            qkv = mm(normed, layer["qkv"])
            q = qk_rmsnorm_rope_store_kv_cache(
                qkv, positions, self.cos_sin, k_cache, v_cache, slots, *layer["qk_norm"], eps=self.eps
            )
            hidden = mm(attend(q, k_cache, v_cache).flatten(1), layer["output"])
            normed, residual = rmsnorm(hidden, layer["mlp_norm"], self.eps, residual)
            hidden = mm(silu_and_mul(mm(normed, layer["gate_up"])), layer["down"])
        normed, _ = rmsnorm(hidden[rows], self.norm, self.eps, residual[rows])
        return mm(normed, self.unembedding)


class Engine:
    """Runs requests. Each step prefills up to ``prefill_tokens`` tokens of prompts, then decodes one token of each started request.

    A seat is a row in the tensors that decode passes read and update. There are ``max_batch`` seats. The tensors are on the device,
    so a decode pass copies nothing to it. A free seat has no pages and a length of 0: it writes to no slot, and attends to no key.
    """

    def __init__(
        self, model: Model, config: Config, pages: int, page_size: int = 64, max_batch: int = 64, prefill_tokens: int = 8192
    ) -> None:
        self.model, self.config, self.page_size, self.prefill_tokens = model, config, page_size, prefill_tokens
        device = self.device = model.embedding.device
        self.caches = model.embedding.new_zeros(config.layers, 2, pages, page_size, config.kv_heads, config.head_dim)
        self.free_pages, self.free_seats = list(range(pages)), list(reversed(range(max_batch)))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.tokens, self.positions, self.live = torch.zeros(3, max_batch, dtype=torch.int64, device=device)
        self.page_table = self.ints([[-1] * -(-config.max_positions // page_size)] * max_batch)
        kinds = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "seed": torch.int64}
        self.sampling = {name: torch.ones(max_batch, dtype=dtype, device=device) for name, dtype in kinds.items()}
        self.sizes = [*(1 << i for i in range((max_batch - 1).bit_length())), max_batch]
        self.graphs = {size: self.captured(size) for size in reversed(self.sizes)} if device.type == "cuda" else {}

    def generate(self, requests: Iterable[Request]) -> list[list[int]]:
        """Runs requests to their end, and returns the new tokens of each."""
        added = [self.add(request) for request in requests]
        while self.waiting or self.running:
            self.step()
        return [request.output for request in added]

    def add(self, request: Request) -> Request:
        """Queues a request. The request starts when a seat and pages for all of its tokens are free."""
        length, room = len(request.prompt) + request.max_tokens, self.caches.shape[2] * self.page_size
        if not request.prompt or request.max_tokens < 1 or length > min(self.config.max_positions, room):
            raise ValueError(f"a request needs a prompt, and {length} tokens must fit {self.config.max_positions} and {room} slots")
        self.waiting.append(request)
        return request

    def step(self) -> None:
        """Starts requests, then runs a prefill pass and a decode pass."""
        self.start()
        self.prefill()
        self.decode()

    def start(self) -> None:
        """Assigns free seats and pages to waiting requests, in order."""
        while self.waiting and self.free_seats and (pages := self.pages_of(self.waiting[0])) <= len(self.free_pages):
            request = self.waiting.pop(0)
            request.seat, request.pages = self.free_seats.pop(), [self.free_pages.pop() for _ in range(pages)]
            self.running.append(request)

    def prefill(self) -> None:
        """Runs the next chunks of prompts, and samples the first token of each completed prompt."""
        chunks, budget = [], self.prefill_tokens
        for request in self.running:
            if chunk := range(request.cached, min(request.cached + budget, len(request.prompt))):
                chunks.append((request, chunk))
                request.cached = chunk.stop
                budget -= len(chunk)
        if not chunks:
            return
        lengths = [len(chunk) for _, chunk in chunks]
        ends, width = list(itertools.accumulate(lengths)), max(len(request.pages) for request, _ in chunks)
        cu_seqlens_q, cache_seqlens = self.ints([0, *ends]), self.ints([chunk.stop for _, chunk in chunks])
        page_table = self.ints([request.pages + [-1] * (width - len(request.pages)) for request, _ in chunks])
        tokens = self.ints([request.prompt[position] for request, chunk in chunks for position in chunk])
        positions = self.ints([position for _, chunk in chunks for position in chunk])
        slots = positions_to_slots(positions, page_table, self.page_size, cu_seqlens_q)
        bounds = (max(lengths), width * self.page_size)

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Any:
            return mha_extend_with_kvcache(
                q, cu_seqlens_q, None, k_cache, v_cache, page_table, cache_seqlens, *bounds, is_causal=True
            )

        done = [(request, end - 1) for (request, _), end in zip(chunks, ends, strict=True) if request.cached == len(request.prompt)]
        seats, rows = self.ints([request.seat for request, _ in done]), self.ints([row for _, row in done])
        logits = self.model.forward(tokens, positions, slots, self.caches, attend, rows)
        for request, _ in done:
            for name, values in self.sampling.items():
                values[request.seat] = getattr(request, name)
            self.page_table[request.seat, : len(request.pages)] = self.ints(request.pages)
            self.positions[request.seat], self.live[request.seat] = len(request.prompt), 1
        sampling = (values[seats] for values in self.sampling.values())
        self.tokens[seats] = sample_top_k_top_p(logits, *sampling, self.positions[seats])
        self.emit([request for request, _ in done])

    def decode(self) -> None:
        """Runs a decode pass, which samples one token for each started request."""
        started = [request for request in self.running if request.output]
        if not started:
            return
        size = next(size for size in self.sizes if size > max(request.seat for request in started))
        if self.graphs:
            self.graphs[size].replay()
        else:
            self.decode_pass(size)
        self.emit(started)

    def decode_pass(self, size: int) -> None:
        """Runs the model on the last tokens, samples, and updates the seats' tensors for the next pass. CUDA graphs capture this
        method.
        """
        tokens, positions, live, page_table = (x[:size] for x in (self.tokens, self.positions, self.live, self.page_table))
        cache_seqlens = (positions + live).int()
        slots = positions_to_slots(positions, page_table, self.page_size)
        longest = page_table.shape[1] * self.page_size

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Any:
            return mha_decode_with_kvcache(q, k_cache, v_cache, page_table, cache_seqlens, longest)

        logits = self.model.forward(tokens, positions, slots, self.caches, attend, slice(None))
        positions += live
        sample_top_k_top_p(logits, *(values[:size] for values in self.sampling.values()), positions, out=tokens)

    def captured(self, size: int) -> torch.cuda.CUDAGraph:
        """Returns a CUDA graph of `decode_pass`."""
        self.decode_pass(size)  # a first call outside of the graph compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.decode_pass(size)
        return graph

    def emit(self, requests: Sequence[Request]) -> None:
        """Copies the new tokens of these requests to the host, and frees the seats and pages of finished requests."""
        tokens = self.tokens.tolist()
        for request in requests:
            request.output.append(tokens[request.seat])
            if len(request.output) == request.max_tokens or request.output[-1] in request.stop_tokens:
                self.running.remove(request)
                self.free_pages += request.pages
                self.free_seats = sorted([*self.free_seats, request.seat], reverse=True)
                self.positions[request.seat], self.live[request.seat], self.page_table[request.seat] = 0, 0, -1

    def pages_of(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.max_tokens) // self.page_size)

    def ints(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

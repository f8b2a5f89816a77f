"""Builds batches as vLLM's model runner does, runs them through vLLM's attention layer, and computes attention in plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import utils

from tokenspeed_kernel_vllm.attention.backend import TokenspeedBackend

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 8, 2, 64, 16
K_SCALE, V_SCALE = 0.02, 0.05


def make_layer(
    config: Any, *, window: int | None = None, sinks: bool = True, name: str = "model.layers.0.attn", **options: Any
) -> Any:
    """Returns vLLM's attention layer on our backend."""
    learned = torch.linspace(-1, 2, HEADS, dtype=torch.bfloat16) if sinks else None
    layer = Attention(
        HEADS,
        HEAD_DIM,
        HEAD_DIM**-0.5,
        num_kv_heads=KV_HEADS,
        cache_config=config.cache_config,
        per_layer_sliding_window=window,
        prefix=name,
        attn_backend=TokenspeedBackend,
        sinks=learned,
        **options,
    )
    layer._k_scale.fill_(K_SCALE if layer.impl.fp8 else 1.0)
    layer._v_scale.fill_(V_SCALE if layer.impl.fp8 else 1.0)
    return layer


def make_builder(config: Any, layer: Any) -> Any:
    """Returns the metadata builder, created in the same way as by the model runner."""
    spec = layer.get_kv_cache_spec(config)
    return TokenspeedBackend.get_builder_cls()(spec, [layer.layer_name], config, torch.device("cpu"))


def make_cache(layer: Any, blocks: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns a cache in the backend's memory order, filled with NaN (0xff for uint8)."""
    asks = hasattr(utils, "get_kv_cache_layout")  # newer releases of vLLM decide the order themselves
    order = TokenspeedBackend.get_kv_cache_stride_order() if asks else (0, 2, 1, 3)
    shape = TokenspeedBackend.get_kv_cache_shape(blocks, BLOCK, KV_HEADS, HEAD_DIM)
    physical = torch.empty([shape[axis] for axis in order], dtype=dtype)
    physical.fill_(255 if dtype == torch.uint8 else torch.nan)
    layer.kv_cache = physical.permute([order.index(axis) for axis in range(len(order))])
    assert layer.kv_cache.shape == shape
    return layer.kv_cache


@dataclass
class Batch:
    """The batch of one step: the runner's metadata, the new tokens, and the earlier tokens of each request."""

    common: CommonAttentionMetadata
    query: Tensor
    key: Tensor
    value: Tensor
    histories: list[tuple[Tensor, Tensor]]
    query_lens: Sequence[int]

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)


def make_batch(
    layer: Any,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    pad_to: int = 0,
    pad_rows: int = 0,
    rows: int = 0,
    seed: int = 0,
) -> Batch:
    """Returns a batch of requests whose earlier tokens are in the layer's cache.

    Args:
        seq_lens, query_lens: number of all tokens and of new tokens of each request.
        pad_to: number of requests of a captured decode batch; padding requests have no tokens.
        pad_rows: padding tokens of a captured mixed batch, after the requests' tokens.
        rows: number of rows of the buffers, if larger than the number of tokens.
    """
    draw = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw).bfloat16()

    counts = [-(-length // BLOCK) for length in seq_lens]
    blocks = sum(counts) + 3
    fp8 = layer.impl.fp8
    cache = make_cache(layer, blocks, torch.uint8 if fp8 else torch.bfloat16)
    free = iter((torch.randperm(blocks - 1, generator=draw) + 1).tolist())  # vLLM keeps block 0 for padding
    width = max(counts) + 2
    histories, slots, table = [], [], []
    for length, new, count in zip(seq_lens, query_lens, counts, strict=True):
        row = [next(free) for _ in range(count)]
        table.append(row + [0] * (width - count))
        keys, values = random(length, KV_HEADS, HEAD_DIM), random(length, KV_HEADS, HEAD_DIM)
        slot = torch.tensor([row[i // BLOCK] * BLOCK + i % BLOCK for i in range(length)], dtype=torch.long)
        stored = cache.view(layer.impl.fp8_dtype) if fp8 else cache
        for part, written, scale in zip(
            stored.transpose(1, 2).split(HEAD_DIM, -1), (keys, values), (K_SCALE, V_SCALE), strict=True
        ):
            old = slot[: length - new]
            wide = (written[: length - new].float() / (scale if fp8 else 1)).to(part.dtype)
            for at, row_of in zip(old.tolist(), wide, strict=True):
                part[at // BLOCK, at % BLOCK] = row_of
        histories.append((keys, values))
        slots += slot[length - new :].tolist()
    tokens, reqs = sum(query_lens), max(pad_to, len(seq_lens))
    padding = reqs - len(seq_lens)
    counted = tokens + padding + pad_rows  # a decode batch is padded by one token per request
    rows = max(rows, counted)

    def new_tokens(which: int) -> Tensor:
        parts = [history[which][len(history[which]) - new :] for history, new in zip(histories, query_lens, strict=True)]
        return torch.cat([*parts, torch.full((rows - tokens, KV_HEADS, HEAD_DIM), torch.nan, dtype=torch.bfloat16)])

    ints = {"dtype": torch.int32}
    offsets = torch.tensor([0, *itertools.accumulate(query_lens), *[tokens] * padding], **ints)
    common = CommonAttentionMetadata(
        query_start_loc=offsets,
        query_start_loc_cpu=offsets.clone(),
        seq_lens=torch.tensor([*seq_lens, *[0] * padding], **ints),
        num_reqs=reqs,
        num_actual_tokens=counted,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.tensor(table + [[0] * width] * padding, **ints),
        slot_mapping=torch.tensor([*slots, *[-1] * (counted - tokens)], dtype=torch.long),
    )
    return Batch(common, random(rows, HEADS, HEAD_DIM), new_tokens(0), new_tokens(1), histories, query_lens)


def run(config: Any, layer: Any, metadata: Any, batch: Batch) -> Tensor:
    """Runs vLLM's layer, which writes the cache and computes attention. Returns the output ``[rows, heads, head_dim]``."""
    name = layer.layer_name
    slots = {name: batch.common.slot_mapping}
    with set_forward_context({name: metadata}, config, num_tokens=len(batch.query), slot_mapping=slots):
        out: Tensor = layer(batch.query.flatten(1), batch.key.flatten(1), batch.value.flatten(1))
    return out.view(-1, HEADS, HEAD_DIM)


def expected(layer: Any, batch: Batch, window: int | None) -> Tensor:
    """Returns attention over all tokens of each request ``[tokens, heads, head_dim]``, in float32."""
    wanted = []
    for query, history in zip(batch.query[: batch.tokens].split(list(batch.query_lens)), batch.histories, strict=True):
        k, v = (x.float() for x in history)
        if layer.impl.fp8:
            k, v = ((x / s).to(layer.impl.fp8_dtype).float() * s for x, s in ((k, K_SCALE), (v, V_SCALE)))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query.float(), k) * HEAD_DIM**-0.5
        age = torch.arange(len(k) - len(query), len(k))[:, None] - torch.arange(len(k))
        scores = scores.masked_fill((age < 0) | (age >= (window or len(k) + 1)), -torch.inf)
        if layer.impl.sinks is not None:
            scores = torch.cat([scores, layer.impl.sinks.float()[:, None, None].expand(-1, len(query), 1)], 2)
        wanted.append(torch.einsum("hqk,khd->qhd", scores.softmax(2)[..., : len(k)], v))
    return torch.cat(wanted)


def check(got: Tensor, wanted: Tensor, error: float = 0.01) -> None:
    """Asserts that each row differs from the expected row by no more than a few bf16 roundings."""
    got = got.float()
    assert got.isfinite().all()
    assert ((got - wanted).norm(dim=-1) <= error * wanted.norm(dim=-1) + 1e-5).all(), (got - wanted).abs().max()

"""Calls the functions as an attention backend of vLLM does, with vLLM's metadata, caches and padded buffers.

Names and shapes are those of vllm/v1/attention/backends in vllm-project/vllm, in order of age: flash_attn.py at commit
0084b783bcda6d7ee15c337b1062cbee9985c954, triton_attn.py at 001ceb3e98e7a19ebe33f542a368fa73bf6c76ad, and
rocm_aiter_unified_attn.py at 00e5aa02a6470e57ef1e606d1caf95c3e2677e41. vLLM itself is not needed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tokenspeed_kernel_amd

from .paging import ERROR

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
UNTOUCHED = 7.0


@dataclass
class AttentionMetadata:
    """The fields that attention reads and that both `TritonAttentionMetadata` and `FlashAttentionMetadata` have."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


@dataclass
class Batch:
    """The arguments of a layer's forward, and the keys and values of all tokens of every request."""

    query: Tensor
    output: Tensor
    kv_cache: Tensor
    metadata: AttentionMetadata
    histories: list[tuple[Tensor, Tensor]]
    query_lens: Sequence[int]


@dataclass
class Layout:
    """The layout of a cache tensor: its shape, the order of its axes in memory, and a function that returns its keys and values as
    views."""

    shape: Callable[[int, int], tuple[int, ...]]
    order: tuple[int, ...]
    views: Callable[[Tensor], Sequence[Tensor]]


def _unpacked(kv_cache: Tensor) -> Sequence[Tensor]:
    return kv_cache.transpose(1, 2).split(HEAD_DIM, dim=-1)


# vLLM names memory orders by letters: block (B), head (H), slot in a block (N), and content (D or C).
LAYOUTS = {
    "flash NHD": Layout(lambda b, n: (2, b, n, KV_HEADS, HEAD_DIM), (0, 1, 2, 3, 4), lambda cache: cache.unbind(0)),
    "flash HND": Layout(lambda b, n: (2, b, n, KV_HEADS, HEAD_DIM), (0, 1, 3, 2, 4), lambda cache: cache.unbind(0)),
    "triton": Layout(lambda b, n: (b, 2, n, KV_HEADS, HEAD_DIM), (0, 1, 2, 3, 4), lambda cache: cache.unbind(1)),
    "packed BNHC": Layout(lambda b, n: (b, KV_HEADS, n, 2 * HEAD_DIM), (0, 2, 1, 3), _unpacked),
    "packed BHNC": Layout(lambda b, n: (b, KV_HEADS, n, 2 * HEAD_DIM), (0, 1, 2, 3), _unpacked),
}


def _batch(
    device: torch.device,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    rows: int,
    layout: str = "packed BNHC",
    block_size: int = 16,
) -> Batch:
    """Returns requests whose tokens were written to the cache through slots, as vLLM does before attention. All other slots hold
    NaN.

    Args:
        seq_lens, query_lens: number of all tokens and of new tokens of each request; 0 for padding requests.
        rows: number of rows of query and output, which is larger than the number of tokens.
    """
    draw = torch.Generator().manual_seed(sum(seq_lens))

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw).bfloat16().to(device)

    counts = [-(-length // block_size) for length in seq_lens]
    blocks, order = sum(counts) + 3, LAYOUTS[layout].order
    sizes = LAYOUTS[layout].shape(blocks, block_size)
    memory = torch.full([sizes[axis] for axis in order], torch.nan, dtype=torch.bfloat16, device=device)
    kv_cache = memory.permute([order.index(axis) for axis in range(len(order))])
    assert kv_cache.shape == sizes

    free = iter((torch.randperm(blocks - 1, generator=draw) + 1).tolist())  # block 0 is unused
    width = max(counts) + 2
    table = [[next(free) for _ in range(count)] + [0] * (width - count) for count in counts]
    histories, new_slots = [], []
    for blocks_of, length, new in zip(table, seq_lens, query_lens, strict=True):
        keys, values = random(length, KV_HEADS, HEAD_DIM), random(length, KV_HEADS, HEAD_DIM)
        slots = torch.tensor([blocks_of[i // block_size] * block_size + i % block_size for i in range(length)], dtype=torch.long)
        for cache, written in zip(LAYOUTS[layout].views(kv_cache), (keys, values), strict=True):
            cache[slots // block_size, slots % block_size] = written
        histories.append((keys, values))
        new_slots += slots[length - new :].tolist()

    def ints(values: Sequence[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    metadata = AttentionMetadata(
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        query_start_loc=ints([0, *itertools.accumulate(query_lens)]),
        max_seq_len=max(seq_lens),
        seq_lens=ints(seq_lens),
        block_table=ints(table),
        slot_mapping=ints(new_slots, torch.int64),
    )
    output = torch.full((rows, HEADS, HEAD_DIM), UNTOUCHED, dtype=torch.bfloat16, device=device)
    return Batch(random(rows, HEADS, HEAD_DIM), output, kv_cache, metadata, histories, query_lens)


def _layer(device: torch.device, sliding_window: int | None, sinks: bool = True) -> Any:
    """Returns the attributes of a layer's attention implementation."""
    learned = torch.linspace(-1, 2, HEADS, dtype=torch.bfloat16, device=device)
    return SimpleNamespace(
        head_size=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        sliding_window=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        logits_soft_cap=0,
        sinks=learned if sinks else None,
    )


def _options(layer: Any) -> dict[str, Any]:
    left, sinks, scale = layer.sliding_window[0], layer.sinks, layer.scale
    return {"window_left": left, "logit_cap": layer.logits_soft_cap, "sinks": sinks, "softmax_scale": scale}


def _check(batch: Batch, layer: Any, sliding_window: int | None) -> None:
    """Compares the tokens' rows with attention over all tokens of each request, and checks that other rows were not written."""
    tokens = batch.metadata.num_actual_tokens
    wanted = []
    for query, (keys, values) in zip(batch.query[:tokens].split(list(batch.query_lens)), batch.histories, strict=True):
        q, k, v = (x.float().cpu() for x in (query, keys, values))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        age = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        scores = scores.masked_fill((age < 0) | (age >= (sliding_window or len(k) + 1)), -torch.inf)
        if layer.sinks is not None:
            scores = torch.cat([scores, layer.sinks.float().cpu()[:, None, None].expand(-1, len(q), 1)], 2)
        wanted.append(torch.einsum("hqk,khd->qhd", scores.softmax(2)[..., : len(k)], v))
    expected, got = torch.cat(wanted), batch.output[:tokens].float().cpu()
    assert (got - expected).norm() <= ERROR * expected.norm()
    assert ((got - expected).norm(dim=-1) <= 4 * ERROR * expected.norm(dim=-1) + 1e-6).all()
    assert len(batch.output) > tokens
    assert (batch.output[tokens:] == UNTOUCHED).all()


class _Allocations(TorchDispatchMode):
    """Inside its `with` block, records the size of the largest tensor of a dtype that PyTorch allocates."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for made in torch.utils._pytree.tree_leaves(result):
            if (
                isinstance(made, Tensor)
                and not made.is_meta
                and made.dtype == self.dtype
                and made.untyped_storage().data_ptr() not in known
            ):
                self.largest = max(self.largest, made.numel())
        return result


# -- one call for every batch --------------------------------------------------------------------------------------------------

MIXED = ([37, 150, 33, 16, 0], [1, 20, 33, 1, 0])


@pytest.mark.parametrize(
    ("layout", "sliding_window", "block_size"),
    [
        ("packed BNHC", 128, 16),
        ("flash NHD", None, 64),
        *(pytest.param(name, 32, 16, marks=pytest.mark.slow) for name in ("triton", "flash HND", "packed BHNC")),
    ],
)
def test_mixed_batch(gfx950: torch.device, layout: str, sliding_window: int | None, block_size: int) -> None:
    """One call computes a batch of requests that decode, extend by a chunk, and prefill, and of one padding request."""
    batch = _batch(gfx950, *MIXED, rows=64, layout=layout, block_size=block_size)
    layer, metadata = _layer(gfx950, sliding_window), batch.metadata
    k_cache, v_cache = LAYOUTS[layout].views(batch.kv_cache)
    tokens = metadata.num_actual_tokens
    tokenspeed_kernel_amd.mha_with_kvcache(
        batch.query[:tokens], metadata.query_start_loc, k_cache, v_cache, metadata.block_table, metadata.seq_lens,
        metadata.max_query_len, metadata.max_seq_len, **_options(layer), out=batch.output[:tokens],
    )  # fmt: skip
    _check(batch, layer, sliding_window)


def test_a_cache_of_fp8(gfx950: torch.device) -> None:
    """Results are correct for an fp8 cache, which vLLM holds as a uint8 tensor. Keys and values were divided by the layer's key
    scale and value scale."""
    batch, layer = _batch(gfx950, *MIXED, rows=60), _layer(gfx950, 128)
    layer._k_scale, layer._v_scale = (torch.tensor(scale, device=gfx950) for scale in (0.02, 0.05))
    k_cache, v_cache = _unpacked(batch.kv_cache)
    kv_cache = torch.empty(batch.kv_cache.shape, dtype=torch.uint8, device=gfx950)
    stored = _unpacked(kv_cache.view(torch.float8_e4m3fn))
    for narrow, wide, scale in zip(stored, (k_cache, v_cache), (layer._k_scale, layer._v_scale), strict=True):
        narrow.copy_(wide.float() / scale)
    batch.histories = [
        tuple((x.float() / scale).to(torch.float8_e4m3fn).float() * scale for x, scale in zip(kv, (0.02, 0.05), strict=True))
        for kv in batch.histories
    ]  # type: ignore[misc]
    meta, tokens = batch.metadata, batch.metadata.num_actual_tokens
    k_cache, v_cache = _unpacked(kv_cache.view(torch.float8_e4m3fn))
    tokenspeed_kernel_amd.mha_with_kvcache(
        batch.query[:tokens], meta.query_start_loc, k_cache, v_cache, meta.block_table, meta.seq_lens,
        max_seqlen_q=meta.max_query_len, max_seqlen_k=meta.max_seq_len, k_scale=layer._k_scale, v_scale=layer._v_scale,
        out=batch.output[:tokens], **_options(layer),
    )  # fmt: skip
    _check(batch, layer, 128)


def test_what_the_readme_shows(gfx950: torch.device) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    section = readme.partition("## In vLLM")[2].partition("\n## ")[0]
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL) if "def attend" in code)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    batch = _batch(gfx950, [40, 18], [1, 18], rows=24)
    layer = _layer(gfx950, 16)
    assert namespace["attend"](layer, batch.query, batch.kv_cache, batch.metadata, batch.output) is batch.output
    _check(batch, layer, 16)


# -- a call for each kind of batch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_batch(gfx950: torch.device, layout: str) -> None:
    """If the caches are views of one tensor, results are correct and no cache is copied."""
    batch = _batch(gfx950, [1, 64, 300, 17], [1, 1, 1, 1], rows=8, layout=layout, block_size=64)
    layer, metadata = _layer(gfx950, None), batch.metadata
    assert metadata.max_query_len == 1
    k_cache, v_cache = LAYOUTS[layout].views(batch.kv_cache)
    tokens = metadata.num_actual_tokens
    with _Allocations(k_cache.dtype) as allocations:
        tokenspeed_kernel_amd.mha_decode_with_kvcache(
            batch.query[:tokens], k_cache, v_cache, metadata.block_table, metadata.seq_lens, metadata.max_seq_len,
            **_options(layer), out=batch.output[:tokens],
        )  # fmt: skip
    assert allocations.largest < k_cache.numel()
    _check(batch, layer, None)


def test_prefill_batch(gfx950: torch.device) -> None:
    """For whole prompts, the call takes the new keys and values instead of the cache. In this test, the keys and values are slices
    of one projection's output."""
    lens = [33, 1, 50]
    batch = _batch(gfx950, lens, lens, rows=96)
    layer, metadata = _layer(gfx950, 16), batch.metadata
    tokens = metadata.num_actual_tokens
    keys, values = (torch.cat([history[i] for history in batch.histories]) for i in (0, 1))
    qkv = torch.cat([batch.query[:tokens], keys, values], 1).flatten(1)
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    query, key, value = (part.view(tokens, -1, HEAD_DIM) for part in qkv.split(sizes, 1))
    assert not query.is_contiguous()
    tokenspeed_kernel_amd.mha_prefill(
        query, key, value, metadata.query_start_loc, max_seqlen=metadata.max_query_len, **_options(layer), out=batch.output[:tokens]
    )  # fmt: skip
    _check(batch, layer, 16)


def test_chunked_prefill_batch(gfx950: torch.device) -> None:
    """The cache already holds the first chunks of the prompts. The call computes the next chunks."""
    batch = _batch(gfx950, [70, 40], [30, 9], rows=48, layout="flash NHD")
    layer, metadata = _layer(gfx950, None, sinks=False), batch.metadata
    k_cache, v_cache = LAYOUTS["flash NHD"].views(batch.kv_cache)
    tokens = metadata.num_actual_tokens
    tokenspeed_kernel_amd.mha_extend_with_kvcache(
        batch.query[:tokens], metadata.query_start_loc, None, k_cache, v_cache, metadata.block_table, metadata.seq_lens,
        metadata.max_query_len, metadata.max_seq_len, is_causal=True, **_options(layer), out=batch.output[:tokens],
    )  # fmt: skip
    _check(batch, layer, None)

"""Runs attention layers with batches of all sizes before the first request. The module `sizes` explains why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel_vllm.attention.impl import TokenspeedImpl
from tokenspeed_kernel_vllm.attention.metadata import TokenspeedMetadata
from tokenspeed_kernel_vllm.sizes import sizes_up_to, warming


@dataclass(frozen=True)
class Largest:
    """The limits of batches, from vLLM's configuration.

    Attributes:
        requests, tokens: the largest numbers of requests and of tokens in a batch.
        length: the largest number of tokens of a request.
        decode_query_len: number of new tokens of a decode request; more than one with speculative decoding.
    """

    requests: int
    tokens: int
    length: int
    decode_query_len: int = 1


# Kinds of layers that were warmed up in this process, with the batch limits. vLLM may create several builders for a layer, but one
# warm-up suffices.
_warmed: set[tuple[Any, ...]] = set()


def warm_layers(layers: Iterable[Any], block_size: int, largest: Largest) -> None:
    """Runs the cache write and the attention of one layer of each kind. All requests share a cache of one block.

    Args:
        layers: vLLM's layers. Layers of other backends are skipped, as are layers of a kind that was warmed up before.
        block_size: number of tokens per block.
        largest: the upper limits of the sizes.
    """
    for layer in layers:
        kind = (getattr(layer.impl, "shape", None), block_size, largest)
        if isinstance(layer.impl, TokenspeedImpl) and kind not in _warmed:
            _warmed.add(kind)
            with warming(f"attention (window_left={layer.impl.window_left})"):
                for batch in batches(layer.impl.shape.device, block_size, largest):
                    _attend(layer, batch, block_size)


def batches(device: torch.device, block_size: int, largest: Largest) -> Iterator[TokenspeedMetadata]:
    """Yields batches of decode requests and of other requests, in all sizes. All tokens are in block 0, and no token is written.

    Decode batches have short and long bounds of the lengths, because the longest possible sequence determines the selected kernel.
    """
    for requests in sizes_up_to(largest.requests):
        for length in dict.fromkeys((block_size, max(block_size, largest.length // 2), largest.length)):
            yield _batch(device, block_size, requests, largest.decode_query_len, length, decode=True)
    for tokens in sizes_up_to(largest.tokens):
        requests = -(-tokens // largest.length)
        new = tokens // requests
        if new > largest.decode_query_len:
            yield _batch(device, block_size, requests, new, new, decode=False)


def _batch(device: torch.device, block_size: int, requests: int, new: int, length: int, decode: bool) -> TokenspeedMetadata:
    """Returns a batch of requests that have ``new`` new tokens each and no earlier tokens. ``length`` is the upper bound of their
    lengths."""
    offsets = torch.arange(0, (requests + 1) * new, new, dtype=torch.int32, device=device)
    return TokenspeedMetadata(
        num_actual_tokens=requests * new,
        max_query_len=new,
        query_start_loc=offsets,
        max_seq_len=length,
        seq_lens=torch.full((requests,), new, dtype=torch.int32, device=device),
        block_table=torch.zeros(requests, -(-length // block_size), dtype=torch.int32, device=device),
        slot_mapping=torch.full((requests * new,), -1, dtype=torch.int64, device=device),
        num_decodes=requests if decode else 0,
        decode_query_len=new if decode else 0,
        rest_start_loc=None if decode else offsets,
    )


@torch.inference_mode()
def _attend(layer: Any, batch: TokenspeedMetadata, block_size: int) -> None:
    """Runs a layer's cache write and attention on zeros. The slots are -1, so nothing is written."""
    impl = layer.impl
    shape = impl.shape
    rows = batch.num_actual_tokens
    query = torch.zeros(rows, shape.heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
    key = torch.zeros(rows, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
    # vLLM passes an fp8 cache as uint8.
    stored = torch.uint8 if impl.fp8 else shape.cache_dtype
    cache = torch.zeros(1, block_size, shape.kv_heads, 2 * shape.head_dim, dtype=stored, device=shape.device).transpose(1, 2)
    impl.do_kv_cache_update(layer, key, key, cache, batch.slot_mapping)
    impl.forward(layer, query, key, key, cache, batch, torch.empty_like(query))

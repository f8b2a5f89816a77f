"""Batches of all sizes, which layers attend to before the first request. `sizes` says why."""

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
    """What vLLM's configuration allows.

    Attributes:
        requests, tokens: of a batch.
        length: tokens of a request.
        decode_query_len: new tokens of a request that decodes; more than one with speculative decoding.
    """

    requests: int
    tokens: int
    length: int
    decode_query_len: int = 1


# Layers that were warmed in this process, with their sizes: vLLM may make several builders for a layer.
_warmed: set[tuple[Any, ...]] = set()


def warm_layers(layers: Iterable[Any], block_size: int, largest: Largest) -> None:
    """Lets one layer of each kind write to, and attend to, a cache of one block that all requests share.

    Args:
        layers: vLLM's layers. Those that others serve are left out, and those of which one alike was called before.
        block_size: tokens of a block.
        largest: sizes go up to these.
    """
    for layer in layers:
        kind = (getattr(layer.impl, "shape", None), block_size, largest)
        if isinstance(layer.impl, TokenspeedImpl) and kind not in _warmed:
            _warmed.add(kind)
            with warming(f"attention (window_left={layer.impl.window_left})"):
                for batch in batches(layer.impl.shape.device, block_size, largest):
                    _attend(layer, batch, block_size)


def batches(device: torch.device, block_size: int, largest: Largest) -> Iterator[TokenspeedMetadata]:
    """Requests that decode, and requests that do not, in all sizes; all of their tokens lie in block 0, and none is written.

    Decoding is tried with short and long sequences: kernels go by what the longest could be.
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
    """Requests with so many new tokens each and none before, of which the longest might have length tokens."""
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
    impl = layer.impl
    shape = impl.shape
    rows = batch.num_actual_tokens
    query = torch.zeros(rows, shape.heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
    key = torch.zeros(rows, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
    # vLLM says bytes where keys and values are stored in fewer bits.
    stored = torch.uint8 if impl.fp8 else shape.cache_dtype
    cache = torch.zeros(1, block_size, shape.kv_heads, 2 * shape.head_dim, dtype=stored, device=shape.device).transpose(1, 2)
    impl.do_kv_cache_update(layer, key, key, cache, batch.slot_mapping)
    impl.forward(layer, query, key, key, cache, batch, torch.empty_like(query))

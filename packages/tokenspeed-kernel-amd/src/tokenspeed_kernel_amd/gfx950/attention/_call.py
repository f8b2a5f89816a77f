"""A call of attention to a paged cache, and what the kernels take of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_amd._rows import aligned_rows, deliver, rows, rows_to_write
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature

# What the three operators with a paged cache have in common. Caches may be fp8 where queries are not.
PAGED_SIGNATURES = frozenset(
    format_signature(q=dense_tensor_format(q), k_cache=dense_tensor_format(cache), v_cache=dense_tensor_format(cache))
    for q in (torch.bfloat16, torch.float16)
    for cache in (q, torch.float8_e4m3fn)
)
PAGED_TRAITS = {
    "head_dim": {64, 128},
    "v_head_dim": {64, 128},
    "page_size": {16, 32, 64, 128, 256},
    "scaled": any,
    "logit_cap": any,
    "return_lse": any,
    "sliding_window": any,
    "sinks": any,
}


@dataclass(frozen=True)
class Tile:
    """Query rows and keys that a workgroup of num_warps waves takes at once."""

    m: int
    block_n: int
    num_warps: int


@dataclass(frozen=True)
class Call:
    """Arguments as kernels take them, with defaults and outputs filled in. `called` makes one.

    Attributes:
        q, k_cache, v_cache: with contiguous rows.
        cu_seqlens_q: None where every sequence has exactly max_seqlen_q new tokens.
        max_seqlen_q: at most all tokens.
        softmax_scale: times log2(e) unless there is a logit_cap.
        k_scale, v_scale: of fp8 caches, one for all or one a key head.
        out: what kernels write to, with contiguous rows.
        given: the caller's, which may be another.
        lse: None if nobody wants it.
    """

    q: Tensor
    cu_seqlens_q: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    cache_seqlens: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    is_causal: bool
    window_left: int
    logit_cap: float
    sinks: Tensor | None
    softmax_scale: float
    k_scale: Tensor | None
    v_scale: Tensor | None
    out: Tensor
    given: Tensor | None
    lse: Tensor | None

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    @property
    def batch(self) -> int:
        return self.cache_seqlens.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.kv_heads

    @property
    def fp8(self) -> bool:
        return self.k_cache.dtype != self.q.dtype

    @property
    def empty(self) -> bool:
        return 0 in (self.tokens, self.batch, self.max_seqlen_q)

    @property
    def result(self) -> Tensor | tuple[Tensor, Tensor]:
        """What the caller gets, once everything is launched."""
        out = deliver(self.out, self.given)
        return out if self.lse is None else (out, self.lse)

    def shown(self, tile: Tile, q_len: int) -> int:
        """An upper bound of the keys that q_len new tokens of a sequence look at, in whole blocks."""
        return self.max_seqlen_k if self.window_left < 0 else min(self.max_seqlen_k, self.window_left + q_len + tile.block_n)

    def lengths_at_once(self) -> int:
        """Lengths of sequences that a workgroup looks at together."""
        return 1 if self.batch == 1 else min(1024, max(64, 1 << (self.batch - 1).bit_length()))

    def operands(self) -> tuple[Any, ...]:
        """The first arguments of a kernel. Registers hold the first 16 words when a wave begins: those that it needs at once."""
        return (
            *(self.cu_seqlens_q, self.cache_seqlens, self.page_table, self.k_cache, self.v_cache, self.q),
            *(self.batch, self.max_seqlen_k, self.page_table.stride(0), self.k_cache.stride(1), self.v_cache.stride(1)),
            *(self.softmax_scale, self.logit_cap, self.k_scale, self.v_scale, self.out, self.lse, self.sinks),
        )

    def constants(self) -> dict[str, Any]:
        """What a model and its cache fix."""
        return {
            "kv_heads": self.kv_heads,
            "q_token": self.q.stride(0),
            "q_head": self.q.stride(1),
            "k_page": self.k_cache.stride(0),
            "k_head": self.k_cache.stride(2),
            "v_page": self.v_cache.stride(0),
            "v_head": self.v_cache.stride(2),
            "out_token": self.out.stride(0),
            "out_head": self.out.stride(1),
            "k_scale_head": _scale_stride(self.k_scale),
            "v_scale_head": _scale_stride(self.v_scale),
            "window_left": self.window_left,
            "GROUP": self.group,
            "HEAD_DIM": self.q.shape[2],
            "V_HEAD_DIM": self.v_cache.shape[3],
            "PAGE_SIZE": self.k_cache.shape[1],
            "CAUSAL": self.is_causal,
            "SINKS": self.sinks is not None,
            "CAP": self.logit_cap > 0,
            "LSE": self.lse is not None,
            "ALIKE": self.k_cache.stride() == self.v_cache.stride(),
        }


def called(
    function: str,
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> Call:
    """The call of a public function. Copies what kernels cannot take as it lies, and allocates the outputs.

    Raises:
        ValueError: the cache is not served, though the checks of the public functions let it through.
    """
    page_size = k_cache.shape[1]
    if page_size < 16 or page_size & (page_size - 1):
        raise ValueError(f"{function}: page_size of k_cache must be a power of two, 16 or more, got {page_size}")
    tokens, heads, head_dim = q.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    return Call(
        q=aligned_rows(q),
        cu_seqlens_q=None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
        k_cache=aligned_rows(k_cache),
        v_cache=aligned_rows(v_cache),
        page_table=rows(page_table),
        cache_seqlens=cache_seqlens.contiguous(),
        max_seqlen_q=min(max_seqlen_q, tokens),
        max_seqlen_k=max_seqlen_k,
        is_causal=is_causal,
        window_left=window_left,
        logit_cap=float(logit_cap),
        sinks=None if sinks is None else sinks.contiguous(),
        softmax_scale=scale if logit_cap > 0 else scale * math.log2(math.e),
        k_scale=k_scale,
        v_scale=v_scale,
        out=rows_to_write(out, q, tokens, heads, v_cache.shape[3]),
        given=out,
        lse=q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None,
    )


def _scale_stride(scale: Tensor | None) -> int:
    """How far apart the scales of key heads are; 0 where one is for all."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)

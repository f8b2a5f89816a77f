"""A call of paged-cache attention, and the arguments that launchers pass to its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._rows import deliver, rows, rows_to_write
from tokenspeed_kernel_base.alignment import ROW_BYTES, aligned, aligned_cache
from tokenspeed_kernel_base.signature import FormatSignature, dense_tensor_format, format_signature


def paged_signatures(fp8: torch.dtype) -> frozenset[FormatSignature]:
    """Returns the formats of the operators with a paged cache. Caches may have the dtype ``fp8``; queries may not."""
    return frozenset(
        format_signature(q=dense_tensor_format(q), k_cache=dense_tensor_format(cache), v_cache=dense_tensor_format(cache))
        for q in (torch.bfloat16, torch.float16)
        for cache in (q, fp8)
    )


# Declared by the kernels of the three operators with a paged cache.
PAGED_SIGNATURES = paged_signatures(torch.float8_e4m3fn)
# Operands that are expensive to copy: an unaligned cache would be copied whole.
CACHES = ("k_cache", "v_cache")
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


class TileShape(NamedTuple):
    """The attention tile of a workgroup: compile-time constants.

    Attributes:
        m: query rows (token and query head) of the tile; see `tiles_device`.
        block_n: keys per loop iteration.
        num_warps: waves per workgroup.
        stages: pipeline stages, that is blocks of keys in flight to LDS.
    """

    m: int
    block_n: int
    num_warps: int
    stages: int = 2


class Operands(NamedTuple):
    """Run-time arguments, in the order of the kernel's arguments. The hardware preloads the first 16 words into scalar registers
    when a wave starts, so the arguments that are needed first come first.

    Attributes:
        cu_seqlens_q, cache_seqlens, page_table, k_cache, v_cache, q, sinks: the operator's tensors.
        batch: the number of sequences.
        max_seqlen_k: an upper bound of a sequence's tokens in the cache.
        table_stride: elements from one row of the page table to the next.
        k_token_vectors, v_token_vectors: the caches' stride from one slot of a page to the next, in vectors of 16 bytes. Triton
            infers only whether an argument is a multiple of 16. A stride in elements may be a multiple of 8 but not of 16. Triton
            could then not infer that rows are aligned to 16 bytes.
        scale, cap: the factor of the dot products q @ k, and the logit cap times log2(e), see `score_scaling`.
        k_scale, v_scale: the scales of fp8 caches, or None.
        out, lse: the outputs; lse may be None.
    """

    cu_seqlens_q: Tensor | None
    cache_seqlens: Tensor
    page_table: Tensor
    k_cache: Tensor
    v_cache: Tensor
    q: Tensor
    batch: int
    max_seqlen_k: int
    table_stride: int
    k_token_vectors: int
    v_token_vectors: int
    scale: float
    cap: float
    k_scale: Tensor | None
    v_scale: Tensor | None
    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None


class Shape(NamedTuple):
    """Sizes that are fixed by a model and its cache: compile-time constants. ``gqa_ratio``: query heads per KV head."""

    kv_heads: int
    gqa_ratio: int
    head_dim: int
    v_head_dim: int
    page_size: int


class Strides(NamedTuple):
    """Strides of the tensors from one token, head or page to the next, in elements. A model and its cache fix these strides, so
    they are compile-time constants."""

    q_token: int
    q_head: int
    k_page: int
    k_head: int
    v_page: int
    v_head: int
    out_token: int
    out_head: int
    k_scale_head: int
    v_scale_head: int


class Variant(NamedTuple):
    """The options that a kernel is compiled for: compile-time constants.

    Attributes:
        window_left, is_causal: the operator's arguments.
        capped, sinks, lse: whether there is a logit cap, whether there are sinks, and whether the LSE is requested.
        same_strides: whether k_cache and v_cache have the same strides. Offsets are then computed once for both.
    """

    window_left: int
    is_causal: bool
    capped: bool
    sinks: bool
    lse: bool
    same_strides: bool


def score_scaling(head_dim: int, softmax_scale: float | None, logit_cap: float) -> tuple[float, float]:
    """Returns the factor of the dot products q @ k, and the logit cap times log2(e): the fields of `softmax_device.Scaling`. Both
    are for base-2 exponentials."""
    scale = math.log2(math.e) * (head_dim**-0.5 if softmax_scale is None else softmax_scale)
    return scale * (2 / logit_cap) if logit_cap > 0 else scale, logit_cap * math.log2(math.e)


def lengths_at_once(batch: int) -> int:
    """Returns how many sequences' lengths a workgroup loads at once."""
    return 1 if batch == 1 else min(1024, max(64, 1 << (batch - 1).bit_length()))


@dataclass(frozen=True)
class Call:
    """The arguments of an operator call as the kernels need them, with defaults and outputs filled in. `called` creates a `Call`.

    Attributes:
        q, k_cache, v_cache: the operator's tensors, with contiguous rows.
        cu_seqlens_q: None if every sequence has exactly max_seqlen_q new tokens.
        max_seqlen_q: the operator's argument, but at most the number of tokens in the batch.
        scale, cap: the factor of the dot products q @ k, and the logit cap times log2(e), see `score_scaling`.
        k_scale, v_scale: the scales of fp8 caches, one for all KV heads or one per KV head; or None.
        out: the tensor that kernels write to, with contiguous rows.
        given: the caller's ``out``, which may be another tensor.
        lse: the LSE output; None if not requested.
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
    scale: float
    cap: float
    sinks: Tensor | None
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
    def gqa_ratio(self) -> int:
        return self.q.shape[1] // self.kv_heads

    @property
    def fp8(self) -> bool:
        return self.k_cache.dtype != self.q.dtype

    @property
    def empty(self) -> bool:
        return 0 in (self.tokens, self.batch, self.max_seqlen_q)

    @property
    def result(self) -> Tensor | tuple[Tensor, Tensor]:
        """What the operator returns: the output, and the LSE if requested. Read this property only after all kernels are launched,
        because it may enqueue a copy to the caller's ``out``."""
        out = deliver(self.out, self.given)
        return out if self.lse is None else (out, self.lse)

    def keys_in_view(self, tile: TileShape, q_len: int) -> int:
        """Returns an upper bound of the number of keys that the q_len new tokens of a sequence see. With a window, one block is
        added, because the kernel starts at an aligned position."""
        return self.max_seqlen_k if self.window_left < 0 else min(self.max_seqlen_k, self.window_left + q_len + tile.block_n)

    def operands(self) -> Operands:
        """Returns the kernel's run-time arguments."""
        vector = ROW_BYTES // self.k_cache.element_size()
        return Operands(
            cu_seqlens_q=self.cu_seqlens_q,
            cache_seqlens=self.cache_seqlens,
            page_table=self.page_table,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            q=self.q,
            batch=self.batch,
            max_seqlen_k=self.max_seqlen_k,
            table_stride=self.page_table.stride(0),
            k_token_vectors=self.k_cache.stride(1) // vector,
            v_token_vectors=self.v_cache.stride(1) // vector,
            scale=self.scale,
            cap=self.cap,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            out=self.out,
            lse=self.lse,
            sinks=self.sinks,
        )

    def constants(self) -> tuple[Shape, Strides, Variant]:
        """Returns the kernel's compile-time constants."""
        k_page, _, k_head, _ = self.k_cache.stride()
        v_page, _, v_head, _ = self.v_cache.stride()
        return (
            Shape(self.kv_heads, self.gqa_ratio, self.q.shape[2], self.v_cache.shape[3], self.k_cache.shape[1]),
            Strides(
                *(self.q.stride(0), self.q.stride(1), k_page, k_head, v_page, v_head, self.out.stride(0), self.out.stride(1)),
                *(_scale_stride(self.k_scale), _scale_stride(self.v_scale)),
            ),
            Variant(
                window_left=self.window_left,
                is_causal=self.is_causal,
                capped=self.cap > 0,
                sinks=self.sinks is not None,
                lse=self.lse is not None,
                same_strides=self.k_cache.stride() == self.v_cache.stride(),
            ),
        )


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
    """Makes the `Call` of the operator ``function``: copies tensors with unsupported strides, and allocates the outputs.

    Raises:
        ValueError: the page size is not supported.
    """
    page_size = k_cache.shape[1]
    if page_size < 16 or page_size & (page_size - 1):
        raise ValueError(f"{function}: page_size of k_cache must be a power of two, 16 or more, got {page_size}")
    tokens, heads, head_dim = q.shape
    scale, cap = score_scaling(head_dim, softmax_scale, logit_cap)
    return Call(
        q=aligned(q),
        cu_seqlens_q=None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
        k_cache=aligned_cache(k_cache, CACHES[0]),
        v_cache=aligned_cache(v_cache, CACHES[1]),
        page_table=rows(page_table),
        cache_seqlens=cache_seqlens.contiguous(),
        max_seqlen_q=min(max_seqlen_q, tokens),
        max_seqlen_k=max_seqlen_k,
        is_causal=is_causal,
        window_left=window_left,
        scale=scale,
        cap=cap,
        sinks=None if sinks is None else sinks.contiguous(),
        k_scale=k_scale,
        v_scale=v_scale,
        out=rows_to_write(out, q, tokens, heads, v_cache.shape[3]),
        given=out,
        lse=q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None,
    )


def _scale_stride(scale: Tensor | None) -> int:
    """Returns the stride of the cache scales between KV heads; 0 if all KV heads share one scale."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)

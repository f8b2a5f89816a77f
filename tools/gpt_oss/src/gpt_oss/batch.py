"""The input of one forward pass: concatenated chunks of sequences (class `Piece`)."""

from __future__ import annotations

import enum
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tokenspeed_kernel
from gpt_oss.cache import PagedKVCache
from gpt_oss.transfer import sent, to_device


class Phase(enum.Enum):
    """The kind of a batch. It depends on the keys to which the chunks attend, and determines the attention operator."""

    PREFILL = "prefill"  # every chunk begins its sequence, so the chunk attends only to itself
    EXTEND = "extend"  # prompt chunks; some have earlier tokens in the cache. The operator can run any chunks
    MIXED = "mixed"  # prompt chunks beside decoding sequences, of any lengths. The operator can run any chunks
    DECODE = "decode"  # every chunk is one token with earlier tokens in the cache


@dataclass(frozen=True)
class Piece:
    """A chunk of a pass: consecutive tokens of one sequence.

    Attributes:
        tokens: the token ids.
        start: position of the first token. Keys and values of earlier tokens are already in the cache.
        pages: the sequence's pages in order; at least as many as the sequence needs with this chunk.
    """

    tokens: Sequence[int]
    start: int = 0
    pages: Sequence[int] = ()

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """The tensors of a forward pass, on the model's device. The pass has n tokens in b chunks.

    Attributes:
        phase: the kind of the batch, see `Phase`.
        tokens: int64 ``[n]``, the token ids.
        positions: int64 ``[n]``, the position of each token in its own sequence.
        cu_seqlens_q: int32 ``[b + 1]``, cumulative lengths of the chunks; None if the phase is decode.
        cu_seqlens_kv: int32 ``[b + 1]``, cumulative numbers of keys to which the chunks attend, the chunks themselves included;
            None if the phase is decode.
        cache_seqlens: int32 ``[b]``, number of each sequence's tokens in the cache after this pass, including the pass's own
            tokens.
        max_seqlen_q: length of the longest chunk.
        max_seqlen_k: upper bound of ``cache_seqlens``, a whole number of pages.
        slot_mapping: int64 ``[n]``, the cache slot to which each token's keys and values are written; None without a cache.
        page_table: int32 ``[b, pages]``, the pages of each sequence; None without a cache.
        logit_rows: int64 ``[rows]``, the indices of the tokens whose logits are returned; None for all tokens.
    """

    phase: Phase
    tokens: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cache_seqlens: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    slot_mapping: Tensor | None
    page_table: Tensor | None
    logit_rows: Tensor | None


def phase_of(pieces: Sequence[Piece]) -> Phase:
    """Returns the most specific phase that can run these chunks."""
    if all(piece.start == 0 for piece in pieces):
        return Phase.PREFILL
    decoding = [piece.start > 0 and len(piece.tokens) == 1 for piece in pieces]
    return Phase.DECODE if all(decoding) else Phase.MIXED if any(decoding) else Phase.EXTEND


def make_batch(
    pieces: Sequence[Piece],
    cache: PagedKVCache | None,
    device: torch.device | str,
    logits_of: Sequence[int] | None = None,
    phase: Phase | None = None,
    ops: Any = tokenspeed_kernel,
) -> Batch:
    """Creates the tensors of a pass over chunks.

    Args:
        pieces: the chunks; at least one, and none empty.
        cache: the KV cache; None for a pass without a cache. Every chunk must then start at position 0.
        device: the model's device.
        logits_of: indices of the chunks whose last token's logits are returned; None for all tokens of all chunks.
        phase: overrides the result of `phase_of`. Extend and mixed can run any chunks.
        ops: the operators: the public API, or a recording wrapper.

    Raises:
        ValueError: there are no chunks, one is empty, or one has earlier tokens and there is no cache.
    """
    if not pieces or any(not piece.tokens for piece in pieces):
        raise ValueError("a batch needs at least one piece, and pieces need at least one token")
    if cache is None and any(piece.start for piece in pieces):
        raise ValueError("without a cache every piece must start at position 0")

    def ints(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return to_device(values, dtype, device)

    def cumulative(lengths: Sequence[int]) -> list[int]:
        sums = [0]
        for length in lengths:
            sums.append(sums[-1] + length)
        return sums

    phase = phase or phase_of(pieces)
    decodes = phase is Phase.DECODE
    ends = cumulative([len(piece.tokens) for piece in pieces])
    page_size = cache.page_size if cache is not None else 1
    # No Python loop runs over positions. Long prompts have many positions, and the device would wait for the loop.
    tokens = torch.frombuffer(array("q", itertools.chain.from_iterable(piece.tokens for piece in pieces)), dtype=torch.int64)
    positions = sent(torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces]), device)
    cu_seqlens_q = None if decodes else ints(ends, torch.int32)
    page_table = slots = None
    if cache is not None:
        page_table = cache.page_table([piece.pages for piece in pieces])
        slots = ops.positions_to_slots(positions, page_table, page_size, cu_seqlens_q)
    return Batch(
        phase=phase,
        tokens=sent(tokens, device),
        positions=positions,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=None if decodes else ints(cumulative([piece.stop for piece in pieces]), torch.int32),
        cache_seqlens=ints([piece.stop for piece in pieces], torch.int32),
        max_seqlen_q=max(len(piece.tokens) for piece in pieces),
        # The bound is rounded up to whole pages, because operators memoise decisions by arguments. A bound that grew with every
        # token would need a new decision at every decode step.
        max_seqlen_k=max(-(-piece.stop // page_size) * page_size for piece in pieces),
        slot_mapping=slots,
        page_table=page_table,
        logit_rows=None if logits_of is None else ints([ends[piece + 1] - 1 for piece in logits_of]),
    )

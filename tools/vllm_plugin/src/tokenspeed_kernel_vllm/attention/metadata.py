"""The metadata of a batch for attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class TokenspeedMetadata:
    """The metadata of a batch. The decode requests come first, all with the same number of new tokens; then the other requests.

    The tensors are vLLM's own persistent buffers. So a captured graph reads the values that a later step writes to these buffers.

    Attributes:
        num_actual_tokens: number of valid query rows, including those of a captured batch's padding requests.
        max_query_len: the largest number of new tokens of a request.
        query_start_loc: int32 ``[num_reqs + 1]``, the first query row of each request, and the end.
        max_seq_len: an upper bound of seq_lens.
        seq_lens: int32 ``[num_reqs]``, the length of each request, including new tokens; 0 for padding requests.
        block_table: int32 ``[num_reqs, max_blocks]``, the cache blocks of each request.
        slot_mapping: int64 ``[num_actual_tokens]``, the cache slot of each token; -1 for padding.
        num_decodes: number of decode requests.
        decode_query_len: number of new tokens of each decode request.
        rest_start_loc: like query_start_loc, for the requests that do not decode, relative to their first token; None if there are
            none.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_decodes: int
    decode_query_len: int
    rest_start_loc: Tensor | None

    @property
    def num_decode_tokens(self) -> int:
        """The number of query rows of decode requests."""
        return self.num_decodes * self.decode_query_len

    @property
    def all_decode(self) -> bool:
        """Whether all requests decode."""
        return self.num_decodes == len(self.seq_lens)

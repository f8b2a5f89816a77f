"""What attention is told about a batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class TokenspeedMetadata:
    """A batch: first requests that decode, all with the same number of new tokens, then the others.

    The tensors are vLLM's own, which it keeps from step to step, so that a captured graph reads what the next step writes there.

    Attributes:
        num_actual_tokens: rows of the query that count. Those of requests that only pad a captured batch are among them.
        max_query_len: the most new tokens of a request.
        query_start_loc: int32 ``[num_reqs + 1]``.
        max_seq_len: an upper bound of seq_lens.
        seq_lens: int32 ``[num_reqs]``, new tokens included; 0 for requests that only pad.
        block_table: int32 ``[num_reqs, max_blocks]``.
        slot_mapping: int64 ``[num_actual_tokens]``, -1 for padding.
        num_decodes: how many requests decode.
        decode_query_len: new tokens of each of them.
        rest_start_loc: query_start_loc of the other requests, counted from the first of their tokens; None if there is none.
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
        """Rows of the query that belong to requests that decode."""
        return self.num_decodes * self.decode_query_len

    @property
    def all_decode(self) -> bool:
        """Whether no request does anything else."""
        return self.num_decodes == len(self.seq_lens)

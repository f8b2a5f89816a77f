"""Builds the metadata of latent attention: vLLM's own metadata, and further fields that the decode kernels need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

# Requests with at most this many new tokens attend to the cached latents themselves; longer requests attend to expanded keys and
# values. In DeepSeek-V3, expanding a cached token takes 2 * 512 * 256 FLOPs per head. For each new token and head, attention to the
# latent takes 2 * (1088 - 320) FLOPs more than attention to expanded keys and values. Both ways cost the same at 170 new tokens.
SHORT = 128


@dataclass
class LatentDecodeMetadata(MLACommonDecodeMetadata):
    """The metadata of the requests with few new tokens.

    Attributes:
        query_start_loc: int32 ``[num_decodes + 1]``, the first query row of each of these requests, and the end.
        max_query_len: the largest number of new tokens of these requests.
        max_seq_len: an upper bound of the lengths of these requests.
        uniform: whether each of these requests, including padding of a captured batch, has max_query_len query rows.
    """

    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    uniform: bool


class LatentMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Builds the metadata of each step. Nothing here synchronises with the device."""

    # Decode batches in which all requests have the same number of new tokens are captured whole. Other batches cannot be captured
    # whole, because vLLM's own metadata of prompts has the numbers of chunks on the host.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = SHORT

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
        max_query_len: Any = None,
    ) -> LatentDecodeMetadata:
        """Overrides vLLM's method, which passes the requests with at most `SHORT` new tokens. They come first in the batch."""
        longest = int(query_start_loc_cpu.diff().max())
        return LatentDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=longest,
            # vLLM captures graphs with the length of the model's longest sequence, which may exceed the block table's capacity.
            max_seq_len=min(max_seq_len, block_table_tensor.shape[1] * self.page_size),
            uniform=num_decode_tokens == len(seq_lens_device) * longest,
        )

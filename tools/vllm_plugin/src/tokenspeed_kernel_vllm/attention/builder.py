"""Builds the attention metadata of a batch from vLLM's metadata. Nothing here synchronises with the device."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from tokenspeed_kernel_vllm.attention.impl import TokenspeedImpl
from tokenspeed_kernel_vllm.attention.metadata import TokenspeedMetadata
from tokenspeed_kernel_vllm.attention.warmup import Largest, warm_layers
from tokenspeed_kernel_vllm.settings import read_settings


class TokenspeedMetadataBuilder(AttentionMetadataBuilder[TokenspeedMetadata]):
    """Builds the attention metadata of each step."""

    supports_update_block_table = True

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._mixed_as_one = _serves_mixed(vllm_config)
        # Decode requests come first. With speculative decoding, requests that verify a draft count as decode requests if the decode
        # kernels support several new tokens.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=_serves_drafts(vllm_config))
        if device.type != "cpu" and read_settings().warmup:  # no compilation on a CPU
            layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
            warm_layers(layers.values(), kv_cache_spec.block_size, _largest(vllm_config, self.reorder_batch_threshold))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Returns which batches can be captured whole: at least those in which all requests have the same number of new tokens.

        Mixed batches can be captured whole if one kernel handles mixed batches, because this kernel does not touch the padding rows
        of a captured batch. If one kernel handles decode requests and another kernel handles the other requests, the host must know
        the number of each. vLLM then captures mixed batches piecewise, with attention outside the graphs.
        """
        if _serves_mixed(vllm_config):
            return AttentionCGSupport.ALWAYS
        if vllm_config.speculative_config is None or _serves_drafts(vllm_config):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TokenspeedMetadata:
        """Returns the metadata of a step. Cascade attention is never used: a common prefix is handled like any other part of the
        cache.

        Raises:
            ValueError: the batch needs an unsupported feature. The message names the feature.
        """
        common = common_attn_metadata
        _refuse_what_is_not_served(common)
        decodes, _, decode_tokens, rest_tokens = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold, require_uniform=True
        )
        if self._mixed_as_one and common.max_query_len > self.reorder_batch_threshold:
            # vLLM captures a graph of mixed batches with one-token requests, but replays the graph for requests with more tokens.
            decodes, decode_tokens, rest_tokens = 0, 0, common.num_actual_tokens
        offsets = common.query_start_loc
        if rest_tokens == 0:
            rest = None
        else:
            rest = offsets if decodes == 0 else offsets[decodes:] - decode_tokens
        return TokenspeedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=offsets,
            # vLLM captures graphs with the length of the model's longest sequence, which may exceed the capacity of the block
            # table.
            max_seq_len=min(common.max_seq_len, common.block_table_tensor.shape[1] * self.kv_cache_spec.block_size),
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            num_decodes=decodes,
            decode_query_len=decode_tokens // decodes if decodes else 0,
            rest_start_loc=rest,
        )

    def update_block_table(self, metadata: TokenspeedMetadata, blk_table: Tensor, slot_mapping: Tensor) -> TokenspeedMetadata:
        """Returns the metadata of the same batch for layers with another cache, with the block table of that cache."""
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


def _ours(vllm_config: VllmConfig) -> list[TokenspeedImpl]:
    impls = [layer.impl for layer in get_layers_from_vllm_config(vllm_config, Attention).values()]
    return [impl for impl in impls if isinstance(impl, TokenspeedImpl)]


def _serves_mixed(vllm_config: VllmConfig) -> bool:
    """Returns whether every layer has a kernel for mixed batches."""
    return all(impl.serving.mixed is not None for impl in _ours(vllm_config))


def _serves_drafts(vllm_config: VllmConfig) -> bool:
    """Returns whether every layer's decode kernel supports as many new tokens as a draft has, plus one."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.num_speculative_tokens is None:
        return False
    return all(impl.serves_decode(1 + speculative.num_speculative_tokens) for impl in _ours(vllm_config))


def _largest(vllm_config: VllmConfig, decode_query_len: int) -> Largest:
    """Returns the largest batch that the scheduler makes, for the warm-up."""
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    tokens = scheduler.max_num_batched_tokens
    return Largest(min(scheduler.max_num_seqs, tokens), tokens, model.max_model_len, decode_query_len)


def _refuse_what_is_not_served(common: CommonAttentionMetadata) -> None:
    """Raises ValueError, with the feature's name, if a batch needs a feature that no kernel has."""
    asked = {
        "attention to later tokens (causal is not True)": common.causal is not True,
        "sequences divided among ranks (dcp_local_seq_lens)": common.dcp_local_seq_lens is not None,
        "spans that see all of themselves (mm_req_doc_ranges)": common.mm_req_doc_ranges is not None,
        "prompts that windows leave visible (rswa_prefix_lens)": common.rswa_prefix_lens is not None,
        "attention to an encoder (encoder_seq_lens)": common.encoder_seq_lens is not None,
    }
    for feature, wanted in asked.items():
        if wanted:
            raise ValueError(f"tokenspeed_kernel_vllm has no kernel for {feature}; choose another attention backend")

"""The capabilities of the backend of latent attention, which vLLM queries before it builds a layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonBackend

from tokenspeed_kernel_vllm.attention.impl import FP8_CACHES
from tokenspeed_kernel_vllm.attention.serving import PAGE_SIZES
from tokenspeed_kernel_vllm.mla.builder import LatentMetadataBuilder
from tokenspeed_kernel_vllm.mla.impl import LatentImpl


class LatentBackend(MLACommonBackend):
    """Latent attention of decoders over a paged cache: ``--attention-backend CUSTOM`` with ``TOKENSPEED_VLLM_MLA=1``.

    `LatentImpl` checks whether a kernel is eligible for a layer when the layer is built.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8_CACHES]

    @staticmethod
    def get_name() -> str:
        """Returns the name under which this backend is registered with vLLM."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        """Returns the class that runs a layer's attention."""
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        """Returns the class that builds a batch's metadata."""
        return LatentMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Returns the supported numbers of tokens per page, for every layer."""
        return list(PAGE_SIZES)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Returns the number of tokens per page for which the layers have the best kernels. vLLM asks after it has built the model,
        unless the user has chosen a size.
        """
        layers = get_layers_from_vllm_config(get_current_vllm_config(), MLAAttention)
        sizes = {layer.impl.serving.page_size for layer in layers.values() if isinstance(layer.impl, LatentImpl)}
        return max(sizes, default=default_block_size)

    @classmethod
    def supports_dcp(cls) -> bool:
        """Returns False: decode context parallelism (DCP) would need an LSE merge across ranks, which is not implemented."""
        return False

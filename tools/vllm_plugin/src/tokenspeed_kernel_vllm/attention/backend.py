"""What the attention backend can do, as vLLM asks for it before it builds a layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from tokenspeed_kernel_vllm.attention.builder import TokenspeedMetadataBuilder
from tokenspeed_kernel_vllm.attention.impl import FP8_CACHES, TokenspeedImpl
from tokenspeed_kernel_vllm.attention.serving import PAGE_SIZES

# Which of blocks, heads, tokens and content comes first in memory: the axes of `get_kv_cache_shape`, by vLLM's name for the order.
# With layers in one tensor, they are counted from 1, and 0 is the layer.
_ORDERS = {
    "NHD": ((0, 2, 1, 3), (1, 0, 3, 2, 4)),
    "HND": ((0, 1, 2, 3), (1, 2, 0, 3, 4)),
}


class TokenspeedBackend(AttentionBackend):
    """Attention of decoders over a paged cache: ``--attention-backend CUSTOM``.

    What is said here holds for kernels of any package. Whether one serves a layer's head size, heads, dtypes and options is asked
    when the layer is built: `TokenspeedImpl`.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8_CACHES]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """vLLM finds its entry for the backend by this name."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TokenspeedImpl]:
        """What attends."""
        return TokenspeedImpl

    @staticmethod
    def get_builder_cls() -> type[TokenspeedMetadataBuilder]:
        """What describes batches."""
        return TokenspeedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Tokens of a page, whatever the layer."""
        return list(PAGE_SIZES)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The cache of a layer; a key and its value lie side by side."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The axes of the cache in the order in which they lie in memory. Kernels go by strides, so that either of vLLM's does.

        Newer releases decide the shape and the order themselves, and ask for neither.
        """
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        return _ORDERS[get_kv_cache_layout()][include_num_layers_dimension]

    @classmethod
    def supports_sink(cls) -> bool:
        """One more score a head in the softmax's denominator."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Layers that see so many tokens back."""
        return True

    @classmethod
    def supports_dcp(cls) -> bool:
        """Sequences that are divided among ranks would have to be merged by their log-sum-exp, which is not done here."""
        return False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """TMA and vector loads want rows of whole 16 bytes; which sizes above that are served is for kernels to say."""
        return head_size % 16 == 0

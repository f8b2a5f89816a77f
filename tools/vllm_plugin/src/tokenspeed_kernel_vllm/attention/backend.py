"""The attention backend's capabilities, which vLLM queries before it builds a layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from tokenspeed_kernel_vllm.attention.builder import TokenspeedMetadataBuilder
from tokenspeed_kernel_vllm.attention.impl import FP8_CACHES, TokenspeedImpl
from tokenspeed_kernel_vllm.attention.serving import PAGE_SIZES

# Maps vLLM's name of a memory order to the axes of `get_kv_cache_shape` (blocks, heads, tokens, content) in this order. The second
# tuple is for a tensor that contains all layers: axis 0 is the layer, and the other axes are counted from 1.
_ORDERS = {
    "NHD": ((0, 2, 1, 3), (1, 0, 3, 2, 4)),
    "HND": ((0, 1, 2, 3), (1, 2, 0, 3, 4)),
}


class TokenspeedBackend(AttentionBackend):
    """Attention of decoders over a paged cache: ``--attention-backend CUSTOM``.

    These capabilities hold for kernels of any package. `TokenspeedImpl` checks whether a kernel is eligible for a layer's head
    size, heads, dtypes and options when the layer is built.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8_CACHES]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Returns the name under which this backend is registered with vLLM."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TokenspeedImpl]:
        """Returns the class that runs a layer's attention."""
        return TokenspeedImpl

    @staticmethod
    def get_builder_cls() -> type[TokenspeedMetadataBuilder]:
        """Returns the class that builds a batch's metadata."""
        return TokenspeedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Returns the supported numbers of tokens per page, for every layer."""
        return list(PAGE_SIZES)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Returns the shape of a layer's cache. Each slot holds a key followed by its value."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Returns the axes of the cache in memory order. Kernels use strides, so both of vLLM's orders work.

        Newer releases of vLLM decide the shape and the order themselves, and call neither this function nor `get_kv_cache_shape`.
        """
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        return _ORDERS[get_kv_cache_layout()][include_num_layers_dimension]

    @classmethod
    def supports_sink(cls) -> bool:
        """Returns True: a sink, an additional score per head in the softmax's denominator, is supported."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Returns True: sliding-window layers are supported."""
        return True

    @classmethod
    def supports_dcp(cls) -> bool:
        """Returns False: decode context parallelism (DCP) would need an LSE merge across ranks, which is not implemented."""
        return False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Returns whether kernels may support a head size. TMA and vector loads need rows whose size is a multiple of 16 bytes, in
        any dtype. The kernels decide which of these head sizes they support.
        """
        return head_size % 16 == 0

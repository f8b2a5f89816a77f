"""A layer's attention: writes new keys and values to the cache, and runs attention over it.

Hook: vLLM's `AttentionImpl`. vLLM computes q, k and v (projections, rotary embedding) and allocates the cache; this class does the
rest of the layer's attention up to the output projection. A batch has decode requests first, then all other requests. One call runs
all of them if the package has a kernel for mixed batches; otherwise one call runs the decode requests and another the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from tokenspeed_kernel_vllm.attention.metadata import TokenspeedMetadata
from tokenspeed_kernel_vllm.attention.serving import LayerShape, find_serving, serves_decode
from tokenspeed_kernel_vllm.settings import read_settings

FP8_CACHES = ("fp8", "fp8_e4m3")


class TokenspeedImpl(AttentionImpl):
    """One layer's attention. vLLM calls `do_kv_cache_update` to write the cache, then `forward`."""

    # Decode context parallelism would need an LSE merge across ranks, which is not implemented.
    supports_dcp = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Finds the kernels of the layer. A vLLM window of 128 tokens includes the token itself; ``window_left`` does not.

        Raises:
            ValueError: the layer has an unsupported feature. If no kernel supports it, the message has each kernel's reason.
        """
        if alibi_slopes is not None:
            raise ValueError("tokenspeed_kernel_vllm has no kernel for alibi_slopes; choose another attention backend")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"tokenspeed_kernel_vllm serves attention of decoders, not of type {attn_type}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = None
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.logits_soft_cap = float(logits_soft_cap or 0.0)
        self.sinks = sinks
        # vLLM builds a model with the model's dtype as PyTorch's default dtype, on the model's device.
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        if kv_cache_dtype not in ("auto", str(dtype).removeprefix("torch."), *FP8_CACHES):
            raise ValueError(f"tokenspeed_kernel_vllm serves caches of the model's {dtype} or fp8, not of {kv_cache_dtype}")
        self.fp8 = kv_cache_dtype in FP8_CACHES
        self.fp8_dtype = current_platform.fp8_dtype()
        self.shape = LayerShape(
            heads=num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=head_size,
            dtype=dtype,
            cache_dtype=self.fp8_dtype if self.fp8 else dtype,
            window_left=self.window_left,
            logit_cap=self.logits_soft_cap,
            sinks=sinks is not None,
            device=device,
        )
        self.serving = find_serving(self.shape, read_settings().package)
        self._options: dict[str, Any] = {
            "window_left": self.window_left,
            "logit_cap": self.logits_soft_cap,
            "softmax_scale": self.scale,
        }

    def serves_decode(self, tokens: int) -> bool:
        """Returns whether the decode kernel supports requests with this many new tokens each."""
        return serves_decode(self.serving, self.shape, tokens)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TokenspeedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Runs attention over the cache, which already contains the new keys and values.

        Args:
            layer: vLLM's layer. It has the scales of an fp8 cache.
            query: ``[rows, heads, head_size]``; rows after the batch's tokens are padding.
            key, value: not read.
            kv_cache: ``[blocks, kv_heads, block_size, 2 * head_size]``, in any order in memory.
            attn_metadata: the batch; None while vLLM profiles the memory of a step.
            output: ``[rows, heads, head_size]``; only the tokens' rows are written.

        Returns:
            output.

        Raises:
            NotImplementedError: vLLM requests a quantised output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("tokenspeed_kernel_vllm does not quantise the output of attention")
        if attn_metadata is None:
            return output.zero_()
        batch, serving = attn_metadata, self.serving
        k_cache, v_cache = self._caches(kv_cache)
        options = {"k_cache": k_cache, "v_cache": v_cache, "sinks": self.sinks, "max_seqlen_k": batch.max_seq_len, **self._options}
        if self.fp8:
            options |= {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        if batch.num_decodes and (batch.all_decode or serving.mixed is None):
            rows = slice(0, batch.num_decode_tokens)
            serving.decode(
                query[rows],
                page_table=batch.block_table[: batch.num_decodes],
                cache_seqlens=batch.seq_lens[: batch.num_decodes],
                max_seqlen_q=batch.decode_query_len,
                out=output[rows],
                **options,
            )
        if batch.all_decode:
            return output
        if serving.mixed is not None:
            rows = slice(0, batch.num_actual_tokens)
            serving.mixed(
                query[rows],
                batch.query_start_loc,
                page_table=batch.block_table,
                cache_seqlens=batch.seq_lens,
                max_seqlen_q=batch.max_query_len,
                out=output[rows],
                **options,
            )
        elif serving.extend is not None:
            rows = slice(batch.num_decode_tokens, batch.num_actual_tokens)
            serving.extend(
                query[rows],
                batch.rest_start_loc,
                None,
                page_table=batch.block_table[batch.num_decodes :],
                cache_seqlens=batch.seq_lens[batch.num_decodes :],
                max_seqlen_q=batch.max_query_len,
                is_causal=True,
                out=output[rows],
                **options,
            )
        return output

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Writes new keys and values to their cache slots. Tokens with a negative slot are skipped.

        Args:
            layer: vLLM's layer. It has the scales of an fp8 cache.
            key, value: ``[rows, kv_heads, head_size]``; rows beyond the length of slot_mapping are padding.
            kv_cache: the cache to write to, see `forward`.
            slot_mapping: int64 ``[tokens]``.
        """
        if self.serving.store is None:
            from vllm._custom_ops import reshape_and_cache_flash

            k_bytes, v_bytes = torch.split(kv_cache.transpose(1, 2), self.head_size, -1)
            reshape_and_cache_flash(key, value, k_bytes, v_bytes, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale)
            return
        tokens = len(slot_mapping)
        k_cache, v_cache = self._caches(kv_cache)
        scales = (layer._k_scale, layer._v_scale) if self.fp8 else (None, None)
        self.serving.store(key[:tokens], value[:tokens], k_cache, v_cache, slot_mapping, *scales)

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Returns views of a layer's cache as keys and values, ``[blocks, block_size, kv_heads, head_size]`` each."""
        if self.fp8:  # vLLM passes an fp8 cache as uint8
            kv_cache = kv_cache.view(self.fp8_dtype)
        k_cache, v_cache = torch.split(kv_cache.transpose(1, 2), self.head_size, -1)
        return k_cache, v_cache

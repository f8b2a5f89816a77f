"""A layer's latent attention: writes latents to the cache, and runs attention over the cached latents.

Hook: vLLM's `MLACommonImpl`. vLLM absorbs the key expansion into the queries, expands values, and splits a batch: requests with few
new tokens attend to the latents here (`forward_mqa`), longer ones to expanded keys and values (`mla.prefill` if it is selected,
otherwise vLLM's own backend).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl, MLACommonMetadata
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

from tokenspeed_kernel_base.served_latent import LatentShape
from tokenspeed_kernel_vllm.attention.impl import FP8_CACHES
from tokenspeed_kernel_vllm.mla.serving import SWITCH, find_latent
from tokenspeed_kernel_vllm.settings import WHY_OFF, read_settings

logger = init_logger("vllm.plugins.tokenspeed_kernel")


class LatentImpl(MLACommonImpl[MLACommonMetadata]):
    """One layer's attention. vLLM applies the key expansion to queries before `forward_mqa`, and the value expansion after it."""

    # Decode context parallelism would need an LSE merge across ranks, which is not implemented.
    supports_dcp = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **options: Any,
    ) -> None:
        """Finds the kernels of the layer.

        Raises:
            ValueError: the layer has an unsupported feature. If no kernel supports it, the message has each kernel's reason.
        """
        parallel = get_current_vllm_config().parallel_config
        refused = {
            "alibi_slopes": alibi_slopes is not None,
            "sliding windows of latent attention": sliding_window is not None,
            "soft caps of latent attention": bool(logits_soft_cap),
            f"latent attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "sparse attention (an indexer)": options.get("indexer") is not None,
            "sequences divided among ranks (decode context parallelism)": parallel.decode_context_parallel_size > 1,
        }
        for feature, asked in refused.items():
            if asked:
                raise ValueError(f"tokenspeed_kernel_vllm does not serve {feature}; choose another attention backend")
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, **options,
        )  # fmt: skip
        dtype = torch.get_default_dtype()
        if kv_cache_dtype not in ("auto", str(dtype).removeprefix("torch."), *FP8_CACHES):
            raise ValueError(f"tokenspeed_kernel_vllm serves caches of the model's {dtype} or fp8, not of {kv_cache_dtype}")
        # With an fp8 cache, queries keep the model's dtype, because this is more accurate than rounding the queries to fp8.
        self.supports_quant_query_input = False
        self.fp8 = kv_cache_dtype in FP8_CACHES
        self.fp8_dtype = current_platform.fp8_dtype()
        shape = LatentShape(
            heads=num_heads,
            kv_lora_rank=self.kv_lora_rank,
            rope_dim=self.qk_rope_head_dim,
            dtype=dtype,
            cache_dtype=self.fp8_dtype if self.fp8 else dtype,
            device=torch.get_default_device(),
        )
        self.serving = find_latent(shape, read_settings().package)
        text = "tokenspeed_kernel_vllm: latent attention by %s (%s; off by default: %s)"
        logger.info_once(text, ", ".join(self.serving.kernels), SWITCH, WHY_OFF[SWITCH])

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        *options: Any,
    ) -> None:
        """Writes latents and their rotary parts to their cache slots. Tokens with a negative slot are skipped.

        Args:
            kv_c_normed: ``[rows, kv_lora_rank]``; rows beyond the length of slot_mapping are padding.
            k_pe: ``[rows, 1, rope_dim]`` or ``[rows, rope_dim]``.
            kv_cache: ``[blocks, block_size, kv_lora_rank + rope_dim]``; empty while vLLM profiles.
            slot_mapping: int64 ``[tokens]``.
            kv_cache_dtype, options: for vLLM's own function.
            k_scale: the scale of an fp8 cache.
        """
        if self.serving.store is None:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *options)
            return
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten()
        rows = slice(0, len(slots))
        cache = kv_cache.view(self.fp8_dtype) if self.fp8 else kv_cache  # vLLM passes an fp8 cache as uint8
        k_rope = k_pe.view(len(k_pe), -1)
        self.serving.store(kv_c_normed[rows], k_rope[rows], cache, slots, k_scale if self.fp8 else None)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: MLACommonMetadata, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Runs attention over the cached latents, which already contain those of the new tokens.

        Args:
            q: ``[tokens, heads, kv_lora_rank + rope_dim]``, or its two parts as a tuple.
            kv_c_and_k_pe_cache: the cache, in its own dtype.
            attn_metadata: the batch.
            layer: vLLM's layer. It has the scale of an fp8 cache.

        Returns:
            ``[tokens, heads, kv_lora_rank]``, and None for the log-sum-exp, which only decode context parallelism reads.
        """
        batch: Any = attn_metadata.decode
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        options = {
            "kv_cache": kv_c_and_k_pe_cache,
            "page_table": batch.block_table,
            "cache_seqlens": batch.seq_lens,
            "max_seqlen_q": batch.max_query_len,
            "max_seqlen_k": batch.max_seq_len,
            "kv_lora_rank": self.kv_lora_rank,
            "softmax_scale": self.scale,
            "kv_scale": layer._k_scale if self.fp8 else None,
        }
        if batch.uniform:
            return self.serving.decode(q, **options), None
        return self.serving.extend(q, batch.query_start_loc, None, is_causal=True, **options), None

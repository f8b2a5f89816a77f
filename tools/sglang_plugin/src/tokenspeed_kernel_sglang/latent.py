"""SGLang's attention backend ``tokenspeed`` for multi-head latent attention (DeepSeek, Kimi).

Each layer of such a model has two `RadixAttention` layers. Which of these the model calls depends on the batch, and on the name of
the attention backend. Under a name that SGLang does not know, and under ``triton``, prompts without a cached prefix are calls with
expanded keys and values; the model itself writes the cache before this call. All other batches are calls with absorbed queries,
which attend to the cached latents.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.served import NotServedError, kernel_for
from tokenspeed_kernel_base.served_latent import LatentShape, PrefillShape
from tokenspeed_kernel_sglang.paged import PagedBackend
from tokenspeed_kernel_sglang.record import record
from tokenspeed_kernel_sglang.serving import OPS, attention_layers, cache_of, check_runner, refuse
from tokenspeed_kernel_sglang.settings import read_settings

# Names of backends under which the models make the calls that are described above.
NAMES = ("tokenspeed", "triton")


class LatentBackend(PagedBackend):
    """Latent attention of decoders: absorbed over cached latents, and with expanded keys and values for whole prompts."""

    def __init__(self, runner: Any, name: str) -> None:
        """Finds the kernels of every layer of the model.

        Args:
            runner: SGLang's `ModelRunner`, with the loaded model and its cache.
            name: the name that selects the backend.

        Raises:
            NotServedError: the model or an option has an unsupported feature, or no kernel is eligible for a layer. The message
                names the feature or the layer.
        """
        _check(runner, name)
        super().__init__(runner)
        for shape, layers in _shapes(runner).items():
            if isinstance(shape, LatentShape):
                calls = shape.calls(self.page_size)
                kernels = [kernel_for(getattr(OPS, operator), call).name for operator, call in calls.items()]
            else:
                kernels = [kernel_for(OPS.mla_prefill, shape.call()).name]
            record("attention", _kind(shape, self.page_size), tuple(kernels), layers=layers)
        # SGLang writes fp8 latents without a scale, see `MLATokenToKVPool.set_mla_kv_buffer`.
        self._one = torch.ones((), dtype=torch.float32, device=self.req_to_token.device)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save: bool, options: dict[str, Any]) -> Tensor:
        """Runs one of the two layers. With absorbed queries, k is ``[tokens, 1, kv_lora_rank + rope_dim]``, and is written to the
        cache. See `PagedBackend.run`.
        """
        batch = self.batch(options)
        rows = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        if not _is_latent(layer, self.pool):
            return self._prompts(rows, k, v, layer, forward_batch, save)
        cache = self.pool.get_key_buffer(layer.layer_id).squeeze(1).unflatten(0, (-1, self.page_size))
        scale = None if cache.dtype == q.dtype else self._one
        if save and k is not None:
            latent, k_rope = k.flatten(1).split([layer.v_head_dim, layer.head_dim - layer.v_head_dim], 1)
            OPS.store_mla_kv_cache(latent, k_rope, cache, self.slots(forward_batch)[: len(k)], scale)
        arguments = {
            "kv_cache": cache,
            "page_table": batch.page_table,
            "cache_seqlens": batch.seq_lens,
            "max_seqlen_k": batch.max_seq_len,
            "kv_lora_rank": layer.v_head_dim,
            "softmax_scale": layer.scaling,
            "kv_scale": scale,
        }
        if batch.cu_seqlens_q is None:
            out: Tensor = OPS.mla_decode_with_kvcache(rows, max_seqlen_q=1, **arguments)
        else:
            arguments |= {"cu_seqlens_q": batch.cu_seqlens_q, "max_seqlen_q": batch.max_query_len}
            out = OPS.mla_extend_with_kvcache(rows, cu_seqlens_kv=None, is_causal=True, **arguments)
        return out.flatten(1)

    def _prompts(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save: bool) -> Tensor:
        """Runs causal attention of whole prompts to their own expanded keys and values."""
        batch = self.batch({})
        asked = {
            "expanded keys of a cached prefix": len(k) != len(q) or batch.cu_seqlens_q is None,
            "a log-sum-exp": bool(getattr(forward_batch, "mha_return_lse", False)),
            "a cache of expanded keys": save,
        }
        found = [feature for feature, wanted in asked.items() if wanted]
        if found:
            raise ValueError(f"tokenspeed_kernel_sglang has no latent attention with {', '.join(found)}")
        out: Tensor = OPS.mla_prefill(
            q,
            k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            batch.cu_seqlens_q,
            max_seqlen=batch.max_query_len,
            softmax_scale=layer.scaling,
        )
        return out.flatten(1)


def _check(runner: Any, name: str) -> None:
    """Raises NotServedError if the settings, the name or the model exclude our backend of latent attention."""
    check_runner(runner)
    hidden = getattr(runner.model_config, "hf_text_config", None)
    refuse(
        {
            "latent attention, because TOKENSPEED_SGLANG_MLA is 0": not read_settings().mla,
            f"latent attention under the name {name}, but under {' and '.join(NAMES)}": name not in NAMES,
            "sparse attention (an indexer)": getattr(hidden, "index_topk", None) is not None,
            f"latent attention in {type(runner.token_to_kv_pool).__name__}": not hasattr(runner.token_to_kv_pool, "kv_lora_rank"),
        }
    )


def _is_latent(layer: Any, pool: Any) -> bool:
    """Returns whether a layer attends to latents. Otherwise, it gets expanded keys and values."""
    width = pool.kv_lora_rank + pool.qk_rope_head_dim
    return (layer.tp_k_head_num, layer.head_dim, layer.v_head_dim) == (1, width, pool.kv_lora_rank)


def _shapes(runner: Any) -> Counter[LatentShape | PrefillShape]:
    """Returns the shapes of a model's layers, with the number of layers of each shape.

    Raises:
        NotServedError: a layer has an unsupported feature.
    """
    pool, device = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token.device
    shapes: Counter[LatentShape | PrefillShape] = Counter()
    for layer in attention_layers(runner):
        asked = {"sliding windows": layer.sliding_window_size >= 0, "soft caps": bool(layer.logit_cap)}
        refuse({f"{feature} of latent attention": wanted for feature, wanted in asked.items()})
        if not _is_latent(layer, pool):
            if layer.tp_k_head_num != layer.tp_q_head_num:
                raise NotServedError(f"{layer.tp_q_head_num} heads with {layer.tp_k_head_num} KV heads beside latent attention")
            shapes[PrefillShape(layer.tp_q_head_num, layer.head_dim, layer.v_head_dim, runner.dtype, device)] += 1
            continue
        cache = cache_of(pool, layer)
        if tuple(cache.shape[1:]) != (1, layer.head_dim):
            raise NotServedError(f"a cache of shape {tuple(cache.shape)}; expected [slots, 1, kv_lora_rank + rope_dim]")
        sizes = (layer.tp_q_head_num, pool.kv_lora_rank, pool.qk_rope_head_dim)
        shapes[LatentShape(*sizes, runner.dtype, cache.dtype, device)] += 1
    return shapes


def _kind(shape: LatentShape | PrefillShape, page_size: int) -> str:
    """Returns a layer's description for the receipt."""
    if isinstance(shape, PrefillShape):
        return f"expanded latents: {shape.heads} heads of {shape.head_dim} and {shape.v_head_dim}"
    cache = f", cache of {str(shape.cache_dtype).removeprefix('torch.')}" if shape.scaled else ""
    return f"latents of {shape.kv_lora_rank} and {shape.rope_dim}: {shape.heads} heads, pages of {page_size}{cache}"

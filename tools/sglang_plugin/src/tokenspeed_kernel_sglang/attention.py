"""SGLang's attention backend ``tokenspeed`` for multi-head and grouped-query attention: cache writes, and attention over SGLang's
paged KV cache.

Hook: SGLang's `AttentionBackend`, one object per model. SGLang computes q, k and v and allocates the pool; this class does the rest
of each layer's attention up to the output projection. Decode batches are one call of `mha_decode_with_kvcache`; all other batches
are one call of the operator that `serving.find_serving` selects.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenspeed_kernel_sglang.paged import PagedBackend
from tokenspeed_kernel_sglang.record import record
from tokenspeed_kernel_sglang.serving import OPS, LayerShape, check_runner, find_serving, shapes_of_layers


class TokenspeedBackend(PagedBackend):
    """Attention of decoders with one KV head per group of query heads."""

    def __init__(self, runner: Any) -> None:
        """Finds the kernels of every layer of the model.

        Args:
            runner: SGLang's `ModelRunner`, with the loaded model and its cache.

        Raises:
            NotServedError: the model or an option has an unsupported feature, or no kernel is eligible for a layer. The message
                names the feature or the layer.
        """
        check_runner(runner)
        super().__init__(runner)
        self.serving = {}
        for shape, layers in shapes_of_layers(runner).items():
            self.serving[shape] = serving = find_serving(shape)
            record("attention", str(shape), serving.kernels, layers=layers)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save: bool, options: dict[str, Any]) -> Tensor:
        """Writes the new keys and values to the cache, and runs attention. ``options`` may have ``sinks`` ``[heads]``. See
        `PagedBackend.run`.
        """
        sinks = options.pop("sinks", None)
        batch = self.batch(options)
        k_cache, v_cache = self._caches(layer)
        shape = LayerShape.of(layer, q.dtype, k_cache.dtype, self.page_size, sinks is not None, q.device)
        if shape not in self.serving:
            raise ValueError(f"tokenspeed_kernel_sglang found no layer {shape} when the model was built")
        serving = self.serving[shape]
        scales = {name: getattr(layer, name) if shape.scaled else None for name in ("k_scale", "v_scale")}
        if save and k is not None:
            slots = self.slots(forward_batch, windowed=shape.window_left >= 0)
            OPS.store_kv_cache(k, v, k_cache, v_cache, slots[: len(k)], **scales)
        rows = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        arguments = {
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": batch.window_table if shape.window_left >= 0 else batch.page_table,
            "cache_seqlens": batch.seq_lens,
            "max_seqlen_k": batch.max_seq_len,
            "window_left": shape.window_left,
            "logit_cap": shape.logit_cap,
            "sinks": sinks,
            "softmax_scale": layer.scaling,
            **scales,
        }
        if batch.cu_seqlens_q is None:
            out: Tensor = OPS.mha_decode_with_kvcache(rows, max_seqlen_q=1, **arguments)
        else:
            arguments |= {"cu_seqlens_q": batch.cu_seqlens_q, "max_seqlen_q": batch.max_query_len}
            out = serving.extend(rows, **arguments, **serving.extend_options)
        return out.flatten(1)

    def _caches(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Returns views of a layer's key and value caches, ``[pages, page_size, kv_heads, dim]``."""
        k, v = (get(layer.layer_id) for get in (self.pool.get_key_buffer, self.pool.get_value_buffer))
        return k.unflatten(0, (-1, self.page_size)), v.unflatten(0, (-1, self.page_size))

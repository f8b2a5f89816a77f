"""A model on several GPUs, each of which holds a part of every layer.

Attention heads, the experts' intermediate features and the rows of the output matrix are shared out among the ranks of a process
group. Each rank runs the model on its share, for the same batch; sums over ranks follow the two products that end a layer's halves,
and the ranks' logits are put together. All ranks have the same bits then, so that each chooses the same tokens. An `Engine` of each
rank must be given the same requests in the same order.

A sum is followed by a normalisation. Where there are many tokens, one kernel does both. Where there are few, one kernel sums, and
those of the model on one GPU follow, which normalise and do much more.
"""

from __future__ import annotations

from torch import Tensor

from gpt_oss.batch import Batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.model import Caches, Layer
from gpt_oss.shares import SharedGptOss


class TensorParallelGptOss(SharedGptOss):
    """One rank's heads, and its part of each expert. It runs like the whole model; every rank must run the same batches in the same
    order. See `SharedGptOss`.

    Attributes:
        few_tokens: the tokens of a batch up to which a kernel that sums is followed by those that normalise and do more.
    """

    # GPT-OSS-120B on two H200s, ms a pass of 1, 2, 4 and 8 tokens: 1.69, 1.99, 2.57, 3.50 with a sum first, and 1.78, 2.09, 2.60,
    # 3.46 with the sum and the normalisation in one.
    few_tokens = 4

    def _run_layers(self, hidden: Tensor, batch: Batch, cache: PagedKVCache | None) -> tuple[Tensor, Tensor | None]:
        """What it returns first is this rank's part of a sum, too."""
        run = self._run_few if len(hidden) <= self.few_tokens else self._run_many
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            caches: Caches = (None, None) if cache is None else (cache.k[index], cache.v[index])
            hidden, residual = run(layer, hidden, residual, batch, caches)
        return hidden, residual

    def _run_few(
        self, layer: Layer, hidden: Tensor, residual: Tensor | None, batch: Batch, caches: Caches
    ) -> tuple[Tensor, Tensor]:
        """Runs a layer; hidden and the first result are this rank's parts of sums, but for the tokens' embeddings."""
        ops, group = self.ops, self.group
        if residual is not None:
            ops.all_reduce(hidden, group, hidden)
        product, residual = self._attend(layer, hidden, residual, batch, caches)
        normed, weights, ids, residual = self._route(layer, ops.all_reduce(product, group, product), residual)
        return ops.moe_apply(normed, layer.experts, weights, ids, layer.plan), residual

    def _run_many(
        self, layer: Layer, hidden: Tensor, residual: Tensor | None, batch: Batch, caches: Caches
    ) -> tuple[Tensor, Tensor]:
        """Does what `_run_few` does."""
        ops, group, config, eps = self.ops, self.group, self.config, self.config.rms_norm_eps
        if residual is None:
            normed, residual = ops.rmsnorm(hidden, layer.attention_norm, eps), hidden
        else:
            normed, residual = ops.all_reduce_rmsnorm(hidden, layer.attention_norm, group, eps, residual)
        qkv = layer.qkv(ops, normed)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q, k, v = qkv.unflatten(1, (-1, config.head_dim)).split((heads, kv_heads, kv_heads), dim=1)
        cached = (None, None, None, None) if caches[0] is None else (v, *caches, batch.slot_mapping)
        ops.apply_rope(q, k, batch.positions, self.cos_sin, False, *cached, q_out=q, k_out=k)
        product = layer.output(ops, self._attention(layer, qkv, batch, *caches))
        normed, residual = ops.all_reduce_rmsnorm(product, layer.mlp_norm, group, eps, residual)
        weights, ids = ops.moe_topk(layer.router(ops, normed), config.num_experts_per_tok)
        return ops.moe_apply(normed, layer.experts, weights, ids, layer.plan), residual

    def _norm_last(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        normed: Tensor = self.ops.all_reduce_rmsnorm(hidden, self.norm, self.group, self.config.rms_norm_eps, residual)[0]
        return normed

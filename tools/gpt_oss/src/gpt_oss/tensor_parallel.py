"""A model on several GPUs, each of which holds a part of every layer.

Attention heads, the experts' intermediate features and the rows of the output matrix are shared out among the ranks of a process
group. Each rank runs the model on its share, for the same batch; sums over ranks follow the two products that end a layer's halves,
and the ranks' logits are put together. All ranks have the same bits then, so that each chooses the same tokens. An `Engine` of each
rank must be given the same requests in the same order.
"""

from __future__ import annotations

from torch import Tensor

from gpt_oss.batch import Batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.shares import Caches, SharedGptOss


class TensorParallelGptOss(SharedGptOss):
    """One rank's heads, and its part of each expert. It runs like the whole model; every rank must run the same batches in the same
    order. See `SharedGptOss`.
    """

    def _run_layers(self, hidden: Tensor, batch: Batch, cache: PagedKVCache | None) -> tuple[Tensor, Tensor | None]:
        """What it returns first is this rank's part of a sum, too."""
        ops, group, eps, top_k = self.ops, self.group, self.config.rms_norm_eps, self.config.num_experts_per_tok
        residual = hidden
        for index, layer in enumerate(self.layers):
            caches: Caches = (None, None) if cache is None else (cache.k[index], cache.v[index])
            if index == 0:
                normed = ops.rmsnorm(hidden, layer.attention_norm, eps)
            else:
                normed, residual = ops.all_reduce_rmsnorm(hidden, layer.attention_norm, group, eps, residual)
            product = self._attend(layer, normed, batch, caches)
            normed, residual = ops.all_reduce_rmsnorm(product, layer.mlp_norm, group, eps, residual)
            weights, ids = ops.moe_topk(layer.router(ops, normed), top_k)
            hidden = ops.moe_apply(normed, layer.experts, weights, ids, layer.plan)
        return hidden, residual

    def _norm_last(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        normed: Tensor = self.ops.all_reduce_rmsnorm(hidden, self.norm, self.group, self.config.rms_norm_eps, residual)[0]
        return normed

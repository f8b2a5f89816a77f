"""A model on several GPUs, each of which holds some experts of every layer, and some attention heads.

Where there are few tokens, every rank has them all: it runs those of its experts that they chose, and a sum over ranks follows.
Where there are many, each rank takes its share of the tokens between attention and attention: `reduce_scatter` gives it their sums,
`moe_dispatch` sends each token to the ranks of its experts, `moe_combine` brings the results back, and `all_gather` puts the tokens
together for the next layer's attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_oss.batch import Batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.model import Layer
from gpt_oss.shares import Caches, SharedGptOss, filled, slices_of


class ExpertParallelGptOss(SharedGptOss):
    """One rank's heads, and its experts. It runs like the whole model; every rank must run the same batches in the same order. See
    `SharedGptOss`.

    Attributes:
        dispatched_tokens: the tokens of a batch from which on they are sent to the ranks of their experts.
    """

    whole_experts = True
    dispatched_tokens = 64

    def _run_layers(self, hidden: Tensor, batch: Batch, cache: PagedKVCache | None) -> tuple[Tensor, Tensor | None]:
        run = self._share_tokens if len(hidden) >= self.dispatched_tokens else self._share_sums
        for index, layer in enumerate(self.layers):
            caches: Caches = (None, None) if cache is None else (cache.k[index], cache.v[index])
            hidden = run(layer, hidden, batch, caches)
        return hidden, None

    def _share_sums(self, layer: Layer, hidden: Tensor, batch: Batch, caches: Caches) -> Tensor:
        """Runs a layer on tokens that every rank has."""
        ops, group, eps = self.ops, self.group, self.config.rms_norm_eps
        product = self._attend(layer, ops.rmsnorm(hidden, layer.attention_norm, eps), batch, caches)
        attended = ops.all_reduce(product, group, product)
        normed, weights, ids, residual = self._route(layer, attended, hidden)
        first, count = group.rank * self.config.num_local_experts, self.config.num_local_experts
        own = ids - first
        own = torch.where(own < count, own, -1)  # negative ones are skipped
        product = ops.moe_apply(normed, layer.experts, weights, own, layer.plan)
        summed: Tensor = ops.all_reduce(product, group, product).add_(residual)
        return summed

    def _share_tokens(self, layer: Layer, hidden: Tensor, batch: Batch, caches: Caches) -> Tensor:
        """Runs a layer on tokens that every rank has, and each rank's share of them through router and experts."""
        ops, group, tokens = self.ops, self.group, len(hidden)
        product = self._attend(layer, ops.rmsnorm(hidden, layer.attention_norm, self.config.rms_norm_eps), batch, caches)
        count = -(-tokens // group.world_size)
        start, stop = slices_of(tokens, count, group.rank)
        attended = ops.reduce_scatter(filled(product, 0, count * group.world_size), group)
        normed, weights, ids, residual = self._route(layer, attended, filled(hidden[start:stop], 0, count))
        ids[stop - start :] = -1  # rows that fill a share up have no experts
        experts = group.world_size * self.config.num_local_experts
        rows, row_weights, row_ids = ops.moe_dispatch(normed, weights, ids, experts, group)
        made = ops.moe_apply(rows, layer.experts, row_weights, row_ids, layer.plan)
        combined = ops.moe_combine(made, row_ids, group).add_(residual)
        gathered: Tensor = ops.all_gather(combined, group)
        return gathered[:tokens]

    def _route(self, layer: Layer, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chosen: tuple[Tensor, Tensor, Tensor, Tensor] = self.ops.rmsnorm_moe_topk(
            attended,
            layer.mlp_norm,
            layer.router.weight,
            self.config.num_experts_per_tok,
            eps=self.config.rms_norm_eps,
            residual=residual,
            router_bias=layer.router.bias,
        )
        return chosen

"""An expert-parallel model: each GPU has some experts of every layer, and some attention heads.

With few tokens, every rank has all tokens. Each rank runs its local experts for all tokens, and the results are summed over ranks.
With many tokens, each rank has a slice of the tokens between the attention of one layer and of the next. `reduce_scatter` sums
attention's partial results and gives each rank its slice. `moe_dispatch` sends each token to the ranks of its experts.
`moe_combine` returns the results. `all_gather` concatenates the tokens for the next layer's attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpt_oss.batch import Batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.model import Caches, Layer
from gpt_oss.shards import ShardedGptOss, filled, slices_of


class ExpertParallelGptOss(ShardedGptOss):
    """One rank's attention heads and experts. The object is used like a whole model, but every rank must run the same batches in
    the same order. See `ShardedGptOss`.

    Attributes:
        dispatched_tokens: for batches of at least this many tokens, each token is sent to the ranks of its experts.
    """

    whole_experts = True
    dispatched_tokens = 64

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Maps global expert ids to this rank's local ids. Experts of other ranks map to -1, which `moe_apply` skips.
        count, rank = self.config.num_local_experts, self.group.rank
        numbers = torch.arange(-rank * count, (self.group.world_size - rank) * count)
        self._own = torch.where((numbers >= 0) & (numbers < count), numbers, -1).int().to(self.device)

    def _run_layers(self, hidden: Tensor, batch: Batch, cache: PagedKVCache | None) -> tuple[Tensor, Tensor | None]:
        """Overrides `GptOss._run_layers`: runs the layers on dispatched tokens or on all tokens, by the number of tokens."""
        run = self._run_dispatched if len(hidden) >= self.dispatched_tokens else self._run_replicated
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            caches: Caches = (None, None) if cache is None else (cache.k[index], cache.v[index])
            hidden, residual = run(layer, hidden, residual, batch, caches)
        return hidden, residual

    def _run_replicated(
        self, layer: Layer, hidden: Tensor, residual: Tensor | None, batch: Batch, caches: Caches
    ) -> tuple[Tensor, Tensor | None]:
        """Runs a layer on tokens that every rank has, with each rank's experts on all tokens."""
        ops, group = self.ops, self.group
        partial, residual = self._attend(layer, hidden, residual, batch, caches)
        normed, weights, ids, residual = self._route(layer, ops.all_reduce(partial, group, partial), residual)
        own = self._own.index_select(0, ids.flatten()).view_as(ids)
        partial = ops.moe_apply(normed, layer.experts, weights, own, layer.plan)
        return ops.all_reduce(partial, group, partial), residual

    def _run_dispatched(
        self, layer: Layer, hidden: Tensor, residual: Tensor | None, batch: Batch, caches: Caches
    ) -> tuple[Tensor, Tensor | None]:
        """Runs a layer on tokens that every rank has. The router runs on this rank's slice of the tokens, and the experts on
        dispatched tokens.
        """
        ops, group, tokens = self.ops, self.group, len(hidden)
        partial, residual = self._attend(layer, hidden, residual, batch, caches)
        count = -(-tokens // group.world_size)
        start, stop = slices_of(tokens, count, group.rank)
        attended = ops.reduce_scatter(filled(partial, 0, count * group.world_size), group)
        normed, weights, ids, total = self._route(layer, attended, filled(residual[start:stop], 0, count))
        ids[stop - start :] = -1  # padding rows have no experts
        experts = group.world_size * self.config.num_local_experts
        rows, row_weights, row_ids = ops.moe_dispatch(normed, weights, ids, experts, group)
        made = ops.moe_apply(rows, layer.experts, row_weights, row_ids, layer.plan)
        # The residual stream is added here, so that the all-gather has one tensor only.
        combined = ops.moe_combine(made, row_ids, group).add_(total)
        return ops.all_gather(combined, group)[:tokens], None

"""A tensor-parallel model: each GPU has a shard of every layer.

Attention heads, the experts' intermediate features and the rows of the output matrix are divided among the ranks of a process
group. Each rank runs its shard for the same batch. The outputs of attention and of the experts are summed over ranks, and the
ranks' logits are gathered. All ranks then have bitwise equal logits and select the same tokens. The `Engine` of each rank must get
the same requests in the same order.

Decode passes of few tokens run all layers in one call of `decoder_layers`, which also computes the sums over ranks, if a kernel
serves that call. Otherwise each sum over ranks is followed by a norm. With many tokens, one kernel computes both the sum and the
norm. With few tokens, one kernel computes only the sum. The next kernel computes the norm: it is a fused kernel, as on a single
GPU.
"""

from __future__ import annotations

from torch import Tensor

from gpt_oss.batch import Batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.model import Caches, Layer
from gpt_oss.shards import ShardedGptOss
from tokenspeed_kernel import ProcessGroup


class TensorParallelGptOss(ShardedGptOss):
    """A model with one rank's heads, and with this rank's slice of each expert. The object is used like a whole model, but every
    rank must run the same batches in the same order. See `ShardedGptOss`.

    Attributes:
        few_tokens: batches of up to this many tokens use a separate sum over ranks; larger batches use a kernel that fuses sum and
            norm.
    """

    # GPT-OSS-120B on two H200s, ms per pass of 1, 2, 4 and 8 tokens: 1.69, 1.99, 2.57, 3.50 with a separate sum over ranks, and
    # 1.78, 2.09, 2.60, 3.46 with a fused sum and norm.
    few_tokens = 4

    @property
    def summed_over(self) -> ProcessGroup:
        return self.group

    def _run_layers(self, hidden: Tensor, batch: Batch, cache: PagedKVCache | None) -> tuple[Tensor, Tensor | None]:
        """As in the base class; but if there is a residual stream, the first result is this rank's partial sum of the last layer's
        output."""
        output = self._run_in_one_call(hidden, batch, cache)
        if output is not None:
            return output, None
        run = self._run_few if len(hidden) <= self.few_tokens else self._run_many
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            caches: Caches = (None, None) if cache is None else (cache.k[index], cache.v[index])
            hidden, residual = run(layer, hidden, residual, batch, caches)
        return hidden, residual

    def _run_few(
        self, layer: Layer, hidden: Tensor, residual: Tensor | None, batch: Batch, caches: Caches
    ) -> tuple[Tensor, Tensor]:
        """Runs a layer with a separate sum over ranks. ``hidden`` and the first result are this rank's partial sums. Only the
        embeddings, the first layer's input, are complete.
        """
        ops, group = self.ops, self.group
        if residual is not None:
            ops.all_reduce(hidden, group, hidden)
        attended, residual = self._attend(layer, hidden, residual, batch, caches)
        normed, weights, ids, residual = self._route(layer, ops.all_reduce(attended, group, attended), residual)
        return ops.moe_apply(normed, layer.experts, weights, ids, layer.plan), residual

    def _run_many(
        self, layer: Layer, hidden: Tensor, residual: Tensor | None, batch: Batch, caches: Caches
    ) -> tuple[Tensor, Tensor]:
        """Runs a layer as `_run_few` does, but with the sum over ranks and the norm in one kernel."""
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
        attended = layer.output(ops, self._attention(layer, qkv, batch, *caches))
        normed, residual = ops.all_reduce_rmsnorm(attended, layer.mlp_norm, group, eps, residual)
        weights, ids = ops.moe_topk(layer.router(ops, normed), config.num_experts_per_tok)
        return ops.moe_apply(normed, layer.experts, weights, ids, layer.plan), residual

    def _norm_last(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return super()._norm_last(hidden, residual)
        normed: Tensor = self.ops.all_reduce_rmsnorm(hidden, self.norm, self.group, self.config.rms_norm_eps, residual)[0]
        return normed

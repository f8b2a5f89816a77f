"""A tensor-parallel model: each GPU has a shard of every layer.

Attention heads, the experts' intermediate features and the rows of the output matrix are divided among the ranks of a process
group. Each rank runs its shard for the same batch. The outputs of attention and of the experts are summed over ranks, and the
ranks' logits are gathered. All ranks then have bitwise equal logits and select the same tokens. The `Engine` of each rank must get
the same requests in the same order.

If a kernel is eligible, decode passes of few tokens run all layers in one call of `decoder_layers`, including the sums over ranks.
Otherwise, a layer has two sums over ranks, each followed by a norm. There are two ways to compute a sum and its norm:

* Two kernels: an all-reduce, and the kernel that a single GPU would use, which fuses the norm with the GEMM after it.
* One kernel, which fuses the all-reduce and the norm. The GEMM is then a kernel of its own.

The number of tokens determines the faster way, see `TensorParallelGptOss.few_tokens`.
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
        few_tokens: batches of up to this many tokens use separate sums over ranks; larger batches use a kernel that fuses sum and
            norm.
        routed_tokens: batches of these numbers of tokens use a separate sum before the router, whose kernel fuses norm, GEMM and
            top-k.
    """

    # GPT-OSS-120B on two H200s, ms per pass of 1, 2, 4 and 8 tokens: 1.69, 1.99, 2.57, 3.50 with a separate sum over ranks, and
    # 1.78, 2.09, 2.60, 3.46 with a fused sum and norm.
    few_tokens = 4
    # The same, 64 tokens: 8.76 with a separate sum before the router, 8.90 with a fused sum and norm. Not compared: other numbers.
    routed_tokens = range(33, 257)

    @property
    def summed_over(self) -> ProcessGroup:
        return self.group

    def _run_layers(self, hidden: Tensor, batch: Batch, cache: PagedKVCache | None) -> tuple[Tensor, Tensor | None]:
        """As in the base class; but if there is a residual stream, the first result is this rank's partial sum of the last layer's
        output."""
        output = self._run_in_one_call(hidden, batch, cache)
        if output is not None:
            return output, None
        few = len(hidden) <= self.few_tokens
        attend = self._attend_few if few else self._attend_many
        route = self._route_few if few or len(hidden) in self.routed_tokens else self._route_many
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            caches: Caches = (None, None) if cache is None else (cache.k[index], cache.v[index])
            attended, residual = attend(layer, hidden, residual, batch, caches)
            normed, weights, ids, residual = route(layer, attended, residual)
            hidden = self.ops.moe_apply(normed, layer.experts, weights, ids, layer.plan)
        return hidden, residual

    def _attend_few(
        self, layer: Layer, hidden: Tensor, residual: Tensor | None, batch: Batch, caches: Caches
    ) -> tuple[Tensor, Tensor]:
        """Returns this rank's partial sum of attention's output, and the residual stream before it. A separate kernel computes the
        sum over ranks of the input.

        Args:
            hidden: this rank's partial sum of the preceding layer's output; in the first layer, without a residual stream, the
                embeddings.
        """
        if residual is not None:
            self.ops.all_reduce(hidden, self.group, hidden)
        return self._attend(layer, hidden, residual, batch, caches)

    def _attend_many(
        self, layer: Layer, hidden: Tensor, residual: Tensor | None, batch: Batch, caches: Caches
    ) -> tuple[Tensor, Tensor]:
        """As `_attend_few`, but with the sum over ranks and the norm in one kernel."""
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
        return layer.output(ops, self._attention(layer, qkv, batch, *caches)), residual

    def _route_few(self, layer: Layer, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `_route`, of this rank's partial sum of attention's output. A separate kernel computes the sum over ranks."""
        return self._route(layer, self.ops.all_reduce(attended, self.group, attended), residual)

    def _route_many(self, layer: Layer, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `_route_few`, but with the sum over ranks and the norm in one kernel."""
        ops, config = self.ops, self.config
        normed, residual = ops.all_reduce_rmsnorm(attended, layer.mlp_norm, self.group, config.rms_norm_eps, residual)
        weights, ids = ops.moe_topk(layer.router(ops, normed), config.num_experts_per_tok)
        return normed, weights, ids, residual

    def _norm_last(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return super()._norm_last(hidden, residual)
        normed: Tensor = self.ops.all_reduce_rmsnorm(hidden, self.norm, self.group, self.config.rms_norm_eps, residual)[0]
        return normed

"""The divergence between the next-token distributions of two variants of a model with the same weights.

Random weights make routing chaotic. The experts are unrelated, the margin between the last selected expert and the next one is
tiny, and one different expert changes a token's activations completely. So a rounding error of any size grows from layer to layer,
until every token has different experts. Two comparisons separate this effect from the variant's own error. The first comparison
runs a model twice, with chunks of different lengths: the results differ by rounding only. The second comparison runs a variant with
the experts that the first variant has selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpt_oss.batch import Piece, make_batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.model import GptOss

# The result of `probe`, for the second halves of the prompts: float32 logits [prompts * half, vocab_size] in host memory, and for
# each layer the top-k ids, int [prompts, half, top_k].
Probed = tuple[Tensor, list[Tensor]]


def divergence_of(logits: Tensor, wanted: Tensor) -> dict[str, float]:
    """Compares the next-token distributions of two tensors of logits, ``[positions, vocab_size]``.

    Returns the mean and the largest Kullback-Leibler divergence of ``wanted`` from ``logits``, in nats, and the fraction of
    positions with the same most likely token.
    """
    p, q = (x.double().log_softmax(-1) for x in (wanted, logits))
    divergence = (p.exp() * (p - q)).sum(-1)
    same = (logits.argmax(-1) == wanted.argmax(-1)).double().mean()
    return {"mean_kl": divergence.mean().item(), "largest_kl": divergence.max().item(), "same_most_likely": same.item()}


class _Routing:
    """A wrapper of the operators that records the selected experts, or replaces them by given experts.

    Args:
        ops: the operators.
        given: for each layer the top-k ids to use, int ``[tokens, top_k]``; None to use the router's.

    Attributes:
        chosen: for each layer, the top-k ids that were used.
    """

    def __init__(self, ops: Any, given: Sequence[Tensor] | None) -> None:
        self._ops, self._given = ops, given
        self.chosen: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rmsnorm_moe_topk(self, x: Tensor, norm: Tensor, router: Tensor, top_k: int, **options: Any) -> tuple[Tensor, ...]:
        normed, weights, ids, residual = self._ops.rmsnorm_moe_topk(x, norm, router, top_k, **options)
        if self._given is not None:
            ids = self._given[len(self.chosen)].to(ids)
            logits = normed.float() @ router.float() + options["router_bias"].float()
            weights = logits.gather(1, ids.long()).softmax(-1).to(weights)
        self.chosen.append(ids)
        return normed, weights, ids, residual


def probe(
    model: GptOss, cache: PagedKVCache, prompts: Sequence[Sequence[int]], length: int, given: Sequence[Tensor] | None = None
) -> Probed:
    """Runs prompts in chunks through a cache. Returns results for the second half of each prompt, whose tokens attend to the first
    half in the cache.

    Args:
        model: the model.
        cache: a cache with enough free pages for the prompts. The pages are freed afterwards.
        prompts: the prompts. All have the same even number of tokens.
        length: number of tokens per chunk. It must divide half the length of a prompt.
        given: for each layer the top-k ids of the second halves' tokens, in the format of the result; None to use the router's.

    Returns:
        Logits and top-k ids of the second halves, see `Probed`.
    """
    count, half = len(prompts), len(prompts[0]) // 2
    held = [cache.allocator.allocate(cache.allocator.pages_for(2 * half)) for _ in prompts]
    logits, chosen, own, one_call = [], [], model.ops, model.one_call
    try:
        model.one_call = False  # the router's operator is called for each layer
        for start in range(0, 2 * half, length):
            at, looks = start - half, start >= half
            taken = None if given is None or not looks else [ids[:, at : at + length].flatten(0, 1) for ids in given]
            model.ops = routing = _Routing(own, taken)
            pieces = [Piece(p[start : start + length], start, pages) for p, pages in zip(prompts, held, strict=True)]
            found = model.forward(make_batch(pieces, cache, model.device), cache)
            if looks:
                logits.append(found.float().cpu().unflatten(0, (count, length)))
                chosen.append([ids.unflatten(0, (count, length)) for ids in routing.chosen])
    finally:
        model.ops, model.one_call = own, one_call
        for pages in held:
            cache.allocator.free(pages)
    return torch.cat(logits, 1).flatten(0, 1), [torch.cat(layer, 1) for layer in zip(*chosen, strict=True)]

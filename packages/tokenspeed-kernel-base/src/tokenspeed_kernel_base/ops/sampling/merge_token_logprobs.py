"""Log-probabilities with a sharded vocabulary: merges the shards' results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.sampling.ordering import descending_order
from tokenspeed_kernel_base.ops.sampling.token_logprobs import OUTS
from tokenspeed_kernel_base.variation import Variation, Want


@operator("sampling", "merge_token_logprobs", formats=("token_logits",), traits={"entries": int}, outs=OUTS, varying=("rows",))
def merge_token_logprobs(
    token_logits: Tensor,
    top_logits: Tensor,
    top_tokens: Tensor,
    lse: Tensor,
    token_out: Tensor | None = None,
    top_out: Tensor | None = None,
    top_tokens_out: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merges `token_logprobs` results of vocabulary shards into log-probabilities over the whole vocabulary.

    The inputs are results of `token_logprobs` with ``normalize=False``.

    The shards' log-sum-exps (lse) are merged into the lse of the vocabulary. The given token's logit is the largest of the
    shards' values, because it is ``-inf`` in shards without the token. The merged lse is subtracted from the given token's logit,
    and from the ``top_k`` largest of all shards' top logits. All these logits are ordered by descending logit, then by ascending
    token; NaN comes first. The shards may be stacked in any order.

    A logit of ``-inf`` has the log-probability ``-inf``. If the lse of a shard is NaN, the log-probabilities of all other logits
    are NaN.

    Args:
        token_logits: float32 ``[parts, rows]``, parts > 0.
        top_logits: float32 ``[parts, rows, top_k]``.
        top_tokens: int32 ``[parts, rows, top_k]``, at least 0, distinct within a row.
        lse: float32 ``[parts, rows]``, natural logarithms, < inf.
        token_out: receives the log-probabilities of the given tokens.
        top_out: receives the log-probabilities of the most probable tokens.
        top_tokens_out: receives the most probable tokens.
        lse_out: receives the merged lse.

    Returns:
        The result of `token_logprobs` for all logits, up to rounding: float32 ``[rows]``, float32 ``[rows, top_k]``, int32
        ``[rows, top_k]`` and float32 ``[rows]``. Logits that differ, but are equal once divided by the temperature and rounded to
        float32, count as equal here; `token_logprobs` still orders them.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched. Values are not checked.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import merge_token_logprobs, token_logprobs
        >>> logits, tokens = torch.tensor([[1.0, 3.0, 2.0, 4.0]]).log(), torch.tensor([2])
        >>> halves = [token_logprobs(logits[:, i : i + 2], tokens, 1, first_token=i, normalize=False) for i in (0, 2)]
        >>> chosen, top, top_tokens, _ = merge_token_logprobs(*map(torch.stack, zip(*halves)))
        >>> chosen.exp(), top.exp(), top_tokens
        (tensor([0.2000]), tensor([[0.4000]]), tensor([[3]], dtype=torch.int32))

    Safe in CUDA graphs.
    """
    parts, rows, top_k = top_logits.shape
    total = lse.logsumexp(0)
    chosen = token_logits.amax(0)
    # The top tokens of all shards of a row, by ascending token. The stable sort below keeps equal logits in that order.
    tokens, by_token = top_tokens.transpose(0, 1).reshape(rows, parts * top_k).sort(dim=-1)
    logits = top_logits.transpose(0, 1).reshape(rows, parts * top_k).gather(1, by_token)
    order = descending_order(logits)[:, :top_k]
    top = logits.gather(1, order)
    chosen = torch.where(chosen == -torch.inf, -torch.inf, chosen - total)
    top = torch.where(top == -torch.inf, -torch.inf, top - total.unsqueeze(1))
    return chosen, top, tokens.gather(1, order), total


@merge_token_logprobs.traits
def _(top_logits: Tensor) -> dict[str, object]:
    return {"entries": top_logits.shape[0] * top_logits.shape[2]}


@merge_token_logprobs.check
def _(check: Checker, token_logits: Tensor, top_logits: Tensor, top_tokens: Tensor, lse: Tensor) -> None:
    check.tensor("token_logits", token_logits, "parts rows", torch.float32)
    check.require(check["parts"] > 0, "token_logits", "of shape [parts, rows] with parts > 0", str(list(token_logits.shape)))
    check.tensor("top_logits", top_logits, "parts rows top_k", torch.float32)
    check.tensor("top_tokens", top_tokens, "parts rows top_k", torch.int32)
    check.tensor("lse", lse, "parts rows", torch.float32)


@merge_token_logprobs.fake
def _(top_logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, rows, top_k = top_logits.shape
    return (
        top_logits.new_empty(rows),
        top_logits.new_empty((rows, top_k)),
        top_logits.new_empty((rows, top_k), dtype=torch.int32),
        top_logits.new_empty(rows),
    )


@recipe
def _inputs(parts: int, rows: int, top_k: int, vocab: int = 25136) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        # Multiples of 1/4, so that some logits are equal. One shard holds the given token; in some rows no shard does.
        top_logits = (draw.normal(parts, rows, top_k) * 8).round().sort(dim=-1, descending=True).values / 4
        holder = draw.integers(0, parts + 1, rows)
        held = torch.arange(parts, device=draw.device).unsqueeze(1) == holder
        places = torch.rand(parts, rows, max(vocab, top_k), generator=draw.generator, device=draw.device) if top_k else None
        tokens = places.topk(top_k, dim=-1).indices if places is not None else torch.empty(parts, rows, 0, device=draw.device)
        starts = torch.arange(parts, device=draw.device).view(-1, 1, 1) * max(vocab, top_k)
        return {
            "token_logits": torch.where(held, draw.normal(parts, rows, scale=4.0), -torch.inf),
            "top_logits": top_logits,
            "top_tokens": (tokens + starts).int(),
            "lse": 8.0 + draw.normal(parts, rows, scale=4.0),
        }

    return make


def _odd_values(draw: Draw) -> dict[str, Any]:
    arguments = _inputs(3, 4, 6, 50)(draw)
    arguments["top_logits"][:, 0, 3:] = float("-inf")
    for name in ("top_logits", "lse", "token_logits"):
        arguments[name][1, 0] = float("-inf")
        arguments[name][:, 1] = float("-inf")
    arguments["lse"][2, 2] = float("nan")
    arguments["top_logits"][2, 2, 0] = float("nan")
    arguments["top_logits"][:, 3] *= 0.0
    return arguments


@merge_token_logprobs.cases
def _() -> list[Case]:
    return [
        Case("one part", _inputs(1, 5, 20, 100)),
        Case("two parts, one top token", _inputs(2, 3, 1, 100)),
        Case("five parts, no top tokens", _inputs(5, 9, 0)),
        Case("-inf, NaN and signed zeros", _odd_values),
        Case("no rows", _inputs(4, 0, 5, 100)),
        Case("gpt-oss-120b decode 16, 8 parts, 20 top tokens", _inputs(8, 16, 20, 1000)),
        Case("decode 256, 16 parts, 64 top tokens", _inputs(16, 256, 64, 1000), large=True),
    ]


@merge_token_logprobs.vary
def _(variation: Variation, top_logits: Tensor) -> dict[str, Any]:
    return _inputs(*top_logits.shape)(variation.draw) if variation.want is Want.CAPTURED else {}


@merge_token_logprobs.cost
def _(token_logits: Tensor, top_logits: Tensor, top_tokens: Tensor, lse: Tensor) -> Cost:
    rows, top_k = top_logits.shape[1:]
    read = nbytes(token_logits, top_logits, top_tokens, lse)
    return Cost(flops=4.0 * top_logits.numel() + 4.0 * lse.numel(), bytes=read + 8.0 * rows * (1 + top_k))

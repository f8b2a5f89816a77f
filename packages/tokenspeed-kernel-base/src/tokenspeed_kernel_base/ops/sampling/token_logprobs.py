"""Log-probabilities of given tokens and of the most probable tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, absent_ids, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.sampling.ordering import descending_order
from tokenspeed_kernel_base.variation import Variation, Want

MOST_TOKENS = 2**31 - 1
OUTS = ("token_out", "top_out", "top_tokens_out", "lse_out")


@operator("sampling", "token_logprobs", formats=("logits",), traits={"vocab": int, "top_k": int}, outs=OUTS, varying=("rows",))
def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    top_k: int = 0,
    temperature: Tensor | None = None,
    first_token: int = 0,
    normalize: bool = True,
    token_out: Tensor | None = None,
    top_out: Tensor | None = None,
    top_tokens_out: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the log-probabilities of one given token for each row, and of the row's ``top_k`` most probable tokens.

    Let x be the row's logits divided by its temperature, and ``lse = log(sum(exp(x)))``. The log-probability of a token is
    ``x[token] - lse``. Tokens are ordered by descending logit, then by ascending token; NaN comes first. Logarithms are natural.
    The sum is accumulated in float32 (float64 for float64 logits).

    For a vocabulary that is sharded over devices, each device calls this operator with its logits, its first token and
    ``normalize=False``, which omits the subtraction. `merge_token_logprobs` takes the stacked results of all devices.

    A logit of ``-inf`` has the log-probability ``-inf``. If the largest x of a row is NaN or ``inf``, the row's lse and
    the log-probabilities of all its other logits are NaN.

    Args:
        logits: float16, bfloat16, float32 or float64 ``[rows, vocab]``, vocab > 0, of the tokens ``first_token`` to
            ``first_token + vocab - 1``.
        tokens: int64 or int32 ``[rows]``. A token that the logits do not cover, such as -1, gives ``-inf``.
        top_k: how many of the most probable tokens to return, 0 to vocab.
        temperature: float32 ``[rows]``; None means 1 for all rows. A temperature that is 0, negative or not finite counts as 1.
        first_token: the token of the first column, at least 0. All tokens must be below 2^31.
        normalize: whether lse is subtracted from the logits. Pass False for a shard of a vocabulary.
        token_out: receives the log-probabilities of the given tokens.
        top_out: receives the log-probabilities of the most probable tokens.
        top_tokens_out: receives the most probable tokens.
        lse_out: receives lse.

    Returns:
        float32 ``[rows]``, float32 ``[rows, top_k]``, int32 ``[rows, top_k]`` and float32 ``[rows]``: the log-probability of the
        given token, the log-probabilities of the most probable tokens, these tokens, and lse.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched. The values of tokens and
            temperature are not checked.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import token_logprobs
        >>> logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]]).log()
        >>> chosen, top, top_tokens, lse = token_logprobs(logits, torch.tensor([0]), top_k=2)
        >>> chosen.exp(), top.exp(), top_tokens
        (tensor([0.1429]), tensor([[0.4286, 0.4286]]), tensor([[1, 2]], dtype=torch.int32))

    Safe in CUDA graphs.
    """
    vocab = logits.shape[1]
    x = logits.double() if logits.dtype == torch.float64 else logits.float()
    if temperature is not None:
        warmth = temperature.to(x.dtype).unsqueeze(1)
        x = x / torch.where((warmth > 0) & warmth.isfinite(), warmth, 1.0)
    largest = x.amax(-1)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    log_total = (x - shift.unsqueeze(1)).exp().sum(-1).log()
    place = tokens.long() - first_token
    inside = (place >= 0) & (place < vocab)
    chosen = torch.where(inside, x.gather(1, torch.where(inside, place, 0).unsqueeze(1)).squeeze(1), -torch.inf)
    order = descending_order(logits)[:, :top_k]
    top = x.gather(1, order)
    if normalize:
        # Two subtractions instead of one subtraction of the sum, because that sum would round large logits.
        chosen = torch.where(chosen == -torch.inf, -torch.inf, chosen - shift - log_total)
        top = torch.where(top == -torch.inf, -torch.inf, top - shift.unsqueeze(1) - log_total.unsqueeze(1))
    return chosen.float(), top.float(), (order + first_token).int(), (shift + log_total).float()


@token_logprobs.traits
def _(logits: Tensor, top_k: int) -> dict[str, object]:
    return {"vocab": logits.shape[-1], "top_k": top_k}


@token_logprobs.check
def _(check: Checker, logits: Tensor, tokens: Tensor, top_k: int, temperature: Tensor | None, first_token: int) -> None:
    check.tensor("logits", logits, "rows vocab", FLOATS)
    vocab = check["vocab"]
    check.require(vocab > 0, "logits", "of shape [rows, vocab] with vocab > 0", str(list(logits.shape)))
    check.tensor("tokens", tokens, "rows", (torch.int64, torch.int32))
    check.require(0 <= top_k <= vocab, "top_k", f"from 0 to the {vocab} tokens of logits", top_k)
    check.tensor("temperature", temperature, "rows", torch.float32)
    check.require(0 <= first_token <= MOST_TOKENS - vocab, "first_token", f"from 0 to 2^31 - 1 - {vocab}", first_token)


@token_logprobs.fake
def _(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty((rows, top_k), dtype=torch.float32),
        logits.new_empty((rows, top_k), dtype=torch.int32),
        logits.new_empty(rows, dtype=torch.float32),
    )


@recipe
def _inputs(
    rows: int,
    vocab: int,
    top_k: int = 0,
    dtype: torch.dtype = torch.float32,
    warm: bool = False,
    tokens_dtype: torch.dtype = torch.int64,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        first = options.get("first_token", 0)
        arguments = {
            "logits": draw.normal(rows, vocab, dtype=dtype, scale=4.0),
            # With a sharded vocabulary, most tokens belong to other shards.
            "tokens": draw.integers(0, vocab + 2 * first, rows, dtype=tokens_dtype),
            "top_k": top_k,
            **options,
        }
        if warm:
            arguments["temperature"] = draw.uniform(rows, high=2.0) * draw.integers(0, 4, rows).clamp(max=1)
        return arguments

    return make


def _ties(draw: Draw) -> dict[str, Any]:
    arguments = _inputs(9, 4000, 20)(draw)
    arguments["logits"] = draw.integers(-3, 3, 9, 4000).float()
    arguments["logits"][:3] = 1.0
    return arguments


def _odd_values(draw: Draw) -> dict[str, Any]:
    arguments = _inputs(7, 300, 40)(draw)
    logits = arguments["logits"]
    logits[0, 17::50] = float("nan")
    logits[0, 17] = -float("nan")  # the sign bit is set
    logits[1] = float("-inf")
    logits[2, [40, 200]] = float("inf")
    logits[3, 1:] = float("-inf")
    logits[4, ::2] = float("-inf")
    logits[5] = logits[5].sign() * 0.0
    arguments["tokens"] = draw.tensor([17, 5, 3, 9, 1, -1, 300], torch.int64)
    return arguments


@token_logprobs.cases
def _() -> list[Case]:
    return [
        Case("one token", _inputs(1, 1, 1)),
        Case("no top tokens, float16", _inputs(5, 3001, 0, torch.float16)),
        Case("odd vocab 101, all its tokens", _inputs(3, 101, 101)),
        Case("temperatures, int32 tokens, bfloat16", _inputs(9, 5000, 5, torch.bfloat16, True, torch.int32)),
        Case("a part of a vocabulary", _inputs(11, 2500, 20, torch.float32, True, first_token=2500, normalize=False)),
        Case("float64", _inputs(3, 700, 20, torch.float64)),
        Case("ties beyond the top tokens", _ties),
        Case("nan, inf, -inf, zeros, and tokens out of range", _odd_values),
        Case("no rows", _inputs(0, 100, 5)),
        Case("gpt-oss-120b decode 2, 20 top tokens", _inputs(2, 201088, 20)),
        Case("gpt-oss-120b decode 64, 20 top tokens", _inputs(64, 201088, 20), large=True),
        Case("gpt-oss-120b decode 64, 20 top tokens, bfloat16", _inputs(64, 201088, 20, torch.bfloat16), large=True),
        Case("gpt-oss-120b decode 64, the given tokens only", _inputs(64, 201088, 0), large=True),
        Case("gpt-oss-120b decode 1, 5 top tokens", _inputs(1, 201088, 5), large=True),
        Case(
            "gpt-oss-120b decode 64, 20 top tokens, a part of 8",
            _inputs(64, 25136, 20, first_token=25136, normalize=False),
            large=True,
        ),
        Case("llama-3 prompt 1024, 5 top tokens, bfloat16", _inputs(1024, 128256, 5, torch.bfloat16), large=True),
    ]


@token_logprobs.vary
def _(variation: Variation, logits: Tensor, tokens: Tensor, first_token: int) -> dict[str, Tensor]:
    rows, vocab = logits.shape
    if variation.want is Want.UNUSED:
        end = first_token + vocab
        return {"tokens": absent_ids(tokens, (tokens < first_token) | (tokens >= end), end)}
    return {"tokens": variation.draw.integers(0, vocab + 2 * first_token, rows, dtype=tokens.dtype)}


@token_logprobs.cost
def _(logits: Tensor, tokens: Tensor, top_k: int, temperature: Tensor | None) -> Cost:
    outputs = 8.0 * logits.shape[0] * (1 + top_k)
    # An exponential, a comparison and an addition for each logit.
    return Cost(flops=3.0 * logits.numel(), bytes=nbytes(logits, tokens, temperature) + outputs)

"""Logit biases, and repetition, frequency and presence penalties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, absent_ids, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.variation import Variation, Want

_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@operator(
    "sampling",
    "adjust_logits",
    formats=("logits",),
    traits={"vocab": int},
    exact=True,
    in_place={"out": ("logits",)},
    varying=("rows",),
)
def adjust_logits(
    logits: Tensor,
    tokens: Tensor,
    counts: Tensor | None = None,
    logit_bias: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Adds biases and repetition, frequency and presence penalties to the logits of listed tokens.

    Each row lists tokens. These steps change the logit x of a listed token, in this order:

    1. ``x + logit_bias``;
    2. if its count is at least 0: ``x / repetition_penalty`` if x > 0, else ``x * repetition_penalty`` (Keskar et al., 2019,
       arXiv:1909.05858);
    3. if its count is at least 0: ``x - frequency_penalty * count``;
    4. if its count is above 0: ``x - presence_penalty``.

    A count of 0 marks a token that occurs in the prompt only. A count of -1 marks a token that is listed only for its bias. Each
    step is computed in float64. The result is rounded to float32 (not for float64 logits), and then to the logits' dtype. Logits of
    other tokens are unchanged. With ``out=logits`` the other logits are neither read nor written. So the cost depends on the lists,
    not on the vocabulary.

    Args:
        logits: float16, bfloat16, float32 or float64 ``[rows, vocab]``, vocab > 0.
        tokens: int32 ``[rows, listed]``, the tokens of each row, each at most once. Entries outside 0 to vocab - 1, such as -1,
            are ignored.
        counts: int32 ``[rows, listed]``: how often the row has generated each token; required with penalties.
        logit_bias: float32 ``[rows, listed]``; 0 adds nothing.
        repetition_penalty: float32 ``[rows]``, > 0; 1 changes nothing.
        frequency_penalty: float32 ``[rows]``; 0 changes nothing.
        presence_penalty: float32 ``[rows]``; 0 changes nothing.
        out: receives the result; may be logits.

    Returns:
        Like logits and contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched. Values are checked if they
            lie in host memory. In device memory they are not checked: if a row lists a token twice, the result for that token is
            unspecified.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import adjust_logits
        >>> logits = torch.tensor([[4.0, 3.0, -2.0, 1.0]])
        >>> tokens = torch.tensor([[0, 2, 3, -1]], dtype=torch.int32)
        >>> counts = torch.tensor([[2, 0, -1, 0]], dtype=torch.int32)
        >>> logit_bias = torch.tensor([[0.0, 0.0, 5.0, 0.0]])
        >>> adjust_logits(logits, tokens, counts, logit_bias, torch.tensor([2.0]), torch.tensor([0.25]), torch.tensor([0.5]))
        tensor([[ 1.,  3., -4.,  6.]])

    Safe in CUDA graphs.
    """
    vocab = logits.shape[1]
    listed = (tokens >= 0) & (tokens < vocab)
    x = logits.gather(1, torch.where(listed, tokens, 0).long()).double()
    if logit_bias is not None:
        x = x + logit_bias.double()
    if counts is not None:
        seen = counts >= 0
        if repetition_penalty is not None:
            penalty = repetition_penalty.double().unsqueeze(1)
            x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
        if frequency_penalty is not None:
            x = torch.where(seen, x - frequency_penalty.double().unsqueeze(1) * counts.double(), x)
        if presence_penalty is not None:
            x = torch.where(counts > 0, x - presence_penalty.double().unsqueeze(1), x)
    if logits.dtype != torch.float64:
        x = x.float()
    # Ignored entries are scattered to an extra column.
    wide = torch.nn.functional.pad(logits, (0, 1))
    return wide.scatter(1, torch.where(listed, tokens, vocab).long(), x.to(logits.dtype))[:, :vocab].contiguous()


@adjust_logits.traits
def _(logits: Tensor) -> dict[str, object]:
    return {"vocab": logits.shape[-1]}


@adjust_logits.check
def _(
    check: Checker,
    logits: Tensor,
    tokens: Tensor,
    counts: Tensor | None,
    logit_bias: Tensor | None,
    repetition_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
    presence_penalty: Tensor | None,
) -> None:
    check.tensor("logits", logits, "rows vocab", FLOATS)
    check.require(check["vocab"] > 0, "logits", "of shape [rows, vocab] with vocab > 0", str(list(logits.shape)))
    check.tensor("tokens", tokens, "rows listed", torch.int32)
    if counts is not None:
        check.tensor("counts", counts, "rows listed", torch.int32)
    if logit_bias is not None:
        check.tensor("logit_bias", logit_bias, "rows listed", torch.float32)
    for name, penalty in zip(_PENALTIES, (repetition_penalty, frequency_penalty, presence_penalty), strict=True):
        if penalty is not None:
            check.require(counts is not None, "counts", f"given, because {name} is", counts)
            check.tensor(name, penalty, "rows", torch.float32)


@adjust_logits.check_values(host=("tokens", "repetition_penalty"))
def _(check: Checker, logits: Tensor, tokens: Tensor | None, repetition_penalty: Tensor | None) -> None:
    if tokens is not None and tokens.numel():
        ordered = tokens.sort(dim=1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0) & (ordered[:, 1:] < logits.shape[1])
        if twice.any():
            row, place = twice.nonzero()[0].tolist()
            check.fail("tokens", "each token at most once in a row", f"{int(ordered[row, place])} twice in row {row}")
    if repetition_penalty is not None and not (repetition_penalty > 0).all():
        row = int((repetition_penalty > 0).logical_not().int().argmax())
        check.fail("repetition_penalty", "more than 0", f"{repetition_penalty[row].item():g} in row {row}")


@adjust_logits.fake
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _tokens(draw: Draw, rows: int, listed: int, vocab: int) -> Tensor:
    """Draws distinct tokens for each row. The last eighth of each row's entries, and tokens past the vocabulary, are -1."""
    step = max(1, vocab // max(listed, 1))
    tokens = torch.arange(listed, device=draw.device) * step + draw.integers(0, step, rows, 1)
    tokens = torch.where(tokens < vocab, tokens, -1)
    tokens[:, listed - listed // 8 :] = -1
    return tokens.int()


@recipe
def _inputs(
    rows: int,
    vocab: int,
    listed: int,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
    penalties: tuple[str, ...] = _PENALTIES,
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "logits": draw.normal(rows, vocab, dtype=dtype, scale=4.0),
            "tokens": _tokens(draw, rows, listed, vocab),
        }
        if penalties:
            arguments["counts"] = draw.integers(-1, 20, rows, listed).int()
        if bias:
            arguments["logit_bias"] = draw.normal(rows, listed, scale=5.0)
        for name in penalties:
            low, high = (0.5, 2.0) if name == "repetition_penalty" else (-2.0, 2.0)
            arguments[name] = draw.uniform(rows, low=low, high=high)
        return arguments

    return make


def _odd_values(draw: Draw) -> dict[str, Any]:
    arguments = _inputs(4, 100, 50, torch.float32)(draw)
    arguments["logits"][0, ::3] = float("-inf")
    arguments["logits"][1, ::3] = float("inf")
    arguments["logits"][2, ::2] = 0.0
    arguments["logit_bias"][3, ::4] = float("-inf")
    arguments["tokens"][3, -3:] = draw.tensor([100, 2**31 - 1, -(2**31)], torch.int32)
    return arguments


@adjust_logits.cases
def _() -> list[Case]:
    return [
        Case("one token, float32", _inputs(1, 1, 1, torch.float32)),
        Case("all kinds, odd vocab 1001, float16", _inputs(7, 1001, 77, torch.float16)),
        Case("all kinds, bfloat16", _inputs(33, 5000, 300)),
        Case("bias only", _inputs(3, 500, 20, torch.float32, penalties=())),
        Case("repetition only", _inputs(3, 500, 20, torch.float32, False, ("repetition_penalty",))),
        Case("frequency and presence", _inputs(3, 500, 20, torch.float32, False, ("frequency_penalty", "presence_penalty"))),
        Case("the whole vocabulary listed", _inputs(5, 700, 700)),
        Case("inf, -inf, zeros, and entries out of range", _odd_values),
        Case("nothing listed", _inputs(3, 64, 0)),
        Case("no rows", _inputs(0, 64, 4)),
        Case("gpt-oss-120b decode 64, 1024 listed, float32", _inputs(64, 201088, 1024, torch.float32), large=True),
        Case("gpt-oss-120b decode 64, 1024 listed", _inputs(64, 201088, 1024), large=True),
        Case("gpt-oss-120b decode 256, 4096 listed", _inputs(256, 201088, 4096), large=True),
        Case("llama-3 decode 64, 300 biased", _inputs(64, 128256, 300, penalties=()), large=True),
    ]


@adjust_logits.vary
def _(
    variation: Variation, logits: Tensor, tokens: Tensor, counts: Tensor | None, repetition_penalty: Tensor | None
) -> dict[str, Tensor]:
    draw, (rows, listed), vocab = variation.draw, tokens.shape, logits.shape[1]
    if variation.want is Want.UNUSED:
        return {"tokens": absent_ids(tokens, (tokens < 0) | (tokens >= vocab), vocab)}
    values = {"tokens": _tokens(draw, rows, listed, vocab)}
    if counts is not None:
        values["counts"] = draw.integers(-1, 20, rows, listed).int()
    if repetition_penalty is not None and variation.want is Want.CAPTURED:
        values["repetition_penalty"] = draw.uniform(rows, low=0.5, high=2.0)
    return values


@adjust_logits.cost
def _(
    logits: Tensor,
    tokens: Tensor,
    counts: Tensor | None,
    logit_bias: Tensor | None,
    repetition_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
    presence_penalty: Tensor | None,
) -> Cost:
    settings = nbytes(tokens, counts, logit_bias, repetition_penalty, frequency_penalty, presence_penalty)
    return Cost(flops=5.0 * tokens.numel(), bytes=2 * nbytes(logits) + settings)

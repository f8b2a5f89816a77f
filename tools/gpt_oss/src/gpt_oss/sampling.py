"""Sampling of the next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpt_oss.fields import SMALLEST, check_fields, describe, instance, integer, number, optional
from gpt_oss.transfer import to_device

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
# Valid values of the fields. The ranges of the first four are those of the tensors that hold the values: float32, int32 and int64.
# Those of the others keep logits far from the largest number of a dtype of 16 bits.
_FIELDS = {
    "temperature": number(0),
    "top_k": integer(0, 2**31 - 1),
    "top_p": number(SMALLEST, 1),
    "seed": integer(-(2**63), 2**63 - 1),
    "repetition_penalty": number(0.01, 100),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "logit_bias": optional(instance(Mapping, "a mapping from token ids to numbers")),
}
_BIASED, _BIAS = integer(0), number(-100, 100)


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a request.

    Attributes:
        temperature: divisor of the logits, from 0 to 1e38. 0 is greedy: the most likely token is selected, and top_k, top_p and
            seed have no effect.
        top_k: sample only from the k most likely tokens; 0 for all tokens. A k beyond the vocabulary is the same as 0.
        top_p: at most 1. Sample only from the smallest set of most likely tokens whose total probability reaches top_p.
        seed: an int64. A random choice depends only on the seed and on the number of tokens that the request has generated.
        repetition_penalty: from 0.01 to 100; 1 for none. Divides the logits above 0, and multiplies the others, of tokens that the
            prompt has or the request has generated.
        frequency_penalty: from -2 to 2. Is subtracted from a token's logit each time that the request has generated the token.
        presence_penalty: from -2 to 2. Is subtracted once from the logits of tokens that the request has generated.
        logit_bias: maps token ids to numbers from -100 to 100, which are added to the tokens' logits before the penalties. None for
            none.

    Raises:
        TypeError, ValueError: a field is not as stated; the message names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_sampling(self)

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty changes logits by the tokens that the request has generated."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def adjusts_logits(self) -> bool:
        """Whether a penalty or a bias changes logits."""
        return self.counts_tokens or bool(self.logit_bias)


def check_sampling(sampling: Sampling) -> None:
    """Raises TypeError or ValueError for the first field that is not as `Sampling` states.

    The constructor of `Sampling` calls this function. The engine calls it again, because unpickling does not call the constructor.
    """
    check_fields(_FIELDS, sampling)
    for token, bias in (sampling.logit_bias or {}).items():
        _BIASED.check("each of logit_bias", token)
        _BIAS.check(f"logit_bias[{describe(token)}]", bias)


def sample(ops: Any, logits: Tensor, choices: Sequence[Sampling], indices: Sequence[int]) -> Tensor:
    """Samples the next token of each row.

    Args:
        ops: the operators.
        logits: float ``[rows, vocab_size]``.
        choices: the sampling parameters of each row.
        indices: for each row, the number of tokens that its request has generated so far.

    Returns:
        Integer ``[rows]``, on the device of the logits.
    """
    if all(choice.temperature == 0 for choice in choices):
        return ops.argmax(logits)

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return to_device(values, dtype, logits.device)

    return ops.sample_top_k_top_p(
        logits,
        column([choice.temperature for choice in choices], torch.float32),
        column([choice.top_k for choice in choices], torch.int32),
        column([choice.top_p for choice in choices], torch.float32),
        column([choice.seed for choice in choices], torch.int64),
        column(indices, torch.int64),
    )

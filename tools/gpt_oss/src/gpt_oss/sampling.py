"""Sampling of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt_oss.fields import SMALLEST, check_fields, integer, number
from gpt_oss.transfer import to_device

# Valid values of the fields. The ranges are those of the tensors that hold the values: float32, int32 and int64.
_FIELDS = {
    "temperature": number(0),
    "top_k": integer(0, 2**31 - 1),
    "top_p": number(SMALLEST, 1),
    "seed": integer(-(2**63), 2**63 - 1),
}


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a request.

    Attributes:
        temperature: divisor of the logits, from 0 to 1e38. 0 is greedy: the most likely token is selected, and the other fields
            have no effect.
        top_k: sample only from the k most likely tokens; 0 for all tokens. A k beyond the vocabulary is the same as 0.
        top_p: at most 1. Sample only from the smallest set of most likely tokens whose total probability reaches top_p.
        seed: an int64. A random choice depends only on the seed and on the number of tokens that the request has generated.

    Raises:
        TypeError, ValueError: a field is not as stated; the message names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_sampling(self)


def check_sampling(sampling: Sampling) -> None:
    """Raises TypeError or ValueError for the first field that is not as `Sampling` states.

    The constructor of `Sampling` calls this function. The engine calls it again, because unpickling does not call the constructor.
    """
    check_fields(_FIELDS, sampling)


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

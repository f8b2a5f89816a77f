"""Choosing the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token, and the rest does not matter then.
        top_k: only the k most likely tokens are eligible; 0 for all.
        top_p: only the most likely tokens that together reach this probability are eligible.
        seed: with the token's number in its request, all that the random choice depends on: not on other requests.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"sampling needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1, got {self}")


def sample(ops: Any, logits: Tensor, choices: Sequence[Sampling], indices: Sequence[int]) -> Tensor:
    """The next token of each row.

    Args:
        ops: the operators.
        logits: float ``[rows, vocab_size]``.
        choices: how each row's token is chosen.
        indices: how many tokens each row's request has generated before.

    Returns:
        Integer ``[rows]``, on the device of the logits.
    """
    if all(choice.temperature == 0 for choice in choices):
        return ops.argmax(logits)

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(logits.device)

    return ops.sample_top_k_top_p(
        logits,
        column([choice.temperature for choice in choices], torch.float32),
        column([choice.top_k for choice in choices], torch.int32),
        column([choice.top_p for choice in choices], torch.float32),
        column([choice.seed for choice in choices], torch.int64),
        column(indices, torch.int64),
    )

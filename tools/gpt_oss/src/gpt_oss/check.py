"""Whether what an engine generated is what the reference would have: every operator's PyTorch body, no cache, no batching.

The reference is given each prompt with the tokens that were generated, and computes all positions in one pass. Where the token
that it would have chosen is the generated one at every position, it would have generated the same text by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import tokenspeed_kernel
from gpt_oss.batch import Piece, make_batch
from gpt_oss.config import Config
from gpt_oss.engine import Completion
from gpt_oss.kernels import reference_only
from gpt_oss.loader import TensorSource
from gpt_oss.model import GptOss
from gpt_oss.sampling import sample

# Relative error of a position's logits (Euclidean norms): at half of the positions at most the first, on average at most the
# second, which leaves room for positions at which a rounding tipped the choice of an expert. In half precision such positions are
# many, the more the deeper the model and the more experts it has; what to expect there is measured: the reference's own error in
# that dtype against float32. Twice that is allowed, because both are means over a hundred positions or so.
FLOAT32_TOLERANCES = (1e-5, 1e-2)
HALF_PRECISION_FACTOR = 2.0


@dataclass(frozen=True)
class Agreement:
    """How close generated logits are to the reference's.

    Attributes:
        sequences, tokens: how many there were.
        same_sequences, same_tokens: for how many the reference chooses the same.
        max_abs_difference: between any two logits.
        max_abs_logit: what to compare it with.
        median_error, mean_error: relative error of a position's logits, against the reference in float32.
        median_allowed, mean_allowed: what they may be.
    """

    sequences: int
    same_sequences: int
    tokens: int
    same_tokens: int
    max_abs_difference: float
    max_abs_logit: float
    median_error: float
    mean_error: float
    median_allowed: float
    mean_allowed: float

    @property
    def agrees(self) -> bool:
        """Whether the logits are within their tolerances. Tokens then differ only where roundings tipped a close choice."""
        return self.median_error <= self.median_allowed and self.mean_error <= self.mean_allowed

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees}


def compare_with_reference(
    config: Config,
    source: TensorSource,
    completions: Sequence[Completion],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Agreement:
    """Computes the completions' logits anew with the reference of every operator.

    Args:
        config, source: the model, which is built once more (twice, one after the other, in half precision).
        completions: at least one, with their logits kept.
        dtype, device: as they were generated.
    """
    got = torch.cat([torch.stack(completion.logits) for completion in completions])
    wanted = _reference_logits(config, source, completions, dtype, device)
    exact = wanted if dtype == torch.float32 else _reference_logits(config, source, completions, torch.float32, device)
    same = []
    with reference_only():
        for completion, logits in zip(completions, wanted, strict=True):
            tokens = completion.tokens
            chosen = sample(tokenspeed_kernel, logits, [completion.request.sampling] * len(tokens), range(len(tokens)))
            same.append([a == b for a, b in zip(chosen.tolist(), tokens, strict=True)])
    reference, truth = (torch.cat(logits).float().cpu() for logits in (wanted, exact))
    errors = _relative_errors(got, truth)
    if dtype == torch.float32:
        median_allowed, mean_allowed = FLOAT32_TOLERANCES
    else:
        expected = _relative_errors(reference, truth)
        median_allowed, mean_allowed = (HALF_PRECISION_FACTOR * error.item() for error in (expected.median(), expected.mean()))
    return Agreement(
        sequences=len(completions),
        same_sequences=sum(map(all, same)),
        tokens=len(errors),
        same_tokens=sum(map(sum, same)),
        max_abs_difference=(got - reference).abs().max().item(),
        max_abs_logit=reference.abs().max().item(),
        median_error=errors.median().item(),
        mean_error=errors.mean().item(),
        median_allowed=median_allowed,
        mean_allowed=mean_allowed,
    )


def _reference_logits(
    config: Config,
    source: TensorSource,
    completions: Sequence[Completion],
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[Tensor]:
    """The logits ``[tokens, vocab_size]`` that each completion's tokens were, or should have been, chosen by."""
    longest = max(len(c.request.prompt) + len(c.tokens) for c in completions)
    logits = []
    with reference_only():
        model = GptOss(config, source, dtype, device, max_positions=longest)
        for completion in completions:
            prompt = list(completion.request.prompt)
            batch = make_batch([Piece([*prompt, *completion.tokens[:-1]])], None, device)
            logits.append(model.forward(batch, None)[len(prompt) - 1 :])
    return logits


def _relative_errors(logits: Tensor, truth: Tensor) -> Tensor:
    return (logits - truth).norm(dim=-1) / truth.norm(dim=-1)

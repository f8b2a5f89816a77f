"""Compares an engine's tokens with the reference. The reference runs every operator's PyTorch body, without cache or batching.

The reference runs over each prompt and its generated tokens, all positions in one pass. If the reference selects the generated
token at every position, it would have generated the same text by itself.
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
from gpt_oss.kernels import reference_only
from gpt_oss.loader import TensorSource
from gpt_oss.model import GptOss
from gpt_oss.request import Completion
from gpt_oss.sampling import sample

# The relative error of a position's logits is measured in Euclidean norms. The two numbers are the limits of the median and of the
# mean over all positions. In float32, the limit of the mean is larger, because at a few positions a rounding error changes the
# selected expert. In half precision there are many such positions, more in deeper models and with more experts. So the limits for
# half precision are measured: the median and mean error of the reference itself, in this dtype against float32, times a factor. The
# factor is needed because about a hundred positions are a small sample.
FLOAT32_TOLERANCES = (1e-5, 1e-2)
HALF_PRECISION_FACTOR = 2.0


@dataclass(frozen=True)
class Agreement:
    """The agreement of the logits of generated tokens with the reference's logits.

    Attributes:
        sequences, tokens: numbers of compared sequences and tokens.
        same_sequences, same_tokens: numbers of sequences and tokens for which the reference selects the same tokens.
        max_abs_difference: the largest absolute difference between a logit and the reference's logit.
        max_abs_logit: the largest absolute logit of the reference, for scale.
        median_error, mean_error: median and mean, over all positions, of the logits' relative error against the float32 reference.
        median_allowed, mean_allowed: the limits of ``median_error`` and ``mean_error``.
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
        """Whether both errors are within their limits. If so, tokens differ only where rounding decided between close logits."""
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
    """Recomputes the logits of completions with the reference of every operator, and compares them with the engine's logits.

    Args:
        config, source: the model. It is built again by this function; in half precision twice, one after the other.
        completions: at least one completion. Each must come from a request with ``keep_logits``.
        dtype, device: dtype and device with which the completions were generated.
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
    """Returns, for each completion, the reference's logits ``[tokens, vocab_size]`` for the completion's tokens."""
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

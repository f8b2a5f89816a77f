"""Whether what an engine generated is what the reference would have: every operator's PyTorch body, no cache, no batching.

The reference is given each prompt with the tokens that were generated, and computes all positions in one pass. Where the token
that it would have chosen is the generated one at every position, it would have generated the same text by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gpt_oss.batch import Piece, make_batch
from gpt_oss.config import Config
from gpt_oss.engine import Completion
from gpt_oss.kernels import reference_only
from gpt_oss.loader import TensorSource
from gpt_oss.model import GptOss
from gpt_oss.sampling import sample

# Relative error of a position's logits (Euclidean norms): at half of the positions at most the first, at none more than the
# second. Roundings account for the first. The second leaves room for positions at which they tipped the choice of an expert.
TOLERANCES = {torch.float32: (1e-5, 1e-2), torch.bfloat16: (2e-2, 0.5), torch.float16: (2e-3, 0.5)}


@dataclass(frozen=True)
class Agreement:
    """How close generated logits are to the reference's.

    Attributes:
        sequences, tokens: how many there were.
        same_sequences, same_tokens: for how many the reference chooses the same.
        max_abs_difference: between any two logits.
        max_abs_logit: what to compare it with.
        median_error, max_error: relative error of a position's logits, over all positions.
        median_allowed, max_allowed: what they may be.
    """

    sequences: int
    same_sequences: int
    tokens: int
    same_tokens: int
    max_abs_difference: float
    max_abs_logit: float
    median_error: float
    max_error: float
    median_allowed: float
    max_allowed: float

    @property
    def agrees(self) -> bool:
        """Whether the logits are within their tolerances. Tokens then differ only where roundings tipped a close choice."""
        return self.median_error <= self.median_allowed and self.max_error <= self.max_allowed

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
        config, source: the model, which is built once more.
        completions: at least one, with their logits kept.
        dtype, device: as they were generated.
    """
    wanted, got, same = [], [], []
    longest = max(len(c.request.prompt) + len(c.tokens) for c in completions)
    with reference_only():
        model = GptOss(config, source, dtype, device, max_positions=longest)
        for completion in completions:
            prompt, tokens = list(completion.request.prompt), completion.tokens
            batch = make_batch([Piece([*prompt, *tokens[:-1]])], None, device)
            logits = model.forward(batch, None)[len(prompt) - 1 :]
            chosen = sample(model.ops, logits, [completion.request.sampling] * len(tokens), range(len(tokens)))
            same.append([a == b for a, b in zip(chosen.tolist(), tokens, strict=True)])
            wanted.append(logits.float().cpu())
            got.append(torch.stack(completion.logits))
    reference, difference = torch.cat(wanted), torch.cat(got) - torch.cat(wanted)
    errors = difference.norm(dim=-1) / reference.norm(dim=-1)
    median, most = TOLERANCES[dtype]
    return Agreement(
        sequences=len(completions),
        same_sequences=sum(map(all, same)),
        tokens=len(errors),
        same_tokens=sum(map(sum, same)),
        max_abs_difference=difference.abs().max().item(),
        max_abs_logit=reference.abs().max().item(),
        median_error=errors.median().item(),
        max_error=errors.max().item(),
        median_allowed=median,
        max_allowed=most,
    )

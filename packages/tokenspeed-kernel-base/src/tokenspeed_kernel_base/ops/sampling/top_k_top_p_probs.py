"""The probabilities that sampling draws from, for speculative sampling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.sampling.sample_top_k_top_p import (
    REQUEST,
    check_request,
    check_request_values,
    mixed_inputs,
    request_inputs,
    sample_top_k_top_p,
)
from tokenspeed_kernel_base.ops.sampling.weights import kept_weights
from tokenspeed_kernel_base.variation import Variation

Make = Callable[[Draw], dict[str, Any]]
_OF_THE_DRAW = ("seed", "offset", "out_dtype")


@operator("sampling", "top_k_top_p_probs", formats=("logits",), traits={"vocab": int}, exact=True, varying=("rows",))
def top_k_top_p_probs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns token probabilities after temperature, min-p, top-k and top-p: the distribution that `sample_top_k_top_p` samples
    from.

    A kept token of weight w has the probability ``w * (1 / S)``, where S is the sum of the weights of all kept tokens.
    `sample_top_k_top_p` defines the weights and the kept tokens. Both operations are float64; the result is rounded to float32.
    All other tokens have probability 0. A row is greedy if its temperature is 0 or its largest logit is not finite. In a greedy
    row, the token of `argmax` has probability 1. So a row never holds NaN, and sums to 1 except for rounding.

    This operator computes the target's and the draft model's probabilities for `verify_draft_probs`, with one row for each node.
    Apply penalties and biases first, with `adjust_logits`.

    Args:
        logits: float16, bfloat16, float32 or float64 ``[rows, vocab]``, vocab in 1 to 2^22. May be strided.
        temperature: float32 ``[rows]``, finite, >= 0; 0 is greedy.
        top_k: int32 ``[rows]``, >= 0; 0, or more than vocab, keeps all tokens.
        top_p: float32 ``[rows]`` in (0, 1]; 1 keeps all tokens.
        min_p: float32 ``[rows]`` in [0, 1]; 0 keeps all tokens. None means 0 for all rows.
        out: float32 ``[rows, vocab]``, receives the result.

    Returns:
        float32 ``[rows, vocab]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched. Values are checked if the
            tensors lie in host memory. In device memory, out-of-range values are treated as in `sample_top_k_top_p`.

    Example:
        Speculative sampling: two tokens are drawn from a draft model's distributions and verified by the target's logits of the
        root and both drafts.

        >>> import torch
        >>> from tokenspeed_kernel import sample_top_k_top_p, top_k_top_p_probs, verify_draft_probs
        >>> draft_logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
        >>> target_logits = torch.tensor([[2.0, 1.5, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 3.0]])
        >>> def request(rows):
        ...     return torch.full((rows,), 0.8), torch.full((rows,), 2, dtype=torch.int32), torch.full((rows,), 0.9)
        >>> drafts = sample_top_k_top_p(draft_logits, *request(2), torch.tensor([1, 1]), torch.tensor([7, 8]))
        >>> draft_probs = top_k_top_p_probs(draft_logits, *request(2)).view(1, 2, 3)
        >>> target_probs = top_k_top_p_probs(target_logits, *request(3)).view(1, 3, 3)
        >>> root = torch.tensor([5])
        >>> draft_tokens = torch.cat((root, drafts)).view(1, 3)
        >>> tokens, path, counts = verify_draft_probs(target_probs, draft_probs, draft_tokens, torch.tensor([1]), torch.tensor([6]))
        >>> int(counts) == int((tokens >= 0).sum())
        True

    Safe in CUDA graphs.
    """
    weight = kept_weights(logits, temperature, top_k, top_p, min_p).double()
    return (weight * (1 / weight.sum(-1, keepdim=True))).float()


@top_k_top_p_probs.traits
def _(logits: Tensor) -> dict[str, object]:
    return {"vocab": logits.shape[-1]}


top_k_top_p_probs.check(check_request)
top_k_top_p_probs.check_values(host=REQUEST)(check_request_values)


@top_k_top_p_probs.fake
def _(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _without_draw(make: Make, draw: Draw, most: int | None = None) -> dict[str, Any]:
    """Returns the first ``most`` rows of a `sample_top_k_top_p` case, without the arguments of the random draw."""
    return {name: value[:most] for name, value in make(draw).items() if name not in _OF_THE_DRAW}


@recipe
def _inputs(
    rows: int,
    vocab: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Make:
    return functools.partial(_without_draw, request_inputs(rows, vocab, temperature, top_k, top_p, dtype))


@recipe
def _mixed(rows: int, vocab: int, dtype: torch.dtype, min_p: bool = False) -> Make:
    return functools.partial(_without_draw, mixed_inputs(rows, vocab, dtype, min_p))


@top_k_top_p_probs.cases
def _() -> list[Case]:
    bf16, verify, both = torch.bfloat16, "gpt-oss-120b, 16 x 5 nodes", (0.7, 40, 0.95)
    shared = {case.name: case.make for case in sample_top_k_top_p.operator.all_cases()}
    strange = (
        "ties across top-k and top-p",
        "nan, inf, -inf and a tiny temperature",
        "all but a few tokens are masked",
        "flat: thousands of tokens share the probability",
    )
    return [
        Case("one token", _inputs(1, 1)),
        Case("a small vocabulary", _inputs(3, 50, *both)),
        Case("requests of all kinds, odd vocab 1001, bfloat16", _mixed(12, 1001, bf16)),
        Case("requests of all kinds, float16", _mixed(6, 4096, torch.float16)),
        Case("requests of all kinds with min-p", _mixed(8, 3001, torch.float32, min_p=True)),
        *(Case(name, functools.partial(_without_draw, shared[name], most=6)) for name in strange),
        Case("no rows", _inputs(0, 100)),
        Case(f"{verify}, top-k 40, top-p 0.95", _inputs(80, 201088, *both), large=True),
        Case(f"{verify}, top-k 40, top-p 0.95, bfloat16", _inputs(80, 201088, *both, bf16), large=True),
        Case(f"{verify}, top-p 0.9", _inputs(80, 201088, 1.0, 0, 0.9), large=True),
        Case(f"{verify}, no limits", _inputs(80, 201088, 1.0), large=True),
        Case("llama-3, 64 x 6 nodes, top-k 40, top-p 0.95", _inputs(384, 128256, *both), large=True),
    ]


@top_k_top_p_probs.work
def _(temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None) -> Any:
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return sample_top_k_top_p.operator.run_hook("work", given)


@top_k_top_p_probs.vary
def _(variation: Variation, logits: Tensor, min_p: Tensor | None) -> dict[str, Tensor]:
    varied = sample_top_k_top_p.operator.run_hook("vary", {"logits": logits, "min_p": min_p}, variation)
    return {name: value for name, value in varied.items() if name not in _OF_THE_DRAW}


@top_k_top_p_probs.cost
def _(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None) -> Cost:
    settings = nbytes(temperature, top_k, top_p, min_p)
    # The cost of sampling, plus the division.
    return Cost(flops=6.0 * logits.numel(), bytes=nbytes(logits) + settings + 4.0 * logits.numel())

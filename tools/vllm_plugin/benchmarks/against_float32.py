"""Compares an engine's logits with those of ``float32.py``, row by row: once with the experts that the engine selected, once with
the experts that ``float32.py`` selects.

All prompts are prefilled in one step, so that row r of each step's logits belongs to request r.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from float32 import Model, Run, best, head, run
from torch import Tensor

# Prompt lengths in tokens; together they fit into one step of 8,192 tokens.
LENGTHS = (5, 9, 17, 33, 48, 64, 100, 127, 128, 129, 200, 256, 257, 300, 450, 512, 700, 1000, 3000)
GENERATED = 8
# A row counts as far off if the root mean square of its differences exceeds this many standard deviations of the row's logits.
FAR = 0.05
_SHARES = (0.5, 0.9, 0.99, 1.0)


def rows_of(logits: Sequence[Tensor], ids: Sequence[Sequence[int]]) -> Tensor:
    """Returns the logits of all requests, ``[requests, generated, vocabulary]``.

    Args:
        logits: the logits of each step, ``[requests, vocabulary]``.
        ids: the tokens that each request generated.

    Raises:
        RuntimeError: a row's most likely token differs from the token that the request generated, or the number of steps is wrong.
    """
    if len(logits) != len(ids[0]) or any(len(step) != len(ids) for step in logits):
        raise RuntimeError(f"expected {len(ids[0])} steps of {len(ids)} rows, got {[len(step) for step in logits]}")
    rows = torch.stack(list(logits), dim=1)
    said = rows.gather(-1, torch.tensor(ids, device=rows.device)[..., None])[..., 0]
    if not torch.equal(said, rows.amax(-1)):
        raise RuntimeError("the rows are not in the order of the requests")
    return rows


def chosen_experts(steps: Sequence[Tensor], lengths: Sequence[int], top_k: int) -> Tensor:
    """Returns the experts that an engine selected in one layer, ``[tokens, top_k]``, sequence by sequence.

    Args:
        steps: the router's logits of each step. The first step has all prompts' tokens, each later step one token per sequence.
        lengths: prompt lengths in tokens.
        top_k: number of experts per token.
    """
    prompts, later = steps[0].split(list(lengths)), torch.stack(list(steps[1:]), dim=1)
    return best(torch.cat([torch.cat((prompt, more)) for prompt, more in zip(prompts, later, strict=True)]), top_k)


def compare(
    model: Model, prompts: Sequence[Sequence[int]], ids: Sequence[Sequence[int]], rows: Tensor, routing: Sequence[Sequence[Tensor]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Compares an engine with the float32 model.

    Args:
        model: the model.
        prompts, ids: the prompts' tokens, and the generated tokens.
        rows: the engine's logits, ``[requests, generated, vocabulary]``.
        routing: for each layer, the engine's router logits by step; empty if unknown.

    Returns:
        A summary; and tensors by request and step, with which rows of several engines can be compared.
    """
    device, top_k = model.rotary.device, model.config["num_experts_per_tok"]
    lengths = [len(prompt) for prompt in prompts]
    # The last generated token is left out, because no step has it as input.
    sequences = [torch.tensor([*p, *g[:-1]], device=device) for p, g in zip(prompts, ids, strict=True)]
    ends = torch.tensor([len(sequence) for sequence in sequences], device=device).cumsum(0)
    asked = (ends[:, None] + torch.arange(-len(ids[0]), 0, device=device)).flatten()
    free = run(model, sequences)
    found: dict[str, Any] = {"rows": len(asked), "free": _far(model, free, asked, rows)}
    saved = {}
    if routing:
        experts = [chosen_experts(steps, lengths, top_k) for steps in routing]
        given = run(model, sequences, experts)
        found["given_experts"] = _far(model, given, asked, rows)
        found["moved"] = [_moved(logits, chosen) for logits, chosen in zip(given.routing, experts, strict=True)]
        moved = torch.stack([_differs(best(f, top_k), e)[asked] for f, e in zip(free.routing, experts, strict=True)]).any(0)
        saved["experts"] = torch.stack([chosen[asked] for chosen in experts], dim=1)
        far = torch.tensor([rms > FAR for rms in found["free"]["rms_of_rows"]], device=device)
        found["far_rows"] = {"all": int(far.sum()), "with_other_experts": int((far & moved).sum())}
        found["rows_with_other_experts"] = int(moved.sum())
    for part in ("free", "given_experts"):
        if part in found:
            found[part]["rms_of_rows"] = sorted(found[part]["rms_of_rows"], reverse=True)[:16]
    return found, {name: value.cpu() for name, value in saved.items()}


def _far(model: Model, found: Run, asked: Tensor, rows: Tensor) -> dict[str, Any]:
    """Returns statistics of the differences of the engine's logits from the float32 model's, in standard deviations of a row."""
    flat = rows.flatten(0, 1)
    rms, largest, agreed = [], [], 0
    for part, mine in zip(asked.split(16), flat.split(16), strict=True):
        exact, mine = head(model, found.hidden[part]), mine.to(asked.device).float()
        difference = (exact - mine).abs() / exact.std(-1, keepdim=True)
        rms += difference.square().mean(-1).sqrt().tolist()
        largest += difference.amax(-1).tolist()
        agreed += int((exact.argmax(-1) == mine.argmax(-1)).sum())
    ordered, tops = torch.tensor(rms).sort().values, torch.tensor(largest).sort().values
    return {
        "same_most_likely": agreed,
        "far": int((ordered > FAR).sum()),
        "rms": {share: round(ordered[int(share * (len(ordered) - 1))].item(), 5) for share in _SHARES},
        "largest": {share: round(tops[int(share * (len(tops) - 1))].item(), 4) for share in _SHARES},
        "rms_of_rows": [round(value, 5) for value in rms],
    }


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Returns which tokens have different experts in a and b, regardless of the experts' order."""
    return (a.sort(-1).values != b.sort(-1).values).any(-1)


def _moved(exact: Tensor, chosen: Tensor) -> dict[str, Any]:
    """Counts the tokens of a layer whose experts differ from those that the float32 model's logits select. Also returns the margin
    of these tokens: the difference between the logits of the last selected expert and the next expert.
    """
    top_k = chosen.shape[1]
    values = exact.sort(-1, descending=True).values
    gap = (values[:, top_k - 1] - values[:, top_k]) / exact.std(-1)
    moved = _differs(best(exact, top_k), chosen)
    return {
        "tokens": len(chosen),
        "moved": int(moved.sum()),
        "median_gap": round(gap.median().item(), 4),
        "largest_gap_of_moved": round(gap[moved].max().item(), 4) if moved.any() else 0.0,
    }

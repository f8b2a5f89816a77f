"""Compares the results of two engines: greedy tokens, and logits as long as both engines have generated the same tokens.

``vllm_engine.py`` writes the results.

python compare.py results/vllm.pt results/plugin.pt
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

# Quantiles of the differences that are reported.
_SHARES = (0.5, 0.99, 1.0)
# A row counts as far off if the root mean square of its differences exceeds this many standard deviations of the row's logits.
_FAR = 0.05


def compare_logits(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Returns statistics of the differences of logits, in standard deviations of a row. A step counts only if the engines have
    generated the same tokens before it.

    ``lead`` is the difference between the logits of the two most likely tokens, in the same unit. ``of_rows`` has the root mean
    square of each row's differences, largest first. ``far`` is the number of rows above the limit ``_FAR``.
    """
    differences, leads, of_rows, agreed, rows, steps = [], [], [], 0, 0, 0
    for x, y in zip(a["logits"], b["logits"], strict=False):
        if x.shape != y.shape:
            break
        x, y = x.float(), y.float()
        scale = x.std(-1, keepdim=True)
        difference = (x - y).abs() / scale
        differences.append(difference.flatten())
        of_rows += difference.square().mean(-1).sqrt().tolist()
        first, second = x.topk(2, -1).values.unbind(-1)
        leads.append((first - second) / scale[:, 0])
        agreed += int((x.argmax(-1) == y.argmax(-1)).sum())
        rows, steps = rows + len(x), steps + 1
        if not torch.equal(x.argmax(-1), y.argmax(-1)):
            break
    if not steps:
        return {"steps": 0}
    every, lead = torch.cat(differences).sort().values, torch.cat(leads)
    return {
        "steps": steps,
        "rows": rows,
        "argmax_same": f"{agreed}/{rows}",
        "rms": round(every.square().mean().sqrt().item(), 5),
        "shares": {share: round(every[int(share * (len(every) - 1))].item(), 4) for share in _SHARES},
        "lead": round(lead.median().item(), 4),
        "far": sum(rms > _FAR for rms in of_rows),
        "of_rows": [round(rms, 5) for rms in sorted(of_rows, reverse=True)],
    }


def compare_rows(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Returns statistics of the differences of logits of several prompts, in standard deviations of a row. A row counts only if the
    engines have generated the same tokens before it.

    If the experts that both engines selected are known, rows with equal experts and with different experts are reported separately.
    """
    same_past = torch.tensor([
        [x[:step] == y[:step] for step in range(len(x))] for x, y in zip(a["ids"], b["ids"], strict=True)
    ])  # fmt: skip
    x, y = a["rows"][same_past].float(), b["rows"][same_past].float()
    difference = (x - y).abs() / x.std(-1, keepdim=True)
    rms, largest = difference.square().mean(-1).sqrt(), difference.amax(-1)
    found: dict[str, Any] = {"all": _of_rows(rms, largest)}
    if "experts" in a and "experts" in b:
        kept = same_past.flatten()
        same = (a["experts"][kept].sort(-1).values == b["experts"][kept].sort(-1).values).all(-1).all(-1)
        found |= {"same_experts": _of_rows(rms[same], largest[same]), "other_experts": _of_rows(rms[~same], largest[~same])}
    return found


def _of_rows(rms: torch.Tensor, largest: torch.Tensor) -> dict[str, Any]:
    def shares(values: torch.Tensor) -> dict[float, float]:
        ordered = values.sort().values
        return {share: round(ordered[int(share * (len(ordered) - 1))].item(), 4) for share in _SHARES if len(ordered)}

    return {"rows": len(rms), "far": int((rms > _FAR).sum()), "rms": shares(rms), "largest": shares(largest)}


def compare_tokens(a: list[list[int]], b: list[list[int]]) -> dict[str, Any]:
    """Counts the tokens that are equal at the same position, and the tokens that are equal up to the first difference of a
    prompt.
    """
    total = same = until_first = whole = 0
    for x, y in zip(a, b, strict=True):
        total += len(x)
        same += sum(p == q for p, q in zip(x, y, strict=True))
        first = next((i for i, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), len(x))
        until_first += first
        whole += first == len(x)
    given = until_first + len(a) - whole
    return {
        "tokens": total,
        "same": round(same / total, 4) if total else None,
        "same_given_the_same_past": round(until_first / given, 4) if given else None,
        "sequences_same": f"{whole}/{len(a)}",
    }


def compared(a: dict[str, Any], b: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Compares all kinds of results that both engines have."""
    found = {}
    if "logits" in a and "logits" in b:
        found["logits"] = compare_logits(a, b)
    for name in ("float32", "prompts"):
        if name in a and name in b:
            found[name] = compare_rows(a[name], b[name])
    if "tokens" in a and "tokens" in b:
        found["tokens"] = compare_tokens(a["tokens"], b["tokens"])
    if "requests" in a and "requests" in b:
        names = [name for name, ids in a["requests"].items() if ids and len(b["requests"].get(name, [])) == len(ids)]
        of_both = ([side["requests"][name] for name in names] for side in (a, b))
        found["requests"] = compare_tokens(*of_both)
    return found


def report(first: str, second: str, found: dict[str, dict[str, Any]]) -> str:
    """Formats the result of `compared` as text, one line per comparison."""
    return "\n".join([f"{first} : {second}", *(f"  {name} {values}" for name, values in found.items())])


if __name__ == "__main__":
    files = [Path(word) for word in sys.argv[1:3]]
    print(report(files[0].stem, files[1].stem, compared(torch.load(files[0]), torch.load(files[1]))))

"""Compares what two engines computed: logits while both have generated the same tokens, and greedy tokens. See ``vllm_engine.py``.

    python compare.py results/vllm.pt results/plugin.pt
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch


def compare_logits(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Differences of logits, relative to the standard deviation of a row: of steps before which all tokens agree."""
    steps = min(len(a["logits"]), len(b["logits"]))
    same, worst, rms, agreed = 0, 0.0, [], 0
    rows = 0
    for x, y in zip(a["logits"][:steps], b["logits"][:steps], strict=True):
        if x.shape != y.shape:
            break
        x, y = x.float(), y.float()
        scale = x.std(-1, keepdim=True)
        off = (x - y).abs() / scale
        worst, same = max(worst, off.max().item()), same + 1
        rms.append((off.square().mean().sqrt()).item())
        agreed += int((x.argmax(-1) == y.argmax(-1)).sum())
        rows += len(x)
        if not torch.equal(x.argmax(-1), y.argmax(-1)):
            break
    return {
        "steps": same,
        "rows": rows,
        "worst": round(worst, 4),
        "rms": round(sum(rms) / max(len(rms), 1), 5),
        "argmax_same": f"{agreed}/{rows}",
    }


def compare_tokens(a: list[list[int]], b: list[list[int]]) -> dict[str, Any]:
    """How many tokens are the same in place, and how many of those whose predecessors all are."""
    total = same = first = 0
    whole = 0
    for x, y in zip(a, b, strict=True):
        total += len(x)
        same += sum(p == q for p, q in zip(x, y, strict=True))
        until = next((i for i, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), len(x))
        first += until
        whole += until == len(x)
    diverged = len(a) - whole
    return {
        "tokens": total,
        "same": round(same / total, 4),
        "same_given_the_same_past": round(first / (first + diverged), 4) if first + diverged else None,
        "sequences_same": f"{whole}/{len(a)}",
    }


def main() -> None:
    a, b = (torch.load(Path(name)) for name in sys.argv[1:3])
    print(*(Path(name).stem for name in sys.argv[1:3]), sep=" : ")
    if "logits" in a and "logits" in b:
        print(" logits", compare_logits(a, b))
    if "tokens" in a and "tokens" in b:
        print(" tokens", compare_tokens(a["tokens"], b["tokens"]))
    if "requests" in a and "requests" in b:
        names = [name for name, ids in a["requests"].items() if ids and len(b["requests"].get(name, [])) == len(ids)]
        print(" requests", compare_tokens([a["requests"][name] for name in names], [b["requests"][name] for name in names]))


if __name__ == "__main__":
    main()

"""What the tests of kernels with a paged cache share: inputs, the reference in float32, and what is compared."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.cases import Draw
from tokenspeed_kernel.ops.attention._inputs import paged

ERROR = 5e-3  # relative, of the whole output
LSE_ERROR = 1e-3


def inputs(device: torch.device, kv_lens: list[int], q_lens: list[int] | None = None, **options: Any) -> dict[str, Any]:
    """Arguments of an operator; NaN lies in slots that hold no token."""
    shape = {"heads": 8, "kv_heads": 2, **options}
    return paged(kv_lens, q_lens, stale=True, **shape)(Draw(device, sum(kv_lens)))


def reference(operator: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp that the operator's body gives in float32."""
    wide = {name: arguments[name].float() for name in ("q", "k_cache", "v_cache")}
    return operator(**{**arguments, **wide, "return_lse": True}, solution="reference")


def check(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Holds the output as a whole and each of its rows, and the log-sum-exp, to the bars."""
    (out, lse), (wanted_out, wanted_lse) = got, wanted
    assert (out.float() - wanted_out).norm() <= ERROR * wanted_out.norm()
    rows = (out.float() - wanted_out).norm(dim=-1) - 4 * ERROR * wanted_out.norm(dim=-1)
    assert rows.max() <= 1e-6
    seen = torch.isfinite(wanted_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert (lse[seen] - wanted_lse[seen]).abs().max() <= LSE_ERROR


def spills(text: str) -> dict[str, int]:
    """What the compiler put aside, from a kernel's metadata."""
    found = re.findall(r"\.(sgpr_spill_count|vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", text)
    return {name: int(count) for name, count in found}


def longest_loop_without_loops(text: str) -> list[str]:
    """Mnemonics of the loop that has the most matrix instructions among the innermost ones, shortest first among equals."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in map(str.strip, text.splitlines()):
        label = re.match(r"(\.L\w+):", line)
        if label:
            labels[label[1]] = len(instructions)
        elif re.match(r"[a-z]\w*(\s|$)", line):
            instructions.append(line)
            branch = re.match(r"s_c?branch\w*\s+(\.L\w+)", line)
            if branch and branch[1] in labels:
                loops.append((labels[branch[1]], len(instructions)))
    innermost = [
        loop for loop in loops if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
    ]
    bodies = [[line.split()[0] for line in instructions[first:last]] for first, last in innermost]
    return max(bodies, key=lambda body: (sum(name.startswith("v_mfma") for name in body), -len(body)))

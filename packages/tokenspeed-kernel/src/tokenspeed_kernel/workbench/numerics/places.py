"""Describes where in a tensor the faulty elements are, and how a wrong result as a whole relates to the expected one.

Kernels work in tiles, so their faults often have a tile's shape: rows from 64 on, every second column, the last of 3 heads. The
description is derived from the faulty elements alone; kernels declare no tiles.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

_NAMED_FACTORS = {
    math.log2(math.e): "log2(e): a logarithm of base 2 instead of a natural logarithm",
    math.log(2): "ln(2): a natural logarithm instead of one of base 2",
    -1.0: "the sign is wrong",
}
_FEWEST_TO_RELATE = 4
_MOST_TO_SORT = 1 << 16


def describe_places(faulty: Tensor) -> str:
    """Returns the smallest strided slice that contains all faulty elements, in Python's syntax, and the fraction of the slice that
    is faulty.

    Args:
        faulty: bool mask of the tensor's shape, with at least one true element.

    Example:
        >>> import torch
        >>> faulty = torch.zeros(128, 8, dtype=torch.bool)
        >>> faulty[64:, 1::2] = True
        >>> describe_places(faulty)
        'all in [64:, 1::2] of [128, 8], all of it; axis 0 from a multiple of 64'
    """
    if faulty.dim() == 0:
        return "the only element"
    parts, notes, block = [], [], 1
    for axis, size in enumerate(faulty.shape):
        others = [a for a in range(faulty.dim()) if a != axis]
        hit = faulty.any(dim=others) if others else faulty
        indices = hit.nonzero().flatten().tolist()
        text, covered, start = _axis(indices, size)
        parts.append(text)
        block *= covered
        tile = start & -start
        if start and tile >= 8 and covered > 1:
            notes.append(f"axis {axis} from a multiple of {tile}")
    count = int(faulty.sum())
    share = "all of it" if count == block else f"{100 * count // block}% of it" if 100 * count >= block else "under 1% of it"
    where = "everywhere" if all(part == ":" for part in parts) else f"all in [{', '.join(parts)}]"
    return "; ".join([f"{where} of {list(faulty.shape)}, {share}", *notes])


def _axis(indices: list[int], size: int) -> tuple[str, int, int]:
    """Returns the smallest strided slice of one axis that contains all indices: its text, its length and its start."""
    first, last = indices[0], indices[-1]
    if len(indices) == 1:
        return (":", 1, 0) if size == 1 else (str(first), 1, first)
    steps = {b - a for a, b in itertools.pairwise(indices)}
    step = steps.pop() if len(steps) == 1 and len(indices) > 2 else 1
    start = "" if first < step and (step == 1 or first == 0) else str(first)
    stop = "" if last + step >= size else str(last + 1)
    return f"{start}:{stop}" + (f":{step}" if step > 1 else ""), (last - first) // step + 1, first


def relation(got: Tensor, expected: Tensor) -> str:
    """Describes a simple relation of a wrong result to the expected result (a factor, an offset) as text; empty if there is none.

    Example:
        >>> import torch
        >>> expected = torch.arange(1.0, 9.0)
        >>> relation(expected * 1.442695, expected)
        'got is 1.4427 times what is expected throughout (log2(e): a logarithm of base 2 instead of a natural logarithm)'
    """
    left, right = got.detach().reshape(-1).double(), expected.detach().reshape(-1).double()
    if bool(left.isnan().all()) and not bool(right.isnan().any()):
        return "got is NaN throughout"
    usable = left.isfinite() & right.isfinite()
    left, right = left[usable], right[usable]
    if len(left) < _FEWEST_TO_RELATE:
        return ""
    if torch.equal(left, right):
        return ""
    if not bool(left.any()):
        return "got is 0 throughout"
    squares, of_got = float(right.square().sum()), float(left.square().sum())
    if squares:
        factor = float((left * right).sum()) / squares
        if abs(factor - 1) > 0.01 and math.sqrt(float((left - factor * right).square().sum()) / of_got) < 0.01:
            named = next((f" ({name})" for value, name in _NAMED_FACTORS.items() if abs(factor / value - 1) < 0.003), "")
            return f"got is {factor:.5g} times what is expected throughout{named}"
    shift = float((left - right).mean())
    spread = float((left - right - shift).square().mean().sqrt())
    if shift and spread < 0.01 * abs(shift):
        return f"got is what is expected {'+' if shift > 0 else '-'} {abs(shift):.5g} throughout"
    if len(left) <= _MOST_TO_SORT and bool((right != right[0]).any()) and torch.equal(left.sort().values, right.sort().values):
        return "got has the expected values at other positions"
    return ""

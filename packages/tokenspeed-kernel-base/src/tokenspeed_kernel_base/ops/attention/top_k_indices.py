"""Selects the positions of the largest scores of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, poisoned, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention._checks import check_values_counts
from tokenspeed_kernel_base.ops.sampling.ordering import descending_order
from tokenspeed_kernel_base.variation import Variation, Want

# A ``top_k`` up to this limit is allowed even if rows have fewer keys. A limit is needed because the result has top_k columns.
_ALWAYS_ALLOWED = 1 << 20


def check_top_k(check: Checker, top_k: int, keys: int) -> None:
    """Checks ``top_k``, the number of positions to select, against the number of keys in a row."""
    most = max(keys, _ALWAYS_ALLOWED)
    check.require(1 <= top_k <= most, "top_k", f"from 1 to {most}, the keys of a row or 2^20 if they are fewer", top_k)


@operator("attention", "top_k_indices", formats=("scores",), traits={"top_k": int}, exact=True, varying=("rows", "keys"))
def top_k_indices(scores: Tensor, top_k: int, lengths: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Selects the positions of every row's ``top_k`` largest scores, in ascending order of position, padded with -1.

    The selection is exact and deterministic: among equal scores, the lower position wins. -0.0 equals 0.0, NaN ranks above every
    number, and -inf is never selected, so masked scores may be -inf.

    Args:
        scores: float16, bfloat16, float32 or float64 ``[rows, keys]``, fewer than 2^31 keys. May be strided.
        top_k: how many positions to select, from 1 to the larger of keys and 2^20.
        lengths: int32 ``[rows]``, 0 to keys: the number of leading scores of each row that are considered. None means all keys.
        out: receives the result.

    Returns:
        int32 ``[rows, top_k]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched. Values of lengths are
            checked only if they lie in host memory.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import top_k_indices
        >>> scores = torch.tensor([[1.0, 7.0, 3.0, 7.0, 7.0], [2.0, -torch.inf, 0.0, 0.0, 0.0]])
        >>> top_k_indices(scores, 3, lengths=torch.tensor([5, 3], dtype=torch.int32))
        tensor([[ 1,  3,  4],
                [ 0,  2, -1]], dtype=torch.int32)

    Safe in CUDA graphs.
    """
    keys = scores.shape[1]
    position = torch.arange(keys, device=scores.device)
    shown = scores if lengths is None else scores.masked_fill(position >= lengths.unsqueeze(1), -torch.inf)
    at = descending_order(shown)[:, :top_k]
    at = torch.where(shown.gather(1, at) == -torch.inf, keys, at).sort(dim=1).values
    chosen = torch.where(at == keys, -1, at).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, top_k - chosen.shape[1]), value=-1)


@top_k_indices.traits
def _(top_k: int) -> dict[str, object]:
    return {"top_k": top_k}


@top_k_indices.check
def _(check: Checker, scores: Tensor, top_k: int, lengths: Tensor | None) -> None:
    check.tensor("scores", scores, "rows keys", FLOATS)
    check.require(scores.shape[1] < 1 << 31, "scores", "of fewer than 2^31 keys", scores)
    check_top_k(check, top_k, scores.shape[1])
    check.tensor("lengths", lengths, "rows", torch.int32)


@top_k_indices.check_values(host=("lengths",))
def _(check: Checker, scores: Tensor, lengths: Tensor | None) -> None:
    check_values_counts(check, "lengths", lengths, scores.shape[1], "the keys of scores")


@top_k_indices.fake
def _(scores: Tensor, top_k: int) -> Tensor:
    return scores.new_empty(scores.shape[0], top_k, dtype=torch.int32)


@recipe
def _inputs(
    lengths: Sequence[int],
    top_k: int,
    keys: int | None = None,
    dtype: torch.dtype = torch.float32,
    steps: float = 0.0,
    hidden: bool = False,
    stated: bool = True,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws rows of normally distributed scores.

    Args:
        keys: number of keys in a row; by default the largest of ``lengths``.
        steps: if positive, scores are multiples of ``steps``, so that many are equal.
        hidden: whether every fourth score is -inf.
        stated: whether to pass ``lengths`` to the operator. Scores past a row's length are -inf in either case.
    """

    def make(draw: Draw) -> dict[str, Any]:
        width = max(lengths, default=0) if keys is None else keys
        scores = draw.normal(len(lengths), width)
        if steps > 0:
            scores = (scores / steps).round() * steps
        position = torch.arange(width, device=draw.device)
        ends = draw.tensor(list(lengths), torch.int32)
        scores = scores.masked_fill(position >= ends.unsqueeze(1), -torch.inf)
        if hidden:
            scores[:, ::4] = -torch.inf
        arguments: dict[str, Any] = {"scores": scores.to(dtype), "top_k": top_k}
        return {**arguments, "lengths": ends} if stated else arguments

    return make


def _extremes(draw: Draw) -> dict[str, Any]:
    inf, nan = torch.inf, torch.nan
    rows = [
        [0.0, -0.0, 1.0, -0.0, 0.0, -1.0, -0.0],
        [nan, inf, -inf, -nan, 3.0, inf, -inf],  # the second NaN has the sign bit set
        [-inf, -inf, -inf, -inf, -inf, -inf, -3e38],
        [1e-45, -1e-45, 0.0, 1e-40, -1e-40, -0.0, 1e-45],
        [5.0] * 7,
    ]
    return {"scores": draw.tensor(rows, torch.float32), "top_k": 3}


@top_k_indices.cases
def _() -> list[Case]:
    return [
        Case("zeros, NaN, infinities, tiny numbers", _extremes),
        Case("fewer than wanted, as many, more", _inputs([0, 1, 31, 32, 33, 700], 32)),
        Case("equal scores, no lengths", _inputs([500, 90], 64, steps=0.5, stated=False)),
        Case("hidden ones among them, bfloat16", _inputs([300, 40], 48, dtype=torch.bfloat16, hidden=True)),
        Case("long rows", _inputs([6000, 9000, 5], 300, keys=9001)),
        Case("long rows of few numbers, float16", _inputs([9000], 700, dtype=torch.float16, steps=0.25)),
        Case("more than there are keys", _inputs([5, 9], 20)),
        Case("equal scores, float64", _inputs([40, 9, 3], 6, dtype=torch.float64, steps=0.5)),
        Case("no rows", _inputs([], 4, keys=9)),
        Case("deepseek-v3.2 decode 64 x 65536", _inputs([65536] * 64, 2048), large=True),
        Case("deepseek-v3.2 decode 1 x 65536", _inputs([65536], 2048), large=True),
        Case("deepseek-v3.2 decode 64 of 4096 to 65536", _inputs([4096, 8192, 16384, 65536] * 16, 2048), large=True),
        Case("deepseek-v3.2 decode 8 x 131072", _inputs([131072] * 8, 2048), large=True),
        Case("deepseek-v3.2 prefill 2048 of 16384", _inputs(range(14337, 16385), 2048), large=True),
        Case("half of 65536 are equal, 16 rows", _inputs([65536] * 16, 2048, steps=3.0), large=True),
    ]


@top_k_indices.work
def _(lengths: Tensor | None) -> dict[str, list[int]]:
    return {} if lengths is None else {"lengths": lengths.tolist()}


@top_k_indices.vary
def _(variation: Variation, scores: Tensor, lengths: Tensor | None) -> dict[str, Tensor]:
    rows, keys = scores.shape
    if variation.want is Want.UNUSED:
        beyond = torch.arange(keys, device=scores.device) >= (keys if lengths is None else lengths.unsqueeze(1))
        return {"scores": poisoned(scores, beyond.expand(rows, keys))}
    if variation.want is Want.OTHER:
        return {"scores": scores.roll(1, 0)} if lengths is None else {"lengths": lengths.roll(1, 0)}
    made = {"scores": variation.draw.normal(rows, keys, dtype=scores.dtype)}
    if lengths is not None:
        counts = [min(length, keys) for length in variation.values("lengths", rows, keys)]
        made["lengths"] = variation.draw.tensor(counts, torch.int32)
    return made


@top_k_indices.cost
def _(scores: Tensor, top_k: int, lengths: Tensor | None) -> Cost:
    looked_at = scores.numel() if lengths is None else int(lengths.sum())
    return Cost(flops=1.0 * looked_at, bytes=float(looked_at * scores.element_size() + nbytes(lengths) + len(scores) * top_k * 4))

"""Router top-k: expert ids and routing weights of each token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.activation.softplus import softplus
from tokenspeed_kernel_base.ops.sampling.ordering import descending_order

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
# Added to the sum of the selected scores. It keeps the weights finite if all selected scores are zero, and is negligible otherwise.
_SMALLEST_SUM = 1e-20


@operator(
    "moe",
    "moe_topk",
    formats=("logits",),
    traits={
        "num_experts": int,
        "top_k": int,
        "sigmoid": bool,
        "sqrtsoftplus": bool,
        "renormalize": bool,
        "correction_bias": bool,
        "grouped": bool,
        "num_groups": int,
        "top_groups": int,
        "scaled": bool,
    },
    outs=("weights_out", "ids_out"),
    varying=("tokens",),
)
def moe_topk(
    logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling_factor: float = 1.0,
    weights_out: Tensor | None = None,
    ids_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Selects the ``top_k`` experts of each token, best first, and computes their routing weights.

    Experts are ranked by a rank value. Without a correction bias the rank value is the logit itself. Scores increase with logits,
    so ranking by scores would select the same experts, except for rounding. With a correction bias the rank value is ``score +
    bias``, rounded to float32 (Wang et al., 2024, arXiv:2408.15664). Among equal rank values the lower expert id comes first, so
    the selection is exactly reproducible.

    With ``num_groups`` above 1, group 0 consists of experts ``0 .. experts/num_groups - 1``, and so on. Only experts of the
    ``top_groups`` best groups can be selected. The value of a group is its highest rank value; with a correction bias, the sum of
    its two highest rank values. Among equal groups the lower index comes first (DeepSeek-AI, 2024, arXiv:2405.04434 and
    arXiv:2412.19437).

    The bias and the groups affect the selection only. The weight of a selected expert is its score: the softmax over all experts,
    the sigmoid, or ``sqrt(softplus(logit))`` with ``softplus(z) = log(1 + exp(z))``, as in DeepSeek-V4. With ``renormalize`` the
    weights of a token are divided by their sum. For softmax the result equals the softmax over the selected logits, and is computed
    that way. For the other scorings 1e-20 is added to the sum. Finally the weights are multiplied by ``scaling_factor``. Arithmetic
    is float32 (float64 for float64 logits).

    Args:
        logits: float16, bfloat16, float32 or float64 ``[tokens, experts]``. NaN ranks above every number.
        top_k: experts to select, from 1 to the number of experts in ``top_groups`` groups.
        scoring: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        renormalize: whether the weights of a token are divided by their sum, see above.
        correction_bias: ``[experts]``, any float dtype.
        num_groups: number of equal groups of experts; 1 for no groups.
        top_groups: number of groups that experts may come from, 1 to num_groups.
        scaling_factor: finite.
        weights_out: receives the weights.
        ids_out: receives the ids.

    Returns:
        weights: float32 ``[tokens, top_k]``; ids: int32 ``[tokens, top_k]``, by descending rank value.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import moe_topk
        >>> moe_topk(torch.tensor([[0.0, 2.0, -1.0, 2.0]]), top_k=2)
        (tensor([[0.5000, 0.5000]]), tensor([[1, 3]], dtype=torch.int32))

    Safe in CUDA graphs.
    """
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    scores = _scores(wide, scoring)
    ranked = wide if correction_bias is None else scores.float() + correction_bias.float()
    if num_groups == 1:
        ids = _best(ranked, top_k)
    else:
        size = ranked.shape[1] // num_groups
        grouped = ranked.reshape(ranked.shape[0], num_groups, size)
        if correction_bias is None:
            worth = grouped.amax(-1)
        else:
            worth = grouped.topk(min(2, size), dim=-1).values.sum(-1)
        # Rank only the experts of the best groups. Masking the other experts with -inf would make them tie with eligible experts at
        # -inf.
        eligible = _best(worth, top_groups).sort(-1).values  # ascending, so that the lower of two equal experts comes first
        place = _best(grouped.gather(1, eligible.unsqueeze(-1).expand(-1, -1, size)).flatten(-2), top_k)
        ids = eligible.gather(-1, place // size) * size + place % size
    if not renormalize:
        weights = scores.gather(-1, ids)
    elif scoring == "softmax":
        weights = torch.softmax(wide.gather(-1, ids), -1)
    else:
        chosen = scores.gather(-1, ids)
        weights = chosen / (chosen.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return (weights * scaling_factor).float(), ids.int()


def _scores(logits: Tensor, scoring: str) -> Tensor:
    if scoring == "softmax":
        return torch.softmax(logits, -1)
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    return softplus(logits).sqrt()


def _best(values: Tensor, count: int) -> Tensor:
    # torch.topk does not define the order of equal values.
    return descending_order(values)[..., :count]


@moe_topk.traits
def _(
    logits: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    correction_bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    scaling_factor: float,
) -> dict[str, object]:
    return {
        "num_experts": logits.shape[-1],
        "top_k": top_k,
        "sigmoid": scoring == "sigmoid",
        "sqrtsoftplus": scoring == "sqrtsoftplus",
        "renormalize": renormalize,
        "correction_bias": correction_bias is not None,
        "grouped": num_groups > 1,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "scaled": scaling_factor != 1.0,
    }


@moe_topk.check
def _(
    check: Checker,
    logits: Tensor,
    top_k: int,
    scoring: str,
    correction_bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    scaling_factor: float,
) -> None:
    check.tensor("logits", logits, "tokens experts", FLOATS)
    check.tensor("correction_bias", correction_bias, "experts", FLOATS)
    check.one_of("scoring", scoring, SCORINGS)
    experts = check["experts"]
    divides = num_groups >= 1 and experts % num_groups == 0
    check.require(divides, "num_groups", f"a divisor of the {experts} experts of logits", num_groups)
    check.require(1 <= top_groups <= num_groups, "top_groups", f"from 1 to num_groups = {num_groups}", top_groups)
    eligible = experts // num_groups * top_groups
    where = f"the {experts} experts of logits" if num_groups == 1 else f"the {eligible} experts of {top_groups} groups"
    check.require(1 <= top_k <= eligible, "top_k", f"from 1 to {where}", top_k)
    check.require(math.isfinite(scaling_factor), "scaling_factor", "finite", scaling_factor)


@moe_topk.fake
def _(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@recipe
def _inputs(
    tokens: int, experts: int, top_k: int, dtype: torch.dtype = torch.bfloat16, bias: bool = False, **options: Any
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        logits = draw.normal(tokens, experts, dtype=dtype, scale=2.0)
        correction_bias = draw.normal(experts, scale=0.1) if bias else None
        return {"logits": logits, "top_k": top_k, "correction_bias": correction_bias, **options}

    return make


def _ties(draw: Draw) -> dict[str, Any]:
    return {"logits": draw.integers(-1, 2, 16, 24).float(), "top_k": 7, "num_groups": 4, "top_groups": 2}


def _not_finite(draw: Draw) -> dict[str, Any]:
    logits = draw.integers(-2, 3, 8, 24).float()
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[row::4, row + 5 :: 7] = value
    logits[0, 5] = -torch.nan  # the sign bit is set
    return {"logits": logits, "top_k": 9, "scoring": "sigmoid"}


_GROUPS: dict[str, Any] = {"scoring": "sigmoid", "bias": True, "num_groups": 8, "top_groups": 4, "scaling_factor": 2.5}
_SQRTSOFTPLUS: dict[str, Any] = {"scoring": "sqrtsoftplus", "scaling_factor": 1.5}


@moe_topk.cases
def _() -> list[Case]:
    return [
        Case("gpt-oss-120b decode 64", _inputs(64, 128, 4)),
        Case("gpt-oss-20b decode 1", _inputs(1, 32, 4)),
        Case("deepseek-v3 decode 64", _inputs(64, 256, 8, torch.float32, **_GROUPS)),
        Case(
            "deepseek-v2 decode 16",
            _inputs(16, 160, 6, torch.float32, num_groups=8, top_groups=3, renormalize=False, scaling_factor=16.0),
        ),
        Case("softmax, bias, no groups", _inputs(9, 64, 6, torch.float32, bias=True)),
        Case("sigmoid, not renormalised, float16", _inputs(9, 16, 1, torch.float16, scoring="sigmoid", renormalize=False)),
        Case("square root of softplus, bias", _inputs(9, 96, 6, torch.float32, bias=True, **_SQRTSOFTPLUS)),
        Case("square root of softplus, not renormalised", _inputs(5, 40, 3, scoring="sqrtsoftplus", renormalize=False)),
        Case("groups of one expert", _inputs(5, 6, 2, torch.float32, bias=True, scoring="sigmoid", num_groups=6, top_groups=3)),
        Case("all 5 experts", _inputs(3, 5, 5, torch.float32)),
        Case("equal logits and groups", _ties),
        Case("NaN and infinities", _not_finite),
        Case("300 experts, 20 chosen", _inputs(3, 300, 20)),
        Case("no tokens", _inputs(0, 128, 4)),
        Case("gpt-oss-120b prefill 16384", _inputs(16384, 128, 4), large=True),
        Case("deepseek-v3 prefill 16384", _inputs(16384, 256, 8, torch.float32, **_GROUPS), large=True),
    ]


@moe_topk.cost
def _(logits: Tensor, top_k: int, correction_bias: Tensor | None) -> Cost:
    outputs = logits.shape[0] * top_k * 8
    return Cost(flops=3.0 * logits.numel(), bytes=nbytes(logits, correction_bias) + outputs)

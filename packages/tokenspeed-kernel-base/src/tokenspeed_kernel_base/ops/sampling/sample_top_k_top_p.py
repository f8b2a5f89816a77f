"""Reproducible sampling with temperature, min-p, top-k and top-p."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.sampling.philox import uniform
from tokenspeed_kernel_base.ops.sampling.weights import WEIGHT_BITS, kept_weights
from tokenspeed_kernel_base.variation import Variation, Want

# The largest weight is 2^WEIGHT_BITS, and the sum of MAX_VOCAB such weights fits into int64.
MAX_VOCAB = 1 << (62 - WEIGHT_BITS)
REQUEST = ("temperature", "top_k", "top_p", "min_p")


@operator("sampling", "sample_top_k_top_p", formats=("logits",), traits={"vocab": int}, exact=True, varying=("rows",))
def sample_top_k_top_p(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    offset: Tensor,
    min_p: Tensor | None = None,
    out_dtype: torch.dtype = torch.int64,
    out: Tensor | None = None,
) -> Tensor:
    """Samples one token for each row from ``softmax(logits / temperature)``, restricted by min-p, top-k and top-p.

    The tokens of a row are ordered by descending logit, then by ascending id. Three filters apply in turn. Min-p keeps tokens
    whose probability is at least ``min_p`` times that of the first token (Nguyen et al., 2024, arXiv:2407.01082). Top-k keeps the
    first ``top_k`` of these (Fan et al., 2018, arXiv:1805.04833). Top-p keeps the shortest prefix of the remaining tokens that has
    at least ``top_p`` of their probability (Holtzman et al., 2020, arXiv:1904.09751). One of the kept tokens is drawn by inverting
    their cumulative distribution, in ascending order of ids. The random number depends on the row's ``seed`` and ``offset`` only.
    So the same row with the same seed and offset gives the same token in any batch, at any row index, on any device and with any
    backend.

    The exact definition: the weight of a token is ``w = floor(2^40 * exp((logit - max(logits)) / temperature))``, in int64.
    `tokenspeed_kernel_base.ops.sampling.weights.weights` computes w from the float32 values ``logit - max(logits)`` and ``log2(e) /
    temperature``, so that w is the same on every device. The computed w deviates from the formula by a relative error of at most
    2^-18, or by at most 3. A weight below ``2^40 * min_p`` is replaced by 0. With S(n) the sum of the first n weights in the order
    above,

    * k is top_k, or vocab where top_k is 0 or larger than vocab;
    * n, the number of kept tokens, is the number of i < k with ``S(i) < top_p * S(k)``, at least 1; ``top_p * S(k)`` is computed
      in float64 from the float32 top_p;
    * u is `tokenspeed_kernel_base.ops.sampling.philox.uniform(seed, offset)`: the upper 24 bits of the first word of Philox4x32-10
      with key ``seed`` and counter ``offset``, times 2^-24;
    * the result is a token t. The weights of kept tokens with ids up to t must add up to more than ``floor(u * S(n))``, and t is
      the smallest such token. ``u * S(n)`` is computed in float64.

    A token with weight 0 is never drawn. Tokens with logit ``-inf`` have weight 0. Tokens less than 2^-40 times as probable as the
    first token also have weight 0. A row whose largest logit is not finite (NaN ranks highest), and a row with temperature 0, give
    the result of `argmax`.

    If all rows have the same setting, pass ``torch.full((rows,), 0.8)``. Values are checked if the tensors lie in host memory. In
    device memory, a temperature that is negative or not finite counts as 0, and a negative top_k as 0. A top_p below 0 or NaN keeps
    one token, and a top_p above 1 keeps all tokens. A min_p below 0 or NaN counts as 0, and a min_p above 1 as 1.

    Args:
        logits: float16, bfloat16, float32 or float64 ``[rows, vocab]``, vocab in 1 to 2^22.
        temperature: float32 ``[rows]``, finite, >= 0; 0 is greedy.
        top_k: int32 ``[rows]``, >= 0; 0, or more than vocab, keeps all tokens.
        top_p: float32 ``[rows]`` in (0, 1]; 1 keeps all tokens.
        seed: int64 ``[rows]``, for example one for each request. Any value is valid.
        offset: int64 ``[rows]``, selects one of the seed's random numbers, for example by the position of the new token. Any
            value is valid.
        min_p: float32 ``[rows]`` in [0, 1]; 0 keeps all tokens. None means 0 for all rows.
        out_dtype: int64 or int32.
        out: ``out_dtype [rows]``, receives the result.

    Returns:
        ``out_dtype [rows]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import sample_top_k_top_p
        >>> logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]]).expand(4, -1)
        >>> temperature = torch.tensor([0.0, 1.0, 1.0, 1.0])
        >>> top_k = torch.tensor([0, 1, 0, 2], dtype=torch.int32)
        >>> top_p = torch.tensor([1.0, 1.0, 0.1, 1.0])
        >>> seed, offset = torch.full((4,), 42), torch.arange(4)
        >>> sample_top_k_top_p(logits, temperature, top_k, top_p, seed, offset)
        tensor([1, 1, 1, 1])

    Safe in CUDA graphs: seed and offset are tensors, so update them before a replay to get new random numbers.
    """
    kept = kept_weights(logits, temperature, top_k, top_p, min_p).cumsum(-1)
    target = (uniform(seed, offset).double().unsqueeze(1) * kept[:, -1:].double()).long()
    return (kept <= target).sum(-1).to(out_dtype)


@sample_top_k_top_p.traits
def _(logits: Tensor) -> dict[str, object]:
    return {"vocab": logits.shape[-1]}


@sample_top_k_top_p.check
def _(
    check: Checker,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    offset: Tensor,
    min_p: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    check_request(check, logits, temperature, top_k, top_p, min_p)
    check.tensor("seed", seed, "rows", torch.int64)
    check.tensor("offset", offset, "rows", torch.int64)
    check.one_of("out_dtype", out_dtype, (torch.int64, torch.int32))


def check_request(check: Checker, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None) -> None:
    """Checks shapes and dtypes of logits and of the sampling settings of their rows."""
    check.tensor("logits", logits, "rows vocab", FLOATS)
    vocab = check["vocab"]
    check.require(
        0 < vocab <= MAX_VOCAB, "logits", f"of shape [rows, vocab] with vocab in 1 to {MAX_VOCAB}", str(list(logits.shape))
    )
    check.tensor("temperature", temperature, "rows", torch.float32)
    check.tensor("top_k", top_k, "rows", torch.int32)
    check.tensor("top_p", top_p, "rows", torch.float32)
    check.tensor("min_p", min_p, "rows", torch.float32)


def check_request_values(
    check: Checker, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> None:
    """Checks the sampling settings of rows, if they lie in host memory."""
    if temperature is not None:
        _require_rows(check, (temperature >= 0) & temperature.isfinite(), "temperature", "finite and not negative", temperature)
    if top_k is not None:
        _require_rows(check, top_k >= 0, "top_k", "0 for all tokens, or how many to keep", top_k)
    if top_p is not None:
        _require_rows(check, (top_p > 0) & (top_p <= 1), "top_p", "more than 0 and at most 1", top_p)
    if min_p is not None:
        _require_rows(check, (min_p >= 0) & (min_p <= 1), "min_p", "at least 0 and at most 1", min_p)


sample_top_k_top_p.check_values(host=REQUEST)(check_request_values)


def _require_rows(check: Checker, good: Tensor, argument: str, expected: str, value: Tensor) -> None:
    if not good.all():
        row = int(good.logical_not().int().argmax())
        check.fail(argument, expected, f"{value[row].item():g} in row {row}")


@sample_top_k_top_p.fake
def _(logits: Tensor, out_dtype: torch.dtype) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=out_dtype)


@recipe
def request_inputs(
    rows: int,
    vocab: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    dtype: torch.dtype = torch.float32,
    min_p: float | None = None,
    out_dtype: torch.dtype = torch.int64,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws arguments with the same sampling settings in every row."""

    def make(draw: Draw) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "logits": draw.normal(rows, vocab, dtype=dtype, scale=4.0),
            "temperature": draw.tensor([temperature] * rows, torch.float32),
            "top_k": draw.tensor([top_k] * rows, torch.int32),
            "top_p": draw.tensor([top_p] * rows, torch.float32),
            "seed": draw.integers(-(2**62), 2**62, rows),
            "offset": draw.integers(0, 131072, rows),
        }
        if min_p is not None:
            arguments["min_p"] = draw.tensor([min_p] * rows, torch.float32)
        if out_dtype != torch.int64:
            arguments["out_dtype"] = out_dtype
        return arguments

    return make


@recipe
def mixed_inputs(rows: int, vocab: int, dtype: torch.dtype, min_p: bool = False) -> Callable[[Draw], dict[str, Any]]:
    """Draws arguments whose rows have different sampling settings: greedy and random rows, and all combinations of filters."""

    def make(draw: Draw) -> dict[str, Any]:
        arguments = request_inputs(rows, vocab, dtype=dtype)(draw)
        arguments["temperature"] = draw.uniform(rows, high=2.0) * draw.integers(0, 4, rows).clamp(max=1)
        arguments["top_k"] = (draw.integers(0, 3, rows) * draw.integers(1, vocab, rows)).int()
        arguments["top_p"] = draw.uniform(rows, low=0.05, high=1.2).clamp(max=1.0)
        if min_p:
            # Powers of two from 2^-11 to 1, and 0.
            arguments["min_p"] = torch.exp2(-draw.integers(0, 12, rows).float()) * draw.integers(0, 4, rows).clamp(max=1)
        return arguments

    return make


def _ties(draw: Draw) -> dict[str, Any]:
    arguments = request_inputs(24, 257, temperature=1.0, top_k=100, top_p=0.5)(draw)
    return {**arguments, "logits": draw.integers(0, 3, 24, 257).float()}


def _odd_values(draw: Draw) -> dict[str, Any]:
    arguments = request_inputs(6, 300, top_k=20)(draw)
    logits = arguments["logits"]
    logits[0, 17::50] = float("nan")
    logits[0, 17] = -float("nan")  # the sign bit is set
    logits[1] = float("-inf")
    logits[2, [40, 200]] = float("inf")
    logits[3, 1:] = float("-inf")
    logits[4, ::2] = float("-inf")
    arguments["temperature"][5] = 1e-30
    return arguments


def _masked(draw: Draw) -> dict[str, Any]:
    """Rows with few allowed tokens, as under a grammar: fewer than top-k keeps, exactly as many, and more."""
    arguments = request_inputs(5, 12000, temperature=1.0, top_k=20, top_p=0.9)(draw)
    arguments["top_k"][1] = 0
    allowed = draw.tensor([1, 5, 20, 40, 5], torch.int32)
    order = draw.uniform(5, 12000).argsort(dim=1).argsort(dim=1)
    arguments["logits"].masked_fill_(order >= allowed[:, None], float("-inf"))
    return arguments


def _flat(draw: Draw) -> dict[str, Any]:
    arguments = request_inputs(6, 12000, temperature=20.0)(draw)
    arguments["top_k"] = draw.tensor([0, 0, 9000, 7000, 0, 5500], torch.int32)
    arguments["top_p"] = draw.tensor([1.0, 0.9, 1.0, 0.7, 0.5, 1.0], torch.float32)
    arguments["logits"][4:] = arguments["logits"][4:].round()
    return arguments


@sample_top_k_top_p.cases
def _() -> list[Case]:
    bf16 = torch.bfloat16
    return [
        Case("one token", request_inputs(1, 1)),
        Case("all of a small vocabulary", request_inputs(64, 50)),
        Case("a vocabulary of 64, float16", request_inputs(3, 64, 0.7, 9, 0.9, torch.float16)),
        Case("a vocabulary of 50, bfloat16", request_inputs(3, 50, 0.7, 9, 0.9, bf16)),
        Case("requests of all kinds, odd vocab 1001, bfloat16", mixed_inputs(97, 1001, torch.bfloat16)),
        Case("requests of all kinds, float16", mixed_inputs(32, 4096, torch.float16)),
        Case("requests of all kinds with min-p, bfloat16", mixed_inputs(48, 3001, torch.bfloat16, min_p=True)),
        Case("requests of all kinds with min-p", mixed_inputs(40, 5000, torch.float32, min_p=True)),
        Case("min-p 0.05, int32 tokens", request_inputs(5, 4000, 1.0, min_p=0.05, out_dtype=torch.int32)),
        Case("ties across top-k and top-p", _ties),
        Case("nan, inf, -inf and a tiny temperature", _odd_values),
        Case("all but a few tokens are masked", _masked),
        Case("no rows", request_inputs(0, 100)),
        Case("flat: thousands of tokens share the probability", _flat),
        Case("gpt-oss-120b decode 2, top-k 40, top-p 0.95", request_inputs(2, 201088, 0.7, 40, 0.95)),
        Case("gpt-oss-120b decode 256, top-k 40, top-p 0.95", request_inputs(256, 201088, 0.7, 40, 0.95), large=True),
        Case("gpt-oss-120b decode 256, top-p 0.9", request_inputs(256, 201088, 1.0, 0, 0.9), large=True),
        Case("gpt-oss-120b decode 1, top-k 40, top-p 0.95", request_inputs(1, 201088, 0.7, 40, 0.95), large=True),
        Case("gpt-oss-120b decode 64, top-k 40, top-p 0.95", request_inputs(64, 201088, 0.7, 40, 0.95), large=True),
        Case("gpt-oss-120b decode 64, top-k 40, top-p 0.95, bfloat16", request_inputs(64, 201088, 0.7, 40, 0.95, bf16), large=True),
        Case("gpt-oss-120b decode 64, top-p 0.9", request_inputs(64, 201088, 1.0, 0, 0.9), large=True),
        Case("gpt-oss-120b decode 64, top-p 0.9, bfloat16", request_inputs(64, 201088, 1.0, 0, 0.9, bf16), large=True),
        *(
            Case(
                f"gpt-oss-120b decode {m}, no limits, bfloat16", request_inputs(m, 201088, 1.0, 0, 1.0, torch.bfloat16), large=True
            )
            for m in (1, 16)
        ),
        Case("gpt-oss-120b decode 64, flat", request_inputs(64, 201088, 2.0, 0, 0.9), large=True),
        Case("gpt-oss-120b decode 64, min-p 0.05", request_inputs(64, 201088, 1.0, min_p=0.05), large=True),
        Case("gpt-oss-120b decode 16, top-k 40, top-p 0.95", request_inputs(16, 201088, 0.7, 40, 0.95), large=True),
        Case("llama-3 decode 256, top-k 40, top-p 0.95", request_inputs(256, 128256, 0.7, 40, 0.95), large=True),
    ]


@sample_top_k_top_p.work
def _(temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None) -> dict[str, list[int]]:
    thousandths = {"temperature": temperature, "top_p": top_p}
    if min_p is not None:
        thousandths["min_p"] = min_p
    return {"top_k": top_k.tolist(), **{name: (x * 1000).round().int().tolist() for name, x in thousandths.items()}}


@sample_top_k_top_p.vary
def _(variation: Variation, logits: Tensor, min_p: Tensor | None) -> dict[str, Tensor]:
    if variation.want is not Want.CAPTURED:
        return {}
    draw, (rows, vocab) = variation.draw, logits.shape
    thousandths = [] if min_p is None else [("min_p", draw.tensor(variation.values("min_p", rows, 0), torch.float32) / 1000)]
    return {
        **dict(thousandths),
        **request_inputs(rows, vocab, dtype=logits.dtype)(draw),
        "temperature": draw.tensor(variation.values("temperature", rows, 800), torch.float32) / 1000,
        "top_k": draw.tensor(variation.values("top_k", rows, 0), torch.int32),
        "top_p": draw.tensor([max(1, value) for value in variation.values("top_p", rows, 1000)], torch.float32) / 1000,
    }


@sample_top_k_top_p.cost
def _(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    offset: Tensor,
    min_p: Tensor | None,
    out_dtype: torch.dtype,
) -> Cost:
    # An exponential counts as one operation. Ordering and summation need at least one operation each.
    settings = nbytes(temperature, top_k, top_p, seed, offset, min_p)
    return Cost(flops=5.0 * logits.numel(), bytes=nbytes(logits) + settings + out_dtype.itemsize * logits.shape[0])

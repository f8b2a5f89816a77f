"""Integer weights of tokens that are the same on every device.

Sampling compares sums of weights. Sums of integers do not depend on the order of addition. The weights themselves must be the same
everywhere too, but the exponentials of math libraries differ in the last bit. So this module evaluates the exponential by float32
additions and multiplications, each rounded, in a fixed order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.sampling.ordering import descending_order

WEIGHT_BITS = 40
LOG2_E = math.log2(math.e)
LARGEST_SCALE = 3.0e38
# Lower bound of the exponent ``distance * scale``. An exponent at the bound gives weight 0.
LEAST_EXPONENT = -41.0
# Coefficients of 2 + 2^f for |f| <= 1/2, lowest order first. The minimax polynomial of 2^f (relative error 2^-23.4), under the
# constraint of value 1 at 0, plus 2. The polynomial's values lie between 2 and 4, where the bits of a float32 count multiples of
# 2^-22.
EXP2_COEFFICIENTS = (
    3.0,
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472731307149,
)
FRACTION_BITS = 22
BITS_OF_TWO = 0x40000000
# Adding ROUNDER to a number below 2^22 rounds that number to an integer. The low bits of the sum then hold the integer.
ROUNDER = 1.5 * 2.0**23
BITS_OF_ROUNDER = 0x4B400000


def scale_of(temperature: Tensor) -> Tensor:
    """Returns the factor that turns a logit distance into a power of 2: log2(e) / temperature, computed in float64, at most 3e38,
    as float32.
    """
    return (LOG2_E / temperature.double()).clamp(max=LARGEST_SCALE).float()


def weights(distance: Tensor, scale: Tensor) -> Tensor:
    """Returns the integer weights ``floor(2^40 * 2^(distance * scale))``, with an error bound.

    The relative error is at most 2^-19, or the absolute error at most 3; the weight is exactly 2^40 for distance 0.

    The steps, all in float32: y is ``distance * scale``, at least -41. n is y rounded to the nearest integer, ties to even. p is
    the polynomial of `EXP2_COEFFICIENTS` at y - n, by Horner's rule without FMA. The weight is ``(p - 2) * 2^(n + 40)``, rounded
    down.

    Args:
        distance: float32, at most 0; -inf gives weight 0.
        scale: float32, positive and finite; broadcasts against distance.

    Returns:
        int64, of distance's shape.
    """
    y = (distance * scale).clamp(min=LEAST_EXPONENT)
    shifted = y + ROUNDER
    n = shifted.view(torch.int32) - BITS_OF_ROUNDER
    f = y - (shifted - ROUNDER)
    p = torch.full_like(f, EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        p = p * f + coefficient
    fraction = (p.view(torch.int32) - BITS_OF_TWO).long()
    return (fraction << WEIGHT_BITS) >> (FRACTION_BITS - n)


def kept_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None) -> Tensor:
    """Returns int64 ``[rows, vocab]``: the weights of the tokens that min-p, top-k and top-p keep in each row, and 0 for all other
    tokens.

    `sample_top_k_top_p` defines the weights and the kept tokens. A greedy row keeps only the first token with the largest logit.
    """
    vocab = logits.shape[-1]
    order = descending_order(logits)
    ordered = logits.gather(-1, order)
    wide = ordered if logits.dtype == torch.float64 else ordered.float()
    largest = wide[:, :1]
    warmth = temperature.double().unsqueeze(1)
    greedy = ~((warmth > 0) & warmth.isfinite() & largest.isfinite())
    distance = torch.where(greedy, 0.0, wide - largest).float()
    weight = weights(distance, scale_of(torch.where(greedy, 1.0, warmth)))
    if min_p is not None:
        floor = min_p.double().nan_to_num(0.0).clamp(0.0, 1.0).unsqueeze(1) * 2.0**WEIGHT_BITS
        weight = torch.where(weight.double() < floor, 0, weight)
    total = weight.cumsum(-1)

    place = torch.arange(vocab, device=logits.device)
    k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k).long().unsqueeze(1)
    limit = top_p.double().unsqueeze(1) * total.gather(1, k - 1).double()
    n = ((place < k) & ((total - weight).double() < limit)).sum(-1, keepdim=True).clamp(min=1)
    # Scatter back to the order of token ids.
    return torch.zeros_like(weight).scatter(1, order, torch.where(place < torch.where(greedy, 1, n), weight, 0))

"""Integer weights of tokens, the same on every device.

Sampling compares sums of weights with each other. Integers make the sums independent of the order of addition; for the weights
themselves to be the same everywhere, the exponential that they are rounded from is evaluated here by float64 additions and
multiplications, each of them rounded, in a fixed order. Exponentials of mathematics libraries differ in the last place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

WEIGHT_BITS = 40
LOG2_E = math.log2(math.e)
# Below this power of 2 a weight is 0, wherever exactly.
LEAST_EXPONENT = -64.0
# 2^f for |f| <= 1/2, lowest order first: the polynomial of least largest relative error (2^-43.5) among those that give 1 for 0.
EXP2_COEFFICIENTS = (
    1.0,
    0.6931471805585505,
    0.24022650695813708,
    0.055504108739712246,
    0.009618129159172244,
    0.0013333547331461978,
    0.0001540345603665657,
    1.5258493063907014e-05,
    1.3255182784592006e-06,
    9.16811938851594e-08,
)
EXPONENT_BIAS, MANTISSA_BITS = 1023, 52


def weights(distance: Tensor, scale: Tensor) -> Tensor:
    """round(2^40 * 2^(distance * scale)), to within 1; exactly 2^40 for a distance of 0.

    With y the product, at least -64, n the integer next to y (of two, the even one) and p(y - n) the polynomial of
    `EXP2_COEFFICIENTS` by Horner's rule without fused operations, the weight is p times 2^(n + 40), rounded to the nearest
    integer, of two to the even one.

    Args:
        distance: float64, at most 0; -inf weighs nothing.
        scale: float64, positive and finite; broadcasts against distance.

    Returns:
        int64, of distance's shape.
    """
    y = (distance * scale).clamp(min=LEAST_EXPONENT)
    n = y.round()
    f = y - n
    p = torch.full_like(f, EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        p = p * f + coefficient
    power = ((n.long() + (EXPONENT_BIAS + WEIGHT_BITS)) << MANTISSA_BITS).view(torch.float64)
    return (p * power).round().long()

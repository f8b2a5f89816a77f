"""Device code for the definitions of `tokenspeed_kernel_base.ops.sampling`: weights, random numbers, and a row's parameters.

Kernels that compute weights are launched with ``enable_fp_fusion=False``: the definition rounds after every multiplication.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key
from tokenspeed_kernel_base.ops.sampling import weights as definition

_LOG2_E = tl.constexpr(definition.LOG2_E)
_LARGEST_SCALE = tl.constexpr(definition.LARGEST_SCALE)
_LEAST_EXPONENT = tl.constexpr(definition.LEAST_EXPONENT)
_COEFFICIENTS = tl.constexpr(definition.EXP2_COEFFICIENTS)
_DEGREE = tl.constexpr(len(definition.EXP2_COEFFICIENTS) - 1)
_ROUNDER = tl.constexpr(definition.ROUNDER)
_BITS_OF_ROUNDER = tl.constexpr(definition.BITS_OF_ROUNDER)
_BITS_OF_TWO = tl.constexpr(definition.BITS_OF_TWO)
_FRACTION_BITS = tl.constexpr(definition.FRACTION_BITS)
_WEIGHT_BITS = tl.constexpr(definition.WEIGHT_BITS)
_WEIGHT_OF_LARGEST = tl.constexpr(2.0**definition.WEIGHT_BITS)
# A token has weight 0, regardless of rounding, if its exact weight is the largest weight divided by 2 to this power, or less.
WEIGHTLESS = tl.constexpr(2.0 - definition.LEAST_EXPONENT)
_LEAST_LOGIT = tl.constexpr(-3.0e38)
_INFINITE_KEY = tl.constexpr(0x7F800000)
_KEY_OF_MINUS_INFINITY = tl.constexpr(-0x7F800001)


@triton.jit
def token_weights(x, largest, scale, floor):
    """Returns the int64 weights of tokens with float32 logits x, bit-identical to the definition. Weights below ``floor`` become 0.

    largest, scale: the row's largest logit and the result of `scale_of`, float32. floor: the result of `floor_of`, or None.
    """
    y = tl.maximum((x - largest) * scale, _LEAST_EXPONENT)
    shifted = y + _ROUNDER
    n = shifted.to(tl.int32, bitcast=True) - _BITS_OF_ROUNDER
    f = y - (shifted - _ROUNDER)
    p = f * _COEFFICIENTS[_DEGREE] + _COEFFICIENTS[_DEGREE - 1]
    for i in tl.static_range(1, _DEGREE):
        p = p * f + _COEFFICIENTS[_DEGREE - 1 - i]
    fraction = (p.to(tl.int32, bitcast=True) - _BITS_OF_TWO).to(tl.int64)
    weight = (fraction << _WEIGHT_BITS) >> (_FRACTION_BITS - n.to(tl.int64))
    if floor is not None:
        weight = tl.where(weight >= floor, weight, 0)
    return weight


@triton.jit
def lowest_of(largest, scale):
    """Returns a finite logit, float64. Tokens with a smaller logit have weight 0, so it does not matter which of them are kept."""
    return tl.maximum(largest.to(tl.float64) - WEIGHTLESS / scale.to(tl.float64), _LEAST_LOGIT)


@triton.jit
def most_below(key, largest, scale, floor):
    """Returns an int64 upper bound of the weight of any token whose sort key is below ``key``.

    The bound has a margin, because rounding may give a lower logit a slightly larger weight.
    """
    weight = token_weights(from_sort_key(key), largest, scale, None)
    weight += (weight >> 18) + 2
    if floor is not None:
        weight = tl.where(weight < floor, 0, weight)
    return weight


@triton.jit
def floor_of(min_p, row):
    """Returns the smallest weight that min-p keeps, int64, at most the weight of the largest logit. None without min-p (a None
    pointer).
    """
    floor = None
    if min_p is not None:
        p = tl.load(min_p + row).to(tl.float64)
        # Multiplying by a power of 2 is exact. If min-p is NaN, all tokens are kept.
        p = tl.where(p > 0.0, tl.where(p < 1.0, p, 1.0), 0.0) * _WEIGHT_OF_LARGEST
        floor = tl.ceil(p).to(tl.int64)
    return floor


@triton.jit
def floor_octaves(floor):
    """Returns log2 of the largest weight over the floor, float32; `WEIGHTLESS` for a floor of 0."""
    octaves = _WEIGHT_BITS - tl.log2(tl.maximum(floor, 1).to(tl.float32))
    return tl.where(floor > 0, octaves, WEIGHTLESS)


@triton.jit
def uniform(seed, offset):
    """Returns the random number in [0, 1) of a seed and an offset, as float64, as
    `tokenspeed_kernel_base.ops.sampling.philox.uniform` defines it."""
    zero = (offset * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, offset.to(tl.uint32), (offset >> 32).to(tl.uint32), zero, zero)
    return (word >> 8).to(tl.int32).to(tl.float64) * (1.0 / 16777216.0)


@triton.jit
def is_drawn(temperature, largest_key):
    """Whether a row's token is drawn at random, and not the greedy one. A row is greedy if its temperature is not positive and
    finite, or if its largest logit is not finite.
    """
    warmth = temperature.to(tl.float64)
    warm = (warmth > 0.0) & (warmth < float("inf"))
    return warm & (largest_key < _INFINITE_KEY) & (largest_key > _KEY_OF_MINUS_INFINITY)


@triton.jit
def scale_of(temperature):
    """Returns the float32 factor that turns a difference of logits into a base-2 exponent: log2(e) / temperature, at most
    _LARGEST_SCALE."""
    scale = _LOG2_E / temperature.to(tl.float64)
    return tl.where(scale < _LARGEST_SCALE, scale, _LARGEST_SCALE).to(tl.float32)


@triton.jit
def limit_of(top_p, weight):
    """Returns the weight that top-p must reach, float64: at least 1, so that the first token is always kept. ``weight``: the total
    weight of the tokens among which top-p selects, or a bound of this total."""
    p = top_p.to(tl.float64)
    return tl.maximum(tl.where(p > 0.0, p, 0.0) * weight.to(tl.float64), 1.0)


@triton.jit
def target_of(number, weight):
    """Returns the target of a draw with the random number ``number``, from 0 to the total ``weight`` of the kept tokens. The first
    token whose running sum of weights exceeds the target is drawn.
    """
    return (number * weight.to(tl.float64)).to(tl.int64)

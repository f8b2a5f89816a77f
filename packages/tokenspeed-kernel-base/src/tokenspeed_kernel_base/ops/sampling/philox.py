"""Random numbers that depend on a seed and an offset only: Philox4x32-10.

A counter-based generator (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten rounds of a
keyed bijection map a 128-bit counter and a 64-bit key to 128 random bits. The generator has no state, so a row's random number is
the same in every batch, on every device and in every order of evaluation.

Words have 32 bits and are stored in int64, because PyTorch supports few operations on unsigned integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def _multiply(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the high and low word of ``multiplier * word``, computed from 16-bit halves because the result does not fit into
    int64."""
    low_half = multiplier * (word & 0xFFFF)
    high_half = multiplier * (word >> 16) + (low_half >> 16)
    return high_half >> 16, (high_half & 0xFFFF) << 16 | (low_half & 0xFFFF)


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Returns the random words of Philox4x32-10 for a counter and a key.

    Args:
        counter: int64 ``[..., 4]`` words in 0 to 2^32 - 1, least significant first.
        key: int64 ``[..., 2]`` words; the leading axes broadcast against the counter's.

    Returns:
        int64 ``[..., 4]`` words.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & WORD, (k1 + KEY_INCREMENTS[1]) & WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniform(seed: Tensor, offset: Tensor) -> Tensor:
    """Returns a uniform random number in [0, 1) for every seed and offset.

    The key is the seed's two words. The counter is the offset's two words, low word first, followed by two zero words. Negative
    numbers are in two's complement. The result is made of the upper 24 bits of the first random word: ``(word >> 8) * 2^-24``,
    which is exact in float32.

    Args:
        seed: int64 ``[...]``.
        offset: int64 ``[...]``.

    Returns:
        float32 ``[...]``, a multiple of 2^-24.
    """
    return (_words(seed, offset, 0)[..., 0] >> 8).float() * 2.0**-24


def uniform_of(seed: Tensor, offset: Tensor, draw: int | Tensor) -> Tensor:
    """Returns a uniform random number in [0, 1) for every seed, offset and draw, for positions that need several numbers.

    There are two differences from `uniform`. The counter's third word is ``draw + 1``, so the random words are others. And the
    result has 53 bits, from the first two random words: ``(first >> 5) * 2^-27 + (second >> 6) * 2^-53``.

    Args:
        seed: int64 ``[...]``.
        offset: int64 ``[...]``.
        draw: index of the random number, 0 to 2^32 - 2; broadcasts against seed and offset.

    Returns:
        float64 ``[...]``, a multiple of 2^-53.
    """
    first, second, _, _ = _words(seed, offset, draw + 1).unbind(-1)
    return (first >> 5).double() * 2.0**-27 + (second >> 6).double() * 2.0**-53


def _words(seed: Tensor, offset: Tensor, third: int | Tensor) -> Tensor:
    # An arithmetic right shift of a negative number fills with ones; the mask clears them.
    low, high = offset & WORD, (offset >> 32) & WORD
    zero = torch.zeros_like(low)
    counter = torch.stack((low, high, zero + third, zero), dim=-1)
    return philox4x32(counter, torch.stack((seed & WORD, (seed >> 32) & WORD), dim=-1))

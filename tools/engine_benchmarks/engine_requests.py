"""Random requests that arrive over time, for engines with and without a plugin. The plugins' benchmarks share this module."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A random request.

    Attributes:
        name: the request's name.
        prompt: tokens. Many prompts share a prefix with others.
        tokens: number of tokens to generate.
        aborted: whether the request is aborted while it runs. All others must complete.
    """

    name: str
    prompt: list[int]
    tokens: int
    aborted: bool


def bursts(count: int, highest_token: int) -> Iterator[list[Request]]:
    """Yields ``count`` requests in bursts of 0 to 11 requests that arrive together. Each call yields the same requests.

    Args:
        count: number of requests.
        highest_token: prompts have tokens from 100 up to this one, exclusive.
    """
    rng = random.Random(1)
    prefixes = [[rng.randrange(100, highest_token) for _ in range(rng.choice((40, 300, 1000)))] for _ in range(12)]
    made = 0
    while made < count:
        burst = []
        for _ in range(min(count - made, rng.randrange(0, 12))):
            length, tokens = rng.choice((1, 3, 17, 90, 400, 1500)), rng.choice((1, 2, 9, 30, 70))
            own = [rng.randrange(100, highest_token) for _ in range(rng.randrange(1, length + 1))]
            prompt = (rng.choice(prefixes) if rng.random() < 0.6 else []) + own
            burst.append(Request(f"r{made}", prompt, tokens, rng.random() < 0.1))
            made += 1
        yield burst

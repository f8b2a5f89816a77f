"""The sizes of batches that are tried before the first request, so that none waits for a kernel to be compiled or loaded.

Which kernel serves a call, and which compilation of it, depends on how many tokens and requests there are. vLLM's own first runs
have no attention in them, and reach experts with the largest batch and with those that it captures.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

from vllm.logger import init_logger

logger = init_logger("vllm.plugins.tokenspeed_kernel")


def sizes_up_to(most: int) -> Iterator[int]:
    """1, 2, 4, ... and most.

    >>> list(sizes_up_to(12))
    [1, 2, 4, 8, 12]
    """
    yield from itertools.takewhile(lambda size: size < most, (1 << power for power in itertools.count()))
    yield most


@contextlib.contextmanager
def warming(what: str) -> Iterator[None]:
    """Logs how long its block takes, which is most of what this package adds to vLLM's start.

    Args:
        what: what is called in all sizes.
    """
    begun = time.perf_counter()
    yield
    logger.info("tokenspeed_kernel_vllm: called %s in all sizes in %.2f s", what, time.perf_counter() - begun)

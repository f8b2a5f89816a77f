"""The batch sizes of the warm-up before the first request, so that no request waits for a kernel to be compiled or loaded.

The kernel of a call, and the kernel's specialisation, depend on the numbers of tokens and requests. vLLM's own warm-up runs do not
include attention. They run experts only with the largest batch and with the captured batch sizes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger

from tokenspeed_kernel_base.compilation import compilations
from tokenspeed_kernel_vllm.settings import CORE, core_is_there, read_settings

logger = init_logger("vllm.plugins.tokenspeed_kernel")

# The plans whose kernels were warmed up in this process, each with the name of its layers.
_warmed: set[tuple[str, Any]] = set()


def sizes_up_to(most: int) -> Iterator[int]:
    """Yields the powers of 2 below ``most``, and ``most``. Before each size that is divisible by 16, yields this size minus 1.

    Kernels choose their tiles by powers of 2. Triton compiles one program for sizes that are divisible by 16, and another for all
    other sizes. Batches of requests that share prefixes, say, have sizes such as 241.

    >>> list(sizes_up_to(40))
    [1, 2, 4, 8, 15, 16, 31, 32, 40]
    """
    powers = itertools.takewhile(lambda size: size < most, (1 << power for power in itertools.count()))
    for size in (*powers, most):
        if size % 16 == 0:
            yield size - 1
        yield size


@contextlib.contextmanager
def warming(what: str) -> Iterator[None]:
    """Logs the duration of the block, and the number of programs that the block compiled. Then calls `write_receipt`.

    Warm-up is most of the start-up time that this package adds to vLLM. The compile policy applies: if it forbids compiling, and no
    pack has a needed program, vLLM does not start.

    Args:
        what: the name of the warmed-up layers, for the log.
    """
    begun, before = time.perf_counter(), len(compilations())
    yield
    compiled, seconds = len(compilations(before)), time.perf_counter() - begun
    logger.info("tokenspeed_kernel_vllm: called %s in all sizes in %.2f s, %d programs compiled", what, seconds, compiled)
    write_receipt()


def warm_once(what: str, plan: Any, device: torch.device, warm: Callable[[int], None]) -> None:
    """Warms up a layer's kernels, unless a layer with the same plan was warmed up before, or the settings forbid it. Kernels for a
    CPU need no warm-up.

    Args:
        what: the name of the layers, for the log.
        plan: the core's plan of the layer's weights.
        device: the layer's device.
        warm: runs the layer in all sizes below the given number of tokens, which is vLLM's largest batch.
    """
    if device.type == "cpu" or (what, plan) in _warmed or not read_settings().warmup:
        return
    _warmed.add((what, plan))
    with warming(what):
        warm(get_current_vllm_config().scheduler_config.max_num_batched_tokens)


def write_receipt() -> None:
    """Writes a receipt of this process's kernels so far, if the settings name a folder, and logs its summary.

    Each warm-up writes the file again, so the file after the last warm-up has the kernels of all layers.

    Raises:
        OSError: the file cannot be written.
    """
    folder = read_settings().receipts
    if folder is None:
        return
    if not core_is_there():
        logger.warning("tokenspeed_kernel_vllm: no receipt, because the core is not installed")
        return
    made = import_module(CORE).receipt()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"receipt-{os.getpid()}.json"
    made.save(file)
    logger.info("tokenspeed_kernel_vllm: %s; %s", made.summary, file)

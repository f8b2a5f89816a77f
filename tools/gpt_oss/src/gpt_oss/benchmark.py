"""How fast a stack of layers is: tokens a second of a prefill, and the time of a decode step."""

from __future__ import annotations

import functools
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import tokenspeed_kernel
from gpt_oss.batch import Batch, Piece, make_batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.config import preset
from gpt_oss.kernels import listen
from gpt_oss.loader import RandomTensors
from gpt_oss.model import GptOss


@dataclass(frozen=True)
class Workload:
    """What is measured: ``batch`` sequences with prompts of ``prompt_tokens``, then ``decode_steps`` tokens for each.

    Attributes:
        preset: the model; its weights are random.
        layers: how many of its layers. Embedding and output matrix are part of every pass.
        repeats: prefills that are timed, after one that is not.
    """

    preset: str = "gpt-oss-120b"
    layers: int = 2
    batch: int = 4
    prompt_tokens: int = 1024
    decode_steps: int = 32
    page_size: int = 64
    repeats: int = 5
    seed: int = 0


def run(workload: Workload, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Measures a workload. The result is plain values, for JSON."""
    config = preset(workload.preset).with_layers(workload.layers)
    length = workload.prompt_tokens + workload.decode_steps + 1
    model = GptOss(config, RandomTensors(config, workload.seed, dtype, device), dtype, device, max_positions=length)
    pages = -(-length // workload.page_size)
    cache = PagedKVCache(config, workload.batch * pages, workload.page_size, dtype, device)
    held = [cache.allocator.allocate(pages) for _ in range(workload.batch)]
    generator = torch.Generator().manual_seed(workload.seed)
    prompts = torch.randint(config.vocab_size, (workload.batch, workload.prompt_tokens), generator=generator).tolist()
    last = range(workload.batch)

    prefill = make_batch([Piece(prompt, 0, held[i]) for i, prompt in enumerate(prompts)], cache, model.device, last)
    with listen(model) as listener:
        tokens = _next(model, prefill, cache).tolist()
        _next(model, _decode_batch(tokens, workload.prompt_tokens, held, cache, model), cache).tolist()
    prefills = [_timed(functools.partial(_next, model, prefill, cache)) for _ in range(workload.repeats)]
    decodes = []
    for step in range(workload.decode_steps):
        batch = _decode_batch(tokens, workload.prompt_tokens + step, held, cache, model)
        # The first steps of their shapes decide and perhaps compile; a runtime would have done so before.
        if step == 0:
            _next(model, batch, cache).tolist()
        decodes.append(_timed(functools.partial(_next, model, batch, cache)))
    prefill_seconds, decode_seconds = statistics.median(prefills), statistics.median(decodes)
    return {
        "workload": asdict(workload),
        "prefill": {
            "seconds": prefill_seconds,
            "tokens_per_second": workload.batch * workload.prompt_tokens / prefill_seconds,
            "all_seconds": prefills,
        },
        "decode": {
            "milliseconds_per_step": 1e3 * decode_seconds,
            "milliseconds_per_step_p90": 1e3 * sorted(decodes)[int(0.9 * (len(decodes) - 1))],
            "tokens_per_second": workload.batch / decode_seconds,
        },
        "kernels": [heard.to_dict() for heard in listener.heard()],
        "metadata": metadata(dtype, device),
    }


def metadata(dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Where and with what a measurement was made."""
    is_cuda_like = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda_like else platform.processor() or platform.machine(),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "runtime": torch.version.cuda or torch.version.hip or "cpu",
        "tokenspeed_kernel": tokenspeed_kernel.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _next(model: GptOss, batch: Batch, cache: PagedKVCache) -> Tensor:
    return model.ops.argmax(model.forward(batch, cache))


def _decode_batch(tokens: list[int], position: int, held: list[list[int]], cache: PagedKVCache, model: GptOss) -> Batch:
    pieces = [Piece([token], position, pages) for token, pages in zip(tokens, held, strict=True)]
    return make_batch(pieces, cache, model.device, range(len(pieces)))


def _timed(call: Callable[[], Tensor]) -> float:
    """Seconds until the result of a call is on the host, which is when the next step of an engine could begin."""
    started = time.perf_counter()
    call().tolist()
    return time.perf_counter() - started

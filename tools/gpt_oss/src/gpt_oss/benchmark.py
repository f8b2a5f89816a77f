"""How fast a stack of layers is: tokens per second of a prefill, and time of a decode step."""

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
from gpt_oss.config import PRESETS, preset
from gpt_oss.fields import COUNT, INT, check_fields, describe, dtype_name, one_of
from gpt_oss.kernels import listen
from gpt_oss.loader import RandomTensors
from gpt_oss.model import GptOss


@dataclass(frozen=True)
class Workload:
    """What is measured: a prefill of ``batch`` prompts of ``prompt_tokens`` each, then ``decode_steps`` decode steps.

    All but the preset are ints of at least 1, and ``seed`` is any int.

    Attributes:
        preset: the configuration; the weights are random.
        layers: how many layers the model has. Embedding and output matrix are part of every pass.
        page_size: tokens that a page of the cache holds.
        repeats: how many prefills are timed, after one that is not.

    Raises:
        TypeError, ValueError: a field is not as stated; the message names it.
    """

    preset: str = "gpt-oss-120b"
    layers: int = 2
    batch: int = 4
    prompt_tokens: int = 1024
    decode_steps: int = 32
    page_size: int = 64
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("layers", "batch", "prompt_tokens", "decode_steps", "page_size", "repeats")
        check_fields({"preset": one_of(*PRESETS), **dict.fromkeys(counts, COUNT), "seed": INT}, self)


def run(workload: Workload, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Measures a workload. The result holds plain values, for JSON.

    Raises:
        ConfigError: the model cannot have so many layers.
        ValueError: its context is too short for the prompt and the decode steps.
    """
    config = preset(workload.preset).with_layers(workload.layers)
    length = workload.prompt_tokens + workload.decode_steps + 1
    if length > config.max_position_embeddings:
        raise ValueError(
            f"prompt_tokens and decode_steps must together be less than the context of {config.max_position_embeddings} tokens, "
            f"got {describe(workload.prompt_tokens)} and {describe(workload.decode_steps)}"
        )
    model = GptOss(config, RandomTensors(config, workload.seed, dtype, device), dtype, device, max_positions=length)
    pages = -(-length // workload.page_size)
    cache = PagedKVCache(config, workload.batch * pages, workload.page_size, dtype, device)
    held = [cache.allocator.allocate(pages) for _ in range(workload.batch)]
    generator = torch.Generator().manual_seed(workload.seed)
    prompts = torch.randint(config.vocab_size, (workload.batch, workload.prompt_tokens), generator=generator).tolist()
    last = range(workload.batch)

    prefill = make_batch([Piece(prompt, 0, held[i]) for i, prompt in enumerate(prompts)], cache, model.device, last)
    with listen() as listener:
        tokens = _next(model, prefill, cache).tolist()
        _next(model, _decode_batch(tokens, workload.prompt_tokens, held, cache, model), cache).tolist()
    prefills = [_timed(functools.partial(_next, model, prefill, cache)) for _ in range(workload.repeats)]
    decodes = []
    for step in range(workload.decode_steps):
        batch = _decode_batch(tokens, workload.prompt_tokens + step, held, cache, model)
        # The first step selects kernels and may compile them, which a runtime would have done before it serves requests.
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
    """The device, dtype, versions and date of a measurement."""
    is_gpu = torch.device(device).type == "cuda"  # AMD's GPUs too
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.processor() or platform.machine(),
        "dtype": dtype_name(dtype),
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
    """Seconds until the result of a call is in host memory, which is when an engine could begin its next step."""
    started = time.perf_counter()
    call().tolist()
    return time.perf_counter() - started

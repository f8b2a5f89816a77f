"""Generates tokens with a tensor-parallel or expert-parallel model, one process per GPU.

    torchrun --nproc-per-node 2 -m gpt_oss.parallel --model FOLDER

A rank has a slice of every expert (`gpt_oss.tensor_parallel`) or some whole experts (`gpt_oss.expert_parallel`).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gpt_oss.cache import PagedKVCache
from gpt_oss.config import PRESETS, Config, preset
from gpt_oss.engine import Engine
from gpt_oss.expert_parallel import ExpertParallelGptOss
from gpt_oss.loader import Checkpoint, RandomTensors, TensorSource
from gpt_oss.request import Request
from gpt_oss.shards import ShardedGptOss
from gpt_oss.tensor_parallel import TensorParallelGptOss
from tokenspeed_kernel import ProcessGroup

MODELS: Mapping[str, type[ShardedGptOss]] = {"parts": TensorParallelGptOss, "whole": ExpertParallelGptOss}
"""Maps the value of the option ``--experts`` to the model's class. ``parts``: a rank has a slice of every expert. ``whole``: a rank
has some whole experts.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Generates tokens on the ranks that torchrun started, and prints the times of a decode step and of the prefill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; random weights without one")
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), default="gpt-oss-20b", help="the model whose shapes the random weights have"
    )
    parser.add_argument("--layers", type=int, help="number of layers of a model with random weights")
    parser.add_argument(
        "--experts", choices=sorted(MODELS), default="parts", help="a slice of every expert, or whole experts, per rank"
    )
    parser.add_argument("--prompt", type=int, default=64, help="number of random tokens per prompt")
    parser.add_argument("--batch", type=int, default=1, help="number of prompts")
    parser.add_argument("--tokens", type=int, default=32, help="number of tokens to generate per prompt, at least 3")
    options = parser.parse_args(arguments)
    if options.tokens < 3:
        parser.error(f"--tokens must be 3 or more, got {options.tokens}")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        group = ProcessGroup.with_peer_memory()
        source: TensorSource
        if options.model is not None:
            config, source = Config.from_directory(options.model), Checkpoint(options.model)
        else:
            config = preset(options.preset)
            config = config if options.layers is None else config.with_layers(options.layers)
            source = RandomTensors(config, device=device)
        longest = options.prompt + options.tokens
        model = MODELS[options.experts](config, source, group, torch.bfloat16, device, max_positions=longest)
        pages = options.batch * -(-longest // 64)
        engine = Engine(model, PagedKVCache(model.config, pages, 64, torch.bfloat16, device), max_sequences=options.batch)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(config.vocab_size, (options.batch, options.prompt), generator=generator).tolist()
        engine.generate([Request(prompt, options.tokens) for prompt in prompts])  # warm-up: compiles the kernels
        few, many = (_seconds(engine, prompts, tokens) for tokens in (2, options.tokens))
        if group.rank == 0:
            memory = group.peer_gap or "yes"
            print(f"{group}, peer memory: {memory}; {options.batch} x {options.prompt} + {options.tokens} tokens")
            step = (many - few) / (options.tokens - 2)
            print(f"{step * 1e3:.3f} ms per decode step, {few * 1e3:.1f} ms for prompts and 2 tokens")
    finally:
        dist.destroy_process_group()


def _seconds(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> float:
    began = time.perf_counter()
    engine.generate([Request(prompt, tokens) for prompt in prompts])
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

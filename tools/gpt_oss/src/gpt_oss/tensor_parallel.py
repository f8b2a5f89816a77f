"""A model on several GPUs, each of which holds a part of every layer.

Attention heads, the experts' intermediate features and the rows of the output matrix are shared out among the ranks of a process
group. Each rank runs the model on its share, for the same batch; sums over ranks follow the two products that end a layer's halves,
and the ranks' logits are put together. All ranks have the same bits then, so that each chooses the same tokens. An `Engine` of each
rank must be given the same requests in the same order.

    torchrun --nproc-per-node 2 -m gpt_oss.tensor_parallel --tokens 32
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gpt_oss.batch import Batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.config import PRESETS, Config, preset
from gpt_oss.engine import Engine
from gpt_oss.loader import Checkpoint, RandomTensors, TensorSource
from gpt_oss.request import Request
from gpt_oss.shares import Caches, SharedGptOss
from tokenspeed_kernel import ProcessGroup


class TensorParallelGptOss(SharedGptOss):
    """One rank's heads, and its part of each expert. It runs like the whole model; every rank must run the same batches in the same
    order. See `SharedGptOss`.
    """

    fused_router = True

    def _run_layers(self, hidden: Tensor, batch: Batch, cache: PagedKVCache | None) -> tuple[Tensor, Tensor | None]:
        """What it returns first is this rank's part of a sum, too."""
        ops, group, eps, top_k = self.ops, self.group, self.config.rms_norm_eps, self.config.num_experts_per_tok
        residual = hidden
        for index, layer in enumerate(self.layers):
            caches: Caches = (None, None) if cache is None else (cache.k[index], cache.v[index])
            if index == 0:
                normed = ops.rmsnorm(hidden, layer.attention_norm, eps)
            else:
                normed, residual = ops.all_reduce_rmsnorm(hidden, layer.attention_norm, group, eps, residual)
            product = self._attend(layer, normed, batch, caches)
            if self.fused_router:
                product = ops.all_reduce(product, group, product)
                normed, weights, ids, residual = ops.rmsnorm_moe_topk(
                    product, layer.mlp_norm, layer.router.weight, top_k, eps=eps, residual=residual, router_bias=layer.router.bias
                )
            else:
                normed, residual = ops.all_reduce_rmsnorm(product, layer.mlp_norm, group, eps, residual)
                weights, ids = ops.moe_topk(layer.router(ops, normed), top_k)
            hidden = ops.moe_apply(normed, layer.experts, weights, ids, layer.plan)
        return hidden, residual

    def _norm_last(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        normed: Tensor = self.ops.all_reduce_rmsnorm(hidden, self.norm, self.group, self.config.rms_norm_eps, residual)[0]
        return normed


def main(arguments: Sequence[str] | None = None) -> None:
    """Generates tokens on the ranks that torchrun started, and says how long each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; random weights without one")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="gpt-oss-20b", help="whose shapes random weights have")
    parser.add_argument("--layers", type=int, help="of random weights: so many")
    parser.add_argument("--prompt", type=int, default=64, help="random tokens of each prompt")
    parser.add_argument("--batch", type=int, default=1, help="prompts")
    parser.add_argument("--tokens", type=int, default=32, help="to generate for each prompt, 3 or more")
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
        model = TensorParallelGptOss(config, source, group, torch.bfloat16, device, max_positions=longest)
        pages = options.batch * -(-longest // 64)
        engine = Engine(model, PagedKVCache(model.config, pages, 64, torch.bfloat16, device), max_sequences=options.batch)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(config.vocab_size, (options.batch, options.prompt), generator=generator).tolist()
        engine.generate([Request(prompt, options.tokens) for prompt in prompts])  # compiles what it needs
        few, many = (_seconds(engine, prompts, tokens) for tokens in (2, options.tokens))
        if group.rank == 0:
            memory = group.peer_gap or "yes"
            print(f"{group}, peer memory: {memory}; {options.batch} x {options.prompt} + {options.tokens} tokens")
            step = (many - few) / (options.tokens - 2)
            print(f"{step * 1e3:.3f} ms a step of decoding, {few * 1e3:.1f} ms for prompts and 2 tokens")
    finally:
        dist.destroy_process_group()


def _seconds(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> float:
    began = time.perf_counter()
    engine.generate([Request(prompt, tokens) for prompt in prompts])
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

"""Measures layers of a decode step of GPT-OSS-120B that two GPUs share, in one persistent launch and in today's launches.

    torchrun --nproc-per-node 2 packages/tokenspeed-kernel-nvidia/benchmarks/h200_ranks.py --output ranks.json

Each rank has half of the heads, and half of the intermediate features of every expert. Today's launches are those of the composed
operator `decoder_layers`, with `all_reduce` over peer memory. Variants are first compared with today's launches: results must have
equal bits on both ranks and in every run. Then several calls run in a CUDA graph. The graph runs several times, with caches evicted
in between. The slower rank's median counts. The layers' weights exceed the L2 cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from h200_persistent import CALLS, CLOSE, CONTEXT, EPS, Batch, Model, counted
from moe_shapes import GPT_OSS_120B, Shape

import tokenspeed_kernel as ops
from tokenspeed_kernel import DecoderWeights, ProcessGroup
from tokenspeed_kernel.workbench.benchmark import write_result
from tokenspeed_kernel.workbench.benchmark.timing import sample_graph
from tokenspeed_kernel_base.ops.decoder.weights import REPLICATED
from tokenspeed_kernel_nvidia.sm90.layers.config import (
    ACTIVATED,
    ATTENDED,
    EXCHANGES,
    LOGITS,
    OUT,
    PARTIALS,
    QKV,
    TOTALS,
    config_of,
)
from tokenspeed_kernel_nvidia.sm90.layers.variants import PersistentLayers

RANKS = 2
SHAPE = Shape(replace(GPT_OSS_120B, name="gpt-oss-120b, half", intermediate=GPT_OSS_120B.intermediate // RANKS), 1)
TODAY = "today's launches"
WORDS = 8 << 20  # of the scratch memory, enough for every variant
# The options of `config_of` of each variant.
CHOICES: dict[str, dict[str, Any]] = {
    "served": {},
    "words of activations": {"counted": tuple(each for each in EXCHANGES if each != QKV)},
    "words of attention": counted(QKV, ACTIVATED, ATTENDED),
    "words of partial results": counted(QKV, ACTIVATED, PARTIALS),
    "words of logits": counted(QKV, ACTIVATED, LOGITS),
    "words of sums": counted(QKV, ACTIVATED, TOTALS, OUT),
    "words of totals": counted(QKV, ACTIVATED, TOTALS),
    "4, 4, 12, 2 in flight": {"in_flight": (4, 4, 12, 2)},
    "6 begun": {"begun_in_flight": 6},
    "18 begun": {"begun_in_flight": 18},
}


class SharedBatch(Batch):
    """The inputs of a rank, and the calls on them."""

    def __init__(self, model: Model, tokens: int, group: ProcessGroup, context: int = CONTEXT) -> None:
        super().__init__(model, tokens, context)
        dist.broadcast(self.x, 0)
        self.group = group
        self.k, self.v = (torch.stack(each) for each in zip(*self.caches, strict=True))
        self.caches = [*zip(self.k, self.v, strict=True)]
        self.weights = DecoderWeights(model.weights, group)

    def composed_layers(self) -> Tensor:
        """Runs the layers with today's launches."""
        result: Tensor = ops.decoder_layers(
            self.x, self.weights, self.k, self.v, self.pages, self.lengths, self.slots, self.table, self.model.plan, EPS,
            override="composed_decoder_layers",
        )  # fmt: skip
        return result

    def launch_of(self, options: Mapping[str, Any]) -> PersistentLayers:
        """Returns the launch object of a variant. All variants of a size use the same memory, one after another."""
        config = config_of(self.tokens, ranks=RANKS, cooperative=True, **options)
        shared = self.group.shared_words(f"variants, {self.tokens} tokens", WORDS)
        memory = shared.memory[0]
        memory.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        launched = PersistentLayers(
            self.model.weights, self.caches, self.tokens, self.table, self.model.plan, eps=EPS, config=config,
            rank=self.group.rank, memory=memory,
        )  # fmt: skip
        launched.connect(shared.addresses)
        return launched

    def check(self, run: Callable[[], None]) -> str:
        """Compares the results of several runs with one another, with the other rank's, and with today's launches. Returns a
        description of the errors. Raises RuntimeError if results are wrong."""
        first = None
        for _ in range(5):
            self.out.fill_(torch.nan)
            run()
            if first is not None and not torch.equal(first, self.out[-1]):
                raise RuntimeError("results differ between runs")
            first = self.out[-1].clone()
        assert first is not None
        other = first.clone()
        dist.broadcast(other, 0)
        if not torch.equal(other, first):
            raise RuntimeError("results differ between ranks")
        wanted = self.composed_layers().double()
        errors = (first.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        if bool(errors.isnan().any()):
            raise RuntimeError("a result is NaN")
        return f"error {float(errors.median()):.1e}, {int((errors > CLOSE).sum())} of {len(errors)} tokens have other experts"


def model_of(layers: int, device: torch.device) -> Model:
    """Returns this rank's shard of random layers."""
    model = Model(layers, device, SHAPE, kv_heads=8 // RANKS, seed=100 * dist.get_rank())
    for layer in model.weights:
        for name in REPLICATED:
            dist.broadcast(getattr(layer, name), 0)
    return model


def everywhere(value: Any) -> list[Any]:
    """Returns the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def row_of(batch: SharedBatch, name: str, rounds: int) -> dict[str, Any]:
    """Measures a variant, or today's launches."""
    row: dict[str, Any] = {"tokens": batch.tokens, "variant": name, "context": batch.context, "note": ""}
    calls: list[Callable[[], Any]] = [batch.composed_layers]
    if name != TODAY:
        launched = batch.launch_of(CHOICES[name])
        calls = [lambda: launched(batch.x, batch.out, batch.lengths, batch.pages, batch.slots)]
        row["note"] = batch.check(calls[0])
    times = sample_graph(calls * CALLS, batch.model.device, budget_s=0.0, fewest=rounds, most=rounds)
    row["us"] = max(everywhere(statistics.median(times))) / batch.layers
    row["spread"] = [min(times) / batch.layers, max(times) / batch.layers]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", default="1,2,4", help="numbers of tokens")
    parser.add_argument("--layers", type=int, default=12, help="layers of a call")
    parser.add_argument("--context", type=int, default=CONTEXT, help="keys of each sequence")
    parser.add_argument("--variants", default=";".join(CHOICES), help="a list of: " + "; ".join(CHOICES))
    parser.add_argument("--rounds", type=int, default=20, help="how often a graph runs")
    parser.add_argument("--output", type=Path, help="write a JSON file")
    given = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = ProcessGroup.with_peer_memory()
    model = model_of(given.layers, device)
    found = []
    for tokens in map(int, given.tokens.split(",")):
        batch = SharedBatch(model, tokens, group, given.context)
        for name in (TODAY, *(each.strip() for each in given.variants.split(";"))):
            row = row_of(batch, name, given.rounds)
            found.append(row)
            if group.rank == 0:
                print(f"{tokens:>2} {name:24} {row['us']:7.2f} us  {row['note']}", flush=True)
                if given.output:
                    write_result(given.output, device, layers=given.layers, ranks=group.world_size, rows=found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

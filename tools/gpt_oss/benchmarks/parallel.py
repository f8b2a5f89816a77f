"""Measures decode steps and prefills of a tensor-parallel or expert-parallel model with random weights.

    torchrun --nproc-per-node 2 tools/gpt_oss/benchmarks/parallel.py --output h200_parallel.json

``--experts`` selects a rank's part of the experts: a slice of each expert, or some whole experts. A step is timed as a caller of
each rank's engine sees it. The same pass is also replayed on the device without an engine. The time of the slowest rank counts. All
ranks must have selected the same tokens. With ``--check`` the first layers are also run unsharded on each GPU, and next-token
distributions are compared. On a CPU the ranks are gloo processes, and passes are launched from Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpt_oss.batch import Phase, Piece, make_batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.config import PRESETS, Config, preset
from gpt_oss.divergence import divergence_of
from gpt_oss.engine import Engine
from gpt_oss.kernels import listen, portable_only, preferring
from gpt_oss.left_out import leave_out
from gpt_oss.loader import RandomTensors
from gpt_oss.model import GptOss
from gpt_oss.parallel import MODELS
from gpt_oss.request import Request
from gpt_oss.sampling import Sampling
from gpt_oss.shards import ShardedGptOss
from gpt_oss.tensor_parallel import TensorParallelGptOss
from tokenspeed_kernel import ProcessGroup
from tokenspeed_kernel.workbench.benchmark import as_text, collect_metadata

_WARM_STEPS = 4
_REPLAYS = 30  # replays of the pass without the engine; each advances the position by one
_PAGE = 64


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        with preferring(options.prefer):
            report = _measured(options, device)
        if dist.get_rank() == 0:
            print(_table(report), flush=True)
    finally:
        dist.destroy_process_group()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the result is written, after each batch")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="gpt-oss-120b", help="whose shapes the weights have")
    parser.add_argument("--layers", type=int, help="the preset's if left out")
    parser.add_argument("--batches", type=_counts, default=(1, 64), help="numbers of sequences that decode together")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=32, help="that are timed")
    parser.add_argument("--prefill-tokens", type=int, default=8192, help="the most prompt tokens of a pass")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--bias", type=float, default=0.02, help="standard deviation of the random biases")
    parser.add_argument("--prefer", type=_names, default=(), help="kernels that serve wherever they can")
    parser.add_argument("--experts", choices=sorted(MODELS), default="parts", help="what of them a rank has")
    parser.add_argument("--prefills", type=_shapes, default=(), help="prompts and their tokens, like 1x1024,8x1024")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each prefill, of which the median counts")
    parser.add_argument("--check", type=int, default=0, help="layers that are run whole, too, and compared")
    parser.add_argument("--left-out", action="store_true", help="by how much a pass is shorter without each of its kernels")
    parser.add_argument(
        "--routed-tokens", type=_counts, help="numbers of tokens with a separate sum before the router: from, up to but without"
    )
    return parser.parse_args(arguments)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(a), int(b)) for a, b in (part.split("x") for part in text.split(",") if part))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _table(report: dict[str, Any]) -> str:
    """Returns the report as a Markdown table of decode steps, and a line per prefill."""
    lines = ["| ranks | batch | context | ms a step | ms bare | tokens/s |", "|--:|--:|--:|--:|--:|--:|"]
    for row in report["decode"]:
        times = f"{row['milliseconds_a_step']:.3f} | {row['milliseconds_bare']:.3f} | {row['tokens_per_second']:.0f}"
        lines.append(f"| {report['ranks']} | {row['batch']} | {row['context']} | {times} |")
    lines += [
        f"prefill {row['batch']} x {row['tokens']}: {1e3 * row['seconds']:.1f} ms, {row['tokens_per_second']:.0f} tokens/s"
        for row in report["prefill"]
    ]
    return "\n".join(lines)


def _measured(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Makes all measurements. The report is written after each measurement."""
    group = ProcessGroup.with_peer_memory()
    config = preset(options.preset) if options.layers is None else preset(options.preset).with_layers(options.layers)
    said = {name: getattr(options, name) for name in ("preset", "experts", "context", "steps", "seed", "bias")}
    said["batches"] = ",".join(map(str, options.batches))
    settings = " ".join(f"--{name} {value}" for name, value in said.items())
    command = f"torchrun --nproc-per-node {group.world_size} tools/gpt_oss/benchmarks/parallel.py {settings}"
    report: dict[str, Any] = {
        "metadata": dataclasses.asdict(collect_metadata(command, device)),
        "ranks": group.world_size,
        "peer_memory": group.peer_gap or "yes",
        "layers": config.num_hidden_layers,
        "prefer": list(options.prefer),
        "decode": [],
        "prefill": [],
    }
    if options.check:
        report["check"] = _check(config.with_layers(options.check), options, group, device)
        _write(report, options, group)
    began = time.perf_counter()
    source = RandomTensors(config, options.seed, torch.bfloat16, device, bias=options.bias)
    kind = MODELS[options.experts]
    longest = max([_length(options), *(tokens + 1 for _, tokens in options.prefills)])
    model = kind(config, source, group, torch.bfloat16, device, max_positions=longest)
    if options.routed_tokens is not None and isinstance(model, TensorParallelGptOss):
        model.routed_tokens = range(*options.routed_tokens)
        report["routed_tokens"] = list(options.routed_tokens)
    _wait(device)
    report["seconds_of_loading"] = time.perf_counter() - began
    report["gigabytes"] = torch.cuda.memory_allocated(device) / 1e9 if device.type == "cuda" else None
    for batch in options.batches:
        with listen() as listener:
            found = _decode(model, batch, options)
        report["decode"].append(found)
        report["kernels"] = sorted({f"{heard.operator}: {heard.kernel}" for heard in listener.heard()})
        _write(report, options, group)
    for batch, tokens in options.prefills:
        report["prefill"].append(_prefill(model, batch, tokens, options))
        _write(report, options, group)
    return report


def _write(report: dict[str, Any], options: argparse.Namespace, group: ProcessGroup) -> None:
    if options.output is not None and group.rank == 0:
        options.output.write_text(as_text(report))


def _length(options: argparse.Namespace) -> int:
    """Returns the largest number of positions of a sequence. This number includes the tokens that a sequence decodes while other
    prompts are prefilled.
    """
    passes = -(-max(options.batches) * options.context // options.prefill_tokens)
    return int(options.context + passes + _WARM_STEPS + options.steps + _REPLAYS + 8)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _prompts(config: Config, batch: int, tokens: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(config.vocab_size, (batch, tokens), generator=generator).tolist()
    return prompts


def _check(config: Config, options: argparse.Namespace, group: ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Compares logits of the sharded layers with those of the same layers on one GPU, for prompts and for one further token each.

    For scale, the single-GPU logits are also compared with logits of the core's own kernels. The two implementations on one GPU
    differ only by rounding, which already changes the selected experts.
    """
    prompts = _prompts(config, 3, 41, options.seed)

    def logits(kind: Any, *group: ProcessGroup) -> torch.Tensor:
        source = RandomTensors(config, options.seed, torch.bfloat16, device, bias=options.bias)
        model = kind(config, source, *group, torch.bfloat16, device, max_positions=64)
        cache = PagedKVCache(model.config, 3, _PAGE, torch.bfloat16, device)
        pieces = [[Piece(p[a:b], a, [page]) for page, p in enumerate(prompts)] for a, b in ((0, 40), (40, 41))]
        return torch.cat([model.forward(make_batch(each, cache, device), cache).float().cpu() for each in pieces])

    whole, shared = logits(GptOss), logits(MODELS[options.experts], group)
    with portable_only():
        portable = logits(GptOss)
    return {
        "positions": len(whole),
        "same_on_every_rank": len(set(_everywhere(int(shared.view(torch.int32).long().sum())))) == 1,
        **divergence_of(shared, whole),
        "portable": divergence_of(portable, whole),
    }


def _prefill(model: ShardedGptOss, batch: int, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures a pass over whole prompts, from queueing the requests to the first token of each."""
    cache = PagedKVCache(model.config, batch * -(-tokens // _PAGE), _PAGE, torch.bfloat16, model.device)
    engine = Engine(model, cache, batch * tokens, batch, "eager")
    requests = [Request(prompt, 1) for prompt in _prompts(model.config, batch, tokens, options.seed)]
    engine.generate(requests)
    seconds = []
    for _ in range(options.repeats):
        dist.barrier()
        began = time.perf_counter()
        engine.generate(requests)
        seconds.append(time.perf_counter() - began)
    median = max(_everywhere(statistics.median(seconds)))
    return {"batch": batch, "tokens": tokens, "seconds": median, "tokens_per_second": batch * tokens / median}


def _decode(model: ShardedGptOss, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures an engine's steps in which a whole batch decodes."""
    cuda, length = model.device.type == "cuda", _length(options)
    cache = PagedKVCache(model.config, batch * -(-length // _PAGE), _PAGE, torch.bfloat16, model.device)
    decode = "graphs" if cuda else "static"
    engine = Engine(model, cache, min(options.prefill_tokens, batch * options.context), batch, decode, decode_sizes=(batch,))
    for index, prompt in enumerate(_prompts(model.config, batch, options.context, options.seed)):
        # Request more tokens than are timed, so that the replayed passes have valid pages.
        engine.add(Request(prompt, length - options.context, Sampling(1.0, seed=options.seed + index)))
    chosen: list[Any] = []
    before = engine.steps[Phase.DECODE]
    while engine.steps[Phase.DECODE] < before + _WARM_STEPS:
        chosen += engine.step()
    dist.barrier()
    chosen += engine.step()  # Not timed: passes overlap, and the pass before this one has ended while the ranks met.
    seconds = []
    for _ in range(options.steps):
        began = time.perf_counter()
        chosen += engine.step()
        seconds.append(time.perf_counter() - began)
    tokens = _everywhere([(event.request, event.index, event.token) for event in chosen])
    if any(other != tokens[0] for other in tokens):
        raise RuntimeError(f"ranks chose different tokens for a batch of {batch}")
    step = max(_everywhere(statistics.fmean(seconds)))
    return {
        "batch": batch,
        "context": options.context,
        "milliseconds_a_step": 1e3 * step,
        "milliseconds_median": 1e3 * max(_everywhere(statistics.median(seconds))),
        "milliseconds_bare": max(_everywhere(_bare(engine, batch))),
        "tokens_per_second": batch / step,
        "left_out": _left_out(engine, batch) if options.left_out and cuda else {},
    }


def _bare(engine: Engine, batch: int) -> float:
    """Returns the milliseconds of a pass without the engine. After one untimed replay, the pass is replayed repeatedly and timed
    with device events on a GPU; on a CPU, one replay is timed.
    """
    decoder, device = engine.decoder, engine.model.device
    assert decoder is not None
    decoder.replay(batch, sampled=True)
    _wait(device)
    dist.barrier()
    if device.type != "cuda":
        began = time.perf_counter()
        decoder.replay(batch, sampled=True)
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_REPLAYS - 4):
        decoder.replay(batch, sampled=True)
    end.record()
    _wait(device)
    milliseconds: float = begin.elapsed_time(end) / (_REPLAYS - 4)
    return milliseconds


def _left_out(engine: Engine, batch: int) -> dict[str, Any]:
    """Returns the time of the model's pass without sampling, and how much shorter the pass is without each of its kernels. The
    pass's time is the slowest rank's; the differences are the smallest of all ranks.
    """
    decoder = engine.decoder
    assert decoder is not None
    with torch.no_grad():
        whole, found = leave_out(lambda: decoder.forward(batch), engine.model.device)
    of_rank = {(each.operator, each.kernel): each for each in found}
    rows = []
    for operator, kernel in sorted(of_rank):
        shorter = min(_everywhere(of_rank[operator, kernel].microseconds))
        row = {"operator": operator, "kernel": kernel, "calls": of_rank[operator, kernel].calls, "microseconds": shorter}
        rows.append(row)
    return {"microseconds": max(_everywhere(whole)), "kernels": sorted(rows, key=lambda row: -float(row["microseconds"]))}


if __name__ == "__main__":
    main()

"""Times all-reduces between the GPUs of one machine, alone and with the steps that follow in a transformer layer (residual add,
normalisation, quantisation). The baselines are NCCL, PyTorch, and, if FlashInfer is installed, FlashInfer's copies of the kernels
of TensorRT-LLM and vLLM.

python packages/tokenspeed-kernel/benchmarks/all_reduce.py --ranks 2 --json
packages/tokenspeed-kernel/benchmarks/h200_all_reduce.json

There is one process per GPU. Each result is first compared with the float32 sum in rank order, rounded once. A sum may differ by
twice the dtype's epsilon per rank, relative to the largest sum. ``exact`` in the report tells whether the sums are bitwise right on
all ranks. Then 20 calls are captured into a CUDA graph, which is replayed. The reported time is that of one call: the median over
replays, on the slowest rank. PyTorch's multimem operations are not measured, because some machines and containers lack NVLink
multicast.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import all_reduce_baselines as baselines
import torch
import torch.distributed as dist
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.benchmark import as_text, collect_metadata
from tokenspeed_kernel.workbench.worlds import WorldError, gap, run_world
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import CHUNK, UNIT
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm

ROWS = (1, 16, 64, 256, 1024, 8192)
EPS = 1e-5
# The number of replays of a graph: _REPLAYS, or _LARGE_REPLAYS if the reduced tensor has at least _LARGE bytes.
_REPLAYS, _LARGE_REPLAYS, _LARGE = 50, 10, 1 << 24

QUANTIZATION = tk.Quantization.fp8()
SUM, NORM, FP8 = "all_reduce", "all_reduce_rmsnorm", "all_reduce_rmsnorm_quantize"

# Runs an operator and returns its outputs; a single tensor is wrapped in a tuple.
Call = Callable[[], tuple[Tensor, ...]]


def main(arguments: Sequence[str] | None = None) -> int:
    return run("all_reduce.py", __doc__, ROWS, measure, arguments)


def run(
    program: str,
    description: str | None,
    rows: Sequence[int],
    measure: Callable[..., list[dict[str, Any]]],
    arguments: Sequence[str] | None,
) -> int:
    """Runs a benchmark between GPUs: starts the ranks, prints a table, and writes the report if a file is given.

    Args:
        program: the file name of the benchmark.
        description: help text of the benchmark.
        rows: numbers of rows of the input that are measured by default.
        measure: the function that each rank runs. It takes the numbers of rows, the hidden size, dtype, number of calls in a
            graph and device, and the file to which rank 0 saves the results so far (or None). It returns the rows of the report.
        arguments: words of the command line; None for those of ``sys.argv``.

    Returns:
        The exit status: 1 if a GPU is missing, a call failed or a result was wrong.
    """
    options = parser(description, rows).parse_args(arguments)
    missing = gap(options.ranks, torch.device(options.device))
    if missing is not None:
        print(missing, file=sys.stderr)
        return 1
    kept = options.json and options.json.with_suffix(".partial")
    settings = options.rows, options.hidden, options.dtype, options.calls, options.device, kept
    try:
        found = run_world(measure, options.ranks, settings, device=options.device, time_limit_s=options.time_limit)[0]
    except WorldError as error:
        print(error, file=sys.stderr)
        return 1
    report = {
        "metadata": dataclasses.asdict(collect_metadata(command(program, options), options.device)),
        "ranks": options.ranks,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if options.device == "cuda" else "",
        "hidden": options.hidden,
        "dtype": options.dtype,
        "calls": options.calls,
        "rows": found,
    }
    if options.json is not None:
        options.json.write_text(as_text(report))
        kept.unlink()
    print(table(report))
    return 0 if all(row["us"] is not None or row["skipped"] for row in found) else 1


def parser(description: str | None, rows: Sequence[int]) -> argparse.ArgumentParser:
    """Returns the parser of the command-line options of a benchmark between GPUs.

    Args:
        description: the program's help text.
        rows: numbers of rows of the input that are measured by default.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, default=2, help="processes, each with a GPU")
    made.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=rows, help="such as 1,64,1024")
    made.add_argument("--hidden", type=int, default=2880)
    made.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    made.add_argument("--calls", type=int, default=20, help="in a graph")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="on a CPU calls are not captured")
    made.add_argument("--time-limit", type=float, default=300.0, help="seconds until everything must be done")
    made.add_argument("--json", type=Path, help="where to write the report")
    return made


def command(program: str, options: argparse.Namespace) -> str:
    """Returns the command line for these options, without the output file."""
    said = {name: getattr(options, name) for name in ("ranks", "rows", "hidden", "dtype", "calls", "device")}
    said["rows"] = ",".join(map(str, options.rows))
    settings = " ".join(f"--{name} {value}" for name, value in said.items())
    return f"python packages/tokenspeed-kernel/benchmarks/{program} {settings}"


def table(report: dict[str, Any]) -> str:
    """Returns a report as a Markdown table: a row per implementation, and a column per number of rows of the input."""
    rows = report["rows"]
    sizes = sorted({row["rows"] for row in rows})
    lines = [f"| us a call, {report['ranks']} ranks | " + " | ".join(map(str, sizes)) + " |", "|---|" + "--:|" * len(sizes)]
    for operator, name in dict.fromkeys((row["operator"], row["contestant"]) for row in rows):
        found = {row["rows"]: row for row in rows if (row["operator"], row["contestant"]) == (operator, name)}
        cells = (found.get(size, {}).get("us") for size in sizes)
        lines.append(f"| {operator}: {name} | " + " | ".join("" if us is None else f"{us:.2f}" for us in cells) + " |")
    reasons = dict.fromkeys(f"{row['contestant']}, {row['rows']} rows: {row['reason']}" for row in rows if row["reason"])
    return "\n".join([*lines, *reasons])


# -- the function that each rank runs ----------------------------------------------------------------------------------------------


def measure(
    sizes: Sequence[int], hidden: int, dtype: str, calls: int, device: str, kept: Path | None = None
) -> list[dict[str, Any]]:
    """Measures each operator's implementations at each number of rows of the input. Returns the report's rows, equal on all
    ranks.
    """
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    row_bytes = -(-hidden * getattr(torch, dtype).itemsize // UNIT) * UNIT
    # In the two-shot protocol, each rank reduces a share of whole rows or whole chunks, so shares are rounded up.
    most = max(sizes) * row_bytes
    group = ProcessGroup.with_peer_memory(one_shot_bytes=most, two_shot_bytes=most + dist.get_world_size() * max(row_bytes, CHUNK))
    found = []
    for rows in sizes:
        inputs = Inputs(rows, hidden, getattr(torch, dtype), place, group)
        inputs.most_rows = max(sizes)
        for operator in (SUM, NORM, FP8):
            for name, make in implementations(operator, inputs):
                found.append({"operator": operator, "contestant": name, "rows": rows, **_outcome(operator, make, inputs, calls)})
        keep(found, kept)
    return found


class Inputs:
    """The operands of this rank, and the expected outputs of the operators."""

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> None:
        generator = torch.Generator(device).manual_seed(rows)
        draw = functools.partial(torch.randn, generator=generator, device=device)
        every = [draw(rows, hidden).to(dtype) for _ in range(group.world_size)]
        self.group, self.x = group, every[group.rank].clone()
        self.weight, self.residual = draw(hidden).to(dtype), draw(rows, hidden).to(dtype)
        self.total = functools.reduce(lambda total, x: total + x.float(), every[1:], every[0].float()).to(dtype)
        self.normed, self.summed = rmsnorm(self.total, self.weight, EPS, self.residual, solution="reference")
        self.out, self.residual_out = torch.empty_like(self.x), torch.empty_like(self.x)
        self.most_rows = rows  # the largest number of rows that this process measures
        # The largest allowed difference of a sum: twice the dtype's epsilon per rank, relative to the largest sum.
        self.slack = 2 * group.world_size * torch.finfo(dtype).eps * float(self.total.abs().max())

    def norm(self, total: Tensor) -> tuple[Tensor, ...]:
        return rmsnorm(total, self.weight, EPS, self.residual, self.out, self.residual_out)

    def encode(self, normed: Tensor, summed: Tensor) -> tuple[Tensor, ...]:
        return *tk.quantize_fp8(normed), summed

    def compared(self, operator: str, made: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yields, for each output of an operator, the output, the expected tensor, and the largest allowed absolute difference."""
        if operator == FP8:
            codes, scale, summed = made
            yield codes.float() * scale, self.normed, float(self.normed.abs().max()) * 2**-4 + 4 * self.slack
            yield summed, self.summed, self.slack
        elif operator == NORM:
            yield made[0], self.normed, 4 * self.slack
            yield made[1], self.summed, self.slack
        else:
            yield made[0], self.total, self.slack


def keep(found: list[dict[str, Any]], file: Path | None) -> None:
    """Writes the rows of the report so far to ``file``, on rank 0. So an interrupted run keeps its results."""
    if file is not None and dist.get_rank() == 0:
        file.write_text(json.dumps(found, indent=1) + "\n")


def implementations(operator: str, inputs: Inputs) -> Iterator[tuple[str, Callable[[], Call | str]]]:
    """Yields the implementations of an operator. Each is a name and a function. The function returns a call of the implementation,
    or the reason why the implementation cannot run."""
    behind = {SUM: "", NORM: ", rmsnorm", FP8: ", rmsnorm, quantize_fp8"}[operator]
    libraries = ((dist.get_backend(), _library), ("torch one_shot", _torch_one_shot), ("torch two_shot", _torch_two_shot))
    for name, make in libraries[: 1 if operator == FP8 else None]:
        yield name + behind, functools.partial(_followed, make, operator, inputs)
    if operator == SUM:
        yield "vllm", functools.partial(_vllm, inputs)
    if operator in (SUM, NORM):
        yield "trtllm", functools.partial(_trtllm, operator, inputs)
    if operator == FP8:
        yield "all_reduce_rmsnorm, quantize_fp8", lambda: lambda: inputs.encode(*_ours_of(NORM, inputs))
    yield "chosen", functools.partial(_ours, operator, inputs, None)
    for kind in ("one_shot", "two_shot"):
        yield kind, functools.partial(_ours, operator, inputs, f"triton_{kind}_{operator}{'_fp8' if operator == FP8 else ''}")


def _followed(make: Callable[[Inputs], Callable[[], Tensor] | str], operator: str, inputs: Inputs) -> Call | str:
    total = make(inputs)
    if isinstance(total, str):
        return total
    if operator == SUM:
        return lambda: (total(),)
    return (lambda: inputs.norm(total())) if operator == NORM else (lambda: inputs.encode(*inputs.norm(total())))


def _library(inputs: Inputs) -> Callable[[], Tensor]:
    """Returns a call of torch.distributed's all-reduce. The call reduces a buffer in place: the first call reduces x, and each
    later call reduces the previous result."""
    buffer = inputs.x.clone()

    def call() -> Tensor:
        dist.all_reduce(buffer)
        return buffer

    return call


def _symmetric(inputs: Inputs) -> Tensor | str:
    if inputs.x.device.type != "cuda":
        return "symmetric memory is for GPUs"
    from torch.distributed import _symmetric_memory as symmetric

    made = symmetric.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)
    symmetric.rendezvous(made, dist.group.WORLD)
    return made.copy_(inputs.x)


def _torch_one_shot(inputs: Inputs) -> Callable[[], Tensor] | str:
    x = _symmetric(inputs)
    return x if isinstance(x, str) else lambda: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", dist.group.WORLD.group_name)


def _torch_two_shot(inputs: Inputs) -> Callable[[], Tensor] | str:
    x = _symmetric(inputs)
    return x if isinstance(x, str) else lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", dist.group.WORLD.group_name)


def _vllm(inputs: Inputs) -> Call | str:
    return baselines.Vllm.gap(inputs.x) or baselines.Vllm(inputs.x)


def _trtllm(operator: str, inputs: Inputs) -> Call | str:
    norm = None if operator == SUM else (inputs.residual, inputs.weight, EPS)
    return baselines.gap(inputs.x.device) or baselines.trtllm(inputs.x, inputs.most_rows, norm)


def _ours(operator: str, inputs: Inputs, kernel: str | None) -> Call | str:
    i = inputs
    arguments = (
        (i.x, i.group) if operator == SUM else (i.x, i.weight, i.group, *[QUANTIZATION] * (operator == FP8), EPS, i.residual)
    )
    asked = getattr(tk, operator).explain(*arguments, override=kernel)
    if asked.chosen is None or (kernel is not None and i.group.peers is None):
        return asked.problem or i.group.peer_gap
    return functools.partial(_ours_of, operator, inputs, kernel)


def _ours_of(operator: str, inputs: Inputs, kernel: str | None = None) -> tuple[Tensor, ...]:
    i = inputs
    if operator == SUM:
        return (tk.all_reduce(i.x, i.group, i.out, override=kernel),)
    if operator == NORM:
        return tk.all_reduce_rmsnorm(i.x, i.weight, i.group, EPS, i.residual, i.out, i.residual_out, override=kernel)
    return tk.all_reduce_rmsnorm_quantize(
        i.x, i.weight, i.group, QUANTIZATION, EPS, i.residual, residual_out=i.residual_out, override=kernel
    )


def _outcome(operator: str, make: Callable[[], Call | str], inputs: Inputs, calls: int) -> dict[str, Any]:
    nothing = {"us": None, "best_us": None, "exact": None}
    made: tuple[Tensor, ...] = ()
    failure = ""
    try:
        call = make()
        made = () if isinstance(call, str) else call()
    except Exception as error:  # a library that fails, for example because it cannot compile, must not end the other measurements
        call, failure = "", f"{type(error).__name__}: {error}"
    # A rank that failed makes no more calls, so the other ranks must not wait for it.
    failures = [f"rank {rank}: {each}" for rank, each in enumerate(everywhere(failure)) if each]
    if failures:
        return {**nothing, "skipped": False, "reason": "; ".join(failures)}
    if isinstance(call, str):
        return {**nothing, "skipped": True, "reason": call}
    pairs = list(inputs.compared(operator, made))
    far = max(float((got.float() - right.float()).abs().max()) - slack for got, right, slack in pairs)
    exact = torch.equal(*(pairs[-1][:2]))
    outcome = {"exact": all(everywhere(exact)), "skipped": False}
    if max(everywhere(far)) > 0:
        return {**outcome, "us": None, "best_us": None, "reason": f"wrong by {far:.3g} more than it may be"}
    return {**outcome, **summary(times(call, calls, inputs.x)), "reason": ""}


def summary(times: Sequence[float]) -> dict[str, float]:
    """Returns the largest of the ranks' median times, and the largest of the ranks' shortest times, in microseconds."""
    return {"us": max(everywhere(statistics.median(times))), "best_us": max(everywhere(min(times)))}


def everywhere(value: Any) -> list[Any]:
    """Exchanges a value between the ranks. Returns the values of all ranks, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def times(call: Callable[[], Any], calls: int, x: Tensor) -> list[float]:
    """Returns the microseconds per call, one value for each replay. ``x``: the tensor that is sent; its size determines the number
    of replays."""
    if x.device.type != "cuda":
        found = []
        for _ in range(3):
            began = time.perf_counter()
            call()
            found.append((time.perf_counter() - began) * 1e6)
        return found
    replays = _REPLAYS if x.numel() * x.element_size() < _LARGE else _LARGE_REPLAYS
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    if isinstance(call, baselines.Vllm):
        call.captured()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 / calls for begin, end in itertools.pairwise(events)]


if __name__ == "__main__":
    sys.exit(main())

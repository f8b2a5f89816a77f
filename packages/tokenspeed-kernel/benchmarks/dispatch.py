"""Measures how much more host time a call through the public API takes than a direct call of the kernel, and how long importing the
package takes.

    python packages/tokenspeed-kernel/benchmarks/dispatch.py --output packages/tokenspeed-kernel/benchmarks/dispatch.json

Each operator gets a kernel that does nothing, so only dispatch is measured. Three kinds of calls alternate in short runs in one
process: the public function, the callable that ``bind`` returns (which still checks values in host memory), and the kernel's own
function. The figures are differences between the medians over runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.benchmark import write_result
from tokenspeed_kernel_base import memo
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

CALLS, RUNS = 500, 401


def _noop(operator: Any, result: Any = None, name: str = "noop") -> None:
    """Registers a kernel that does nothing and returns ``result``, with the highest priority, for all formats and traits."""
    names = ", ".join(operator.names)
    kernel = eval(f"lambda {names}: result", {"result": result})  # a lambda with exactly the operator's parameters
    spec = KernelSpec(
        f"{name}_{operator.mode}",
        operator.family,
        operator.mode,
        solution="noop",
        format_signatures=None,
        universal=True,
        priority=19,
        origin=__file__,
    )
    KernelRegistry.get().register(spec, kernel)


def _runs(calls: list[Callable[[], None]]) -> list[list[float]]:
    """Returns, for each callable, the nanoseconds of one call in each run. A callable makes ``CALLS`` calls. The callables
    alternate, so clock drift affects all of them equally."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(RUNS):
        for call, record in zip(calls, times, strict=True):
            start = time.perf_counter_ns()
            call()
            record.append((time.perf_counter_ns() - start) / CALLS)
    return times


def _repeat(function: Callable[..., Any], keywords: dict[str, Any], positional: tuple[Any, ...]) -> Callable[[], None]:
    loop: dict[str, Any] = {"function": function, "keywords": keywords, "positional": positional, "numbers": range(CALLS)}
    # The call is written as in a model's code: required arguments by position, options by keyword.
    options = "".join(f", {name}={name}" for name in keywords)
    names = [f"a{i}" for i in range(len(positional))]
    source = f"def run({', '.join([*names, *keywords])}):\n    for _ in numbers:\n        function({', '.join(names)}{options})\n"
    exec(source, loop)
    return lambda: loop["run"](*positional, **keywords)


def overhead(function: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, float]:
    """Returns the median nanoseconds of a call of the public function, of the callable that ``bind`` returns, and of the kernel's
    own function; and the differences."""
    bound = function.bind(*positional, **keywords)
    bare = KernelRegistry.get().get_impl(f"noop_{function.operator.mode}")
    complete = function.operator.complete(dict(zip(function.operator.names, positional, strict=False)) | keywords)
    in_order = tuple(complete[name] for name in function.operator.names)
    ways = [_repeat(function, keywords, positional), _repeat(bound, {}, in_order), _repeat(bare, {}, in_order)]
    public, through_bind, kernel = map(statistics.median, _runs(ways))
    figures = {
        "public_ns": public,
        "bound_ns": through_bind,
        "kernel_ns": kernel,
        "over_bound_ns": public - through_bind,
        "over_kernel_ns": public - kernel,
    }
    return {name: round(value, 1) for name, value in figures.items()}


def decide_again(function: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, float]:
    """Returns the median nanoseconds of a call whose description is not memoised (for example, with new shapes), and of a call that
    must also select the kernel again."""
    figures = {}
    for name, forget in (
        ("new_description_ns", function.caller.forget),
        ("new_selection_ns", memo.invalidate),
    ):
        times = []
        for _ in range(2001):
            forget()
            start = time.perf_counter_ns()
            function(*positional, **keywords)
            times.append(time.perf_counter_ns() - start)
        figures[name] = statistics.median(times)
    return figures


def composed() -> dict[str, float]:
    """Returns the median nanoseconds of a call of a composed operator, and of a call of its body, which calls the parts one by one.
    The parts' kernels do nothing."""
    hidden, experts, top_k = 64, 8, 2
    x, residual, weight = torch.zeros(4, hidden), torch.zeros(4, hidden), torch.ones(hidden)
    router, bias = torch.zeros(experts, hidden).t(), torch.zeros(experts)
    results = {"rmsnorm": (x, residual), "mm": torch.zeros(4, experts), "moe_topk": (torch.zeros(4, top_k), torch.zeros(4, top_k))}
    for mode, result in results.items():
        _noop(getattr(tk, mode).operator, result, "given")
    op = tk.rmsnorm_moe_topk.operator
    call = _repeat(tk.rmsnorm_moe_topk, {"residual": residual, "router_bias": bias}, (x, weight, router, top_k))
    parts = _repeat(op.body, {"residual": residual, "router_bias": bias}, (x, weight, router, top_k))
    whole_ns, parts_ns = map(statistics.median, _runs([call, parts]))
    for mode in results:
        KernelRegistry.get().unregister(f"given_{mode}")
    return {"composed_ns": round(whole_ns, 1), "parts_one_by_one_ns": round(parts_ns, 1)}


def _decode_arguments(sinks: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch, pages, page_size, heads, kv_heads, head_dim = 4, 64, 16, 64, 8, 64
    cache = torch.zeros(pages, page_size, kv_heads, head_dim, dtype=torch.bfloat16)
    page_table = torch.arange(batch * 16, dtype=torch.int32).view(batch, 16)
    lengths = torch.full((batch,), 200, dtype=torch.int32)
    q = torch.zeros(batch, heads, head_dim, dtype=torch.bfloat16)
    options: dict[str, Any] = {"window_left": 127, "sinks": torch.zeros(heads)} if sinks else {}
    return (q, cache, cache.clone(), page_table, lengths, 256), options


def _calls() -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    x, weight = torch.zeros(4, 2880, dtype=torch.bfloat16), torch.ones(2880, dtype=torch.bfloat16)
    yield "rmsnorm", tk.rmsnorm, (x, weight), {}
    yield "rmsnorm with residual", tk.rmsnorm, (x, weight, 1e-5), {"residual": x.clone()}
    yield "mha_decode_with_kvcache", tk.mha_decode_with_kvcache, *_decode_arguments(sinks=False)
    yield "mha_decode_with_kvcache, window and sinks", tk.mha_decode_with_kvcache, *_decode_arguments(sinks=True)


def import_cost(repeats: int = 15) -> dict[str, Any]:
    """Measures how many milliseconds importing the package takes after torch has been imported. Each repeat is a fresh process."""
    program = (
        "import torch, time, sys, json; start = time.perf_counter(); import tokenspeed_kernel; "
        "print(json.dumps([(time.perf_counter() - start) * 1e3, 'triton' in sys.modules, torch.cuda.is_initialized()]))"
    )
    # Python finds the bytecode on disk, as in an installed package. The first run writes the bytecode, and is not counted.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    rows = []
    with tempfile.TemporaryDirectory() as bytecode:
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        for _ in range(repeats + 1):
            ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
            rows.append(json.loads(ran.stdout))
    rows = rows[1:]
    return {
        "added_ms": round(statistics.median(row[0] for row in rows), 1),
        "imports_triton": any(row[1] for row in rows),
        "creates_gpu_context": any(row[2] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = composed()
    for name in ("rmsnorm", "mha_decode_with_kvcache"):
        _noop(getattr(tk, name).operator)
    rows = {}
    for label, function, positional, keywords in _calls():
        rows[label] = {**overhead(function, positional, keywords), **decide_again(function, positional, keywords)}
        print(label, *(f"  {name:<20}{value:>10.1f}" for name, value in rows[label].items()), sep="\n")
    print("rmsnorm_moe_topk, composed", *(f"  {name:<20}{value:>10.1f}" for name, value in parts.items()), sep="\n")
    imports = import_cost()
    print(f"import tokenspeed_kernel adds {imports['added_ms']} ms to import torch")
    command = "python packages/tokenspeed-kernel/benchmarks/dispatch.py"
    values = {"calls_per_run": CALLS, "runs": RUNS, "overhead": rows, "composed": parts, "import": imports}
    write_result(arguments.output, command=command, **values)


if __name__ == "__main__":
    main()

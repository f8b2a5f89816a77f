"""Measures the host time of calls: of the first call in a process, with and without a compiled kernel on disk, and of later calls.

python packages/tokenspeed-kernel-nvidia/benchmarks/host.py --output packages/tokenspeed-kernel-nvidia/benchmarks/host.json
python packages/tokenspeed-kernel-nvidia/benchmarks/host.py --kept  # with the programs in the cache

First calls are made in new processes that have already used PyTorch and the GPU. Functions are called in the order of the table, so
the first call also imports the modules that all functions need. Later calls run many times in short series on the same arguments,
with ``out=`` and without. Later calls never wait for the device. The fastest series counts. The series of all functions alternate,
because CPU clocks vary.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Function = Callable[..., Any]
# Number of calls per series. With so few calls, the launch queue does not become full, which would block the host.
_CALLS = 30
_STRETCHES = 100


def arguments() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Returns the calls to measure, in the sizes of GPT-OSS: for each, the launcher's module, the function's name, and the
    arguments."""

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    sinks = bf16(64)
    ragged = {"q": bf16(512, 64, 64), "k": bf16(512, 8, 64), "v": bf16(512, 8, 64), "cu_seqlens": int32(0, 200, 512)}
    cache = {"k_cache": bf16(16, 64, 8, 64), "v_cache": bf16(16, 64, 8, 64), "page_table": int32(*range(16)).view(2, 8)}
    lengths = {"cache_seqlens": int32(300, 500), "max_seqlen_k": 512}
    offsets = {"cu_seqlens_q": int32(0, 32, 64), "cu_seqlens_kv": None, "max_seqlen_q": 32}
    extend = {"q": bf16(64, 64, 64), **offsets, "is_causal": True}
    calls = {
        "mha_prefill": ("prefill", ragged),
        "mha_extend_with_kvcache": ("prefill", {**extend, **cache, **lengths}),
        "mha_decode_with_kvcache": ("decode", {"q": bf16(2, 64, 64), **cache, **lengths}),
    }
    made = {name: (module, name, {**given, "sinks": sinks}) for name, (module, given) in calls.items()}
    for name, (module, _, given) in [*made.items()]:
        module = "decode" if module == "decode" else "window"
        made[f"{name}, window 128"] = (module, name, {**given, "window_left": 127})
    return made


def written(function: Function, given: dict[str, Any]) -> Callable[[], Any]:
    """Returns a function without parameters that makes the call with keyword arguments spelled out, as in a user's source. A call
    with ``**given`` would spend time on dictionaries.
    """
    call: Callable[[], Any] = eval(
        f"lambda: function({', '.join(f'{name}={name}' for name in given)})", {"function": function, **given}
    )
    return call


def quickest(calls: dict[tuple[str, str], Callable[[], Any]]) -> dict[tuple[str, str], float]:
    """Returns the host time of each call in microseconds: the average in the call's fastest series."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(_STRETCHES):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(_CALLS):
                call()
            best[name] = min(best[name], time.perf_counter() - begun)
    torch.cuda.synchronize()
    return {name: seconds / _CALLS * 1e6 for name, seconds in best.items()}


def measure(later: bool) -> dict[str, dict[str, float]]:
    """Measures in this process: first calls in milliseconds and, with ``later``, later calls in microseconds."""
    calls = arguments()
    torch.cuda.synchronize()
    found: dict[str, dict[str, float]] = {}
    again: dict[tuple[str, str], Callable[[], Any]] = {}
    for label, (module, name, given) in calls.items():
        begun = time.perf_counter()
        launch: Function = getattr(__import__(f"tokenspeed_kernel_nvidia.sm90.attention.{module}", fromlist=[name]), name)
        launch(**given)
        torch.cuda.synchronize()
        found[label] = {"first_ms": (time.perf_counter() - begun) * 1e3}
        if later:
            again |= {(label, column): call for column, call in _later(name, launch, given).items()}
    if later:
        x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
        again["torch.add, for comparison", "launcher_out_us"] = lambda: torch.add(x, x, out=y)
        again["torch.empty_like, for comparison", "launcher_us"] = lambda: torch.empty_like(x)
    for (label, column), microseconds in quickest(again).items():
        found.setdefault(label, {})[column] = microseconds
    return found


def _later(name: str, launch: Function, given: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Returns the later calls to measure, by the table's column."""
    import tokenspeed_kernel
    import tokenspeed_kernel_nvidia

    plain, core = getattr(tokenspeed_kernel_nvidia, name), getattr(tokenspeed_kernel, name)
    out = torch.empty_like(given["q"])
    functions = {"launcher": launch, "plain_function": plain}
    if core.explain(**given).chosen.solution == "cutedsl":
        functions["operator"] = core
    calls = {f"{column}_us": written(function, given) for column, function in functions.items()}
    return calls | {f"{column}_out_us": written(function, {**given, "out": out}) for column, function in functions.items()}


def in_process(cache: str, later: bool) -> dict[str, dict[str, float]]:
    """Runs `measure` in a new process that uses the cache directory ``cache``, and returns the result."""
    command = [sys.executable, __file__, "--measure", *(["--later"] if later else [])]
    environment = {**os.environ, "TOKENSPEED_KERNEL_PROGRAMS": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="write a JSON file")
    parser.add_argument("--kept", action="store_true", help="use the cache as it is, and leave out what compiling costs")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--later", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.later)))
        return
    if options.kept:
        compiled, kept = {}, measure(later=True)
    else:
        with tempfile.TemporaryDirectory() as cache:
            compiled = in_process(cache, later=False)
            kept = in_process(cache, later=True)
    rows = {name: {"compiled_ms": compiled.get(name, {}).get("first_ms"), **found} for name, found in kept.items()}
    columns = [
        "compiled_ms",
        "first_ms",
        *(f"{what}{how}_us" for what in ("launcher", "plain_function", "operator") for how in ("", "_out")),
    ]
    print(f"{'':36}" + "".join(f"{column:>23}" for column in columns))
    for name, row in rows.items():
        print(f"{name:36}" + "".join(f"{row[column]:23.2f}" if row.get(column) is not None else f"{'':23}" for column in columns))
    if options.output:
        from tokenspeed_kernel.workbench.benchmark import write_result

        write_result(options.output, kept=options.kept, rows=rows)


if __name__ == "__main__":
    main()

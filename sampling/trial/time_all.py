"""Old and new sampling: each source in a child process of its own, its calls in CUDA graphs over copies of the logits."""
import os
import shutil
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

HERE = Path(os.environ["TRIAL"])
sys.path.insert(0, str(HERE))
from calls import CASES, VOCAB, logits, request  # noqa: E402

COMPILE = "--compile" in sys.argv
STARTED = time.time()
LIMIT = float(os.environ.get("LIMIT", "50"))


def variants(sampler):
    tiles = sampler._TILES["any"]
    flat = ("T1 p.9", "T2 p.9")
    return {
        "": (tiles, tuple(CASES)),
        "group_warps 4": (tiles._replace(group_warps=4), ("T1 p.9", "T2 p.9", "T.7 k40 p.95")),
        "finish_warps 16": (tiles._replace(finish_warps=16, cut_lanes=2048), flat),
        "weigh 8 warps": (tiles._replace(weigh_warps=8, weigh_programs=3, unit=4096), flat),
        "weigh_programs 4": (tiles._replace(weigh_programs=4), flat),
        "decide_warps 8": (tiles._replace(decide_warps=8), flat + ("T.7 k40 p.95",)),
    }


def calls_of(case, copies):
    from tokenspeed_kernel.triton.sampling.adjust_logits import adjust_logits
    from tokenspeed_kernel.triton.sampling.sample_top_k_top_p import sample_top_k_top_p

    rows, temperature, k, p, dtype, kind = CASES[case]
    device = torch.device("cuda")
    asked = request(rows, temperature, k, p, device)
    made = [logits(rows, dtype, device, seed, kind=kind) for seed in range(copies)]
    if case == "penalties":
        listed = torch.arange(1024, device=device, dtype=torch.int32).repeat(rows, 1) * 190
        counts = torch.ones_like(listed)
        ones = torch.ones(rows, device=device)

        pen = (ones * 1.0, ones * 0.0, ones * 0.0)

        def penalized_once(x):
            adjust_logits(x, listed, counts, None, *pen, out=x)
            return sample_top_k_top_p(x, *asked)

        return [lambda x=x: penalized_once(x) for x in made]
    return [lambda x=x: sample_top_k_top_p(x, *asked) for x in made]


def time_us(calls):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(2):
                for call in calls:
                    call()
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(15):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls) / 2)
    return statistics.median(times)


def stages(calls):
    """Durations of kernels as the profiler sees them; with early launches they contain waiting for the kernel in front."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            for call in calls:
                call()
        torch.cuda.synchronize()
    ends, begins = {}, {}
    kernels = sorted((e for e in prof.events() if "_kernel" in e.name), key=lambda e: e.time_range.end)
    last = None
    for e in kernels:
        begins.setdefault(e.name, []).append(e.time_range.elapsed_us())
        if last is not None:
            ends.setdefault(e.name, []).append(e.time_range.end - last)
        last = e.time_range.end
    return "  ".join(f"{n.replace('_kernel', '')} {statistics.median(begins[n]):.1f}/{statistics.median(ends.get(n, [0])):.1f}" for n in begins)


def child(source, path):
    """Runs the variants of one source; writes lines to path."""
    if source == "old":
        # A copy of the sources with the old folder in the place of the new one.
        new = next(Path(p) for p in sys.path if p.endswith("packages/tokenspeed-kernel/src"))
        copy = f"/tmp/sampling_src_{os.getpid()}"
        shutil.copytree(new, copy)
        shutil.rmtree(f"{copy}/tokenspeed_kernel/triton/sampling")
        shutil.copytree(HERE / "old/sampling", f"{copy}/tokenspeed_kernel/triton/sampling")
        sys.path.insert(0, copy)
    import tokenspeed_kernel.triton.sampling.sample_top_k_top_p  # noqa: F401

    sampler = sys.modules["tokenspeed_kernel.triton.sampling.sample_top_k_top_p"]
    if source == "old":
        assert "sampling_src" in sampler.__file__, sampler.__file__
    every = variants(sampler)
    if source in ("old", "new"):
        every = {"": every[""]}
    else:
        del every[""]
    lines = []
    for variant, (tiles, cases) in every.items():
        sampler._TILES["any"] = tiles
        for case in cases:
            who = variant or source
            ready = HERE / f"compiled_{source}.txt"
            if not COMPILE and ready.exists() and f"{who}|{case}" not in ready.read_text().splitlines():
                lines.append(("late", who, case, 0.0))
                continue
            calls = []
            try:
                rows = CASES[case][0]
                calls = calls_of(case, 1 if COMPILE else 2 if rows > 64 else 4)
                if COMPILE:
                    calls[0]()
                    torch.cuda.synchronize()
                    with open(ready, "a") as file:
                        file.write(f"{who}|{case}\n")
                    continue
                if time.time() - STARTED > LIMIT:
                    lines.append(("late", who, case, 0.0))
                    continue
                us = time_us(calls)
                lines.append(("time", who, case, us))
                if not variant and case in ("T1 p.9", "T2 p.9", "T.7 k40 p.95", "penalties"):
                    lines.append(("stages", who, case, stages(calls)))
            except Exception:
                lines.append(("error", who, case, traceback.format_exc()[-600:]))
            calls = []
            Path(path).write_text(repr(lines))
    Path(path).write_text(repr(lines))


def main():
    results, running = [], []
    for source in ("new", "old", "variants"):
        path = f"/tmp/sampling_{source}_{os.getpid()}"
        pid = os.fork()
        if pid == 0:
            try:
                child(source, path)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        running.append((pid, path))
        if not COMPILE:
            os.waitpid(pid, 0)
    for pid, path in running:
        if COMPILE:
            os.waitpid(pid, 0)
        if os.path.exists(path):
            results += eval(Path(path).read_text())
    if COMPILE:
        print("compiled", results)
        return
    lines = []
    for kind, who, case, value in results:
        if kind == "error":
            lines.append(f"ERROR {who} {case}: {value}")
        elif kind == "stages":
            lines.append(f"{who} {case}: {value}")
    table = {}
    for kind, who, case, value in results:
        if kind == "late":
            table.setdefault(case, []).append(f"{who}: -")
        if kind == "time":
            table.setdefault(case, []).append(f"{who}: {value:.1f}")
    lines += [f"{case:16s} " + "  ".join(values) for case, values in table.items()]
    text = "\n".join(lines)
    Path(os.environ.get("OUT", "/tmp"), "times.txt").write_text(text + f"\n{time.time() - STARTED:.0f} s\n")
    print(text)


if __name__ == "__main__":
    main()

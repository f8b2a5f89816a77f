"""Measures the time to load a checkpoint, compared with the time to read its bytes.

    python tools/gpt_oss/benchmarks/loading.py --layers 2 --output loading.json

A checkpoint of random weights, in the layout of the released checkpoints, is written to a folder. Then two measurements alternate:
the files are read sequentially, and a model is loaded from the files. Before each measurement, the files' pages are dropped from
the system's page cache (``--warm`` keeps them). The system may ignore the request to drop pages; the measured gigabytes per second
show this.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpt_oss import Checkpoint, GptOss, RandomTensors, save_checkpoint
from gpt_oss.benchmark import Workload
from tokenspeed_kernel.workbench.benchmark import as_text, collect_metadata

_PIECE = 16 << 20  # bytes per read


def drop(folder: Path) -> None:
    """Asks the system to drop the files from its page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read(folder: Path) -> int:
    """Reads the files sequentially, and returns their total bytes."""
    held = bytearray(_PIECE)
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(held):
                total += count
    return total


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = Workload(options.preset, options.layers, batches=(), contexts=(), prefills=()).config
    dtype = getattr(torch, options.dtype)
    save_checkpoint(folder, config, RandomTensors(config, 0, dtype, options.device))
    size, reading, loading = 0, [], []
    for _ in range(options.repeats + 1):
        for seconds, work in ((reading, read), (loading, None)):
            if not options.warm:
                drop(folder)
            started = time.perf_counter()
            if work is not None:
                size = work(folder)
            else:
                model = GptOss(config, Checkpoint(folder), dtype, options.device)
                if options.device != "cpu":
                    torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            if work is None:
                del model
                gc.collect()
    # The first loading also compiles kernels and creates the device's context, so its time is separate.
    return {"bytes": size, "reading_s": reading[1:], "loading_s": loading[1:], "first_s": loading[0]}


def main(given: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if given is None else given
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-oss-120b")
    parser.add_argument("--layers", type=int, help="the preset's if left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written, and removed again")
    parser.add_argument("--repeats", type=int, default=3, help="how often each is measured, after once that does not count")
    parser.add_argument("--warm", action="store_true", help="leave what has been read in the system's cache")
    parser.add_argument("--commit", default="", help="of this code, where it is a copy whose checkout says another")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="loading-", dir=options.folder) as name:
        found = measure(options, Path(name))
    metadata = collect_metadata(shlex.join(["python", "tools/gpt_oss/benchmarks/loading.py", *words]), options.device)
    found["metadata"] = {**dataclasses.asdict(metadata), **({"git_commit": options.commit} if options.commit else {})}
    reading, loading = (statistics.median(found[name]) for name in ("reading_s", "loading_s"))
    found["over_reading"] = loading / reading
    print(
        f"{found['bytes'] / 1e9:.2f} GB: read in {reading:.2f} s ({found['bytes'] / reading / 1e9:.1f} GB/s), "
        f"loaded in {loading:.2f} s, {loading / reading:.2f} times that; {found['first_s']:.2f} s the first time"
    )
    if options.output is not None:
        options.output.write_text(as_text(found))


if __name__ == "__main__":
    main()

"""Tests operators between GPUs on one GPU: each rank is a stream of one process. Everything but the link between GPUs is tested.

python packages/tokenspeed-kernel/tests/worlds/test_ranks_on_one_gpu.py --ranks 4 --replays 10000
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import SENTINEL, PeerMemory

pytest.importorskip("triton")

from rank_steps import KINDS, Step, wrong

from tokenspeed_kernel.triton.comm import _exchange, _rows

SHAPES = [(1, 2880), (64, 2880), (7, 64), (300, 2880), (33, 520)]
_LIMIT_S = 20.0
one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def groups_on_one_gpu(size: int, nbytes: int = 1 << 22) -> list[ProcessGroup]:
    """Makes one group for each rank. The peer memory of all ranks is on this GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    memories = [PeerMemory(rank, size, device, nbytes, nbytes) for rank in range(size)]
    words = [torch.full((memory.nbytes // 4,), SENTINEL, dtype=torch.int32, device=device) for memory in memories]
    groups = []
    for memory in memories:
        memory.found([each.data_ptr() for each in words], words)
        group = ProcessGroup(None, peers=memory)
        group.rank, group.world_size, group.backend, group.peer_time_limit_s = memory.rank, size, "nccl", _LIMIT_S
        group.key = size, group.backend, "on one GPU"
        groups.append(group)
    torch.cuda.synchronize()
    return groups


@contextlib.contextmanager
def share_the_gpu(size: int) -> Iterator[None]:
    """Limits the grid of each launch. The CTAs of all ranks must fit on the GPU together with the CTAs of each rank's next launch
    (PDL)."""
    most, kept = torch.cuda.get_device_properties(0).multi_processor_count // (2 * size), _exchange.most_programs
    _exchange.most_programs = _rows.most_programs = lambda config, device: most
    try:
        yield
    finally:
        _exchange.most_programs = _rows.most_programs = kept


def run_together(steps: list[Step], streams: list[torch.cuda.Stream]) -> None:
    """Runs the step of each rank, and synchronises after each yield. Loading a kernel while another rank's kernel waits would
    deadlock."""
    runs = [step.run() for step in steps]
    while runs:
        left = []
        for run, step in zip(runs, steps, strict=True):
            with torch.cuda.stream(streams[step.group.rank]):
                left += [run] if next(run, run) is None else []
        torch.cuda.synchronize()
        runs = left


def out_of_step(size: int, replays: int, seed: int = 0) -> list[str]:
    """Replays all ranks' graphs in the same order, with other values each time and random delays. Returns the faults."""
    groups, streams = groups_on_one_gpu(size), [torch.cuda.Stream() for _ in range(size)]
    for stream in streams:  # nothing may allocate memory while ranks wait for one another
        with torch.cuda.stream(stream):
            held = [torch.empty(length, dtype=torch.uint8, device="cuda") for length in (1 << 28, *[1 << 18] * 64)]
            held.clear()
    dtypes = torch.float16, torch.bfloat16
    made = [
        [Step(group, rows, hidden, kind, dtypes[index % 2]) for group in groups]
        for index, (rows, hidden) in enumerate(SHAPES)
        for kind in KINDS
    ]
    torch.cuda.synchronize()  # the tensors were made on this stream, and other streams read them next
    for steps in made:
        run_together(steps, streams)
        for step in steps:
            with torch.cuda.stream(streams[step.group.rank]):
                step.capture()
    chance = random.Random(seed)
    for _ in range(replays):
        steps = chance.choice(made)
        for step in chance.sample(steps, size):
            with torch.cuda.stream(streams[step.group.rank]):
                step.replay()
            if chance.random() < 0.001:
                time.sleep(0.002)
    torch.cuda.synchronize()
    return [f"{steps[0]}: {said}" for steps in made if (said := wrong([step.outcome() for step in steps]))]


def one_stays_away() -> str:
    """Returns the error of a rank whose kernel waits for a rank that never makes the call. The device's context cannot be used
    afterwards."""
    group = groups_on_one_gpu(2)[0]
    group.peer_time_limit_s = 1.0
    tk.all_reduce(torch.ones(64, 64, device="cuda"), group)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"


@pytest.mark.nvidia
@one_gpu
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_out_of_step(size: int) -> None:
    with share_the_gpu(size):
        assert out_of_step(size, 1000) == []


@pytest.mark.nvidia
@one_gpu
def test_a_rank_that_stays_away_ends_the_wait() -> None:
    """A kernel that waits for a rank too long must fail. The test runs in a separate process, because the failure destroys the
    device context."""
    done = subprocess.run([sys.executable, __file__, "--stay-away"], capture_output=True, text=True, check=False)
    assert "launch failure" in done.stdout, done.stderr


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replays", type=int, default=10000)
    parser.add_argument("--stay-away", action="store_true", help="one rank does nothing: the other's error is printed")
    options = parser.parse_args()
    if options.stay_away:
        print(one_stays_away(), flush=True)
        raise SystemExit
    began = time.monotonic()
    with share_the_gpu(options.ranks):
        found = out_of_step(options.ranks, options.replays)
    said = found or "nothing wrong"
    print(f"{options.replays} replays of {options.ranks} ranks on one GPU in {time.monotonic() - began:.0f} s: {said}")
    raise SystemExit(bool(found))

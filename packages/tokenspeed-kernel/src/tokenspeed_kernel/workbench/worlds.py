"""Running a function in several processes, each a rank of one group of torch.distributed: a world.

::

    def ranks_of(shape): ...                       # of a module: the processes import it

    results = run_world(ranks_of, 2, (shape,))     # what each rank returned

Cases with a ``world_size`` are verified and timed in a world of that size. The processes are new ones, of this Python, and have
imported what the function's module imports.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Before it is killed, a process that is to end has this long.
_GRACE_S = 5.0
# When one rank is wrong the others may wait for it for ever, or be about to say what is wrong with them.
_LINGER_S = 2.0

_HOST = "127.0.0.1"


class WorldError(RuntimeError):
    """A rank raised an error or ended, or time was up. The message has the tracebacks.

    Attributes:
        ranks: which ranks failed; of those that were still at work when time was up, all.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def current_size() -> int:
    """How many processes the world has that this one is a rank of; 1 for one that is alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def current_rank() -> int:
    """Which of them this one is; 0 for one that is alone."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def agreed(value: float) -> float:
    """The largest of all ranks' values, so that all go by the same; the value itself for a process that is alone."""
    if current_size() == 1:
        return value
    values: list[float] = [0.0] * current_size()
    dist.all_gather_object(values, value)
    return max(values)


def gap(world_size: int, device: torch.device) -> str | None:
    """Why there cannot be a world of so many processes on this type of device; None where there can."""
    if not dist.is_available():
        return "this PyTorch has no torch.distributed"
    if device.type == "cuda" and torch.cuda.device_count() < world_size:
        return f"{world_size} processes need a GPU each, there are {torch.cuda.device_count()}"
    return None


def run_world(
    function: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    *,
    device: torch.device | str = "cpu",
    time_limit_s: float = 300.0,
) -> list[Any]:
    """Calls ``function(*args)`` in each of so many new processes, as ranks of one group.

    On a CPU the group is gloo's. On GPUs it is nccl's, and rank r has the GPU r as its current device.

    Args:
        function: of a module that the processes can import; it and its arguments and results are pickled, and hold no tensors.
        world_size: how many.
        args: the same for each.
        device: its type says which kind of devices they are for.
        time_limit_s: until all are done, starting them included.

    Returns:
        What each returned, by rank.

    Raises:
        WorldError: a rank raised an error or ended without a result, or time was up. All processes have ended then.
    """
    kind = torch.device(device).type
    # The operating system chooses a free port, and this process keeps it: none can take it in between.
    limit = timedelta(seconds=time_limit_s)
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            settings = rank, world_size, kind, store.port, time_limit_s
            process = context.Process(target=_run_rank, args=(theirs, settings, function, tuple(args)), daemon=True)
            process.start()
            theirs.close()  # so that the process's end is seen as the pipe's
            processes.append(process)
            connections.append(ours)
        results = _gather(connections, time.monotonic() + time_limit_s, time_limit_s)
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for connection in connections:  # which the ranks wait for: none leaves while another still needs it
            connection.close()
        _join(processes)
    return results


def _gather(connections: Sequence[Connection], deadline: float, time_limit_s: float) -> list[Any]:
    """The results by rank, or the errors of all who say something."""
    results: list[Any] = [None] * len(connections)
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    errors: dict[int, str] = {}
    while waiting:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                succeeded, results[rank] = connection.recv()
            except EOFError:
                succeeded, results[rank] = False, "ended without a result (killed, or a crash in a kernel)"
            if not succeeded:
                errors[rank] = results[rank]
                deadline = min(deadline, time.monotonic() + _LINGER_S)
    size = len(connections)
    if errors:
        # In the order in which they came: what the first one says is the reason, others may only miss the first.
        said = "\n".join(f"rank {rank} of {size}: {error.rstrip()}" for rank, error in errors.items())
        raise WorldError(said, [*errors])
    if waiting:
        ranks = sorted(waiting.values())
        late = ", ".join(map(str, ranks))
        raise WorldError(f"rank {late} of {size} was not done after {time_limit_s:g} s; do all ranks make the same calls?", ranks)
    return results


def _join(processes: Sequence[Any]) -> None:
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
        if process.exitcode is None:
            process.kill()
            process.join()


def _run_rank(parent: Connection, settings: tuple[int, int, str, int, float], function: Callable[..., Any], args: Any) -> None:
    rank, world_size, kind, port, time_limit_s = settings
    limit = timedelta(seconds=time_limit_s)
    # What libraries for several processes go by, too.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=_HOST, MASTER_PORT=str(port))
    if sys.platform == "linux":  # gloo would look the host's name up, which not every container knows
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        if kind == "cuda":
            torch.cuda.set_device(rank)
        store = TCPStore(_HOST, port, is_master=False, timeout=limit)
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        outcome = True, function(*args)
    except BaseException:
        outcome = False, traceback.format_exc()
    try:
        parent.send(outcome)
    except Exception:  # what cannot be pickled says so in many ways
        parent.send((False, traceback.format_exc()))
    with contextlib.suppress(EOFError):
        parent.recv()  # until all are done: the parent hangs up
    if dist.is_initialized():
        dist.destroy_process_group()

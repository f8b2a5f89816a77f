"""Runs a function in a *world*: several processes, each a rank of one torch.distributed group.

::

    def ranks_of(shape): ...                       # defined in a module that the processes can import

    results = run_world(ranks_of, 2, (shape,))     # one result per rank

Cases with a ``world_size`` are verified and timed in a world of that size. The processes run this Python interpreter, and import
the function's module. They are forked from a server process that has imported the core once, see `start_process`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Processes that have not exited within this many seconds after the end of a world are killed.
_GRACE_S = 5.0
# Seconds to wait for other ranks' errors after one rank has failed. The other ranks may hang, or be about to report errors.
_LINGER_S = 2.0

_HOST = "127.0.0.1"


class WorldError(RuntimeError):
    """A rank raised an error or exited, or the time limit was exceeded. The message has the tracebacks.

    Attributes:
        ranks: the ranks that failed, or that were still running at the time limit.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def current_size() -> int:
    """Returns the size of this process's world; 1 outside a world."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def current_rank() -> int:
    """Returns the rank of this process in its world; 0 outside a world."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def agreed(value: float) -> float:
    """Returns the maximum of all ranks' values, so that all ranks use the same value. Returns ``value`` itself outside a world."""
    if current_size() == 1:
        return value
    values: list[float] = [0.0] * current_size()
    dist.all_gather_object(values, value)
    return max(values)


def gap(world_size: int, device: torch.device) -> str | None:
    """Returns why a world of this size cannot run on this type of device; None for a possible world."""
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
    """Calls ``function(*args)`` in each of ``world_size`` new processes, the ranks of one group.

    On CPUs the group uses gloo. On GPUs it uses nccl, and rank r has GPU r as its current device.

    Args:
        function: the function, defined in a module that the processes can import. The function, its arguments and its results are
            pickled, and must hold no tensors.
        world_size: number of processes.
        args: arguments of the function, the same for all ranks.
        device: a device whose type selects CPUs or GPUs.
        time_limit_s: seconds within which all ranks must be done, process startup included.

    Returns:
        The results, by rank.

    Raises:
        WorldError: a rank raised an error or exited without a result, or the time limit was exceeded. All processes have ended when
            the error is raised.
    """
    kind = torch.device(device).type
    # The operating system chooses a free port. This process holds the port, so that no other process can claim it in between.
    limit = timedelta(seconds=time_limit_s)
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)
    processes, connections = [], []
    try:
        for rank in range(world_size):
            settings = rank, world_size, kind, store.port, time_limit_s
            process, connection = start_process(_run_rank, settings, function, args)
            processes.append(process)
            connections.append(connection)
        results = _gather(connections, time.monotonic() + time_limit_s, time_limit_s)
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for connection in connections:  # the ranks wait for this, so no rank exits while another rank still needs it
            connection.close()
        _join(processes)
    return results


def start_process(function: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """Starts a process that calls ``function(connection, *args)`` with the core imported.

    A new interpreter takes seconds to import PyTorch and the core. A fork of a server process that has imported them takes
    milliseconds. The server has used no device and started no thread, so its children may use any device. Where the operating
    system cannot fork, the process is spawned.

    Args:
        function: the function, defined in a module that the process can import.
        args: the function's arguments after the connection, which are pickled.

    Returns:
        The new process, and the caller's end of the connection to it. When the new process exits, the connection closes.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    # PyTorch imports the last module, and with it SymPy, when an output's strides are computed without data.
    context.set_forkserver_preload(["tokenspeed_kernel", __name__, "torch.fx.experimental.symbolic_shapes"])
    ours, theirs = context.Pipe()
    call = pickle.dumps((function, args))
    process = context.Process(target=_run_call, args=(theirs, {**os.environ}, call), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process closes the connection
    return process, ours


def _run_call(connection: Connection, environment: Mapping[str, str], call: bytes) -> None:
    """Runs a pickled call in a process that the fork server started.

    The process has inherited the server's environment variables, which may be outdated. So the caller's variables are set first,
    because unpickling the call imports modules that may read variables.
    """
    os.environ.clear()
    os.environ.update(environment)
    function, args = pickle.loads(call)
    function(connection, *args)


def _gather(connections: Sequence[Connection], deadline: float, time_limit_s: float) -> list[Any]:
    """Waits for the results of all ranks, and returns them by rank. Raises WorldError with all errors that ranks report, or if the
    deadline passes."""
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
        # In order of arrival. The first error is the cause; later errors may only be consequences of the first rank's exit.
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


def _run_rank(
    parent: Connection,
    settings: tuple[int, int, str, int, float],
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    rank, world_size, kind, port, time_limit_s = settings
    limit = timedelta(seconds=time_limit_s)
    # Libraries for multi-process programs read these variables, too.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=_HOST, MASTER_PORT=str(port))
    if sys.platform == "linux":  # otherwise gloo resolves the host name, which fails in some containers
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
    except Exception:  # pickling fails with many types of exceptions
        parent.send((False, traceback.format_exc()))
    with contextlib.suppress(EOFError):
        parent.recv()  # wait until the parent closes the pipe, when all ranks are done
    if dist.is_initialized():
        dist.destroy_process_group()

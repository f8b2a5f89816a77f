"""Checks that a kernel does not use index arguments, such as page numbers, beyond the lengths that the call gives.

On a GPU, the use of such an index can be an illegal access, after which the process cannot use the GPU any more. So the kernel runs
in a separate process. The operator's ``vary`` hook runs on the host and replaces unused entries, such as those of a page table, by
invalid ones. Then all arguments are copied to the device, and the kernel runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.plugins import discover_plugins
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Fault, Status, run_kernel
from tokenspeed_kernel.workbench.worlds import start_process
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.parameters import with_tensors
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_base.variation import Variation, Want

# Time limit in seconds. Compiling and running a few small calls takes seconds.
_TIMEOUT_S = 300


def reach(spec: KernelSpec, cases: Sequence[Case], device: torch.device, seed: int) -> Iterator[CaseResult]:
    """Runs a kernel in another process, on cases whose unused values are replaced.

    Args:
        spec: the kernel. The other process imports tokenspeed_kernel, which registers the kernels of installed plugins. The check
            is skipped if the kernel is not among the registered ones.
        cases: cases of the operator. Cases that the operator does not list, such as captured calls, are left out.
        device: the device that the kernel runs on.
        seed: seed of the inputs.

    Yields:
        One result per case, up to the first case that ends the process.
    """
    known = {case.name for case in get_operator(spec.operator).all_cases()}
    names = [case.name for case in cases if case.name in known and _looks_up(spec.operator, case, seed)]
    if not names:
        return
    process, connection = start_process(_run_cases, spec.name, names, device, seed)
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        for name in names:
            status, said = _received(connection, process, deadline)
            faults = (Fault("reach", said),) if status is Status.FAILED else ()
            yield CaseResult(spec.name, spec.operator, name, status, said, faults=faults)
            if status is not Status.PASSED:
                return
    finally:
        process.kill()
        process.join()


def _received(connection: Connection, process: Any, deadline: float) -> tuple[Status, str]:
    """Returns the status and the error of the next case from the other process. If that process ends or times out, the error says
    which.
    """
    if not connection.poll(max(deadline - time.monotonic(), 0.0)):
        return Status.ERROR, f"did not end within {_TIMEOUT_S} s"
    try:
        status, said = connection.recv()
    except EOFError:
        process.join()
        return Status.FAILED, f"the process ended with exit code {process.exitcode}"
    return status, said


def _looks_up(operator: str, case: Case, seed: int) -> bool:
    """Returns whether a case's arguments contain unused integer indices. Other unused values need no separate process, because
    `unused_values` compares the results.
    """
    changed = _changed_on_host(operator, case, seed)[1]
    return any(isinstance(value, Tensor) and not value.is_floating_point() for value in changed.values())


def _changed_on_host(operator: str, case: Case, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a case's arguments on the CPU, and those arguments whose unused values are replaced."""
    op = get_operator(operator)
    arguments = op.complete(case.build("cpu", seed))
    return arguments, op.varied(arguments, Variation(Want.UNUSED, Draw("cpu", seed)))


def _arguments(case: Case, spec: KernelSpec, device: torch.device, seed: int) -> dict[str, Any]:
    """Returns a case's prepared arguments on the device, with replaced unused values."""
    op = get_operator(spec.operator)
    arguments, changed = _changed_on_host(spec.operator, case, seed)
    moved = with_tensors(op.parameters, {**arguments, **changed}, lambda tensor: tensor.to(device))
    return op.prepared(moved, spec)


def _run_cases(connection: Connection, kernel: str, names: Sequence[str], device: torch.device, seed: int) -> None:
    """Runs a kernel on cases, in the other process. Sends each case's status and error to the parent process."""
    discover_plugins(force=True)  # finds plugins that were installed after the server process started
    try:
        spec = KernelRegistry.get().get_by_name(kernel)
    except KeyError:
        said = f"importing tokenspeed_kernel does not register {kernel}; a plugin's entry point would"
        connection.send((Status.SKIPPED, f"not checked in a separate process: {said}"))
        return
    op = get_operator(spec.operator)
    cases = {case.name: case for case in op.all_cases()}
    for name in names:
        try:
            run_kernel(op, spec, _arguments(cases[name], spec, device, seed))
        except Exception as error:  # the parent process reports any error
            line = (str(error).strip() or "no message").splitlines()[0]
            connection.send((Status.FAILED, f"{type(error).__name__}: {line}"))
            # After an illegal access no device memory can be freed, so the process exits without cleaning up.
            os._exit(1)
        connection.send((Status.PASSED, ""))

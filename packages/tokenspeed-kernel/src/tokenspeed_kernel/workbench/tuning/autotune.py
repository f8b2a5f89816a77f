"""Tuning on live calls: `SelectionStrategy.AUTOTUNE` tunes on the first call of each kind."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tokenspeed_kernel.workbench import tuned
from tokenspeed_kernel.workbench.numerics.compare import compare_results, compare_tensors
from tokenspeed_kernel.workbench.numerics.tolerance import tolerance_for
from tokenspeed_kernel.workbench.tuning.pick import candidates, pick, run
from tokenspeed_kernel.workbench.tuning.search import Trial
from tokenspeed_kernel_base.cases import nbytes
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import resource_arguments, tensor_arguments
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import Request, gate

# The fraction of free memory that copies of mutated arguments may take.
_COPIED_FRACTION = 0.25
_COPIED_BYTES = 4 << 30  # the limit of the copies on a CPU, where the free memory is not known

_one_at_a_time = threading.RLock()


def autotune(request: Request, arguments: Mapping[str, Any], budget_s: float) -> str:
    """Measures the kernels and configurations that are eligible for a call, on the call's own arguments. Records the fastest ones.

    Mutated arguments are copied first; others are read in place. Results are compared with those of the kernel that runs without
    tuned results. A candidate whose results differ by more than the operator's tolerance is not recorded.

    Args:
        request: the call's request.
        arguments: all of the call's arguments, by name, already checked.
        budget_s: the seconds that measuring may take, compilation included. Each kernel's default configuration is always measured.

    Returns:
        The reason why nothing was measured. Empty if something was measured, or if there is only one candidate. Also empty for
        calls of several processes, which are never measured.
    """
    op = get_operator(request.operator)
    if any(resource.world_size > 1 for _, resource in resource_arguments(op.parameters, arguments)):
        return ""  # all processes would have to measure the same calls and reach the same decision
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    with _one_at_a_time, torch.no_grad():
        if tuned.find(request.operator, request.signature, request.traits, request.buckets, request.platform).results:
            return ""  # another thread has measured this request in the meantime
        try:
            return _measure(op, request, dict(arguments), budget_s)
        except torch.OutOfMemoryError as error:
            return f"out of memory: {str(error).splitlines()[0]}"


def _measure(op: Operator[Any, Any], request: Request, arguments: dict[str, Any], budget_s: float) -> str:
    request = dataclasses.replace(request, solution=None)  # results apply to all backends
    registry = KernelRegistry.get()
    specs = [spec for spec in registry.get_for_operator(op.family, op.mode) if gate(spec, request) is None]
    chosen = candidates(request, [spec for spec in specs if registry.load_or_leave_out(spec.name) is not None])
    tensors = tensor_arguments(op.parameters, arguments)
    if len(chosen) < 2 or not all(tensor.numel() for _, tensor in tensors):
        return ""
    device = tensors[0][1].device
    written = {name: arguments[name] for name in (*op.mutates, *op.outs) if arguments[name] is not None}
    size = sum(nbytes(tensor) for name, tensor in tensors if name.partition(".")[0] in written)
    room = torch.cuda.mem_get_info(device)[0] * _COPIED_FRACTION if device.type == "cuda" else _COPIED_BYTES
    if size > room:
        return f"copies of {', '.join(written)} would take {size / 2**30:.1f} GiB"

    def ran(kernel: str, config: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
        """Runs a kernel on fresh copies of the mutated arguments. Returns its result, and the tensor arguments after the call."""
        fresh = arguments | copy.deepcopy(written)
        returned = run(request, kernel, config, tuple(fresh.values()))
        return returned, dict(tensor_arguments(op.parameters, fresh))

    untuned = chosen[0]
    expected: Callable[[], Any] = functools.cache(lambda: ran(*untuned))

    def check(trial: Trial) -> str:
        """Describes how a candidate's results differ from those of the kernel that runs without tuned results; empty if they
        agree.
        """
        if (trial.kernel, trial.config) == untuned:
            return ""
        tolerance = functools.partial(tolerance_for, request=request, exact=op.exact)
        (got, after), (wanted, wanted_after) = ran(trial.kernel, trial.config), expected()
        comparisons = compare_results(op, arguments, got, wanted, tolerance)
        for name, tensor in after.items():
            if name.partition(".")[0] in op.mutates:
                comparisons.append(compare_tensors(name, tensor, wanted_after[name], tolerance(tensor.dtype)))
        faults = [comparison.fault for comparison in comparisons if comparison.fault]
        return f"differs from the untuned choice: {faults[0]}" if faults else ""

    values = tuple((arguments | copy.deepcopy(written)).values())
    sizes = ", ".join(f"{name} {size}" for name, size in request.sizes.items())
    return pick(request, chosen, lambda kernel: values, check, device, budget_s, f"a call with {sizes}").reason

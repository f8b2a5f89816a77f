"""Measuring on a call as it comes: what `SelectionStrategy.AUTOTUNE` does the first time it meets a kind of call."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tokenspeed_kernel.workbench import tuned
from tokenspeed_kernel.workbench.numerics.compare import compare, compare_tensors
from tokenspeed_kernel.workbench.numerics.tolerance import tolerance_for
from tokenspeed_kernel.workbench.tuning.candidates import (
    configurations,
    entry_of,
    in_order,
    override_for,
    result_of,
    untuned_choice,
)
from tokenspeed_kernel.workbench.tuning.search import Candidate, Trial, TrialStatus, by_merit, first_line, search
from tokenspeed_kernel_base.cases import nbytes
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import resource_arguments, tensor_arguments
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import Request, gate, select

# Of the memory that is free, what copies of arguments that kernels write to may take.
_COPIED_SHARE = 0.25
_COPIED_BYTES = 4 << 30  # where that is not known

_one_at_a_time = threading.RLock()


def autotune(request: Request, arguments: Mapping[str, Any], budget_s: float) -> str:
    """Measures the kernels and configurations that could serve a call, on its own arguments, and records the quickest.

    What kernels write to is copied first; all else is read where it lies. A winner must agree with the untuned choice, within the
    operator's tolerance.

    Args:
        request: what the call asks.
        arguments: all of them, by name, checked.
        budget_s: seconds, compilation included. Each kernel's own choice is measured in any case.

    Returns:
        Why nothing was measured; empty where it was, there was nothing to choose from, or several processes take part in the call,
        which is never measured.
    """
    op = get_operator(request.operator)
    if any(resource.world_size > 1 for _, resource in resource_arguments(op.parameters, dict(arguments))):
        return ""  # the others would have to measure the same calls as this process, and to decide alike
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    with _one_at_a_time, torch.no_grad():
        if tuned.find(
            request.operator, request.signature, request.traits, request.sizes, request.platform
        ).results:  # another thread measured meanwhile
            return ""
        try:
            return _measure(op, request, dict(arguments), budget_s)
        except torch.OutOfMemoryError as error:
            return f"out of memory: {str(error).splitlines()[0]}"


def _measure(op: Operator[Any, Any], request: Request, arguments: dict[str, Any], budget_s: float) -> str:
    request = dataclasses.replace(request, solution=None)  # what holds for all of them
    registry = KernelRegistry.get()
    specs = [spec for spec in registry.get_for_operator(op.family, op.mode) if gate(spec, request) is None]
    specs = [spec for spec in specs if registry.load_or_leave_out(spec.name) is not None]
    untuned = untuned_choice(request)
    wanted = in_order(((spec, config) for spec in specs for config in configurations(spec, request)), untuned)
    tensors = tensor_arguments(op.parameters, arguments)
    if len(wanted) < 2 or not all(tensor.numel() for _, tensor in tensors):
        return ""
    device = tensors[0][1].device
    written = {name: arguments[name] for name in (*op.mutates, *op.outs) if arguments[name] is not None}
    size = sum(nbytes(tensor) for name, tensor in tensors if name.partition(".")[0] in written)
    if size > _room(device):
        return f"copies of {', '.join(written)} would take {size / 2**30:.1f} GiB"

    def fresh() -> tuple[Any, ...]:
        return tuple((arguments | copy.deepcopy(written)).values())

    values = fresh()
    impls = {i: select(request, override_for(Trial(spec.name, config))).impl for i, (spec, config) in enumerate(wanted)}
    candidates = [Candidate(spec.name, config, functools.partial(impls[i], *values)) for i, (spec, config) in enumerate(wanted)]
    trials = search(candidates, device, budget_s)
    own = Trial(wanted[0][0].name, {})
    expected: Callable[[], _Ran] = functools.cache(lambda: _run(request, own, fresh()))
    results = []
    for name in dict.fromkeys(trial.kernel for trial in trials):
        of_kernel = [trial for trial in trials if trial.kernel == name]
        for trial in by_merit(of_kernel):
            is_own = (trial.kernel, trial.config) == (own.kernel, own.config)
            try:
                problem = "" if is_own else _disagreement(op, request, trial, fresh(), expected())
            except Exception as error:  # it may be the kind that fails now and then; the caller's call must not
                problem = first_line(error)
            if not problem:
                results.append(result_of(trial, of_kernel))
                break
            trial.status, trial.reason = TrialStatus.FAILED, problem
    if not results:
        return "no candidate ran to the end"
    sizes = ", ".join(f"{name} {size}" for name, size in request.sizes.items())
    tuned.record(entry_of(request, sorted(results, key=lambda result: (result.us, result.kernel)), f"a call with {sizes}"))
    return ""


def _room(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] * _COPIED_SHARE if device.type == "cuda" else _COPIED_BYTES


_Ran = tuple[Any, tuple[Any, ...]]  # what a kernel returned, and its arguments afterwards


def _run(request: Request, trial: Trial, values: tuple[Any, ...]) -> _Ran:
    return select(request, override_for(trial)).impl(*values), values


def _disagreement(op: Operator[Any, Any], request: Request, trial: Trial, values: tuple[Any, ...], expected: _Ran) -> str:
    """How a trial's results differ from those of the untuned choice; empty where they agree."""
    tolerance = functools.partial(tolerance_for, request=request, exact=op.exact)
    got, _ = _run(request, trial, values)
    comparisons = compare(got, expected[0], tolerance)
    after = dict(tensor_arguments(op.parameters, dict(zip(op.names, expected[1], strict=True))))
    for name, tensor in tensor_arguments(op.parameters, dict(zip(op.names, values, strict=True))):
        if name.partition(".")[0] in op.mutates:
            comparisons.append(compare_tensors(name, tensor, after[name], tolerance(tensor.dtype)))
    faults = [comparison.fault for comparison in comparisons if comparison.fault]
    return f"differs from the untuned choice: {faults[0]}" if faults else ""

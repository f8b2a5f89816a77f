"""Resolves names on the command line. An unknown name ends the command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.workbench.cli.output import fail, unknown
from tokenspeed_kernel.workbench.numerics.conformance import plugin_kernels
from tokenspeed_kernel.workbench.watching import ReplayError, load_cases
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import Operator, get_operator, operators
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec


def find_operator(name: str) -> Operator[Any, Any]:
    try:
        return get_operator(name)
    except KeyError as error:
        fail(error.args[0])


def find_kernels(target: str | None, plugin: str | None = None) -> list[KernelSpec]:
    """Returns the kernel named ``target``, the kernels of the operator named ``target``, or all kernels if ``target`` is None.

    ``plugin`` restricts the result to the kernels of this plugin.
    """
    registry = KernelRegistry.get()
    specs = {spec.name: spec for spec in registry.list_kernels()}
    modes = [name for op in operators() for name in (op.mode, str(op))]
    if target is None:
        found = [*specs.values()]
    elif target in specs:
        found = [specs[target]]
    elif target in modes:
        op = get_operator(target)
        found = registry.get_for_operator(op.family, op.mode)
    else:
        unknown("kernel or operator", target, [*specs, *modes], "tokenspeed-kernel ops lists operators, ops OP its kernels")
    if plugin is None:
        return found
    try:
        names = {spec.name for spec in plugin_kernels(plugin)}
    except LookupError as error:
        fail(error)
    return [spec for spec in found if spec.name in names]


def find_runs(
    specs: list[KernelSpec], wanted: Sequence[str], large: bool, captured: Path | None = None
) -> list[tuple[KernelSpec, Case]]:
    """Returns pairs of a kernel and a case: the cases that ``wanted`` names, else all cases with ``large``, else the small cases.

    Args:
        specs: the kernels.
        wanted: names or parts of names of cases, which may be large; empty for no filter.
        large: whether to include the cases that are sized for a GPU.
        captured: a file of captured calls. Its cases replace the operators' own cases.
    """
    cases = {str(op): op.all_cases() for op in operators()} if captured is None else find_captured(captured)
    pairs = [(spec, case) for spec in specs for case in cases.get(spec.operator, ())]
    if not wanted:
        return [(spec, case) for spec, case in pairs if large or not case.large]
    names = list(dict.fromkeys(case.name for _, case in pairs))
    found: set[str] = set()
    for name in wanted:
        matching = {name} & {*names} or {known for known in names if name.lower() in known.lower()}
        if not matching:
            unknown("case", name, names)
        found |= matching
    return [(spec, case) for spec, case in pairs if case.name in found]


def find_captured(file: Path) -> dict[str, list[Case]]:
    """Returns the cases for the captured calls in a file, by operator."""
    cases: dict[str, list[Case]] = {}
    try:
        for found in load_cases(file):
            cases.setdefault(found.operator, []).append(found.case)
    except (OSError, ReplayError) as error:
        fail(error)
    return cases


def find_device(name: str | None) -> torch.device | None:
    """Returns the device with this name, or None for no name. "gpu" means PyTorch's "cuda", which is also ROCm's name.

    If this machine does not have the device, the command ends.
    """
    if name is None:
        return None
    kind, colon, index = name.lower().partition(":")
    try:
        device = torch.device(("cuda" if kind == "gpu" else kind) + colon + index)
    except RuntimeError:  # the error's message is not shown, because it lists all device types that PyTorch knows
        device = torch.device("meta")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and not gpus:
        fail(f"device {name}: PyTorch finds no GPU here; tokenspeed-kernel doctor says more")
    if (device.index or 0) >= {"cpu": 1, "cuda": gpus}.get(device.type, 0):
        there = ["cpu", *(f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(gpus))]
        fail(f"no device {name!r}; there are {', '.join(there)} (gpu is cuda, for ROCm too)")
    return device


def made_with(solution: str | None, kernels: list[KernelSpec]) -> list[KernelSpec]:
    """Returns the kernels with this backend; all kernels if the backend is None."""
    chosen = [spec for spec in kernels if solution in (None, spec.solution)]
    if not chosen:
        unknown("solution", str(solution), sorted({spec.solution for spec in kernels}))
    return chosen

"""Benchmarks of kernels over their operators' cases: the inputs of the tests, checked before they are timed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import platform as _host
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.benchmark.roofline import Roofline
from tokenspeed_kernel.benchmark.timing import Timing, measure, measure_graph
from tokenspeed_kernel.cases import Case, nbytes
from tokenspeed_kernel.numerics.verify import Status, default_device, verify_case
from tokenspeed_kernel.operator import Operator, get_operator
from tokenspeed_kernel.parameters import tensor_arguments
from tokenspeed_kernel.platform import platform_of
from tokenspeed_kernel.registry import KernelSpec
from tokenspeed_kernel.version import __version__

_COPIED_BYTES = 8 << 30


@dataclass(frozen=True)
class Row:
    """One kernel on one case.

    Attributes:
        kernel, operator, case: names.
        status: ``"measured"``, or what `verify_case` said of a case that was not timed.
        reason: why it was not timed.
        timing: None if it was not timed.
        tflops, gb_per_s: from the operator's cost; None without one.
    """

    kernel: str
    operator: str
    case: str
    status: str
    reason: str = ""
    timing: Timing | None = None
    tflops: float | None = None
    gb_per_s: float | None = None


@dataclass(frozen=True)
class Metadata:
    """What a measurement was made on and with. Empty where it cannot be known."""

    device: str
    arch: str
    driver: str
    python: str
    torch: str
    triton: str
    tokenspeed_kernel: str
    git_commit: str
    command: str
    date: str


@dataclass(frozen=True)
class Report:
    """Rows, what they were measured on and with, and what the device can do at most (None: not measured)."""

    metadata: Metadata
    rows: tuple[Row, ...]
    roofline: Roofline | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


def bench_kernel(
    spec: KernelSpec,
    cases: Iterable[Case] | None = None,
    device: torch.device | str | None = None,
    *,
    large: bool = False,
    budget_s: float = 0.5,
    graph_calls: int = 0,
) -> list[Row]:
    """Times a registered kernel on its operator's cases, one row a case.

    Args:
        spec: the kernel's declaration, from the registry.
        cases: what to run; the operator's if not given.
        device: where; `default_device` if not given.
        large: include the cases that are sized for a GPU. Does not touch ``cases``.
        budget_s, graph_calls: see `bench_case`.
    """
    if cases is None:
        cases = [case for case in get_operator(spec.operator).all_cases() if large or not case.large]
    return [bench_case(spec, case, device, budget_s=budget_s, graph_calls=graph_calls) for case in cases]


def bench_case(
    spec: KernelSpec, case: Case, device: torch.device | str | None = None, *, budget_s: float = 0.5, graph_calls: int = 0
) -> Row:
    """Times a registered kernel on one case, if it gives the right result there.

    The kernel itself is timed, as `Operator.bind` gives it: the memory of its outputs included, dispatch left out.

    Args:
        spec, case, device: what to time where.
        budget_s: see `measure`.
        graph_calls: how many calls to capture in one CUDA graph, each with its own copy of the arguments (as far as they fit in a
            few GB); see `measure_graph`. 0 for no graph.
    """
    where = default_device() if device is None else torch.device(device)
    verified = verify_case(spec, case, where)
    if verified.status is not Status.PASSED:
        return Row(spec.name, spec.operator, case.name, verified.status.value, verified.reason)
    op = get_operator(spec.operator)
    try:
        with torch.no_grad():
            arguments = op.prepared(op.complete(case.build(where)), spec)
            values = tuple(arguments.values())
            kernel = op.bind(*values, override=spec.name)
            if graph_calls:
                copies = [values, *(copy.deepcopy(values) for _ in range(_copies(op, arguments, graph_calls) - 1))]
                timing = measure_graph([functools.partial(kernel, *of_one) for of_one in copies], where, budget_s=budget_s)
            else:
                timing = measure(lambda: kernel(*values), where, budget_s=budget_s)
    except Exception as error:  # memory may run out; the rows before must not be lost with it
        reason = f"while timing: {type(error).__name__}: {error}"
        return Row(spec.name, spec.operator, case.name, Status.ERROR.value, reason)
    cost = op.cost_of(arguments) if op.has_hook("cost") else None
    return Row(
        spec.name,
        spec.operator,
        case.name,
        "measured",
        timing=timing,
        tflops=cost.flops / timing.median_us / 1e6 if cost else None,
        gb_per_s=cost.bytes / timing.median_us / 1e3 if cost else None,
    )


def _copies(op: Operator[Any, Any], arguments: dict[str, Any], wanted: int) -> int:
    """How many copies of a call's arguments to make, at most: fewer where they are large."""
    of_one = sum(nbytes(tensor) for _, tensor in tensor_arguments(op.parameters, arguments))
    return max(1, min(wanted, _COPIED_BYTES // max(of_one, 1)))


def collect_metadata(command: str = "", device: torch.device | str | None = None) -> Metadata:
    """What this process would measure on and with.

    Args:
        command: the command line that makes the same measurement again.
        device: where; `default_device` if not given.
    """
    platform = platform_of(default_device() if device is None else torch.device(device))
    return Metadata(
        device=platform.device_name,
        arch=platform.arch,
        driver=_driver(platform.vendor),
        python=_host.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        tokenspeed_kernel=__version__,
        git_commit=_git_commit(),
        command=command,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


_DRIVER_FILES = {"nvidia": "/sys/module/nvidia/version", "amd": "/sys/module/amdgpu/version"}


def _driver(vendor: str) -> str:
    """The driver's version, as Linux tells it."""
    try:
        return Path(_DRIVER_FILES[vendor]).read_text().strip()
    except (KeyError, OSError):
        return ""


def _git_commit() -> str:
    """The commit of this very code, with ``+`` for local changes; empty if it is not a checkout."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        # An environment may lie inside some other project's checkout, whose commit says nothing of this package.
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return ""

"""Checks that a kernel does not use indices beyond the given lengths.

On a GPU such an index makes an illegal access, which ends the process. So the kernel runs in a separate process. The operator's
``vary`` hook runs on the host and replaces unused entries, such as those of a page table, by invalid ones. Then all arguments are
copied to the device, and the kernel runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Fault, Status, run_kernel
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.parameters import with_tensors
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_base.variation import Variation, Want

# Time limit in seconds. Importing, compiling and running a few small calls takes seconds.
_TIMEOUT_S = 300


def reach(spec: KernelSpec, cases: Sequence[Case], device: torch.device, seed: int) -> Iterator[CaseResult]:
    """Runs a kernel in another process, on cases whose unused values are replaced.

    Args:
        spec: the kernel. The other process imports tokenspeed_kernel, which registers the kernels of installed plugins. The check
            is skipped if the kernel is not among the registered ones.
        cases: cases of the operator. Cases that the operator does not list, such as captured ones, are left out.
        device: the device that the kernel runs on.
        seed: seed of the inputs.

    Yields:
        One result per case, up to the first case that ends the process.
    """
    known = {case.name for case in get_operator(spec.operator).all_cases()}
    names = [case.name for case in cases if case.name in known and _looks_up(spec.operator, case, seed)]
    if not names:
        return
    command = [sys.executable, "-m", __name__, spec.name, "--device", str(device), "--seed", str(seed), *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield CaseResult(spec.name, spec.operator, names[0], Status.ERROR, f"did not end within {_TIMEOUT_S} s")
        return
    told = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if not told:
        why = ran.stderr.strip().splitlines()[-1:] or [f"exit code {ran.returncode}"]
        yield CaseResult(spec.name, spec.operator, names[0], Status.SKIPPED, f"not looked at in a process of its own: {why[0]}")
        return
    ended = {line["case"]: line["error"] for line in told if "error" in line}
    for case in dict.fromkeys(line["case"] for line in told):
        error = ended.get(case, f"the process ended with exit code {ran.returncode}")
        yield CaseResult(spec.name, spec.operator, case, Status.PASSED if not error else Status.FAILED, error, faults=_fault(error))


def _fault(error: str) -> tuple[Fault, ...]:
    return (Fault("reach", error),) if error else ()


def _looks_up(operator: str, case: Case, seed: int) -> bool:
    """Whether a case has unused integer indices. Other unused values need no separate process: `unused_values` compares results."""
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


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kernel")
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    try:
        spec = KernelRegistry.get().get_by_name(options.kernel)
    except KeyError:
        raise SystemExit(f"importing tokenspeed_kernel does not register {options.kernel}; a plugin's entry point would") from None
    op = get_operator(spec.operator)
    cases = {case.name: case for case in op.all_cases()}
    for name in options.cases:
        print(json.dumps({"case": name}), flush=True)
        try:
            run_kernel(op, spec, _arguments(cases[name], spec, options.device, options.seed))
        except Exception as error:  # the parent process reports any error
            line = (str(error).strip() or "no message").splitlines()[0]
            print(json.dumps({"case": name, "error": f"{type(error).__name__}: {line}"}), flush=True)
            # After an illegal access no device memory can be freed, so the process exits without cleaning up.
            os._exit(1)
        print(json.dumps({"case": name, "error": ""}), flush=True)


if __name__ == "__main__":
    _main()

"""One kernel's conformance, as far as there is time for: prints a line, and what failed."""

import os
import sys
import threading
import time
from collections import Counter

import torch

began = time.monotonic()
name, seconds = sys.argv[1], float(sys.argv[2])
end = began + seconds

import tokenspeed_kernel  # noqa: E402, F401
import tokenspeed_kernel_nvidia  # noqa: E402
from tokenspeed_kernel.workbench.numerics.conformance import checks  # noqa: E402
from tokenspeed_kernel.workbench.numerics.conformance.case_space import CaseSpace  # noqa: E402
from tokenspeed_kernel.workbench.numerics.conformance.runner import _RUN  # noqa: E402
from tokenspeed_kernel.workbench.numerics.verify import verify_case  # noqa: E402
from tokenspeed_kernel_base.operator import get_operator  # noqa: E402
from tokenspeed_kernel_base.platform import platform_of  # noqa: E402
from tokenspeed_kernel_base.registry import KernelRegistry  # noqa: E402

registry = KernelRegistry.get()
if name.startswith("cutedsl") and name not in {spec.name for spec in registry.list_kernels()}:
    tokenspeed_kernel_nvidia.register()
spec = registry.get_by_name(name)
device = torch.device(sys.argv[3] if len(sys.argv) > 3 else "cuda")
gap = spec.capability.gap(platform_of(device))
if gap is not None:
    print(f"{name}: NOT HERE: {gap}")
    raise SystemExit
op = get_operator(spec.operator)
cases = [case for case in op.all_cases() if not case.large]
said, faults, missed = [], [], []
now = ["values", []]  # the check that is under way, and its results


def tell():
    state = "FAILED" if faults else "ok"
    rest = f" | no time for {', '.join(missed)}" if missed else ""
    print(f"{name}: {state} in {time.monotonic() - began:.0f} s: {'; '.join(said)}{rest}")
    print("\n".join(faults[:12]), flush=True)


def give_up():
    note(*now)
    missed.append(f"the rest of {now[0]} and what follows")
    tell()
    os._exit(0)


def mark(check):
    now[:] = [check, []]
    return now[1]


def note(check, results):
    counts = Counter(result.status.value for result in results)
    said.append(f"{check} " + (", ".join(f"{n} {status}" for status, n in sorted(counts.items())) or "nothing"))
    for result in results:
        if result.wrong:
            faults.append(f"  {name}: {check}: {result.case}: {result.reason[:300]} {result.traceback.strip()[-500:]}")


timer = threading.Timer(max(end - time.monotonic(), 0.1) + 4, give_up)
timer.daemon = True
timer.start()
results = mark("values")
for case in cases:
    if time.monotonic() > end:
        missed.append(f"{len(cases) - len(results)} cases")
        break
    results.append(verify_case(spec, case, device))
note("values", results)
space = CaseSpace.of(op, spec, device, cases, 0)
space.wrong = {r.case for r in results if any(fault.check in checks.RESULTS for fault in r.faults)}
space.said = {fault.check for r in results for fault in r.faults} - checks.RESULTS
for check, run in _RUN.items():
    found = mark(check)
    if time.monotonic() < end:
        for result in run(space):
            found.append(result)
            if time.monotonic() > end:
                missed.append(f"the rest of {check}")
                break
        note(check, found)
    else:
        missed.append(check)
tell()
os._exit(0)

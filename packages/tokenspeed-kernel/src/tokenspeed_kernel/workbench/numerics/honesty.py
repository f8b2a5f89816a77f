"""Is a kernel what it declares to be, and does it leave alone what is not its own?

`tokenspeed_kernel.workbench.numerics.verify` compares results. Here the same cases are run in ways that a caller may: at the edges of the
declared traits, with nothing to do, with other values where none may matter, with guards around every tensor, with strides, without
waiting for the device, in a CUDA graph, alone and in a batch. Each check gives one `CaseResult` a call, and touches no file.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics import edges, guards, waiting
from tokenspeed_kernel.workbench.numerics.compare import compare, compare_tensors
from tokenspeed_kernel.workbench.numerics.edges import Ground
from tokenspeed_kernel.workbench.numerics.graphs import replay_faults
from tokenspeed_kernel.workbench.numerics.narrow import count_items, first_items
from tokenspeed_kernel.workbench.numerics.reach import reach
from tokenspeed_kernel.workbench.numerics.tolerance import EXACT, tolerance_for
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Fault, Status, run_kernel, verify_case
from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Case, Draw, Recipe
from tokenspeed_kernel_base.operator import Operator
from tokenspeed_kernel_base.parameters import Kind
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.variation import Variation, Want

# A kernel that is tagged so says that it waits for the device; it is not fit for graphs, and not held to be.
WAITS = "waits"
BATCH_INVARIANT = "batch_invariant"
# What says that results are wrong, by `Fault.check`.
RESULTS = frozenset({"values", "error"})


class Changed:
    """What draws a case's arguments, changed: ``change`` takes the complete arguments and gives them back."""

    def __init__(self, op: Operator[Any, Any], base: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.op, self.base, self.change = op, base, change

    def __call__(self, draw: Draw) -> dict[str, Any]:
        return self.change(self.op.complete(self.base(draw)))


def sample(ground: Ground, most: int = 6, *, right: bool = True) -> list[Case]:
    """A few cases that the kernel takes: the smallest that is not empty for each combination of flags.

    ``right``: only those that it gives the reference's results for, where a change of the results is to be seen.
    """
    found: dict[tuple[Any, ...], Case] = {}
    for known in ground.taken:
        if known.elements and not (right and known.case.name in ground.wrong):
            key = tuple(sorted(item for item in known.traits.items() if isinstance(item[1], bool)))
            found.setdefault(key, known.case)
    return [*found.values()][:most]


# -- traits -------------------------------------------------------------------------------------------------------------------


def trait_edges(ground: Ground) -> Iterator[CaseResult]:
    """Cases at the edges of every trait that the kernel constrains: served rightly within, refused beyond."""
    spec = ground.spec
    result = functools.partial(CaseResult, spec.name, spec.operator)
    for trait, constraint in sorted(spec.traits.items()):
        accepted, refused = edges.edge_values(constraint)
        for value in accepted:
            cases = ground.reach(trait, value, taken=True)
            if not cases:
                yield result(f"{trait}={value}", Status.SKIPPED, f"no case of {ground.op} could be made to have {trait}={value}")
            for case in cases:
                outcome = verify_case(spec, case, ground.device, seed=ground.seed)
                name = f"{trait}={value}, {case.make if isinstance(case.make, Recipe) else case.name}"
                said = f"declares {trait}: {constraint}, but is wrong at {trait}={value}"
                yield _blamed(ground, outcome, name, said, f"traits {trait}")
        for value in refused:
            # Selection leaves the kernel out there; what it would do is not its declaration's matter.
            for case in ground.reach(trait, value, taken=False, most=1):
                yield result(f"{trait}={value}, {case.name}", Status.PASSED, "refused, as declared")


def _blamed(ground: Ground, outcome: CaseResult, case: str, said: str, kind: str) -> CaseResult:
    """The same outcome, said of what the case is for. What is wrong with other cases too, besides results, is no matter of it."""
    if not outcome.wrong:
        return replace(outcome, case=case)
    faults = tuple(fault for fault in outcome.faults if fault.check not in ground.said)
    if not faults:
        return replace(outcome, case=case, status=Status.PASSED, reason="", faults=())
    blamed = tuple(Fault(kind, f"{said}: {fault.text}") for fault in faults)
    return replace(outcome, case=case, reason=f"{said}: {'; '.join(fault.text for fault in faults)}", faults=blamed)


def empties(ground: Ground) -> Iterator[CaseResult]:
    """Calls with nothing to do, for all or for some of their items."""
    for case in edges.empty_cases(ground):
        outcome = verify_case(ground.spec, case, ground.device, seed=ground.seed)
        yield _blamed(ground, outcome, case.name, "is wrong where there is nothing to do", "empty")


# -- what surrounds the values ------------------------------------------------------------------------------------------------


def unused_values(ground: Ground) -> Iterator[CaseResult]:
    """The same calls with other values where none may matter, as the operator's ``vary`` hook says."""
    op, device, seed = ground.op, ground.device, ground.seed
    said = "looks at values that must not matter (page table entries that no length reaches, slots that hold no token, padding)"

    def changed(arguments: dict[str, Any]) -> dict[str, Any]:
        return op.varied(arguments, Variation(Want.UNUSED, Draw(device, seed)))

    cases = [case for case in sample(ground) if changed(op.complete(case.build(device, seed)))]
    for case in cases:
        make = Changed(op, case.make, lambda arguments: {**arguments, **changed(arguments)})
        outcome = verify_case(ground.spec, replace(case, make=make), device, seed=seed)
        yield _blamed(ground, outcome, case.name, said, "unused")
    if device.type == "cuda":  # a CPU raises for what it looks up in vain, and goes on
        for outcome in reach(ground.spec, cases, device, seed):
            yield _blamed(ground, outcome, f"{outcome.case}, in a process of its own", said, "unused")


def layouts(ground: Ground) -> Iterator[CaseResult]:
    """The same calls with tensors that are not contiguous."""
    for case in sample(ground):
        for name, layout in guards.LAYOUTS.items():
            make = Changed(ground.op, case.make, functools.partial(_laid_out, ground.op, layout))
            outcome = verify_case(ground.spec, replace(case, make=make), ground.device, seed=ground.seed)
            yield _blamed(
                ground, outcome, f"{case.name}, {name}", f"is wrong for tensors that are not contiguous ({name})", "strides"
            )


def _laid_out(op: Operator[Any, Any], layout: Callable[[Tensor], Tensor], arguments: dict[str, Any]) -> dict[str, Any]:
    tensors = [p.name for p in op.parameters if p.kind is Kind.TENSOR and arguments[p.name] is not None]
    return {**arguments, **{name: layout(arguments[name]) for name in tensors}}


def bounds(ground: Ground) -> Iterator[CaseResult]:
    """The same calls with guards before and behind every tensor, outputs too: none may be written to, none may be used."""
    for case in sample(ground):
        yield _attempt(ground, case, "bounds", functools.partial(_bounds_faults, ground, case))


def _attempt(ground: Ground, case: Case, kind: str, check: Callable[[], list[str]]) -> CaseResult:
    """The outcome of a check that gives what is wrong, or raises."""
    result = functools.partial(CaseResult, ground.spec.name, ground.spec.operator, case.name)
    try:
        with torch.no_grad():
            faults = tuple(Fault(kind, text) for text in check())
    except LookupError as refused:
        return result(Status.SKIPPED, str(refused))
    except Exception as error:  # a kernel may fail in any way; every one of them is reported
        said = f"{type(error).__name__}: {error}"
        return result(Status.ERROR, said, traceback=traceback.format_exc(), faults=(Fault(f"{kind} {type(error).__name__}", said),))
    if faults:
        return result(Status.FAILED, "; ".join(fault.text for fault in faults), faults=faults)
    return result(Status.PASSED)


def _bounds_faults(ground: Ground, case: Case) -> list[str]:
    op, spec = ground.op, ground.spec
    plain = op.complete(case.build(ground.device, ground.seed))
    expected = op.reference(*plain.values())
    complete = op.complete(case.build(ground.device, ground.seed))
    arguments = op.prepared(complete, spec)
    request = op.request(arguments)
    placed = []
    for parameter in op.parameters:
        value = arguments[parameter.name]
        if parameter.kind is Kind.TENSOR and value is not None and value is complete[parameter.name]:
            placed.append(guards.guard(parameter.name, value))
    wanted = lowering.as_list(expected)
    for name, tensor in zip(op.outs, wanted, strict=False):
        guarded = guards.guard(name, torch.empty_like(tensor))
        guarded.tensor.copy_(guards.filled(tensor.numel(), tensor).view(tensor.shape))
        placed.append(guarded)
    got = run_kernel(op, spec, {**arguments, **{guarded.name: guarded.tensor for guarded in placed}})
    faults = [fault for guarded in placed if (fault := guarded.fault())]
    tolerance = functools.partial(tolerance_for, request=request, exact=op.exact)
    said = "uses what lies outside of its tensors (with NaN and huge integers around them all)"
    compared = compare(got, expected, tolerance)
    for guarded in placed:
        if guarded.name in op.mutates:
            after = plain[guarded.name]
            compared.append(compare_tensors(guarded.name, guarded.tensor, after, tolerance(after.dtype)))
    return faults + [f"{said}: {c.name}: {c.fault}" for c in compared if c.fault]


# -- waiting, graphs ----------------------------------------------------------------------------------------------------------


def host_kernel(ground: Ground) -> str:
    """Why a kernel may wait for the device; empty if it may not."""
    if ground.spec.universal:
        return "the reference reads lengths on the host, by contract"
    if ground.spec.capability.vendors == frozenset({"cpu"}):
        return "runs on a CPU only"
    return f"declares that it waits, by its tag {WAITS!r}" if WAITS in ground.spec.tags else ""


def waits(ground: Ground) -> Iterator[CaseResult]:
    """The same calls, watched for whatever waits for the device."""
    if not host_kernel(ground):
        for case in sample(ground, right=False):
            yield _attempt(ground, case, "waits", functools.partial(_wait_faults, ground, case))


def _wait_faults(ground: Ground, case: Case) -> list[str]:
    op, spec = ground.op, ground.spec
    arguments = op.complete(case.build(ground.device, ground.seed))
    for parameter in op.parameters:
        if parameter.kind is Kind.HINT:
            arguments[parameter.name] = None  # on the host for the very purpose of being read
    arguments = op.prepared(arguments, spec)
    implementation = KernelRegistry.get().get_impl(spec.name)
    call = functools.partial(implementation, *arguments.values())
    call()  # what is compiled or measured once may wait
    if ground.device.type == "cuda":
        try:
            with waiting.refusing():
                call()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return [f"waits for the device: {error}"]
        return []
    with waiting.watching() as seen:
        call()
    return [f"waits for the device: {wait}" for wait in seen.found]


def graphs(ground: Ground) -> Iterator[CaseResult]:
    """The same calls captured in a CUDA graph and replayed, on other values too. On a GPU only."""
    if ground.device.type == "cuda" and not host_kernel(ground):
        for case in sample(ground):
            yield _attempt(ground, case, "graph", functools.partial(replay_faults, ground.spec, case, ground.device, ground.seed))


# -- batches ------------------------------------------------------------------------------------------------------------------


def batch_invariance(ground: Ground) -> Iterator[CaseResult]:
    """Of a kernel tagged for it: the first items of a batch, computed without the others, have the same bits."""
    if BATCH_INVARIANT in ground.spec.tags:
        for case in sample(ground, right=False):
            yield _attempt(ground, case, "batch", functools.partial(_batch_faults, ground, case))


def _batch_faults(ground: Ground, case: Case) -> list[str]:
    op, spec = ground.op, ground.spec
    build = functools.partial(case.build, ground.device, ground.seed)
    items = count_items(op, op.complete(build()))
    if items < 2:
        raise LookupError("a batch of fewer than 2 items")
    whole = lowering.as_list(run_kernel(op, spec, op.prepared(op.complete(build()), spec)))
    faults = []
    for count in dict.fromkeys((1, items // 2, items - 1)):
        arguments, rows = first_items(op, op.complete(build()), count)
        alone = lowering.as_list(run_kernel(op, spec, op.prepared(arguments, spec)))
        for index, (got, all_rows) in enumerate(zip(alone, whole, strict=True)):
            compared = compare_tensors(f"output {index}", got, all_rows[:rows], EXACT)
            if compared.fault:
                said = f"is tagged {BATCH_INVARIANT}, but the first {count} of {items} items have other bits without the rest"
                faults.append(f"{said}: {compared.name}: {compared.fault}")
    return faults

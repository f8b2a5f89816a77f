"""Conformance checks beyond correct results: a kernel must fulfil its declaration, and access only its arguments' memory.

`tokenspeed_kernel.workbench.numerics.verify` compares results. The checks of this module repeat the same cases under other
conditions: at the edges of the declared traits, with empty inputs, with other values where a value must not matter, with guards
around every tensor, with tensors that are not contiguous, in a CUDA graph, and for some items of a batch instead of all. One check
detects synchronisation with the device. Each check yields one `CaseResult` per call and writes no file.
"""

from __future__ import annotations

import functools
import itertools
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics.compare import compare_results, compare_tensors, decoded_outputs, without_padding
from tokenspeed_kernel.workbench.numerics.conformance import guards, waiting
from tokenspeed_kernel.workbench.numerics.conformance.case_space import CaseSpace, edge_values, empty_cases
from tokenspeed_kernel.workbench.numerics.conformance.graphs import replay_faults
from tokenspeed_kernel.workbench.numerics.conformance.reach import reach
from tokenspeed_kernel.workbench.numerics.narrow import count_items, first_items
from tokenspeed_kernel.workbench.numerics.tolerance import EXACT, tolerance_for
from tokenspeed_kernel.workbench.numerics.verify import (
    CaseResult,
    Fault,
    Status,
    refusal,
    run_kernel,
    verify_case,
    written_to,
)
from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Case, Draw, Recipe
from tokenspeed_kernel_base.operator import Operator
from tokenspeed_kernel_base.parameters import NO_LIMIT, Kind, Parameter, tensor_arguments, with_tensors
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.signature import Decoded
from tokenspeed_kernel_base.variation import Variation, Want

# The tag of a kernel that synchronises with the device. Such a kernel cannot be captured in a CUDA graph. The checks `waits` and
# `graphs` skip it.
WAITS = "waits"
BATCH_INVARIANT = "batch_invariant"
# The values of `Fault.check` that mean wrong results.
RESULTS = frozenset({"values", "error"})


class Changed:
    """A recipe of a case that makes the arguments of the recipe ``base``, then changes them. ``change`` maps all arguments to the
    changed arguments.
    """

    def __init__(self, op: Operator[Any, Any], base: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.op, self.base, self.change = op, base, change

    def __call__(self, draw: Draw) -> dict[str, Any]:
        return self.change(self.op.complete(self.base(draw)))


def sample(space: CaseSpace, most: int = 6, *, right: bool = True, suits: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Returns a few cases for which the kernel is eligible: the smallest nonempty case of each combination of boolean traits.

    Args:
        space: the cases.
        most: the largest number of cases to return.
        right: whether to return only cases with correct results. Checks that look for changed results need correct results to begin
            with.
        suits: returns whether a case is useful. It is called for as few cases as possible.
    """
    found: dict[tuple[Any, ...], Case] = {}
    for known in space.taken:
        if known.elements and not (right and known.case.name in space.wrong):
            key = tuple(sorted(item for item in known.traits.items() if isinstance(item[1], bool)))
            if key not in found and suits(known.case):
                found[key] = known.case
    return [*found.values()][:most]


# -- traits -------------------------------------------------------------------------------------------------------------------


def trait_edges(space: CaseSpace) -> Iterator[CaseResult]:
    """Runs cases at the edges of every trait that the kernel constrains. Results within the constraint must be correct, and
    selection must reject the kernel beyond the constraint."""
    spec = space.spec
    result = functools.partial(CaseResult, spec.name, spec.operator)
    for trait, constraint in sorted(spec.traits.items()):
        accepted, refused = edge_values(constraint)
        for value in accepted:
            cases = space.reach(trait, value, taken=True)
            if not cases:
                yield result(f"{trait}={value}", Status.SKIPPED, f"no case of {space.op} could be made to have {trait}={value}")
            for case in cases:
                outcome = verify_case(spec, case, space.device, seed=space.seed)
                name = f"{trait}={value}, {case.make if isinstance(case.make, Recipe) else case.name}"
                said = f"declares {trait}: {constraint}, but is wrong at {trait}={value}"
                yield _blamed(space, outcome, name, said, f"traits {trait}")
        for value in refused:
            # The kernel is never selected for these cases, so its results do not matter.
            for case in space.reach(trait, value, taken=False, most=1):
                yield result(f"{trait}={value}, {case.name}", Status.PASSED, "rejected, as declared")


def _blamed(space: CaseSpace, outcome: CaseResult, case: str, said: str, kind: str) -> CaseResult:
    """Returns the outcome of a case that a check has changed, as this check's result, with the check's name and wording.

    If the unchanged cases also have a fault other than wrong results, the fault is left out here, because the comparison of the
    unchanged cases reports it.
    """
    if not outcome.wrong:
        return replace(outcome, case=case)
    faults = tuple(fault for fault in outcome.faults if fault.check not in space.said)
    if not faults:
        return replace(outcome, case=case, status=Status.PASSED, reason="", faults=())
    blamed = tuple(Fault(kind, f"{said}: {fault.text}") for fault in faults)
    return replace(outcome, case=case, reason=f"{said}: {'; '.join(fault.text for fault in faults)}", faults=blamed)


# `option_edges` tries several values of a float option, until one changes the reference's result. The values are multiples of the
# option's value in the case; or `_VALUES`, if the option is 0, None or infinite there. Moderate values come first, because extreme
# values may increase rounding errors. `_VALUES` does not contain 1: a kernel that always computes with 1 would pass.
_FACTORS = (1.5, 0.125, 32.0, 2.0**10, 2.0**15, 2.0**20)
_VALUES = (0.75, 0.25, 4.0)


class _Option(NamedTuple):
    """An option of an operator: a parameter that is a value, or a field of such a parameter, such as a plan's.

    Attributes:
        parameter: describes the option.
        holder: the name of the parameter that has the field; empty if the option is a parameter itself.
    """

    parameter: Parameter
    holder: str = ""

    @property
    def name(self) -> str:
        return self.parameter.name

    def count(self, arguments: dict[str, Any]) -> int:
        """Returns how many values a case has for the option: 1."""
        return 1

    def of(self, arguments: dict[str, Any]) -> Any:
        """Returns the option's value."""
        return self.parameter.read(arguments[self.holder]) if self.holder else arguments[self.name]

    def changed(self, arguments: dict[str, Any], value: Any) -> dict[str, Any]:
        """Returns the arguments with another value of the option."""
        if not self.holder:
            return {**arguments, self.name: value}
        return {**arguments, self.holder: replace(arguments[self.holder], **{self.parameter.attribute: value})}


class _Factor(NamedTuple):
    """The factor by which the check multiplies a tensor of scales. The factor has the same methods as an `_Option`.

    Attributes:
        scale: the name of the tensor.
    """

    scale: str

    @property
    def name(self) -> str:
        return f"factor of {self.scale}"

    def count(self, arguments: dict[str, Any]) -> int:
        """Returns the number of scales in a case; 0 if the case has none, or has exponents (e8m0) instead of floats."""
        scale = arguments[self.scale]
        return scale.numel() if isinstance(scale, Tensor) and scale.dtype in (torch.float32, torch.float64) else 0

    def of(self, arguments: dict[str, Any]) -> float:
        """Returns the factor, 1."""
        return 1.0

    def changed(self, arguments: dict[str, Any], value: float) -> dict[str, Any]:
        """Returns the arguments with multiples of the scales. Neighbouring scales get different multiples, so that a kernel that
        reads the scale of another head, row or block is wrong.
        """
        scale = arguments[self.scale]
        multiples = torch.exp2((torch.arange(scale.numel(), device=scale.device) % 3).to(scale.dtype)).view(scale.shape)
        return {**arguments, self.scale: scale * multiples * value}


def option_edges(space: CaseSpace) -> Iterator[CaseResult]:
    """Sets each integer option of the operator to -1, 0, the largest int32 (for `unlimited` options, the largest value that is
    still a limit, 2^30 - 1), the largest int64, and one more than that. Sets each float option, also in a plan, to a value that
    changes the reference's result, so that a kernel that ignores the option is wrong. Multiplies each tensor of scales likewise.
    The results must be correct, or the operator must reject the call.
    """
    op = space.op
    options = [_Option(parameter) for parameter in op.parameters if parameter.kind is Kind.VALUE]
    # Only the floats of a plan are changed, below. Its integers are sizes, which must match the shapes of the weights.
    fields = [_Option(field, option.name) for option in options for field in option.parameter.fields]
    for case, option in itertools.product(sample(space, most=1), (option for option in options if int in option.parameter.types)):
        largest = NO_LIMIT if option.parameter.unlimited else 1 << 31
        given = {case.build(space.device, space.seed).get(option.name)}
        for value in (-1, 0, largest - 1, (1 << 63) - 1, 1 << 63):
            normal = option.parameter.normal(value)  # the value that kernels receive; it may be the same for several values
            if normal not in given:
                given.add(normal)
                yield _option_attempt(space, case, option, value)
    numbers: list[_Option | _Factor] = [option for option in (*options, *fields) if float in option.parameter.types]
    numbers += map(_Factor, op.scales)
    for number in numbers:
        for case in _cases_to_change(space, number):
            effective = _effective_value(space, case, number)
            if effective is not None:
                yield _option_attempt(space, case, number, effective)
                break


def _option_attempt(space: CaseSpace, case: Case, option: _Option | _Factor, value: float) -> CaseResult:
    edge = replace(case, name=f"{option.name}={value}, {case.name}")
    return _attempt(space, edge, "option", functools.partial(_option_faults, space, case, option, value))


def _values_to_try(given: Any) -> list[float]:
    factors = isinstance(given, (int, float)) and given != 0 and math.isfinite(given)
    return [given * factor for factor in _FACTORS] if factors else [*_VALUES]


def _cases_to_change(space: CaseSpace, option: _Option | _Factor) -> list[Case]:
    """Returns a few cases in which another value of a float option is to be tried. The cases with the most scales come first."""
    cases = sample(space, most=3, suits=functools.partial(_may_change, space, option))
    return sorted(cases, key=lambda case: -option.count(space.op.complete(case.build(space.device, space.seed))))


def _may_change(space: CaseSpace, option: _Option | _Factor, case: Case) -> bool:
    """Returns whether the kernel is eligible for a case with another value of a float option."""
    arguments = space.op.complete(case.build(space.device, space.seed))
    if not option.count(arguments):
        return False
    return refusal(space.op, space.spec, option.changed(arguments, _values_to_try(option.of(arguments))[0])) is None


def _effective_value(space: CaseSpace, case: Case, option: _Option | _Factor) -> float | None:
    """Returns a value of a float option that changes the reference's result by more than the tolerance. Returns None if each value
    that is tried is illegal, or changes the result by less.
    """
    op = space.op
    usual = op.complete(case.build(space.device, space.seed))
    values = _values_to_try(option.of(usual))
    before, kept = op.reference(*usual.values()), written_to(op, usual)
    for value in values:
        arguments = option.changed(op.complete(case.build(space.device, space.seed)), value)
        try:
            op.check_call(with_tensors(op.parameters, arguments, Tensor.cpu))
        except (TypeError, ValueError):
            continue
        after, written = op.reference(*arguments.values()), written_to(op, arguments)
        tolerance = functools.partial(tolerance_for, request=op.request(arguments), exact=op.exact)
        changes = {name: (kept[name], tensor) for name, tensor in written.items()}
        if any(c.fault for c in compare_results(op, arguments, before, after, tolerance, changes)):
            return float(value)
    return None


def _option_faults(space: CaseSpace, case: Case, option: _Option | _Factor, value: float) -> list[str]:
    op, spec = space.op, space.spec
    plain, arguments = (option.changed(op.complete(case.build(space.device, space.seed)), value) for _ in range(2))
    try:
        op.check_call(with_tensors(op.parameters, plain, Tensor.cpu))  # on a GPU the tensors' values are not checked
    except (TypeError, ValueError) as refused:
        return [] if str(refused).startswith(f"{op.mode}: ") else [f"is rejected, but not by the operator's own check: {refused}"]
    rejected = refusal(op, spec, plain)
    if rejected is not None:
        raise LookupError(f"{rejected[0]}: {rejected[1]}")
    expected, written = op.reference(*plain.values()), written_to(op, plain)
    arguments = op.prepared(arguments, spec)
    got = run_kernel(op, spec, arguments)
    tolerance = functools.partial(tolerance_for, request=op.request(arguments), exact=op.exact)
    given = dict(tensor_arguments(op.parameters, arguments))
    compared = compare_results(op, arguments, got, expected, tolerance, {n: (given[n], after) for n, after in written.items()})
    faults = [f"{c.name}: {c.fault}" for c in compared if c.fault]
    if not faults:
        return []
    usual = op.complete(case.build(space.device, space.seed))
    same = compare_results(op, arguments, got, op.reference(*usual.values()), tolerance)
    name, usually = option.name, option.of(usual)
    ignored = "" if any(c.fault for c in same) else f" (ignores {name}: the result is that of {name}={usually})"
    return [f"is wrong at {name}={value}{ignored}: {fault}" for fault in faults]


def empties(space: CaseSpace) -> Iterator[CaseResult]:
    """Runs calls with nothing to do, and calls in which some items are empty."""
    for case in empty_cases(space):
        outcome = verify_case(space.spec, case, space.device, seed=space.seed)
        yield _blamed(space, outcome, case.name, "is wrong if there is nothing to compute", "empty")


# -- what surrounds the values ------------------------------------------------------------------------------------------------


def unused_values(space: CaseSpace) -> Iterator[CaseResult]:
    """Repeats calls with other values where values must not matter, as the operator's ``vary`` hook specifies."""
    op, device, seed = space.op, space.device, space.seed

    def changed(arguments: dict[str, Any]) -> dict[str, Any]:
        return op.varied(arguments, Variation(Want.UNUSED, Draw(device, seed)))

    names = {case: [*changed(op.complete(case.build(device, seed)))] for case in sample(space)}
    cases = [case for case, found in names.items() if found]
    said = f"uses values that must not matter, of {', '.join(dict.fromkeys(itertools.chain(*names.values())))}"
    for case in cases:
        make = Changed(op, case.make, lambda arguments: {**arguments, **changed(arguments)})
        outcome = verify_case(space.spec, replace(case, make=make), device, seed=seed)
        yield _blamed(space, outcome, case.name, said, "unused")
    if device.type == "cuda":  # on a CPU, an index out of range has already raised an error in the comparison above
        for outcome in reach(space.spec, cases, device, seed):
            yield _blamed(space, outcome, f"{outcome.case}, in a separate process", said, "unused")


def layouts(space: CaseSpace) -> Iterator[CaseResult]:
    """Repeats calls with non-contiguous tensors, in several layouts."""
    for case in sample(space):
        for name, layout in guards.LAYOUTS.items():
            make = Changed(space.op, case.make, functools.partial(_laid_out, space.op, layout))
            outcome = verify_case(space.spec, replace(case, make=make), space.device, seed=space.seed)
            yield _blamed(
                space, outcome, f"{case.name}, {name}", f"is wrong for tensors that are not contiguous ({name})", "strides"
            )


def _laid_out(op: Operator[Any, Any], layout: Callable[[Tensor], Tensor], arguments: dict[str, Any]) -> dict[str, Any]:
    tensors = [p.name for p in op.parameters if p.kind is Kind.TENSOR and arguments[p.name] is not None]
    return {**arguments, **{name: layout(arguments[name]) for name in tensors}}


def bounds(space: CaseSpace) -> Iterator[CaseResult]:
    """Repeats calls with guard elements before and after every tensor, outputs included. A kernel must not write the guards, and
    its results must not depend on them."""
    for case in sample(space):
        yield _attempt(space, case, "bounds", functools.partial(_bounds_faults, space, case))


def _attempt(space: CaseSpace, case: Case, kind: str, check: Callable[[], list[str]]) -> CaseResult:
    """Runs a check on a case, and returns the outcome as a result.

    The check returns faults as text. If it raises a LookupError, the case is skipped; any other error is a fault.
    """
    result = functools.partial(CaseResult, space.spec.name, space.spec.operator, case.name)
    try:
        with torch.no_grad():
            faults = tuple(Fault(kind, text) for text in check())
    except LookupError as refused:
        return result(Status.SKIPPED, str(refused))
    except Exception as error:  # a kernel may fail in any way; every failure is reported
        said = f"{type(error).__name__}: {error}"
        return result(Status.ERROR, said, traceback=traceback.format_exc(), faults=(Fault(f"{kind} {type(error).__name__}", said),))
    if faults:
        return result(Status.FAILED, "; ".join(fault.text for fault in faults), faults=faults)
    return result(Status.PASSED)


def _bounds_faults(space: CaseSpace, case: Case) -> list[str]:
    op, spec = space.op, space.spec
    plain = op.complete(case.build(space.device, space.seed))
    expected = op.reference(*plain.values())
    complete = op.complete(case.build(space.device, space.seed))
    arguments = op.prepared(complete, spec)
    request = op.request(arguments)
    placed = []
    for parameter in op.parameters:
        value = arguments[parameter.name]
        if parameter.kind is Kind.TENSOR and value is not None and value is complete[parameter.name]:
            placed.append(guards.guard(parameter.name, value))
    wanted = lowering.as_list(expected)
    for name, tensor in op.named(arguments, wanted).items():
        guarded = guards.guard(name, torch.empty_like(tensor))
        guarded.tensor.copy_(guards.filled(tensor.numel(), tensor).view(tensor.shape))
        placed.append(guarded)
    got = run_kernel(op, spec, {**arguments, **{guarded.name: guarded.tensor for guarded in placed}})
    faults = [fault for guarded in placed if (fault := guarded.fault())]
    tolerance = functools.partial(tolerance_for, request=request, exact=op.exact)
    said = "uses memory outside its tensors (the guards around each tensor hold NaN or huge integers)"
    written = {guarded.name: (guarded.tensor, plain[guarded.name]) for guarded in placed if guarded.name in op.mutates}
    compared = compare_results(op, arguments, got, expected, tolerance, written)
    return faults + [f"{said}: {c.name}: {c.fault}" for c in compared if c.fault]


# -- waiting, graphs ----------------------------------------------------------------------------------------------------------


def host_kernel(space: CaseSpace) -> str:
    """Returns why a kernel may synchronise with the device; empty if it may not."""
    if space.spec.is_reference:
        return "the reference reads lengths on the host, by contract"
    if space.spec.capability.vendors == frozenset({"cpu"}):
        return "runs on a CPU only"
    return f"declares that it waits, by its tag {WAITS!r}" if WAITS in space.spec.tags else ""


def waits(space: CaseSpace) -> Iterator[CaseResult]:
    """Repeats calls, and reports those in which the kernel synchronises with the device."""
    if not host_kernel(space):
        for case in sample(space, right=False):
            yield _attempt(space, case, "waits", functools.partial(_wait_faults, space, case))


def _wait_faults(space: CaseSpace, case: Case) -> list[str]:
    op, spec = space.op, space.spec
    arguments = op.complete(case.build(space.device, space.seed))
    for parameter in op.parameters:
        if parameter.kind is Kind.HINT:
            arguments[parameter.name] = None  # kernels may read hints without synchronisation, because hints are in host memory
    arguments = op.prepared(arguments, spec)
    implementation = KernelRegistry.get().get_impl(spec.name)
    call = functools.partial(implementation, *arguments.values())
    call()  # the first call may compile or autotune, and may then synchronise with the device
    if space.device.type == "cuda":
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


def graphs(space: CaseSpace) -> Iterator[CaseResult]:
    """Captures each call in a CUDA graph and replays the graph, also on other input values. Runs on a GPU only."""
    if space.device.type == "cuda" and not host_kernel(space):
        for case in sample(space):
            yield _attempt(space, case, "graph", functools.partial(replay_faults, space.spec, case, space.device, space.seed))


# -- batches ------------------------------------------------------------------------------------------------------------------


def batch_invariance(space: CaseSpace) -> Iterator[CaseResult]:
    """Checks kernels tagged `BATCH_INVARIANT`: the results of a batch's first items must have the same bits when computed without
    the other items.
    """
    if BATCH_INVARIANT in space.spec.tags:
        # If every case has a single item, the cases run anyway, and their results report that there is no batch.
        for case in sample(space, right=False, suits=functools.partial(_has_items, space)) or sample(space, right=False):
            yield _attempt(space, case, "batch", functools.partial(_batch_faults, space, case))


def _has_items(space: CaseSpace, case: Case) -> bool:
    """Returns whether a case's call is a batch of several items."""
    return count_items(space.op, space.op.complete(case.build(space.device, space.seed))) > 1


def _values(op: Operator[Any, Any], arguments: dict[str, Any], outputs: list[Tensor]) -> list[Tensor]:
    """Returns the outputs of a call. Quantised values and their scales are decoded to the values that they represent."""
    return [part.values if isinstance(part, Decoded) else part for part in decoded_outputs(op, arguments, outputs)]


def _batch_faults(space: CaseSpace, case: Case) -> list[str]:
    op, spec = space.op, space.spec
    build = functools.partial(case.build, space.device, space.seed)
    items = count_items(op, op.complete(build()))
    if items < 2:
        raise LookupError("a batch of fewer than 2 items")
    arguments = op.complete(build())
    whole = lowering.as_list(without_padding(op, arguments, run_kernel(op, spec, op.prepared(arguments, spec))))
    complete, total = first_items(op, op.complete(build()), items)
    # Scales that are stored in tiles cannot be split by rows. The decoded values can.
    in_rows = not op.has_hook("decoded") or all(output.shape[:1] == (total,) for output in whole)
    whole = whole if in_rows else _values(op, complete, whole)
    faults = []
    for count in dict.fromkeys((1, items // 2, items - 1)):
        arguments, rows = first_items(op, op.complete(build()), count)
        alone = lowering.as_list(run_kernel(op, spec, op.prepared(arguments, spec)))
        alone = alone if in_rows else _values(op, arguments, alone)
        for index, (got, all_rows) in enumerate(zip(alone, whole, strict=True)):
            compared = compare_tensors(f"output {index}", got, all_rows[:rows], EXACT)
            if compared.fault:
                said = f"is tagged {BATCH_INVARIANT}, but the first {count} of {items} items have other bits without the rest"
                faults.append(f"{said}: {compared.name}: {compared.fault}")
    return faults

"""Verifies a kernel against the reference, on its operator's cases.

A kernel runs as a caller would run it: through the operator, by name. Besides the values of its outputs, the guarantees to every
caller are checked. ``out=`` is written and returned. Arguments that the operator does not declare as mutated are unchanged. Outputs
alias neither inputs nor each other. A kernel tagged ``determinism`` reproduces its bits. All further checks are in
`tokenspeed_kernel.workbench.numerics.conformance.checks`.
"""

from __future__ import annotations

import enum
import functools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.workbench import worlds
from tokenspeed_kernel.workbench.numerics.compare import (
    Comparison,
    ToleranceOf,
    compare_results,
    compare_tensors,
    plain_fields,
    same_bits,
    without_padding,
)
from tokenspeed_kernel.workbench.numerics.tolerance import EXACT, tolerance_for
from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Case, Recipe
from tokenspeed_kernel_base.compilation import CompilationForbiddenError
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.platform import current_platform, platform_of
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import Request, gate
from tokenspeed_kernel_base.spec import KernelSpec


class Status(str, enum.Enum):
    """The outcome of one case."""

    PASSED = "passed"
    FAILED = "failed"  # the kernel ran, and its result is wrong
    ERROR = "error"  # an exception ended the verification
    SKIPPED = "skipped"  # the kernel is not eligible for this case here
    UNREACHED = "not reached"  # the kernel is eligible for no case of its operator

    @property
    def wrong(self) -> bool:
        return self in (Status.FAILED, Status.ERROR, Status.UNREACHED)


@dataclass(frozen=True)
class Fault:
    """A fault that verification found in a kernel. ``kind`` is the same for the same fault on other inputs; ``text`` has the
    details."""

    kind: str
    text: str

    @property
    def check(self) -> str:
        """The check that found the fault: ``values``, ``out=``, ``inputs``, ``memory``, ``determinism`` or ``error``."""
        return self.kind.partition(" ")[0]


@dataclass(frozen=True)
class CaseResult:
    """The verification result of one kernel on one case.

    Attributes:
        kernel, operator, case: names of the kernel, operator and case.
        status: the outcome, see `Status`.
        reason: why the case was skipped; or the faults; or, for a correct reference kernel, what was checked.
        comparisons: one per checked tensor. The comparison of a tensor that was passed as ``out=`` has the parameter's name and
            "=".
        traceback: the traceback of an error.
        faults: the individual faults; ``reason`` joins them.
        traits: the traits of the case's request; empty if verification ended before the request was made.
    """

    kernel: str
    operator: str
    case: str
    status: Status
    reason: str = ""
    comparisons: tuple[Comparison, ...] = ()
    traceback: str = ""
    faults: tuple[Fault, ...] = ()
    traits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> bool:
        return self.status.wrong

    @property
    def gate(self) -> str:
        """The gate of selection that rejected the kernel for the case, or ``"world of 2"``; empty if the case was not skipped."""
        return self.reason.partition(":")[0] if self.status is Status.SKIPPED else ""

    @property
    def worst(self) -> Comparison | None:
        """The most relevant comparison: a failed comparison, else the one with the largest relative error."""
        return max(self.comparisons, key=lambda c: (not c.passed, c.relative_error), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain values, for JSON."""
        return plain_fields(self)


def default_device() -> torch.device:
    """Returns the device that kernels of this process run on: the current GPU, or the CPU (also if the platform is emulated or
    pretended).
    """
    platform = current_platform()
    if platform.is_cpu or platform.emulated or platform.pretended:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def verify_kernel(
    spec: KernelSpec,
    cases: Iterable[Case] | None = None,
    device: torch.device | str | None = None,
    *,
    large: bool = False,
    seed: int = 0,
    repeat: int | None = None,
) -> list[CaseResult]:
    """Verifies a registered kernel against its operator's reference.

    Args:
        spec: the kernel's declaration, from the registry.
        cases: the cases to run; the operator's if not given.
        device: the device; `default_device` if not given.
        large: whether to include the operator's cases that are sized for a GPU. Has no effect if ``cases`` is given.
        seed: seed of the inputs.
        repeat: how many runs of every kernel must give the same bits. None: two runs, only of kernels tagged ``determinism``.

    Returns:
        One result per case, in order. A wrong kernel raises no error.

    Example:
        >>> from tokenspeed_kernel_base.registry import KernelRegistry
        >>> spec = KernelRegistry.get().get_by_name("reference_rmsnorm")
        >>> {result.status.value for result in verify_kernel(spec)}
        {'passed'}
    """
    if cases is None:
        if (wrong := undeclared(spec)) is not None:
            return [wrong]
        cases = [case for case in get_operator(spec.operator).all_cases() if large or not case.large]
    return [verify_case(spec, case, device, seed=seed, repeat=repeat) for case in cases]


def undeclared(spec: KernelSpec) -> CaseResult | None:
    """Returns an error result for a kernel whose operator is not declared; None for any other kernel."""
    try:
        get_operator(spec.operator)
    except KeyError as error:
        return CaseResult(spec.name, spec.operator, "", Status.ERROR, f"{error.args[0]} ({spec.origin})")
    return None


def verify_case(
    spec: KernelSpec, case: Case, device: torch.device | str | None = None, *, seed: int = 0, repeat: int | None = None
) -> CaseResult:
    """Verifies a registered kernel on one case of its operator. See `verify_kernel`.

    A case with a ``world_size`` above 1 runs in that many processes. This function starts and ends them. The result is that of the
    first rank with a wrong result; if all are correct, that of rank 0.
    """
    op = get_operator(spec.operator)
    where = default_device() if device is None else torch.device(device)
    result = functools.partial(CaseResult, spec.name, spec.operator, case.name)
    platform = platform_of(where)
    # Check this before building inputs: a large case takes gigabytes.
    gap = f"{platform.arch} is pretended, nothing launches" if platform.pretended else spec.capability.gap(platform)
    if gap is not None:
        return result(Status.SKIPPED, f"platform: {gap}")
    if case.world_size > 1 and worlds.current_size() != case.world_size:
        return _verify_in_world(spec, case, where, seed, repeat)

    doing = "building the case"
    try:
        with torch.no_grad():
            build = functools.partial(_build, op, case, where, seed)
            arguments = build()
            check_with_values(op, arguments)
            rejected = refusal(op, spec, arguments)
            if rejected is not None and rejected[0] != "implementation":
                return result(Status.SKIPPED, f"{rejected[0]}: {rejected[1]}")
            twin = build()
            changed = _differing(op, arguments, twin)
            if changed:
                said = f"the case does not draw the same {', '.join(changed)} twice"
                return result(Status.ERROR, said, faults=(Fault("error case", said),))
            doing = "loading the kernel"
            KernelRegistry.get().get_impl(spec.name)

            doing = "preparing the arguments for the kernel"
            twin = op.prepared(twin, spec)
            request = op.request(twin)
            result = functools.partial(result, traits=request.traits)
            rejected = gate(spec, request)
            if rejected is not None:
                return result(Status.SKIPPED, f"{rejected[0]}: {rejected[1]}")

            doing = "running the reference"
            expected = op.reference(*arguments.values())
            written = written_to(op, arguments)
            del arguments  # they may be large

            doing = "running the kernel"
            is_reference = spec.is_reference
            tolerance = functools.partial(tolerance_for, request=request, exact=op.exact or is_reference)
            trial = _Trial(op, spec, twin, lambda: op.prepared(build(), spec), expected, written, tolerance, repeat)
            trial.run()
    except CompilationForbiddenError as error:
        return result(Status.SKIPPED, f"compile policy: {error}")
    except Exception as error:  # a kernel may fail in any way; every failure is reported
        said = f"{doing}: {type(error).__name__}: {error}"
        blamed = Fault(f"error {doing} {type(error).__name__}", said)
        return result(Status.ERROR, said, traceback=traceback.format_exc(), faults=(blamed,))
    faults = (*_faults_of(trial.comparisons), *trial.faults)
    if faults:
        return result(Status.FAILED, "; ".join(fault.text for fault in faults), tuple(trial.comparisons), faults=faults)
    remark = "is the reference: gives the same bits again, writes out=, leaves inputs unchanged" if is_reference else ""
    return result(Status.PASSED, remark, tuple(trial.comparisons))


def _verify_in_world(spec: KernelSpec, case: Case, device: torch.device, seed: int, repeat: int | None) -> CaseResult:
    result = functools.partial(CaseResult, spec.name, spec.operator, case.name)
    gap = worlds.gap(case.world_size, device)
    known = next((each for each in get_operator(spec.operator).all_cases() if each.name == case.name), None)
    if gap is None and (known is None or (isinstance(case.make, Recipe) and case != known)):
        gap = "only cases that the operator declares can be found by other processes"
    if gap is not None:
        return result(Status.SKIPPED, f"world of {case.world_size}: {gap}")
    try:
        args = spec.name, case.name, device.type, seed, repeat
        results: list[CaseResult] = worlds.run_world(_verify_as_rank, case.world_size, args, device=device)
    except worlds.WorldError as error:
        said = f"in a world of {case.world_size}: {str(error).splitlines()[-1]}"
        return result(Status.ERROR, said, traceback=str(error), faults=(Fault("error world", said),))
    for rank, outcome in enumerate(results):
        if outcome.wrong:
            return replace(outcome, reason=f"rank {rank} of {case.world_size}: {outcome.reason}")
    return results[0]


def _verify_as_rank(kernel: str, case_name: str, device: str, seed: int, repeat: int | None) -> CaseResult:
    spec = KernelRegistry.get().get_by_name(kernel)
    case = next(case for case in get_operator(spec.operator).all_cases() if case.name == case_name)
    return verify_case(spec, case, default_device() if device == "cuda" else device, seed=seed, repeat=repeat)


def _faults_of(comparisons: Iterable[Comparison]) -> Iterator[Fault]:
    """Yields the faults of comparisons. A fault that occurs both with and without ``out=`` is reported once."""
    said = set()
    for comparison in comparisons:
        if comparison.fault and comparison.fault not in said:
            said.add(comparison.fault)
            check = "out=" if comparison.name.endswith("=") else "values"
            notes = "".join(f"; {note}" for note in (comparison.relation, comparison.places) if note)
            yield Fault(f"{check} {comparison.name}", f"{comparison.name}: {comparison.fault}{notes}")


def run_kernel(op: Operator[Any, Any], spec: KernelSpec, arguments: dict[str, Any]) -> Any:
    """Runs a kernel by name on (complete, prepared) arguments, as a caller would, and synchronises."""
    result = op.function(**arguments, override=spec.name)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a failed launch is then attributed to this call
    return result


def check_with_values(op: Operator[Any, Any], arguments: dict[str, Any]) -> None:
    """Raises TypeError or ValueError for an invalid call. Checks values as if all tensors were in host memory.

    An ordinary call does not check values on a device. Generated inputs must be valid nevertheless: an index out of range would
    abort the whole process in the reference.
    """
    op.check_call(arguments)
    if op.host_values:
        values = {name: arguments[name] for name in op.host_values}
        op.check_values({**arguments, **{n: v.cpu() if isinstance(v, Tensor) else v for n, v in values.items()}})


def refusal(op: Operator[Any, Any], spec: KernelSpec, arguments: dict[str, Any]) -> tuple[str, str] | None:
    """Returns the gate that rejects a kernel for a case's complete arguments, and the reason; None if the kernel is eligible.

    The check uses the arguments before they are prepared for the kernel, because preparing ineligible arguments may fail.
    """
    return refusal_of(op, spec, op.request(arguments))


def refusal_of(op: Operator[Any, Any], spec: KernelSpec, request: Request) -> tuple[str, str] | None:
    """Like `refusal`, but takes the request of the unprepared arguments."""
    return gate(spec, replace(request, fixed_traits=frozenset(request.traits).difference(op.fixed_traits)), overridden=True)


def _build(op: Operator[Any, Any], case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    return op.complete(case.build(device, seed))


def written_to(op: Operator[Any, Any], arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the arguments that the operator declares as mutated."""
    return {name: t for name, t in tensor_arguments(op.parameters, arguments) if name.partition(".")[0] in op.mutates}


def _differing(op: Operator[Any, Any], left: dict[str, Any], right: dict[str, Any], leave_out: Iterable[str] = ()) -> list[str]:
    """Returns the names of the tensors that are not bit-identical in two sets of arguments."""
    others = dict(tensor_arguments(op.parameters, right))
    skipped = set(leave_out)
    return [
        name
        for name, tensor in tensor_arguments(op.parameters, left)
        if name.partition(".")[0] not in skipped and not same_bits(tensor, others[name])
    ]


@dataclass
class _Trial:
    """Runs one kernel on one case, and collects the comparisons of its outputs and the faults that were found."""

    op: Operator[Any, Any]
    spec: KernelSpec
    arguments: dict[str, Any]
    build: Callable[[], dict[str, Any]]
    expected: Any
    written: dict[str, Tensor]
    tolerance: ToleranceOf
    repeat: int | None

    def __post_init__(self) -> None:
        self.faults: list[Fault] = []
        self.comparisons: list[Comparison] = []

    def run(self) -> None:
        got = self._call(self.arguments)
        written = self._beside(self.arguments, self.written)
        self.comparisons = compare_results(self.op, self.arguments, got, self.expected, self.tolerance, written)
        outputs = _tensors(got)
        self._check_memory(outputs)

        fresh = self.build()
        changed = _differing(self.op, self.arguments, fresh, (*self.op.mutates, *self.op.outs))
        if changed:
            self.faults.append(Fault(f"inputs {changed[0]}", f"changes its input {', '.join(changed)}"))
        tagged = "determinism" in self.spec.tags
        runs = self.repeat or (2 if tagged and not self.op.outs else 1)  # with out= there is a second run anyway
        self._check_bits(runs, outputs, tagged)
        comparable = all(c.passed for c in self.comparisons)
        if self.op.outs:
            self._check_out(fresh, outputs if comparable else None)

    def _check_bits(self, runs: int, outputs: list[Tensor], tagged: bool) -> None:
        """Runs the kernel again on the same values. Outputs and mutated arguments must have the same bits as after the first
        run.
        """
        first = written_to(self.op, self.arguments)
        for run in range(2, runs + 1):
            arguments = self.build()
            got = self._call(arguments)
            compared = compare_results(
                self.op, arguments, tuple(_tensors(got)), tuple(outputs), EXACT, self._beside(arguments, first)
            )
            differing = next((c for c in compared if c.fault), None)
            if differing is not None:
                said = "is tagged determinism, but gives" if tagged else "gives"
                self.faults.append(
                    Fault("determinism", f"{said} other bits in run {run} of {runs}: {differing.name}: {differing.fault}")
                )
                return

    def _beside(self, arguments: dict[str, Any], wanted: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the mutated arguments, each with its expected value."""
        return {name: (tensor, wanted[name]) for name, tensor in written_to(self.op, arguments).items()}

    def _call(self, arguments: dict[str, Any]) -> Any:
        return run_kernel(self.op, self.spec, arguments)

    def _check_memory(self, outputs: list[Tensor]) -> None:
        """Checks that outputs alias neither inputs nor each other, because a PyTorch custom operator must not return a view of an
        input.
        """
        provided = {self.arguments[name].data_ptr() for name in self.op.outs if self.arguments[name] is not None}
        owners = {_storage(t): name for name, t in tensor_arguments(self.op.parameters, self.arguments) if t.numel()}
        for index, output in enumerate(outputs):
            if not output.numel() or output.data_ptr() in provided:
                continue
            owner = owners.setdefault(_storage(output), f"output {index}")
            if owner != f"output {index}":
                self.faults.append(Fault(f"memory {index}", f"output {index} shares memory with {owner}"))

    def _check_out(self, arguments: dict[str, Any], before: list[Tensor] | None) -> None:
        """Runs the kernel again with a tensor for each ``out=`` parameter, and checks the tensors that it writes and returns.

        ``before``: outputs of the run without ``out=``, for comparing bits; None if they were wrong.
        """
        wanted = lowering.as_list(self.expected)
        provided = {name: _garbage(t) for name, t in self.op.named(arguments, wanted).items()}
        if not provided:
            return
        result = self._call({**arguments, **provided})
        returned = list(result) if isinstance(result, (tuple, list)) else [result]
        respected = []
        for index, (name, out) in enumerate(provided.items()):
            value = returned[index] if index < len(returned) else None
            if isinstance(value, Tensor) and _same_memory(value, out):
                respected.append(name)
            else:
                said = f"ignores {name}=: what it returns is not the tensor it was given"
                self.faults.append(Fault(f"out= {name}", said))
            if self.op.padded is not None:
                padding = out[self.op.counted_rows(arguments) :]
                if not same_bits(padding, _garbage(padding)):
                    self.faults.append(Fault(f"out= {name}", f"writes to rows of {name}= that belong to no item"))
        # The expected value replaces an ignored output, which has been reported, and an output without an ``out=`` parameter, which
        # was compared before.
        got = [out if name in respected else wanted[index] for index, (name, out) in enumerate(provided.items())]
        got += wanted[len(got) :]
        compared = compare_results(self.op, arguments, lowering.from_list(got), self.expected, self.tolerance)
        if len(compared) == len(wanted):
            self.comparisons += [replace(c, name=f"{n}=") for n, c in zip(provided, compared, strict=False) if n in respected]
        else:
            self.comparisons += [replace(c, name=f"{c.name}=") for c in compared]
        if before is None or "determinism" not in self.spec.tags or not all(c.passed for c in compared):
            return
        for index, name in enumerate(provided):
            one, other = (without_padding(self.op, arguments, outputs[index]) for outputs in (got, before))
            again = compare_tensors(f"{name}=", one, other, EXACT)
            if again.fault and name in respected:
                said = f"is tagged determinism, but gives other bits the second time: {again.fault}"
                self.faults.append(Fault("determinism", said))


def _tensors(result: Any) -> list[Tensor]:
    return [t for t in lowering.as_list(result) if isinstance(t, Tensor)] if isinstance(result, (Tensor, tuple)) else []


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same_memory(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()


def _garbage(like: Tensor) -> Tensor:
    """Returns an output tensor of bytes 0x7f, or of True for bool. In most float formats, these bytes are NaN or above 10^38. In
    32-bit and 64-bit integers, they are at least 2^30. Kernels do not compute such values.
    """
    made = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if like.dtype == torch.bool:
        return made.fill_(True)
    made.untyped_storage().fill_(0x7F)  # type: ignore[attr-defined]
    return made

"""Runs every kernel of a receipt on a small case, on the server's device, and compares the result with the reference.

A kernel that was right where it was tested can be wrong with another driver, compiler or machine. The check takes seconds, so a
server can run it at each start.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenspeed_kernel.workbench.numerics.recipes import asked
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Status, default_device, refusal_of, verify_case
from tokenspeed_kernel.workbench.receipts import Receipt, Row, receipt
from tokenspeed_kernel.workbench.receipts.making import Source
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.declaration import Operator
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.platform import PlatformInfo, platform_of
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import Request
from tokenspeed_kernel_base.spec import KernelSpec

_WIDTH = 100


@dataclass(frozen=True)
class Wrong:
    """A kernel that gave a wrong result in the self-check.

    Attributes:
        result: the verification result of the case on which the kernel is wrong, with the faults.
        disabled: whether selection rejects the kernel from now on.
        successor: the kernel that is selected for this case instead; empty if no other kernel is eligible.
    """

    result: CaseResult
    disabled: bool
    successor: str


@dataclass(frozen=True)
class SelfCheck:
    """The result of a self-check.

    Attributes:
        passed: for each kernel with only right results, by the kernel's name, the names of its cases.
        wrong: the kernels with a wrong result.
        not_reached: kernels that ran on no case, with the reason: the time was over, the compile policy forbids the compilation, or
            the kernel is eligible for no small case.
        seconds: duration of the check in seconds.
    """

    passed: dict[str, list[str]]
    wrong: tuple[Wrong, ...]
    not_reached: dict[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no kernel is wrong. Kernels that ran on no case do not count as wrong."""
        return not self.wrong

    def __str__(self) -> str:
        cases = sum(map(len, self.passed.values()))
        kernels = "1 kernel is" if len(self.passed) == 1 else f"{len(self.passed)} kernels are"
        on = "1 case" if cases == 1 else f"{cases} cases"
        lines = [f"{kernels} right on {on}, {len(self.wrong)} wrong, in {self.seconds:.1f} s"]
        for each in self.wrong:
            then = f"disabled, {each.successor or 'no kernel'} takes over" if each.disabled else "not disabled"
            lines.append(f"WRONG {each.result.kernel} on {each.result.case!r} ({then}): {each.result.reason}")
        lines += [f"not reached: {name}: {why}" for name, why in self.not_reached.items()]
        return "\n".join(line for each in lines for line in textwrap.wrap(each, _WIDTH, subsequent_indent="    "))


def self_check(
    subject: Source | Receipt | None = None,
    seconds: float = 2.0,
    *,
    disable: bool = False,
    device: torch.device | str | None = None,
) -> SelfCheck:
    """Runs each kernel of a receipt on small cases of its operator, and compares the results with the reference's.

    Each kernel runs on one case before any kernel runs on a second one. Then cases that are most similar to the receipt's calls run
    first. No case starts after ``seconds``, but a case that compiles may end much later. If the compile policy is ``forbid``, a
    kernel whose cases need compilations is not reached. Call this function in a `tokenspeed_kernel.compile_policy` block with
    ``allow`` to check such a kernel. Run the check before weights are prepared and CUDA graphs are captured, because prepared
    weights and graphs keep their kernel. References are not checked, because they define the right results.

    Args:
        subject: a receipt, or a model as the argument of `receipt`; None for the selections that this process has made so far.
        seconds: time in seconds after which no further case starts. The time to make a receipt does not count.
        disable: whether to make selection reject wrong kernels in this process. The kernels that are selected instead are checked,
            too.
        device: the device to run on; by default the device on which this process runs kernels.

    Raises:
        ModelError: the model is unknown or its configuration cannot be used.
    """
    started = time.monotonic()
    where = default_device() if device is None else torch.device(device)
    platform = platform_of(where)
    found = subject if isinstance(subject, Receipt) else receipt(subject, platform=platform)
    checking = _Checking(where, platform, disable)
    for name in found.kernels:
        checking.add(name, [row for row in found.rows if row.kernel == name])
    checking.run(time.monotonic() + seconds)
    return SelfCheck(checking.passed, tuple(checking.wrong), checking.not_reached, time.monotonic() - started)


class _Checking:
    """The kernels that remain to be checked, each with the cases on which it has not run yet, and the results so far."""

    def __init__(self, device: torch.device, platform: PlatformInfo, disable: bool) -> None:
        self._device, self._platform, self._disable = device, platform, disable
        self._requests: dict[tuple[str, str], Request | None] = {}
        self._waiting: dict[str, Iterator[Case]] = {}
        self.passed: dict[str, list[str]] = {}
        self.wrong: list[Wrong] = []
        self.not_reached: dict[str, str] = {}

    def add(self, name: str, rows: list[Row]) -> None:
        """Adds a kernel that is to be checked, unless it was added before or is a reference. ``rows``: the receipt's rows of the
        kernel."""
        known = {*self._waiting, *self.passed, *self.not_reached, *(each.result.kernel for each in self.wrong)}
        try:
            spec = KernelRegistry.get().get_by_name(name)
        except KeyError:
            self.not_reached[name] = "it is not registered in this process"
            return
        if name not in known and not spec.is_reference:
            self._waiting[name] = self._cases(spec, rows)

    def run(self, until: float) -> None:
        """Runs the kernels in turn, one case each, until all cases have run or the time ``until`` is reached."""
        while self._waiting:
            for name in [*self._waiting]:
                if time.monotonic() >= until:
                    self.not_reached.update({left: "the time was over" for left in self._waiting if left not in self.passed})
                    self._waiting.clear()
                    return
                self._run_next(name, until)

    def _run_next(self, name: str, until: float) -> None:
        """Runs a kernel on its next case, or on the first one after it that is not skipped before the time ``until``."""
        spec = KernelRegistry.get().get_by_name(name)
        skipped = "no small case of its operator selects it"
        for case in self._waiting[name]:
            result = verify_case(spec, case, self._device)
            if result.status is Status.SKIPPED:
                skipped = result.reason
                if time.monotonic() >= until:
                    break
                continue
            if result.wrong:
                self._found_wrong(spec, case, result)
                break
            self.passed.setdefault(name, []).append(case.name)
            return
        del self._waiting[name]
        if name not in self.passed and all(each.result.kernel != name for each in self.wrong):
            self.not_reached[name] = skipped

    def _found_wrong(self, spec: KernelSpec, case: Case, result: CaseResult) -> None:
        self.passed.pop(spec.name, None)
        op = get_operator(spec.operator)
        if self._disable:
            KernelRegistry.get().disable(spec.name, f"is disabled: wrong on {case.name!r}: {result.reason}")
        request, arguments = asked(op, case)
        verdicts = op.consider_prepared(replace(request, platform=self._platform), arguments, None).verdicts
        then = next((verdict.spec.name for verdict in verdicts if verdict.accepted and verdict.spec is not spec), "")
        self.wrong.append(Wrong(result, self._disable, then))
        if self._disable and then:
            self.add(then, [])

    def _cases(self, spec: KernelSpec, rows: list[Row]) -> Iterator[Case]:
        """Yields the small single-process cases for which a kernel is eligible: the first one found, then the others, those most
        similar to the receipt's rows first. To find all cases takes seconds, in which other kernels would not be reached.
        """
        op = get_operator(spec.operator)
        cases = (case for case in op.all_cases() if not case.large and case.world_size == 1)
        requests = ((case, self._request_of(op, case)) for case in cases)
        fitting = ((case, found) for case, found in requests if found is not None and refusal_of(op, spec, found) is None)
        first = next(fitting, None)
        if first is not None:
            yield first[0]
            others = [(max((_likeness(request, row) for row in rows), default=0), case) for case, request in fitting]
            yield from (case for _, case in sorted(others, key=lambda pair: -pair[0]))

    def _request_of(self, op: Operator[..., Any], case: Case) -> Request | None:
        """Returns the request of a case; None if a tensor of the case is empty, because a kernel need not be launched for it."""
        key = str(op), case.name
        if key not in self._requests:
            request, arguments = asked(op, case)
            empty = any(isinstance(each, torch.Tensor) and not each.numel() for each in arguments.values())
            self._requests[key] = None if empty else replace(request, platform=self._platform)
        return self._requests[key]


def _likeness(request: Request, row: Row) -> int:
    """Returns how similar a request is to a receipt's row: the number of equal traits, plus one if the formats are equal."""
    traits = request.traits.items()
    shared = [name for name, value in traits if type(row.traits.get(name)) is type(value) and row.traits[name] == value]
    return len(shared) + (str(request.signature) == row.formats)

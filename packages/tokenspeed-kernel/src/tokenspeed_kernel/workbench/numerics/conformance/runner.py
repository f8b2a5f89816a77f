"""Runs all conformance checks on kernels, and returns one finding per kernel and check."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tokenspeed_kernel.plugins import list_plugins, plugin_failures
from tokenspeed_kernel.workbench.numerics.compare import plain_fields
from tokenspeed_kernel.workbench.numerics.conformance import checks
from tokenspeed_kernel.workbench.numerics.conformance.case_space import CaseSpace
from tokenspeed_kernel.workbench.numerics.shrink import Shrunk, shrink
from tokenspeed_kernel.workbench.numerics.unreached import unreached
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Status, default_device, undeclared, verify_case
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.names import did_you_mean
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.platform import platform_of
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec


@dataclass(frozen=True)
class Finding:
    """The finding of one check on one kernel: a row of the table.

    Attributes:
        kernel, operator: names of the kernel and of its operator.
        check: the name of the check, one of `CHECKS`.
        status: FAILED if any case failed, else PASSED if any case ran, UNREACHED if no case selects the kernel, else SKIPPED.
        detail: the fault, or the number of checked calls, or the reason why no call was checked.
        results: the results, one per case.
        shrunk: the smallest call with the fault; None if no smaller call was searched for.
        seconds: duration of the check in seconds; 0 for a check that only reads the results of the check ``values``.
    """

    kernel: str
    operator: str
    check: str
    status: Status
    detail: str
    results: tuple[CaseResult, ...] = ()
    shrunk: Shrunk | None = None
    seconds: float = 0.0

    @property
    def wrong(self) -> bool:
        return self.status.wrong

    def __str__(self) -> str:
        return f"{self.kernel}: {self.check}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the finding as plain values, for JSON."""
        smallest = None if self.shrunk is None else self.shrunk.to_dict()
        told = plain_fields(replace(self, shrunk=None))
        del told["shrunk"]
        return {**told, "smallest": smallest}


# _COMPARED: checks that read the results of the comparison with the reference, each with the kinds of faults (`Fault.check`) that
# this check reports. _RUN: checks that run the kernel themselves.
_COMPARED = {
    "values": ("values", "error"),
    "out=": ("out=",),
    "inputs unchanged": ("inputs",),
    "outputs of their own": ("memory",),
    "determinism": ("determinism",),
}
_RUN: dict[str, Callable[[CaseSpace], Iterator[CaseResult]]] = {
    "trait edges": checks.trait_edges,
    "option edges": checks.option_edges,
    "nothing to do": checks.empties,
    "unused values": checks.unused_values,
    "bounds": checks.bounds,
    "strides": checks.layouts,
    "no waiting": checks.waits,
    "graph replay": checks.graphs,
    "batch invariance": checks.batch_invariance,
}
CHECKS = (*_COMPARED, *_RUN)


@dataclass
class Options:
    """Options of the conformance checks: which checks run, on which cases, and for how long.

    Attributes:
        large: whether to also run the cases that are sized for a GPU.
        repeat: number of runs of every kernel that must give the same bits. None: two runs, and only for kernels tagged
            ``determinism``.
        seed: seed of the inputs.
        shrink_seconds: time limit of the search for a smaller call, per failing kernel and check; 0 for no search.
        leave_out: names of checks to skip because they would take too long. The comparison with the reference always runs.
        begin: called before each step, with its name.
    """

    large: bool = False
    repeat: int | None = None
    seed: int = 0
    shrink_seconds: float = 10.0
    leave_out: frozenset[str] = frozenset()
    begin: Callable[[str], None] = field(default=lambda step: None)


def conformance(
    specs: Iterable[KernelSpec] | None = None,
    device: torch.device | str | None = None,
    *,
    plugin: str | None = None,
    options: Options | None = None,
) -> list[Finding]:
    """Runs all conformance checks on the given kernels.

    Args:
        specs: the kernels; the plugin's kernels if not given.
        device: the device; `tokenspeed_kernel.workbench.numerics.default_device` if not given.
        plugin: the name of a loaded plugin; used if ``specs`` is not given.
        options: the extent of the checks.

    Returns:
        One finding per kernel and check, in order. Faults of kernels are findings, and raise no error.

    Raises:
        LookupError: no plugin of that name is loaded.
    """
    where = default_device() if device is None else torch.device(device)
    if specs is None:
        specs = plugin_kernels(plugin)
    return [finding for spec in specs for finding in conform(spec, where, options or Options())]


def plugin_kernels(plugin: str | None) -> list[KernelSpec]:
    """Returns the kernels of a loaded plugin. Raises LookupError with the reason if the plugin is not loaded."""
    loaded = {info.name: info for info in list_plugins()}
    if plugin in loaded:
        return [spec for spec in KernelRegistry.get().list_kernels() if spec.name in loaded[plugin].kernel_names]
    for failure in plugin_failures():
        if failure.name == plugin:
            raise LookupError(f"plugin {plugin} failed to load: {failure.error}")
    others = did_you_mean(str(plugin), loaded, repr) or f"; loaded are: {', '.join(sorted(loaded)) or 'none'}"
    raise LookupError(f"no plugin {plugin!r} is loaded{others}")


def conform(spec: KernelSpec, device: torch.device, options: Options, cases: Sequence[Case] | None = None) -> list[Finding]:
    """Runs all conformance checks on one kernel.

    Args:
        spec: the kernel.
        device: the device to run on.
        options: the extent of the checks.
        cases: the cases to run and vary. By default all cases of the operator; then at least one of them must select the kernel.
    """
    if (wrong := undeclared(spec)) is not None:
        return [Finding(spec.name, spec.operator, "values", wrong.status, wrong.reason)]
    op = get_operator(spec.operator)
    platform = platform_of(device)
    gap = f"{platform.arch} is pretended, nothing launches" if platform.pretended else spec.capability.gap(platform)
    if gap is not None:
        return [Finding(spec.name, spec.operator, check, Status.SKIPPED, f"platform: {gap}") for check in CHECKS]
    whole = cases is None
    if cases is None:
        cases = [case for case in op.all_cases() if options.large or not case.large]
    began = time.monotonic()
    results = []
    for case in cases:
        options.begin(f"{spec.name}: {case.name}")
        results.append(verify_case(spec, case, device, seed=options.seed, repeat=options.repeat))
    if whole and (missed := unreached(spec, results, platform, large=options.large)) is not None:
        first = Finding(spec.name, spec.operator, CHECKS[0], missed.status, missed.reason, (*results, missed))
        left = missed.reason if missed.status is Status.SKIPPED else "no case reaches it"
        return [first, *(Finding(spec.name, spec.operator, check, Status.SKIPPED, left) for check in CHECKS[1:])]
    findings = [_compared(spec, check, kinds, results, options) for check, kinds in _COMPARED.items()]
    findings = [_with_smallest(f, spec, cases, device, options) for f in findings]
    findings[0] = _took(findings[0], time.monotonic() - began)
    loading = next((r for r in results if r.reason.startswith("loading the kernel")), None)
    if loading is not None:
        return [*findings, *(Finding(spec.name, spec.operator, c, Status.SKIPPED, "the kernel cannot be loaded") for c in _RUN)]
    space = CaseSpace.of(op, spec, device, [case for case in cases if not case.large], options.seed, large=not whole)
    space.wrong = {result.case for result in results if any(fault.check in checks.RESULTS for fault in result.faults)}
    space.said = {fault.check for result in results for fault in result.faults} - checks.RESULTS
    for check, run in _RUN.items():
        if check in options.leave_out:
            findings.append(Finding(spec.name, spec.operator, check, Status.SKIPPED, "left out"))
            continue
        options.begin(f"{spec.name}: {check}")
        began = time.monotonic()
        findings.append(_took(_found(spec, check, [*run(space)], _why_nothing(check, space)), time.monotonic() - began))
    return findings


def _took(finding: Finding, seconds: float) -> Finding:
    return replace(finding, seconds=round(seconds, 3))


def _compared(spec: KernelSpec, check: str, kinds: tuple[str, ...], results: list[CaseResult], options: Options) -> Finding:
    """Returns the finding of a check that reads the results of the comparison with the reference.

    A case fails this check only if it has a fault of one of the ``kinds``.
    """
    judged = []
    for result in results:
        mine = tuple(fault for fault in result.faults if fault.check in kinds)
        if result.wrong and mine:
            judged.append(replace(result, faults=mine, reason="; ".join(fault.text for fault in mine)))
        elif result.wrong:
            ran = result.status is Status.FAILED or check == "values"
            judged.append(replace(result, status=Status.PASSED if ran else Status.SKIPPED, faults=(), reason=""))
        else:
            judged.append(result)
    op = get_operator(spec.operator)
    unasked = {
        "out=": "" if op.outs else "the operator takes no outputs",
        "determinism": "" if options.repeat or "determinism" in spec.tags else "not tagged determinism; --repeat N asks for it",
    }.get(check, "")
    if unasked:
        return Finding(spec.name, spec.operator, check, Status.SKIPPED, unasked)
    return _found(spec, check, judged, "the kernel is eligible for none of the cases")


def _found(spec: KernelSpec, check: str, results: list[CaseResult], why_nothing: str) -> Finding:
    """Summarises a check's results, one per case, as one finding. ``why_nothing``: the detail if there are no results."""
    wrong = [result for result in results if result.wrong]
    ran = [result for result in results if result.status is not Status.SKIPPED]
    if wrong:
        status, first = Status.FAILED, wrong[0]
        only = only_where(wrong, [result for result in ran if not result.wrong])
        some = f"{len(wrong)} of {len(ran)} calls" + (f", {only}" if only else "")
        detail = f"{some}; {first.case}: {first.reason}"
    elif ran:
        status, detail = Status.PASSED, f"{len(ran)} calls"
        missed = [result.case for result in results if result.status is Status.SKIPPED]
        if missed and check in _RUN:
            detail += f"; not reached: {', '.join(missed)}"
    else:
        reasons = list(dict.fromkeys(result.reason for result in results))
        status, detail = Status.SKIPPED, reasons[0] + (" (and the like)" if len(reasons) > 1 else "") if reasons else why_nothing
    return Finding(spec.name, spec.operator, check, status, detail, tuple(results))


def _why_nothing(check: str, space: CaseSpace) -> str:
    if not space.taken:
        return "the kernel is eligible for none of the small cases"
    if check in ("no waiting", "graph replay") and checks.host_kernel(space):
        return checks.host_kernel(space)
    return {
        "trait edges": "constrains no trait",
        "option edges": "no number or scale that the kernel accepts changes the result",
        "nothing to do": "no case can be emptied",
        "unused values": "every value of the operator's arguments matters",
        "graph replay": "needs a GPU",
        "batch invariance": f"not tagged {checks.BATCH_INVARIANT}",
    }.get(check, "no case passes the comparison with the reference")


def only_where(wrong: Sequence[CaseResult], right: Sequence[CaseResult]) -> str:
    """Describes the trait values that all failing calls share, and that no or few passing calls have; empty if there are none.

    The text ``only where sinks=True`` means that no passing call has this value. ``all with sinks=True`` means that few passing
    calls have this value.
    """
    if not right:
        return ""
    said = []
    shared = []
    for trait, value in wrong[0].traits.items():
        passing = sum(result.traits.get(trait) is True for result in right)
        if (
            value is True
            and all(result.traits.get(trait) is True for result in wrong)
            and 0 < passing < min(len(wrong), len(right) / 3)
        ):
            shared.append(f"{trait}=True")
    for trait in wrong[0].traits:
        bad = {result.traits[trait] for result in wrong if trait in result.traits}
        good = {result.traits[trait] for result in right if trait in result.traits}
        if not bad or not good or bad & good:
            continue
        if len(bad) == 1:
            value = next(iter(bad))
            said.append((not isinstance(value, bool), f"{trait}={value}"))
        elif all(isinstance(v, int) and not isinstance(v, bool) for v in bad | good):
            if min(bad) > max(good):
                said.append((True, f"{trait} is above {max(good)}"))
            elif max(bad) < min(good):
                said.append((True, f"{trait} is below {min(good)}"))
    flags = [text for valued, text in said if not valued]
    if said:
        return "only where " + " and ".join(flags or [text for _, text in said])
    return "all with " + " and ".join(shared) if shared else ""


def _with_smallest(finding: Finding, spec: KernelSpec, cases: Sequence[Case], device: torch.device, options: Options) -> Finding:
    """Searches for the smallest call that has the fault of a finding's first wrong case, and adds this call to the finding.

    Often the first wrong case is already the smallest.
    """
    wrong = [result for result in finding.results if result.wrong and result.faults]
    if not wrong or not options.shrink_seconds:
        return finding
    result = wrong[0]
    case = next(case for case in cases if case.name == result.case)
    options.begin(f"{spec.name}: the smallest call for {finding.check}")
    shrunk = shrink(spec, case, result, device, seed=options.seed, repeat=options.repeat, seconds=options.shrink_seconds)
    return replace(finding, shrunk=shrunk, detail=f"{finding.detail}; smallest: {shrunk.case.make}")


def junit(findings: Sequence[Finding], name: str = "tokenspeed-kernel verify") -> str:
    """Converts findings to JUnit XML for CI systems: one suite per kernel, one test per check."""
    suites = ElementTree.Element("testsuites", name=name)
    for kernel in dict.fromkeys(finding.kernel for finding in findings):
        mine = [finding for finding in findings if finding.kernel == kernel]
        counts = {
            "tests": len(mine),
            "failures": sum(f.wrong for f in mine),
            "errors": 0,
            "skipped": sum(f.status is Status.SKIPPED for f in mine),
        }
        suite = ElementTree.SubElement(suites, "testsuite", name=kernel, time=f"{sum(f.seconds for f in mine):.3f}")
        suite.attrib.update({what: str(count) for what, count in counts.items()})
        for finding in mine:
            test = ElementTree.SubElement(
                suite, "testcase", classname=f"{finding.operator}.{kernel}", name=finding.check, time=f"{finding.seconds:.3f}"
            )
            if finding.wrong:
                failure = ElementTree.SubElement(test, "failure", message=_printable(finding.detail))
                failure.text = _printable("\n\n".join(_long_texts(finding)))
            elif finding.status is Status.SKIPPED:
                ElementTree.SubElement(test, "skipped", message=_printable(finding.detail))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _long_texts(finding: Finding) -> Iterator[str]:
    for result in finding.results:
        if result.wrong:
            yield f"{result.case}: {result.reason}" + (f"\n{result.traceback}" if result.traceback else "")
    if finding.shrunk is not None:
        yield f"the smallest call with this fault:\n{finding.shrunk.reproducer}"


def _printable(text: str) -> str:
    """Removes control characters that XML does not allow."""
    return "".join(c for c in text if c in "\t\n" or c >= " ")

"""Finds kernels that run on no case of their operator. Such a kernel counts as wrong.

Usually the kernel's declaration is wrong. It requires something that no call has, or two things that no call combines. If the
declaration is right, the operator lacks a case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tokenspeed_kernel.workbench.numerics.recipes import request_without_values
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Status, refusal_of, undeclared
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.platform import PlatformInfo
from tokenspeed_kernel_base.spec import KernelSpec

ALL_CASES = "all cases"
# The gates that depend on the kernel's own declaration. All other gates depend on the machine.
_OF_THE_DECLARATION = ("formats", "traits")


def unreached(spec: KernelSpec, results: Sequence[CaseResult], platform: PlatformInfo, *, large: bool) -> CaseResult | None:
    """Returns a result for a kernel that ran on no case of its operator. Returns None if the kernel ran on a case, or may run on a
    case on another machine.

    Args:
        spec: the kernel's declaration.
        results: the results of all of the operator's cases, or of all small ones.
        platform: the platform of the results.
        large: whether the results include the large cases.

    Returns:
        UNREACHED with the reasons; SKIPPED if the kernel is eligible only for large cases, which were not run; ERROR if its
        operator is not declared.
    """
    if (wrong := undeclared(spec)) is not None:
        return wrong
    if any(result.gate not in _OF_THE_DECLARATION for result in results):
        return None
    op = get_operator(spec.operator)
    rest = [] if large else [case for case in op.all_cases() if case.large]
    reaching = [case for case in rest if _may_take(spec, case, platform)]
    if reaching:
        said = f"only large cases reach it, {len(reaching)} of {len(rest)}: --large runs them"
        return CaseResult(spec.name, spec.operator, ALL_CASES, Status.SKIPPED, said)
    why = [*_reasons(results)] if results else [f"{op} has none"]
    said = f"no case of {op} reaches it: {'; '.join(why)}. Correct its declaration, or add a case to the operator"
    return CaseResult(spec.name, spec.operator, ALL_CASES, Status.UNREACHED, said)


def _reasons(results: Sequence[CaseResult]) -> list[str]:
    """Returns why cases were skipped: per gate the number of cases, and their most common reason."""
    reasons = []
    for gate, count in Counter(result.gate for result in results).most_common():
        ((most, same),) = Counter(result.reason for result in results if result.gate == gate).most_common(1)
        others = " (and the like)" if same < count else ""
        reasons.append(f"{count} of {len(results)} fail the gate {most}{others}")
    return reasons


def _may_take(spec: KernelSpec, case: Case, platform: PlatformInfo) -> bool:
    """Returns whether a kernel's declaration accepts a case; also True if that depends on the values of the case's tensors."""
    op = get_operator(spec.operator)
    found = request_without_values(op, case)
    return found is None or refusal_of(op, spec, replace(found[0], platform=platform)) is None

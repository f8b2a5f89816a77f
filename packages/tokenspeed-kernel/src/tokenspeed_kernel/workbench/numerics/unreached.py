"""Kernels that no case reaches. A kernel that nothing runs is not right, whatever its declaration says.

Most often the declaration is wrong: it asks for what no call has, or for two things that no call has together. Else the operator
lacks a case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tokenspeed_kernel.workbench.numerics.recipes import asked_without_values
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Status, refusal_of, undeclared
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.platform import PlatformInfo
from tokenspeed_kernel_base.spec import KernelSpec

ALL_CASES = "all cases"
# The gates at which a kernel's own declaration keeps it from a case. What else skips a case is of the machine.
_OF_THE_DECLARATION = ("formats", "traits")


def unreached(spec: KernelSpec, results: Sequence[CaseResult], platform: PlatformInfo, *, large: bool) -> CaseResult | None:
    """What to say of a kernel that none of its operator's cases reached; None where one did, or may on another machine.

    Args:
        spec: the kernel's declaration.
        results: of all of the operator's cases, or of all small ones.
        platform: where they were run.
        large: whether the large ones were among them.

    Returns:
        UNREACHED with the reasons; SKIPPED where large cases reach it that were not run; ERROR where it has no operator.
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
    """Why cases were skipped: for each gate how many, and the reason of most of them."""
    reasons = []
    for gate, count in Counter(result.gate for result in results).most_common():
        ((most, same),) = Counter(result.reason for result in results if result.gate == gate).most_common(1)
        others = " (and the like)" if same < count else ""
        reasons.append(f"{count} of {len(results)} fail the gate {most}{others}")
    return reasons


def _may_take(spec: KernelSpec, case: Case, platform: PlatformInfo) -> bool:
    """Whether a kernel's declaration lets it take a case, as far as can be told without drawing values."""
    op = get_operator(spec.operator)
    found = asked_without_values(op, case)
    return found is None or refusal_of(op, spec, replace(found[0], platform=platform)) is None

"""Summarises the faults among many results in a short text, for tests whose failures are read in a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed_kernel.workbench.numerics.conformance import Finding
from tokenspeed_kernel.workbench.numerics.verify import CaseResult

_MOST, _REASON, _TRACEBACK = 3, 300, 1500  # most reasons; most characters of a reason; most characters of the traceback


def summary(results: Iterable[CaseResult | Finding]) -> str:
    """Returns a text: how many results are wrong, the reasons of the first three, and the end of the first traceback.

    The text is empty if no result is wrong. It has a few thousand characters at most, whatever went wrong.
    """
    every = [*results]
    wrong = [result for result in every if result.wrong]
    if not wrong:
        return ""
    lines = [f"{len(wrong)} of {len(every)} wrong"]
    for result in wrong[:_MOST]:
        what, why = (result.check, result.detail) if isinstance(result, Finding) else (result.case, result.reason)
        lines.append(f"  {result.kernel}, {what}: {_shortened(why)}")
    if len(wrong) > _MOST:
        lines.append(f"  ... and {len(wrong) - _MOST} more")
    traces = (one.traceback for result in wrong for one in (result.results if isinstance(result, Finding) else (result,)))
    trace = next(filter(None, traces), "").rstrip()
    if trace:
        lines.append(trace if len(trace) <= _TRACEBACK else f"...{trace[-_TRACEBACK:]}")
    return "\n".join(lines)


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _REASON else f"{reason[:_REASON]}..."


def assert_none_wrong(results: Iterable[CaseResult | Finding]) -> None:
    """Raises an `AssertionError` with the `summary` if any result is wrong. Skipped results are not wrong."""
    __tracebackhide__ = True  # makes pytest show the caller's line
    said = summary(results)
    if said:
        raise AssertionError(said)

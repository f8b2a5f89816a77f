"""Formats rows of receipts as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tokenspeed_kernel.workbench.receipts.rows import Passed, Row
from tokenspeed_kernel_base.traits import format_traits

WIDTH = 100
_PHASES = {
    "decode": "a decode step, by sequences",
    "prefill": "a prefill, by prompt tokens",
    "process": "the calls of this process",
}


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the text lines of one phase's rows. A line names each call; below it, each of its rows has a line with sizes, kernel
    and time, followed by the reasons."""
    cells = [(sizes_of(row), row.kernel or "NO KERNEL", times_of(row)) for row in rows]
    sizes, kernels = max(len(cell[0]) for cell in cells), max(len(cell[1]) for cell in cells)
    yield _PHASES.get(rows[0].phase, rows[0].phase)
    named = ""
    for row, (size, kernel, time) in zip(rows, cells, strict=True):
        name = call_of(row)
        if name != named:
            yield from wrapped(name + f"  x {row.times}" * (row.times > 1), "  ", "      ")
            named = name
        yield from wrapped(f"{size:<{sizes}}  {kernel:<{kernels}}  {time}".rstrip(), "    ", "        ")
        for reason in reasons_of(row):
            yield from wrapped(reason, "        ", "            ")
        if not row.kernel:
            yield from wrapped(row.reason, "        ")


def call_of(row: Row) -> str:
    """Describes the call of a row: the operator, and either the call's role or its formats and traits."""
    traits = {name: value for name, value in row.traits.items() if value not in (False, None)}
    details = row.role or ", ".join(filter(None, (row.formats, format_traits(traits))))
    return f"{row.operator} ({details})" if details else row.operator


def reasons_of(row: Row) -> list[str]:
    """Returns one phrase per kernel that was not selected: its name, and why."""
    return [f"not {passed.kernel}: {why_not(passed)}" for passed in row.passed]


def why_not(passed: Passed) -> str:
    """Returns a phrase that says why a kernel was not selected."""
    return f"{passed.gate}: {passed.reason}" if passed.gate else f"eligible, behind in {passed.rank} ({passed.reason})"


def sizes_of(row: Row) -> str:
    """Formats the sizes of a row: ``"1, 4"``, or ``"1 to 64"`` for more than two; ``"all"`` if there are none."""
    sizes = row.sizes
    return "all" if not sizes else f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 2 else ", ".join(map(str, sizes))


def times_of(row: Row) -> str:
    """Formats a row's predicted times for its smallest and its largest size: ``"at least 3.1 to 12 us (roofline)"``; empty if there
    are none."""
    known = [(us, by) for us, by in zip(row.predicted_us, row.predicted_by, strict=True) if us is not None]
    if not known:
        return ""
    (low, _), (high, _) = known[0], known[-1]
    span = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
    sources = dict.fromkeys(by for _, by in known)
    return f"{'at least ' * ('roofline' in sources)}{span} us ({'/'.join(sources)})"


def wrapped(text: str, first: str = "", further: str | None = None) -> list[str]:
    """Wraps a text into lines. The first line begins with ``first``, the others with ``further`` or, by default, ``first``."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if further is None else further,
        break_on_hyphens=False,
    )

"""Tables of a launch's counters, for a terminal. Needs rich."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.markup import escape

from kernel_emulation.report import headline, new_table, number
from sm90_emulator.machine import LaunchReport


def stats(report: LaunchReport, top: int) -> RenderableType:
    """Returns all statistics of a launch that was executed with counters."""
    assert report.counts is not None
    totals = new_table("", "", "", left=(0, 1))
    lanes = report.thread_instructions / max(report.instructions, 1)
    totals.add_row("warp instructions", f"{number(report.instructions)}, of {lanes:.3g} lanes each")
    totals.add_row("wgmma", f"{number(report.products)} of a warp")
    totals.add_row("bulk copies", f"{number(report.copied_bytes)} bytes to shared memory")

    statements: Counter[int] = Counter()
    threads: Counter[int] = Counter()
    texts = {}
    for statement, (warps, active) in zip(report.program.origins, report.counts.tolist(), strict=True):
        # A statement may consist of several operations of the machine, all executed by the same warps.
        statements[id(statement)] = max(statements[id(statement)], warps)
        threads[id(statement)] = max(threads[id(statement)], active)
        texts[id(statement)] = statement
    kinds: Counter[str] = Counter()
    for key, count in statements.items():
        kinds[texts[key].name.partition(".")[0]] += count
    total = max(sum(kinds.values()), 1)
    by_kind = new_table("Instructions by kind", "kind", "executed", "share")
    for kind, count in kinds.most_common(top):
        by_kind.add_row(kind, number(count), f"{count / total:.1%}")
    hot = new_table("Most executed", "instruction", "executed", "share", "lanes each")
    for key, count in statements.most_common(top):
        if count:
            text = " ".join(texts[key].text.split())
            hot.add_row(escape(text), number(count), f"{count / total:.1%}", f"{threads[key] / count:.3g}")
    return Group(headline(report), totals, by_kind, hot)

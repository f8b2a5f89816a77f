"""The tables of ``bench``: one row per kernel and case, backends side by side, and comparisons of two reports."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed_kernel.workbench.benchmark.compare import Comparison, Ratio, Verdict, ratio_of
from tokenspeed_kernel.workbench.benchmark.results import Report, Row

ROW_COLUMNS = ["kernel", "case", "status", "median us", "p10", "p90", "TFLOP/s", "GB/s", "of roofline", "launch us", "detail"]
DIFFERENCE_COLUMNS = ["kernel", "case", "verdict", "A us", "B us", "B / A", "interval", "detail"]


def row_cells(row: Row) -> list[str]:
    """Returns a report row's cells for the columns `ROW_COLUMNS`."""
    if row.timing is None:
        return [row.kernel, row.case, row.status, *[""] * 7, row.reason]
    timing = row.timing
    times = [f"{value:.2f}" for value in (timing.median_us, timing.p10_us, timing.p90_us)]
    rates = ["" if value is None else f"{value:.4g}" for value in (row.tflops, row.gb_per_s)]
    share = "" if row.share is None else f"{row.share.part:.0%} {row.share.bound}"
    detail = "; ".join([f"{timing.repeats} repeats", *row.warnings])
    return [row.kernel, row.case, row.status, *times, *rates, share, _launch(row), detail]


def _launch(row: Row) -> str:
    """Formats the launch overhead: the time that launching adds to the device time, if measured, and the host time of a call."""
    if row.launch is None:
        return ""
    if row.launch.graph_us is None:
        return f"{row.launch.host_us:.2f} host"
    return f"{row.launch.event_us - row.launch.graph_us:.2f}, {row.launch.host_us:.2f} host"


def machine_lines(report: Report) -> list[str]:
    """Returns lines of text that describe a report's device and its roofline."""
    lines = []
    if report.roofline is not None:
        roofline = report.roofline
        rates = ", ".join(f"{name} {rate:.4g}" for name, rate in roofline.tflops.items())
        lines.append(
            f"this device copies {roofline.copy_gb_per_s:.4g} GB/s, reads {roofline.read_gb_per_s:.4g} GB/s, and computes "
            f"GEMMs at TFLOP/s: {rates}" + f" (measured {roofline.date})" * bool(roofline.date)
        )
    unserved = sum(row.status == "skipped" for row in report.rows)
    metadata = report.metadata
    lines.append(f"{metadata.device}, torch {metadata.torch}, {metadata.date}" + f"; {unserved} skipped" * bool(unserved))
    return lines


# -- side by side -------------------------------------------------------------------------------------------------------------


def side_by_side(rows: Sequence[Row], solutions: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Returns a table's columns and rows: one row per case, and one column per backend with the median time of its fastest kernel.

    All backends but the first also show their time relative to the first backend's: 0.5 is half the time. A ``~`` means that the
    rounds show no significant difference. A case for which no backend is eligible is left out.
    """
    columns = ["operator", "case", *(f"{solution} us" for solution in solutions), "detail"]
    cells = []
    for operator, case in dict.fromkeys((row.operator, row.case) for row in rows):
        found = [row for row in rows if (row.operator, row.case) == (operator, case)]
        best = [_fastest([row for row in found if row.solution == solution]) for solution in solutions]
        if all(row is None or row.status == "skipped" for row in best):
            continue
        details = [f"{row.kernel}: {row.reason}" for row in best if row is not None and row.timing is None]
        details += [f"{row.kernel}: {warning}" for row in best if row is not None for warning in row.warnings]
        cells.append([operator, case, *(_beside(row, best[0]) for row in best), "; ".join(details)])
    return columns, cells


def _fastest(rows: Sequence[Row]) -> Row | None:
    """Returns the fastest measured row. If no row was measured, returns a failed row if there is one, else a skipped row, which
    states the reason.
    """
    timed = [(row.timing.median_us, index) for index, row in enumerate(rows) if row.timing is not None]
    if timed:
        return rows[min(timed)[1]]
    return next((row for row in rows if row.status != "skipped"), rows[0] if rows else None)


def _beside(row: Row | None, first: Row | None) -> str:
    if row is None:
        return "-"
    if row.timing is None:
        return row.status
    time = f"{row.timing.median_us:.2f}"
    if first is None or first is row or first.timing is None:
        return time
    before, after = ([of_one.median_us for of_one in each.rounds] for each in (first.timing, row.timing))
    ratio = ratio_of(before, after) if before and after else Ratio(row.timing.median_us / first.timing.median_us)
    same = ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high
    return f"{time} ({'~' * same}{ratio.value:.2f})"


# -- two reports --------------------------------------------------------------------------------------------------------------


def difference_cells(comparison: Comparison) -> list[list[str]]:
    """Returns a comparison's cells for the columns `DIFFERENCE_COLUMNS`: broken rows first, then by verdict, the largest change
    first.
    """
    order = [Verdict.SLOWER, Verdict.FASTER, Verdict.SAME, Verdict.UNCLEAR]
    cells = [[row.kernel, row.case, row.status, "", "", "", "", row.reason] for row in comparison.broken]
    for found in sorted(comparison.differences, key=lambda d: (order.index(d.verdict), -max(d.ratio.value, 1 / d.ratio.value))):
        times = [f"{time_us:.2f}" for time_us in (found.a_us, found.b_us)]
        cells.append([found.kernel, found.case, found.verdict.value, *times, *_ratio_cells(found.ratio), found.note])
    return cells


def _ratio_cells(ratio: Ratio) -> list[str]:
    interval = "" if ratio.low is None or ratio.high is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
    return [f"{ratio.value:.3f}", interval]


def comparison_lines(comparison: Comparison) -> list[str]:
    """Returns lines of text that summarise a comparison of two reports."""
    counts = [(len(comparison.broken), "broken"), *((comparison.count(verdict), verdict.value) for verdict in Verdict)]
    said = ", ".join(f"{count} {what}" for count, what in counts if count) or "no row is in both"
    lines = [f"{said}; by {comparison.threshold:.3g} and more, at {comparison.confidence:.3g} confidence"]
    if comparison.mean is not None:
        value, interval = _ratio_cells(comparison.mean)
        lines.append(f"geometric mean of B / A: {value}" + f" ({interval})" * bool(interval))
    for name, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        if only:
            lines.append(
                f"{len(only)} rows were measured in {name} only: {', '.join(f'{k} {c}' for _, c, k in only[:3])}"
                + ", ..." * (len(only) > 3)
            )
    return [*lines, *comparison.notes]

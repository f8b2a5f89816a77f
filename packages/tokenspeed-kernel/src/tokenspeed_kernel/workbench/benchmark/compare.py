"""Compares two reports. Pairs their rows, and gives each pair a confidence interval and a verdict.

The comparison uses rounds, not single times. Consecutive times are correlated (clocks, heat, other load). So a thousand times
contain less information than a thousand independent observations. An interval that assumed independence would report every drift as
a difference. A round's median is one observation. The rounds of one row are spread over the whole run, so that drift increases
their spread.

The interval is that of Hodges and Lehmann (1963). The estimate is the median of all ratios between a round of A and a round of B.
The number of ratios to trim at either end follows exactly from the distribution of the Mann-Whitney U (1947). The interval assumes
nothing about the distribution of the noise. With seven rounds per side and 95% confidence, the interval remains valid if other load
spoils one round. A t interval would not. The interval needs at least four rounds per side, or three on one side and five on the
other. Bootstrapping seven rounds would claim more precision than they have.

With many rows, some intervals exclude 1 by chance. At 95%, these are about 3 of 58 rows even if nothing changed. So verdicts
account for the number of rows. Holm's procedure (1979) bounds, at 5%, the probability that any row of an unchanged program is
called slower or faster. The bound holds for any number of rows and any dependence between them. Holm's procedure needs a p-value
per row. The p-value of U is exact. With seven rounds per side the p-value cannot be below 1 in 1716, but with a hundred rows Holm's
procedure requires 1 in 2000. If every round of one side is slower than every round of the other, Student's t-test of the logarithms
may lower the p-value. Only this t-test assumes normal noise. With heavier tails the t-test misses differences rather than inventing
them.

Rounds do not show differences between whole runs, such as a hotter machine or other load. The threshold allows for these
differences. In addition, a reference workload is timed before every round. The verdict is `UNCLEAR` if the reference workload
changed too, and the remaining difference is below the threshold. The machine may then be the cause. The best method is to run both
sides alternately, several times, and to merge the runs of each side (`appended`). Then the rounds of one side are as far apart in
time as the rounds of different sides.
"""

from __future__ import annotations

import enum
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenspeed_kernel.workbench.benchmark.results import WRONG, Report, Row

THRESHOLD, CONFIDENCE = 0.03, 0.95
# If the reference workload's time changes by more than this fraction between two runs, the comparison notes that the machine
# changed.
_MACHINE = 0.02


class Verdict(str, enum.Enum):
    """The verdict on one row of two reports: how B's time differs from A's."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "no difference"
    UNCLEAR = "unclear"  # too few rounds to say, or the machine changed as well


@dataclass(frozen=True)
class Ratio:
    """B's time divided by A's: the estimate and its confidence interval. The interval is None with too few rounds."""

    value: float
    low: float | None = None
    high: float | None = None

    def verdict(self, threshold: float) -> Verdict:
        """Returns slower or faster if the confidence interval excludes 1 and the ratio is at least the threshold away from 1."""
        if self.low is None or self.high is None:
            return Verdict.UNCLEAR
        if self.low > 1 and self.value >= 1 + threshold:
            return Verdict.SLOWER
        if self.high < 1 and self.value <= 1 / (1 + threshold):
            return Verdict.FASTER
        return Verdict.SAME

    def hidden(self, threshold: float) -> float | None:
        """Returns the largest relative difference that the confidence interval does not exclude; None if that difference is within
        the threshold.
        """
        if self.low is None or self.high is None:
            return None
        most = max(self.high, 1 / self.low) - 1
        return most if most > threshold else None


@dataclass(frozen=True)
class Difference:
    """The comparison of a row that both reports have.

    ``chance``: the probability that any row of the reports shows a difference this clear if nothing changed; None without rounds.
    """

    operator: str
    case: str
    kernel: str
    a_us: float
    b_us: float
    ratio: Ratio
    verdict: Verdict
    note: str = ""
    chance: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The comparison of two reports, A and B.

    Attributes:
        differences: the rows that were measured in both, in A's order.
        broken: rows of B that failed, but were measured in A.
        only_a, only_b: operator, case and kernel of the rows that only one report has.
        mean: the geometric mean of the ratios; None if no row is in both reports.
        threshold, confidence: the parameters of the verdicts.
        notes: other differences between the reports.
    """

    differences: tuple[Difference, ...]
    broken: tuple[Row, ...]
    only_a: tuple[tuple[str, str, str], ...]
    only_b: tuple[tuple[str, str, str], ...]
    mean: Ratio | None
    threshold: float
    confidence: float
    notes: tuple[str, ...]

    @property
    def worse(self) -> bool:
        """Whether any row became slower, or was measured in A and failed in B."""
        return bool(self.broken) or any(difference.verdict is Verdict.SLOWER for difference in self.differences)

    def count(self, verdict: Verdict) -> int:
        return sum(difference.verdict is verdict for difference in self.differences)

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain values, for JSON."""
        return {**asdict(self), "broken": [asdict(row) for row in self.broken], "worse": self.worse}


def compare(a: Report, b: Report, *, threshold: float = THRESHOLD, confidence: float = CONFIDENCE) -> Comparison:
    """Pairs the rows of two reports by operator, case and kernel.

    Args:
        a, b: the reports before and after.
        threshold: smaller differences are ignored: 0.03 is 3%.
        confidence: the confidence of each interval; also the probability that no row of an unchanged program is called slower or
            faster. 0.95 is 95%.

    Raises:
        ValueError: the threshold is negative, or the confidence is not between 0 and 1.
    """
    if threshold < 0 or not 0 < confidence < 1:
        raise ValueError(f"threshold must be >= 0 and confidence between 0 and 1, got {threshold} and {confidence}")
    timed_a, timed_b = ({row.key: row for row in report.rows if row.timing is not None} for report in (a, b))
    rows_b = {row.key: row for row in b.rows}
    both = [key for key in timed_a if key in timed_b]
    chances = adjusted([p_value(_rounds(timed_a[key]), _rounds(timed_b[key])) for key in both])
    broken = tuple(rows_b[key] for key in timed_a if key in rows_b and rows_b[key].status in WRONG)
    gone = {row.key for row in broken}
    return Comparison(
        differences=tuple(
            _difference(timed_a[key], timed_b[key], chance, threshold, confidence)
            for key, chance in zip(both, chances, strict=True)
        ),
        broken=broken,
        only_a=tuple(key for key in timed_a if key not in timed_b and key not in gone),
        only_b=tuple(key for key in timed_b if key not in timed_a),
        mean=_mean([(timed_a[key], timed_b[key]) for key in both], confidence),
        threshold=threshold,
        confidence=confidence,
        notes=tuple(_notes(a, b)),
    )


def ratio_of(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """Returns the ratio of B's times to A's, given one positive time per round.

    Example:
        >>> ratio_of([10.0, 10.1, 9.9, 10.0], [11.0, 11.1, 10.9, 11.0])
        Ratio(value=1.1, low=1.0792079207920793, high=1.121212121212121)
    """
    ratios = sorted(after / before for before in a for after in b)
    cut = _cut(len(a), len(b), confidence)
    # The median of logarithms, so that exchanging A and B gives exactly the inverse ratio.
    middle = math.exp(statistics.median(map(math.log, ratios)))
    return Ratio(middle) if cut is None else Ratio(middle, ratios[cut], ratios[-1 - cut])


@functools.cache
def _cut(n: int, m: int, confidence: float) -> int | None:
    """Returns how many of the n * m sorted ratios to trim at each end, so that the rest spans the confidence interval.

    Returns None if even the interval of all ratios does not reach the confidence.
    """
    arrangements = _arrangements(n, m)
    outside, cut = 0, None
    for beyond, count in enumerate(arrangements):
        outside += count
        if 2 * outside > (1 - confidence) * sum(arrangements):
            break
        cut = beyond
    return cut


def _arrangements(n: int, m: int) -> list[int]:
    """Returns, for U = 0, 1, ..., n * m, the number of orderings of n and m items that have this Mann-Whitney U.

    These are the coefficients of the Gaussian binomial.
    """
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            counts[u] -= counts[u - m - i]
        for u in range(i, n * m + 1):
            counts[u] += counts[u - i]
    return counts


def p_value(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Returns the two-sided probability that rounds of equally fast kernels differ at least this much; None without rounds.

    Example:
        >>> round(p_value([10.0, 10.1, 9.9, 10.0], [10.0, 11.1, 10.9, 11.0]), 3)
        0.114
    """
    if not a or not b:
        return None
    below = sum((before > after) + (before == after) / 2 for before in a for after in b)
    arrangements = _arrangements(len(a), len(b))
    reached = math.floor(min(below, len(a) * len(b) - below))
    exact = min(1.0, 2 * sum(arrangements[: reached + 1]) / sum(arrangements))
    return min(exact, _t_test(a, b)) if below in (0, len(a) * len(b)) else exact


def _t_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the two-sided p-value of Student's t-test of the logarithms of both sides' round times."""
    logs = [list(map(math.log, side)) for side in (a, b)]
    freedom = len(a) + len(b) - 2
    squares = sum(statistics.variance(side) * (len(side) - 1) for side in logs if len(side) > 1)
    if not freedom or not squares:
        return 1.0 if not freedom else 0.0
    error = math.sqrt(squares / freedom * (1 / len(a) + 1 / len(b)))
    return _beyond_t(abs(statistics.fmean(logs[1]) - statistics.fmean(logs[0])) / error, freedom)


def _beyond_t(t: float, freedom: int) -> float:
    """Returns the probability that Student's t exceeds ``t`` in magnitude (Abramowitz and Stegun, 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for k in range(2 + odd, freedom, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    within = 2 / math.pi * (angle + sine * total * (freedom > 1)) if odd else sine * total
    return max(1.0 - within, 0.0)


def adjusted(p_values: Sequence[float | None]) -> list[float | None]:
    """Returns Holm's adjusted p-values: the probability of a p-value this small among all rows, if nothing changed in any row.

    Example:
        >>> adjusted([0.01, 0.04, None, 0.02])
        [0.03, 0.04, None, 0.04]
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    found: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        found[index] = largest
    return found


def _rounds(row: Row) -> list[float]:
    assert row.timing is not None
    return [of_one.median_us for of_one in row.timing.rounds]


def _difference(a: Row, b: Row, chance: float | None, threshold: float, confidence: float) -> Difference:
    assert a.timing is not None
    assert b.timing is not None
    rounds_a, rounds_b = _rounds(a), _rounds(b)
    if rounds_a and rounds_b:
        ratio = ratio_of(rounds_a, rounds_b, confidence)
    else:
        ratio = Ratio(b.timing.median_us / a.timing.median_us)
    notes = []
    verdict, hidden = ratio.verdict(threshold), ratio.hidden(threshold)
    if verdict is Verdict.UNCLEAR:
        notes.append(f"{len(rounds_a)} and {len(rounds_b)} rounds are too few to say")
    elif verdict is Verdict.SAME and hidden is not None:
        notes.append(f"up to {hidden:.0%} would not show")
    elif verdict is not Verdict.SAME and chance is not None and chance > 1 - confidence:
        notes.append(f"{verdict.value} by {_percent(ratio)}, as {chance:.0%} of comparisons with so many rows find by chance")
        verdict = Verdict.SAME
    elif verdict in (Verdict.FASTER, Verdict.SLOWER) and a.reference_us and b.reference_us:
        machine = ratio_of(a.reference_us, b.reference_us, confidence)
        rest = Ratio(ratio.value / machine.value, ratio.low, ratio.high)
        if machine.verdict(0.0) is verdict and rest.verdict(threshold) is not verdict:
            notes.append(f"{verdict.value} by {_percent(ratio)}, but so was the machine, by {_percent(machine)}")
            verdict = Verdict.UNCLEAR
    notes += [f"{name}: {warning}" for name, row in (("A", a), ("B", b)) for warning in row.warnings]
    return Difference(*a.key, a.timing.median_us, b.timing.median_us, ratio, verdict, "; ".join(notes), chance)


def _percent(ratio: Ratio) -> str:
    return f"{max(ratio.value, 1 / ratio.value) - 1:.1%}"


def _mean(pairs: Sequence[tuple[Row, Row]], confidence: float) -> Ratio | None:
    """Returns the geometric mean of the rows' ratios of B to A, with its interval.

    Round i of the mean combines round i of all rows. So drift that all rows share makes the rounds of the mean differ, and widens
    the interval.
    """
    if not pairs:
        return None
    rounds = [(_rounds(a), _rounds(b)) for a, b in pairs]
    if not all(of_a and of_b for of_a, of_b in rounds):
        logs = [math.log(b.timing.median_us / a.timing.median_us) for a, b in pairs if a.timing and b.timing]
        return Ratio(math.exp(statistics.fmean(logs)))
    sides = ([of_a for of_a, _ in rounds], [of_b for _, of_b in rounds])
    means = [[statistics.geometric_mean(times) for times in zip(*side, strict=False)] for side in sides]
    return ratio_of(means[0], means[1], confidence)


def _notes(a: Report, b: Report) -> list[str]:
    notes = [
        f"{name}: {before or 'unknown'} in A, {after or 'unknown'} in B"
        for name in ("device", "driver", "python", "torch", "triton")
        if (before := getattr(a.metadata, name)) != (after := getattr(b.metadata, name))
    ]
    if a.method != b.method:
        notes.append(f"timed differently: {_words(a)} in A, {_words(b)} in B")
    times = [[time_us for row in report.rows for time_us in row.reference_us] for report in (a, b)]
    if all(times) and a.metadata.device == b.metadata.device:
        change = statistics.median(times[1]) / statistics.median(times[0]) - 1
        if abs(change) > _MACHINE:
            notes.append(f"the machine itself was {abs(change):.1%} {'slower' if change > 0 else 'faster'} in B")
    return notes


def _words(report: Report) -> str:
    method = report.method
    if method is None:
        return "an old file, which does not say how"
    graph = f", {method.graph_calls} calls in a graph" * bool(method.graph_calls)
    copies = f", {method.copies} copies in turn" * (method.copies > 1)
    return f"{method.cache} caches{graph}{copies}, {method.rounds} rounds of {method.budget_s / method.rounds:.3g} s"

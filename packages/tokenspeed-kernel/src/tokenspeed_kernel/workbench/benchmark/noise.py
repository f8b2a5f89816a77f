"""Can a measurement be trusted? How its times spread and drift, whether they fall into two groups, and what the machine did."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_kernel.workbench.benchmark.machine import GpuState
from tokenspeed_kernel.workbench.benchmark.timing import Timing

# Beyond these, a difference of a few percent means nothing. A quiet GPU stays below a tenth of them.
_SPREAD = 0.10
_DRIFT = 0.03
_BETWEEN_ROUNDS = 0.05
_MACHINE = 0.03
# Two groups of times count as two if each holds a tenth of all times and their means are so many of their deviations apart
# (Ashman, Bird and Zepf, 1994, call it D and count from 2; the halves of a normal distribution have 2.65, of a uniform one 3.46).
_SEPARATION = 4.0
_MINORITY = 0.10
_APART = 0.05
# Fewer samples show no pattern.
_FEWEST = 12


@dataclass(frozen=True)
class Noise:
    """How times vary, each number as a part of the median.

    Attributes:
        spread: from the 10th to the 90th percentile within a round; the median of the rounds.
        drift: from the first to the last third of a round, signed; the median of the rounds.
        between_rounds: from the fastest to the slowest round.
        modes_apart: the distance of two groups into which the times fall, in most rounds; 0 if they are one group.
    """

    spread: float
    drift: float
    between_rounds: float
    modes_apart: float


def noise_of(timing: Timing) -> Noise | None:
    """None if no samples were kept."""
    rounds = [of_one.samples_us for of_one in timing.rounds if len(of_one.samples_us) > 1]
    if not rounds or timing.median_us <= 0:
        return None
    medians = [of_one.median_us for of_one in timing.rounds]
    return Noise(
        spread=statistics.median(map(_spread, rounds)),
        drift=statistics.median(map(_drift, rounds)),
        between_rounds=(max(medians) - min(medians)) / timing.median_us,
        modes_apart=_modes_apart(rounds),
    )


def warnings_of(
    timing: Timing, states: Sequence[GpuState] = (), reference_us: Sequence[float] = (), usual_us: float | None = None
) -> tuple[str, ...]:
    """Why a measurement may not be trusted, in words.

    Args:
        timing: the measurement.
        states: of the GPU while it ran.
        reference_us: what the reference workload took just before each round.
        usual_us: what it takes on this machine; None if that is not known.
    """
    found = []
    noise = noise_of(timing)
    if noise is not None:
        if noise.modes_apart:
            found.append(f"two groups of times, {noise.modes_apart:.0%} apart")
        elif noise.spread > _SPREAD:
            found.append(f"times spread over {noise.spread:.0%}")
        if abs(noise.drift) > _DRIFT and abs(noise.drift) > noise.spread / 2:
            found.append(f"drifts by {noise.drift:+.0%} within a round")
        if noise.between_rounds > _BETWEEN_ROUNDS:
            found.append(f"rounds differ by {noise.between_rounds:.0%}")
    held_back = sorted({reason for state in states for reason in state.held_back})
    if held_back:
        slowest = min(states, key=lambda state: state.sm_clock_mhz)
        found.append(f"{' and '.join(held_back)}: {slowest.sm_clock_mhz} of {slowest.max_sm_clock_mhz} MHz")
    if reference_us and usual_us:
        slower = statistics.median(reference_us) / usual_us - 1
        if slower > _MACHINE:
            found.append(f"the machine was {slower:.0%} slower than in the rest of the run")
    return tuple(found)


def _spread(samples: Sequence[float]) -> float:
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / max(statistics.median(samples), 1e-9)


def _drift(samples: Sequence[float]) -> float:
    if len(samples) < _FEWEST:
        return 0.0
    third = len(samples) // 3
    first, last = statistics.median(samples[:third]), statistics.median(samples[-third:])
    return (last - first) / max(statistics.median(samples), 1e-9)


def _modes_apart(rounds: Sequence[Sequence[float]]) -> float:
    """All samples cut in two where the groups' variances are least (Otsu, 1979); how far the means lie apart, 0 if not far.

    Where whole rounds fall to one side, it is the rounds that differ.
    """
    ordered = sorted(sample for of_one in rounds for sample in of_one)
    n = len(ordered)
    if n < _FEWEST:
        return 0.0
    sums, squares = [0.0], [0.0]
    for value in ordered:
        sums.append(sums[-1] + value)
        squares.append(squares[-1] + value * value)

    def spread(first: int, last: int) -> tuple[float, float]:
        """Mean and sum of squared deviations of a stretch."""
        count, total = last - first, sums[last] - sums[first]
        return total / count, max(squares[last] - squares[first] - total * total / count, 0.0)

    least = max(1, round(n * _MINORITY))
    cut = min(range(least, n - least), key=lambda k: spread(0, k)[1] + spread(k, n)[1])
    (low, below), (high, above) = spread(0, cut), spread(cut, n)
    apart = (high - low) / max(statistics.median(ordered), 1e-9)
    deviations = (below / cut + above / (n - cut)) ** 0.5
    separate = 2**0.5 * (high - low) > _SEPARATION * deviations
    shares = [sum(sample >= ordered[cut] for sample in of_one) / len(of_one) for of_one in rounds]
    mixed = statistics.median(min(share, 1 - share) for share in shares) > _MINORITY / 2
    return apart if separate and mixed and apart > _APART else 0.0

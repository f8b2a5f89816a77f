"""The reliability of a measurement: spread and drift of its times, bimodality, and the state of the machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_kernel.workbench.benchmark.machine import GpuState
from tokenspeed_kernel.workbench.benchmark.timing import Timing

# Limits of noise, as fractions. Noise beyond any of them hides a difference of a few percent. On a GPU without other work, the
# noise stays below a tenth of these limits.
_SPREAD = 0.10
_DRIFT = 0.03
_BETWEEN_ROUNDS = 0.05
_MACHINE = 0.03
# Times are bimodal if each of two groups holds a tenth of all times, and their means are at least _SEPARATION standard deviations
# apart. Ashman, Bird and Zepf (1994) call this distance D, with 2 as the limit. By this measure, the two halves of a normal
# distribution have 2.65, those of a uniform distribution 3.46.
_SEPARATION = 4.0
_MINORITY = 0.10
_APART = 0.05
# With fewer samples in a round, no drift is reported. With fewer samples in all rounds together, no bimodality is reported.
_FEWEST = 12


@dataclass(frozen=True)
class Noise:
    """The variation of times; each value is relative to the median.

    Attributes:
        spread: difference between the 90th and the 10th percentile within a round; the median over rounds.
        drift: difference between the last and the first third of a round, signed; the median over rounds.
        between_rounds: difference between the slowest and the fastest round.
        modes_apart: the distance between the means of two groups of times that both occur in most rounds; 0 if there is only one
            group.
    """

    spread: float
    drift: float
    between_rounds: float
    modes_apart: float


def noise_of(timing: Timing) -> Noise | None:
    """Computes the `Noise` of a measurement from its kept samples; None if no samples were kept."""
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
    """Returns the reasons why a measurement may be unreliable, as text.

    Args:
        timing: the measurement.
        states: states of the GPU during the measurement.
        reference_us: the time of the reference workload just before each round, in microseconds.
        usual_us: the reference workload's usual time on this machine, in microseconds; None if unknown.
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
    """Splits all samples into two groups of least variance (Otsu, 1979), and returns the distance of the groups' means, relative to
    the median; 0 if the samples are not bimodal.

    If each round falls into one group, the rounds differ, but the times within a round are not bimodal. The result is then 0.
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
        """Returns the mean and the sum of squared deviations of the sorted samples from ``first`` to ``last`` (exclusive)."""
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

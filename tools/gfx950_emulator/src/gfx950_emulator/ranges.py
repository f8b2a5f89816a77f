"""The constants of the timing model that are not known exactly, and the range of times that follows from them.

`UNCERTAIN` lists these constants for each device: the model's value (in `hardware`), the values that give the shortest and the
longest times, and where they come from. ``assumed`` marks a bound that no public measurement gives. All other constants of
`hardware` come from documents or measurements that leave no range.

`predict_range` computes a launch's time three times: with the model's constants, with all fast ones, and with all slow ones. The
counters of one execution serve all three. No pair of bounds is more likely than another, and the constants are taken as
independent. So the range says how far the model's own uncertainty reaches. It says nothing of what the model omits, which `timing`
lists.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gfx950_emulator import hardware as hw
from gfx950_emulator.timing import Prediction, predict

if TYPE_CHECKING:
    from gfx950_emulator.driver import LaunchReport


@dataclass(frozen=True)
class Constant:
    """A constant that is not known exactly.

    Attributes:
        name: the field of `hardware.Device`.
        fast, slow: the values of the field that give the shortest and the longest times.
        basis: the sources, abbreviated as in `hardware`.
        assumed: whether a bound has no public source.
    """

    name: str
    fast: float
    slow: float
    basis: str
    assumed: bool = False


# MT4G: sample_results/AMD_Instinct_MI350P.json, measured in September 2026 at 2.2 GHz.
_MI355X = (
    Constant("clock_hz", 2.4e9, 1.85e9, "CDNA4 peak; MEASURED: a long prefill takes 1.30 times the modelled time", assumed=True),
    Constant("hbm_bytes_per_second", 8e12, 6.6e12, "CDNA4 peak; MEASURED: decode"),
    Constant(
        "hbm_latency",
        444,
        1536,
        "MT4G: 444 if the Infinity Cache hits, 768 idle (95th percentile 932); under load twice",
        assumed=True,
    ),
    Constant("l2_latency", 256, 512, "MT4G: 256 idle (95th percentile 260); under load twice", assumed=True),
    Constant("l2_read_bytes_per_cycle", 64, 48, "CDNA4 peak; MT4G streams 48"),
    Constant("l2_write_bytes_per_cycle", 32, 22, "CDNA4 peak; MT4G streams 22"),
    Constant("lds_port_load_bytes", 128, 110, "CDNA4 peak; MT4G streams 110"),
    Constant("lds_port_store_bytes", 64, 37, "ROCPROF; MT4G streams 37"),
    Constant(
        "conversion_cycles", 4, 16, "full rate; LLVM: quarter rate, whose comment says that it may not be accurate", assumed=True
    ),
    Constant("transcendental_cycles", 8, 16, "CDNA4: twice the rate of CDNA3, without a list of instructions; LLVM: quarter rate"),
)

# MT4G: sample_results/AMD Instinct MI300X VF.json.
_MI300X = (
    Constant("clock_hz", 2.1e9, 1.6e9, "CDNA3 peak; under load as for MI355X", assumed=True),
    Constant("hbm_bytes_per_second", 5.3e12, 3.96e12, "CDNA3 peak; MT4G"),
    Constant(
        "hbm_latency", 497, 1800, "MT4G: L2 and its miss penalty, 900 idle (95th percentile 1115); under load twice", assumed=True
    ),
    Constant("l2_latency", 288, 576, "MT4G: 288 idle (95th percentile 292); under load twice", assumed=True),
    Constant("l2_read_bytes_per_cycle", 53, 24, "CDNA3 peak; MT4G streams 24"),
    Constant("l2_write_bytes_per_cycle", 26, 11, "CDNA3 peak; MT4G streams 11"),
    Constant("conversion_cycles", 4, 16, "full rate; LLVM: quarter rate", assumed=True),
)

UNCERTAIN = {hw.MI355X.name: _MI355X, hw.MI300X.name: _MI300X}
"""The uncertain constants of each device, by the device's name."""


def with_constants(device: hw.Device, end: str, names: frozenset[str] | None = None) -> hw.Device:
    """Returns the device with the constants of one end of the range.

    Args:
        device: `hardware.MI355X` or `hardware.MI300X`.
        end: ``"fast"`` or ``"slow"``.
        names: the constants to replace; None: all.

    Raises:
        ValueError: ``end`` is another word, or a name is none of the device's uncertain constants.
    """
    if end not in ("fast", "slow"):
        raise ValueError(f'end must be "fast" or "slow", got {end!r}')
    known = {constant.name: constant for constant in UNCERTAIN[device.name]}
    unknown = (names or frozenset()) - known.keys()
    if unknown:
        raise ValueError(f"names must be of {sorted(known)}, got {sorted(unknown)}")
    chosen = known if names is None else {name: known[name] for name in names}
    return dataclasses.replace(device, **{name: getattr(constant, end) for name, constant in chosen.items()})


@dataclass(frozen=True)
class Range:
    """The predictions of a launch with the fast constants, with the model's, and with the slow ones. For ratios only."""

    fast: Prediction
    modelled: Prediction
    slow: Prediction

    def __str__(self) -> str:
        low, middle, high = (each.seconds * 1e6 for each in (self.fast, self.modelled, self.slow))
        return f"{middle:.2f} us ({low:.2f} to {high:.2f})"


def predict_range(report: LaunchReport, *, max_instructions: int = 300_000) -> Range:
    """Predicts the time of a launch with the fast, the model's and the slow constants. Arguments and errors: `timing.predict`."""
    device = report.program.assembly.architecture.device
    devices = (with_constants(device, "fast"), device, with_constants(device, "slow"))
    return Range(*(predict(report, device=each, max_instructions=max_instructions) for each in devices))

"""One entry of a table of tuned results: its key, its fields, and its serialisation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tokenspeed_kernel.workbench.plain import from_plain
from tokenspeed_kernel_base.platform import PlatformInfo

FORMAT = 1


def entry_key(operator: str, formats: str, traits: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """Returns the text by which an entry is found in a table. ``sizes`` are the buckets of the request's sizes."""
    return json.dumps([operator, formats, dict(traits), dict(sizes)], sort_keys=True, default=str)


@dataclass(frozen=True)
class Device:
    """The device that results are valid for: its name in the driver, its architecture, and its number of SMs/CUs.

    A partition of a device counts as a separate device.
    """

    name: str
    arch: str
    sm_count: int

    @classmethod
    def of(cls, platform: PlatformInfo) -> Device:
        return cls(platform.device_name, platform.arch, platform.sm_count)

    @property
    def file_name(self) -> str:
        """The file name of the device's table in the user's directory of tuned results."""
        words = f"{self.name} {self.arch} {self.sm_count}"
        return "".join(c if c.isalnum() or c in "_.-" else "-" for c in words) + ".json"

    def __str__(self) -> str:
        return f"{self.name} [{self.arch}]"


@dataclass(frozen=True)
class Result:
    """One kernel's best configuration for a kind of call, and its time.

    Attributes:
        kernel: the kernel's name.
        config: the fastest configuration, a value for each of the kernel's tunables; empty for the kernel's default configuration.
        us: the median time of a call with this configuration, in microseconds.
        own_us: the median time with the kernel's default configuration, in microseconds, if it was measured.
        source: fingerprint of the measured kernel's source, see `source_fingerprint`.
    """

    kernel: str
    config: Mapping[str, Any]
    us: float
    own_us: float | None
    source: str


@dataclass(frozen=True)
class Entry:
    """The tuned results for one kind of call on one device.

    Attributes:
        operator: ``"family.mode"``.
        formats: the format signature of the request, as text.
        traits: traits of the request.
        sizes: buckets of the request's sizes, see `buckets`.
        device: the device on which the results were measured.
        results: one per measured kernel.
        driver: version of the device's driver; empty without a driver.
        toolchain: versions of the software that compiled the kernels.
        case: the measured case's name, or the sizes of the measured call.
        date: date of the measurement, ISO 8601.
    """

    operator: str
    formats: str
    traits: Mapping[str, Any]
    sizes: Mapping[str, int]
    device: Device
    results: tuple[Result, ...]
    driver: str = ""
    toolchain: Mapping[str, str] = field(default_factory=dict)
    case: str = ""
    date: str = ""

    @property
    def key(self) -> str:
        return entry_key(self.operator, self.formats, self.traits, self.sizes)

    @property
    def best(self) -> Result:
        return min(self.results, key=lambda result: (result.us, result.kernel))

    def merged_onto(self, older: Entry) -> Entry:
        """Returns this entry, with the older entry's results for kernels that this entry lacks.

        Returns this entry unchanged if the two entries were measured with different drivers or toolchains.
        """
        if (older.driver, dict(older.toolchain)) != (self.driver, dict(self.toolchain)):
            return self
        mine = {result.kernel for result in self.results}
        return replace(self, results=(*self.results, *(r for r in older.results if r.kernel not in mine)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry as plain values, for JSON."""
        return {**asdict(self), "results": [asdict(result) for result in self.results]}

    @classmethod
    def from_dict(cls, value: Any) -> Entry:
        """Builds an entry from the result of `to_dict`. Raises ValueError for anything else."""
        entry = from_plain(cls, value)
        if not entry.results:
            raise ValueError("results must not be empty")
        for result in entry.results:
            for us in (result.us, result.own_us):
                if us is not None and not 0 < us < math.inf:
                    raise ValueError(f"us must be a positive number, got {us!r}")
        return entry

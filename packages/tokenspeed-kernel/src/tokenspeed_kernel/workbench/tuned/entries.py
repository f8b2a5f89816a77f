"""One tuned result: what it is found by, what it holds, and how it is written down."""

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
    """What an entry is found by, as text. ``sizes`` are buckets."""
    return json.dumps([operator, formats, dict(traits), dict(sizes)], sort_keys=True, default=str)


@dataclass(frozen=True)
class Device:
    """What results hold for: the device's name as the driver gives it, its architecture, and its multiprocessors (parts of a
    device are devices of their own)."""

    name: str
    arch: str
    sm_count: int

    @classmethod
    def of(cls, platform: PlatformInfo) -> Device:
        return cls(platform.device_name, platform.arch, platform.sm_count)

    @property
    def file_name(self) -> str:
        """Of its table in the user's directory."""
        words = f"{self.name} {self.arch} {self.sm_count}"
        return "".join(c if c.isalnum() or c in "_.-" else "-" for c in words) + ".json"

    def __str__(self) -> str:
        return f"{self.name} [{self.arch}]"


@dataclass(frozen=True)
class Result:
    """One kernel's best.

    Attributes:
        kernel: its name.
        config: the configuration that was quickest, a value for each of the kernel's tunables; empty for the kernel's own choice.
        us: what a call takes with it, in microseconds: the median.
        own_us: what it takes with the kernel's own choice, where that was measured too.
        source: fingerprint of the source that was measured, see `source_fingerprint`.
    """

    kernel: str
    config: Mapping[str, Any]
    us: float
    own_us: float | None
    source: str


@dataclass(frozen=True)
class Entry:
    """What was measured for one kind of call on one device.

    Attributes:
        operator: ``"family.mode"``.
        formats: the format signature, as text.
        traits: of the request.
        sizes: buckets of the request's sizes, see `buckets`.
        device: where it was measured.
        results: one a kernel.
        driver: version of the device's driver; empty where there is none.
        toolchain: versions of what the kernels were built with.
        case: what was measured: a case's name, or the sizes of a call.
        date: when, ISO 8601.
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
        """This entry, with the older one's results of kernels that it has none of, if they were measured alike."""
        if (older.driver, dict(older.toolchain)) != (self.driver, dict(self.toolchain)):
            return self
        mine = {result.kernel for result in self.results}
        return replace(self, results=(*self.results, *(r for r in older.results if r.kernel not in mine)))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {**asdict(self), "results": [asdict(result) for result in self.results]}

    @classmethod
    def from_dict(cls, value: Any) -> Entry:
        """An entry as `to_dict` gave it. Raises ValueError for anything else."""
        entry = from_plain(cls, value)
        if not entry.results:
            raise ValueError("results must not be empty")
        for result in entry.results:
            for us in (result.us, result.own_us):
                if us is not None and not 0 < us < math.inf:
                    raise ValueError(f"us must be a positive number, got {us!r}")
        return entry

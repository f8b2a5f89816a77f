"""One tuned result: what it is found by, what it holds, and how it is written down."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
        return {
            "operator": self.operator,
            "formats": self.formats,
            "traits": dict(self.traits),
            "sizes": dict(self.sizes),
            "device": {"name": self.device.name, "arch": self.device.arch, "sm_count": self.device.sm_count},
            "results": [
                {"kernel": r.kernel, "config": dict(r.config), "us": r.us, "own_us": r.own_us, "source": r.source}
                for r in self.results
            ],
            "driver": self.driver,
            "toolchain": dict(self.toolchain),
            "case": self.case,
            "date": self.date,
        }

    @classmethod
    def from_dict(cls, value: Any) -> Entry:
        """An entry as `to_dict` gave it. Raises ValueError for anything else."""
        table = _typed(value, dict, "an entry")
        device = _typed(table.get("device"), dict, "device")
        results = tuple(_result(result) for result in _typed(table.get("results"), list, "results"))
        sizes = _typed(table.get("sizes"), dict, "sizes")
        if not results:
            raise ValueError("results must not be empty")
        return cls(
            _typed(table.get("operator"), str, "operator"),
            _typed(table.get("formats"), str, "formats"),
            _typed(table.get("traits"), dict, "traits"),
            {name: _typed(size, int, f"sizes.{name}") for name, size in sizes.items()},
            Device(*(_typed(device.get(n), t, f"device.{n}") for n, t in (("name", str), ("arch", str), ("sm_count", int)))),
            results,
            _typed(table.get("driver"), str, "driver"),
            {name: _typed(version, str, name) for name, version in _typed(table.get("toolchain"), dict, "toolchain").items()},
            _typed(table.get("case"), str, "case"),
            _typed(table.get("date"), str, "date"),
        )


def _result(value: Any) -> Result:
    table = _typed(value, dict, "a result")
    times = [table.get("us"), table.get("own_us")]
    if times[1] is None:
        times.pop()
    for time in times:
        if type(time) not in (int, float) or not math.isfinite(time) or time <= 0:
            raise ValueError(f"us must be a positive number, got {time!r}")
    return Result(
        _typed(table.get("kernel"), str, "kernel"),
        _typed(table.get("config"), dict, "config"),
        float(times[0]),
        float(times[1]) if len(times) > 1 else None,
        _typed(table.get("source"), str, "source"),
    )


def _typed(value: Any, wanted: type, what: str) -> Any:
    if type(value) is not wanted:
        raise ValueError(f"{what} must be a {wanted.__name__}, got {value!r}")
    return value

"""Finds the valid tuned results for a request, and explains why others are stale.

There are three sources, in this order: results of this process, the user's table for this device, and the tables that wheels ship
for its architecture. The first valid result is used. A result is stale if the measured code differs from the code that would run.
Possible reasons: the kernel's source, the driver or the toolchain changed, or the kernel no longer declares the configuration. A
shipped table was measured on another machine, so its driver and the patch level of its Triton may differ.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed_kernel.workbench.tuned.entries import Device, Entry, Result, entry_key
from tokenspeed_kernel.workbench.tuned.fingerprint import source_fingerprint, toolchain
from tokenspeed_kernel.workbench.tuned.store import read_table, save_entry
from tokenspeed_kernel_base import config, memo
from tokenspeed_kernel_base.measured import Found, Tuned
from tokenspeed_kernel_base.platform import PlatformInfo, driver_version
from tokenspeed_kernel_base.registry import KernelRegistry


@dataclass(frozen=True)
class Listed:
    """An entry of a table, the source in which it was found, and the reason why it is stale (empty if it is valid)."""

    entry: Entry
    source: str
    stale: str


# -- where tables are stored ---------------------------------------------------------------------------------------------------

_shipped: list[Path] = [Path(__file__).parent]
_measured: dict[tuple[Device, str], Entry] = {}
_lock = threading.Lock()


def register_tuned_tables(directory: str | Path) -> None:
    """Adds a directory of tables that a wheel ships: ``<architecture>.json``, as written by ``tokenspeed-kernel tune --export``.

    A plugin calls this function next to its `register_kernel`. Tables are read when a kernel is selected.
    """
    path = Path(directory)
    with _lock:
        if path not in _shipped:
            _shipped.append(path)
    memo.invalidate()


def tuned_directory() -> Path | None:
    """Returns the directory of this machine's results.

    Returns the directory ``TOKENSPEED_KERNEL_TUNED``, or ``tokenspeed_kernel/tuned`` in the user's cache directory
    (``XDG_CACHE_HOME``, ``~/.cache``). None if tables are switched off, or without a home directory.
    """
    return config.kept_in(config.settings().tuned, "tuned")


def user_table(device: Device) -> Path | None:
    """Returns the file of a device's results on this machine; None without a `tuned_directory`."""
    directory = tuned_directory()
    return None if directory is None else directory / device.file_name


Entries = Mapping[tuple[Device, str], Entry]

_files: dict[Path, tuple[tuple[int, ...], Entries]] = {}


def _load(path: Path, *, keep_corrupt: bool) -> Entries:
    """Returns the entries of a table's file. They are kept in memory, and read again when the file has changed."""
    try:
        status = path.stat()
    except OSError:
        return {}
    state = (status.st_mtime_ns, status.st_size, status.st_ino)
    known = _files.get(path)
    if known is None or known[0] != state:
        entries = {(entry.device, entry.key): entry for entry in read_table(path, keep_corrupt=keep_corrupt)}
        known = _files[path] = state, entries
    return known[1]


@functools.lru_cache(maxsize=256)
def _places(chosen: str | None, shipped: tuple[Path, ...], device: Device, pretended: bool) -> tuple[tuple[Path, bool], ...]:
    """Returns the files that may have results for a device, the user's file first, each with a flag: whether the file is shipped.

    ``chosen``: the setting ``TOKENSPEED_KERNEL_TUNED``. The function could read the setting itself, but the cached result must
    depend on it.
    """
    path = user_table(device)
    own = [] if path is None or pretended else [(path, False)]
    return (*own, *((directory / f"{device.arch}.json", True) for directory in shipped if chosen != config.OFF))


def _sources(device: Device, pretended: bool) -> Iterator[tuple[str, bool, Entries]]:
    """Yields the sources of results for a device, in the order of the search: name, whether a wheel ships it, and its entries."""
    if not pretended:
        yield "this process", False, _measured
    for path, shipped in _places(config.settings().tuned, tuple(_shipped), device, pretended):
        yield str(path), shipped, _load(path, keep_corrupt=not shipped)


_known_operators: dict[Any, Any] = memo.new_memo()


def has_results(operator: str, platform: PlatformInfo) -> bool:
    """Returns whether any source has results of an operator for a device. Only then does selection depend on a call's sizes.

    Tables that other processes write later are read once memoised decisions are invalidated.
    """
    key = operator, platform
    known: bool | None = _known_operators.get(key)
    if known is None:
        started, device = memo.epoch(), Device.of(platform)
        known = not platform.emulated and any(
            (entry.device, entry.operator) == (device, operator)
            for _, _, entries in _sources(device, platform.pretended)
            for entry in [*entries.values()]
        )
        memo.remember(_known_operators, key, known, started, exceptions_in_key=True)
    return known


# -- valid and stale results ---------------------------------------------------------------------------------------------------


def find(operator: str, formats: object, traits: Mapping[str, Any], buckets: Mapping[str, int], platform: PlatformInfo) -> Found:
    """Returns the valid results for a request.

    Args:
        operator: ``"family.mode"``.
        formats: the format signature, as an object or as text.
        traits, buckets: traits and size buckets of the request.
        platform: the platform to run on. An emulated device has no results, because its times are meaningless.
    """
    if platform.emulated:
        return Found()
    device = Device.of(platform)
    key = functools.cache(lambda: entry_key(operator, str(formats), traits, buckets))
    notes: list[str] = []
    for source, shipped, entries in _sources(device, platform.pretended):
        entry = entries.get((device, key())) if entries else None
        if entry is None:
            others = sorted({str(measured) for measured, known in entries if known == key()}) if entries else []
            if others:
                notes.append(f"not used: {source} has results of {', '.join(others)}, this is {device}")
            continue
        reason = staleness(entry, platform, shipped=shipped)
        if reason:
            notes.append(f"stale: a result of {entry.date or 'some day'} in {source} is not used: {reason}")
            continue
        return Found({r.kernel: Tuned(r.us, r.config, r.own_us) for r in entry.results}, tuple(notes))
    return Found({}, tuple(notes))


def staleness(entry: Entry, platform: PlatformInfo, *, shipped: bool) -> str:
    """Returns why an entry is stale; empty if it is valid. Kernels that are not registered here are ignored."""
    driver = driver_version(platform.vendor)
    if not shipped and entry.driver != driver:
        return f"the driver was {entry.driver or 'unknown'} and is {driver or 'unknown'}"
    for name in sorted(entry.toolchain.keys() | toolchain().keys()) if not shipped else ("triton",):
        was, now = entry.toolchain.get(name, ""), toolchain().get(name, "")
        if (_minor(was) if shipped else was) != (_minor(now) if shipped else now):
            return f"{name} was {was or 'absent'} and is {now or 'absent'}"
    for result in entry.results:
        reason = _result_staleness(result)
        if reason:
            return reason
    return ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _result_staleness(result: Result) -> str:
    registry = KernelRegistry.get()
    try:
        spec, module = registry.get_by_name(result.kernel), registry.module_of(result.kernel)
    except KeyError:
        return ""
    if source_fingerprint(module) != result.source:
        return f"the source of {result.kernel} changed"
    undeclared = spec.undeclared(result.config)
    return f"{result.kernel}: {undeclared}" if undeclared else ""


def all_entries(platform: PlatformInfo) -> list[Listed]:
    """Returns all entries for a platform's device, from all sources; for stale entries, with the reason."""
    device = Device.of(platform)
    return [
        Listed(entry, source, staleness(entry, platform, shipped=shipped))
        for source, shipped, entries in _sources(device, platform.pretended)
        for entry in sorted(entries.values(), key=lambda entry: entry.key)
        if entry.device == device
    ]


def record(entry: Entry) -> Path | None:
    """Makes selection in this process use an entry's results, and writes the entry to the user's table.

    Returns:
        The table's file. None if no file was written: tables are switched off, or there is no directory for them, or a kernel's
        source cannot be found, so that later changes of the source could not be detected.

    Warns:
        StorageWarning: the file cannot be written; once per process.
    """
    path = user_table(entry.device)
    traceable = all(result.source for result in entry.results)
    saved = path is not None and traceable and save_entry(path, entry)
    with _lock:
        if saved:
            _measured.pop((entry.device, entry.key), None)  # the file has this entry, merged with other processes' results
        else:
            _measured[entry.device, entry.key] = entry
    memo.invalidate()
    return path if saved else None


def forget(keep: Callable[[Entry], bool] = lambda entry: False) -> None:
    """Drops results that this process measured and did not write, except those for which ``keep`` returns True."""
    with _lock:
        for key, entry in [*_measured.items()]:
            if not keep(entry):
                del _measured[key]
    memo.invalidate()

"""Compares two receipts, for example of two releases, machines or days."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tokenspeed_kernel.workbench.receipts.records import Receipt
from tokenspeed_kernel.workbench.receipts.rows import Row
from tokenspeed_kernel.workbench.receipts.text import wrapped

_KIND = {"platform": 0, "version": 1, "setting": 2, "kernel": 3, "configuration": 4, "time": 5}


@dataclass(frozen=True)
class Difference:
    """One difference between two receipts.

    Attributes:
        kind: ``"platform"``, ``"version"``, ``"setting"``, ``"kernel"``, ``"configuration"`` or ``"time"``.
        what: ``"device"`` or ``"arch"``, the package, the setting, or the call that differs.
        sizes: the sizes at which the call differs in this way; empty if the call has no sizes.
        before, after: the first and the second receipt's value. Empty if that receipt lacks the call, package or setting.
        why: if the kernel differs, the reasons that each receipt gives for not selecting the other's kernel.
    """

    kind: str
    what: str
    sizes: tuple[int, ...]
    before: str
    after: str
    why: str = ""


def differences(before: Receipt, after: Receipt, *, threshold: float = 0.1) -> list[Difference]:
    """Returns the differences between two receipts, those of the platform first.

    Args:
        before, after: the receipts.
        threshold: predicted times that differ by less than this fraction count as equal.
    """
    found = [
        Difference("platform", name, (), one, other)
        for name, one, other in (("device", before.device, after.device), ("arch", before.arch, after.arch))
        if one != other
    ]
    for kind, olds, news in (("version", before.versions, after.versions), ("setting", before.settings, after.settings)):
        for name in sorted(olds.keys() | news.keys()):
            one, other = str(olds.get(name, "")), str(news.get(name, ""))
            if one != other:
                found.append(Difference(kind, name, (), one, other))
    found += _merged(_of_calls(_by_call(before), _by_call(after), threshold))
    return sorted(found, key=lambda difference: _KIND[difference.kind])


_At = tuple[Row, float | None]
_Key = tuple[str, int | None]


def _by_call(receipt: Receipt) -> dict[_Key, _At]:
    """Returns a receipt's row and predicted time for each call and size."""
    found: dict[_Key, _At] = {}
    for row in receipt.rows:
        traits = sorted(f"{name}={value}" for name, value in row.traits.items()) if row.phase == "process" else [row.role]
        formats = row.formats if row.phase == "process" else ""
        name = ", ".join(part for part in (f"{row.phase} {row.operator}", formats, *traits) if part)
        for index, size in enumerate(row.sizes or (None,)):
            found[name, size] = row, row.predicted_us[index] if index < len(row.predicted_us) else None
    return found


def _of_calls(olds: dict[_Key, _At], news: dict[_Key, _At], threshold: float) -> Iterator[Difference]:
    for name, size in dict.fromkeys((*olds, *news)):
        sizes = () if size is None else (size,)
        old, new = olds.get((name, size)), news.get((name, size))
        if old is None or new is None:
            yield Difference("kernel", name, sizes, old[0].kernel if old else "", new[0].kernel if new else "")
            continue
        (row, us), (now, now_us) = old, new
        if row.kernel != now.kernel:
            reasons = (f"{p.kernel} then: {p.reason}" for p in row.passed if p.kernel == now.kernel)
            others = (f"{p.kernel} now: {p.reason}" for p in now.passed if p.kernel == row.kernel)
            yield Difference("kernel", name, sizes, row.kernel or "none", now.kernel or "none", "; ".join((*reasons, *others)))
        elif dict(row.config) != dict(now.config):
            yield Difference("configuration", name, sizes, str(dict(row.config)), str(dict(now.config)))
        elif us is not None and now_us is not None and abs(now_us - us) > threshold * us:
            yield Difference("time", name, sizes, f"{us:.3g} us", f"{now_us:.3g} us")


def _merged(found: Iterator[Difference]) -> list[Difference]:
    """Merges differences that are equal except for their sizes into one."""
    merged: dict[tuple[str, str, str, str, str], list[int]] = {}
    for each in found:
        merged.setdefault((each.kind, each.what, each.before, each.after, each.why), []).extend(each.sizes)
    return [Difference(kind, what, tuple(sizes), a, b, why) for (kind, what, a, b, why), sizes in merged.items()]


def difference_lines(found: Iterable[Difference]) -> Iterator[str]:
    """Yields the differences as lines of text of at most 100 columns."""
    for each in found:
        sizes = f" at {', '.join(map(str, each.sizes))}" if each.sizes else ""
        yield from wrapped(f"{each.kind}: {each.what}{sizes}", "", "    ")
        yield from wrapped(f"{each.before or 'absent'} -> {each.after or 'absent'}", "    ", "        ")
        if each.why:
            yield from wrapped(each.why, "    ", "        ")

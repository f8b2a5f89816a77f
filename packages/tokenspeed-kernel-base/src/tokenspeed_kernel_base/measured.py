"""Measured results, as selection sees them: what was measured, and who is asked.

Where results come from is not this package's business: `use` puts a source in, as ``tokenspeed_kernel`` does with its tables.
Without one nothing was measured, and kernels are ranked by what they declare.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

from tokenspeed_kernel_base import memo
from tokenspeed_kernel_base.platform import PlatformInfo
from tokenspeed_kernel_base.signature import FormatSignature


class Tuned(NamedTuple):
    """What was measured of one kernel: microseconds with its best configuration (empty: its own choice), and with its own."""

    us: float
    config: Mapping[str, Any] = MappingProxyType({})
    own_us: float | None = None


class Found(NamedTuple):
    """What was measured for a request: a result for each kernel, and a line for each entry that is not used, with the reason."""

    results: Mapping[str, Tuned] = MappingProxyType({})
    notes: tuple[str, ...] = ()


class Source(Protocol):
    """Gives measured results."""

    def has_results(self, operator: str, platform: PlatformInfo) -> bool:
        """Whether anything was measured of an operator on a platform, so that it matters how large a call is."""

    def find(
        self, operator: str, formats: FormatSignature, traits: Mapping[str, Any], buckets: Mapping[str, int], platform: PlatformInfo
    ) -> Found:
        """The results that hold for a request. ``buckets``: its sizes, those that vary rounded up to powers of two."""


_source: Source | str | None = None


def use(source: Source | str | None) -> None:
    """Puts in the source of measured results, in place of the one before: an object with those functions, or the name of a module
    that has them, which is imported when it is first asked. None for none."""
    global _source
    _source = source
    memo.invalidate()


def _asked() -> Source | None:
    global _source
    if isinstance(_source, str):
        _source = cast(Source, importlib.import_module(_source))
    return _source


def has_results(operator: str, platform: PlatformInfo) -> bool:
    source = _asked()
    return source is not None and source.has_results(operator, platform)


def find(
    operator: str, formats: FormatSignature, traits: Mapping[str, Any], buckets: Mapping[str, int], platform: PlatformInfo
) -> Found:
    source = _asked()
    return Found() if source is None else source.find(operator, formats, traits, buckets, platform)

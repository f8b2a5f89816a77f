"""Measured results, as selection uses them.

`use` installs a source of measured results; ``tokenspeed_kernel`` installs its tables and its autotuner as the source. This package
does not know where the results come from. Without a source, kernels are ranked by their declarations alone, and nothing is
measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

from tokenspeed_kernel_base import memo
from tokenspeed_kernel_base.explanation import Request
from tokenspeed_kernel_base.platform import PlatformInfo
from tokenspeed_kernel_base.signature import FormatSignature


class Tuned(NamedTuple):
    """A measurement of one kernel: ``us``, the microseconds with the kernel's best configuration ``config``, and ``own_us``, the
    microseconds with its defaults. An empty ``config`` means the defaults.
    """

    us: float
    config: Mapping[str, Any] = MappingProxyType({})
    own_us: float | None = None


class Found(NamedTuple):
    """The measurements for a request: one result for each kernel, and one note, with the reason, for each unused measurement."""

    results: Mapping[str, Tuned] = MappingProxyType({})
    notes: tuple[str, ...] = ()


class Source(Protocol):
    """A source of measured results."""

    def has_results(self, operator: str, platform: PlatformInfo) -> bool:
        """Whether the source has a measurement of an operator on a platform. If so, the operator's selection depends on sizes."""

    def find(
        self, operator: str, formats: FormatSignature, traits: Mapping[str, Any], buckets: Mapping[str, int], platform: PlatformInfo
    ) -> Found:
        """The results that apply to a request. ``buckets``: the request's sizes, with varying sizes rounded up to powers of two."""

    def autotune(self, request: Request, arguments: Mapping[str, Any], budget_s: float) -> str:
        """Measures the candidates for a request on a call's arguments, for about ``budget_s`` seconds, and records the results.
        Returns why it could not measure, or an empty string. Only called with `SelectionStrategy.AUTOTUNE`.
        """


_source: Source | str | None = None


def use(source: Source | str | None) -> None:
    """Replaces the source of measured results. The source is an object with the methods of `Source`, or the name of a module with
    these functions. The module is imported on first use. None removes the source."""
    global _source
    _source = source
    memo.invalidate()


def _current_source() -> Source | None:
    global _source
    if isinstance(_source, str):
        _source = cast(Source, importlib.import_module(_source))
    return _source


def has_results(operator: str, platform: PlatformInfo) -> bool:
    source = _current_source()
    return source is not None and source.has_results(operator, platform)


def find(
    operator: str, formats: FormatSignature, traits: Mapping[str, Any], buckets: Mapping[str, int], platform: PlatformInfo
) -> Found:
    source = _current_source()
    return Found() if source is None else source.find(operator, formats, traits, buckets, platform)


def autotune(request: Request, arguments: Mapping[str, Any], budget_s: float) -> str:
    source = _current_source()
    return "" if source is None else source.autotune(request, arguments, budget_s)

"""Makes the table of the features that a backend does not support, by operator, from the declarations of its kernels. `hooks.py`
inserts the table into a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenspeed_kernel_base.explanation import Request
from tokenspeed_kernel_base.operator import Operator, operators
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

BACKENDS = {"triton": "Triton, any GPU", "cutedsl": "CuteDSL, H100 and H200", "gluon": "Gluon, MI355X"}


def coverage_table(family: str) -> str:
    """The table of one family. It lists the features that occur in the operators' small cases, but that no kernel of a backend
    supports."""
    rows = ["| operator | backend | not served |", "|---|---|---|"]
    for op in operators():
        if op.family != family:
            continue
        for backend, title in BACKENDS.items():
            specs = [s for s in KernelRegistry.get().get_for_operator(op.family, op.mode) if s.solution == backend]
            if specs:
                rows.append(f"| [`{op.mode}`][{op.body.__module__}.{op.mode}] | {title} | {_left_out(op, specs)} |")
    return "\n".join(rows)


def _left_out(op: Operator[Any, Any], specs: list[KernelSpec]) -> str:
    """Formats and trait values that none of these kernels supports. Then the cases that are rejected only because of their
    combination of formats and traits.
    """
    formats: dict[str, None] = {}
    values: dict[str, set[Any]] = {}
    combined: list[str] = []
    for case in op.all_cases():
        if case.large:
            continue
        request = op.request(op.complete(case.build()))
        taken = [s for s in specs if s.format_signatures is None or request.signature in s.format_signatures]
        if not taken:
            formats[_dtypes(request)] = None
            continue
        if any(not spec.trait_gaps(request.traits) for spec in taken):
            continue
        alone = {name: value for name, value in request.traits.items() if all(_refuses(spec, {name: value}) for spec in specs)}
        for name, value in alone.items():
            values.setdefault(name, set()).add(value)
        if not alone:
            combined.append(case.name)
    told = [*formats, *(f"{name} {_listed(found)}" if found != {True} else name for name, found in sorted(values.items()))]
    if combined:
        told.append("these together: " + "; ".join(combined))
    return "<br>".join(told) or "nothing"


def _refuses(spec: KernelSpec, traits: Mapping[str, Any]) -> bool:
    """Whether these traits alone make a kernel ineligible. Traits that the kernel requires, and that are not among these, are
    ignored.
    """
    return any(not gap.startswith("needs ") for gap in spec.trait_gaps(traits))


def _dtypes(request: Request) -> str:
    """The formats of a request's operands, as text; operands with the same format are grouped."""
    by_format: dict[str, list[str]] = {}
    for role, fmt in request.signature.roles:
        by_format.setdefault(str(fmt), []).append(role)
    return "; ".join(f"{fmt} {_and(roles)}" for fmt, roles in by_format.items())


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(values, key=lambda value: (str(type(value)), value))))


def _and(names: list[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]

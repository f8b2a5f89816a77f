"""Functions generated from source text, because a loop over an operator's parameters is too slow for every call."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any


def compile_source(name: str, source: str, namespace: dict[str, Any], role: str = "") -> Callable[..., Any]:
    """The function ``name`` that the source defines. Tracebacks, debuggers and `inspect` show its lines. ``role`` distinguishes its
    file name from that of another function of the same name."""
    filename = f"<tokenspeed_kernel {name}{role and ': '}{role}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)  # the source is ours: parameter names only
    made: Callable[..., Any] = namespace[name]
    return made

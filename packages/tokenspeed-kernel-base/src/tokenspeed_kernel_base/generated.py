"""Functions generated from source text, because a loop over an operator's parameters is too slow for every call."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any


def compile_source(name: str, source: str, namespace: dict[str, Any], role: str = "") -> Callable[..., Any]:
    """Compiles source and returns the function ``name`` that it defines. Tracebacks, debuggers and `inspect` show the source. Each
    source has its own made-up file name: different sources with the same ``name`` and ``role`` are numbered.
    """
    label = f"tokenspeed_kernel {name}{role and ': '}{role}"
    filename, number = f"<{label}>", 1
    while "".join(linecache.getlines(filename)) not in ("", source):
        number += 1
        filename = f"<{label} {number}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)  # the source is ours: parameter names only
    made: Callable[..., Any] = namespace[name]
    return made

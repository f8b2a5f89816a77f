"""The names by which SGLang selects this plugin's attention backend."""

from __future__ import annotations

BACKEND = "tokenspeed"
# The names of SGLang's built-in backends that select our backend in this process.
replaced: set[str] = set()

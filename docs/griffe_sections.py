"""Lets Griffe, which reads the docstrings for the reference, see some of what they say as it is meant."""

from __future__ import annotations

import re
from typing import Any

import griffe

_CHANGES = (
    # Griffe shows as code what stands under Examples.
    (r"^( *)Example:$", r"\1Examples:"),
    # Warns may follow Raises without an empty line.
    (r"(?<=\S)\n( *)Warns:$", r"\n\n\1Warns:"),
    # Two colons announce code that is indented; Markdown wants none.
    (r"^( *)::$", r"\1For example, in code:"),
    (r"(?<=\S)::$", ":"),
)


class Sections(griffe.Extension):
    """Changes the text of docstrings before they are taken apart."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            for pattern, replacement in _CHANGES:
                obj.docstring.value = re.sub(pattern, replacement, obj.docstring.value, flags=re.MULTILINE)

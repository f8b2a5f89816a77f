"""Lets Griffe, which reads the docstrings for the reference, see two sections as they are meant."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """``Example:`` is shown as code, as Griffe does with ``Examples:``; ``Warns:`` may follow ``Raises:`` without an empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"(?<=\S)\n( *)Warns:$", r"\n\n\1Warns:", text, flags=re.MULTILINE)

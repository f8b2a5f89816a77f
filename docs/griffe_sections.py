"""Preprocesses docstrings for Griffe, which generates the reference from docstrings."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import griffe

_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"

# Regular expressions for parts of docstrings, and the replacements of these parts.
_CHANGES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    # Griffe shows the contents of the section Examples as code.
    (r"^( *)Example:$", r"\1Examples:"),
    # The section Warns may follow Raises without an empty line.
    (r"(?<=\S)\n( *)Warns:$", r"\n\n\1Warns:"),
    # A paragraph that ends in two colons before indented code is reStructuredText, not Markdown.
    (r"^( *)::$", r"\1For example, in code:"),
    (r"(?<=\S)::$", ":"),
    # In Markdown, an example that is not in a section Examples would be a quotation.
    (r"^>>> (?:.+\n?)+", r"```pycon\n\g<0>\n```\n"),
    # An entry such as "kernel, operator: names." describes two attributes. Griffe would read the word after the space as a type.
    (r"^    (\w+(?:, \w+)+): ", lambda found: f"    {found[1].replace(' ', _NO_BREAK_SPACE)}: "),
)


class Sections(griffe.Extension):
    """Changes the text of docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            for pattern, replacement in _CHANGES:
                obj.docstring.value = re.sub(pattern, replacement, obj.docstring.value, flags=re.MULTILINE)

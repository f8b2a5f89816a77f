"""Suggestions for unknown names.

A far-fetched suggestion is worse than none. Two names are near only if at most a quarter of the letters differ (one letter in names
of three), or if all words of one name occur in the other: ``hiden`` and ``hidden``, ``mha`` and ``mha_prefill``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name nearest to ``name``, or None if no name is near. If several are equally near, the first one wins.

    >>> nearest("hiden", ["residual", "hidden"]), nearest("nosuch", ["moe_dispatch"])
    ('hidden', None)
    """
    wanted, words = name.casefold(), _words(name)
    most = len(name) // 4 or int(len(name) == 3)  # number of letters that may differ
    near = []
    for position, other in enumerate(known):
        distance = _distance(wanted, other.casefold())
        if distance <= most or words <= _words(other) or _words(other) <= words:
            near.append((distance, position, other))
    return min(near)[2] if near else None


def did_you_mean(name: str, known: Iterable[str], spelled: Callable[[str], str] = str) -> str:
    """Returns the end of a sentence about an unknown name, ``"; did you mean hidden?"``. The text is empty if no known name is
    near. ``spelled`` formats the suggested name, for example with quotes."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {spelled(near)}?"


def _words(name: str) -> set[str]:
    """The words of a name. A name without a word of three or more letters counts as one word."""
    words = re.findall("[a-z0-9]+", name.casefold())
    return set(words) if any(len(word) > 2 for word in words) else {name}


def _distance(one: str, other: str) -> int:
    """Edits from one name to the other: insert, remove or replace a letter, or swap two neighbours (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        earlier, before, row = before, row, [i + 1]
        for j, wanted in enumerate(other):
            best = min(before[j] + (letter != wanted), before[j + 1] + 1, row[j] + 1)
            if i and j and letter == other[j - 1] and one[i - 1] == wanted:
                best = min(best, earlier[j - 1] + 1)
            row.append(best)
    return row[-1]

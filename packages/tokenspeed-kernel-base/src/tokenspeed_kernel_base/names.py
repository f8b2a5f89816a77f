"""Names that nothing has, and which may have been meant.

A suggestion that is not near is worse than none, so two names are near only if a few letters differ, or if all words of the one are
among the other's: ``hiden`` and ``hidden``, ``mha`` and ``mha_prefill``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that may have been meant, or None where none is near. Of equally near ones, the first.

    >>> nearest("hiden", ["residual", "hidden"]), nearest("nosuch", ["moe_dispatch"])
    ('hidden', None)
    """
    wanted, words = name.casefold(), _words(name)
    most = len(name) // 4 or int(len(name) == 3)  # letters that may differ
    near = []
    for place, other in enumerate(known):
        distance = _distance(wanted, other.casefold())
        if distance <= most or words <= _words(other) or _words(other) <= words:
            near.append((distance, place, other))
    return min(near)[2] if near else None


def did_you_mean(name: str, known: Iterable[str], spelled: Callable[[str], str] = str) -> str:
    """``"; did you mean hidden?"``, the end of a sentence about a name that nothing has; empty where no known name is near.
    ``spelled`` gives the name as the sentence spells it: in quotes, say."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {spelled(near)}?"


def _words(name: str) -> set[str]:
    """The words of a name. A name whose words all have fewer than three letters counts as one word."""
    words = re.findall("[a-z0-9]+", name.casefold())
    return set(words) if any(len(word) > 2 for word in words) else {name}


def _distance(one: str, other: str) -> int:
    """Letters to insert, remove, replace, or swap with a neighbour to get from one to the other (optimal string alignment)."""
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

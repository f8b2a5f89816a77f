"""Colours: of the page, and of its plots, in light and dark.

Inside the page plots are drawn in stand-ins, in whose places the variables of its style sheet are put, so that the reader's choice
of light or dark holds for them, too. In files of their own they are light.
"""

from __future__ import annotations

from collections.abc import Callable

# From a name to the colour that a plot is drawn in.
Paint = Callable[[str], str]

# Name of a CSS variable to its colours on a light and on a dark page. Whatever carries meaning has a contrast of 3 : 1 or more to
# the background, text of 4.5 : 1.
COLOURS: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#15181d"),
    "ink": ("#1d2229", "#e6e9ee"),
    "faint": ("#5b6470", "#a3adba"),
    "grid": ("#d9dde3", "#333a44"),
    "panel": ("#f5f6f8", "#1d2128"),
    "accent": ("#0b62c4", "#6cb2ff"),
    "bad": ("#b3261e", "#ff8a80"),
    "series-0": ("#1f6fc9", "#5aa9f5"),
    "series-1": ("#c2410c", "#fb923c"),
    "series-2": ("#15803d", "#4ade80"),
    "series-3": ("#7e3fc4", "#c39bf7"),
    "series-4": ("#b4156b", "#f57fb9"),
    "series-5": ("#0e7490", "#41d0e6"),
    "series-6": ("#8a6100", "#e7b934"),
    "series-7": ("#4a5568", "#b6c2d1"),
    "series-8": ("#9b1c31", "#f79aa6"),
}
SERIES = tuple(name for name in COLOURS if name.startswith("series-"))

# Colours that nothing else has, one for each name.
_STAND_INS = {name: f"#0102{index:02x}" for index, name in enumerate(COLOURS, 16)}


def light(name: str) -> str:
    """The paint of a plot in a file of its own."""
    return COLOURS[name][0]


def stand_in(name: str) -> str:
    """The paint of a plot that `as_variables` makes part of the page."""
    return _STAND_INS[name]


def as_variables(svg: str) -> str:
    """A drawing that takes its colours from the page around it."""
    for name, colour in _STAND_INS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def series(index: int) -> str:
    """The name of some series' colour; after the last comes the first again."""
    return SERIES[index % len(SERIES)]


def style() -> tuple[str, str]:
    """The variables of a light page and of a dark one."""
    light, dark = ("; ".join(f"--{name}: {colours[index]}" for name, colours in COLOURS.items()) for index in range(2))
    return light, dark

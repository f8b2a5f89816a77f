"""Colours of the page and of its plots, in light and dark mode.

Plots within the page are drawn in placeholder colours. Variables of the page's style sheet then replace them, so that plots follow
the reader's light or dark mode. Plots in separate files use the light colours.
"""

from __future__ import annotations

from collections.abc import Callable

# A function that maps a colour's name in `COLOURS` to the colour that a plot is drawn in.
Paint = Callable[[str], str]

# CSS variables with their colours on a light and on a dark page. Meaningful graphics have a contrast of at least 3 : 1 to the
# background, text of at least 4.5 : 1.
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

# A placeholder colour for each name. No drawing has these colours otherwise, so `as_variables` can replace them.
_STAND_INS = {name: f"#0102{index:02x}" for index, name in enumerate(COLOURS, 16)}


def light(name: str) -> str:
    """Returns the colour with this name in light mode. Plots in separate files use light mode."""
    return COLOURS[name][0]


def stand_in(name: str) -> str:
    """Returns the placeholder for the colour with this name. Plots within the page are drawn in placeholders, see
    `as_variables`.
    """
    return _STAND_INS[name]


def as_variables(svg: str) -> str:
    """Replaces placeholder colours in a drawing by the page's CSS variables."""
    for name, colour in _STAND_INS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def series(index: int) -> str:
    """Returns the name of the colour for the data series with this index. Colours repeat cyclically."""
    return SERIES[index % len(SERIES)]


def style() -> tuple[str, str]:
    """Returns the CSS variables of a light page and of a dark one."""
    light, dark = ("; ".join(f"--{name}: {colours[index]}" for name, colours in COLOURS.items()) for index in range(2))
    return light, dark

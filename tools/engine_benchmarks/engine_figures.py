"""Figures of engines, with and without a plugin: time per token, disturbed measurements, tables and ratios. The plugins' benchmarks
share this module.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# Bars of the plugins: the smallest speed relative to the engine's own kernels, in each row and as the geometric mean.
ROW_BAR, MEAN_BAR = 0.98, 1.12
# The largest deviation of a measurement from the median, in relation to the median.
TOLERANCE = 0.05


def is_disturbed(times: Sequence[float]) -> bool:
    """Returns whether repeated measurements disagree: one of them is not positive, or differs from the median by more than
    `TOLERANCE`. Such a figure is not to be published.
    """
    middle = statistics.median(times)
    return min(times) <= 0 or any(abs(time - middle) > TOLERANCE * middle for time in times)


def steady(steps: Sequence[tuple[float, Sequence[int]]], least: int) -> tuple[float, int]:
    """Returns the seconds per token while all requests of a batch generate, and the number of tokens that this is measured over.

    Requests start at different steps, and end at different steps. So the measurement begins when all requests have ``least``
    tokens, and ends before the first request has all of its tokens.

    Args:
        steps: for each step, when its tokens had arrived, and the number of tokens that each request has so far.
        least: number of tokens.
    """
    wanted = max(steps[-1][1])
    window = [step for step in steps if min(step[1]) >= least and max(step[1]) < wanted]
    if len(window) < 2:
        raise ValueError(f"no steps in which all requests generate, after {least} of {wanted} tokens each")
    (begin, first), (end, last) = window[0], window[-1]
    # Tokens of several steps may arrive together.
    tokens = sum(last) / len(last) - sum(first) / len(first)
    return (end - begin) / tokens, round(tokens)


def table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Returns a table of the figures of each engine's last start, with one column per variant."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["figure"] == "decode":
            cells.setdefault(f"decode {row['batch']}, ms a token", {})[row["engine"]] = f"{row['ms']:.3f}"
        elif row["figure"] == "prefill":
            cells.setdefault(f"prefill {row['shape']}, tokens/s", {})[row["engine"]] = f"{row['tokens_per_s']}"
        elif row["figure"] == "started":
            cells.setdefault(f"start {row['start']}, s", {})[row["engine"]] = f"{row['seconds']}"
    lines = [f"{'':26}" + "".join(f"{name:>16}" for name in names)]
    lines += [f"{label:26}" + "".join(f"{found.get(name, '-'):>16}" for name in names) for label, found in cells.items()]
    return "\n".join(lines)


def speed_ups(rows: Sequence[Mapping[str, Any]], own_engine: str) -> list[str]:
    """Returns one line for each variant of the plugin: its speed relative to the engine's own kernels, in each row and as the
    geometric mean. Rows that are disturbed, with or without the plugin, are named instead.

    Args:
        rows: result lines.
        own_engine: the variant without the plugin.
    """
    speeds: dict[str, dict[str, float]] = {}
    disturbed: dict[str, list[str]] = {}
    for row in rows:
        if row["figure"] not in ("decode", "prefill"):
            continue
        label = f"decode {row['batch']}" if row["figure"] == "decode" else f"prefill {row['shape']}"
        if row.get("disturbed"):
            disturbed.setdefault(row["engine"], []).append(label)
        else:
            speeds.setdefault(row["engine"], {})[label] = 1 / row["ms"] if row["figure"] == "decode" else row["tokens_per_s"]
    own, found = speeds.get(own_engine, {}), []
    for name, each in speeds.items():
        ratios = {label: speed / own[label] for label, speed in each.items() if label in own}
        if name.startswith("plugin") and ratios:
            mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios.values()))
            holds = min(ratios.values()) >= ROW_BAR and mean >= MEAN_BAR
            text = ", ".join(f"{label} {ratio:.2f}" for label, ratio in ratios.items())
            without = [*dict.fromkeys((*disturbed.get(own_engine, ()), *disturbed.get(name, ())))]
            verdict = "PARTLY" if without else "holds" if holds else "MISSED"
            text += f"; mean {mean:.2f} (>= {ROW_BAR} each, {MEAN_BAR} mean)"
            found.append(f"{verdict} {name}: {text}" + (f"; disturbed: {', '.join(without)}" if without else ""))
    return found

"""Kernels for the tests of tuning, with prescribed times."""

import lab_clock
import torch

calls: list[tuple[str, dict]] = []


def _add(x, out):
    return torch.add(x, 1, out=out) if out is not None else x + 1


def steady(x, out):
    """Takes 400 microseconds for any number of rows."""
    calls.append(("steady", {}))
    lab_clock.spend(400)
    return _add(x, out)


def growing(x, out):
    """Takes 20 microseconds per row."""
    calls.append(("growing", {}))
    lab_clock.spend(20 * x.shape[0])
    return _add(x, out)


def settable(x, out, *, wait=3000, wrong=False):
    """Takes ``wait`` microseconds, and gives a wrong result if ``wrong``."""
    calls.append(("settable", {"wait": wait, "wrong": wrong}))
    lab_clock.spend(wait)
    result = _add(x, out)
    return result.add_(1) if wrong else result


def writing(x, total, *, wait=3000):
    calls.append(("writing", {"wait": wait}))
    lab_clock.spend(wait)
    total += x


def fragile(x, out, *, good_for=10**6):
    """Takes no time, and fails after ``good_for`` calls."""
    calls.append(("fragile", {"good_for": good_for}))
    if sum(name == "fragile" for name, _ in calls) > good_for:
        raise RuntimeError("no more of it")
    return _add(x, out)

"""Splits the time of a layer of the persistent kernel into steps, from the events that a kernel with `Config.trace` stores.

Events are read from each SM's clock. The global timer is read at the begin and the end of each CTA. It gives the rate of the
clocks, and relates the clocks of different SMs to one another, to within the timer's resolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tokenspeed_kernel_nvidia.sm90.layers.config import CHAIN, EVENTS
from tokenspeed_kernel_nvidia.sm90.layers.variants import PersistentLayers


def gathered(layers: PersistentLayers, run: Callable[[], None], rounds: int, calls: int = 3) -> Tensor:
    """Runs ``calls`` consecutive calls in each round. Returns the events of each round's last call: int64 ``[rounds, *trace's
    shape]``."""
    found = []
    for _ in range(rounds):
        for _ in range(calls):
            run()
        found.append(layers.trace.clone())
    return torch.stack(found)


def times_of(trace: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the events' times in microseconds, first since each CTA's own begin, then since the first CTA's begin: two tensors,
    float64 ``[rounds, ctas, layers, events]``. Events that a CTA does not have are NaN.
    """
    trace = trace.cpu()
    begin, timer, end, timer_at_end = (each[..., None, None] for each in trace[:, :, -1, :4].unbind(-1))
    us_per_cycle = (timer_at_end - timer).sum().double() / (end - begin).sum() / 1e3
    events = trace[:, :, :-1]
    own = torch.where(events == 0, torch.nan, (events - begin).double() * us_per_cycle)
    return own, own + (timer - timer.amin(1, keepdim=True)).double() / 1e3


def table(trace: Tensor) -> Iterator[str]:
    """Yields the lines of a table with a line for each event.

    The first layer is left out, because no layer precedes it. ``step`` is the time since the CTA's preceding event, as a median
    over CTAs, layers and rounds. ``max`` is the longest step of all CTAs, as a median over layers and rounds. A CTA without the
    event is left out, and so are events that no CTA has. ``at`` is the time since the CTA has written the preceding layer's output.
    ``last CTA`` is the time from the median CTA's event to the last CTA's event. Events of the producer and of the epilogue overlap
    other steps, so they have neither ``step`` nor ``max``.
    """
    own, common = times_of(trace)
    chain = torch.where(own[..., :CHAIN].isnan(), -torch.inf, own[..., :CHAIN]).cummax(-1).values
    written = chain[:, :, :-1, -1:]
    chain, own, common = chain[:, :, 1:], own[:, :, 1:], common[:, :, 1:]
    steps = torch.where(own[..., :CHAIN].isnan(), torch.nan, chain.diff(dim=-1, prepend=written))
    at = own - written
    late = torch.nan_to_num(common, nan=-torch.inf).amax(1) - common.nanmedian(1).values
    period = float((chain[..., -1:] - written).median())
    timers = trace[:, :, -1, 1].cpu().flatten().unique().diff()
    yield f"{'event':36} {'step':>6} {'max':>6} {'at':>7} {'last CTA':>9}"
    total = 0.0
    for index, event in enumerate(EVENTS):
        if bool(at[..., index].isnan().all()):
            continue
        step = most = ""
        if index < CHAIN:
            median = float(steps[..., index].nanmedian())
            total += median
            step, most = f"{median:.2f}", f"{float(steps[..., index].nan_to_num(-torch.inf).amax(1).median()):.2f}"
        yield (
            f"{event:36} {step:>6} {most:>6} {float(at[..., index].nanmedian()):7.2f} {float(late[..., index].nanmedian()):9.2f}"
        )
    resolution = int(timers.min()) if len(timers) else 0
    yield f"{'us/layer':36} {total:6.2f} {'':6} {period:7.2f}    the global timer has steps of {resolution} ns"

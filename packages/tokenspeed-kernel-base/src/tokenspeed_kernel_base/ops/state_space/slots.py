"""What operators of recurrent layers share that keep a state for each request in a cache, by slot.

The families state_space and linear_attention have the same rules: docs/calling.md states them under "States of recurrent layers".
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw, poisoned
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.variation import Variation

# -- for bodies -------------------------------------------------------------------------------------------------------------------


def read_states(states: Tensor, state_slots: Tensor) -> Tensor:
    """Copies the states that a decode reads, ``[batch, ...]`` in the cache's dtype; zeros for negative slots.

    Args:
        states: ``[slots, ...]``.
        state_slots: int32 ``[batch]``.
    """
    return _read(states, state_slots, state_slots >= 0)


def read_initial_states(states: Tensor, state_slots: Tensor, has_initial_state: Tensor | None) -> Tensor:
    """Copies the states that a prefill starts from, ``[batch, ...]`` in the cache's dtype: zeros for negative slots, and where
    has_initial_state, bool ``[batch]``, is False or None."""
    return _read(states, state_slots, _started(state_slots, has_initial_state))


def _started(state_slots: Tensor, has_initial_state: Tensor | None) -> Tensor:
    """The requests of a prefill that read their slot."""
    return torch.zeros_like(state_slots, dtype=torch.bool) if has_initial_state is None else (state_slots >= 0) & has_initial_state


def _read(states: Tensor, slots: Tensor, present: Tensor) -> Tensor:
    if not states.shape[0]:
        return states.new_zeros(len(slots), *states.shape[1:])
    read = states[slots.long().clamp(min=0)]
    return torch.where(present.view(-1, *(1,) * (read.dim() - 1)), read, 0)


def write_states(states: Tensor, slots: Tensor, values: Tensor) -> None:
    """Writes ``values [n, ...]``, rounded to the cache's dtype, to distinct ``slots [n]`` of the cache, in place, and leaves
    negative slots out. Does not synchronise with the device."""
    if not len(slots) or not states.numel():
        return
    # Selecting what is written would wait for its number. Instead what is not written repeats the first write, or, where there is
    # none, that of what slot 0 holds.
    written = slots >= 0
    source = torch.where(written, torch.arange(len(slots), device=slots.device), written.int().argmax())
    target = slots.long()[source].clamp(min=0)
    states[target] = torch.where(written.any(), values[source].to(states.dtype), states[target])


# -- for checks -------------------------------------------------------------------------------------------------------------------


def check_prefill_slots(check: Checker, state_slots: Tensor, has_initial_state: Tensor | None) -> None:
    """Checks shapes and dtypes of a prefill's slots. Call it when ``batch`` is bound, by cu_seqlens say."""
    check.tensor("state_slots", state_slots, "batch", torch.int32)
    check.tensor("has_initial_state", has_initial_state, "batch", torch.bool)


def check_decode_slots(check: Checker, state_slots: Tensor, output_slots: Tensor | None) -> None:
    """Checks shapes and dtypes of a decode's slots. Call it when ``batch`` and ``tokens`` are bound."""
    check.tensor("state_slots", state_slots, "batch", torch.int32)
    check.tensor("output_slots", output_slots, "batch tokens", torch.int32)


def check_values_slots(check: Checker, states: Tensor, state_slots: Tensor | None, output_slots: Tensor | None = None) -> None:
    """Checks slots whose values can be read: each within the cache, none written to twice, and none written to that another request
    reads. Without output_slots the slots that are read are those that are written."""
    if state_slots is None:
        return
    for name, slots in (("state_slots", state_slots), ("output_slots", output_slots)):
        if slots is not None and slots.numel() and int(slots.max()) >= states.shape[0]:
            row = int(slots.argmax()) // (slots.numel() // len(slots))
            check.fail(name, f"below {states.shape[0]}, the slots of states", f"{int(slots.max())} for request {row}")
    name, written = ("state_slots", state_slots.unsqueeze(1)) if output_slots is None else ("output_slots", output_slots)
    ordered = written.flatten().sort().values
    twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if twice.any():
        slot = int(ordered[1:][twice][0])
        requests = (written == slot).nonzero()[:, 0].tolist()
        check.fail(name, "of distinct slots (negative: none)", f"slot {slot} for requests {requests}")
    if output_slots is None:
        return
    writers = torch.full((states.shape[0] + 1,), -1)  # the last entry takes what is not there
    writers[torch.where(written >= 0, written, -1).long()] = torch.arange(len(written)).unsqueeze(1).expand(written.shape)
    writers[-1] = -1
    found = writers[torch.where(state_slots >= 0, state_slots, -1).long()]
    shared = (found >= 0) & (found != torch.arange(len(found)))
    if shared.any():
        request = int(shared.nonzero()[0])
        said = f"slot {int(state_slots[request])}, which request {request} reads, for request {int(found[request])}"
        check.fail(name, "of slots that no other request reads", said)


# -- for cases and variations -----------------------------------------------------------------------------------------------------


def draw_slots(draw: Draw, batch: int, slots: int, tokens: int | None = None, padding: int = 0) -> dict[str, Tensor]:
    """Random slots of a cache, as ``state_slots``; with ``tokens`` also ``output_slots``.

    Args:
        draw: where random numbers come from.
        batch: how many requests there are.
        slots: how many the cache has, at least ``batch``, and ``batch * tokens`` with output_slots. Of ``batch`` more every second
            request reads a slot that it does not write to.
        tokens: new tokens of a request in decode with output_slots, at least 1; None without.
        padding: how many requests, the last ones, have no slots.
    """
    order = draw.permutation(slots, torch.int32)
    if tokens is None:
        state_slots = order[:batch].clone()
        state_slots[batch - padding :] = -1
        return {"state_slots": state_slots}
    output_slots = order[: batch * tokens].view(batch, tokens).clone()
    requests = torch.arange(batch, device=draw.device)
    state_slots = output_slots[requests, requests % tokens]
    spare = order[batch * tokens :][:batch]
    if len(spare) == batch:
        state_slots = torch.where(requests % 2 == 0, state_slots, spare)
    state_slots[batch - padding :] = -1
    output_slots[batch - padding :] = -1
    return {"state_slots": state_slots, "output_slots": output_slots}


def padding_of(state_slots: Tensor) -> dict[str, list[int]]:
    """How many requests have no slot, for a capture."""
    return {"padding": [int((state_slots < 0).sum())]}


def captured_slots(
    variation: Variation, states: Tensor, state_slots: Tensor, output_slots: Tensor | None = None
) -> dict[str, Tensor]:
    """Slots for a captured call whose ``work`` hook read `padding_of`, and a cache of no more slots than these."""
    batch, tokens = len(state_slots), None if output_slots is None else output_slots.shape[1]
    slots = min(states.shape[0], batch * (1 if tokens is None else tokens + 1))
    padding = min(batch, variation.values("padding", 1, 0)[0])
    drawn = draw_slots(variation.draw, batch, slots, tokens, padding)
    return {"states": variation.draw.normal(slots, *states.shape[1:], dtype=states.dtype), **drawn}


def without_unread(states: Tensor, state_slots: Tensor) -> Tensor:
    """Returns the cache with NaN in every slot that no request of a decode reads."""
    return _poisoned(states, state_slots[state_slots >= 0])


def without_unread_initial(states: Tensor, state_slots: Tensor, has_initial_state: Tensor | None) -> Tensor:
    """Returns the cache with NaN in every slot that no request of a prefill reads."""
    return _poisoned(states, state_slots[_started(state_slots, has_initial_state)])


def _poisoned(states: Tensor, slots: Tensor) -> Tensor:
    unread = torch.ones(states.shape[0], dtype=torch.bool, device=states.device)
    unread[slots.long()] = False
    return poisoned(states, unread)

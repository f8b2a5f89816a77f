"""Code for operators of recurrent layers, which keep each request's state in a slot of a cache.

The families state_space and linear_attention follow the same rules: docs/calling.md states them under "States of recurrent
layers".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw, absent_ids, poisoned
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.variation import Variation, Want

# -- for bodies -------------------------------------------------------------------------------------------------------------------


def read_states(states: Tensor, state_slots: Tensor) -> Tensor:
    """Copies the states that a decode call reads, ``[batch, ...]`` in the cache's dtype; zeros for negative slots.

    Args:
        states: ``[slots, ...]``.
        state_slots: int32 ``[batch]``.
    """
    return _read(states, state_slots, state_slots >= 0)


def read_initial_states(states: Tensor, state_slots: Tensor, has_initial_state: Tensor | None) -> Tensor:
    """Copies the initial states of a prefill, ``[batch, ...]`` in the cache's dtype.

    States are zero for negative slots. They are also zero where has_initial_state, bool ``[batch]``, is False or None."""
    return _read(states, state_slots, _started(state_slots, has_initial_state))


def _started(state_slots: Tensor, has_initial_state: Tensor | None) -> Tensor:
    """Returns the mask of a prefill's requests that start from the state in their slot."""
    return torch.zeros_like(state_slots, dtype=torch.bool) if has_initial_state is None else (state_slots >= 0) & has_initial_state


def _read(states: Tensor, slots: Tensor, present: Tensor) -> Tensor:
    if not states.shape[0]:
        return states.new_zeros(len(slots), *states.shape[1:])
    read = states[slots.long().clamp(min=0)]
    return torch.where(present.view(-1, *(1,) * (read.dim() - 1)), read, 0)


def write_states(states: Tensor, slots: Tensor, values: Tensor) -> None:
    """Writes ``values [n, ...]``, rounded to the cache's dtype, to distinct ``slots [n]`` of the cache, in place.

    Negative slots are skipped. Does not synchronise with the device."""
    if not len(slots) or not states.numel():
        return
    # Selecting the written values by a mask would synchronise with the device. Instead each skipped value repeats the first
    # write. If no value is written, all repeat the content of slot 0.
    written = slots >= 0
    source = torch.where(written, torch.arange(len(slots), device=slots.device), written.int().argmax())
    target = slots.long()[source].clamp(min=0)
    states[target] = torch.where(written.any(), values[source].to(states.dtype), states[target])


# -- for checks -------------------------------------------------------------------------------------------------------------------


def check_prefill_slots(check: Checker, cu_seqlens: Tensor, state_slots: Tensor, has_initial_state: Tensor | None) -> None:
    """Checks shapes and dtypes of a prefill's slots. Call this function after the check of cu_seqlens."""
    check.bind("batch", len(cu_seqlens) - 1, "cu_seqlens")
    check.tensor("state_slots", state_slots, "batch", torch.int32)
    check.tensor("has_initial_state", has_initial_state, "batch", torch.bool)


def check_decode_slots(check: Checker, name: str, x: Tensor, state_slots: Tensor, output_slots: Tensor | None) -> None:
    """Checks shapes and dtypes of a decode's slots, and that there are tokens.

    Call this function when ``batch`` and ``tokens`` are bound, the first sizes of the tensor ``name``."""
    check.require(check["tokens"] > 0, name, "of at least one token", str(list(x.shape)))
    check.tensor("state_slots", state_slots, "batch", torch.int32)
    check.tensor("output_slots", output_slots, "batch tokens", torch.int32)


def check_values_slots(check: Checker, states: Tensor, state_slots: Tensor | None, output_slots: Tensor | None = None) -> None:
    """Checks the values of slots in host memory.

    Each slot must lie within the cache. No slot may be written twice, or be written by one request and read by another. Without
    output_slots, state_slots are read and written."""
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
    writers = torch.full((states.shape[0] + 1,), -1)  # the last element is for negative slots
    writers[torch.where(written >= 0, written, -1).long()] = torch.arange(len(written)).unsqueeze(1).expand(written.shape)
    writers[-1] = -1
    found = writers[torch.where(state_slots >= 0, state_slots, -1).long()]
    shared = (found >= 0) & (found != torch.arange(len(found)))
    if shared.any():
        request = int(shared.nonzero()[0])
        said = f"slot {int(state_slots[request])}, which request {request} reads, for request {int(found[request])}"
        check.fail(name, "of slots that no other request reads", said)


# -- for costs --------------------------------------------------------------------------------------------------------------------


def states_moved(states: Tensor, state_slots: Tensor, output_slots: Tensor | None) -> int:
    """Returns the bytes of the states that a decode call reads and writes."""
    written = state_slots if output_slots is None else output_slots
    return int((state_slots >= 0).sum() + (written >= 0).sum()) * states.shape[1:].numel() * states.element_size()


def prefill_states_moved(states: Tensor, state_slots: Tensor, has_initial_state: Tensor | None) -> int:
    """Returns the bytes of the states that a prefill call reads and writes."""
    count = int(_started(state_slots, has_initial_state).sum() + (state_slots >= 0).sum())
    return count * states.shape[1:].numel() * states.element_size()


# -- for cases and variations -----------------------------------------------------------------------------------------------------


def draw_slots(draw: Draw, batch: int, slots: int, tokens: int | None = None, padding: int = 0) -> dict[str, Tensor]:
    """Draws random slots of a cache as ``state_slots``; with ``tokens`` also ``output_slots``.

    Args:
        draw: the source of random numbers.
        batch: the number of requests.
        slots: number of slots of the cache. At least one for each request that is not padding; with ``tokens``, at least ``tokens``
            for each. If there are as many spare slots as requests with a slot, every second request reads one slot and writes to
            another.
        tokens: number of new tokens of each request, at least 1; None: without output_slots.
        padding: the number of requests, at the end of the batch, that have no slots.
    """
    order, real = draw.permutation(slots, torch.int32), batch - padding
    none = order.new_full((padding,), -1)
    if tokens is None:
        return {"state_slots": torch.cat((order[:real], none))}
    output_slots = order[: real * tokens].view(real, tokens)
    requests = torch.arange(real, device=draw.device)
    state_slots, spare = output_slots[requests, requests % tokens], order[real * tokens :][:real]
    if len(spare) == real:
        state_slots = torch.where(requests % 2 == 0, state_slots, spare)
    return {
        "state_slots": torch.cat((state_slots, none)),
        "output_slots": torch.cat((output_slots, none.unsqueeze(1).expand(-1, tokens))),
    }


def draw_prefill(
    draw: Draw, lengths: Sequence[int], slots: int, initial: bool | None = True, padding: int = 0
) -> dict[str, Tensor | None]:
    """Draws ``cu_seqlens``, ``state_slots`` and ``has_initial_state`` of a prefill.

    Args:
        draw: the source of random numbers.
        lengths: number of tokens of each sequence.
        slots: number of slots of the cache, at least one for each sequence that is not padding.
        initial: True: some sequences start from a state; False: has_initial_state is all False; None: has_initial_state is None.
        padding: the number of sequences, at the end of the batch, that have no slots.
    """
    batch = len(lengths)
    initials = draw.integers(0, 2, batch).bool() if initial else torch.zeros(batch, dtype=torch.bool, device=draw.device)
    return {
        "cu_seqlens": draw.cumulative(lengths),
        **draw_slots(draw, batch, slots, padding=padding),
        "has_initial_state": None if initial is None else initials,
    }


def padding_of(state_slots: Tensor) -> dict[str, list[int]]:
    """The ``work`` hook of a decode: returns the number of requests that have no slot."""
    return {"padding": [int((state_slots < 0).sum())]}


def prefill_read(cu_seqlens: Tensor, state_slots: Tensor) -> dict[str, list[int]]:
    """The ``work`` hook of a prefill: returns the sequence lengths, and the number of requests that have no slot."""
    return {"lengths": cu_seqlens.diff().tolist(), **padding_of(state_slots)}


def vary_prefill(
    variation: Variation, tokens: int, cu_seqlens: Tensor, states: Tensor, state_slots: Tensor, has_initial_state: Tensor | None
) -> dict[str, Any]:
    """The ``vary`` hook of a prefill of ``tokens`` tokens. The matching ``work`` hook is `prefill_read`."""
    draw, batch = variation.draw, len(state_slots)
    initial = None if has_initial_state is None else True
    if variation.want is Want.UNUSED:
        changed = _poisoned(states, state_slots[_started(state_slots, has_initial_state)])
        return {"states": changed, "state_slots": absent_ids(state_slots, state_slots < 0)}
    if variation.want is Want.CAPTURED:
        lengths, padding = variation.parts("lengths", batch, tokens), min(batch, variation.values("padding", 1, 0)[0])
        slots = min(states.shape[0], batch)
        made = draw_prefill(draw, lengths, slots, initial, max(padding, batch - slots))
        return {**made, "states": draw.normal(slots, *states.shape[1:], dtype=states.dtype)}
    ends = draw.integers(0, tokens + 1, max(batch - 1, 0)).sort().values.tolist()
    lengths = [end - begin for begin, end in zip([0, *ends], [*ends, tokens], strict=True)] if batch else []
    made = draw_prefill(draw, lengths, states.shape[0], initial, max(0, batch - states.shape[0]))
    return {name: value for name, value in made.items() if value is not None}


def vary_decode(variation: Variation, states: Tensor, state_slots: Tensor, output_slots: Tensor | None) -> dict[str, Any]:
    """The ``vary`` hook of a decode. The matching ``work`` hook is `padding_of`."""
    draw, batch, tokens = variation.draw, len(state_slots), None if output_slots is None else output_slots.shape[1]
    if variation.want is Want.UNUSED:
        changed = {
            "states": _poisoned(states, state_slots[state_slots >= 0]),
            "state_slots": absent_ids(state_slots, state_slots < 0),
        }
        return changed if output_slots is None else {**changed, "output_slots": absent_ids(output_slots, output_slots < 0)}
    slots, written = states.shape[0], 1 if tokens is None else tokens
    padding = 0
    if variation.want is Want.CAPTURED:
        slots, padding = min(slots, batch * (written + 1)), variation.values("padding", 1, 0)[0]
    made = draw_slots(draw, batch, slots, tokens, min(batch, max(padding, batch - slots // written)))
    if variation.want is Want.CAPTURED:
        made["states"] = draw.normal(slots, *states.shape[1:], dtype=states.dtype)
    return made


def _poisoned(states: Tensor, read: Tensor) -> Tensor:
    """Returns a copy of the state cache with NaN in every slot that is not in ``read``."""
    unread = torch.ones(states.shape[0], dtype=torch.bool, device=states.device)
    unread[read.long()] = False
    return poisoned(states, unread)

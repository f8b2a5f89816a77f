"""Tests the slots of state caches: which slots are read, which are written, and which are rejected."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.ops.state_space.slots import (
    check_values_slots,
    draw_slots,
    padding_of,
    read_initial_states,
    read_states,
    vary_decode,
    vary_prefill,
    write_states,
)
from tokenspeed_kernel_base.variation import Variation, Want


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_states_are_read_from_slots_and_are_zeros_otherwise() -> None:
    states = torch.arange(1.0, 9.0).view(4, 2)
    slots, initial = ints(2, -1, 0), torch.tensor([True, True, False])
    assert read_states(states, slots).tolist() == [[5, 6], [0, 0], [1, 2]]
    assert read_initial_states(states, slots, initial).tolist() == [[5, 6], [0, 0], [0, 0]]
    assert read_initial_states(states, slots, None).tolist() == [[0, 0]] * 3
    assert read_states(states[:0], ints(-1, -1)).tolist() == [[0, 0]] * 2


@pytest.mark.parametrize(
    ("slots", "expected"),
    [((2, -1, 0), [13, 1, 11, 3]), ((-1, 3, -1), [0, 1, 2, 12]), ((-1, -1, -1), [0, 1, 2, 3]), ((-1, 0, -1), [12, 1, 2, 3])],
)
def test_states_are_written_to_slots_that_are_not_negative(slots: tuple[int, ...], expected: list[int]) -> None:
    states = torch.arange(4.0).view(4, 1).bfloat16()
    write_states(states, ints(*slots), torch.tensor([[11.0], [12.0], [13.0]]))
    assert states.flatten().tolist() == expected


def refuse(state_slots: torch.Tensor, output_slots: torch.Tensor | None = None) -> str:
    with pytest.raises(ValueError, match="must be") as raised:
        check_values_slots(Checker("decode"), torch.zeros(8, 2), state_slots, output_slots)
    return str(raised.value)


def test_slots_beyond_the_cache_are_refused() -> None:
    assert refuse(ints(0, 8)) == "decode: state_slots must be below 8, the slots of states, got 8 for request 1"
    said = refuse(ints(0, 1), ints(2, 3, 4, 9).view(2, 2))
    assert said == "decode: output_slots must be below 8, the slots of states, got 9 for request 1"


def test_a_slot_is_written_to_once() -> None:
    assert (
        refuse(ints(3, -1, 3)) == "decode: state_slots must be of distinct slots (negative: none), got slot 3 for requests [0, 2]"
    )
    said = refuse(ints(0, 1), ints(2, 5, 5, 4).view(2, 2))
    assert said == "decode: output_slots must be of distinct slots (negative: none), got slot 5 for requests [0, 1]"


def test_a_slot_that_is_written_to_is_read_by_no_other_request() -> None:
    said = refuse(ints(0, 2), ints(2, 5, 3, 4).view(2, 2))
    assert (
        said
        == "decode: output_slots must be of slots that no other request reads, got slot 2, which request 1 reads, for request 0"
    )
    check = Checker("decode")
    states = torch.zeros(8, 2)
    check_values_slots(check, states, ints(2, 3), ints(2, 5, 3, 4).view(2, 2))  # each request also writes to the slot that it reads
    check_values_slots(check, states, ints(0, 0, -1), ints(2, 5, -1, -1, -1, -1).view(3, 2))  # both read slot 0, none writes to it
    check_values_slots(check, states, ints(-1, -1))
    check_values_slots(check, states, None, ints(1, 1).view(1, 2))  # state_slots are in device memory, so nothing is checked


@pytest.mark.parametrize(("batch", "slots", "tokens"), [(5, 20, 3), (5, 15, 3), (4, 9, 1), (7, 9, None), (0, 3, 2)])
@pytest.mark.parametrize("padding", [0, 2])
def test_drawn_slots_are_allowed(batch: int, slots: int, tokens: int | None, padding: int) -> None:
    padding = min(padding, batch)
    drawn = draw_slots(Draw(), batch, slots, tokens, padding)
    states = torch.zeros(slots, 3)
    check_values_slots(Checker("decode"), states, drawn["state_slots"], drawn.get("output_slots"))
    assert padding_of(drawn["state_slots"]) == {"padding": [padding]}
    on_meta = drawn["state_slots"].to("meta"), drawn["output_slots"].to("meta") if tokens else None
    made = vary_decode(Variation(Want.CAPTURED, Draw(), padding_of(drawn["state_slots"])), states.to("meta"), *on_meta)
    check_values_slots(Checker("decode"), made["states"], made["state_slots"], made.get("output_slots"))
    assert padding_of(made["state_slots"]) == {"padding": [padding]}


@pytest.mark.parametrize("want", [Want.CAPTURED, Want.OTHER])
@pytest.mark.parametrize(("batch", "slots", "tokens"), [(4, 9, 11), (3, 2, 0), (0, 1, 0), (1, 1, 5)])
def test_prefills_are_varied_to_what_is_allowed(want: Want, batch: int, slots: int, tokens: int) -> None:
    states, state_slots = torch.zeros(slots, 2), torch.full((batch,), -1, dtype=torch.int32)
    offsets = torch.zeros(batch + 1, dtype=torch.int32)
    made = vary_prefill(Variation(want, Draw()), tokens, offsets, states, state_slots, torch.ones(batch, dtype=torch.bool))
    assert made["cu_seqlens"][-1] == (tokens if batch else 0)
    assert (made["cu_seqlens"].diff() >= 0).all()
    assert made["has_initial_state"].shape == made["state_slots"].shape == (batch,)
    check_values_slots(Checker("prefill"), made.get("states", states), made["state_slots"])


def test_unread_slots_hold_nan() -> None:
    states, slots = torch.ones(4, 2), ints(2, -1, 0)
    unused = Variation(Want.UNUSED, Draw())
    assert vary_decode(unused, states, slots, None)["states"].isnan()[:, 0].tolist() == [False, True, False, True]
    for initial, wanted in ((torch.tensor([True, True, False]), [True, True, False, True]), (None, [True] * 4)):
        made = vary_prefill(unused, 3, ints(0, 1, 2, 3), states, slots, initial)
        assert made["states"].isnan()[:, 0].tolist() == wanted

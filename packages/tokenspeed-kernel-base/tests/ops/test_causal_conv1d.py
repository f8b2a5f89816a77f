"""Tests causal convolutions: against scalar loops, prefill against decode, and rejected drafts against accepted tokens only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel_base.ops.state_space.causal_conv1d_decode import causal_conv1d_decode
from tokenspeed_kernel_base.ops.state_space.causal_conv1d_prefill import causal_conv1d_prefill

CHANNELS = 3
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=4)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def sums(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


def written_out(
    x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[list[float], torch.Tensor]:
    """Computes one sequence with scalar loops over tokens, channels and taps. Returns the results, and the inputs that precede the
    next token."""
    width = weight.shape[1]
    inputs = torch.cat((before, x))
    results = []
    for token in range(len(x)):
        for channel in range(CHANNELS):
            total = float(bias[channel])
            for i in range(width):
                total += float(weight[channel, i]) * float(inputs[token + i, channel])
            results.append(total)
    return results, inputs[len(x) :]


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, width=st.integers(2, 4), silu=st.booleans(), data=st.data())
def test_prefill_is_the_sum_written_out(lengths: list[int], width: int, silu: bool, data: st.DataObject) -> None:
    batch = len(lengths)
    started = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    padded = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    x, weight, bias = normal(sum(lengths), CHANNELS), normal(CHANNELS, width, seed=1), normal(CHANNELS, seed=2)
    states = normal(batch + 1, width - 1, CHANNELS, seed=3)
    slots = [-1 if pad else batch - b for b, pad in enumerate(padded)]
    got_states = states.clone()
    activation = "silu" if silu else None
    got = causal_conv1d_prefill(x, weight, sums(lengths), got_states, ints(*slots), bias, torch.tensor(started), activation)
    wanted, wanted_states, begin = [], states.clone(), 0
    for length, slot, start in zip(lengths, slots, started, strict=True):
        before = states[slot] if start and slot >= 0 else torch.zeros_like(states[0])
        results, after = written_out(x[begin : begin + length], before, weight, bias)
        wanted += results
        begin += length
        if slot >= 0:
            wanted_states[slot] = after
    expected = torch.tensor(wanted, dtype=torch.float64).view(-1, CHANNELS)
    torch.testing.assert_close(got, expected * expected.sigmoid() if silu else expected)
    assert torch.equal(got_states, wanted_states)


@settings(max_examples=20, deadline=None)
@given(length=st.integers(0, 9), cut=st.integers(0, 9), width=st.integers(2, 4), step=st.integers(1, 3))
def test_parts_of_a_sequence_are_the_whole(length: int, cut: int, width: int, step: int) -> None:
    """Asserts that a prefill of a whole sequence equals two prefills of its parts, and decodes of a few tokens each."""
    cut = min(cut, length)
    x, weight = normal(length, CHANNELS), normal(CHANNELS, width)
    whole = torch.zeros(1, width - 1, CHANNELS, dtype=torch.float64)
    wanted = causal_conv1d_prefill(x, weight, sums([length]), whole, ints(0))
    halves = torch.full_like(whole, torch.nan)
    begin = causal_conv1d_prefill(x[:cut], weight, sums([cut]), halves, ints(0))
    end = causal_conv1d_prefill(x[cut:], weight, sums([length - cut]), halves, ints(0), has_initial_state=torch.tensor([True]))
    torch.testing.assert_close(torch.cat((begin, end)), wanted)
    assert torch.equal(halves, whole)
    decoded = torch.zeros_like(whole)
    parts = [causal_conv1d_decode(x[None, i : i + step], weight, decoded, ints(0))[0] for i in range(0, length, step)]
    torch.testing.assert_close(torch.cat([x[:0], *parts]), wanted)
    assert torch.equal(decoded, whole)


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_rejected_drafts_leave_nothing(accepted: int) -> None:
    """Keeps the states after each of four draft tokens, for two requests. The next step starts from the state of the last accepted
    token."""
    width, x, after = 4, normal(2, 4, CHANNELS), normal(2, 1, CHANNELS, seed=5)
    weight, start = normal(CHANNELS, width), normal(2, width - 1, CHANNELS)
    kept = torch.cat((start, torch.full((8, width - 1, CHANNELS), torch.nan, dtype=torch.float64)))
    output_slots = torch.arange(2, 10, dtype=torch.int32).view(2, 4)
    drafts = causal_conv1d_decode(x, weight, kept, ints(0, 1), output_slots=output_slots)
    assert torch.equal(kept[:2], start), "where the step started is as it was"
    counts = torch.tensor([accepted, accepted])
    slots = output_slots.gather(1, counts.unsqueeze(1) - 1).flatten()
    got = causal_conv1d_decode(after, weight, kept, slots, output_slots=output_slots[:, :1])
    plain = start.clone()
    wanted = causal_conv1d_decode(x[:, :accepted], weight, plain, ints(0, 1))
    torch.testing.assert_close(drafts[:, :accepted], wanted)
    torch.testing.assert_close(got, causal_conv1d_decode(after, weight, plain, ints(0, 1)))
    assert torch.equal(kept[output_slots[:, 0].long()], plain)


def test_decode_writes_over_its_input() -> None:
    x, weight, states = normal(2, 3, CHANNELS), normal(CHANNELS, 4), normal(2, 3, CHANNELS)
    wanted = causal_conv1d_decode(x, weight, states.clone(), ints(1, 0))
    assert causal_conv1d_decode(x, weight, states, ints(1, 0), out=x) is x
    assert torch.equal(x, wanted)


def test_states_keep_inputs_in_their_own_dtype() -> None:
    x, weight = normal(2, CHANNELS).bfloat16(), normal(CHANNELS, 3).float()
    states = torch.zeros(1, 2, CHANNELS)
    causal_conv1d_prefill(x, weight, sums([2]), states, ints(0))
    assert torch.equal(states[0], x.float())


def prefill() -> dict[str, Any]:
    rest = {"states": torch.ones(3, 2, 5), "state_slots": ints(2, 0), "has_initial_state": torch.tensor([True, False])}
    return {"x": torch.ones(4, 5), "weight": torch.ones(5, 3), "cu_seqlens": ints(0, 3, 4), **rest}


def decode() -> dict[str, Any]:
    rest = {"states": torch.ones(5, 2, 5), "state_slots": ints(4, 0), "output_slots": ints(0, 1, 2, 3).view(2, 2)}
    return {"x": torch.ones(2, 2, 5), "weight": torch.ones(5, 3), **rest, "state_slots": ints(4, 3)}


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    check_custom_op(causal_conv1d_prefill, prefill())
    check_custom_op(causal_conv1d_decode, decode())

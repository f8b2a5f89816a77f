"""Tests state-space recurrences: against scalar loops, prefill against decode, and rejected drafts against accepted tokens only."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.state_space._recurrence import draw_recurrence
from tokenspeed_kernel_base.ops.state_space.ssd_decode import ssd_decode
from tokenspeed_kernel_base.ops.state_space.ssd_prefill import ssd_prefill

HEADS, HEAD_DIM, STATE_DIM, GROUPS = 4, 2, 3, 2
SIZES = (HEADS, HEAD_DIM, STATE_DIM, GROUPS)
F64 = torch.float64


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sums(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


def operands(tokens: int, full: bool, seed: int = 0) -> dict[str, Any]:
    made = draw_recurrence(Draw(seed=seed), (tokens,), *SIZES, F64, full)
    return {**made, "dt": made["dt"].double()}


def states(slots: int, seed: int = 0) -> torch.Tensor:
    return Draw(seed=seed).normal(slots, HEADS, HEAD_DIM, STATE_DIM, dtype=F64)


def written_out(given: dict[str, Any], token: int, head: int, state: list[list[float]]) -> list[float]:
    """Computes one token of one head with scalar loops, by the formula of the operator's docstring. Updates the state in place."""
    step = float(given["dt"][token, head])
    if "dt_bias" in given:
        step = math.log1p(math.exp(step + float(given["dt_bias"][head])))
        step = min(max(step, given["dt_min"]), given["dt_max"])
    group, results = head // (HEADS // GROUPS), []
    for p in range(HEAD_DIM):
        x, y = float(given["x"][token, head, p]), 0.0
        for n in range(STATE_DIM):
            taken = step * x * float(given["B"][token, group, n])
            state[p][n] = math.exp(step * float(given["A"][head])) * state[p][n] + taken
            y += state[p][n] * float(given["C"][token, group, n])
        if "z" in given:
            z = float(given["z"][token, head, p])
            y = (y + float(given["D"][head]) * x) * z / (1 + math.exp(-z))
        results.append(y)
    return results


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=3), full=st.booleans(), data=st.data())
def test_prefill_is_the_recurrence_written_out(lengths: list[int], full: bool, data: st.DataObject) -> None:
    batch, given_operands = len(lengths), operands(sum(lengths), full)
    started = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    padded = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    slots = [-1 if pad else batch - b for b, pad in enumerate(padded)]
    before = states(batch + 1)
    after, wanted_after, wanted, begin = before.clone(), before.clone(), torch.empty(0, HEADS, HEAD_DIM, dtype=F64), 0
    rest = {"cu_seqlens": sums(lengths), "states": after, "state_slots": ints(*slots), "has_initial_state": torch.tensor(started)}
    got = ssd_prefill(**given_operands, **rest)
    for length, slot, start in zip(lengths, slots, started, strict=True):
        state = before[slot].tolist() if start and slot >= 0 else torch.zeros_like(before[0]).tolist()
        results = [[written_out(given_operands, begin + t, h, state[h]) for h in range(HEADS)] for t in range(length)]
        wanted = torch.cat((wanted, torch.tensor(results, dtype=F64).view(-1, HEADS, HEAD_DIM)))
        begin += length
        if slot >= 0:
            wanted_after[slot] = torch.tensor(state, dtype=F64)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(after, wanted_after)


def part(given: dict[str, Any], begin: int, end: int, batched: bool = False) -> dict[str, Any]:
    """Returns the arguments for some tokens of one sequence, for prefill or for decode."""
    with_tokens = ("x", "dt", "B", "C", "z")
    cut = {name: value[begin:end] if name in with_tokens else value for name, value in given.items()}
    return {name: value.unsqueeze(0) if batched and name in with_tokens else value for name, value in cut.items()}


@settings(max_examples=15, deadline=None)
@given(length=st.integers(0, 8), cut=st.integers(0, 8), step=st.integers(1, 3))
def test_parts_of_a_sequence_are_the_whole(length: int, cut: int, step: int) -> None:
    """Asserts that a prefill of a whole sequence equals two prefills of its parts, and decodes of a few tokens each."""
    cut, given_operands = min(cut, length), operands(length, full=True)
    whole, halves, decoded = torch.zeros_like(states(1)), torch.full_like(states(1), torch.nan), torch.zeros_like(states(1))
    wanted = ssd_prefill(**given_operands, cu_seqlens=sums([length]), states=whole, state_slots=ints(0))
    slot: dict[str, Any] = {"states": halves, "state_slots": ints(0)}
    begin = ssd_prefill(**part(given_operands, 0, cut), cu_seqlens=sums([cut]), **slot)
    rest = {"cu_seqlens": sums([length - cut]), "has_initial_state": torch.tensor([True])}
    end = ssd_prefill(**part(given_operands, cut, length), **rest, **slot)
    torch.testing.assert_close(torch.cat((begin, end)), wanted)
    torch.testing.assert_close(halves, whole)
    slot["states"] = decoded
    parts = [ssd_decode(**part(given_operands, i, i + step, True), **slot)[0] for i in range(0, length, step)]
    torch.testing.assert_close(torch.cat([wanted[:0], *parts]), wanted)
    torch.testing.assert_close(decoded, whole)


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_rejected_drafts_leave_nothing(accepted: int) -> None:
    """Keeps the states after each of four draft tokens. The next step starts from the state of the last accepted token."""
    given_operands, start = operands(6, full=True), states(1)
    kept = torch.cat((start, torch.full((4, *start.shape[1:]), torch.nan, dtype=F64)))
    output_slots = ints(1, 2, 3, 4).view(1, 4)
    drafts = ssd_decode(**part(given_operands, 0, 4, True), states=kept, state_slots=ints(0), output_slots=output_slots)
    assert torch.equal(kept[:1], start), "where the step started is as it was"
    following = part(given_operands, 4, 6, True)
    slots = output_slots[:, accepted - 1]
    got = ssd_decode(**following, states=kept, state_slots=slots, output_slots=output_slots[:, :2])
    plain = start.clone()
    wanted = ssd_decode(**part(given_operands, 0, accepted, True), states=plain, state_slots=ints(0))
    torch.testing.assert_close(drafts[:, :accepted], wanted)
    torch.testing.assert_close(got, ssd_decode(**following, states=plain, state_slots=ints(0)))
    torch.testing.assert_close(kept[2], plain[0])


def test_states_are_rounded_where_they_are_written() -> None:
    given_operands = {name: x.bfloat16() if isinstance(x, torch.Tensor) else x for name, x in operands(3, full=True).items()}
    exact, rounded = states(1).bfloat16().float(), states(1).bfloat16()
    for kept in (exact, rounded):
        ssd_decode(**part(given_operands, 0, 3, True), states=kept, state_slots=ints(0))
    assert torch.equal(exact.bfloat16(), rounded)


def prefill() -> dict[str, Any]:
    rest = {"states": torch.ones(3, 4, 2, 3), "state_slots": ints(2, 0), "has_initial_state": torch.tensor([True, False])}
    return {**draw_recurrence(Draw(), (4,), *SIZES, torch.float32, True), "cu_seqlens": ints(0, 3, 4), **rest}


def decode() -> dict[str, Any]:
    rest = {"states": torch.ones(5, 4, 2, 3), "state_slots": ints(4, 3), "output_slots": ints(0, 1, 2, 3).view(2, 2)}
    return {**draw_recurrence(Draw(), (2, 2), *SIZES, torch.float32, True), **rest}


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    check_custom_op(ssd_prefill, prefill())
    check_custom_op(ssd_decode, decode())


def test_step_sizes_of_float64_are_exact_beyond_the_threshold_of_torch() -> None:
    # torch.nn.functional.softplus returns its argument above 20, which is off by 1e-10 there.
    dt, ones = torch.tensor([[20.5]], dtype=F64), torch.ones(1, 1, 1, dtype=F64)
    got = ssd_prefill(ones, dt, -ones.flatten(), ones, ones, ints(0, 1), states(0)[:, :1, :1, :1], ints(-1), dt_softplus=True)
    assert got.item() == pytest.approx(math.log1p(math.exp(20.5)), rel=1e-15, abs=0)


@pytest.mark.parametrize("length", [1, 8, 21])
@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.05, 0.4)], ids=str)
def test_prefill_is_the_chunked_scan_of_transformers(length: int, limits: tuple[float, float]) -> None:
    given = {name: x.float() for name, x in operands(length, True, seed=length).items() if isinstance(x, torch.Tensor)}
    given["dt"], gate, first = given["dt"] * 3, given.pop("z"), states(1).float()
    x, dt, B, C = (given[name].unsqueeze(0) for name in ("x", "dt", "B", "C"))
    expected, final = inspect.unwrap(mamba2_chunk_scan)(
        x, dt, given["A"], B, C, 8, given["D"], given["dt_bias"], first, True, limits, return_final_states=True
    )
    cache = first.clone()
    options: dict[str, Any] = {"dt_softplus": True, "dt_min": limits[0], "dt_max": limits[1]}
    every = torch.tensor([True])
    got = ssd_prefill(
        **given, **options, z=gate, cu_seqlens=ints(0, length), states=cache, state_slots=ints(0), has_initial_state=every
    )
    torch.testing.assert_close(got, expected[0] * torch.nn.functional.silu(gate), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache, final, rtol=1e-4, atol=1e-5)

"""Tests the gated delta rule against its definition, step by step in float64, and against its chunked form. Also tests the slots of
states."""

from __future__ import annotations

import importlib
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.linear_attention._delta_rule import draw_operands
from tokenspeed_kernel_base.ops.linear_attention.gated_delta_rule_decode import gated_delta_rule_decode
from tokenspeed_kernel_base.ops.linear_attention.gated_delta_rule_prefill import gated_delta_rule_prefill

HEADS, V_HEADS, K, V = 2, 4, 6, 5


def tokens_of(count: int, gate: str = "head", raw: bool = False, seed: int = 0) -> dict[str, Any]:
    drawn = draw_operands(Draw(seed=seed), (count,), HEADS, V_HEADS, K, V, torch.float64, gate, raw, fused=False, unit=True)
    return {name: x.double() for name, x in drawn.items()}


def initial_states(slots: int = 1) -> Tensor:
    return torch.randn(slots, V_HEADS, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def stepped(arguments: dict[str, Any], state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Computes ``S = (I - beta k k.T) diag(alpha) S + beta k v.T`` and ``o = scale S.T q``, one head and one token at a time."""
    q, k, v, g, beta = (arguments[name] for name in ("q", "k", "v", "g", "beta"))
    out, final = torch.empty_like(v), state.clone()
    for head in range(V_HEADS):
        source = head // (V_HEADS // HEADS)
        s = final[head].clone()
        for t in range(len(v)):
            alpha = g[t, head].exp() * torch.ones(K, dtype=torch.float64)
            key, b = k[t, source].unsqueeze(1), beta[t, head]
            s = (torch.eye(K, dtype=torch.float64) - b * key @ key.T) @ torch.diag(alpha) @ s + b * key @ v[t, head].unsqueeze(0)
            out[t, head] = scale * s.T @ q[t, source]
        final[head] = s
    return out, final


def chunked(arguments: dict[str, Any], state: Tensor, scale: float, size: int) -> tuple[Tensor, Tensor]:
    """Computes the same as `stepped` in chunks of ``size`` tokens. The values that a chunk writes solve a unit triangular system
    (arXiv:2412.06464, arXiv:2510.26692)."""
    q, k, v, g, beta = (arguments[name] for name in ("q", "k", "v", "g", "beta"))
    out, final = torch.empty_like(v), state.clone()
    for head in range(V_HEADS):
        source = head // (V_HEADS // HEADS)
        for at in range(0, len(v), size):
            part = slice(at, at + size)
            queries, keys, s = q[part, source], k[part, source], final[head]
            logs = g[part, head].reshape(len(keys), -1).expand(len(keys), K).cumsum(0)
            decay = (logs.unsqueeze(1) - logs.unsqueeze(0)).exp()
            system = torch.einsum("id,jd,ijd->ij", keys, keys, decay).tril(-1) * beta[part, head].unsqueeze(1)
            wanted = beta[part, head].unsqueeze(1) * (v[part, head] - (keys * logs.exp()) @ s)
            written = torch.linalg.solve_triangular(system + torch.eye(len(keys), dtype=torch.float64), wanted, upper=False)
            weights = torch.einsum("id,jd,ijd->ij", queries, keys, decay).tril()
            out[part, head] = scale * ((queries * logs.exp()) @ s + weights @ written)
            final[head] = logs[-1].exp().unsqueeze(1) * s + (keys * (logs[-1] - logs).exp()).T @ written
    return out, final


@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("lengths", [(1,), (7, 0, 3)], ids=str)
def test_prefill_is_the_published_recurrence(lengths: tuple[int, ...], gate: str) -> None:
    arguments = tokens_of(sum(lengths), gate)
    states = initial_states(5)
    before, slots = states.clone(), ints(4, 1, 2)[: len(lengths)]
    has_initial = torch.tensor([True, True, False])[: len(lengths)]
    cu_seqlens = Draw().cumulative(lengths)
    out = gated_delta_rule_prefill(
        **arguments, states=states, cu_seqlens=cu_seqlens, state_slots=slots, has_initial_state=has_initial
    )
    for sequence, slot in enumerate(slots.tolist()):
        part = slice(int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1]))
        first = before[slot] if has_initial[sequence] else torch.zeros_like(before[slot])
        expected, final = stepped({name: x[part] for name, x in arguments.items()}, first, K**-0.5)
        torch.testing.assert_close(out[part], expected)
        torch.testing.assert_close(states[slot], final)
    others = [slot for slot in range(5) if slot not in slots]
    assert torch.equal(states[others], before[others])


@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 17])
def test_chunked_and_stepwise_results_agree(length: int, gate: str) -> None:
    arguments, first = tokens_of(length, gate, seed=length), initial_states()[0]
    for wanted, found in zip(stepped(arguments, first, 0.3), chunked(arguments, first, 0.3, 8), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_raw_gates_and_lengths_are_what_layers_compute(gate: str) -> None:
    raw = tokens_of(5, gate, raw=True)
    a, bias, rate = raw["g"], raw["dt_bias"], raw["A_log"].double().exp()
    given = {name: raw[name] for name in ("q", "k", "v")}
    given["q"] = raw["q"] / (raw["q"].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    given["k"] = raw["k"] / (raw["k"].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    given["g"] = -(rate.unsqueeze(1) if gate == "channel" else rate) * torch.log1p((a + bias.double()).exp())
    given["beta"] = 1 / (1 + (-raw["beta"]).exp())
    batch = {name: x.unsqueeze(0) if name not in ("A_log", "dt_bias") else x for name, x in raw.items()}
    states = initial_states()
    expected, final = stepped(given, states[0], 0.7)
    out = gated_delta_rule_decode(**batch, states=states, state_slots=ints(0), qk_l2norm=True, scale=0.7)
    torch.testing.assert_close(out[0], expected)
    torch.testing.assert_close(states[0], final)


@pytest.mark.parametrize(
    ("model", "function"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule"),
        ("qwen3_next", "torch_recurrent_gated_delta_rule"),
        ("kimi_linear", "chunk_kimi_delta_attention"),
        ("kimi_linear", "recurrent_kimi_delta_attention"),
    ],
)
@pytest.mark.parametrize("length", [1, 64, 131])
def test_it_is_the_layer_of_transformers(model: str, function: str, length: int) -> None:
    published = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), function)
    drawn = {name: x.float() for name, x in tokens_of(length, "head" if model == "qwen3_next" else "channel", seed=length).items()}
    states = initial_states().float()
    q, k, v, g, beta = (drawn[name].unsqueeze(0) for name in ("q", "k", "v", "g", "beta"))
    q, k = (x.repeat_interleave(V_HEADS // HEADS, dim=2) for x in (q, k))
    options: dict[str, Any] = {"initial_state": states.clone(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, final = inspect.unwrap(published)(q, k, v, g, beta, **options)
    cu_seqlens, every = ints(0, length), torch.tensor([True])
    out = gated_delta_rule_prefill(
        **drawn, states=states, cu_seqlens=cu_seqlens, state_slots=ints(0), has_initial_state=every, qk_l2norm=True
    )
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, final.float(), rtol=1e-4, atol=1e-5)


def test_a_prompt_in_parts_is_the_prompt() -> None:
    arguments = tokens_of(9, "channel")
    parts = [{name: x[part] for name, x in arguments.items()} for part in (slice(0, 4), slice(4, 7), slice(7, 9))]
    whole, states = initial_states(), initial_states()
    every = torch.tensor([True])
    out = gated_delta_rule_prefill(**arguments, states=whole, cu_seqlens=ints(0, 9), state_slots=ints(0), has_initial_state=every)
    found = [
        gated_delta_rule_prefill(**part, states=states, cu_seqlens=ints(0, n), state_slots=ints(0), has_initial_state=every)
        for part, n in zip(parts[:2], (4, 3), strict=True)
    ]
    last = {name: x.unsqueeze(0) for name, x in parts[2].items()}
    found.append(gated_delta_rule_decode(**last, states=states, state_slots=ints(0))[0])
    torch.testing.assert_close(torch.cat(found), out)
    torch.testing.assert_close(states, whole)


def test_accepting_part_of_a_draft_is_choosing_a_slot() -> None:
    """Accepts two of four draft tokens. The next call reads the state after the second token, so its result is as if only two
    tokens had been decoded."""
    draft = {name: x.unsqueeze(0) for name, x in tokens_of(4).items()}
    following = {name: x.unsqueeze(0) for name, x in tokens_of(1, seed=1).items()}
    states = initial_states(6).float().double()
    plain = states.clone()
    verified = gated_delta_rule_decode(**draft, states=states, state_slots=ints(3), output_slots=ints(0, 5, 1, 2).view(1, 4))
    assert torch.equal(states[3:5], plain[3:5]), "what was read stays, and so does what nobody names"
    accepted = {name: x[:, :2] for name, x in draft.items()}
    decoded = gated_delta_rule_decode(**accepted, states=plain, state_slots=ints(3))
    assert torch.equal(verified[:, :2], decoded)
    assert torch.equal(states[5], plain[3])
    after = gated_delta_rule_decode(**following, states=states, state_slots=ints(5))
    assert torch.equal(after, gated_delta_rule_decode(**following, states=plain, state_slots=ints(3)))


def test_padding_starts_from_zeros_and_writes_nothing() -> None:
    arguments = {name: torch.stack((x, x)) for name, x in tokens_of(2).items()}
    states = initial_states(2)
    before = states.clone()
    out = gated_delta_rule_decode(**arguments, states=states, state_slots=ints(-1, 1))
    expected, _ = stepped({name: x[0] for name, x in arguments.items()}, torch.zeros_like(before[0]), K**-0.5)
    torch.testing.assert_close(out[0], expected)
    assert torch.equal(states[0], before[0])
    assert not torch.equal(states[1], before[1])
    gated_delta_rule_decode(**arguments, states=before, state_slots=ints(0, 1), output_slots=ints(-1, -1, -1, -1).view(2, 2))
    assert torch.equal(before, initial_states(2))


def test_raw_gates_of_float64_are_exact_beyond_the_threshold_of_torch() -> None:
    # torch.nn.functional.softplus returns its argument above 20, which is off by 1e-10 there.
    one, zero = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    states, no_decay = one.clone(), torch.zeros(1, dtype=torch.float64)
    got = gated_delta_rule_decode(one, zero, zero, 20.5 * one[0], zero[0], states, ints(0), A_log=no_decay, scale=1.0)
    assert got.item() == pytest.approx(1 / (1 + math.exp(20.5)), rel=1e-14, abs=0)

"""Compares vLLM's operator of the gated delta rule, run on the core's kernel, with the recurrence in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("tokenspeed_kernel", reason="the gated delta rule is the core's")

from vllm.model_executor import custom_op
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import ChunkGatedDeltaRule

from tokenspeed_kernel_vllm import delta_rule, parts
from tokenspeed_kernel_vllm.delta_rule import DeltaRule
from tokenspeed_kernel_vllm.settings import Settings

HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 16, 8
OFFSETS = [0, 5, 5, 12]


@pytest.fixture(autouse=True)
def _a_model_and_no_replacements(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    text = SimpleNamespace(linear_key_head_dim=K_DIM)
    monkeypatch.setattr(vllm_config, "model_config", SimpleNamespace(hf_text_config=text), raising=False)


@pytest.fixture
def rule() -> DeltaRule:
    """vLLM's operator, as its layer makes it after the plugin's registration."""
    parts.register_parts(Settings(attention=False, experts=False, delta_rule=True))
    made = ChunkGatedDeltaRule()
    assert isinstance(made, DeltaRule)
    return made


def inputs(dtype: torch.dtype = torch.bfloat16, states: torch.dtype = torch.float32) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    tokens = OFFSETS[-1]
    q, k = (torch.randn(1, tokens, HEADS, K_DIM, generator=draw).to(dtype) for _ in range(2))
    v = torch.randn(1, tokens, V_HEADS, V_DIM, generator=draw).to(dtype)
    initial = torch.randn(3, V_HEADS, V_DIM, K_DIM, generator=draw).to(states)
    initial[0] = 0  # a prompt that begins
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": -torch.rand(1, tokens, V_HEADS, generator=draw),
        "beta": torch.rand(1, tokens, V_HEADS, generator=draw),
        "initial_state": initial,
        "output_final_state": True,
        "cu_seqlens": torch.tensor(OFFSETS, dtype=torch.int32),
    }


def recurrence(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gated delta rule token by token, in float64. For each token the state decays, and then gets the difference
    between the value and what the state returns for the key."""
    q, k, v = (given[name][0].double() for name in ("q", "k", "v"))
    q, k = (torch.nn.functional.normalize(part, dim=-1).repeat_interleave(V_HEADS // HEADS, 1) for part in (q, k))
    outs, states = [], given["initial_state"].double()
    for sequence, state in enumerate(states):
        for token in range(OFFSETS[sequence], OFFSETS[sequence + 1]):
            state *= given["g"][0, token].double().exp().view(-1, 1, 1)
            missing = v[token] - torch.einsum("hvk,hk->hv", state, k[token])
            state += torch.einsum("hv,hk->hvk", missing * given["beta"][0, token].double().unsqueeze(1), k[token])
            outs.append(torch.einsum("hvk,hk->hv", state, q[token]) / K_DIM**0.5)
    return torch.stack(outs), states


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_prompts_and_chunks(rule: DeltaRule, states: torch.dtype) -> None:
    given = inputs(states=states)
    before = given["initial_state"].clone()
    expected, after = recurrence(given)
    outputs = torch.zeros(OFFSETS[-1] + 3, V_HEADS, V_DIM, dtype=torch.bfloat16)  # vLLM's buffer may have further rows
    out, final = rule(**given, chunk_indices=None, chunk_offsets=None, core_attn_out=outputs)
    assert (out.shape, out.dtype) == ((1, OFFSETS[-1], V_HEADS, V_DIM), torch.bfloat16)
    torch.testing.assert_close(out[0].double(), expected, rtol=2e-2, atol=2e-2)
    assert final is not None
    torch.testing.assert_close(final.double(), after, rtol=2e-2, atol=2e-2)
    assert torch.equal(outputs[: OFFSETS[-1]], out[0])
    assert not outputs[OFFSETS[-1] :].any()
    assert torch.equal(given["initial_state"], before)
    assert rule(**{**given, "output_final_state": False})[1] is None


def test_what_is_not_served_is_vllms_own(rule: DeltaRule, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def own(*given: Any, **options: Any) -> str:
        asked.append(options)
        return "vLLM's own"

    rule.own = own
    given = inputs(states=torch.float16)
    assert rule(**given, chunk_indices="indices") == "vLLM's own"
    assert (asked[0]["chunk_indices"], asked[0]["cu_seqlens"]) == ("indices", given["cu_seqlens"])
    assert rule(**{**inputs(), "cu_seqlens": None}) == "vLLM's own"

    def refuse(*_: Any) -> Any:
        raise delta_rule.NotServedError("no kernel")

    monkeypatch.setattr(delta_rule, "kernel_for", refuse)
    assert rule(**inputs()) == "vLLM's own"


def test_off_by_default() -> None:
    parts.register_parts(Settings(attention=False, experts=False))
    assert type(ChunkGatedDeltaRule()) is ChunkGatedDeltaRule

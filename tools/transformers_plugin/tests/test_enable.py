"""Tests `enable`: the layers that then run on our kernels, and the models' results."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers: `nox -s transformers` installs it")
pytest.importorskip("tokenspeed_kernel_transformers", reason="needs the plugin: `nox -s transformers` installs it")

from tiny_models import CONFIGURATIONS, generate, make, padding, prompts

import tokenspeed_kernel_transformers
from tokenspeed_kernel_transformers import enable

# The parts of each model that run on our kernels. Layers with a state always run transformers' own code.
PARTS = {
    "llama": {"attention", "norms", "gated MLPs"},
    "qwen3": {"attention", "norms", "gated MLPs"},
    "mistral": {"attention", "norms", "gated MLPs"},
    "mixtral": {"attention", "experts", "norms"},
    "qwen3_moe": {"attention", "experts", "norms"},
    "gpt_oss": {"attention", "experts", "norms"},
    "gemma2": {"attention", "norms", "gated MLPs"},
    "gemma3": {"attention", "norms", "gated MLPs"},
    "deepseek_v3": {"attention", "experts", "norms", "gated MLPs"},
    "qwen3_next": {"attention", "experts", "gated MLPs"},
    "mamba2": set(),
}


@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", sorted(CONFIGURATIONS))
def test_models(name: str, kind: str) -> None:
    model, ids = make(name), prompts()
    names = set(model.state_dict())
    expected = generate(model, ids, padding(kind, ids))
    receipt = enable(model)
    got = generate(model, ids, padding(kind, ids))
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(got.tokens, expected.tokens)
    assert {row.part for row in receipt.rows if receipt.served(row.part)} == PARTS[name], str(receipt)
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_attention_is_on_by_default(name: str) -> None:
    assert enable(make(name)).served("attention")
    assert [row.reason for row in enable(make(name), attention=False).rows if row.part == "attention"] == ["it is switched off"]


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "gemma3"])
def test_bf16(name: str) -> None:
    """The error of the first logits relative to float32 must be at most twice the error of transformers' own code."""
    ids, wide, model = prompts(), make(name), make(name, torch.bfloat16)
    wide.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    expected = generate(wide, ids, new=1).logits
    own = (generate(model, ids, new=1).logits.float() - expected).abs().mean()
    enable(model)
    assert (generate(model, ids, new=1).logits.float() - expected).abs().mean() < 2 * own


def test_the_table() -> None:
    table = str(enable(make("gpt_oss"))).splitlines()
    assert table[0].split() == ["part", "layers", "kind", "runs", "on"]
    assert "GptOssAttention, window 6, sinks" in table[1]
    assert "mha_decode_with_kvcache" in table[1]
    assert "moe_apply (dense)" in "\n".join(table)


def test_refused_by_name() -> None:
    rows = enable(make("mamba2")).rows
    assert [(row.part, row.kind) for row in rows if not row.kernels] == [("mixers", "Mamba2Mixer"), ("norms", "MambaRMSNormGated")]
    rows = enable(make("qwen3_next")).rows
    refused = {row.kind: row.reason for row in rows if not row.kernels}
    assert set(refused) == {"Qwen3NextGatedDeltaNet", "Qwen3NextRMSNormGated"}
    assert "no hook" in refused["Qwen3NextGatedDeltaNet"]


@pytest.mark.parametrize("switch", ["attention", "experts", "norms", "gated_mlps"])
def test_switches(switch: str) -> None:
    model = make("deepseek_v3")
    receipt = enable(model, **{switch: False})
    part = switch.replace("gated_mlps", "gated MLPs")
    assert {row.part for row in receipt.rows if not row.kernels} == {part}
    assert "switched off" in str(receipt)
    assert (model.config._attn_implementation == "eager") == (switch == "attention")
    assert (model.config._experts_implementation == "eager") == (switch == "experts")


def test_one_layer_that_is_not_served_keeps_the_others(caplog: Any) -> None:
    model = make("mixtral")
    model.model.layers[1].mlp.experts.has_gate = False
    model.model.layers[1].self_attn.head_dim = 0
    receipt = enable(model, norms=False)
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation == "eager"
    assert not receipt.served("attention")
    reasons = {row.reason for row in receipt.rows if row.part in ("attention", "experts")}
    assert "no kernel is eligible for other layers of the model" in reasons
    assert any("without a gate" in reason for reason in reasons)
    assert any("head_dim" in reason for reason in reasons)
    assert not hasattr(model.model.layers[0].mlp.experts, "tokenspeed_arranged")


def test_models_that_take_no_other_attention() -> None:
    model = make("llama")
    model._supports_attention_backend = model._supports_flash_attn = False
    receipt = enable(model)
    assert "does not pass masks" in str(receipt)
    assert model.config._attn_implementation == "eager"


def test_enabled_twice() -> None:
    model, ids = make("gemma3"), prompts()
    enable(model)
    expected = generate(model, ids)
    assert enable(model).served("attention")
    torch.testing.assert_close(generate(model, ids).logits, expected.logits)


def test_import_is_light() -> None:
    code = "import sys, tokenspeed_kernel_transformers; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert tokenspeed_kernel_transformers.__version__.endswith("+independent")

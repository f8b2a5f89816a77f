from __future__ import annotations

import json
import math

import pytest
import torch
from gpt_oss_models import YARN, make_config

from gpt_oss.config import FULL, PRESETS, SLIDING, Config, ConfigError, RopeConfig, preset
from gpt_oss.rope import cos_sin_cache, inverse_frequencies

# The parts of the published gpt-oss-120b's config.json that say what it computes.
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": [SLIDING, FULL] * 18,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_published_config_is_the_preset() -> None:
    config = Config.from_hf(PUBLISHED)
    expected = preset("gpt-oss-120b")
    assert config == Config(**{**vars(expected), "eos_token_ids": (200002,)})
    assert [config.window_left(layer) for layer in (0, 1)] == [127, -1]


@pytest.mark.parametrize("name", PRESETS)
def test_hf_round_trip(name: str) -> None:
    assert Config.from_hf(json.loads(json.dumps(preset(name).to_hf()))) == preset(name)


def test_transformers_reads_what_is_written() -> None:
    transformers = pytest.importorskip("transformers")
    config = make_config(rope=YARN)
    theirs = transformers.GptOssConfig.from_dict(config.to_hf())
    assert Config.from_hf(theirs.to_dict()) == config


def test_tiny_has_the_structure_of_the_big_ones() -> None:
    config = preset("tiny")
    assert set(config.layer_types) == {SLIDING, FULL}
    assert config.rope.kind == "yarn"
    assert config.quantization == "mxfp4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds num_local_experts 4"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"layer_types": ()}, "at least one layer"),
        ({"layer_types": ("linear_attention",)}, "linear_attention"),
        ({"quantization": "awq"}, "awq"),
        ({"quantization": "mxfp4"}, "multiples of 32"),
    ],
)
def test_impossible_configurations(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


def test_all_problems_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"hidden_size.*head_dim must be even"):
        make_config(hidden_size=0, head_dim=7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type must be gpt_oss"),
        ({"hidden_size": None, "head_dim": None}, "lacks hidden_size, head_dim"),
        ({"num_experts_per_tok": None, "experts_per_token": None}, "num_experts_per_tok"),
        ({"num_hidden_layers": 35}, "layer_types names 36 layers, num_hidden_layers is 35"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope must be"),
        ({"rope_scaling": {**PUBLISHED["rope_scaling"], "mscale": 0.7}}, "mscale"),
    ],
)
def test_unusable_config_json(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_hf({**PUBLISHED, **changes})


def test_unreadable_directory(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        Config.from_directory(tmp_path)


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'huge'; there are tiny"):
        preset("huge")


def test_with_layers() -> None:
    assert preset("tiny").with_layers(1).layer_types == (SLIDING,)
    assert preset("tiny").with_layers(6).layer_types == (SLIDING, FULL) * 3


ROPES = [
    RopeConfig(theta=10000.0),
    YARN,
    RopeConfig(kind="yarn", factor=32.0, truncate=False),
    RopeConfig(kind="yarn", factor=40.0, original_max_positions=64, truncate=True, theta=1000.0),
    RopeConfig(kind="yarn", factor=2.0, original_max_positions=7, beta_fast=8.0, beta_slow=2.0, attention_factor=1.25),
]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_rope_is_that_of_transformers(rope: RopeConfig, head_dim: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    config = make_config(rope=rope, head_dim=head_dim)
    theirs = GptOssRotaryEmbedding(transformers.GptOssConfig.from_dict(config.to_hf()))
    positions = torch.arange(config.max_position_embeddings)
    cos, sin = theirs(torch.zeros(1), positions[None])
    ours = cos_sin_cache(rope, head_dim, len(positions))
    # A last bit of a frequency, 128 positions along.
    torch.testing.assert_close(ours, torch.cat((cos, sin), -1)[0], rtol=0, atol=1e-5)


def test_yarn_keeps_fast_frequencies_and_stretches_slow_ones() -> None:
    rope = RopeConfig(kind="yarn", factor=32.0)
    plain, stretched = inverse_frequencies(RopeConfig(), 64), inverse_frequencies(rope, 64)
    assert torch.equal(stretched[:4], plain[:4])
    torch.testing.assert_close(stretched[-4:], plain[-4:] / 32)
    assert ((stretched >= plain / 32 * 0.999999) & (stretched <= plain)).all()
    assert rope.scale == pytest.approx(1 + 0.1 * math.log(32))

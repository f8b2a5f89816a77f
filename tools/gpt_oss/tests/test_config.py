from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gpt_oss_models import YARN, make_config, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_oss.batch import Piece, make_batch
from gpt_oss.config import FULL, PRESETS, SLIDING, Config, ConfigError, RopeConfig, preset
from gpt_oss.loader import RandomTensors
from gpt_oss.model import GptOss
from gpt_oss.rope import cos_sin_cache, inverse_frequencies

# The fields of gpt-oss-120b's published config.json that determine the model's computation.
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
        ({"vocab_size": 0}, "vocab_size must be an int from 1 to 2147483647, got 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok must be at most num_local_experts, got 5 and 4"),
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


NAN, INF = float("nan"), float("inf")
NO_INT = (None, "131", "", [131], {}, 131.0, 1.5, NAN, True, torch.tensor(8), np.int64(8))
NO_COUNT = (*NO_INT, 0, -1, 2**31, 10**5000)
NO_NUMBER = (None, "1", [1.0], True, np.float32(1), torch.tensor(1.0), NAN, INF, -INF, 1e39, 10**5000)
NO_POSITIVE = (*NO_NUMBER, 0, 0.0, -1.0)
NO_FLAG = (None, 0, 1, "true", "", np.True_)
NO_LIST = (None, "sliding_attention", 2, True, {SLIDING: 1})
WRONG: dict[str, tuple[object, ...]] = {
    "vocab_size": NO_COUNT,
    "hidden_size": NO_COUNT,
    "intermediate_size": NO_COUNT,
    "num_attention_heads": NO_COUNT,
    "num_key_value_heads": NO_COUNT,
    "head_dim": NO_COUNT,
    "num_local_experts": NO_COUNT,
    "num_experts_per_tok": NO_COUNT,
    "sliding_window": NO_COUNT,
    "max_position_embeddings": NO_COUNT,
    "rms_norm_eps": NO_POSITIVE,
    "swiglu_alpha": NO_NUMBER,
    "swiglu_limit": NO_POSITIVE,
    "attention_bias": NO_FLAG,
    "tie_word_embeddings": NO_FLAG,
    "layer_types": (*NO_LIST, [], (), ["sliding"], [SLIDING, None], [SLIDING, 1], [[SLIDING]], [torch.tensor(1)]),
    "eos_token_ids": (*NO_LIST, 5, [-1], [97], [1.0], [True], ["5"], [None]),
    "quantization": (True, 4, ["mxfp4"], {}, "MXFP4", "fp8", ""),
    "rope": (None, {}, {"theta": 1e4}, "yarn", RopeConfig),
}
WRONG_ROPE: dict[str, tuple[object, ...]] = {
    "theta": (*NO_POSITIVE, 1.0),
    "kind": (None, True, 1, "linear", "YARN", "", ["yarn"]),
    "factor": (*NO_POSITIVE, 0.5),
    "original_max_positions": NO_COUNT,
    "beta_fast": (*NO_POSITIVE, 0.5),  # 0.5 is below beta_slow
    "beta_slow": (*NO_POSITIVE, 33.0),
    "truncate": NO_FLAG,
    "attention_factor": tuple(value for value in NO_POSITIVE if value is not None),
}


@pytest.mark.parametrize("name", WRONG)
def test_fields_of_the_wrong_type_or_value(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ConfigError, match=rf"(^|; ){name}(\[\d\])? must .*, got ") as caught:
            make_config(**{name: value})
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", WRONG_ROPE)
def test_rope_fields_of_the_wrong_type_or_value(name: str) -> None:
    for value in WRONG_ROPE[name]:
        with pytest.raises(ConfigError, match=rf"(?s)(beta_fast|{name}) must .*(beta_slow|{name})?, got "):
            RopeConfig(**{"kind": "yarn", "factor": 2.0, name: value})


def test_every_field_is_tested() -> None:
    assert WRONG.keys() == {field.name for field in dataclasses.fields(Config)}
    assert WRONG_ROPE.keys() == {field.name for field in dataclasses.fields(RopeConfig)}


def test_ints_stand_for_floats_and_lists_for_tuples() -> None:
    config = make_config(swiglu_limit=7, rms_norm_eps=1, layer_types=[SLIDING, FULL], eos_token_ids=[3])
    assert config == make_config(swiglu_limit=7.0, rms_norm_eps=1.0, layer_types=(SLIDING, FULL), eos_token_ids=(3,))
    assert isinstance(config.swiglu_limit, float)
    assert isinstance(RopeConfig(theta=10**30).theta, float)
    assert hash(config) == hash(make_config(swiglu_limit=7.0, rms_norm_eps=1.0, eos_token_ids=(3,)))


def test_all_problems_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"hidden_size.*head_dim must be even"):
        make_config(hidden_size=0, head_dim=7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type must be 'gpt_oss', got 'llama'"),
        ({"hidden_size": None, "head_dim": None}, "lacks hidden_size, head_dim"),
        ({"num_experts_per_tok": None, "experts_per_token": None}, "num_experts_per_tok"),
        ({"num_hidden_layers": 35}, "layer_types must name num_hidden_layers = 35 layers, got 36"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling.rope_type must be 'default' or 'yarn', got 'linear'",
        ),
        ({"rope_scaling": {**PUBLISHED["rope_scaling"], "mscale": 0.7}}, r"rope_scaling must hold .* only, got mscale, which"),
        ({"vocab_size": "131"}, r"vocab_size must be an int from 1 to 2147483647, got '131' \(str\)"),
        ({"vocab_size": 1.5}, r"vocab_size must be an int .*, got 1.5 \(float\)"),
        ({"vocab_size": True}, r"vocab_size must be an int .*, got True \(bool\)"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"hidden_act": 3}, r"hidden_act must be 'silu', got 3 \(int\)"),
        ({"model_type": 3}, r"model_type must be 'gpt_oss', got 3 \(int\)"),
        ({"num_hidden_layers": "36"}, r"num_hidden_layers must be an int from 1 to 10000, got '36' \(str\)"),
        ({"num_hidden_layers": 0, "layer_types": None}, "num_hidden_layers must be an int from 1 to 10000, got 0"),
        ({"num_hidden_layers": 10**12, "layer_types": None}, "num_hidden_layers must be an int from 1 to 10000, got 10"),
        ({"num_hidden_layers": 1, "layer_types": []}, "layer_types must name num_hidden_layers = 1 layers, got 0"),
        ({"layer_types": SLIDING}, r"layer_types must be a list or tuple .*, got 'sliding_att.*' \(str\)"),
        ({"layer_types": [SLIDING, "linear_attention"] * 18}, r"layer_types\[35\] must be .*, got 'linear_attention'"),
        ({"layer_types": [SLIDING, None] * 18}, r"layer_types\[1\] must be 'sliding_attention' or .*, got None"),
        ({"eos_token_id": 201088}, "eos_token_id must be an int from 0 to 201087, got 201088"),
        ({"eos_token_id": [1, "2"]}, r"eos_token_id must be an int from 0 to 201087, got '2' \(str\)"),
        ({"eos_token_id": {"id": 2}}, r"eos_token_id must be an int from 0 to 201087, got \{'id': 2\} \(dict\)"),
        ({"num_experts_per_tok": None, "experts_per_token": "4"}, "experts_per_token must be an int"),
        ({"num_experts_per_tok": None, "experts_per_token": 129}, "experts_per_token must be at most num_local_experts"),
        ({"quantization_config": "mxfp4"}, r"quantization_config must be an object, got 'mxfp4' \(str\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method must be 'mxfp4' or None, got 'fp8'"),
        ({"quantization_config": {"quant_method": 4}}, r"quantization_config.quant_method must be .*, got 4 \(int\)"),
        ({"attention_bias": "false"}, r"attention_bias must be True or False, got 'false' \(str\)"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps must be a number from 1e-37 to 1e[+]38, got nan"),
        ({"rope_theta": "150000"}, r"rope_scaling.rope_theta must be a number .*, got '150000' \(str\)"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object with fields such as rope_type, got \[1\] \(list\)"),
        ({"rope_scaling": 0}, r"rope_scaling must be an object .*, got 0 \(int\)"),
        ({"rope_parameters": "yarn"}, r"rope_parameters must be an object .*, got 'yarn' \(str\)"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"rope_scaling.factor must be a number from 1 to 1e\+38, got None"),
        ({"rope_scaling": {"type": "yarn", "factor": "32"}}, r"rope_scaling.factor must be a number .*, got '32' \(str\)"),
        (
            {"rope_scaling": {**PUBLISHED["rope_scaling"], "original_max_position_embeddings": 4096.5}},
            r"rope_scaling.original_max_position_embeddings must be an int .*, got 4096.5 \(float\)",
        ),
        ({"rope_scaling": {**PUBLISHED["rope_scaling"], "truncate": "false"}}, r"rope_scaling.truncate must be True or False"),
        (
            {"rope_scaling": {**PUBLISHED["rope_scaling"], "beta_fast": 0.5}},
            "beta_fast must be at least beta_slow, got 0.5 and 1.0",
        ),
        ({"rope_scaling": {**PUBLISHED["rope_scaling"], "attention_factor": [1]}}, r"attention_factor must be .*, got \[1\]"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn"}}}, "rope_parameters must hold .* only, got full_attention, which"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor must be 1, got 0.5"),
    ],
)
def test_unusable_config_json(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_hf({**PUBLISHED, **changes})


@pytest.mark.parametrize("content", [None, [], [1], "config", 5, [PUBLISHED]])
def test_what_is_no_object(content: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.json must hold an object, got "):
        Config.from_hf(content)


def test_everything_that_is_wrong_with_config_json_is_in_one_error() -> None:
    changes = {"vocab_size": "131", "head_dim": None, "hidden_act": "gelu", "eos_token_id": -1, "num_hidden_layers": 2.0}
    rope = {**PUBLISHED["rope_scaling"], "factor": None, "mscale": 1.0}
    with pytest.raises(ConfigError) as caught:
        Config.from_hf({**PUBLISHED, **changes, "rope_scaling": rope})
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == [
        "config.json",
        "hidden_act",
        "num_hidden_layers",
        "rope_scaling.factor",
        "rope_scaling",
        "vocab_size",
    ]
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_yarn_without_a_trained_context_takes_the_model_s() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0}
    assert RopeConfig.from_hf({"rope_scaling": rope}).original_max_positions == 131072
    assert RopeConfig.from_hf({"rope_scaling": rope, "max_position_embeddings": 512}).original_max_positions == 512


def test_where_rope_is_described() -> None:
    old = {"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}, "rope_theta": 1000}
    assert RopeConfig.from_hf(old) == RopeConfig(1000.0, "yarn", 8.0, 16)
    new = {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 1000}}
    assert RopeConfig.from_hf({**old, **new, "rope_theta": 5}) == RopeConfig(1000.0, "yarn", 8.0, 16)
    assert RopeConfig.from_hf({"rope_theta": 1000, "rope_parameters": None, "rope_scaling": {}}) == RopeConfig(
        1000.0, "yarn", 32.0, truncate=False
    )
    assert RopeConfig.from_hf({"rope_parameters": {"rope_theta": 1000}}) == RopeConfig(1000.0)


def test_unreadable_directory(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.from_directory(tmp_path)
    for content in (b"{", b"", b"\xff\xfe{", b"[" * 10**5, b'{"vocab_size": ' + b"1" * 5000 + b"}"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match="not valid JSON"):
            Config.from_directory(tmp_path)
    (tmp_path / "config.json").write_bytes(b"[1]")
    with pytest.raises(ConfigError, match="must hold an object"):
        Config.from_directory(tmp_path)


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match=r"preset .*'tiny' or .*'gpt-oss-120b', got 'huge'"):
        preset("huge")


@pytest.mark.parametrize("layers", [0, -1, 10_001, 10**12, 2.0, "2", True, None])
def test_impossible_numbers_of_layers(layers: Any) -> None:
    with pytest.raises(ConfigError, match="layers must be an int from 1 to 10000, got "):
        preset("tiny").with_layers(layers)


@pytest.mark.parametrize("name", [None, 5, ["tiny"], "Tiny", ""])
def test_what_is_no_preset(name: Any) -> None:
    with pytest.raises(ConfigError, match="preset must be 'tiny' or "):
        preset(name)


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
    # The tolerance is the error of a frequency's last bit, times 128 positions.
    torch.testing.assert_close(ours, torch.cat((cos, sin), -1)[0], rtol=0, atol=1e-5)


def test_yarn_keeps_fast_frequencies_and_stretches_slow_ones() -> None:
    rope = RopeConfig(kind="yarn", factor=32.0)
    plain, stretched = inverse_frequencies(RopeConfig(), 64), inverse_frequencies(rope, 64)
    assert torch.equal(stretched[:4], plain[:4])
    torch.testing.assert_close(stretched[-4:], plain[-4:] / 32)
    assert ((stretched >= plain / 32 * 0.999999) & (stretched <= plain)).all()
    assert rope.scale == pytest.approx(1 + 0.1 * math.log(32))


# -- arbitrary configurations -------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 64)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from([SLIDING, "yarn"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "quant_method", "x"]), inner)
    ),
    max_leaves=4,
)
SMALL = make_config(rope=YARN, vocab_size=17, layer_types=(SLIDING, FULL)).to_hf()
KEYS = [key for key in SMALL if key != "architectures"]
ROPE_KEYS = ["rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"]


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*KEYS, "rope_scaling", "rope_theta", "quantization_config"]), JSON, max_size=2),
    st.dictionaries(st.sampled_from([*ROPE_KEYS, "type", "attention_factor", "partial_rotary_factor"]), JSON, max_size=2),
    st.sets(st.sampled_from(KEYS), max_size=1),
)
def test_any_config_json_is_read_or_refused(changes: dict[str, Any], rope: dict[str, Any], without: set[str]) -> None:
    content = {**SMALL, "rope_parameters": {**SMALL["rope_parameters"], **rope}, **changes}
    content = {key: value for key, value in content.items() if key not in without}
    problems: tuple[str, ...] = ()
    try:
        config = Config.from_hf(content)
    except ConfigError as error:
        problems = error.problems
    touched = (*changes, *rope, *without, "num_experts_per_tok", "rope_parameters")
    assert all(any(key in problem for key in touched) for problem in problems), problems
    assert all(problem.startswith("config.json lacks") or ", got " in problem for problem in problems), problems
    if problems:
        return
    assert Config.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert cos_sin_cache(config.rope, min(config.head_dim, 64), 8).isfinite().all()


SIZES = st.integers(1, 33)
CONFIGS = st.builds(
    lambda kv_heads, group, half_dim, chosen, others, **values: make_config(
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=2 * half_dim,
        num_experts_per_tok=chosen,
        num_local_experts=chosen + others,
        **values,
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    half_dim=st.integers(1, 9),
    chosen=st.integers(1, 3),
    others=st.integers(0, 3),
    vocab_size=st.integers(2, 33),
    hidden_size=SIZES,
    intermediate_size=SIZES,
    layer_types=st.lists(st.sampled_from([SLIDING, FULL]), min_size=1, max_size=3),
    sliding_window=st.integers(1, 12),
    rms_norm_eps=st.floats(1e-12, 1.0),
    swiglu_alpha=st.floats(-3, 3),
    swiglu_limit=st.floats(1e-3, 100.0) | st.integers(1, 10),
    attention_bias=st.booleans(),
    tie_word_embeddings=st.booleans(),
    rope=st.builds(
        RopeConfig,
        theta=st.floats(2, 1e6) | st.integers(2, 10**30),
        kind=st.sampled_from(["default", "yarn"]),
        factor=st.floats(1, 64),
        original_max_positions=st.integers(1, 4096),
        beta_fast=st.floats(8, 64),
        beta_slow=st.floats(0.5, 8),
        truncate=st.booleans(),
        attention_factor=st.none() | st.floats(0.5, 2.0),
    ),
)


@settings(max_examples=20, deadline=None)
@given(CONFIGS)
def test_any_valid_configuration_makes_a_model(config: Config) -> None:
    model = GptOss(config, RandomTensors(config), torch.float32, max_positions=16)
    batch = make_batch([Piece(prompt) for prompt in random_prompts((9, 1, 4), config.vocab_size)], None, "cpu")
    logits = model.forward(batch, None)
    assert logits.shape == (14, config.vocab_size)
    assert logits.isfinite().all()

"""The configuration of a GPT-OSS model: sizes, layer types, rotary embedding, weight format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpt_oss.fields import FLAG, LARGEST, SMALLEST, Field, describe, integer, number, one_of, optional

SLIDING = "sliding_attention"
FULL = "full_attention"

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
)
_COUNT = integer(1, 2**31 - 1)
_LAYER_COUNT = integer(1, 10_000)  # a mistyped count must not fill the memory with layer types
_LAYER_TYPE = one_of(SLIDING, FULL)
_CONTEXT = 131072

# The valid values of the fields that have the same name in config.json. A config.json may omit the fields with a default in
# `Config`.
_REQUIRED: Mapping[str, Field] = dict.fromkeys((*_SIZES, "num_experts_per_tok"), _COUNT)
_DEFAULTED: Mapping[str, Field] = {
    "sliding_window": _COUNT,
    "max_position_embeddings": _COUNT,
    "rms_norm_eps": number(SMALLEST),
    "swiglu_alpha": number(-LARGEST),
    "swiglu_limit": number(SMALLEST),
    "attention_bias": FLAG,
    "tie_word_embeddings": FLAG,
}


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


# The valid values of the fields that have other names in config.json.
_RESPELLED: Mapping[str, Field] = {
    "layer_types": Field("a list or tuple of at least one layer type", _is_list, lambda types: len(types) > 0),
    "rope": Field("a RopeConfig", lambda value: isinstance(value, RopeConfig)),
    "eos_token_ids": Field("a list or tuple of token ids", _is_list),
    "quantization": optional(one_of("mxfp4")),
}
_ROPE: Mapping[str, Field] = {
    "theta": number(2),
    "kind": one_of("default", "yarn"),
    "factor": number(1),
    "original_max_positions": _COUNT,
    "beta_fast": number(SMALLEST),
    "beta_slow": number(SMALLEST),
    "truncate": FLAG,
    "attention_factor": optional(number(SMALLEST)),
}
# Names of `RopeConfig`'s fields in config.json.
_ROPE_KEYS: Mapping[str, str] = {
    **{name: name for name in _ROPE},
    "theta": "rope_theta",
    "kind": "rope_type",
    "original_max_positions": "original_max_position_embeddings",
}


class ConfigError(ValueError):
    """An invalid configuration.

    Args:
        problems: all problems. Each problem names the field, the requirement, and the actual value.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(self.problems)


def _found(fields: Mapping[str, Field], values: Mapping[str, Any], spelled: Mapping[str, str]) -> dict[str, str]:
    """Returns the problem of each value that does not fit its field, by the field's name."""
    problems = {name: kind.problem(spelled.get(name, name), values[name]) for name, kind in fields.items() if name in values}
    return {name: str(problem) for name, problem in problems.items() if problem is not None}


def _make_floats(holder: object, fields: Iterable[str]) -> None:
    """Converts the given fields of a frozen dataclass under construction from int to float."""
    for name in fields:
        if getattr(holder, name) is not None:
            object.__setattr__(holder, name, float(getattr(holder, name)))


def _rope_problems(values: Mapping[str, Any], spelled: Mapping[str, str]) -> Iterator[str]:
    """Yields the problems of a `RopeConfig`'s fields. ``spelled``: the names of fields in messages. Fields may be missing."""
    found = _found(_ROPE, values, spelled)
    yield from found.values()
    if {"beta_fast", "beta_slow"} <= values.keys() - found.keys() and values["beta_fast"] < values["beta_slow"]:
        fast, slow = describe(values["beta_fast"]), describe(values["beta_slow"])
        yield f"{spelled.get('beta_fast', 'beta_fast')} must be at least beta_slow, got {fast} and {slow}"


def _rope_table(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name of the config.json field that describes the rotary embedding, and the contents of this field with the newer
    key names.
    """
    theta = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    source = next((name for name in ("rope_parameters", "rope_scaling") if config.get(name) not in (None, {})), None)
    if source is None:
        return "rope_parameters", {**_YARN.to_hf(), **theta}
    given = config[source]
    if not isinstance(given, Mapping):
        raise ConfigError(f"{source} must be an object with fields such as rope_type, got {describe(given, with_type=True)}")
    table = {**theta, **{key: value for key, value in given.items() if value is not None}}
    if "type" in table:
        table.setdefault("rope_type", table.pop("type"))
    if table.get("rope_type") == "yarn":
        context = config.get("max_position_embeddings")
        table = {"factor": None, "original_max_position_embeddings": _CONTEXT if context is None else context, **table}
    return source, table


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, optionally stretched with YaRN (Peng et al., 2023, arXiv:2309.00071).

    Attributes:
        theta: base of the frequencies, at least 2.
        kind: ``"default"`` or ``"yarn"``. The default kind uses ``theta`` only.
        factor: ratio of the context to the context of training, at least 1.
        original_max_positions: the context of training, in tokens.
        beta_fast, beta_slow: frequencies in rotations per context of training. Frequencies above ``beta_fast`` are kept.
            Frequencies below ``beta_slow`` are divided by ``factor``. In between, both results are mixed linearly.
        truncate: whether the two ends of the mixed range are rounded outwards to whole pairs of dimensions.
        attention_factor: multiplies cos and sin; None means ``0.1 ln(factor) + 1``.

    Raises:
        ConfigError: a field is not as stated; the message names every such field.
    """

    theta: float = 150000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        problems = list(_rope_problems(vars(self), {}))
        if problems:
            raise ConfigError(*problems)
        _make_floats(self, ("theta", "factor", "beta_fast", "beta_slow", "attention_factor"))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads ``rope_parameters``, or the older ``rope_scaling`` and ``rope_theta``, of a ``config.json``.

        If neither exists, the result is the YaRN of the released models, as in transformers.

        Raises:
            ConfigError: a field is invalid or not supported.
        """
        source, table = _rope_table(config)
        spelled = {name: f"{source}.{key}" for name, key in _ROPE_KEYS.items()}
        values = {name: table[key] for name, key in _ROPE_KEYS.items() if key in table}
        problems = list(_rope_problems(values, spelled))
        known = _ROPE_KEYS.values()
        unknown = sorted(str(key) for key in table.keys() - {*known, "partial_rotary_factor"})
        if unknown:
            problems.append(f"{source} must hold {', '.join(known)} only, got {', '.join(unknown)}, which are not supported")
        if table.get("partial_rotary_factor", 1) != 1:
            problems.append(f"{source}.partial_rotary_factor must be 1, got {describe(table['partial_rotary_factor'])}")
        if problems:
            raise ConfigError(*problems)
        return cls(**values) if values.get("kind") == "yarn" else cls(theta=values.get("theta", cls.theta))

    def to_hf(self) -> dict[str, Any]:
        if self.kind == "default":
            return {"rope_type": "default", "rope_theta": self.theta}
        table = {
            "rope_type": self.kind,
            "rope_theta": self.theta,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_max_positions,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
        }
        return table if self.attention_factor is None else {**table, "attention_factor": self.attention_factor}

    @property
    def scale(self) -> float:
        """The factor by which cos and sin are multiplied."""
        if self.kind == "default":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


_YARN = RopeConfig(kind="yarn", factor=32.0, truncate=False)


def alternating(layers: int) -> tuple[str, ...]:
    """Returns the layer types of the released models: sliding, full, sliding, full, ..."""
    return tuple(FULL if layer % 2 else SLIDING for layer in range(layers))


@dataclass(frozen=True)
class Config:
    """A model's configuration. The names are those of Hugging Face's ``config.json``; see `from_hf`.

    Attributes:
        layer_types: for each layer ``"sliding_attention"`` or ``"full_attention"``.
        sliding_window: number of visible tokens in a sliding layer, the token itself included.
        swiglu_alpha, swiglu_limit: parameters of the experts' activation ``(up + 1) * gate * sigmoid(alpha * gate)``. Before the
            activation, ``gate`` is clamped to at most the limit, and ``up`` is clamped to [-limit, limit].
        rope: the rotary embedding.
        eos_token_ids: the tokens that end a text.
        quantization: ``"mxfp4"`` if the experts are stored as MXFP4, otherwise None.

    Sizes and counts are ints of at least 1; the other numbers are ints or floats.

    Raises:
        ConfigError: a field is not as stated, or two fields contradict each other; the message lists all problems.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    layer_types: tuple[str, ...]
    sliding_window: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True
    tie_word_embeddings: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None

    def __post_init__(self) -> None:
        problems = list(_problems(vars(self), {}))
        if problems:
            raise ConfigError(*problems)
        _make_floats(self, ("rms_norm_eps", "swiglu_alpha", "swiglu_limit"))
        for name in ("layer_types", "eos_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def window_left(self, layer: int) -> int:
        """Returns the number of earlier tokens that a layer sees; -1 for all. A window of 128 tokens has the token itself and 127
        earlier tokens."""
        return self.sliding_window - 1 if self.layer_types[layer] == SLIDING else -1

    def with_layers(self, layers: int) -> Config:
        """Returns a model with another number of layers: only the first layers, or further layers of alternating types.

        Raises:
            ConfigError: the number of layers is not an int from 1 to 10000.
        """
        problem = _LAYER_COUNT.problem("layers", layers)
        if problem is not None:
            raise ConfigError(str(problem))
        types = (*self.layer_types, *alternating(layers)[self.num_hidden_layers :])
        return replace(self, layer_types=types[:layers])

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Config:
        """Reads the contents of a Hugging Face ``config.json``. A null field counts as omitted.

        Raises:
            ConfigError: the file is another model's, lacks a field, or has a field that is invalid or not supported. The message
                lists all problems, with the fields' names in the file.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"config.json must hold an object, got {describe(config, with_type=True)}")
        given = {name: value for name, value in config.items() if value is not None}
        values = {name: given[name] for name in (*_REQUIRED, *_DEFAULTED) if name in given}
        spelled = {"eos_token_ids": "eos_token_id", "quantization": "quantization_config.quant_method"}
        if "experts_per_token" in given and "num_experts_per_tok" not in given:
            values["num_experts_per_tok"], spelled["num_experts_per_tok"] = given["experts_per_token"], "experts_per_token"
        missing = [name for name in (*_REQUIRED, "num_hidden_layers") if name not in values and name not in given]
        problems = [f"config.json lacks {', '.join(missing)}"] if missing else []
        problems += _found({"model_type": one_of("gpt_oss"), "hidden_act": one_of("silu")}, given, {}).values()

        layers_problem = _found({"num_hidden_layers": _LAYER_COUNT}, given, {})
        problems += layers_problem.values()
        layers = None if layers_problem else given.get("num_hidden_layers")
        types = given.get("layer_types", alternating(layers or 1))
        if layers is not None and _is_list(types) and len(types) != layers:
            problems.append(f"layer_types must name num_hidden_layers = {layers} layers, got {len(types)}")
        eos = given.get("eos_token_id", ())
        values |= {"layer_types": types, "eos_token_ids": eos if _is_list(eos) else (eos,)}

        quantization = given.get("quantization_config", {})
        if isinstance(quantization, Mapping):
            values["quantization"] = quantization.get("quant_method")
        else:
            problems.append(f"quantization_config must be an object, got {describe(quantization, with_type=True)}")
        try:
            values["rope"] = RopeConfig.from_hf(config)
        except ConfigError as error:
            problems += error.problems
        problems += _problems(values, spelled)
        if problems:
            raise ConfigError(*problems)
        return cls(**values)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Config:
        """Reads ``config.json`` in a checkpoint's directory.

        The stop tokens come from ``generation_config.json`` if this file lists any. Only this file lists all stop tokens: the
        released models end a tool call and an answer with different tokens.

        Raises:
            ConfigError: a file cannot be read, is not JSON, or is rejected by `from_hf`.
        """
        content = _read_json(Path(directory) / "config.json")
        generation = Path(directory) / "generation_config.json"
        if isinstance(content, dict) and generation.exists():
            settings = _read_json(generation)
            ends = settings.get("eos_token_id") if isinstance(settings, dict) else None
            if ends is not None:
                content = {**content, "eos_token_id": ends}
        return cls.from_hf(content)

    def to_hf(self) -> dict[str, Any]:
        """Returns the contents of a ``config.json``. `from_hf` reads these contents back as this configuration."""
        names = (*_REQUIRED, "num_hidden_layers", *_DEFAULTED)
        table: dict[str, Any] = {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "hidden_act": "silu",
            **{name: getattr(self, name) for name in names},
            "layer_types": list(self.layer_types),
            "rope_parameters": self.rope.to_hf(),
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        if self.quantization:
            table["quantization_config"] = {"quant_method": self.quantization}
        return table


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def _problems(values: Mapping[str, Any], spelled: Mapping[str, str]) -> Iterator[str]:
    """Yields the problems of a `Config`'s fields. ``spelled``: the names of fields in messages. Fields may be missing."""
    found = _found({**_REQUIRED, **_DEFAULTED, **_RESPELLED}, values, spelled)
    yield from found.values()

    def good(*names: str) -> bool:
        return all(name in values and name not in found for name in names)

    if good("layer_types"):
        checked = (_LAYER_TYPE.problem(f"layer_types[{layer}]", kind) for layer, kind in enumerate(values["layer_types"]))
        yield from (str(problem) for problem in checked if problem is not None)
    if good("eos_token_ids", "vocab_size"):
        token_id, name = integer(0, values["vocab_size"] - 1), spelled.get("eos_token_ids", "eos_token_ids")
        yield from (str(problem) for token in values["eos_token_ids"] if (problem := token_id.problem(name, token)) is not None)
    if good("num_attention_heads", "num_key_value_heads"):
        heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
        if heads % kv_heads:
            yield f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}"
    if good("num_experts_per_tok", "num_local_experts"):
        chosen, experts = values["num_experts_per_tok"], values["num_local_experts"]
        if chosen > experts:
            name = spelled.get("num_experts_per_tok", "num_experts_per_tok")
            yield f"{name} must be at most num_local_experts, got {chosen} and {experts}"
    if good("head_dim") and values["head_dim"] % 2:
        yield f"head_dim must be even for the rotary embedding, got {values['head_dim']}"
    if good("hidden_size", "intermediate_size", "quantization") and values["quantization"] is not None:
        hidden, inner = values["hidden_size"], values["intermediate_size"]
        if hidden % 32 or inner % 32:
            yield f"hidden_size and intermediate_size must be multiples of 32 for mxfp4, got {hidden} and {inner}"


_GPT_OSS_120B = Config(
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    num_local_experts=128,
    num_experts_per_tok=4,
    layer_types=alternating(36),
    rope=_YARN,
    eos_token_ids=(200002, 199999, 200012),
    quantization="mxfp4",
)

PRESETS: Mapping[str, Config] = {
    # The structure of the released models, small enough for a laptop. Its window is shorter than a sentence, and its vocabulary
    # is the 256 bytes and two special tokens.
    "tiny": Config(
        vocab_size=258,
        hidden_size=128,
        intermediate_size=96,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=4,
        layer_types=alternating(4),
        sliding_window=16,
        max_position_embeddings=1024,
        rope=RopeConfig(kind="yarn", factor=8.0, original_max_positions=128, truncate=False),
        eos_token_ids=(257,),
        quantization="mxfp4",
    ),
    "gpt-oss-20b": replace(_GPT_OSS_120B, num_local_experts=32, layer_types=alternating(24)),
    "gpt-oss-120b": _GPT_OSS_120B,
}


def preset(name: str) -> Config:
    """Returns the configuration with this name.

    Raises:
        ConfigError: there is no preset with this name. The message lists the names.
    """
    problem = one_of(*PRESETS).problem("preset", name)
    if problem is not None:
        raise ConfigError(str(problem))
    return PRESETS[name]

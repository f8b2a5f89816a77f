"""What a GPT-OSS model looks like: sizes, layer types, rotary embedding, weight format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SLIDING = "sliding_attention"
FULL = "full_attention"

# Fields that carry the name that config.json gives them: those that it must have, and those that have a default.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
)
_OPTIONS = (
    "sliding_window",
    "max_position_embeddings",
    "rms_norm_eps",
    "swiglu_alpha",
    "swiglu_limit",
    "attention_bias",
    "tie_word_embeddings",
)


class ConfigError(ValueError):
    """A configuration that no model can have; the message lists everything that is wrong with it."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, optionally stretched with YaRN (Peng et al., 2023, arXiv:2309.00071).

    Attributes:
        theta: base of the frequencies.
        kind: ``"default"`` or ``"yarn"``.
        factor: how many times longer the context is than the one that was trained.
        original_max_positions: the trained context; needed by YaRN only.
        beta_fast, beta_slow: rotations over the trained context above which a frequency is kept, and below which it is
            divided by ``factor``; in between the two are mixed.
        truncate: whether the ends of that range are rounded outwards to whole dimensions.
        attention_factor: what cos and sin are multiplied by; None takes ``0.1 ln(factor) + 1``.
    """

    theta: float = 150000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """From ``rope_parameters`` (new spelling) or ``rope_scaling`` and ``rope_theta`` (old spelling).

        Where there is neither, it is the released models' YaRN, as transformers has it.
        """
        table = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = table.get("rope_theta", config.get("rope_theta", cls.theta))
        if not table:
            return replace(_YARN, theta=float(theta))
        kind = table.get("rope_type", table.get("type", "default"))
        if kind == "default":
            return cls(theta=float(theta))
        unsupported = sorted({"mscale", "mscale_all_dim"} & {key for key, value in table.items() if value is not None})
        if kind != "yarn" or unsupported or "factor" not in table:
            detail = f"; {', '.join(unsupported)} are not supported" if unsupported else ""
            raise ConfigError(f"rope must be of type default, or of type yarn with a factor, got {table}{detail}")
        return cls(
            theta=float(theta),
            kind="yarn",
            factor=float(table["factor"]),
            original_max_positions=int(table.get("original_max_position_embeddings") or config["max_position_embeddings"]),
            beta_fast=float(table.get("beta_fast") or 32.0),
            beta_slow=float(table.get("beta_slow") or 1.0),
            truncate=bool(table.get("truncate", True)),
            attention_factor=table.get("attention_factor"),
        )

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
        """What cos and sin are multiplied by."""
        if self.kind == "default":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


_YARN = RopeConfig(kind="yarn", factor=32.0, truncate=False)


def alternating(layers: int) -> tuple[str, ...]:
    """GPT-OSS's own pattern: sliding, full, sliding, full, ..."""
    return tuple(FULL if layer % 2 else SLIDING for layer in range(layers))


@dataclass(frozen=True)
class Config:
    """A model. The names are those of Hugging Face's ``config.json``; see `from_hf`.

    Attributes:
        layer_types: ``"sliding_attention"`` or ``"full_attention"`` for each layer.
        sliding_window: tokens that a sliding layer sees, the token itself included.
        swiglu_alpha, swiglu_limit: of the experts' activation ``(up + 1) * gate * sigmoid(alpha * gate)`` with gate clamped
            from above and up to both sides at the limit.
        eos_token_ids: tokens that end a text.
        quantization: ``"mxfp4"`` where the experts are stored as MXFP4, else None.
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
        problems = list(self._problems())
        if problems:
            raise ConfigError("this is no GPT-OSS configuration: " + "; ".join(problems))

    def _problems(self) -> Iterator[str]:
        for name in (*_SIZES, "num_experts_per_tok", "sliding_window", "max_position_embeddings"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, got {getattr(self, name)}"
        if not self.layer_types:
            yield "layer_types must name at least one layer"
        for kind in sorted(set(self.layer_types) - {SLIDING, FULL}):
            yield f"layer_types must hold {SLIDING} or {FULL}, got {kind!r}"
        if self.num_key_value_heads > 0 and self.num_attention_heads % self.num_key_value_heads:
            yield (
                f"num_attention_heads must be a multiple of num_key_value_heads, got {self.num_attention_heads} and "
                f"{self.num_key_value_heads}"
            )
        if self.num_experts_per_tok > self.num_local_experts:
            yield f"num_experts_per_tok {self.num_experts_per_tok} exceeds num_local_experts {self.num_local_experts}"
        if self.head_dim % 2:
            yield f"head_dim must be even for the rotary embedding, got {self.head_dim}"
        if self.quantization not in (None, "mxfp4"):
            yield f"quantization must be mxfp4 or absent, got {self.quantization!r}"
        if self.quantization and (self.hidden_size % 32 or self.intermediate_size % 32):
            yield f"mxfp4 needs sizes that are multiples of 32, got {self.hidden_size} and {self.intermediate_size}"

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
        """How many earlier tokens a layer sees, or -1 for all: a window of 128 tokens is the token itself and 127 before it."""
        return self.sliding_window - 1 if self.layer_types[layer] == SLIDING else -1

    def with_layers(self, layers: int) -> Config:
        """The same model with only its first layers, or with more in GPT-OSS's pattern."""
        types = (*self.layer_types, *alternating(layers)[self.num_hidden_layers :])
        return replace(self, layer_types=types[:layers])

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Config:
        """From the content of a Hugging Face ``config.json``.

        Raises:
            ConfigError: the file is another model's, lacks something, or describes something that is not supported.
        """
        if config.get("model_type", "gpt_oss") != "gpt_oss":
            raise ConfigError(f"model_type must be gpt_oss, got {config['model_type']!r}")
        missing = [name for name in (*_SIZES, "num_hidden_layers") if config.get(name) is None]
        top_k = config.get("num_experts_per_tok", config.get("experts_per_token"))
        if top_k is None:
            missing.append("num_experts_per_tok")
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")
        quantization = config.get("quantization_config") or {}
        types = tuple(config.get("layer_types") or alternating(config["num_hidden_layers"]))
        if len(types) != config["num_hidden_layers"]:
            raise ConfigError(f"layer_types names {len(types)} layers, num_hidden_layers is {config['num_hidden_layers']}")
        eos = config.get("eos_token_id")
        return cls(
            **{name: config[name] for name in _SIZES},
            **{name: config[name] for name in _OPTIONS if config.get(name) is not None},
            num_experts_per_tok=top_k,
            layer_types=types,
            rope=RopeConfig.from_hf(config),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            quantization=quantization.get("quant_method"),
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> Config:
        """From ``config.json`` in a checkpoint's directory."""
        path = Path(directory) / "config.json"
        try:
            return cls.from_hf(json.loads(path.read_text()))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The content of a ``config.json`` that `from_hf` reads back as this configuration."""
        names = (*_SIZES, "num_experts_per_tok", "num_hidden_layers", *_OPTIONS)
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
    # The structure of the big ones, small enough for a laptop: its window is shorter than a sentence, and its vocabulary is
    # the bytes and two special tokens.
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
    """A configuration by name. Raises ConfigError, naming those there are, if there is none."""
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]

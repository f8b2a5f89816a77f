"""A model's sizes and options, from a preset or a Hugging Face config.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenspeed_kernel.workbench.models.presets import PRESETS
from tokenspeed_kernel_base.names import did_you_mean

MODEL_TYPES = ("deepseek_v3", "gpt_oss", "llama", "qwen3", "qwen3_moe")


class ModelError(ValueError):
    """A model is unknown, or its configuration lacks a field or has an unsupported value. The message names the model or field."""


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts layers of a model.

    Attributes:
        count: number of experts per layer.
        top_k: number of experts per token.
        intermediate: intermediate size of an expert.
        weight_format: the format of the experts' weights, see `MoEPlan`.
        options: further arguments of `moe_apply.plan`.
        routing: further arguments of `moe_topk`, except the correction bias.
        router_bias, correction_bias: whether the router has a bias of its logits, and whether it has a correction bias for the
            selection of experts.
        shared: intermediate size of all shared experts together; 0 if there are none.
        dense_layers: number of leading layers without experts.
    """

    count: int
    top_k: int
    intermediate: int
    weight_format: str
    options: Mapping[str, Any]
    routing: Mapping[str, Any]
    router_bias: bool = False
    correction_bias: bool = False
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (MLA). ``q_rank`` is 0 if queries are projected without a latent."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class Model:
    """The sizes and options of a model that determine its operator calls.

    Attributes:
        name: the model's name in messages and receipts.
        hidden, intermediate, heads, kv_heads, head_dim, vocab, max_positions, eps: as in the configuration. `on_rank` returns a
            model with the sizes of one rank.
        windows: the number of layers for each ``window_left`` of `mha_prefill`; -1 is full attention.
        bias, sinks, qk_norm: whether attention has biases, attention sinks, or normalised queries and keys.
        weight_format: format of linear layers: ``"dense"``, or ``"fp8_block"`` with blocks of 128 x 128.
        experts: the mixture-of-experts layers; None if the model has none.
        latent: the sizes of latent attention; None if the model has none.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    eps: float
    windows: Mapping[int, int]
    bias: bool = False
    sinks: bool = False
    qk_norm: bool = False
    weight_format: str = "dense"
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def layers(self) -> int:
        return sum(self.windows.values())

    def on_rank(self, ranks: int) -> Model:
        """Returns the model with the sizes of one rank under tensor parallelism.

        Raises:
            ModelError: a size is not divisible by ``ranks``.
        """
        experts = self.experts
        if experts is not None:
            experts = replace(
                experts,
                intermediate=_share("the experts' intermediate size", experts.intermediate, ranks),
                shared=_share("the shared experts' intermediate size", experts.shared, ranks),
            )
        return replace(
            self,
            heads=_share("heads", self.heads, ranks),
            kv_heads=_share("kv_heads", self.kv_heads, ranks) if self.kv_heads >= ranks else 1,
            intermediate=_share("intermediate", self.intermediate, ranks),
            vocab=-(-self.vocab // ranks),
            experts=experts,
        )


def _share(name: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ModelError(f"{name} must be a multiple of the {ranks} ranks, got {size}")
    return size // ranks


def model_of(source: str | Path | Mapping[str, Any]) -> Model:
    """Returns the model that ``source`` describes: the name of a preset, the path of a config.json or of its folder, or a
    config.json's contents.

    Raises:
        ModelError: the model is unknown or its configuration cannot be used.
        OSError: the file cannot be read.
    """
    if isinstance(source, Mapping):
        return _parsed(source, str(source.get("_name_or_path") or source.get("model_type")))
    if str(source) in PRESETS:
        return _parsed(PRESETS[str(source)], str(source))
    path = Path(source)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        near = did_you_mean(str(source), PRESETS)
        raise ModelError(f"{source} is no file, and no preset{near or '; there are ' + ', '.join(PRESETS)}")
    try:
        table = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from None
    if not isinstance(table, dict):
        raise ModelError(f"{path} must hold an object, got {type(table).__name__}")
    return _parsed(table, str(table.get("_name_or_path") or path.resolve().parent.name))


def _parsed(table: Mapping[str, Any], name: str) -> Model:
    kind = table.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(f"{name}: model_type must be one of {', '.join(MODEL_TYPES)}, got {kind!r}")

    def size(key: str, default: int | None = None) -> int:
        value = table.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 0:
            raise ModelError(f"{name}: {key} must be a whole number, got {value!r}")
        return value

    heads, layers = size("num_attention_heads"), size("num_hidden_layers")
    head_dim = size("head_dim", size("hidden_size") // max(heads, 1))
    method = (table.get("quantization_config") or {}).get("quant_method")
    if method not in (None, *_METHODS[kind]):
        raise ModelError(f"{name}: quant_method must be {' or '.join(_METHODS[kind]) or 'left out'}, got {method!r}")
    latent = None
    if kind == "deepseek_v3":
        nope, rope = size("qk_nope_head_dim"), size("qk_rope_head_dim")
        latent = Latent(size("q_lora_rank", 0), size("kv_lora_rank"), nope, rope, size("v_head_dim"))
        head_dim = nope + rope
    return Model(
        name,
        size("hidden_size"),
        size("intermediate_size"),
        heads,
        size("num_key_value_heads", heads),
        head_dim,
        size("vocab_size"),
        size("max_position_embeddings"),
        float(table.get("rms_norm_eps", 1e-6)),
        _windows(table, layers),
        bool(table.get("attention_bias", False)),
        sinks=kind == "gpt_oss",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        weight_format="fp8_block" if method == "fp8" else "dense",
        experts=_EXPERTS[kind](table, size, method) if kind in _EXPERTS else None,
        latent=latent,
    )


_METHODS: Mapping[Any, tuple[str, ...]] = {
    "deepseek_v3": ("fp8",),
    "gpt_oss": ("mxfp4",),
    "llama": (),
    "qwen3": ("fp8",),
    "qwen3_moe": ("fp8",),
}


def _windows(table: Mapping[str, Any], layers: int) -> Mapping[int, int]:
    """Returns, for each ``window_left`` of a model's attention layers, the number of layers with it; -1 is full attention.

    ``layer_types`` decides, if present. Otherwise the defaults are those of transformers: GPT-OSS alternates windowed and full
    layers; in Qwen3 the layers from ``max_window_layers`` on are windowed, in Qwen3-MoE all layers. Qwen3 and Qwen3-MoE have no
    window unless ``use_sliding_window`` is set. In Llama and DeepSeek-V3, all layers without a type have full attention.
    """
    kind, window, types = table["model_type"], table.get("sliding_window"), table.get("layer_types")
    if not window or (kind in ("qwen3", "qwen3_moe") and not table.get("use_sliding_window", False)):
        return {-1: layers}
    if types is not None:
        windowed = [each == "sliding_attention" for each in types[:layers]]
    elif kind == "gpt_oss":
        windowed = [layer % 2 == 0 for layer in range(layers)]
    elif kind == "qwen3":
        windowed = [layer >= table.get("max_window_layers", 28) for layer in range(layers)]
    else:
        windowed = [kind == "qwen3_moe"] * layers
    return Counter(window - 1 if each else -1 for each in windowed)


def _gpt_oss(table: Mapping[str, Any], size: Any, method: str | None) -> Experts:
    options = {
        "w13_interleaved": True,
        "bias": True,
        "alpha": float(table.get("swiglu_alpha", 1.702)),
        "limit": float(table.get("swiglu_limit", 7.0)),
        "beta": 1.0,
    }
    return Experts(
        size("num_local_experts"),
        size("num_experts_per_tok"),
        size("intermediate_size"),
        method or "dense",
        options,
        {},
        router_bias=True,
    )


def _qwen3_moe(table: Mapping[str, Any], size: Any, method: str | None) -> Experts:
    return Experts(
        size("num_experts"),
        size("num_experts_per_tok"),
        size("moe_intermediate_size"),
        "fp8_block" if method else "dense",
        {},
        {"renormalize": bool(table.get("norm_topk_prob", True))},
    )


def _deepseek_v3(table: Mapping[str, Any], size: Any, method: str | None) -> Experts:
    return Experts(
        size("n_routed_experts"),
        size("num_experts_per_tok"),
        size("moe_intermediate_size"),
        "fp8_block" if method else "dense",
        {},
        {
            "scoring": table.get("scoring_func", "sigmoid"),
            "renormalize": bool(table.get("norm_topk_prob", True)),
            "num_groups": size("n_group", 1),
            "top_groups": size("topk_group", 1),
            "scaling_factor": float(table.get("routed_scaling_factor", 1.0)),
        },
        correction_bias=True,
        shared=size("n_shared_experts", 0) * size("moe_intermediate_size"),
        dense_layers=size("first_k_dense_replace", 0),
    )


_EXPERTS = {"gpt_oss": _gpt_oss, "qwen3_moe": _qwen3_moe, "deepseek_v3": _deepseek_v3}

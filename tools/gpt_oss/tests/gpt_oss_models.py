"""Helpers for the tests: small random models, the same models in transformers, and an engine's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt_oss.config import Config, RopeConfig, alternating
from gpt_oss.engine import Engine
from gpt_oss.fields import dtype_name
from gpt_oss.loader import RandomTensors

# The modes of an engine: eager, and decode passes in static buffers. In overlapping modes, the device runs one pass ahead of the
# host.
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "static": {"decode": "static"},
    "eager, overlapping": {"overlap": True},
    "static, overlapping": {"decode": "static", "overlap": True},
}
YARN = RopeConfig(kind="yarn", factor=4.0, original_max_positions=16, truncate=False)


def make_config(**changes: Any) -> Config:
    """Returns a dense configuration with two layers and a window of 6, with the given changes."""
    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": alternating(2),
        "sliding_window": 6,
        "max_position_embeddings": 128,
    }
    return Config(**{**values, **changes})


@dataclass(frozen=True)
class TensorDict:
    """A source of tensors that are in memory."""

    tensors: Mapping[str, Tensor]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def dtypes(self) -> dict[str, str]:
        return {name: dtype_name(tensor.dtype) for name, tensor in self.tensors.items()}

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


def random_prompts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


def tensors_of(config: Config, dtype: torch.dtype = torch.float32, seed: int = 0) -> TensorDict:
    source = RandomTensors(config, seed, dtype)
    return TensorDict({name: source.get(name) for name in source.shapes()})


def peer(config: Config, source: TensorDict, dtype: torch.dtype = torch.float32) -> Any:
    """Returns transformers' model of a dense configuration with the same tensors."""
    import transformers

    hf_config = transformers.GptOssConfig.from_dict(config.to_hf())
    hf_config._attn_implementation = hf_config._experts_implementation = "eager"
    model = transformers.GptOssForCausalLM(hf_config).to(dtype).eval()
    model.load_state_dict(dict(source.tensors), strict=True)
    return model


def engine_state(engine: Engine) -> dict[str, Any]:
    """Returns a copy of all state that a call of an engine may change. Tests compare the state before and after a call."""
    attributes = {name: value.copy() if isinstance(value, (dict, list)) else value for name, value in vars(engine).items()}
    return {**attributes, "allocator": repr(vars(engine.cache.allocator))}

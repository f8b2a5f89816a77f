"""Makes small models of transformers' own classes with random weights, and generates tokens with them."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": VOCABULARY - 1,
    "eos_token_id": None,
    "bos_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
# For each model: the name of its configuration's class, and the arguments besides `SIZES`.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {**LAYERS, "use_sliding_window": True}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "mixtral": ("MixtralConfig", {**EXPERTS}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gpt_oss": ("GptOssConfig", {**EXPERTS, **LAYERS}),
    "gemma2": ("Gemma2Config", {**LAYERS, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {**LAYERS, "query_pre_attn_scalar": 16}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "expand": 2}),
}


@functools.cache
def _made(name: str, dtype: torch.dtype) -> Any:
    import transformers

    kind, more = CONFIGURATIONS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = getattr(transformers, kind)(**{**SIZES, **more})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():  # weights are larger than usual, so greedy tokens depend on the attention
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval().to(dtype)


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a model with transformers' eager attention and experts. The weights are the same in every call."""
    return copy.deepcopy(_made(name, dtype))


@dataclass(frozen=True)
class Generated:
    """The output of `generate`.

    Attributes:
        tokens: ``[batch, tokens]``, the new tokens.
        logits: ``[batch, tokens, vocabulary]``.
    """

    tokens: Tensor
    logits: Tensor


def prompts(batch: int = 3, tokens: int = 11) -> Tensor:
    """Returns random prompts that are longer than the window of `LAYERS`, without padding tokens."""
    draw = torch.Generator().manual_seed(2)
    return torch.randint(0, VOCABULARY - 1, (batch, tokens), generator=draw)


def padding(kind: str, ids: Tensor) -> Tensor | None:
    """Returns an attention mask for the prompts. ``kind``: ``"none"``, ``"left"``, ``"right"``, or ``"middle"`` for padding between
    tokens."""
    if kind == "none":
        return None
    mask = torch.ones_like(ids)
    mask[1, {"left": slice(0, 3), "right": slice(-3, None), "middle": slice(2, 5)}[kind]] = 0
    return mask


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, cache: str = "dynamic", new: int = 5) -> Generated:
    """Returns greedy tokens and their logits, from transformers' ``generate``."""
    options = {} if cache == "dynamic" else {"cache_implementation": cache, "disable_compile": True}
    with torch.inference_mode():
        done = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    return Generated(done.sequences[:, ids.shape[1] :], torch.stack(done.logits, 1))

"""Models other than GPT-OSS-120B with random weights for vLLM: model directories without weights, and a loader that draws the
weights.

vLLM finds `register` by an entry point in ``vllm.general_plugins``; the loader is ``load_format="random_models"``. fp8 weights have
a standard deviation of 16, which their scales undo. MXFP4 and NVFP4 weights are random bytes, with equal scales. See
``random_gpt_oss.py`` for other weights.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import random_gpt_oss

LOAD_FORMAT = "random_models"
DEFAULT = "gpt-oss-120b"
_SPREAD = 16.0  # standard deviation of fp8 values
_E2M1_SPREAD = 2.93  # standard deviation of e2m1 values of random bytes
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "*.gate"]}
_MX = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
_MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _MX, "input_activations": {**_MX, "dynamic": True}}},
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
_MIXTRAL = {
    **{name: value for name, value in _LLAMA.items() if name not in ("architectures", "model_type")},
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "max_position_embeddings": 32768,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "vocab_size": 32000,
}
_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# Maps a case's name to its ``config.json``, with the number of layers that is measured. Not all 61 layers of DeepSeek-V3 fit on one
# GPU.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA,
    "llama-3.1-8b-fp8": {**_LLAMA, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
    "llama-3.1-8b-nvfp4": {**_LLAMA, "quantization_config": _NVFP4},
    "llama-3.1-8b-mxfp4": {**_LLAMA, "quantization_config": _MXFP4},
    "qwen3-30b-a3b": _QWEN,
    "qwen3-30b-a3b-fp8": {**_QWEN, "quantization_config": _BLOCKS},
    "qwen3-30b-a3b-nvfp4": {**_QWEN, "quantization_config": _NVFP4},
    "qwen3-30b-a3b-mxfp4": {**_QWEN, "quantization_config": _MXFP4},
    "mixtral-8x7b": _MIXTRAL,
    "deepseek-v3": {**_DEEPSEEK, "quantization_config": _BLOCKS},
    "gpt-oss-20b": {**random_gpt_oss.config_of(24), "num_local_experts": 32},
}
# Maps a case's name to its measured prefill, if that is not 4 prompts of 8,192 tokens.
PREFILLS = {"deepseek-v3": "1x8192"}


def config_of(model: str, layers: int | None) -> dict[str, Any]:
    """Returns the ``config.json`` of a model with ``layers`` layers; None for the model's own number."""
    if model == DEFAULT:
        return random_gpt_oss.config_of(layers or 36)
    fields = dict(MODELS[model])
    fields["num_hidden_layers"] = layers or fields["num_hidden_layers"]
    if "layer_types" in fields:
        fields["layer_types"] = random_gpt_oss.config_of(fields["num_hidden_layers"])["layer_types"]
    return fields


def load_format(model: str) -> str:
    """Returns the name of the loader for a model: models with GPT-OSS's MXFP4 experts have their own loader."""
    return random_gpt_oss.LOAD_FORMAT if model.startswith("gpt-oss") else LOAD_FORMAT


def write_model(directory: Path, model: str, layers: int | None) -> Path:
    """Writes the model directory that vLLM loads, and returns its path."""
    return random_gpt_oss.write_config(directory, config_of(model, layers))


def cache_gib(model: str, layers: int | None, tokens: int) -> float:
    """Returns the size of a cache that holds ``tokens`` tokens in bf16, in GiB, rounded up. Sliding windows save nothing here."""
    fields = config_of(model, layers)
    if "kv_lora_rank" in fields:
        values = fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
    else:
        values = 2 * fields["num_key_value_heads"] * fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    return math.ceil(tokens * fields["num_hidden_layers"] * values * 2 / 2**30)


def draw(name: str, parameter: Any, hidden: int) -> str:
    """Fills a parameter in place, on its device. Returns the kind of the drawn values.

    Args:
        name: the parameter's name, which seeds the random numbers.
        parameter: the parameter.
        hidden: the model's hidden size, which sets the size of quantised weights.
    """
    import torch

    last = name.rpartition(".")[2]
    if parameter.dtype == torch.uint8:
        if "scale" in last:
            parameter.fill_(127 - round(math.log2(_E2M1_SPREAD * math.sqrt(hidden))))
            return "e8m0 scale"
        generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
        parameter.random_(0, 256, generator=generator)
        return "fp4"
    if "scale" in last and parameter.dtype == torch.float8_e4m3fn:
        parameter.fill_(1.0)
        return "block scale"
    if last.endswith("scale_2"):
        parameter.fill_(1 / (_E2M1_SPREAD * math.sqrt(hidden)))
        return "global scale"
    if last.endswith("input_scale"):
        parameter.fill_(4 / (448 * 6))  # magnitudes of activations up to 4
        return "global scale of activations"
    if "scale" in last:
        parameter.fill_(1 / (_SPREAD * math.sqrt(hidden)))
        return "scale"
    narrow = parameter.dtype == torch.float8_e4m3fn
    if not narrow and last not in random_gpt_oss.EXPERT_SIZES:
        return random_gpt_oss.draw(name, parameter)
    generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
    spread = _SPREAD if narrow else 1 / math.sqrt(parameter.shape[-1])
    for part in parameter if parameter.dim() > 2 else (parameter,):  # one expert at a time, because values are drawn in float32
        part.copy_(torch.empty(part.shape, device=part.device).normal_(0.0, spread, generator=generator))
    return "fp8" if narrow else "experts"


def register() -> None:
    """Registers the loader with vLLM. May be called more than once."""
    from vllm.model_executor import model_loader

    if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    class RandomModels(model_loader.BaseModelLoader):  # type: ignore[misc]
        """A loader that draws all parameters."""

        def download_model(self, model_config: Any) -> None:
            """Does nothing, because there is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Fills the parameters in place."""
            import torch

            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    draw(name, parameter.data, model_config.get_hidden_size())

    model_loader.register_model_loader(LOAD_FORMAT)(RandomModels)

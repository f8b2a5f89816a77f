"""GPT-OSS with random weights for vLLM: a model directory without weights, and a loader that draws the weights on the device.

vLLM's own dummy weights route all tokens to the same experts, and leave MXFP4 values at zero. The weights drawn here resemble those
of a trained model. Every expert is selected about equally often. Rows of the output matrix have different norms, so the most likely
token has a lead over the second, and rounding rarely changes the most likely token. The values depend only on a parameter's name
and its unpadded size: backends that pad their weights get the same values, followed by zeros.

vLLM finds `register` by an entry point in ``vllm.general_plugins``; the loader is ``load_format="random_gpt_oss"``.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LOAD_FORMAT = "random_gpt_oss"
HIDDEN, INTERMEDIATE, EXPERTS, VOCABULARY = 2880, 2880, 128, 201088
# Names of all parameters that were drawn in this process. Backends replace the experts' parameters after loading.
drawn: list[str] = []
# The norms of the output matrix's rows: uniform random numbers to the power _POWER, at most _LONGEST.
_POWER, _LONGEST = -1 / 3, 8.0


def config_of(layers: int) -> dict[str, Any]:
    """Returns the ``config.json`` of GPT-OSS-120B, with ``layers`` layers."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": EXPERTS,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
            "quant_method": "mxfp4",
        },
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
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }


def write_model(directory: Path, layers: int) -> Path:
    """Writes the model directory that vLLM loads, and returns its path."""
    return write_config(directory, config_of(layers))


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    """Writes ``config.json`` in one step, because engines that start side by side write and read the same file. Returns the
    directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    made = directory / f"config.json.{os.getpid()}"
    made.write_text(json.dumps(config, indent=2))
    made.replace(directory / "config.json")
    return directory


def draw(name: str, parameter: Any, rank: int = 0, ranks: int = 1) -> str:
    """Fills a parameter in place, on its device.

    Under tensor parallelism, ``parameter`` is the shard of ``rank`` of ``ranks``. Shards get different values. Norms, routers and
    the bias of the output projection are not sharded, and get the same values on all ranks. The bias of w2 is zero on all ranks but
    the first, as after vLLM's own loading.

    Returns a label that says how the parameter was filled: "norm", "embedding", "head" (the output matrix), "matrix", or the last
    part of the name (experts' tensors, biases and sinks). An integer parameter that is not an expert's gets "left as it was".
    """
    import torch

    copied = "norm" in name or ".router." in name or name.endswith("o_proj.bias")
    seed = zlib.crc32((name if copied or rank == 0 else f"{name} of rank {rank}").encode())
    generator = torch.Generator(device=parameter.device).manual_seed(seed)
    last = name.rpartition(".")[2]
    if last in EXPERT_SIZES:
        rows, columns = shard_sizes(last, ranks)
        parameter.zero_()
        if last == "w2_bias" and rank > 0:
            return last
        # Experts are filled one at a time. An expert's values precede its padding.
        for expert in parameter:
            if columns is None:
                part = torch.empty(rows, dtype=parameter.dtype, device=parameter.device)
                expert[:rows] = part.normal_(0.0, 0.5, generator=generator)
                continue
            part = torch.empty(rows, columns, dtype=torch.uint8, device=parameter.device)
            if last.endswith("_scale"):
                middle = 127 + round(math.log2(1 / (2.93 * math.sqrt(HIDDEN))))
                part.random_(middle - 1, middle + 2, generator=generator)
            else:
                part.random_(0, 256, generator=generator)
            expert[:rows, :columns] = part
        return last
    if not parameter.is_floating_point():
        return "left as it was"
    if "norm" in name:
        parameter.normal_(1.0, 0.1, generator=generator)
        return "norm"
    if last in ("bias", "sinks"):
        parameter.normal_(0.0, 0.5, generator=generator)
        return last
    if "embed" in name:
        parameter.normal_(0.0, 1.0, generator=generator)
        return "embedding"
    parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
    if "lm_head" in name:
        uniform = torch.rand(parameter.shape[0], 1, generator=generator, device=parameter.device)
        parameter.mul_(uniform.pow(_POWER).clamp(max=_LONGEST).to(parameter.dtype))
        return "head"
    return "matrix"


def shard_sizes(last: str, ranks: int) -> tuple[int, int | None]:
    """Returns the sizes of one rank's part of an expert's tensor, as in `EXPERT_SIZES`. w13 is split by rows, w2 by columns."""
    rows, columns = EXPERT_SIZES[last]
    if last.startswith("w13"):
        return rows // ranks, columns
    return rows, None if columns is None else columns // ranks


def draw_experts(name: str, experts: int, device: Any) -> Any:
    """Draws the experts' tensor that `draw` would draw, but without padding: uint8 or, for a bias, bf16, ``[experts, ...]``."""
    import torch

    rows, columns = EXPERT_SIZES[name.rpartition(".")[2]]
    shape, dtype = ((rows,), torch.bfloat16) if columns is None else ((rows, columns), torch.uint8)
    made = torch.empty(experts, *shape, dtype=dtype, device=device)
    draw(name, made)
    return made


# The sizes of one expert's tensors: rows and bytes per row, or the length of a bias and None.
EXPERT_SIZES: dict[str, tuple[int, int | None]] = {
    "w13_weight": (2 * INTERMEDIATE, HIDDEN // 2),
    "w13_weight_scale": (2 * INTERMEDIATE, HIDDEN // 32),
    "w13_bias": (2 * INTERMEDIATE, None),
    "w2_weight": (HIDDEN, INTERMEDIATE // 2),
    "w2_weight_scale": (HIDDEN, INTERMEDIATE // 32),
    "w2_bias": (HIDDEN, None),
}


def register() -> None:
    """Registers the loader with vLLM. May be called more than once."""
    from vllm.model_executor import model_loader

    if find_spec("quack") is None:
        # If CuteDSL is installed, vLLM 0.26 compiles a router GEMM for other models, and fails if QuACK is not installed.
        from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16

        ll_bf16._cutedsl_available = False

    if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    class RandomGptOss(model_loader.BaseModelLoader):  # type: ignore[misc]
        """A loader that draws all parameters."""

        def download_model(self, model_config: Any) -> None:
            """Does nothing, because there is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Fills the parameters in place."""
            import torch
            from vllm.distributed import parallel_state

            of = parallel_state.model_parallel_is_initialized()
            rank = parallel_state.get_tensor_model_parallel_rank() if of else 0
            ranks = parallel_state.get_tensor_model_parallel_world_size() if of else 1
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    draw(name, parameter.data, rank, ranks)
                    drawn.append(name)

    model_loader.register_model_loader(LOAD_FORMAT)(RandomGptOss)

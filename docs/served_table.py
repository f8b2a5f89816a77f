"""Makes the tables of engines, models and their parts: who runs what, on which kernel, and how fast. `hooks.py` inserts them.

    python docs/served_table.py          # prints the tables

The kernels are found as the plugins find them: by asking the core with a layer's sizes, for a named device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).parents[1] / "tools/vllm_plugin/src"))
sys.path.append(str(Path(__file__).parents[1] / "tools/vllm_plugin/benchmarks"))

import random_models
from backends_table import _platform as platform_with_triton
from random_models import DEFAULT, MODELS

import tokenspeed_kernel as tk
from tokenspeed_kernel_base.platform import CapabilityRequirement, PlatformInfo, use_platform
from tokenspeed_kernel_base.served import NotServedError, plan_for
from tokenspeed_kernel_base.served_latent import LatentShape, PrefillShape
from tokenspeed_kernel_vllm.attention.serving import LayerShape, find_serving
from tokenspeed_kernel_vllm.mla.serving import find_latent, find_prefill

# Engine -> the folder of its measurements. The engine's own kernels are the variant of the engine's name.
RESULTS = {engine: Path(__file__).parents[1] / f"tools/{engine}_plugin/benchmarks/models" for engine in ("vllm", "sglang")}
DEVICES = {"H200": "h200", "MI355X": "mi355x"}
ENGINES = ("GPT-OSS runtime", "vLLM", "SGLang", "transformers")
Fields = Mapping[str, Any]
# A measurement counts only if its longest time is at most this many times its shortest; the second limit is for measurements during
# which another engine started on the same GPU.
_SPREAD, _SPREAD_BESIDE = 1.1, 1.01
_BF16 = torch.bfloat16
_META = torch.device("meta")


@dataclass(frozen=True)
class Part:
    """A part of models.

    Args:
        name: of the part.
        status: for each engine of `ENGINES`: "on", the option or the switch, or "no" and the reason; "-" if the engine has no such
            models.
        kernels: returns the names of the kernels that run the part of a model on the current platform; None for a part that all
            models have, whose kernels are not listed here.
    """

    name: str
    status: tuple[str, str, str, str]
    kernels: Callable[[Fields], tuple[str, ...]] | None = None


def format_of(fields: Fields) -> str:
    """Returns the format of a model's quantised weights, as the core names it; ``dense`` if there are none."""
    found = fields.get("quantization_config", {})
    method = found.get("quant_method")
    if method == "fp8":
        return "fp8_block" if "weight_block_size" in found else "fp8_channel"
    return {None: "dense", "mxfp4": "mxfp4", "modelopt": "nvfp4", "compressed-tensors": "mxfp4"}[method]


def attention_kernels(fields: Fields) -> tuple[str, ...]:
    """Returns the kernels of layers with full attention, then those of layers with windows, each name once."""
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    width, sinks = fields.get("head_dim", fields["hidden_size"] // heads), fields["model_type"] == "gpt_oss"
    windows = (-1, fields["sliding_window"] - 1) if sinks else (-1,)
    shapes = (LayerShape(heads, kv_heads, width, _BF16, _BF16, window, 0.0, sinks, _META) for window in windows)
    found = (name for shape in shapes for name in find_serving.__wrapped__(shape, "tokenspeed_kernel").kernels)
    return tuple(dict.fromkeys(found))


def latent_kernels(fields: Fields) -> tuple[str, ...]:
    heads, rank, rope = (fields[name] for name in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"))
    found = find_latent.__wrapped__(LatentShape(heads, rank, rope, _BF16, _BF16, _META), "tokenspeed_kernel")
    shape = PrefillShape(heads, fields["qk_nope_head_dim"] + rope, fields["v_head_dim"], _BF16, _META)
    return (find_prefill.__wrapped__(shape, "tokenspeed_kernel")[1], *found.kernels)


def expert_kernels(fields: Fields) -> tuple[str, ...]:
    experts = next(fields[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if name in fields)
    inner = fields.get("moe_intermediate_size", fields["intermediate_size"])
    own = {"bias": True, "w13_interleaved": True, "alpha": 1.702, "limit": 7.0, "beta": 1.0} if _gpt_oss(fields) else {}
    sizes = (experts, fields["num_experts_per_tok"], fields["hidden_size"], inner)
    return (plan_for(tk.moe_apply, *sizes, dtype=_BF16, device=_META, weight_format=format_of(fields), **own).kernel,)


def linear_kernels(fields: Fields) -> tuple[str, ...]:
    """Returns the kernels of the output projection, whose activations are rounded as by the plugin for vLLM."""
    form = format_of(fields)
    rounded = {"fp8_block": "fp8_block", "fp8_channel": "fp8"}.get(form, "none")
    heads = fields["num_attention_heads"]
    width = heads * fields.get("v_head_dim", fields.get("head_dim", fields["hidden_size"] // heads))
    plan = plan_for(
        tk.linear, width, fields["hidden_size"], dtype=_BF16, device=_META, weight_format=form, activation_dtype=rounded
    )
    return (plan.kernel,)


def _gpt_oss(fields: Fields) -> bool:
    return bool(fields["model_type"] == "gpt_oss")


_MIXED = "no: not implemented"
ATTENTION = Part("attention", ("-", "`--attention-backend CUSTOM`", "`--attention-backend tokenspeed`", "on"), attention_kernels)
GPT_OSS_ATTENTION = Part(
    "attention",
    ("on", "`--attention-backend CUSTOM`", "`TOKENSPEED_SGLANG_ATTENTION_REPLACES`, `--attention-backend`", "on"),
    attention_kernels,
)
LATENT = Part(
    "latent attention",
    ("-", "`TOKENSPEED_VLLM_MLA`", "`--attention-backend tokenspeed`", "on, with expanded keys and values"),
    latent_kernels,
)
EXPERTS = {
    "dense": Part("experts", ("-", "`TOKENSPEED_VLLM_OTHER_EXPERTS`", _MIXED, "on"), expert_kernels),
    "fp8_block": Part("experts", ("-", "`TOKENSPEED_VLLM_OTHER_EXPERTS`", _MIXED, "no: 8 bits are rejected"), expert_kernels),
    "mxfp4": Part("experts", ("-", "on (Hopper), else `TOKENSPEED_VLLM_OTHER_EXPERTS`", _MIXED, _MIXED), expert_kernels),
    "nvfp4": Part("experts", ("-", "`TOKENSPEED_VLLM_OTHER_EXPERTS`", _MIXED, _MIXED), expert_kernels),
}
GPT_OSS_EXPERTS = Part("experts", ("on", "on", "on", "on"), expert_kernels)
LINEAR = {
    "fp8_channel": Part("linear layers", ("-", "`TOKENSPEED_VLLM_FP8_LINEAR`", _MIXED, _MIXED), linear_kernels),
    "fp8_block": Part("linear layers", ("-", "`TOKENSPEED_VLLM_FP8_LINEAR`", _MIXED, _MIXED), linear_kernels),
    "mxfp4": Part(
        "linear layers",
        ("-", "on (Hopper, models with experts), else `TOKENSPEED_VLLM_FP4_LINEAR`", _MIXED, _MIXED),
        linear_kernels,
    ),
    "nvfp4": Part("linear layers", ("-", "`TOKENSPEED_VLLM_FP4_LINEAR`", _MIXED, _MIXED), linear_kernels),
}
# Parts that do not depend on the model, or that no model above has.
OTHERS = (
    Part("fp8 caches", ("switch", "on, with attention", "on, with attention", "no: transformers has none")),
    Part("sparse attention (DeepSeek-V3.2)", ("-", "no: its backend is fixed", "no: rejected by name", "no")),
    Part("MXFP4 and fp8 activations of experts", ("switch", "`TOKENSPEED_VLLM_ACTIVATIONS`", "no", "no")),
    Part("routing of experts", ("on", "on MI355X, with the experts", "no: SGLang's router", "no hook")),
    Part("linear layers, bf16", ("on", "`TOKENSPEED_VLLM_LINEAR`, for GPT-OSS; no hook by model for others", "no", "no")),
    Part("int4 weights (W4A16)", ("-", "no: no kernel has them", "no: no kernel has them", "no: no kernel has them")),
    Part("norms", ("on", "`--ir-op-priority`", "`TOKENSPEED_SGLANG_NORMS`", "on")),
    Part("gated activations", ("-", "no: compiled by vLLM", "`TOKENSPEED_SGLANG_ACTIVATIONS`", "on")),
    Part("rotary embeddings", ("on", "no hook", "`TOKENSPEED_SGLANG_ROPE`", "no hook")),
    Part("sampling", ("on", "no hook", "`TOKENSPEED_SGLANG_SAMPLING`", "no hook")),
    Part("whole decode step", ("on", "no hook", "`--enable-nvidia-megakernel` (0.5.23), GPT-OSS on Hopper", "no hook")),
    Part("gated delta rule of prompts", ("-", "`TOKENSPEED_VLLM_DELTA_RULE`", "no: its kernels have fixed names", "no hook")),
    Part("gated delta rule of decode steps", ("-", "no hook", "no: its kernels have fixed names", "no hook")),
    Part("gated norms", ("-", "`TOKENSPEED_VLLM_GATED_NORMS`", "no: not implemented", "no")),
    Part("state space, convolution", ("-", "no hook but for a whole layer", "no: not implemented", "no hook")),
    Part("speculation", ("-", "attention of drafts that are no trees", "no: rejected by name", "no")),
    Part("tensor parallelism", ("on", "with vLLM's collectives", "with SGLang's collectives", "no")),
)


def parts_of(fields: Fields) -> Iterator[Part]:
    """Yields the parts of a model whose kernels depend on the model."""
    form = format_of(fields)
    if "kv_lora_rank" in fields:
        yield LATENT
    else:
        yield GPT_OSS_ATTENTION if _gpt_oss(fields) else ATTENTION
    if "num_experts_per_tok" in fields:
        yield GPT_OSS_EXPERTS if _gpt_oss(fields) else EXPERTS[form]
    if form in LINEAR and not _gpt_oss(fields):
        yield LINEAR[form]


def served_table() -> str:
    """A table of models and their parts: the kernels on each device, and how each engine uses them. Models with equal cells share a
    row.
    """
    models: dict[tuple[str, ...], list[str]] = {}
    for model in (DEFAULT, *MODELS):
        fields = random_models.config_of(model, None)
        for part in parts_of(fields):
            kernels = (_kernels(part, fields, device) for device in DEVICES.values())
            models.setdefault((part.name, *kernels, *part.status), []).append(model)
    for part in OTHERS:
        models[(part.name, *("" for _ in DEVICES), *part.status)] = ["all"]
    rows = [f"| part | models | {' | '.join(f'kernels on {name}' for name in DEVICES)} | {' | '.join(ENGINES)} |"]
    rows.append("|---|---|" + "---|" * (len(DEVICES) + len(ENGINES)))
    rows += [f"| {part} | {', '.join(names)} | {' | '.join(cells)} |" for (part, *cells), names in models.items()]
    return "\n".join(rows)


@contextlib.contextmanager
def pretended(device: str) -> Iterator[None]:
    """Makes the core select kernels for a named device, as if all required software were installed: the probes of kernels look for
    software on the machine that builds the site.
    """
    gap = CapabilityRequirement.gap

    def without_probe(self: CapabilityRequirement, platform: PlatformInfo) -> str | None:
        return gap(dataclasses.replace(self, probe=None), platform)

    with patch.object(CapabilityRequirement, "gap", without_probe), use_platform(platform_with_triton(device)):
        yield


def _kernels(part: Part, fields: Fields, device: str) -> str:
    assert part.kernels is not None
    with pretended(device):
        try:
            return "<br>".join(f"`{name}`" for name in part.kernels(fields))
        except NotServedError as error:
            return f"refused: {str(error).splitlines()[0]}"


def measured_table(engine: str, folder: Path | None = None) -> str:
    """A table of measurements in an engine: the plugin's speed relative to the engine's own kernels. Rows whose times differ by
    more than 10% are left out, and so are rows measured while another engine started, unless all their times agree within 1%.

    Args:
        engine: ``vllm`` or ``sglang``.
        folder: of the measurements; by default the engine's.
    """
    labels: dict[str, None] = {}
    found: list[tuple[str, str, dict[str, float]]] = []
    for file in sorted((folder or RESULTS[engine]).glob("*.json")):
        speeds = speeds_of(json.loads(file.read_text())["rows"])
        own = speeds.get(engine, {})
        for name, each in speeds.items():
            ratios = {label: speed / own[label] for label, speed in each.items() if label in own}
            if name != engine and ratios:
                labels |= dict.fromkeys(ratios)
                found.append((file.stem, name, ratios))
    if not found:
        return "Nothing has been measured with these models yet."
    ordered = sorted(labels, key=lambda label: (not label.startswith("decode"), int(label.partition(" ")[2] or 0)))
    rows = [f"| model | variant | {' | '.join(ordered)} | geometric mean |", "|---|---|" + "--:|" * (len(ordered) + 1)]
    for model, name, ratios in found:
        cells = (f"{ratios[label]:.2f}" if label in ratios else "" for label in ordered)
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios.values()))
        rows.append(f"| {model} | `{name}` | {' | '.join(cells)} | {mean:.2f} |")
    return "\n".join(rows)


def speeds_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the speeds of each engine of a report, by measurement: steps per second of decode, and prefill tokens per second."""
    speeds: dict[str, dict[str, float]] = {}
    for row in rows:
        beside, times = row.get("engines_starting"), row.get("all_ms") or row.get("pairs") or [1.0]
        spread = _SPREAD_BESIDE if beside else _SPREAD
        if min(times) <= 0 or max(times) > spread * min(times) or (beside and len(times) < 2):
            continue
        if row["figure"] == "decode":
            speeds.setdefault(row["engine"], {})[f"decode {row['batch']}"] = 1e3 / row["ms"]
        elif row["figure"] == "prefill":
            speeds.setdefault(row["engine"], {})["prefill"] = row["tokens_per_s"]
    return speeds


if __name__ == "__main__":
    print(served_table(), *map(measured_table, RESULTS), sep="\n\n")

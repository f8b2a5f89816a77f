"""Finds the kernels of a model's attention layers, and names the features that are not supported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.served import NotServedError, kernel_for

OPS: Any = import_module("tokenspeed_kernel")


@dataclass(frozen=True)
class LayerShape:
    """The properties that decide which kernels are eligible for a layer.

    Attributes:
        heads, kv_heads, head_dim, v_head_dim: numbers of heads on this rank, and widths of heads.
        dtype: dtype of queries and outputs.
        cache_dtype: dtype of keys and values in the cache.
        page_size: number of tokens per page.
        window_left: number of tokens before the token itself that it attends to; -1 for all.
        logit_cap: soft cap of the scores; 0 for none.
        sinks: whether each head has a sink.
        device: the layer's device.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    page_size: int
    window_left: int
    logit_cap: float
    sinks: bool
    device: torch.device

    @classmethod
    def of(
        cls, layer: Any, dtype: torch.dtype, cache_dtype: torch.dtype, page_size: int, sinks: bool, device: torch.device
    ) -> LayerShape:
        """Returns the shape of a `RadixAttention`. SGLang's window, like ``window_left``, does not include the token itself."""
        return cls(
            heads=layer.tp_q_head_num,
            kv_heads=layer.tp_k_head_num,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            dtype=dtype,
            cache_dtype=cache_dtype,
            page_size=page_size,
            window_left=layer.sliding_window_size,
            logit_cap=float(layer.logit_cap or 0.0),
            sinks=sinks,
            device=device,
        )

    @property
    def scaled(self) -> bool:
        """Whether the cache holds quantised keys and values, which have a scale."""
        return self.cache_dtype != self.dtype

    def __str__(self) -> str:
        cache = f", cache of {str(self.cache_dtype).removeprefix('torch.')}" if self.scaled else ""
        more = (
            cache,
            f", window {self.window_left + 1}" if self.window_left >= 0 else "",
            f", cap {self.logit_cap:g}" if self.logit_cap else "",
            ", sinks" if self.sinks else "",
        )
        return f"{self.heads} heads of {self.head_dim}, {self.kv_heads} KV heads, pages of {self.page_size}{''.join(more)}"


@dataclass(frozen=True)
class Serving:
    """The operators and kernels of an attention layer.

    Attributes:
        extend: the operator for batches with prefixes: `mha_with_kvcache` or `mha_extend_with_kvcache`.
        extend_options: further arguments of that operator.
        kernels: the names of the kernels that are selected for a call with one token.
    """

    extend: Callable[..., Tensor]
    kernels: tuple[str, ...]
    extend_options: dict[str, Any] = field(default_factory=dict)


def find_serving(shape: LayerShape) -> Serving:
    """Finds the operators and kernels of an attention layer.

    Raises:
        NotServedError: no kernel is eligible for decode, for extend or for writing the cache. The message has the reason.
    """
    decode = kernel_for(OPS.mha_decode_with_kvcache, _arguments(shape, "mha_decode_with_kvcache"))
    store = kernel_for(OPS.store_kv_cache, _arguments(shape, "store_kv_cache"))
    found, reasons = [], []
    for name, options in (("mha_with_kvcache", {}), ("mha_extend_with_kvcache", {"cu_seqlens_kv": None, "is_causal": True})):
        operator = getattr(OPS, name)
        try:
            found.append((kernel_for(operator, {**_arguments(shape, name), **options}), operator, options))
        except NotServedError as error:
            reasons.append(str(error))
    if not found:
        raise NotServedError("\n".join(reasons))
    # With equal priorities, `mha_with_kvcache` is preferred, because its kernels also balance the load of one-token sequences in
    # mixed batches.
    kernel, operator, options = max(found, key=lambda one: one[0].priority)
    return Serving(operator, (decode.name, kernel.name, store.name), options)


def shapes_of_layers(runner: Any) -> Counter[LayerShape]:
    """Returns the shapes of a model's attention layers, with the number of layers of each shape.

    Args:
        runner: SGLang's `ModelRunner`.

    Raises:
        NotServedError: a layer has an unsupported feature.
    """
    sinks = any(name.rpartition(".")[2] == "sinks" for name, _ in runner.model.named_parameters())
    pool, device = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token.device
    shapes: Counter[LayerShape] = Counter()
    for layer in attention_layers(runner):
        cache = cache_of(pool, layer)
        if cache.dim() != 3 or tuple(cache.shape[1:]) != (layer.tp_k_head_num, layer.head_dim):
            raise NotServedError(f"a cache of shape {tuple(cache.shape)}; expected [slots, kv_heads, head_dim]")
        shapes[LayerShape.of(layer, runner.dtype, cache.dtype, int(runner.page_size), sinks, device)] += 1
    return shapes


def cache_of(pool: Any, layer: Any) -> Tensor:
    """Returns the cache of a layer's keys.

    Raises:
        NotServedError: the pool returns a copy, as pools of packed formats do. Writes to a copy would be lost.
    """
    cache: Tensor = pool.get_key_buffer(layer.layer_id)
    if pool.get_key_buffer(layer.layer_id).data_ptr() != cache.data_ptr():
        raise NotServedError(f"our backend does not support the packed cache of {type(pool).__name__}")
    return cache


def attention_layers(runner: Any) -> list[Any]:
    """Returns a model's `RadixAttention` layers.

    Raises:
        NotServedError: the model has none, or a layer has a feature that none of our backends supports.
    """
    layers: list[Any] = [module for module in runner.model.modules() if type(module).__name__ == "RadixAttention"]
    if not layers:
        raise NotServedError("the model has no RadixAttention layers")
    for layer in layers:
        refuse(
            {
                "cross attention": layer.is_cross_attention,
                f"attention of type {layer.attn_type.value}": layer.attn_type.value != "decoder",
                f"positions in attention ({layer.pos_encoding_mode})": layer.pos_encoding_mode != "NONE",
                f"logit caps by {layer.logit_capping_method}": bool(layer.logit_cap) and layer.logit_capping_method != "tanh",
                "attention in chunks (iRoPE)": layer.use_irope,
                "a temperature by position": layer.xai_temperature_len > 0,
            }
        )
    return layers


# Option of the engine that our backend does not support -> the feature's name for messages, and the value that turns the feature
# off.
OPTIONS: dict[str, tuple[str, Any]] = {
    "speculative_algorithm": ("speculative decoding", None),
    "dcp_size": ("decode context parallelism", 1),
    "enable_prefill_cp": ("prefill context parallelism", False),
    "enable_deterministic_inference": ("deterministic inference", False),
    "enable_two_batch_overlap": ("two batches at once", False),
}


def check_runner(runner: Any) -> None:
    """Raises NotServedError if the model or an option of the engine needs a feature that none of our backends supports."""
    model, arguments = runner.model_config, runner.server_args
    refuse(
        {
            "encoders and decoders": getattr(model, "is_encoder_decoder", False),
            "attention in chunks (attention_chunk_size)": getattr(model, "attention_chunk_size", None) is not None,
            **{f"{feature} ({name})": getattr(arguments, name) not in (off, None) for name, (feature, off) in OPTIONS.items()},
        }
    )


def refuse(asked: dict[str, bool]) -> None:
    """Raises NotServedError that names the features that are asked for, if any.

    Args:
        asked: features that our backend does not support, each with whether it is asked for.
    """
    found = [feature for feature, wanted in asked.items() if wanted]
    if found:
        raise NotServedError(f"our backend does not support {', '.join(found)}")


def _arguments(shape: LayerShape, name: str) -> dict[str, Any]:
    """Returns the arguments of a call of the operator ``name`` with one sequence and one new token."""
    device, pages, kv_heads = shape.device, 2, shape.kv_heads
    k_cache, v_cache = (
        torch.empty(pages, shape.page_size, kv_heads, dim, dtype=shape.cache_dtype, device=device)
        for dim in (shape.head_dim, shape.v_head_dim)
    )
    scale = torch.ones((), dtype=torch.float32, device=device) if shape.scaled else None
    cache = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": scale, "v_scale": scale}
    if name == "store_kv_cache":
        k, v = (torch.empty(1, kv_heads, dim, dtype=shape.dtype, device=device) for dim in (shape.head_dim, shape.v_head_dim))
        return {"k": k, "v": v, **cache, "slot_mapping": torch.zeros(1, dtype=torch.int64, device=device)}
    arguments = {
        "q": torch.empty(1, shape.heads, shape.head_dim, dtype=shape.dtype, device=device),
        **cache,
        "page_table": torch.zeros(1, 2, dtype=torch.int32, device=device),
        "cache_seqlens": torch.ones(1, dtype=torch.int32, device=device),
        "max_seqlen_q": 1,
        "max_seqlen_k": 2 * shape.page_size,
        "window_left": shape.window_left,
        "logit_cap": shape.logit_cap,
        "sinks": torch.empty(shape.heads, dtype=shape.dtype, device=device) if shape.sinks else None,
    }
    if name != "mha_decode_with_kvcache":
        arguments["cu_seqlens_q"] = torch.tensor([0, 1], dtype=torch.int32, device=device)
    return arguments

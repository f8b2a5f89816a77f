"""The attention implementations that are measured: this package's kernels, the core's portable kernels, and third-party baselines.

The ``setup`` of an implementation (this package or a baseline) takes a `Shape` and the operator's arguments by name. The ``setup``
makes the plans and views that an engine makes only once. The ``setup`` returns the timed call: a function without parameters, which
returns the output. A third-party package is imported only when its implementation is measured. A package that is not installed is
reported as absent, with the reason.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from shapes import PAGE_SIZE, Shape
from torch import Tensor

from tokenspeed_kernel.workbench.benchmark import Unsupported
from tokenspeed_kernel.workbench.benchmark.runner import Call, Implementation
from tokenspeed_kernel_base.operator import get_operator

Arguments = Mapping[str, Any]
PREFILL, EXTEND, DECODE = "mha_prefill", "mha_extend_with_kvcache", "mha_decode_with_kvcache"


def output_of(result: Any) -> Tensor:
    """Returns the attention output ``[tokens, heads, head_dim]`` from a call's result, which may be a tuple that begins with it."""
    out = result[0] if isinstance(result, tuple | list) else result
    assert isinstance(out, Tensor)
    return out.flatten(0, -3)


# -- this project's --------------------------------------------------------------------------------------------------------------


def own(functions: Mapping[str, str]) -> Callable[[Shape, Arguments], Call]:
    """Returns the setup of the implementation that calls this package's public functions.

    Args:
        functions: functions to call instead of this package's, ``"module:function"`` by operator. A function gets all of the
            operator's arguments by name.
    """

    def setup(shape: Shape, arguments: Arguments) -> Call:
        module, _, name = functions.get(shape.mode, f"tokenspeed_kernel_nvidia:{shape.mode}").partition(":")
        return functools.partial(getattr(importlib.import_module(module), name), **arguments)

    return setup


def _portable(shape: Shape, arguments: Arguments) -> Call:
    values = list(arguments.values())
    return functools.partial(get_operator(f"attention.{shape.mode}").function.bind(*values, solution="triton"), *values)


# -- FlashAttention-3 ------------------------------------------------------------------------------------------------------------


def _flash_attention_3(shape: Shape, arguments: Arguments) -> Call:
    fa3 = importlib.import_module("flash_attn_interface")
    # How many tokens a token sees to its left and to its right, without itself.
    window = (shape.window_left, 0) if shape.window_left >= 0 else (-1, -1)
    if shape.mode == PREFILL:
        q, k, v, offsets = (arguments[name] for name in ("q", "k", "v", "cu_seqlens"))
        return functools.partial(
            fa3.flash_attn_varlen_func, q, k, v, offsets, offsets, shape.length, shape.length,
            causal=True, window_size=window, sinks=arguments["sinks"],
        )  # fmt: skip
    plan = None
    if shape.window_left < 0:
        # A serving engine computes the scheduler metadata once per step, for all layers. The metadata saves a launch: 1.3 of 12.8
        # us for one sequence of 1K tokens. With a window, the metadata saves nothing.
        plan = fa3.get_scheduler_metadata(
            shape.batch, shape.new, shape.length, shape.heads, shape.kv_heads, shape.head_dim, arguments["cache_seqlens"],
            qkv_dtype=arguments["q"].dtype, page_size=PAGE_SIZE, causal=True,
        )  # fmt: skip
    return functools.partial(
        fa3.flash_attn_with_kvcache,
        arguments["q"].unflatten(0, (shape.batch, shape.new)),
        arguments["k_cache"],
        arguments["v_cache"],
        cache_seqlens=arguments["cache_seqlens"],
        page_table=arguments["page_table"],
        causal=True,
        window_size=window,
        sinks=arguments["sinks"],
        scheduler_metadata=plan,
    )


# -- flash-attn-4 ----------------------------------------------------------------------------------------------------------------


def _flash_attention_4(shape: Shape, arguments: Arguments) -> Call:
    if shape.mode != PREFILL:
        raise Unsupported("measured on whole sequences only")
    fa4 = importlib.import_module("flash_attn.cute.interface")
    q, k, v, offsets = (arguments[name] for name in ("q", "k", "v", "cu_seqlens"))
    window = (shape.window_left, 0) if shape.window_left >= 0 else (None, None)
    return functools.partial(
        fa4.flash_attn_varlen_func, q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=shape.length,
        max_seqlen_k=shape.length, causal=True, window_size=window, learnable_sink=arguments["sinks"],
    )  # fmt: skip


# -- cuDNN, through PyTorch ------------------------------------------------------------------------------------------------------


def _cudnn(shape: Shape, arguments: Arguments) -> Call:
    if shape.mode != PREFILL or shape.window_left >= 0:
        raise Unsupported("PyTorch's attention knows neither pages nor windows")
    attention = importlib.import_module("torch.nn.attention")
    q, k, v = (arguments[name].unflatten(0, (shape.batch, shape.length)).transpose(1, 2) for name in ("q", "k", "v"))

    def call() -> Tensor:
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            result = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return result.transpose(1, 2)

    return call


# -- FlashInfer ------------------------------------------------------------------------------------------------------------------


@functools.cache
def _flashinfer_workspace(device: torch.device) -> Tensor:
    return torch.zeros(128 << 20, dtype=torch.uint8, device=device)


def _flashinfer(shape: Shape, arguments: Arguments) -> Call:
    if shape.mode != DECODE or shape.new > 1 or shape.window_left >= 0:
        raise Unsupported("measured on decoding one token in full layers only")
    flashinfer = importlib.import_module("flashinfer")
    q, k_cache, v_cache, page_table, lengths = (
        arguments[name] for name in ("q", "k_cache", "v_cache", "page_table", "cache_seqlens")
    )
    # All calls share one workspace, because calls run one after another.
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_flashinfer_workspace(q.device), "NHD", use_tensor_cores=True)
    pages = -(-shape.length // PAGE_SIZE)
    starts = torch.arange(0, shape.batch * pages + 1, pages, dtype=torch.int32, device=q.device)
    last = (lengths - 1) % PAGE_SIZE + 1
    wrapper.plan(
        starts, page_table.flatten(), last, shape.heads, shape.kv_heads, shape.head_dim, PAGE_SIZE,
        q_data_type=q.dtype, kv_data_type=k_cache.dtype,
    )  # fmt: skip
    return functools.partial(wrapper.run, q, (k_cache, v_cache))


_OTHERS = (
    Implementation("triton", _portable, "tokenspeed-kernel", ours=True, portable=True),
    Implementation("fa3", _flash_attention_3, "tokenspeed-fa3"),
    Implementation("fa4", _flash_attention_4, "flash-attn-4"),
    Implementation("cudnn", _cudnn, "nvidia-cudnn-cu13", sinks=False),
    Implementation("flashinfer", _flashinfer, "flashinfer-python", sinks=False),
)


def implementations(functions: Mapping[str, str]) -> list[Implementation]:
    """Returns all implementations, this package's first. ``functions``: see `own`."""
    return [Implementation("ours", own(functions), "tokenspeed-kernel-nvidia", ours=True), *_OTHERS]

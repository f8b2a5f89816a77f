"""Which functions serve a layer's attention: the core's operators, or those of a vendor's wheel if that is installed alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.installation import wrong_distributions
from tokenspeed_kernel_vllm.settings import CORE, core_is_there

# Wheels of kernels announce themselves to the core by this group. Without the core, it says which of them are installed.
WHEELS = "tokenspeed_kernel.plugins"

# Pages that every kernel of every wheel takes; the first is what a layer is tried with.
PAGE_SIZES = (16, 32, 64, 128)
# In the order of `Serving`.
_FUNCTIONS = ("mha_decode_with_kvcache", "mha_with_kvcache", "mha_extend_with_kvcache", "store_kv_cache")


@dataclass(frozen=True)
class LayerShape:
    """What decides which kernels serve a layer.

    Attributes:
        heads, kv_heads, head_dim: of this rank.
        dtype: of queries and outputs.
        cache_dtype: of keys and values in the cache.
        window_left: how many tokens to the left a token sees besides itself; -1 for all.
        logit_cap: 0 for none.
        sinks: whether each head has one.
        device: where the layer is.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    window_left: int
    logit_cap: float
    sinks: bool
    device: torch.device

    @property
    def scaled(self) -> bool:
        """Whether keys and values are stored in fewer bits, divided by a scale."""
        return self.cache_dtype != self.dtype


@dataclass(frozen=True)
class Serving:
    """The functions that serve a layer.

    Attributes:
        package: where they come from.
        decode: `mha_decode_with_kvcache`.
        mixed: `mha_with_kvcache`; None where the package has none, or better kernels for both halves of a batch. Batches of both
            kinds are then divided.
        extend: `mha_extend_with_kvcache`, causal; None where mixed is there.
        store: `store_kv_cache`; None where the package does not have it, and vLLM's own writes the cache.
        kernels: the names of the kernels that serve a call with one token.
    """

    package: str
    decode: Callable[..., Tensor]
    mixed: Callable[..., Tensor] | None
    extend: Callable[..., Tensor] | None
    store: Callable[..., None] | None
    kernels: tuple[str, ...]


class NotServedError(ValueError):
    """No installed package serves a layer's attention; the message has every kernel with its reason."""


@functools.cache
def find_serving(shape: LayerShape, package: str | None = None) -> Serving:
    """The functions that serve a layer.

    Args:
        shape: what the layer is like.
        package: the package to take them from; None for the core if it is installed, else the first wheel that serves the layer.

    Raises:
        NotServedError: none does.
    """
    reasons = []
    for module in _packages(package):
        decode, mixed, extend, store = (_asked(module, name, shape) for name in _FUNCTIONS)
        if decode.kernel and (mixed.kernel or extend.kernel):
            # One launch for both kinds is worth more than two, but not more than the kernels that were made for each.
            divided = not mixed.kernel or min(decode.priority, extend.priority) > mixed.priority
            mixed, extend = (_NOBODY, extend) if divided else (mixed, _NOBODY)
            kernels = tuple(part.kernel for part in (decode, mixed, extend, store) if part.kernel)
            return Serving(module.__name__, decode.function, mixed.function, extend.function, store.function, kernels)
        reasons += [f"{module.__name__}: {part.reason}" for part in (decode, mixed, extend) if part.reason]
    raise NotServedError(
        f"no kernel serves attention of {shape}\n" + "\n".join(reasons or ["no package with kernels is installed"])
    )


def serves_decode(serving: Serving, shape: LayerShape, tokens: int) -> bool:
    """Whether the decode function serves sequences of several new tokens each, as speculative decoding has them."""
    return bool(_answer(serving.decode, _arguments(shape, "mha_decode_with_kvcache", tokens)).kernel)


def _packages(package: str | None) -> Iterator[ModuleType]:
    if package is not None:
        yield import_module(package)
    elif core_is_there():
        yield import_module(CORE)
    else:
        wrong = {found.name for found in wrong_distributions()}
        entries = [entry for entry in metadata.entry_points(group=WHEELS) if not entry.dist or entry.dist.name not in wrong]
        for name in sorted({entry.module.partition(".")[0] for entry in entries}):
            yield import_module(name)


@dataclass(frozen=True)
class _Answer:
    """What became of asking a function to serve a layer: the function with the kernel behind it, or the reason against it."""

    function: Any = None
    kernel: str = ""
    priority: int = -1
    reason: str = ""


_NOBODY = _Answer()


def _asked(module: ModuleType, name: str, shape: LayerShape) -> _Answer:
    function = getattr(module, name, None)
    return _Answer(reason=f"has no {name}") if function is None else _answer(function, _arguments(shape, name))


def _answer(function: Any, arguments: dict[str, Any]) -> _Answer:
    try:
        explanation = function.explain(**arguments)
    except (TypeError, ValueError) as error:  # no kernel could be asked: the operator itself takes no such call
        return _Answer(reason=str(error))
    chosen = explanation.chosen
    if chosen is None:
        return _Answer(reason=str(explanation))
    # A reference reads lengths on the host, as some kernels do: on a GPU that stops the engine's asynchronous scheduling.
    waits = "waits" in chosen.tags or chosen.solution == "reference"
    if waits and not explanation.request.platform.is_cpu:
        return _Answer(reason=f"{chosen.name} waits for the device")
    return _Answer(function, chosen.name, chosen.priority)


def _arguments(shape: LayerShape, name: str, tokens: int = 1) -> dict[str, Any]:
    """A call for one sequence of a few new tokens, in a cache of one page that is laid out as vLLM lays it out."""
    make = functools.partial(torch.empty, device=shape.device)
    page_size = PAGE_SIZES[0]
    kv = make(tokens, shape.kv_heads, 2 * shape.head_dim, dtype=shape.dtype)
    kv_cache = make(1, page_size, shape.kv_heads, 2 * shape.head_dim, dtype=shape.cache_dtype)
    k_cache, v_cache = torch.split(kv_cache, shape.head_dim, -1)
    scale = torch.ones((), dtype=torch.float32, device=shape.device) if shape.scaled else None
    cache = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": scale, "v_scale": scale}
    if name == "store_kv_cache":
        k, v = torch.split(kv, shape.head_dim, -1)
        return {"k": k, "v": v, **cache, "slot_mapping": torch.arange(tokens, device=shape.device)}
    arguments = {
        "q": make(tokens, shape.heads, shape.head_dim, dtype=shape.dtype),
        **cache,
        "page_table": torch.zeros(1, 1, dtype=torch.int32, device=shape.device),
        "cache_seqlens": torch.full((1,), tokens, dtype=torch.int32, device=shape.device),
        "max_seqlen_q": tokens,
        "max_seqlen_k": page_size,
        "window_left": shape.window_left,
        "logit_cap": shape.logit_cap,
        "sinks": make(shape.heads, dtype=shape.dtype) if shape.sinks else None,
    }
    if name != "mha_decode_with_kvcache":
        arguments["cu_seqlens_q"] = torch.tensor([0, tokens], dtype=torch.int32, device=shape.device)
    if name == "mha_extend_with_kvcache":
        arguments |= {"cu_seqlens_kv": None, "is_causal": True}
    return arguments

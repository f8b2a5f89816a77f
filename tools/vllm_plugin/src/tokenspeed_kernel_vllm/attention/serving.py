"""Selects the functions that run a layer's attention: the core's operators, or those of a vendor's wheel that is installed
alone.
"""

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
from tokenspeed_kernel_base.served import NotServedError, kernel_for
from tokenspeed_kernel_vllm.settings import CORE, core_is_there

# The entry point group by which wheels register with the core. Without the core, this group still lists the installed wheels.
WHEELS = "tokenspeed_kernel.plugins"

# Page sizes that every kernel of every wheel supports. The first one is used to test whether a layer is supported.
PAGE_SIZES = (16, 32, 64, 128)
# The operators that run a layer's attention, in the order of the fields of `Serving`.
_FUNCTIONS = ("mha_decode_with_kvcache", "mha_with_kvcache", "mha_extend_with_kvcache", "store_kv_cache")


@dataclass(frozen=True)
class LayerShape:
    """The properties that decide which kernels are eligible for a layer.

    Attributes:
        heads, kv_heads, head_dim: numbers of heads and head width on this rank.
        dtype: dtype of queries and outputs.
        cache_dtype: dtype of keys and values in the cache.
        window_left: number of visible tokens before the token itself; -1 for all.
        logit_cap: soft cap of the scores; 0 for none.
        sinks: whether each head has a sink.
        device: the layer's device.
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
        """Whether the cache holds quantised keys and values, with a scale."""
        return self.cache_dtype != self.dtype


@dataclass(frozen=True)
class Serving:
    """The attention functions of a layer.

    Attributes:
        package: the package that the functions belong to.
        decode: the package's `mha_decode_with_kvcache`.
        mixed: the package's `mha_with_kvcache`. None if the package lacks it, or has better separate kernels for decode and extend.
            If None, mixed batches are split.
        extend: the package's `mha_extend_with_kvcache`, causal; None if ``mixed`` is set.
        store: the package's `store_kv_cache`. None if the package lacks it; vLLM's own function then writes the cache.
        kernels: the names of the kernels that are selected for a call with one token.
    """

    package: str
    decode: Callable[..., Tensor]
    mixed: Callable[..., Tensor] | None
    extend: Callable[..., Tensor] | None
    store: Callable[..., None] | None
    kernels: tuple[str, ...]


@functools.cache
def find_serving(shape: LayerShape, package: str | None = None) -> Serving:
    """Finds the attention functions of a layer.

    Args:
        shape: the layer's properties.
        package: the package to use; None for the core if it is installed, otherwise the first wheel with eligible kernels.

    Raises:
        NotServedError: no package has eligible kernels.
    """
    reasons = []
    for module in packages(package):
        decode, mixed, extend, store = (_asked(module, name, shape) for name in _FUNCTIONS)
        if decode.kernel and (mixed.kernel or extend.kernel):
            # One launch for mixed batches is better than two launches, unless both specialised kernels have a higher priority.
            divided = not mixed.kernel or min(decode.priority, extend.priority) > mixed.priority
            mixed, extend = (NOBODY, extend) if divided else (mixed, NOBODY)
            kernels = tuple(part.kernel for part in (decode, mixed, extend, store) if part.kernel)
            return Serving(module.__name__, decode.function, mixed.function, extend.function, store.function, kernels)
        reasons += [f"{module.__name__}: {part.reason}" for part in (decode, mixed, extend) if part.reason]
    raise NotServedError(
        f"no kernel serves attention of {shape}\n" + "\n".join(reasons or ["no package with kernels is installed"])
    )


def serves_decode(serving: Serving, shape: LayerShape, tokens: int) -> bool:
    """Returns whether the decode function supports ``tokens`` new tokens per sequence, for speculative decoding."""
    return bool(answer(serving.decode, _arguments(shape, "mha_decode_with_kvcache", tokens)).kernel)


def packages(package: str | None) -> Iterator[ModuleType]:
    """Yields the packages whose functions may run attention: ``package`` if given; else the core; without the core, each wheel."""
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
class Answer:
    """The result of testing whether a function supports a layer: the function and its kernel, or the reason for rejection."""

    function: Any = None
    kernel: str = ""
    priority: int = -1
    reason: str = ""


NOBODY = Answer()


def _asked(module: ModuleType, name: str, shape: LayerShape) -> Answer:
    function = getattr(module, name, None)
    return Answer(reason=f"has no {name}") if function is None else answer(function, _arguments(shape, name))


def answer(function: Any, arguments: dict[str, Any]) -> Answer:
    """Tests whether a function supports a call with these arguments."""
    try:
        chosen = kernel_for(function, arguments)
    except NotServedError as error:
        return Answer(reason=str(error))
    return Answer(function, chosen.name, chosen.priority)


def _arguments(shape: LayerShape, name: str, tokens: int = 1) -> dict[str, Any]:
    """Returns the arguments of a call with one sequence of ``tokens`` new tokens, and a cache of one page in vLLM's layout."""
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

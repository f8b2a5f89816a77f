"""Selects the functions that run a layer's latent attention, as `attention.serving` does for other attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_base.served_latent import LatentShape, PrefillShape
from tokenspeed_kernel_vllm.attention.serving import NOBODY, PAGE_SIZES, Answer, answer, packages

SWITCH = "TOKENSPEED_VLLM_MLA"
NAMES = ("mla_decode_with_kvcache", "mla_extend_with_kvcache", "store_mla_kv_cache")


@dataclass(frozen=True)
class LatentServing:
    """The functions that run a layer's latent attention.

    Attributes:
        decode: a package's `mla_decode_with_kvcache`.
        extend: the package's `mla_extend_with_kvcache`.
        store: the package's `store_mla_kv_cache`. None if the package lacks it; vLLM's own function then writes the cache.
        kernels: the names of the kernels that are selected for a call with one token and pages of ``page_size`` tokens.
        page_size: the number of tokens per page for which the kernels of decode and extend have the highest priorities; the
            smallest if there are several. Some kernels need pages of 64 tokens.
    """

    decode: Callable[..., Tensor]
    extend: Callable[..., Tensor]
    store: Callable[..., None] | None
    kernels: tuple[str, ...]
    page_size: int


@functools.cache
def find_latent(shape: LatentShape, package: str | None = None) -> LatentServing:
    """Finds the functions that run a layer's latent attention.

    Args:
        shape: the layer's properties.
        package: the package to use; None for the core if it is installed, otherwise the first wheel with eligible kernels.

    Raises:
        NotServedError: no package has eligible kernels.
    """
    reasons = []
    for module in packages(package):
        found: LatentServing | None = None
        highest = -1
        for page_size in PAGE_SIZES:
            calls = shape.calls(page_size)
            decode, extend, store = (_asked(module, name, calls[name]) for name in NAMES)
            priority = decode.priority + extend.priority
            if decode.kernel and extend.kernel and priority > highest:
                kernels = tuple(part.kernel for part in (decode, extend, store) if part.kernel)
                found = LatentServing(decode.function, extend.function, store.function, kernels, page_size)
                highest = priority
            elif not found and page_size == PAGE_SIZES[0]:
                reasons += [f"{module.__name__}: {part.reason}" for part in (decode, extend) if part.reason]
        if found:
            return found
    raise _not_served(shape, reasons)


@functools.cache
def find_prefill(shape: PrefillShape, package: str | None = None) -> tuple[Callable[..., Any], str]:
    """Finds `mla_prefill` for a model. Returns the function, and the name of the kernel that is selected for one new token and keys
    of an earlier chunk. See `find_latent`.
    """
    given = {**shape.call(), "return_lse": True}
    reasons = []
    for module in packages(package):
        # Attention within a whole prompt is causal. All keys of an earlier chunk are visible.
        prompt = _asked(module, "mla_prefill", given)
        chunk = _asked(module, "mla_prefill", {**given, "cu_seqlens_kv": given["cu_seqlens"], "is_causal": False})
        if prompt.kernel and chunk.kernel:
            return chunk.function, chunk.kernel
        reasons += [f"{module.__name__}: {part.reason}" for part in (prompt, chunk) if part.reason]
    raise _not_served(shape, reasons)


def _asked(module: Any, name: str, arguments: dict[str, Any]) -> Answer:
    function = getattr(module, name, NOBODY)
    return Answer(reason=f"has no {name}") if function is NOBODY else answer(function, arguments)


def _not_served(shape: object, reasons: list[str]) -> NotServedError:
    text = "\n".join(reasons or ["no package with kernels is installed"])
    return NotServedError(f"no kernel serves latent attention of {shape}\n{text}")

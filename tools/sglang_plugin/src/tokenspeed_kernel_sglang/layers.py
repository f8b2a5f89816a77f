"""Hooks that run norms, activations and rotary embeddings on our kernels. They wrap the methods that SGLang's custom operators call
on a GPU.

The first argument of a hook is SGLang's method. If our kernels do not support a call, the hook calls SGLang's method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.served import NotServedError, kernel_for
from tokenspeed_kernel_sglang.record import record

# The type is Any, because calls with options in a dict match no overload of the operators for type checkers.
OPS: Any = import_module("tokenspeed_kernel")


def rms_norm(original: Callable[..., Any], norm: Any, x: Tensor, residual: Tensor | None = None, *more: Any, **options: Any) -> Any:
    """Runs SGLang's ``RMSNorm``. With a residual, the normalised result is written to x, and the sum to the residual, as in
    SGLang's method.

    Args:
        original: SGLang's method.
        norm: the module.
        x: ``[..., hidden]``.
        residual: x's shape; added to x before the norm.
        more, options: ``post_residual_addition``, which is added to the residual first. With any other argument, SGLang's method
            runs.
    """
    added = more[0] if more else options.get("post_residual_addition")
    others = len(more) > 1 or any(value is not None for name, value in options.items() if name != "post_residual_addition")
    features = {
        "a variance of other rows": norm.variance_size_override is not None,
        "rounding before the weight": norm.cast_x_before_out_mul,
        "another result dtype": norm.override_orig_dtype is not None,
        "a norm that also quantises": others or getattr(norm, "_quant_linear", None) is not None,
        "batch invariance": _batch_invariant(),
        "a weight of another dtype": norm.weight.dtype != x.dtype,
        "rows that are not contiguous": x.stride(-1) != 1 or (residual is not None and residual.stride(-1) != 1),
        "a residual of another dtype": residual is not None and residual.dtype != x.dtype,
    }
    if x.numel() == 0 or not _served("norms", type(norm).__name__, features, "rmsnorm", x, weight=norm.weight.shape[0]):
        return original(norm, x, residual, *more, **options)
    weight = norm.weight.data
    if residual is None:
        return OPS.rmsnorm(x, weight, norm.variance_epsilon)
    if added is not None:
        residual = residual + added
    return OPS.rmsnorm(x, weight, norm.variance_epsilon, residual=residual, out=x, residual_out=residual)


def silu_and_mul(original: Callable[..., Any], activation: Any, x: Tensor, *more: Any, **options: Any) -> Any:
    """Runs SGLang's ``SiluAndMul``, which maps ``[..., 2 * d]`` to ``[..., d]``."""
    features = {"further arguments": bool(more or options), "rows that are not contiguous": x.stride(-1) != 1}
    if x.numel() == 0 or not _served("activations", type(activation).__name__, features, "silu_and_mul", x):
        return original(activation, x, *more, **options)
    return OPS.silu_and_mul(x)


def gelu_and_mul(original: Callable[..., Any], activation: Any, x: Tensor, *more: Any, **options: Any) -> Any:
    """Runs SGLang's ``GeluAndMul``, which maps ``[..., 2 * d]`` to ``[..., d]``."""
    features = {"further arguments": bool(more or options), "rows that are not contiguous": x.stride(-1) != 1}
    kind = f"{type(activation).__name__}, {activation.approximate}"
    if x.numel() == 0 or not _served("activations", kind, features, "gelu_and_mul", x, approximate=activation.approximate):
        return original(activation, x, *more, **options)
    return OPS.gelu_and_mul(x, activation.approximate)


def rope(
    original: Callable[..., Any], rotary: Any, positions: Tensor, query: Tensor, key: Tensor, *more: Any, **options: Any
) -> Any:
    """Runs SGLang's ``RotaryEmbedding`` in place.

    Args:
        original: SGLang's method.
        rotary: the module, with ``cos_sin_cache`` of float32 ``[max_positions, rotary_dim]``.
        positions: ``[tokens]``.
        query, key: ``[tokens, heads * head_dim]``, which may be slices of qkv's rows.
        more, options: further arguments. If there are any, SGLang's method runs. An example is a cache that SGLang's fused kernel
            also writes.
    """
    size = rotary.head_size
    features = {
        "further arguments (offsets, a cache to write)": any(value is not None for value in (*more, *options.values())),
        "queries without keys": key is None,
        f"a table of {rotary.cos_sin_cache.dtype}": rotary.cos_sin_cache.dtype != torch.float32,
        "positions of several axes": positions.dim() != 1,
    }
    shape = {"head_dim": size, "rotary_dim": rotary.rotary_dim, "interleaved": not rotary.is_neox_style}
    if query.numel() == 0 or not _served("rope", type(rotary).__name__, features, "apply_rope", query, **shape):
        return original(rotary, positions, query, key, *more, **options)
    q, k = (tensor.view(len(positions), -1, size) for tensor in (query, key))
    OPS.apply_rope(q, k, positions, rotary.cos_sin_cache, interleaved=not rotary.is_neox_style, q_out=q, k_out=k)
    return query, key


# Part -> the names of SGLang's methods that are hooked, each with the hook.
HOOKS: dict[str, dict[str, Callable[..., Any]]] = {
    "norms": {"sglang.srt.layers.layernorm.RMSNorm.forward_cuda": rms_norm},
    "activations": {
        "sglang.srt.layers.activation.SiluAndMul.forward_cuda": silu_and_mul,
        "sglang.srt.layers.activation.GeluAndMul.forward_cuda": gelu_and_mul,
    },
    "rope": {"sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda": rope},
}


def _batch_invariant() -> bool:
    """Returns whether SGLang's batch-invariant mode is on."""
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    return bool(is_batch_invariant_mode_enabled())


def _served(part: str, kind: str, features: dict[str, bool], operator: str, x: Tensor, **facts: Any) -> bool:
    """Returns whether a call runs on our kernels. Records the decision for each new kind of call in the receipt."""
    wanted = tuple(feature for feature, asked in features.items() if asked)
    return _decide(part, kind, wanted, operator, x.shape[-1], x.dtype, x.device, tuple(facts.items()))


@functools.cache
def _decide(
    part: str,
    kind: str,
    wanted: tuple[str, ...],
    operator: str,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    facts: tuple[tuple[str, Any], ...],
) -> bool:
    """Implements `_served`, once per kind of call. ``wanted``: the features of the call that our kernel lacks."""
    title = f"{kind} of {width}, {str(dtype).removeprefix('torch.')}"
    try:
        if wanted:
            raise NotServedError(f"our kernel does not support {', '.join(wanted)}")
        kernel = kernel_for(getattr(OPS, operator), _arguments(operator, width, dtype, device, dict(facts)))
    except NotServedError as error:
        record(part, title, reason=str(error))
        return False
    record(part, title, (kernel.name,))
    return True


def _arguments(operator: str, width: int, dtype: torch.dtype, device: torch.device, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of ``operator`` with one token."""
    make = functools.partial(torch.empty, dtype=dtype, device=device)
    if operator == "rmsnorm":
        return {"x": make(1, width), "weight": make(facts["weight"]), "residual": make(1, width)}
    if operator == "apply_rope":
        head = make(1, 1, facts["head_dim"])
        table = torch.empty(1, facts["rotary_dim"], dtype=torch.float32, device=device)
        positions = torch.zeros(1, dtype=torch.int64, device=device)
        return {"q": head, "k": head, "positions": positions, "cos_sin_cache": table, "interleaved": facts["interleaved"]}
    return {"x": make(1, width), **facts}

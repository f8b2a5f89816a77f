"""Fused QK-RMSNorm, RoPE and KV-cache store after the QKV projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.embedding.apply_rope import apply_rope
from tokenspeed_kernel_base.ops.kvcache.slots import padding_of, unwritten
from tokenspeed_kernel_base.ops.norm.qk_rmsnorm import qk_rmsnorm
from tokenspeed_kernel_base.signature import TensorFormat, dense_tensor_format
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "attention",
    "qk_rmsnorm_rope_store_kv_cache",
    formats=("qkv", "k_cache"),
    traits={"qk_norm": bool, **apply_rope.operator.traits},
    mutates=("k_cache", "v_cache"),
    varying=("tokens",),
    capacity=("max_positions", "pages"),
    scales=("k_scale", "v_scale"),
    parts=(qk_rmsnorm, apply_rope),
)
def qk_rmsnorm_rope_store_kv_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    mrope_section: tuple[int, ...] | None = None,
    mrope_interleaved: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Normalises and rotates q and k, quantises k and v, and stores them in the paged KV cache.

    1. With ``q_weight`` and ``k_weight`` every head of q and of k is normalised by `qk_rmsnorm`, and rounded to qkv's dtype.
       Qwen3 and Gemma 3 have these weights, Llama has none.
    2. Every head of q and of k is rotated by `apply_rope`, and rounded again.
    3. k and v are written to the cache, as by `store_kv_cache` with the same scales. The operator does not return k and v.

    Args:
        qkv: float16, bfloat16, float32 or float64 ``[tokens, heads * head_dim + kv_heads * (head_dim + v_head_dim)]``: the query
            heads, then the key heads, then the value heads. May be a strided slice. If a token is not written to the cache, only
            its q is read.
        positions: int32 or int64 ``[tokens]``, with mrope_section ``[3, tokens]``; 0 to ``max_positions - 1``, in any order.
            Positions in host memory are checked, also those of tokens that are not written.
        cos_sin_cache: float32 ``[max_positions, rotary_dim]``; rotary_dim even, at most head_dim. Row p holds the cosines of
            position p's ``rotary_dim / 2`` angles, then their sines.
        k_cache: ``[pages, page_size, kv_heads, head_dim]`` of qkv's dtype or an 8-bit float. Written to. May be strided: a
            cache ``[pages, kv_heads, page_size, head_dim]`` (HND) is passed as ``k_cache.transpose(1, 2)``.
        v_cache: the value cache, k_cache's dtype ``[pages, page_size, kv_heads, v_head_dim]``; otherwise as k_cache.
        slot_mapping: int32 or int64 ``[tokens]``: ``page * page_size + offset``; negative: the token is not written. Below
            ``pages * page_size``; slots that are not negative must be distinct. Both conditions are checked if slot_mapping lies in
            host memory.
        q_weight: any float dtype ``[head_dim]``; requires k_weight.
        k_weight: any float dtype ``[head_dim]``; requires q_weight.
        eps: added to the mean square of a head, > 0.
        interleaved: which elements are rotated together, as in `apply_rope`.
        k_scale: float32 ``[]``, ``[1]`` or ``[kv_heads]``, finite, > 0; None means 1. Allowed only for an 8-bit cache.
        v_scale: the scale of v, like k_scale.
        mrope_section: how many pairs use the time, height and width position, as in `apply_rope`; None: a token has one position.
        mrope_interleaved: whether time, height and width alternate from pair to pair, as in `apply_rope`. Allowed only with
            mrope_section.
        out: receives the queries; must not overlap an input.

    Returns:
        The queries, qkv's dtype ``[tokens, heads, head_dim]``, contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        One query, key and value head of two elements; RoPE rotates the token at position 1 by 90 degrees.

        >>> import torch
        >>> from tokenspeed_kernel import qk_rmsnorm_rope_store_kv_cache
        >>> cos_sin_cache = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> qkv, at = torch.tensor([[5.0, 5.0, 3.0, -3.0, 7.0, 8.0]]), torch.tensor([1])
        >>> k_cache, v_cache = torch.zeros(2, 1, 2, 1, 2)
        >>> weights = torch.ones(2), torch.ones(2)
        >>> qk_rmsnorm_rope_store_kv_cache(qkv, at, cos_sin_cache, k_cache, v_cache, at, *weights).round()
        tensor([[[-1.,  1.]]])
        >>> k_cache[0, 1].round(), v_cache[0, 1]
        (tensor([[1., 1.]]), tensor([[7., 8.]]))

    Safe in CUDA graphs.
    """
    q, k, v = _heads(qkv, k_cache, v_cache)
    if q_weight is not None and k_weight is not None:
        q, k = qk_rmsnorm(q, k, q_weight, k_weight, eps)
    rotated_heads = apply_rope(
        q, k, positions, cos_sin_cache, interleaved, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, mrope_section,
        mrope_interleaved, q_out=out,
    )  # fmt: skip
    return rotated_heads[0]


def _heads(qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of q, k and v: ``[tokens, heads or kv_heads, head_dim or v_head_dim]``."""
    (kv_heads, head_dim), v_head_dim, tokens = k_cache.shape[2:], v_cache.shape[3], len(qkv)
    first_v = qkv.shape[1] - kv_heads * v_head_dim
    first_k = first_v - kv_heads * head_dim
    q = qkv[:, :first_k].view(tokens, first_k // head_dim, head_dim)
    k = qkv[:, first_k:first_v].view(tokens, kv_heads, head_dim)
    return q, k, qkv[:, first_v:].view(tokens, kv_heads, v_head_dim)


@qk_rmsnorm_rope_store_kv_cache.traits
def _(
    qkv: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_weight: Tensor | None,
    interleaved: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    mrope_section: tuple[int, ...] | None,
) -> dict[str, object]:
    rotated = {
        "q": _heads(qkv, k_cache, v_cache)[0],
        "cos_sin_cache": cos_sin_cache,
        "interleaved": interleaved,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "mrope_section": mrope_section,
    }
    return {"qk_norm": q_weight is not None, **apply_rope.operator.run_hook("traits", rotated)}


@qk_rmsnorm_rope_store_kv_cache.intermediates
def _(qkv: Tensor) -> tuple[TensorFormat, ...]:
    return (dense_tensor_format(qkv.dtype),)  # normalised heads


@qk_rmsnorm_rope_store_kv_cache.check
def _(
    check: Checker,
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    **arguments: Any,
) -> None:
    check.tensor("qkv", qkv, "tokens qkv", FLOATS)
    check.tensor("k_cache", k_cache, "pages page_size kv_heads head_dim")
    check.require(check["head_dim"] > 0, "k_cache", "of a head_dim > 0", str(list(k_cache.shape)))
    check.require(check["kv_heads"] > 0, "k_cache", "of kv_heads > 0", str(list(k_cache.shape)))
    check.tensor("v_cache", v_cache, "pages page_size kv_heads v_head_dim")
    stored = check["kv_heads"] * (check["head_dim"] + check["v_head_dim"])
    heads, rest = divmod(check["qkv"] - stored, check["head_dim"])
    wanted = f"of heads * {check['head_dim']} columns and {stored} more for k and v, with heads > 0"
    check.require(heads > 0 and rest == 0, "qkv", wanted, str(list(qkv.shape)))
    q, k, v = _heads(qkv, k_cache, v_cache)
    apply_rope.operator.run_hook("check", {**arguments, "q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}, check)
    check.tensor("q_weight", q_weight, "head_dim", FLOATS)
    check.tensor("k_weight", k_weight, "head_dim", FLOATS)
    missing = "q_weight" if q_weight is None else "k_weight"
    check.require((q_weight is None) == (k_weight is None), missing, "given where the other weight is", None)
    check.require(eps > 0, "eps", "positive", eps)


@qk_rmsnorm_rope_store_kv_cache.check_values(host=("positions", "slot_mapping", "k_scale", "v_scale"))
def _(check: Checker, **arguments: Any) -> None:
    apply_rope.operator.run_hook("check_values", arguments, check)


@qk_rmsnorm_rope_store_kv_cache.fake
def _(qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    return qkv.new_empty(_heads(qkv, k_cache, v_cache)[0].shape)


@recipe
def _inputs(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    norm: bool = True,
    page_size: int = 4,
    max_positions: int = 64,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws heads and positions with the recipe of `apply_rope`'s cases. ``options`` are options of this recipe."""
    rope = next(case.make for case in apply_rope.operator.all_cases() if case.name == "gpt-oss-120b decode 16")
    rotation = rope.vary(  # type: ignore[attr-defined]
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        page_size=page_size,
        max_positions=max_positions,
        **options,
    )

    def make(draw: Draw) -> dict[str, Any]:
        rotated = rotation(draw)
        heads_of_all = [rotated.pop(name).flatten(1) for name in ("q", "k", "v")]
        weights = {f"{name}_weight": 1 + draw.normal(head_dim, scale=0.1, dtype=dtype) for name in "qk"} if norm else {}
        return {"qkv": torch.cat(heads_of_all, dim=1), **rotated, **weights}

    return make


@qk_rmsnorm_rope_store_kv_cache.cases
def _() -> list[Case]:
    fp8 = torch.float8_e4m3fn
    qwen3_8b: tuple[int, int, int] = (32, 8, 128)
    qwen3_32b: tuple[int, int, int] = (64, 8, 128)
    qwen3_235b: tuple[int, int, int] = (64, 4, 128)
    llama_8b, llama_70b = qwen3_8b, qwen3_32b  # the two 8B models have the same heads, as have llama-70b and qwen3-32b
    qwen3_vl: dict[str, Any] = {"mrope_section": (24, 20, 20), "mrope_interleaved": True}
    paged: dict[str, Any] = {"page_size": 64, "max_positions": 40960}
    quantised: dict[str, Any] = {"cache_dtype": fp8, "scale_shape": ()}
    return [
        Case("one token, one pair, float32", _inputs(1, 1, 1, 2, torch.float32)),
        Case("qwen3-235b heads, a rank's 8 of 64", _inputs(5, 8, 1, 128)),
        Case("llama, no norm, fp8 cache with scales", _inputs(5, 4, 1, 128, norm=False, **quantised)),
        Case("qwen3-next, partial 64 of 256", _inputs(5, 4, 1, 256, rotary_dim=64)),
        Case(
            "interleaved, partial, odd head_dim 57, float32", _inputs(3, 5, 2, 57, torch.float32, rotary_dim=30, interleaved=True)
        ),
        Case("no norm, values narrower than keys, float16", _inputs(6, 3, 2, 48, torch.float16, norm=False, v_head_dim=32)),
        Case("no tokens", _inputs(0, 4, 2, 16)),
        Case(
            "qwen3-vl, fp8 cache, one scale a head, float16",
            _inputs(6, 6, 2, 128, torch.float16, cache_dtype=fp8, scale_shape=(2,), **qwen3_vl),
        ),
        Case("qwen3-8b decode 1", _inputs(1, *qwen3_8b, **paged), large=True),
        Case("qwen3-8b decode 64", _inputs(64, *qwen3_8b, **paged), large=True),
        Case("qwen3-235b decode 128, fp8 cache", _inputs(128, *qwen3_235b, **{**paged, **quantised}), large=True),
        Case("llama-3-8b decode 64", _inputs(64, *llama_8b, norm=False, **paged), large=True),
        Case("llama-3-70b decode 256, fp8 cache", _inputs(256, *llama_70b, norm=False, **{**paged, **quantised}), large=True),
        Case("qwen3-32b prefill 16384", _inputs(16384, *qwen3_32b, **paged), large=True),
        Case("qwen3-235b prefill 16384, fp8 cache", _inputs(16384, *qwen3_235b, **{**paged, **quantised}), large=True),
        Case("qwen3-vl-8b prefill 16384", _inputs(16384, *qwen3_8b, **{**paged, **qwen3_vl}), large=True),
    ]


@qk_rmsnorm_rope_store_kv_cache.vary
def _(
    variation: Variation,
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> dict[str, Tensor]:
    q, _, v = _heads(qkv, k_cache, v_cache)
    if variation.want is Want.UNUSED:  # keys and values of tokens that are not written
        queries = q.shape[1] * q.shape[2]
        varied = unwritten(slot_mapping, keys=qkv[:, queries:])
        return {"qkv": torch.cat((qkv[:, :queries], varied.pop("keys")), dim=1), **varied}
    rotated = {"positions": positions, "cos_sin_cache": cos_sin_cache, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    return dict(apply_rope.operator.run_hook("vary", {**rotated, "slot_mapping": slot_mapping}, variation))


@qk_rmsnorm_rope_store_kv_cache.work
def _(slot_mapping: Tensor) -> dict[str, list[int]]:
    return padding_of(slot_mapping)


@qk_rmsnorm_rope_store_kv_cache.cost
def _(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Cost:
    q, k, v = _heads(qkv, k_cache, v_cache)
    tokens, rotary_dim = len(qkv), cos_sin_cache.shape[1]
    # Four multiplications and two additions for each pair. At most one row of cos_sin_cache is read for each token.
    flops = 3.0 * tokens * (q.shape[1] + k.shape[1]) * rotary_dim + (0.0 if q_weight is None else 4.0 * (q.numel() + k.numel()))
    read = nbytes(qkv, positions, slot_mapping, q_weight, k_weight, k_scale, v_scale)
    read += min(4 * tokens * rotary_dim, nbytes(cos_sin_cache))
    return Cost(flops=flops, bytes=read + nbytes(q) + (k.numel() + v.numel()) * k_cache.element_size())

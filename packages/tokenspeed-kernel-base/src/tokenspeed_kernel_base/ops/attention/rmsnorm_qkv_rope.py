"""Fused RMSNorm, QKV projection, RoPE and KV-cache store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, FP8, HALVES, INTS, Checker
from tokenspeed_kernel_base.explanation import bucket
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.embedding.apply_rope import apply_rope
from tokenspeed_kernel_base.ops.gemm import _inputs as operands
from tokenspeed_kernel_base.ops.gemm.mm import mm
from tokenspeed_kernel_base.ops.gemm.operands import FORMAT_NAMES, recognise
from tokenspeed_kernel_base.ops.kvcache.slots import captured_slots, padding_of, unwritten
from tokenspeed_kernel_base.ops.norm.rmsnorm import RESIDUAL_KINDS, check_residual, residual_traits, rmsnorm
from tokenspeed_kernel_base.signature import FormatSignature, dense_tensor_format, dtype_name, format_signature
from tokenspeed_kernel_base.variation import Variation, Want

# Arguments of apply_rope that this operator lacks: cache scales, and several positions for each token (mrope).
_LEFT_OUT = {"k_scale": None, "v_scale": None, "mrope_section": None, "mrope_interleaved": False}


# A weight in nvfp4 also has a global scale, which this operator lacks.
WEIGHT_FORMATS = tuple(name for name in FORMAT_NAMES if name != "nvfp4")


@operator(
    "attention",
    "rmsnorm_qkv_rope",
    formats={"x": ("dense",), "qkv_weight": WEIGHT_FORMATS, "k_cache": ("dense",)},
    traits={
        "tokens": int,
        "hidden": int,
        "kv_heads": int,
        "head_dim": int,
        "rotary_dim": int,
        **RESIDUAL_KINDS,
        "bias": bool,
        "interleaved": bool,
        "cache_write": bool,
        "page_size": int,
    },
    outs=("out", "residual_out"),
    mutates=("k_cache", "v_cache"),
    in_place={"residual_out": ("x", "residual")},
    varying=("tokens",),
    capacity=("max_positions", "pages"),
    scales=("qkv_weight_scale",),
    parts=(rmsnorm, mm, apply_rope),
)
def rmsnorm_qkv_rope(
    x: Tensor,
    norm_weight: Tensor,
    qkv_weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_heads: int,
    head_dim: int,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    interleaved: bool = False,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    qkv_weight_scale: Tensor | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes RMSNorm, QKV projection and RoPE in one call, and can also store k and v in the paged KV cache.

    The operator is a composition of three operators. `rmsnorm` first adds the residual, if there is one. `mm` applies the
    concatenated weights of q, k and v and the bias, and rounds to x's dtype. `apply_rope` rotates q and k in place, and writes k
    and v to the cache. A fused kernel may round ``x * norm_weight``, and divide by the root mean square after the GEMM.

    Args:
        x: float16, bfloat16, float32 or float64 ``[tokens, hidden]``.
        norm_weight: any float dtype ``[hidden]``.
        qkv_weight: x's dtype ``[hidden, (heads + 2 * kv_heads) * head_dim]``: the query heads, then the key heads, then the value
            heads. A weight stored as ``[out, in]`` is passed as ``weight.t()``. With float16 or bfloat16 tokens it may also be
            quantised to fp8, mxfp8 or mxfp4, as the weight-only operand b of `mm`.
        positions: int32 or int64 ``[tokens]``, rows of cos_sin_cache.
        cos_sin_cache: float32 ``[max_positions, rotary_dim]``, as for `apply_rope`.
        kv_heads: number of key heads and of value heads.
        head_dim: width of every head.
        eps: added to the mean square, > 0.
        residual: ``[tokens, hidden]`` of x's dtype, or of float32 if x is float16 or bfloat16. Added to x before the normalisation.
        bias: x's dtype ``[(heads + 2 * kv_heads) * head_dim]``.
        interleaved: which elements are rotated together, as in `apply_rope`.
        k_cache: x's dtype or an 8-bit float ``[pages, page_size, kv_heads, head_dim]``, written to. k_cache, v_cache and
            slot_mapping are given together or not at all.
        v_cache: the value cache, like k_cache.
        slot_mapping: int32 or int64 ``[tokens]``: ``page * page_size + offset``; negative: the token is not written. Below
            ``pages * page_size``; slots that are not negative must be distinct. Both conditions are checked if slot_mapping lies in
            host memory.
        qkv_weight_scale: the scale of a quantised qkv_weight, as `mm` takes b_scale: for example float32 ``[1, (heads + 2 *
            kv_heads) * head_dim]`` for fp8 with a scale per output channel. None if qkv_weight has x's dtype.
        out: receives q, k and v.
        residual_out: receives ``x + residual``; may be residual or x. Allowed only with a residual.

    Returns:
        q, k and v concatenated, x's dtype ``[tokens, (heads + 2 * kv_heads) * head_dim]``; with a residual also ``x + residual``,
        like residual.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        One query, key and value head of two elements; RoPE rotates the token at position 1 by 90 degrees.

        >>> import torch
        >>> from tokenspeed_kernel import rmsnorm_qkv_rope
        >>> cos_sin_cache = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> x, qkv_weight = torch.tensor([[1.0, -1.0]]), torch.eye(2).repeat(1, 3)
        >>> rmsnorm_qkv_rope(x, torch.ones(2), qkv_weight, torch.tensor([1]), cos_sin_cache, kv_heads=1, head_dim=2).round()
        tensor([[ 1.,  1.,  1.,  1.,  1., -1.]])

    Safe in CUDA graphs.
    """
    normed: Any
    total: Any
    if residual is None:
        normed, total = rmsnorm(x, norm_weight, eps), None
    else:
        normed, total = rmsnorm(x, norm_weight, eps, residual=residual, residual_out=residual_out)
    qkv = mm(normed, qkv_weight, b_scale=qkv_weight_scale, bias=bias, out=out)
    q, k, v = _heads(qkv, kv_heads, head_dim)
    written = None if k_cache is None else v
    apply_rope(q, k, positions, cos_sin_cache, interleaved, written, k_cache, v_cache, slot_mapping, q_out=q, k_out=k)
    return qkv if total is None else (qkv, total)


def _heads(qkv: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of q, k and v: ``[tokens, heads or kv_heads, head_dim]``."""
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    every = qkv.view(-1, heads + 2 * kv_heads, head_dim)
    return every[:, :heads], every[:, heads : heads + kv_heads], every[:, heads + kv_heads :]


@rmsnorm_qkv_rope.formats
def _(x: Tensor, qkv_weight: Tensor, k_cache: Tensor | None, qkv_weight_scale: Tensor | None) -> FormatSignature:
    found = recognise(Checker("rmsnorm_qkv_rope"), x, qkv_weight, None, qkv_weight_scale)
    roles = {"x": found.format_for("a"), "qkv_weight": found.format_for("b")}
    return format_signature(**roles, **({} if k_cache is None else {"k_cache": dense_tensor_format(k_cache.dtype)}))


@rmsnorm_qkv_rope.traits
def _(
    x: Tensor,
    cos_sin_cache: Tensor,
    kv_heads: int,
    head_dim: int,
    residual: Tensor | None,
    bias: Tensor | None,
    interleaved: bool,
    k_cache: Tensor | None,
) -> dict[str, object]:
    traits: dict[str, object] = {
        "tokens": bucket(x.shape[0]),
        "hidden": x.shape[1],
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": cos_sin_cache.shape[1],
        **residual_traits(x, residual),
        "bias": bias is not None,
        "interleaved": interleaved,
        "cache_write": k_cache is not None,
    }
    return traits if k_cache is None else {**traits, "page_size": k_cache.shape[1]}


@rmsnorm_qkv_rope.check
def _(
    check: Checker,
    x: Tensor,
    norm_weight: Tensor,
    qkv_weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_heads: int,
    head_dim: int,
    eps: float,
    residual: Tensor | None,
    bias: Tensor | None,
    qkv_weight_scale: Tensor | None,
    **arguments: Any,
) -> None:
    check.tensor("x", x, "tokens hidden", FLOATS)
    check.tensor("norm_weight", norm_weight, "hidden", FLOATS)
    _check_weight(check, x, qkv_weight, qkv_weight_scale)
    check.tensor("bias", bias, "qkv", x.dtype)
    check.require(eps > 0, "eps", "positive", eps)
    check_residual(check, residual, x)
    check.tensor("positions", positions, "tokens", INTS)
    check.require(kv_heads > 0, "kv_heads", "positive", kv_heads)
    check.require(head_dim > 0, "head_dim", "positive", head_dim)
    heads, rest = divmod(check["qkv"], head_dim)
    wanted = f"of (heads + 2 * kv_heads) * head_dim columns with kv_heads = {kv_heads}, head_dim = {head_dim} and heads > 0"
    check.require(rest == 0 and heads > 2 * kv_heads, "qkv_weight", wanted, str(list(qkv_weight.shape)))
    qkv = torch.empty(x.shape[0], check["qkv"], dtype=x.dtype, device="meta")
    q, k, v = _heads(qkv, kv_heads, head_dim)
    given = {"q": q, "k": k, "v": v if arguments["k_cache"] is not None else None, **_LEFT_OUT}
    apply_rope.operator.run_hook("check", {**arguments, **given, "positions": positions, "cos_sin_cache": cos_sin_cache}, check)


def _check_weight(check: Checker, x: Tensor, qkv_weight: Tensor, scale: Tensor | None) -> None:
    """Checks the weight and its scale, and binds ``qkv`` to the number of output columns."""
    if qkv_weight.dtype not in FP8 | {torch.uint8}:
        check.tensor("qkv_weight", qkv_weight, "hidden qkv", x.dtype)
        check.require(scale is None, "qkv_weight_scale", "None with a qkv_weight of x's dtype", scale)
        return
    check.dtype("x", x, HALVES)
    check.tensor("qkv_weight", qkv_weight, "rows qkv")
    check.require(scale is not None, "qkv_weight_scale", f"given with a qkv_weight of {dtype_name(qkv_weight.dtype)}", scale)
    # `mm` calls the operands a and b, as its errors do.
    weight = recognise(Checker("rmsnorm_qkv_rope, qkv_weight as b"), x, qkv_weight, None, scale).format_for("b")
    wanted = f"in one of the formats {', '.join(WEIGHT_FORMATS)}"
    check.require(weight.format in WEIGHT_FORMATS, "qkv_weight", wanted, weight.format)


@rmsnorm_qkv_rope.check_values(host=("positions", "slot_mapping"))
def _(check: Checker, **arguments: Any) -> None:
    apply_rope.operator.run_hook("check_values", {**arguments, **_LEFT_OUT}, check)


@rmsnorm_qkv_rope.fake
def _(x: Tensor, qkv_weight: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    qkv = x.new_empty(x.shape[0], qkv_weight.shape[1])
    return qkv if residual is None else (qkv, torch.empty_like(residual, memory_format=torch.contiguous_format))


@recipe
def _inputs(
    tokens: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    residual: bool = True,
    residual_dtype: torch.dtype | None = None,
    bias: bool = True,
    page_size: int | None = None,
    max_positions: int = 4096,
    weights: str = "dense",
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws heads and positions with the recipe of `apply_rope`'s cases. ``options`` are options of this recipe.

    ``weights``: dense; fp8 with a scale per ``channel`` or ``tensor``; or ``mxfp4``.
    """
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

    def weight(draw: Draw, columns: int) -> dict[str, Tensor]:
        if weights == "dense":
            return {"qkv_weight": draw.normal(columns, hidden, dtype=dtype, scale=hidden**-0.5).t()}
        if weights == "mxfp4":
            drawn = operands.micro(0, hidden, columns, a="dense", b="mxfp4")(draw)
        else:
            drawn = operands.fp8(0, hidden, columns, a_scale="", b_scale=weights, a_dtype=dtype)(draw)
        return {"qkv_weight": drawn["b"], "qkv_weight_scale": drawn["b_scale"]}

    def make(draw: Draw) -> dict[str, Any]:
        columns = (heads + 2 * kv_heads) * head_dim
        rotated = rotation(draw)
        kept = ("positions", "cos_sin_cache", "interleaved", "k_cache", "v_cache", "slot_mapping")
        return {
            "x": draw.normal(tokens, hidden, dtype=dtype),
            "norm_weight": 1 + draw.normal(hidden, scale=0.1, dtype=dtype),
            **weight(draw, columns),
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "residual": draw.normal(tokens, hidden, dtype=residual_dtype or dtype) if residual else None,
            "bias": draw.normal(columns, dtype=dtype, scale=0.5) if bias else None,
            **{name: rotated[name] for name in kept if name in rotated},
        }

    return make


@rmsnorm_qkv_rope.cases
def _() -> list[Case]:
    gpt_oss: tuple[int, int, int, int] = (2880, 64, 8, 64)
    fp8 = torch.float8_e4m3fn
    return [
        Case("odd hidden, float32", _inputs(3, 33, 2, 1, 8, torch.float32)),
        Case("with cache, no residual, float32", _inputs(2, 48, 4, 2, 32, torch.float32, residual=False, page_size=4)),
        Case("llama heads, narrow, no bias, with cache", _inputs(2, 200, 2, 2, 128, bias=False, page_size=4)),
        Case(
            "interleaved, partial, no bias, float16",
            _inputs(5, 64, 4, 2, 32, torch.float16, bias=False, interleaved=True, rotary_dim=16),
        ),
        Case("float32 residual", _inputs(2, 64, 4, 2, 64, residual_dtype=torch.float32)),
        Case("fp8 cache", _inputs(9, 96, 8, 2, 32, page_size=4, cache_dtype=fp8)),
        Case("gpt-oss-120b heads, narrow, decode 4 with cache", _inputs(4, 160, 16, 2, 64, page_size=16)),
        *(Case(f"gpt-oss-120b heads, narrow, decode {m} with cache", _inputs(m, 160, 8, 1, 64, page_size=16)) for m in (1, 2)),
        Case("llama heads, narrow, one token", _inputs(1, 200, 2, 2, 128, page_size=4)),
        Case("a row shorter than a cache line", _inputs(2, 16, 4, 2, 32)),
        Case("one token, heads of 32", _inputs(1, 64, 4, 2, 32)),
        Case("no tokens", _inputs(0, 64, 4, 2, 16)),
        Case("fp8 weight per channel, decode 2 with cache", _inputs(2, 160, 16, 2, 64, page_size=16, weights="channel")),
        Case("fp8 weight per tensor, float16", _inputs(3, 96, 4, 2, 32, torch.float16, weights="tensor")),
        Case("fp8 weight per channel, llama heads, no bias", _inputs(1, 208, 2, 2, 128, bias=False, weights="channel")),
        Case("mxfp4 weight", _inputs(2, 96, 4, 2, 64, page_size=4, weights="mxfp4")),
        Case("mxfp4 weight, llama heads, no bias", _inputs(1, 224, 2, 2, 128, bias=False, weights="mxfp4")),
        *(Case(f"gpt-oss-120b decode {m} with cache", _inputs(m, *gpt_oss, page_size=64), large=True) for m in (1, 4, 16, 64)),
        Case("gpt-oss-120b, fp8 weight, decode 1 with cache", _inputs(1, *gpt_oss, page_size=64, weights="channel"), large=True),
        Case("gpt-oss-120b prefill 4096 with cache", _inputs(4096, *gpt_oss, page_size=64), large=True),
    ]


@rmsnorm_qkv_rope.vary
def _(
    variation: Variation,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
) -> dict[str, Tensor]:
    if variation.want is not Want.CAPTURED:
        return unwritten(slot_mapping) if variation.want is Want.UNUSED and slot_mapping is not None else {}
    varied = apply_rope.operator.run_hook(
        "vary",
        {**dict.fromkeys(("v", "k_cache", "v_cache", "slot_mapping")), "positions": positions, "cos_sin_cache": cos_sin_cache},
        variation,
    )
    if k_cache is not None and v_cache is not None and slot_mapping is not None:
        varied = {**varied, **captured_slots(variation, slot_mapping, k_cache=k_cache, v_cache=v_cache)}
    return dict(varied)


@rmsnorm_qkv_rope.work
def _(slot_mapping: Tensor | None) -> dict[str, list[int]] | None:
    return None if slot_mapping is None else padding_of(slot_mapping)


@rmsnorm_qkv_rope.cost
def _(
    x: Tensor,
    norm_weight: Tensor,
    qkv_weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_heads: int,
    head_dim: int,
    residual: Tensor | None,
    bias: Tensor | None,
    k_cache: Tensor | None,
    slot_mapping: Tensor | None,
    qkv_weight_scale: Tensor | None,
) -> Cost:
    tokens, columns = x.shape[0], qkv_weight.shape[1]
    flops = 4.0 * x.numel() + 2.0 * x.numel() * columns + 3.0 * tokens * columns
    streams = 1 if residual is None else 3
    moved = streams * nbytes(x) + nbytes(norm_weight, qkv_weight, qkv_weight_scale, bias, positions, slot_mapping)
    moved += tokens * columns * x.element_size() + min(4 * tokens * cos_sin_cache.shape[1], nbytes(cos_sin_cache))
    if k_cache is not None:
        moved += 2 * tokens * kv_heads * head_dim * k_cache.element_size()
    return Cost(flops=flops, bytes=moved)

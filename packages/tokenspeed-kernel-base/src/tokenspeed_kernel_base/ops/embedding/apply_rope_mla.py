"""Rotary position embedding (RoPE) of multi-head latent attention, with the store in its paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, FP8, INTS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.embedding.apply_rope import angles_table, check_positions, rotate
from tokenspeed_kernel_base.ops.kvcache.slots import (
    captured_slots,
    check_latent_write,
    check_scale_values,
    check_slots,
    padding_of,
    store_latents,
    unwritten,
)
from tokenspeed_kernel_base.ops.quantization.encodings import encode_fp8
from tokenspeed_kernel_base.signature import dtype_name, dtype_names
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "embedding",
    "apply_rope_mla",
    formats=("q_latent", "kv_cache"),
    traits={
        "kv_lora_rank": int,
        "rope_dim": int,
        "page_size": int,
        "interleaved": bool,
        "scaled": bool,
        "out_dtype": dtype_names(FLOATS | FP8),
    },
    mutates=("kv_cache",),
    varying=("tokens",),
    capacity=("max_positions", "pages"),
    scales=("q_scale", "kv_scale"),
)
def apply_rope_mla(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rotates, concatenates and quantises MLA queries, and stores latents and rotated keys in the paged cache.

    The operator does the work between the projections of latent attention and `mla_decode_with_kvcache`:

    1. q_rope and k_rope are rotated as by `apply_rope`, and rounded to their dtype.
    2. Each query head becomes its absorbed part followed by its rotated part. With an 8-bit ``out_dtype`` both parts are divided by
       q_scale in float32 (float64 for float64 inputs), rounded to nearest even and saturated. Float64 quotients are first rounded
       to float32.
    3. The latent and the rotated k_rope are written to the cache, as by `store_mla_kv_cache` with kv_scale.

    Args:
        q_latent: float16, bfloat16, float32 or float64 ``[tokens, heads, kv_lora_rank]``, the queries with the key expansion
            absorbed. May be strided, for example as the result of a batched GEMM over heads.
        q_rope: q_latent's dtype ``[tokens, heads, rope_dim]``, not rotated; rope_dim is even and > 0. May be strided.
        latent: q_latent's dtype ``[tokens, kv_lora_rank]``, after the model's normalisation. May be a strided slice.
        k_rope: q_latent's dtype ``[tokens, rope_dim]``, not rotated.
        positions: int32 or int64 ``[tokens]``, 0 to ``max_positions - 1``, in any order. Positions in host memory are checked, also
            those of tokens that are not written.
        cos_sin_cache: float32 ``[max_positions, rope_dim]``. Row p holds the cosines of position p's ``rope_dim / 2`` angles, then
            their sines.
        kv_cache: ``[pages, page_size, kv_lora_rank + rope_dim]`` of q_latent's dtype or an 8-bit float. Written to. May be strided.
        slot_mapping: int32 or int64 ``[tokens]``: ``page * page_size + offset``; negative: the token is not written. Below
            ``pages * page_size``; slots that are not negative must be distinct. Both conditions are checked if slot_mapping lies in
            host memory.
        interleaved: which elements form a rotary pair. True: ``(2 * i, 2 * i + 1)``, as in DeepSeek's weights. False: ``(i, i +
            rope_dim / 2)``.
        q_scale: float32 ``[]`` or ``[1]``, finite, > 0; None means 1. Allowed only for an 8-bit ``out_dtype``.
        kv_scale: the scale of the cache, for latent and rotary part alike, like q_scale. Allowed only for an 8-bit cache.
        out_dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or q_latent's dtype; None means q_latent's dtype.
        out: receives the queries; must not overlap an input.

    Returns:
        The queries, ``out_dtype [tokens, heads, kv_lora_rank + rope_dim]``, contiguous. Pass them to `mla_decode_with_kvcache`
        with the same q_scale.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        One head, a latent of one element, and one rotary pair, which the table rotates by 90 degrees at position 1.

        >>> import torch
        >>> from tokenspeed_kernel import apply_rope_mla
        >>> cos_sin_cache = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> q_latent, q_rope = torch.tensor([[[9.0]]]), torch.tensor([[[3.0, 4.0]]])
        >>> latent, k_rope = torch.tensor([[5.0]]), torch.tensor([[1.0, 0.0]])
        >>> kv_cache, at = torch.zeros(1, 2, 3), torch.tensor([1])
        >>> apply_rope_mla(q_latent, q_rope, latent, k_rope, at, cos_sin_cache, kv_cache, slot_mapping=at)
        tensor([[[ 9., -4.,  3.]]])
        >>> kv_cache
        tensor([[[0., 0., 0.],
                 [5., 0., 1.]]])

    Safe in CUDA graphs.
    """
    cos, sin = cos_sin_cache[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    rotated_heads = rotate(k_rope.unsqueeze(1), cos, sin, interleaved).squeeze(1)
    store_latents(kv_cache, latent, rotated_heads, slot_mapping, kv_scale)
    q = torch.cat((q_latent, rotate(q_rope, cos, sin, interleaved)), dim=-1)
    if out_dtype is None or out_dtype == q.dtype:
        return q
    wide = q if q.dtype == torch.float64 else q.float()
    return encode_fp8(wide if q_scale is None else wide / q_scale.reshape(()), out_dtype)


@apply_rope_mla.traits
def _(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    interleaved: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out_dtype: torch.dtype | None,
) -> dict[str, object]:
    return {
        "kv_lora_rank": q_latent.shape[-1],
        "rope_dim": q_rope.shape[-1],
        "page_size": kv_cache.shape[1],
        "interleaved": interleaved,
        "scaled": q_scale is not None or kv_scale is not None,
        "out_dtype": dtype_name(out_dtype or q_latent.dtype),
    }


@apply_rope_mla.check
def _(
    check: Checker,
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    check.tensor("q_latent", q_latent, "tokens heads kv_lora_rank", FLOATS)
    check.tensor("q_rope", q_rope, "tokens heads rope_dim", q_latent.dtype)
    width = check["rope_dim"]
    check.require(width > 0 and width % 2 == 0, "q_rope", "of an even rope_dim, more than 0", str(list(q_rope.shape)))
    check.tensor("latent", latent, "tokens kv_lora_rank", q_latent.dtype)
    check.tensor("k_rope", k_rope, "tokens rope_dim", q_latent.dtype)
    check.tensor("positions", positions, "tokens", INTS)
    check.tensor("cos_sin_cache", cos_sin_cache, "max_positions rope_dim", torch.float32)
    check_latent_write(check, latent, kv_cache, slot_mapping, kv_scale)
    if out_dtype is not None:
        check.one_of("out_dtype", out_dtype, [q_latent.dtype, *sorted(FP8, key=str)])
    if q_scale is not None:
        quantised = out_dtype is not None and out_dtype != q_latent.dtype
        check.require(quantised, "q_scale", "None, because out_dtype is q_latent's dtype", q_scale)
        check.dtype("q_scale", q_scale, torch.float32)
        check.require(q_scale.shape in {(), (1,)}, "q_scale", "of shape [] or [1]", str(list(q_scale.shape)))


@apply_rope_mla.check_values(host=("positions", "slot_mapping", "q_scale", "kv_scale"))
def _(
    check: Checker,
    positions: Tensor | None,
    cos_sin_cache: Tensor,
    slot_mapping: Tensor | None,
    kv_cache: Tensor,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
) -> None:
    check_positions(check, positions, cos_sin_cache)
    check_slots(check, slot_mapping, kv_cache)
    check_scale_values(check, q_scale=q_scale, kv_scale=kv_scale)


@apply_rope_mla.fake
def _(q_latent: Tensor, q_rope: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    tokens, heads, kv_lora_rank = q_latent.shape
    return q_latent.new_empty(tokens, heads, kv_lora_rank + q_rope.shape[2], dtype=out_dtype or q_latent.dtype)


@recipe
def _inputs(
    tokens: int,
    heads: int,
    kv_lora_rank: int,
    rope_dim: int,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    scaled: bool = False,
    max_positions: int = 4096,
    padding: bool = True,
    fused: bool = True,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws tokens at random positions. With ``padding``, every fifth token has a negative slot. With ``fused``, tensors are
    strided, as after fused projections."""

    def make(draw: Draw) -> dict[str, Any]:
        pages = tokens // page_size + 2
        slots = draw.permutation(pages * page_size)[:tokens].clone()
        if padding:
            slots[4::5] = -1
        nope = 32  # columns of a query head before its rotary part
        latents = draw.normal(tokens, kv_lora_rank + rope_dim, dtype=dtype)
        arguments = {
            "q_latent": draw.normal(heads, tokens, kv_lora_rank, dtype=dtype).transpose(0, 1),
            "q_rope": draw.normal(tokens, heads, nope + rope_dim, dtype=dtype)[..., nope:],
            "latent": latents[:, :kv_lora_rank],
            "k_rope": latents[:, kv_lora_rank:],
            "positions": draw.integers(0, max_positions, tokens),
            "cos_sin_cache": angles_table(draw, max_positions, rope_dim, base=10000.0, factor=1.2),
        }
        if not fused:
            arguments = {name: x.clone(memory_format=torch.contiguous_format) for name, x in arguments.items()}
        arguments |= {
            "kv_cache": draw.normal(pages, page_size, kv_lora_rank + rope_dim, dtype=cache_dtype or dtype),
            "slot_mapping": slots,
            **options,
        }
        if scaled:
            if "out_dtype" in options:
                arguments["q_scale"] = draw.uniform(low=0.001, high=0.01)  # scales this small make some values saturate
            if cache_dtype is not None:
                arguments["kv_scale"] = draw.uniform(low=0.001, high=0.01)
        return arguments

    return make


@apply_rope_mla.cases
def _() -> list[Case]:
    fp8 = torch.float8_e4m3fn
    deepseek_v3: tuple[int, int, int] = (128, 512, 64)
    quantised: dict[str, Any] = {"cache_dtype": fp8, "scaled": True, "out_dtype": fp8, "interleaved": True}
    large: dict[str, Any] = {"padding": False, "interleaved": True, "max_positions": 163840}
    return [
        Case("one token, one head, one pair, float32", _inputs(1, 1, 4, 2, 2, torch.float32)),
        Case("interleaved, float32", _inputs(6, 3, 16, 8, 4, torch.float32, interleaved=True)),
        Case("float64", _inputs(6, 2, 16, 4, 4, torch.float64)),
        Case("odd widths, float16", _inputs(7, 5, 57, 6, 3, torch.float16)),
        Case("deepseek-v3, 16 of its heads, decode 7", _inputs(7, 16, 512, 64, interleaved=True)),
        Case("fp8 q and cache, no scales", _inputs(6, 3, 32, 16, 4, cache_dtype=fp8, out_dtype=fp8)),
        Case("fp8 q and cache, a scale each, float32", _inputs(6, 3, 40, 16, 4, torch.float32, **quantised)),
        Case("deepseek-v3, 16 of its heads, decode 7, fp8 q and cache", _inputs(7, 16, 512, 64, **quantised)),
        Case("bfloat16 q, fp8 cache", _inputs(6, 3, 32, 16, 4, cache_dtype=fp8, scaled=True)),
        Case("e5m2 q, float16 cache", _inputs(6, 3, 32, 16, 4, torch.float16, out_dtype=torch.float8_e5m2, scaled=True)),
        Case("no tokens", _inputs(0, 3, 16, 8, fused=False)),
        Case("not fused", _inputs(4, 3, 16, 8, fused=False)),
        Case("deepseek-v3 decode 64", _inputs(64, *deepseek_v3, **large), large=True),
        Case("deepseek-v3, 16 of its heads, decode 128", _inputs(128, 16, 512, 64, **large), large=True),
        Case("deepseek-v3 decode 256", _inputs(256, *deepseek_v3, **large), large=True),
        Case("deepseek-v3 decode 256, fp8 q and cache", _inputs(256, *deepseek_v3, **{**large, **quantised}), large=True),
        Case("deepseek-v3 extend 2048", _inputs(2048, *deepseek_v3, **large), large=True),
        Case("deepseek-v3 extend 2048, fp8 q and cache", _inputs(2048, *deepseek_v3, **{**large, **quantised}), large=True),
    ]


@apply_rope_mla.vary
def _(
    variation: Variation,
    latent: Tensor,
    k_rope: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> dict[str, Tensor]:
    if variation.want is Want.UNUSED:
        return unwritten(slot_mapping, latent=latent, k_rope=k_rope)
    if variation.want is not Want.CAPTURED:
        return {}
    table = angles_table(variation.draw, *cos_sin_cache.shape)
    drawn = variation.draw.integers(0, len(table), *positions.shape, dtype=positions.dtype)
    return {"positions": drawn, "cos_sin_cache": table, **captured_slots(variation, slot_mapping, kv_cache=kv_cache)}


@apply_rope_mla.work
def _(slot_mapping: Tensor) -> dict[str, list[int]]:
    return padding_of(slot_mapping)


@apply_rope_mla.cost
def _(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Cost:
    tokens, heads, rope_dim = q_rope.shape
    # Four multiplications and two additions for each pair. At most one row of cos_sin_cache is read for each token.
    flops = 3.0 * tokens * (heads + 1) * rope_dim
    read = nbytes(q_latent, q_rope, latent, k_rope, positions, slot_mapping, q_scale, kv_scale)
    read += min(4 * tokens * rope_dim, nbytes(cos_sin_cache))
    written = (q_latent.numel() + q_rope.numel()) * (out_dtype or q_latent.dtype).itemsize
    written += (latent.numel() + k_rope.numel()) * kv_cache.element_size()
    return Cost(flops=flops, bytes=read + written)

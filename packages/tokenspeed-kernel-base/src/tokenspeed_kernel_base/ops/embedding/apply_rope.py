"""Rotary position embedding (RoPE), with an optional store of keys and values in the paged cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, INTS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.kvcache.slots import (
    captured_slots,
    check_scale_values,
    check_slots,
    check_write,
    padding_of,
    store_slots,
    unwritten,
)
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "embedding",
    "apply_rope",
    formats=("q", "k", "k_cache"),
    traits={
        "head_dim": int,
        "rotary_dim": int,
        "interleaved": bool,
        "mrope": bool,
        "cache_write": bool,
        "scaled": bool,
        "per_head_scale": bool,
        "v_head_dim": int,
        "page_size": int,
    },
    outs=("q_out", "k_out"),
    mutates=("k_cache", "v_cache"),
    in_place={"q_out": ("q",), "k_out": ("k",)},
    varying=("tokens",),
    capacity=("max_positions", "pages"),
    scales=("k_scale", "v_scale"),
)
def apply_rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    interleaved: bool = False,
    v: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    mrope_section: tuple[int, ...] | None = None,
    mrope_interleaved: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotates q and k (rotary position embedding, RoPE), and can also store k and v in the paged KV cache.

    The first ``rotary_dim`` elements of a head form pairs ``(a, b)``. Each pair becomes ``(a * cos - b * sin, b * cos + a * sin)``.
    The remaining elements are copied (Su et al., 2021, arXiv:2104.09864). Pair i has elements ``(i, i + rotary_dim / 2)``, as in
    GPT-NeoX and most published weights. With ``interleaved``, pair i has elements ``(2 * i, 2 * i + 1)``, as in GPT-J. Arithmetic
    is float32 (float64 for float64 inputs), rounded to q's dtype once.

    The caller supplies cosines and sines, so any rule for the angles is possible. ``cos^2 + sin^2 = 1`` is not required. The caller
    multiplies an attention factor, as in YaRN (Peng et al., 2023, arXiv:2309.00071), into the cosines and sines. The logits are
    then scaled by the square of this factor.

    With ``mrope_section`` a token has three positions, in time, height and width, as in Qwen's vision-language models (Wang et al.,
    2024, arXiv:2409.12191). Each pair uses the angle of one of these positions. The first ``mrope_section[0]`` pairs use time, the
    next ``mrope_section[1]`` pairs height, and the remaining pairs width (Qwen2.5-VL). With ``mrope_interleaved``, time, height and
    width alternate from pair to pair. Once height or width has the number of pairs in its section, its further pairs use time
    (Qwen3-VL). For other rules, such as four sections, give every token its own row in cos_sin_cache: see "Rotary positions of any
    kind" on the page "Calling operators".

    With ``v``, ``k_cache``, ``v_cache`` and ``slot_mapping``, k and v are also written to the cache, exactly as by `store_kv_cache`
    with the same scales. The k in the cache is rotated and rounded like the returned k.

    Args:
        q: float16, bfloat16, float32 or float64 ``[tokens, heads, head_dim]``. May be a strided slice of a fused qkv.
        k: q's dtype ``[tokens, kv_heads, head_dim]``. May be strided. With ``k=q[:, :0]``, a view without heads, only q is
            rotated.
        positions: int32 or int64 ``[tokens]``, with mrope_section ``[3, tokens]``; 0 to ``max_positions - 1``, in any order.
            Positions in host memory are checked, also those of tokens that are not written.
        cos_sin_cache: float32 ``[max_positions, rotary_dim]``; rotary_dim even, at most head_dim. Row p holds the cosines of
            position p's ``rotary_dim / 2`` angles, then their sines.
        interleaved: which elements form a pair, see above.
        v: q's dtype ``[tokens, kv_heads, v_head_dim]``. v, k_cache, v_cache and slot_mapping are given together or not at all.
        k_cache: ``[pages, page_size, kv_heads, head_dim]`` of q's dtype or an 8-bit float. Written to. May be strided: a cache
            ``[pages, kv_heads, page_size, head_dim]`` (HND) is passed as ``k_cache.transpose(1, 2)``.
        v_cache: k_cache's dtype ``[pages, page_size, kv_heads, v_head_dim]``. Written to.
        slot_mapping: int32 or int64 ``[tokens]``: ``page * page_size + offset``; negative: the token is not written. Below
            ``pages * page_size``; slots that are not negative must be distinct. Both conditions are checked if slot_mapping lies in
            host memory.
        k_scale: float32 ``[]``, ``[1]`` or ``[kv_heads]``, finite, > 0; None means 1. Allowed only if k is written to an 8-bit
            cache.
        v_scale: the scale of v, like k_scale.
        mrope_section: how many pairs use time, height and width, ``rotary_dim / 2`` in total; None: a token has one position.
        mrope_interleaved: whether time, height and width alternate from pair to pair, see above. Allowed only with mrope_section.
        q_out: receives the rotated q; may be q.
        k_out: receives the rotated k; may be k.

    Returns:
        ``(q, k)`` rotated, in the shapes and dtype of the inputs, contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import apply_rope
        >>> cos_sin_cache = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # one pair in a head: 0 degrees at position 0, 90 at 1
        >>> q = torch.tensor([[[3.0, 4.0]], [[3.0, 4.0]]])
        >>> k = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
        >>> rotated, _ = apply_rope(q, k, torch.tensor([0, 1]), cos_sin_cache)
        >>> rotated
        tensor([[[ 3.,  4.]],
        <BLANKLINE>
                [[-4.,  3.]]])

    Safe in CUDA graphs.
    """
    cos, sin = angles_at(positions, cos_sin_cache, mrope_section, mrope_interleaved)
    rotated_q, rotated_k = rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)
    if v is not None and k_cache is not None and v_cache is not None and slot_mapping is not None:
        store_slots(k_cache, rotated_k, slot_mapping, k_scale)
        store_slots(v_cache, v, slot_mapping, v_scale)
    return rotated_q, rotated_k


def angles_at(
    positions: Tensor, cos_sin_cache: Tensor, mrope_section: tuple[int, ...] | None = None, mrope_interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of every token's angles, ``[tokens, 1, rotary_dim / 2]`` each."""
    rows = cos_sin_cache[positions.long()]
    if mrope_section is not None:
        _, height, width = mrope_section
        pair = torch.arange(rows.shape[-1] // 2, device=rows.device)
        if mrope_interleaved:
            stream = torch.where(pair < 3 * torch.where(pair % 3 == 1, height, width), pair % 3, 0)
        else:
            stream = (pair >= len(pair) - height - width).long() + (pair >= len(pair) - width)
        rows = rows.gather(0, torch.cat((stream, stream)).expand(1, *rows.shape[1:])).squeeze(0)
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates heads ``[tokens, heads, head_dim]`` by the angles of their tokens, ``[tokens, 1, rotary_dim / 2]``."""
    rotary_dim = 2 * cos.shape[-1]
    head = x[..., :rotary_dim]
    wide = head.double() if x.dtype == torch.float64 else head.float()
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    rotated_heads = torch.stack((a, b), dim=-1).flatten(-2) if interleaved else torch.cat((a, b), dim=-1)
    return torch.cat((rotated_heads.to(x.dtype), x[..., rotary_dim:]), dim=-1)


@apply_rope.traits
def _(
    q: Tensor,
    cos_sin_cache: Tensor,
    interleaved: bool,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    mrope_section: tuple[int, ...] | None,
) -> dict[str, object]:
    scales = [scale for scale in (k_scale, v_scale) if scale is not None]
    traits: dict[str, object] = {
        "head_dim": q.shape[-1],
        "rotary_dim": cos_sin_cache.shape[-1],
        "interleaved": interleaved,
        "mrope": mrope_section is not None,
        "cache_write": k_cache is not None,
        "scaled": bool(scales),
        "per_head_scale": any(scale.numel() != 1 for scale in scales),
    }
    if k_cache is None or v_cache is None:
        return traits
    return {**traits, "v_head_dim": v_cache.shape[-1], "page_size": k_cache.shape[1]}


@apply_rope.check
def _(
    check: Checker,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    mrope_section: tuple[int, ...] | None,
    mrope_interleaved: bool,
) -> None:
    check.tensor("q", q, "tokens heads head_dim", FLOATS)
    check.tensor("k", k, "tokens kv_heads head_dim", q.dtype)
    check_angles(check, positions, cos_sin_cache, mrope_section, mrope_interleaved)
    if v is not None and k_cache is not None and v_cache is not None and slot_mapping is not None:
        check_write(check, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        return
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check.require(scale is None, name, "None, because there is no cache to write to", scale)
    together = {"v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    given = [name for name, tensor in together.items() if tensor is not None]
    if given:
        missing = next(name for name, tensor in together.items() if tensor is None)
        check.fail(missing, f"given with {', '.join(given)}: {', '.join(together)} are given together or not at all", None)


@apply_rope.check_values(host=("positions", "slot_mapping", "k_scale", "v_scale"))
def _(
    check: Checker,
    positions: Tensor | None,
    cos_sin_cache: Tensor,
    slot_mapping: Tensor | None,
    k_cache: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check_positions(check, positions, cos_sin_cache)
    check_slots(check, slot_mapping, k_cache)
    check_scale_values(check, k_scale=k_scale, v_scale=v_scale)


def check_angles(
    check: Checker, positions: Tensor, cos_sin_cache: Tensor, mrope_section: tuple[int, ...] | None, mrope_interleaved: bool
) -> None:
    """Checks shapes and dtypes of positions and cos_sin_cache. Call this function when the sizes of q are bound."""
    if mrope_section is not None:
        said = "three numbers, of time, height and width; for other sections give each token a row of cos_sin_cache"
        check.require(len(mrope_section) == 3, "mrope_section", said, str(mrope_section))
    check.tensor("positions", positions, "tokens" if mrope_section is None else "3 tokens", INTS)
    check.tensor("cos_sin_cache", cos_sin_cache, "max_positions rotary_dim", torch.float32)
    rotary_dim, head_dim = check["rotary_dim"], check["head_dim"]
    check.require(
        0 < rotary_dim <= head_dim and rotary_dim % 2 == 0,
        "cos_sin_cache",
        f"of an even rotary_dim, at most head_dim = {head_dim} of q",
        str(list(cos_sin_cache.shape)),
    )
    if mrope_section is None:
        check.require(not mrope_interleaved, "mrope_interleaved", "False, because there is no mrope_section", mrope_interleaved)
        return
    pairs, whole = rotary_dim // 2, min(mrope_section) >= 0 and 2 * sum(mrope_section) == rotary_dim
    check.require(whole, "mrope_section", f"three numbers from 0 on that add up to rotary_dim / 2 = {pairs}", str(mrope_section))
    if mrope_interleaved:
        most = [(pairs - offset + 2) // 3 for offset in (1, 2)]  # the most pairs of height and of width when they alternate
        fits = all(count <= limit for count, limit in zip(mrope_section[1:], most, strict=True))
        said = f"of at most {most[0]} and {most[1]} pairs of height and width: each gets every third of {pairs} interleaved pairs"
        check.require(fits, "mrope_section", said, str(mrope_section))


def check_positions(check: Checker, positions: Tensor | None, cos_sin_cache: Tensor) -> None:
    """Checks positions in host memory: each must be the index of a row of cos_sin_cache."""
    if positions is not None and positions.numel():
        end = cos_sin_cache.shape[0]
        for position, token in ((positions.min(), positions.argmin()), (positions.max(), positions.argmax())):
            if not 0 <= position < end:
                at = int(token) % positions.shape[-1]
                check.fail("positions", f"in 0 to {end - 1}, the rows of cos_sin_cache", f"{int(position)} for token {at}")


@apply_rope.fake
def _(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(k, memory_format=torch.contiguous_format)


def angles_table(draw: Draw, positions: int, rotary_dim: int, base: float = 150000.0, factor: float = 1.0) -> Tensor:
    """Returns a ``cos_sin_cache`` with GPT-OSS's angles; ``factor``, an attention factor, multiplies cosines and sines."""
    exponents = torch.arange(0, rotary_dim, 2, device=draw.device, dtype=torch.float64) / rotary_dim
    angles = torch.arange(positions, device=draw.device, dtype=torch.float64).unsqueeze(1) * base**-exponents
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).float()


@recipe
def _inputs(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    rotary_dim: int | None = None,
    max_positions: int = 4096,
    page_size: int | None = None,
    cache_dtype: torch.dtype | None = None,
    v_head_dim: int | None = None,
    scale_shape: tuple[int, ...] | None = None,
    fused: bool = True,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws tokens at random positions. With ``page_size``, also draws a cache, and every fifth token gets a negative slot.

    With ``fused``, q, k and v are slices of one tensor, as after a fused projection.
    """

    def make(draw: Draw) -> dict[str, Any]:
        v_width = v_head_dim or head_dim
        sizes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, v_width))
        qkv = draw.normal(tokens, sum(count * width for count, width in sizes), dtype=dtype)
        ends = list(itertools.accumulate(count * width for count, width in sizes))
        slices = [qkv[:, end - n * width : end].view(tokens, n, width) for (n, width), end in zip(sizes, ends, strict=True)]
        q, k, v = slices if fused else (x.clone(memory_format=torch.contiguous_format) for x in slices)
        arguments = {
            "q": q,
            "k": k,
            "positions": draw.integers(0, max_positions, *([3] if "mrope_section" in options else []), tokens),
            "cos_sin_cache": angles_table(draw, max_positions, rotary_dim or head_dim, factor=1.35),
            **options,
        }
        if page_size is not None:
            pages = tokens // page_size + 2
            slots = draw.permutation(pages * page_size)[:tokens].clone()
            slots[4::5] = -1
            cache = (pages, page_size, kv_heads)
            arguments["v"] = v
            arguments["k_cache"] = draw.normal(*cache, head_dim, dtype=cache_dtype or dtype)
            arguments["v_cache"] = draw.normal(*cache, v_width, dtype=cache_dtype or dtype)
            arguments["slot_mapping"] = slots
            if scale_shape is not None:
                arguments["k_scale"] = draw.uniform(*scale_shape, low=0.001, high=0.1)  # small scales: some values saturate
                arguments["v_scale"] = draw.uniform(*scale_shape, low=0.01, high=2.0)
        return arguments

    return make


@recipe
def _int32(make: Callable[[Draw], dict[str, Any]]) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {n: x.int() if n == "positions" else x for n, x in make(draw).items()}


@apply_rope.cases
def _() -> list[Case]:
    gpt_oss: tuple[int, int, int] = (64, 8, 64)
    fp8 = torch.float8_e4m3fn
    return [
        Case("one token, one pair, float32", _inputs(1, 1, 1, 2, torch.float32)),
        Case("gpt-oss-120b decode 16", _inputs(16, *gpt_oss)),
        Case("gpt-oss-120b decode 16, not fused, int32 positions", _int32(_inputs(16, *gpt_oss, fused=False))),
        Case("gpt-oss-120b decode 16 with cache", _inputs(16, *gpt_oss, page_size=16)),
        Case("interleaved, float16", _inputs(7, 6, 2, 128, torch.float16, interleaved=True)),
        Case("interleaved with cache, partial 64 of 192", _inputs(5, 4, 1, 192, rotary_dim=64, interleaved=True, page_size=4)),
        Case("partial 32 of 57, float32", _inputs(3, 5, 2, 57, torch.float32, rotary_dim=32)),
        Case("fp8 cache", _inputs(9, 8, 2, 64, page_size=4, cache_dtype=fp8)),
        Case("fp8 cache, one scale", _inputs(9, 8, 2, 64, page_size=4, cache_dtype=fp8, scale_shape=())),
        Case(
            "fp8 cache, one scale a head, interleaved, float32",
            _inputs(6, 4, 2, 40, torch.float32, 24, page_size=4, cache_dtype=fp8, scale_shape=(2,), interleaved=True),
        ),
        Case("values narrower than keys", _inputs(9, 8, 4, 192, rotary_dim=64, page_size=4, v_head_dim=128)),
        Case(
            "values wider than keys, fp8 cache, one scale a head, float16",
            _inputs(7, 4, 2, 40, torch.float16, page_size=4, cache_dtype=fp8, v_head_dim=100, scale_shape=(2,)),
        ),
        Case("qwen2.5-vl sections", _inputs(5, 7, 1, 128, mrope_section=(16, 24, 24))),
        Case(
            "qwen3-vl sections, fp8 cache, float16",
            _inputs(6, 8, 2, 128, torch.float16, page_size=4, cache_dtype=fp8, mrope_section=(24, 20, 20), mrope_interleaved=True),
        ),
        Case(
            "glm-4.5v sections, partial 64 of 128, interleaved, float32",
            _inputs(3, 3, 1, 128, torch.float32, 64, interleaved=True, mrope_section=(8, 12, 12)),
        ),
        Case("q alone", _inputs(5, 4, 0, 64)),
        Case("no tokens", _inputs(0, *gpt_oss, fused=False)),
        Case("no tokens, with cache", _inputs(0, *gpt_oss, page_size=16, fused=False)),
        Case("gpt-oss-120b decode 64 with cache", _inputs(64, *gpt_oss, max_positions=131072, page_size=64), large=True),
        Case("gpt-oss-120b prefill 16384", _inputs(16384, *gpt_oss, max_positions=131072), large=True),
        Case("gpt-oss-120b prefill 16384 with cache", _inputs(16384, *gpt_oss, max_positions=131072, page_size=16), large=True),
        Case(
            "gpt-oss-120b prefill 16384 with fp8 cache",
            _inputs(16384, *gpt_oss, max_positions=131072, page_size=16, cache_dtype=fp8, scale_shape=()),
            large=True,
        ),
        Case("llama-70b decode 256 with cache", _inputs(256, 64, 8, 128, max_positions=131072, page_size=16), large=True),
    ]


@apply_rope.vary
def _(
    variation: Variation,
    positions: Tensor,
    cos_sin_cache: Tensor,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
) -> dict[str, Tensor]:
    given: dict[str, Tensor] = {}
    if v is not None and k_cache is not None and v_cache is not None and slot_mapping is not None:
        if variation.want is Want.UNUSED:
            return unwritten(slot_mapping, v=v)
        if variation.want is Want.CAPTURED:
            given = captured_slots(variation, slot_mapping, k_cache=k_cache, v_cache=v_cache)
    if variation.want is not Want.CAPTURED:
        return {}
    table = angles_table(variation.draw, *cos_sin_cache.shape)
    drawn = variation.draw.integers(0, len(table), *positions.shape, dtype=positions.dtype)
    return {"positions": drawn, "cos_sin_cache": table, **given}


@apply_rope.work
def _(slot_mapping: Tensor | None) -> dict[str, list[int]] | None:
    return None if slot_mapping is None else padding_of(slot_mapping)


@apply_rope.cost
def _(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    v: Tensor | None,
    k_cache: Tensor | None,
    slot_mapping: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Cost:
    tokens, rotary_dim = q.shape[0], cos_sin_cache.shape[-1]
    # Four multiplications and two additions for each pair. At most one row of cos_sin_cache is read for each token.
    flops = 3.0 * tokens * (q.shape[1] + k.shape[1]) * rotary_dim
    moved = 2 * nbytes(q, k) + nbytes(positions) + min(4 * tokens * rotary_dim, nbytes(cos_sin_cache))
    if k_cache is not None and v is not None:
        moved += nbytes(v, slot_mapping, k_scale, v_scale) + (k.numel() + v.numel()) * k_cache.element_size()
    return Cost(flops=flops, bytes=moved)

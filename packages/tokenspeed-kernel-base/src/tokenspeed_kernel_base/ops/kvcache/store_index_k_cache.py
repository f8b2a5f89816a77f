"""Stores index keys of sparse attention in a paged cache, in fp8 with a scale for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.kvcache.slots import captured_slots, check_slots, padding_of, store_slots, unwritten
from tokenspeed_kernel_base.ops.quantization.encodings import FP8_MAX, SMALLEST_NORMAL, SOURCE_DTYPES, divide, encode_fp8
from tokenspeed_kernel_base.variation import Variation, Want

E4M3 = torch.float8_e4m3fn
SCALE_FORMATS = ("float32", "e8m0")


@operator(
    "kvcache",
    "store_index_k_cache",
    formats=("k", "k_cache"),
    traits={"head_dim": int, "page_size": int, "scale_format": SCALE_FORMATS},
    mutates=("k_cache", "k_scale_cache"),
    exact=True,
    varying=("tokens",),
    capacity=("pages",),
)
def store_index_k_cache(
    k: Tensor, k_cache: Tensor, k_scale_cache: Tensor, slot_mapping: Tensor, scale_format: str = "float32"
) -> None:
    """Quantises each token's index key to float8_e4m3fn with one scale, and writes both to the token's cache slot in place.

    `dsa_indexer_scores_with_kvcache` reads this cache. Token t goes to ``k_cache[slot // page_size, slot % page_size]`` with ``slot
    = slot_mapping[t]``, and its scale to the same index of k_scale_cache. A token with a negative slot, for example the padding of
    a CUDA graph, is not written. Everything else in both caches is unchanged. The result is bitwise that of `quantize_fp8` for each
    token. All operations are in float32 and correctly rounded::

        scale = max(amax / 448, 2^-126)   # amax: the largest magnitude of the token; in format e8m0 rounded up to a power of two
        key   = e4m3(k / scale)           # to nearest, ties to even, saturating

    For a bfloat16 cache of index keys, use `store_mla_kv_cache` without a rotary part (rope_dim 0).

    Args:
        k: float16, bfloat16 or float32 ``[tokens, head_dim]``, after the model's rotation (RoPE). May be strided.
        k_cache: float8_e4m3fn ``[pages, page_size, head_dim]``. Written to. May be strided, for example a view of pages in which
            the scales follow the keys. Must not overlap k.
        k_scale_cache: float32 ``[pages, page_size]``. Written to. May be strided.
        slot_mapping: int32 or int64 ``[tokens]``, each less than ``pages * page_size``. Slots that are not negative must be
            distinct: if two tokens have the same slot, either may remain. Both conditions are checked if slot_mapping lies in host
            memory.
        scale_format: ``"float32"``, or ``"e8m0"`` for power-of-two scales, as in DeepSeek-V3.2. Scales of both formats are stored
            as float32.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is written.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import store_index_k_cache
        >>> k_cache, scales = torch.zeros(2, 2, 2, dtype=torch.float8_e4m3fn), torch.zeros(2, 2)
        >>> store_index_k_cache(torch.tensor([[896.0, -2.0], [5.0, 5.0]]), k_cache, scales, torch.tensor([2, -1]))
        >>> k_cache.float().view(4, 2), scales
        (tensor([[  0.,   0.],
                [  0.,   0.],
                [448.,  -1.],
                [  0.,   0.]]), tensor([[0., 0.],
                [2., 0.]]))

    Safe in CUDA graphs.
    """
    wide = k.float()
    amax = wide.abs().amax(-1, keepdim=True)
    scale = divide(amax, FP8_MAX[E4M3]).clamp(min=SMALLEST_NORMAL)
    if scale_format == "e8m0":
        scale = _rounded_up(scale)
    store_slots(k_cache.unsqueeze(2), encode_fp8(wide / scale, E4M3).unsqueeze(1), slot_mapping)
    store_slots(k_scale_cache.view(*k_scale_cache.shape, 1, 1), scale.unsqueeze(1), slot_mapping)


def _rounded_up(scale: Tensor) -> Tensor:
    """Returns the smallest power of two that is at least the scale. Scales must be normal numbers; infinities and NaN are
    unchanged, and scales above 2^127 become infinity."""
    bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isnan(), scale, bits.view(torch.float32))


@store_index_k_cache.traits
def _(k: Tensor, k_cache: Tensor, scale_format: str) -> dict[str, object]:
    return {"head_dim": k.shape[1], "page_size": k_cache.shape[1], "scale_format": scale_format}


@store_index_k_cache.check
def _(check: Checker, k: Tensor, k_cache: Tensor, k_scale_cache: Tensor, slot_mapping: Tensor, scale_format: str) -> None:
    check.tensor("k", k, "tokens head_dim", SOURCE_DTYPES)
    check.require(check["head_dim"] > 0, "k", "of a head_dim > 0", str(list(k.shape)))
    check.tensor("k_cache", k_cache, "pages page_size head_dim", E4M3)
    check.require(check["page_size"] > 0, "k_cache", "of a page_size > 0", str(list(k_cache.shape)))
    check.tensor("k_scale_cache", k_scale_cache, "pages page_size", torch.float32)
    check.tensor("slot_mapping", slot_mapping, "tokens", {torch.int32, torch.int64})
    check.one_of("scale_format", scale_format, SCALE_FORMATS)


@store_index_k_cache.check_values(host=("slot_mapping",))
def _(check: Checker, slot_mapping: Tensor | None, k_cache: Tensor) -> None:
    check_slots(check, slot_mapping, k_cache)


@store_index_k_cache.fake
def _() -> None:
    return None


@recipe
def _inputs(
    tokens: int,
    pages: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    scale_format: str = "float32",
    padding: int = 0,
    slot_dtype: torch.dtype = torch.int64,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws tokens of very different magnitudes at distinct random slots of a filled cache. The last ``padding`` tokens are not
    written."""

    def make(draw: Draw) -> dict[str, Any]:
        slots = draw.permutation(pages * page_size, slot_dtype)[:tokens].clone()
        slots[tokens - padding :] = -1
        sizes = draw.normal(tokens, 1, scale=3.0).exp()
        return {
            "k": (draw.normal(tokens, head_dim) * sizes).to(dtype),
            "k_cache": draw.normal(pages, page_size, head_dim, dtype=E4M3),
            "k_scale_cache": draw.normal(pages, page_size),
            "slot_mapping": slots,
            "scale_format": scale_format,
        }

    return make


def _extremes(draw: Draw) -> dict[str, Any]:
    inf, nan = torch.inf, torch.nan
    rows = [[nan, 1.0, 0.0], [inf, 1.0, -inf], [0.0, -0.0, 0.0], [3.4e38, -3e38, 1.0], [1e-45, -1e-40, 0.0], [448.0, 449.0, 7.0]]
    return {
        "k": draw.tensor(rows, torch.float32),
        "k_cache": draw.normal(2, 4, 3, dtype=E4M3),
        "k_scale_cache": draw.normal(2, 4),
        "slot_mapping": draw.tensor([7, 0, 2, 3, 5, 6], torch.int64),
        "scale_format": "e8m0",
    }


@store_index_k_cache.cases
def _() -> list[Case]:
    deepseek: tuple[int, int] = (64, 128)
    return [
        Case("one token, float32", _inputs(1, 2, 4, 8, torch.float32)),
        Case("deepseek-v3.2 decode 16, padded by 5", _inputs(16, 3, *deepseek, padding=5)),
        Case("deepseek-v3.2 decode 9, scales in e8m0", _inputs(9, 2, *deepseek, scale_format="e8m0")),
        Case("page size 1, int32 slots, odd width 57, float16", _inputs(9, 12, 1, 57, torch.float16, slot_dtype=torch.int32)),
        Case("NaN, infinities, zeros, tiny and huge keys, e8m0", _extremes),
        Case("every token is padding", _inputs(4, 2, 4, 16, padding=4)),
        Case("no tokens", _inputs(0, 2, 4, 16)),
        Case("deepseek-v3.2 decode 128", _inputs(128, 2048, *deepseek), large=True),
        Case("deepseek-v3.2 prefill 16384, scales in e8m0", _inputs(16384, 2048, *deepseek, scale_format="e8m0"), large=True),
    ]


@store_index_k_cache.vary
def _(variation: Variation, k: Tensor, k_cache: Tensor, k_scale_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    if variation.want is Want.CAPTURED:
        return captured_slots(variation, slot_mapping, k_cache=k_cache, k_scale_cache=k_scale_cache)
    return unwritten(slot_mapping, k=k) if variation.want is Want.UNUSED else {}


@store_index_k_cache.work
def _(slot_mapping: Tensor) -> dict[str, list[int]]:
    return padding_of(slot_mapping)


@store_index_k_cache.cost
def _(k: Tensor, slot_mapping: Tensor) -> Cost:
    return Cost(flops=3.0 * k.numel(), bytes=float(nbytes(k, slot_mapping) + k.numel() + 4 * len(k)))

"""A paged cache of e4m3 latents with a float32 scale for each 128 elements, and unquantised rotary parts.

The format is DeepSeek-V3.2's cache format, with 656 bytes for each token. The module holds the code that operators on such caches
share. `mla_cache_views` views pages of bytes as the three tensors of a cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.ops.quantization.encodings import FP8_MAX, SMALLEST_NORMAL, divide, encode_fp8

E4M3 = torch.float8_e4m3fn
GROUP = 128
"""Elements of a latent that share a scale."""

_ALIGNMENT = 4  # bytes of the widest element, float32


class MlaCacheViews(NamedTuple):
    """The tensors of a paged cache of latents with a scale for each 128 elements, see `mla_cache_views`.

    Attributes:
        kv_cache: float8_e4m3fn ``[pages, page_size, kv_lora_rank]``.
        kv_scale_cache: float32 ``[pages, page_size, kv_lora_rank / 128]``.
        rope_cache: bfloat16 or float16 ``[pages, page_size, rope_dim]``.
    """

    kv_cache: Tensor
    kv_scale_cache: Tensor
    rope_cache: Tensor


def mla_cache_views(
    packed: Tensor, kv_lora_rank: int = 512, rope_dim: int = 64, rope_dtype: torch.dtype = torch.bfloat16
) -> MlaCacheViews:
    """Views pages of bytes as the three tensors of DeepSeek-V3.2's latent cache (656 bytes for each token).

    A token is a latent of ``kv_lora_rank`` e4m3 elements, then a float32 scale for each 128 elements, then ``rope_dim`` 16-bit
    elements. vLLM calls this layout ``fp8_ds_mla``, and FlashMLA's sparse decoding reads it. `store_mla_kv_cache` writes caches of
    this layout; `mla_sparse_with_kvcache` and `mla_decode_with_kvcache` read them.

    Args:
        packed: uint8 ``[pages, page_size, kv_lora_rank + kv_lora_rank / 128 * 4 + rope_dim * 2]``, 656 columns by default. The
            last axis must have stride 1; the page and token axes may have any strides. Every token must start at a multiple of 4
            bytes; multiples of 16 are read fastest.
        kv_lora_rank: a positive multiple of 128.
        rope_dim: even; 0 if there is no rotary part.
        rope_dtype: bfloat16 or float16, the dtype of the queries.

    Returns:
        Views of packed; nothing is copied.

    Raises:
        TypeError, ValueError: an argument is not as stated above.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import mla_cache_views
        >>> for view in mla_cache_views(torch.zeros(8, 64, 656, dtype=torch.uint8)):
        ...     print(view.dtype, list(view.shape), view.stride())
        torch.float8_e4m3fn [8, 64, 512] (41984, 656, 1)
        torch.float32 [8, 64, 4] (10496, 164, 1)
        torch.bfloat16 [8, 64, 64] (20992, 328, 1)
    """
    check = Checker("mla_cache_views")
    check.require(kv_lora_rank > 0 and kv_lora_rank % GROUP == 0, "kv_lora_rank", f"a positive multiple of {GROUP}", kv_lora_rank)
    check.require(rope_dim >= 0 and rope_dim % 2 == 0, "rope_dim", "even, and not negative", rope_dim)
    check.one_of("rope_dtype", rope_dtype, (torch.bfloat16, torch.float16))
    rope_at = kv_lora_rank + kv_lora_rank // GROUP * 4
    check.tensor("packed", packed, f"pages page_size {rope_at + rope_dim * 2}", torch.uint8)
    page, slot, column = packed.stride()
    check.require(column == 1, "packed", "of stride 1 in its last axis", f"strides {page}, {slot}, {column}")
    # Fake and meta tensors have no address.
    offset = packed.data_ptr() if type(packed) is Tensor and not packed.is_meta else packed.storage_offset()
    aligned = not any(place % _ALIGNMENT for place in (offset, packed.storage_offset(), page, slot))
    got = f"strides {page}, {slot} and an offset of {offset % _ALIGNMENT or packed.storage_offset() % _ALIGNMENT}"
    check.require(aligned, "packed", f"of tokens at multiples of {_ALIGNMENT} bytes", got)
    return MlaCacheViews(
        packed[..., :kv_lora_rank].view(E4M3),
        packed[..., kv_lora_rank:rope_at].view(torch.float32),
        packed[..., rope_at:].view(rope_dtype),
    )


def check_latent_groups(
    check: Checker,
    kv_cache: Tensor,
    kv_scale: Tensor | None,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
    like: Tensor,
) -> None:
    """Checks a cache with a scale for each 128 elements of a latent, and rotary parts in the dtype of ``like``.

    Call this function when ``kv_lora_rank`` and ``rope_dim`` are bound, and kv_scale_cache or rope_cache is given."""
    check.require(kv_scale_cache is not None, "kv_scale_cache", "a tensor, because rope_cache is given", None)
    check.require(rope_cache is not None, "rope_cache", "a tensor, because kv_scale_cache is given", None)
    check.require(kv_scale is None, "kv_scale", "None, because kv_scale_cache is given", kv_scale)
    rank = check["kv_lora_rank"]
    check.require(rank % GROUP == 0, "kv_lora_rank", f"a multiple of {GROUP}, because kv_scale_cache is given", rank)
    check.tensor("kv_cache", kv_cache, "pages page_size kv_lora_rank", E4M3)
    check.bind("scale_groups", rank // GROUP, f"kv_lora_rank / {GROUP}")
    check.tensor("kv_scale_cache", kv_scale_cache, "pages page_size scale_groups", torch.float32)
    check.tensor("rope_cache", rope_cache, "pages page_size rope_dim", like.dtype)


def quantize_groups(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises latents ``[tokens, kv_lora_rank]`` to e4m3, with scales float32 ``[tokens, kv_lora_rank / 128]``.

    All operations are float32 and correctly rounded."""
    groups = latent.float().reshape(*latent.shape[:-1], latent.shape[-1] // GROUP, GROUP)
    scale = divide(groups.abs().amax(-1), FP8_MAX[E4M3]).clamp(min=SMALLEST_NORMAL)
    return encode_fp8(groups / scale.unsqueeze(-1), E4M3).flatten(-2), scale


def whole_tokens(latents: Tensor, scales: Tensor, rope: Tensor) -> Tensor:
    """Dequantises latents and appends their rotary parts: float32 ``[..., kv_lora_rank + rope_dim]``."""
    scaled = latents.float().view(*scales.shape, GROUP) * scales.unsqueeze(-1)
    return torch.cat((scaled.flatten(-2), rope.float()), dim=-1)

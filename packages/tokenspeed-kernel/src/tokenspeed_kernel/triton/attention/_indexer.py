"""Computes the scores of a sparse attention's indexer. A program scores a tile of keys for all heads of a few tokens, and stores
the scores summed over the heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention._fp8 import fp8_operand
from tokenspeed_kernel.triton.attention._mha_call import Formats
from tokenspeed_kernel.triton.common import (
    cdiv,
    common_device,
    dense,
    for_architecture,
    next_power_of_2,
    sequences_at_once,
    sm_count_of,
)
from tokenspeed_kernel_base.checks import FP8
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")


class Shape(NamedTuple):
    """Sizes that a model fixes: indexer heads, columns of a query, and tokens in a page (0 if keys are contiguous and not
    paged).
    """

    heads: int
    head_dim: int
    page_size: int


class Tile(NamedTuple):
    """The tokens, heads and keys whose scores one program computes.

    Attributes:
        tokens: the tokens whose queries one program holds.
        heads, columns: indexer heads and columns of a query, padded to powers of two.
        block_n: keys per block.
        blocks: blocks of keys that the program loops over.
        at_once: how many sequences the program compares at a time when it searches for its sequence.
        stages: pipeline stages of the loop.
    """

    tokens: int
    heads: int
    columns: int
    block_n: int
    blocks: int
    at_once: int
    stages: int


# Keys are the M dimension of the MMA, so that the sum over heads stays within neighbouring lanes. 64 keys (a page of DeepSeek) by
# 128 query rows take 64 accumulators per thread with 4 warps. Three such programs fit on an SM: while one reduces, the others run
# MMAs.
_BLOCK_N, _ROWS, _WARPS, _STAGES = 64, 128, 4, 3
# A program loads its queries once for _BLOCKS blocks of keys. A program gets fewer blocks if the grid would otherwise have fewer
# than _PROGRAMS programs per SM/CU.
_BLOCKS, _PROGRAMS = 16, 4
_SEQUENCES_AT_ONCE = 256
_COLUMNS = {False: 16, True: 32}  # the least k of a `tl.dot`, by whether its operands are fp8
_MULTIPLIES_E4M3 = {"sm_89": True, "sm_90": True, "sm_100": True, "sm_103": True, "sm_120": True, "gfx950": True, "any": False}


INDEXER = {"heads": at_most(128), "head_dim": at_most(256), "scaled": any}
"""Traits that every Triton kernel for an indexer's scores declares."""


def empty_outputs(q: Tensor, keys: int, out: Tensor | None, lengths_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the output tensors for scores and lengths: the caller's tensor, or a new one where the caller passes None."""
    if out is None:
        out = torch.empty(q.shape[0], keys, dtype=torch.float32, device=q.device)
    if lengths_out is None:
        lengths_out = torch.empty(q.shape[0], dtype=torch.int32, device=q.device)
    return out, lengths_out


def tile_for(heads: int, head_dim: int, tokens: int, batch: int, keys: int, least: int, device: torch.device) -> Tile:
    """Returns the tile for ``tokens`` tokens in sequences of at most ``keys`` keys. ``least``: lower bound of the
    padded number of columns.
    """
    rows = next_power_of_2(heads)
    together = min(max(1, _ROWS // rows), next_power_of_2(cdiv(tokens, max(batch, 1))))
    together = max(together, cdiv(16, rows))  # N of a `tl.dot` is at least 16
    slots = tokens // together + batch
    wanted = sm_count_of(device) * _PROGRAMS
    blocks = _BLOCKS
    while blocks > 1 and slots * cdiv(keys, _BLOCK_N * blocks) < wanted:
        blocks //= 2
    at_once = sequences_at_once(batch, _SEQUENCES_AT_ONCE)
    return Tile(together, rows, max(least, next_power_of_2(head_dim)), _BLOCK_N, blocks, at_once, _STAGES)


def write_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    page_table: Tensor | None,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None,
    k_scale: Tensor | None,
    scores: Tensor,
    lengths: Tensor,
) -> None:
    """Writes each token's score of each key, and the number of keys that each token sees. The score of a key that a token does not
    see is -inf. Without a sequence, nothing is written.

    Args:
        k, k_scale: index keys and their scales: paged, or contiguous if there is no page_table.
        seqlens_k: paged: int32 ``[batch]``, the keys of each sequence. Contiguous: int32 ``[batch + 1]``, cumulative lengths.
    """
    (tokens, heads, head_dim), keys = q.shape, scores.shape[1]
    batch = len(seqlens_k) - (page_table is None)
    if not tokens or not batch:
        return
    native = q.dtype in FP8 and for_architecture(_MULTIPLIES_E4M3, q.device)
    # bfloat16 represents every fp8 value exactly. Triton's interpreter computes bfloat16 dots wrongly, so the interpreter gets
    # float32.
    wide = for_architecture({"cpu": torch.float32, "any": torch.bfloat16 if q.dtype in FP8 else q.dtype}, q.device)
    (q, q_fp8), (k, k_fp8) = ((x, None) if native else fp8_operand(x) for x in (q, k))
    tile = tile_for(heads, head_dim, tokens, batch, keys, _COLUMNS[native], q.device)
    slots = tokens // tile.tokens + batch if cu_seqlens_q is not None else batch * cdiv(tokens // batch, tile.tokens)
    device_code.indexer_scores_kernel[(max(1, cdiv(keys, tile.block_n * tile.blocks)) * slots,)](
        q,
        k,
        weights,
        page_table,
        dense(seqlens_k),
        dense(cu_seqlens_q),
        k_scale,
        scores,
        lengths,
        *q.stride(),
        *_in_pages(k, 3),
        *weights.stride(),
        *((0, 0) if page_table is None else page_table.stride()),
        *((0, 0) if k_scale is None else _in_pages(k_scale, 2)),
        *scores.stride(),
        *lengths.stride(),
        batch,
        tokens // batch,
        keys,
        SHAPE=Shape(heads, head_dim, 0 if page_table is None else k.shape[1]),
        FORMATS=Formats(common_device.DTYPES[torch.float8_e4m3fn if native else wide], q_fp8, k_fp8),
        TILE=tile,
        num_warps=_WARPS,
    )


def _in_pages(keys: Tensor, axes: int) -> tuple[int, ...]:
    """Returns the strides of keys or scales: by page, by slot and, for keys, by column. Each contiguous key counts as a page of its
    own, so the page stride is the slot stride. A sequence can then begin at any key.
    """
    strides = keys.stride()
    return strides if keys.dim() == axes else (strides[0], *strides)

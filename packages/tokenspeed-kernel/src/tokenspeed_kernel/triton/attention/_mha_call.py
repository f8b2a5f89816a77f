"""Describes a call of multi-head attention with many queries per sequence, and makes the arguments of its kernels.

Query rows are *packed* (GQA): row r of a sequence is position ``r // GROUP``, and query head ``r % GROUP`` of the KV head's
group. A key is therefore read once for all query heads of its group, and a tile of rows spans few positions.

Only the device knows the sequence lengths, so the host cannot count each sequence's tiles. The grid consists of *slots*, work items
of ``rows`` query rows each. The slots of sequence b begin at ``cu_seqlens[b] * GROUP // rows + b``. A sequence gets as many slots
as its rows need, or one more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention._fp8 import fp8_operand
from tokenspeed_kernel.triton.attention._online_softmax import score_factors
from tokenspeed_kernel.triton.attention._shape import Shape
from tokenspeed_kernel.triton.common import common_device, dense, for_architecture, sequences_at_once
from tokenspeed_kernel_base.checks import FP8

_SEQUENCES_AT_ONCE = 256


class Formats(NamedTuple):
    """Dtypes of the MMA operands, and the conversions to them.

    Attributes:
        dtype: Triton's dtype of the MMA operands.
        q_fp8, kv_fp8: how 8-bit queries, keys and values are converted to ``dtype`` (the ``FP8`` argument of `_fp8`); None for
            other dtypes.
    """

    dtype: Any
    q_fp8: str | None
    kv_fp8: str | None


class Call(NamedTuple):
    """The arguments of `mha_prefill` or `mha_extend_with_kvcache`, with defaults and outputs filled in.

    Attributes:
        k, v: ``[tokens, kv_heads, dim]``, or ``[pages, page_size, kv_heads, dim]`` with a page_table.
        lse: the output for the LSE, contiguous, or None.
        cu_seqlens: cumulative lengths of the queries.
        longest: an upper bound of the number of keys of a sequence.
        shortest: sequences with fewer queries are skipped.
        cu_seqlens_kv: cumulative lengths of the keys; given if there is no page_table and the keys are not the queries' own tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None
    cu_seqlens: Tensor
    softmax_scale: float
    causal: bool
    window_left: int
    logit_cap: float
    sinks: Tensor | None
    longest: int
    page_table: Tensor | None = None
    cache_seqlens: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    shortest: int = 1
    cu_seqlens_kv: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.kv_heads

    @property
    def page_size(self) -> int:
        return 0 if self.page_table is None else self.k.shape[1]

    def slots(self, rows: int) -> int:
        """Returns the size of the grid for tiles of ``rows`` query rows: an upper bound of the number of tiles of all sequences.
        Returns 0 if there are no tokens or no sequences."""
        return self.q.shape[0] * self.group // rows + self.batch if self.q.shape[0] and self.batch else 0

    def operands(self) -> list[Any]:
        """Returns the arguments from ``q`` to ``cap_log2``, which `tiles_kernel` and `band_kernel` share."""
        pages = (0,) if self.page_table is None else ()
        kv_seqlens = self.cu_seqlens_kv if self.page_table is None else self.cache_seqlens
        (q, _), (k, _), (v, _) = fp8_operand(self.q), fp8_operand(self.k), fp8_operand(self.v)
        return [
            *(q, k, v, self.out, self.lse, dense(self.cu_seqlens), dense(kv_seqlens), self.page_table, dense(self.sinks)),
            *(dense(self.q_scale), dense(self.k_scale), dense(self.v_scale)),
            *(*q.stride(), *pages, *k.stride(), *pages, *v.stride(), *self.out.stride()),
            *((0, 0) if self.page_table is None else self.page_table.stride()),
            self.batch,
            0 if self.page_table is None else self.page_table.shape[1] * self.page_size,
            self.window_left,
            *score_factors(self.softmax_scale, self.logit_cap),
        ]

    def constants(self) -> dict[str, Any]:
        """Returns the compile-time arguments SHAPE and FORMATS, which `tiles_kernel` and `band_kernel` share."""
        # bfloat16 represents every fp8 value exactly.
        dtype = torch.bfloat16 if self.q.dtype in FP8 else self.q.dtype
        dtype = for_architecture({"cpu": torch.float32, "any": dtype}, self.q.device)  # the interpreter's bfloat16 dots are wrong
        return {
            "SHAPE": Shape(
                heads=self.kv_heads,
                group=self.group,
                head_dim=self.q.shape[2],
                v_head_dim=self.v.shape[-1],
                page_size=self.page_size,
                q_scales=_dense_distance(self.q_scale),
                k_scales=_dense_distance(self.k_scale),
                v_scales=_dense_distance(self.v_scale),
                has_cap=self.logit_cap > 0,
            ),
            "FORMATS": Formats(common_device.DTYPES[dtype], fp8_operand(self.q)[1], fp8_operand(self.k)[1]),
        }

    @property
    def at_once(self) -> int:
        """Returns how many sequences a program compares at a time when it searches for its sequence."""
        return sequences_at_once(self.batch, _SEQUENCES_AT_ONCE)


def _dense_distance(scale: Tensor | None) -> int:
    """Returns the stride between heads' scales in the contiguous copy of ``scale`` that kernels get: 1 with one scale per head,
    else 0."""
    return int(scale is not None and scale.numel() > 1)

"""The encoding of activations for MMAs, as e4m3 or e2m1 values. A scale belongs to a block of 32 elements, to a token, or to all
tokens.

* fp8: one *plane* of e4m3 values, and a float32 scale per token, which the epilogue applies.
* fp8 with a static scale: one plane of e4m3 values; all tokens share the scale. The gate/up GEMM stores encoded activations for the
  down projection.
* mxfp4: one plane of e2m1 values with block scales.
* Unrounded: several planes of e4m3 values with block scales. An element is the sum of its values in all planes. Each plane holds
  the sign and the leading four bits of the residual: the element minus its values in the preceding planes. A plane's scales are 2^5
  times smaller than the preceding plane's. Two planes hold a bfloat16 exactly, three a float16, if its magnitude is at least 2^-14
  of the block's amax. The residual of a smaller element is at most 2^-22 of the amax. A row takes exact passes (see
  ``exact_device``) if more than a quarter of the nonzero elements of one of its blocks have a nonzero residual after the last
  plane. If ``Encoding.exact`` is True, every row with a nonzero residual takes exact passes. Two MMAs with e4m3 take as long as one
  MMA with bfloat16, which needs dequantised weights. The result of a token with an infinity is NaN.

    codes   uint8   [planes, rows, k]               k padded with zeros to a multiple of 512; e2m1 packed: [planes, rows, k / 2]
    scale   float32 [rows], float32 [1], or
            uint8   [planes, rows, k / 512, 4, 4]   e8m0: of 16 consecutive blocks, ``[i, j]`` is of block ``4 j + i``. If the
                                                    encoding has several planes and is not exact, a byte for each row follows: the
                                                    result of the test `held_at_least`
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd.gfx950.moe.mxfp4_layout import QUAD, STEP, quads_of
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX

ACCURACY = (
    "up to a quarter of the nonzero numbers of a block of 32 have an error of at most 2^-22 of its largest, unless the plan asks "
    "for exact ones"
)
# The number of e4m3 planes that represent an unrounded element of this dtype.
_PLANES = {torch.bfloat16: 2, torch.float16: 3}


class Encoding(NamedTuple):
    """The encoding of a plan's activations. A compile-time constant of the kernels.

    Attributes:
        format: ``"e4m3"`` or ``"e2m1"``.
        planes: number of e4m3 or e2m1 values that represent one element.
        scales: whose elements share a scale: ``"token"``, ``"tensor"`` or ``"block"``. Block scales are e8m0, others float32.
        exact: whether every row that the planes do not represent exactly takes exact passes.
    """

    format: str
    planes: int
    scales: str
    exact: bool = False

    @property
    def tested(self) -> bool:
        """Whether `held_at_least` decides which rows are checked for exact passes. With an exact encoding, all rows are checked."""
        return self.planes > 1 and not self.exact

    def row_bytes(self, k: int) -> int:
        """Returns the number of bytes of one encoded row of k elements in one plane, padding included."""
        return quads_of(k) * QUAD * STEP // (2 if self.format == "e2m1" else 1)

    def row_scales(self, k: int) -> int:
        """Returns the number of scales of one encoded row of k elements in one plane, padding included."""
        return 1 if self.scales != "block" else quads_of(k) * QUAD * STEP // BLOCK_MX


class Encoded(NamedTuple):
    """Encoded rows: the tensors ``codes`` and ``scale`` of the module's docstring."""

    codes: Tensor
    scale: Tensor


def encoding_of(plan: MoEPlan) -> Encoding:
    """Returns the encoding of a plan's activations.

    Raises:
        ValueError: activations are not rounded, and their dtype is neither bfloat16 nor float16.
    """
    if plan.activation_dtype == "fp8":
        return Encoding("e4m3", 1, "token")
    if plan.activation_dtype == "fp8_static":
        return Encoding("e4m3", 1, "tensor")
    if plan.activation_dtype == "mxfp4":
        return Encoding("e2m1", 1, "block")
    if plan.dtype not in _PLANES:
        raise ValueError(f"moe_apply: plan.dtype must be bfloat16 or float16 where activation_dtype is 'none', got {plan.dtype}")
    return Encoding("e4m3", _PLANES[plan.dtype], "block", plan.exact_activations)


def room_for(encoding: Encoding, rows: int, k: int, device: torch.device, static: Tensor | None) -> Encoded:
    """Allocates the tensors for ``rows`` encoded rows of k elements. ``static``: float32 [1], the static scale of all rows, or
    None."""
    codes = torch.empty(encoding.planes, rows, encoding.row_bytes(k), dtype=torch.uint8, device=device)
    scales = encoding.row_scales(k)
    if encoding.scales == "tensor":
        assert static is not None  # checked by the operator
        return Encoded(codes, static)
    if encoding.scales == "token":
        return Encoded(codes, torch.empty(rows, dtype=torch.float32, device=device))
    tested = rows if encoding.tested else 0
    return Encoded(codes, torch.empty(encoding.planes * rows * scales + tested, dtype=torch.uint8, device=device))

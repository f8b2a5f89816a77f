"""How activations are encoded for the matrix cores, which multiply mxfp4 weights with e4m3 or e2m1 codes, blocks of 32 of which
have a scale.

* What a plan rounds to fp8 has one *plane* of e4m3 codes and a float32 scale a token, by which results are multiplied.
* What it rounds to fp8 with a static scale likewise, but for the scale, which all tokens share. Then the first product stores the
  codes that the second one multiplies.
* What a plan rounds to mxfp4 has one plane of e2m1 codes with their scales.
* What a plan does not round is a sum of planes of e4m3 codes: each holds the leading four bits of what the planes before it leave,
  signed, with scales 2^5 times smaller. Two planes hold a bfloat16 exactly, three a float16, as long as an element is at most 2^14
  times smaller than the largest of its block; what is lost of smaller ones is at most 2^-22 of the largest. Two products with
  e4m3 take as long as one with bfloat16, for which weights would have to be decoded first. A token with an infinity gives NaN.

    codes   uint8   [planes, rows, k]               k padded with zeros to a multiple of 512; e2m1 packed: [planes, rows, k / 2]
    scale   float32 [rows], float32 [1], or
            uint8   [planes, rows, k / 512, 4, 4]   e8m0: of 16 blocks in a row, ``[i, j]`` is of block ``4 j + i``
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
# Planes that hold a number of this type.
_PLANES = {torch.bfloat16: 2, torch.float16: 3}


class Encoding(NamedTuple):
    """How a plan's activations are encoded. Known to the compiler.

    Attributes:
        format: ``"e4m3"`` or ``"e2m1"``.
        planes: codes of an element.
        scales: ``"token"``, ``"tensor"`` or ``"block"``: what has a scale; blocks have e8m0 scales, others float32.
    """

    format: str
    planes: int
    scales: str
    exact: bool = False

    @property
    def tested(self) -> bool:
        """Whether rows are tested for what planes lose. Where the encoding is exact, all are."""
        return self.planes > 1 and not self.exact

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of codes."""
        return quads_of(k) * QUAD * STEP // (2 if self.format == "e2m1" else 1)

    def row_scales(self, k: int) -> int:
        """Scales of a row."""
        return 1 if self.scales != "block" else quads_of(k) * QUAD * STEP // BLOCK_MX


class Encoded(NamedTuple):
    """Encoded rows, see above."""

    codes: Tensor
    scale: Tensor


def encoding_of(plan: MoEPlan) -> Encoding:
    """How a plan's activations are encoded.

    Raises:
        ValueError: numbers of this type are not rounded, and no planes hold them.
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
    """Memory for so many encoded rows, and the static scale if that is what they have."""
    codes = torch.empty(encoding.planes, rows, encoding.row_bytes(k), dtype=torch.uint8, device=device)
    scales = encoding.row_scales(k)
    if encoding.scales == "tensor":
        assert static is not None  # checked by the operator
        return Encoded(codes, static)
    if encoding.scales == "token":
        return Encoded(codes, torch.empty(rows, dtype=torch.float32, device=device))
    tested = rows if encoding.tested else 0
    return Encoded(codes, torch.empty(encoding.planes * rows * scales + tested, dtype=torch.uint8, device=device))

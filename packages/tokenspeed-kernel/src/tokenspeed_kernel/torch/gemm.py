"""Dense products by PyTorch's own matrix multiplication, which calls the vendor's library: no copies, no decoding.

On a CPU, float16 and bfloat16 products are summed in float32 and rounded once, the bias included. On a GPU that holds unless the
user allows reductions in reduced precision (``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`` and its
siblings, which PyTorch allows by default; split sums are then added in the operands' format).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dtype_name, format_signatures
from tokenspeed_kernel_base.spec import Priority


def torch_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    alpha: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    if bias is None:
        return torch.mm(a, b, out=out)
    return torch.addmm(bias, a, b, out=out)


def torch_bmm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    out_dtype: torch.dtype | None,
    alpha: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    return torch.bmm(a, b, out=out)


# One declaration a dtype, for the result has the operands' dtype and so must the bias have.
for _dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    _served = format_signatures(("a", "b"), "dense", [_dtype])
    _name = dtype_name(_dtype)
    register_kernel(
        "gemm",
        "mm",
        name=f"torch_mm_{_name}",
        solution="torch",
        signatures=_served,
        traits={"bias": any, "wide_bias": False, "out_dtype": _name},
        priority=Priority.PORTABLE,
    )(torch_mm)
    register_kernel(
        "gemm",
        "bmm",
        name=f"torch_bmm_{_name}",
        solution="torch",
        signatures=_served,
        traits={"out_dtype": _name},
        priority=Priority.PORTABLE,
    )(torch_bmm)

"""Dense products by PyTorch's own matrix multiplication, which calls the vendor's library: no copies, no decoding.

On a CPU, float16 and bfloat16 products are summed in float32 and rounded once, the bias included. On a GPU that holds unless the
user allows reductions in reduced precision (``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`` and its
siblings, which PyTorch allows by default; split sums are then added in the operands' format).

On a CPU with AMX, 16-bit products of more than 16 rows read up to the next multiple of `CPU_K` elements of each row of the left
operand, and multiply what lies there by zero: a NaN or an infinity behind a row, or at the start of the next one, makes it NaN.
Copies do not help, because contiguous rows lie behind each other. So those kernels take whole multiples of k alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.platform import CapabilityRequirement
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dtype_name, format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import ANY, Constraint, multiple_of

CPU_K = 32  # bfloat16, PyTorch 2.13: multiples of 32 up to 2912 are right; k of 31, 33, 70, 80, 100, 144, 200 and 1000 are not


def torch_mm(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, out: Tensor | None) -> Tensor:
    if bias is None:
        return torch.mm(a, b, out=out)
    return torch.addmm(bias, a, b, out=out)


def torch_bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, out: Tensor | None) -> Tensor:
    return torch.bmm(a, b, out=out)


_ANYWHERE = CapabilityRequirement()
_GPU, _CPU = (CapabilityRequirement(vendors=frozenset(vendors)) for vendors in (("nvidia", "amd"), ("cpu",)))


def _declare(dtype: torch.dtype, suffix: str, capability: CapabilityRequirement, k: Constraint) -> None:
    """The result has the operands' dtype and so must the bias have, so there is one declaration a dtype."""
    served, name = format_signatures(("a", "b"), "dense", [dtype]), dtype_name(dtype)
    register_kernel(
        "gemm",
        "mm",
        name=f"torch_mm_{name}{suffix}",
        solution="torch",
        capability=capability,
        signatures=served,
        traits={"bias": any, "wide_bias": False, "out_dtype": name, "k": k},
        priority=Priority.PORTABLE,
    )(torch_mm)
    register_kernel(
        "gemm",
        "bmm",
        name=f"torch_bmm_{name}{suffix}",
        solution="torch",
        capability=capability,
        signatures=served,
        traits={"out_dtype": name, "k_multiple": k},
        priority=Priority.PORTABLE,
    )(torch_bmm)


for _dtype in (torch.float32, torch.float64):
    _declare(_dtype, "", _ANYWHERE, ANY)
for _dtype in (torch.float16, torch.bfloat16):
    _declare(_dtype, "", _GPU, ANY)
    _declare(_dtype, "_cpu", _CPU, multiple_of(CPU_K))

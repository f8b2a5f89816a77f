"""Dense GEMMs by ``torch.mm``, ``torch.addmm`` and ``torch.bmm``, which call the vendor's library. Operands are neither copied nor
dequantised.

On a CPU, float16 and bfloat16 GEMMs accumulate in float32 and round once, after the bias. The same holds on a GPU unless PyTorch
may reduce in lower precision (``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`` and its siblings). By default,
PyTorch may do so, and then adds split-K partial sums in the operands' dtype.

On a CPU with AMX, a 16-bit GEMM of more than 16 rows reads each row of the left operand up to the next multiple of `CPU_K`
elements, and multiplies the excess elements by zero. A NaN or an infinity after a row, or at the start of the next row, therefore
makes the row's results NaN. A contiguous copy does not help, because its rows are adjacent. So the 16-bit CPU kernels require k to
be a multiple of `CPU_K`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.platform import CapabilityRequirement
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dtype_name, format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import ANY, Constraint, multiple_of

# In bf16 with PyTorch 2.13, results are right for multiples of 32 up to 2912, but wrong for k = 31, 33, 70, 80, 100, 144, 200 and
# 1000.
CPU_K = 32


def torch_mm(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, out: Tensor | None) -> Tensor:
    if bias is None:
        return torch.mm(a, b, out=out)
    return torch.addmm(bias, a, b, out=out)


def torch_bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, out: Tensor | None) -> Tensor:
    return torch.bmm(a, b, out=out)


_ANYWHERE = CapabilityRequirement()
_GPU, _CPU = (CapabilityRequirement(vendors=frozenset(vendors)) for vendors in (("nvidia", "amd"), ("cpu",)))


def _declare(dtype: torch.dtype, suffix: str, capability: CapabilityRequirement, k: Constraint) -> None:
    """Registers `mm` and `bmm` for one operand dtype. Each dtype has its own declaration, because the result and the bias must have
    the operands' dtype.
    """
    formats, name = format_signatures(("a", "b"), "dense", [dtype]), dtype_name(dtype)
    register_kernel(
        "gemm",
        "mm",
        name=f"torch_mm_{name}{suffix}",
        solution="torch",
        capability=capability,
        signatures=formats,
        traits={"bias": any, "wide_bias": False, "out_dtype": name, "k": k},
        priority=Priority.PORTABLE,
    )(torch_mm)
    register_kernel(
        "gemm",
        "bmm",
        name=f"torch_bmm_{name}{suffix}",
        solution="torch",
        capability=capability,
        signatures=formats,
        traits={"out_dtype": name, "k_multiple": k},
        priority=Priority.PORTABLE,
    )(torch_bmm)


for _dtype in (torch.float32, torch.float64):
    _declare(_dtype, "", _ANYWHERE, ANY)
for _dtype in (torch.float16, torch.bfloat16):
    _declare(_dtype, "", _GPU, ANY)
    _declare(_dtype, "_cpu", _CPU, multiple_of(CPU_K))

"""Kernels for AMD MI355X (gfx950, CDNA4) and MI300X (gfx942, CDNA3), as plain functions and as a plugin of tokenspeed-kernel.

Every operator that this package's kernels implement is a function of the package: ``from tokenspeed_kernel_amd import
mha_prefill``. The function has the operator's signature, docstring and checks, and selects among the kernels of this package alone.
If no kernel is eligible for a call, NoKernelFoundError (a RuntimeError) gives each kernel's reason, for example an unsupported GPU.

Importing the package imports neither PyTorch nor Triton, and works on any machine.
"""

from typing import TYPE_CHECKING

from tokenspeed_kernel_amd.version import __version__
from tokenspeed_kernel_base.standalone import functions_of

if TYPE_CHECKING:  # for editors and type checkers; `functions_of` also provides operators that are not listed here
    from tokenspeed_kernel_base.ops.attention.mha_decode_with_kvcache import mha_decode_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mha_extend_with_kvcache import mha_extend_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mha_prefill import mha_prefill
    from tokenspeed_kernel_base.ops.attention.mha_with_kvcache import mha_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
    from tokenspeed_kernel_base.ops.gemm.mm import mm
    from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
    from tokenspeed_kernel_base.ops.moe.moe_topk_apply import moe_topk_apply

__all__ = ["__version__"]

__getattr__, __dir__ = functions_of(__name__)


def register() -> None:
    """Registers the kernels of this package with tokenspeed-kernel: the entry point ``amd`` of ``tokenspeed_kernel.plugins``."""
    from tokenspeed_kernel_base.registry import register_package

    register_package(__name__)

"""Kernels for NVIDIA Hopper (sm_90: H100, H200), as plain functions and as a plugin of tokenspeed-kernel.

Every operator that this package's kernels implement is a function of the package: ``from tokenspeed_kernel_nvidia import
mha_prefill``. Such a function has the operator's signature, docstring and checks, and uses only this package's kernels. If no
kernel is eligible, it raises NoKernelFoundError, a RuntimeError. The message gives the reason for each kernel, for example another
GPU.

Importing the package imports neither PyTorch nor CuteDSL, and works on any machine.
"""

from typing import TYPE_CHECKING

from tokenspeed_kernel_base.standalone import functions_of
from tokenspeed_kernel_nvidia.version import __version__

if TYPE_CHECKING:  # for editors and type checkers; at run time `functions_of` makes these functions
    from tokenspeed_kernel_base.ops.attention.mha_decode_with_kvcache import mha_decode_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mha_extend_with_kvcache import mha_extend_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mha_prefill import mha_prefill
    from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
    from tokenspeed_kernel_base.ops.attention.mla_prefill import mla_prefill
    from tokenspeed_kernel_base.ops.attention.mla_sparse_with_kvcache import mla_sparse_with_kvcache
    from tokenspeed_kernel_base.ops.decoder.decoder_layers import decoder_layers
    from tokenspeed_kernel_base.ops.gemm.linear import linear
    from tokenspeed_kernel_base.ops.gemm.mm import mm
    from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply

__all__ = ["__version__"]

__getattr__, __dir__ = functions_of(__name__)


def register() -> None:
    """Registers the kernels of this package with tokenspeed-kernel. The entry point ``nvidia`` of the group
    ``tokenspeed_kernel.plugins`` names this function."""
    from tokenspeed_kernel_base.registry import register_package

    register_package(__name__)

"""What the portable Triton quantisation kernels can do. Declarations only: a kernel's module, and Triton with it, is imported when
the kernel is first selected.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.registry import Priority, register_kernel
from tokenspeed_kernel_base.signature import format_signatures

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_HERE = __name__

# -- quantisers ----------------------------------------------------------------------------------------------------------------

_SOURCES = format_signatures("x", "dense", _FLOATS)
_QUANTISERS = {
    "quantize_fp8": "quantize_fp8",
    "quantize_fp8_with_scale": "quantize_fp8_with_scale",
    "quantize_mxfp8": "quantize_mx",
    "quantize_mxfp4": "quantize_mx",
    "quantize_nvfp4": "quantize_nvfp4",
}
for _mode, _module in _QUANTISERS.items():
    register_kernel(
        "quantization",
        _mode,
        solution="triton",
        capability=TRITON,
        signatures=_SOURCES,
        priority=Priority.PORTABLE,
        tags={"portability", "determinism"},
    )(f"{_HERE}.{_module}:{_mode}")

# -- and back ------------------------------------------------------------------------------------------------------------------

# All formats that the operators take.
for _mode in ("dequantize_fp8", "dequantize_mxfp8", "dequantize_mxfp4", "dequantize_nvfp4"):
    register_kernel(
        "quantization",
        _mode,
        solution="triton",
        capability=TRITON,
        signatures=None,
        priority=Priority.PORTABLE,
        tags={"portability", "determinism"},
    )(f"{_HERE}.dequantize:{_mode}")

"""mm of block-scaled operands by FlashInfer, on Blackwell: the declarations. The adapter is in ``mm_device``.

For nvfp4 and mxfp8, FlashInfer calls CUTLASS GEMMs. For mxfp4, FlashInfer calls cuDNN, one of its dependencies. The block scales of
both operands are in tiles of 128x4. GEMMs of bfloat16 with nvfp4 weights are FlashInfer's own. Their block scales are in rows on
sm_100 and sm_103, and in tiles on sm_120 and sm_121. Weights need no preparation. TensorRT-LLM's generated kernels would need
shuffled weights. These kernels are left out, because the shuffle is documented only for weights that FlashInfer itself has
quantised.

The GEMMs have not been measured, and most of them are compiled at first use. So they are ranked below the portable kernels, and are
used on request only.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_kernel_base.ops.quantization.formats import mxfp4_format, mxfp8_format, nvfp4_format
from tokenspeed_kernel_base.platform import CapabilityRequirement
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import TensorFormat, dense_tensor_format, format_signature
from tokenspeed_kernel_base.traits import at_least, at_most, multiple_of
from tokenspeed_kernel_nvidia.capability import blackwell, blackwell_workstation, flashinfer_gap

_PRIORITY = 2
_TILES = "128x4"
# CUTLASS's GEMMs need multiples of 32 elements. Its mxfp8 GEMMs gave wrong results for sizes below 128.
_WHOLE = {"k": multiple_of(32), "n": multiple_of(32)}
_LARGE = {size: constraint & at_least(128) for size, constraint in _WHOLE.items()}
# Constraints of cuDNN's mxfp4 GEMMs: larger multiples than cuDNN's documentation requires.
_LONG = {"k": multiple_of(128), "n": multiple_of(32)}
_SOME = {"k": at_least(16), "n": at_least(1)}
# Sizes for the kernel on sm_120, which rejects operands and results of 2^31 elements or more.
_COUNTED = {"m": at_most(1 << 15), "k": at_least(16) & at_most(1 << 15), "n": at_least(1) & at_most((1 << 16) - 1)}


def _declare(name: str, capability: CapabilityRequirement, a: TensorFormat, b: TensorFormat, sizes: dict[str, Any]) -> None:
    register_kernel(
        "gemm",
        "mm",
        name=f"flashinfer_mm_{name}",
        solution="flashinfer",
        capability=capability,
        signatures={format_signature(a=a, b=b)},
        traits={"out_dtype": {"bfloat16", "float16"}, "bias": False, "wide_bias": False, **sizes},
        priority=_PRIORITY,
    )(f"{__name__}_device:mm")


_E4M3 = torch.float8_e4m3fn
for _arch, _capability in (("sm100", blackwell(flashinfer_gap)), ("sm120", blackwell_workstation(flashinfer_gap))):
    _declare(f"nvfp4_{_arch}", _capability, nvfp4_format(layout=_TILES), nvfp4_format((16, 1), _TILES), _WHOLE)
    _declare(f"mxfp8_{_arch}", _capability, mxfp8_format(_E4M3, layout=_TILES), mxfp8_format(_E4M3, (32, 1), _TILES), _LARGE)
_BF16 = dense_tensor_format(torch.bfloat16)
_declare("nvfp4_weights_sm100", blackwell(flashinfer_gap), _BF16, nvfp4_format((16, 1)), _SOME)
_declare("nvfp4_weights_sm120", blackwell_workstation(flashinfer_gap), _BF16, nvfp4_format((16, 1), _TILES), _COUNTED)
_declare("mxfp4_sm100", blackwell(flashinfer_gap), mxfp4_format(layout=_TILES), mxfp4_format((32, 1), _TILES), _LONG)

"""What the portable Triton quantisation kernels can do. Declarations only: a kernel's module, and Triton with it, is imported when the
kernel is first selected.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.triton_common import TRITON
from tokenspeed_kernel.registry import Priority, register_kernel
from tokenspeed_kernel.signature import dense_tensor_format, format_signature, format_signatures

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_HERE = __name__

# -- quantisers ----------------------------------------------------------------------------------------------------------------

# -- and back ------------------------------------------------------------------------------------------------------------------


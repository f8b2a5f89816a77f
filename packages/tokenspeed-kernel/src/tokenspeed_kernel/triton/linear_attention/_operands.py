"""Helpers that the prefill and the decode launcher of the gated delta rule use."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature

STATES = (torch.float32, torch.bfloat16)
"""State dtypes that the portable kernels support."""

SIGNATURES = frozenset(
    format_signature(q=dense_tensor_format(dtype), states=dense_tensor_format(states)) for dtype in FLOATS for states in STATES
)


def rows(x: Tensor) -> Tensor:
    """Returns x, or a contiguous copy if the stride of its last axis is not 1, as kernels require."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def gates_of(A_log: Tensor | None, dt_bias: Tensor | None) -> int:
    """Returns the argument GATES of `_gates_device.log_decay`: 0 if the gates are log decays, 1 if they are raw, 2 if they are raw
    and have a bias."""
    return 0 if A_log is None else 1 if dt_bias is None else 2

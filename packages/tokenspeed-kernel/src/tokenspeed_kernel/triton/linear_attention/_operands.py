"""Helpers that both launchers of the gated delta rule use."""

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
    """Returns the tensor, or a contiguous copy if its last axis is strided: kernels assume a last stride of 1."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def gates_of(A_log: Tensor | None, dt_bias: Tensor | None) -> int:
    """Returns GATES, the form in which gates are given; see `_gates_device.log_decay`."""
    return 0 if A_log is None else 1 if dt_bias is None else 2

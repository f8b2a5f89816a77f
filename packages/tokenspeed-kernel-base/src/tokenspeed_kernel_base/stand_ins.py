"""Tensors that replace real ones while a call is traced: fake and functional tensors, and tensors on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tokenspeed_kernel_base.checks import unusual_storage
from tokenspeed_kernel_base.parameters import HOLD_TENSORS, Parameter


def readable(tensor: torch.Tensor) -> bool:
    """Whether the host can read a tensor's values without waiting for a device."""
    return tensor.device.type == "cpu" and not stands_in(tensor)


def stands_in(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class intercepts operations (fake, functional, distributed, quantised tensors). Kernels must not receive
    such a tensor. A tensor whose class intercepts no operation, such as a weight with an attached loader, counts as a plain
    tensor."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_traced(parameters: Sequence[Parameter], arguments: Mapping[str, Any]) -> bool:
    """Whether the call is traced instead of run: at least one of its tensors stands in for a real tensor, or all of them are meta
    tensors."""
    found = []
    for parameter in parameters:
        value = arguments[parameter.name]
        for tensor in parameter.tensors() if parameter.kind in HOLD_TENSORS else ():
            inner = value if tensor is parameter else getattr(value, tensor.attribute, None)
            if isinstance(inner, torch.Tensor) and not unusual_storage(inner):
                found.append(inner)
    return any(map(stands_in, found)) or (bool(found) and all(t.is_meta for t in found))

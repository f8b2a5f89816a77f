"""`all_reduce` over peer memory: one launch, without a communication library."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.comm._exchange import exchange
from tokenspeed_kernel.triton.common import FLOATS, TRITON
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import CHUNK, ONE_SHOT, TWO_SHOT
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority


def _all_reduce(protocol: str, x: Tensor, group: ProcessGroup, out: Tensor | None) -> Tensor:
    # Implements both kernels of `all_reduce`. ``protocol``: ONE_SHOT or TWO_SHOT.
    source = x.contiguous()
    total = out if out is not None and out.is_contiguous() else torch.empty_like(source)
    if x.numel():
        exchange("all_reduce", protocol, source, group, total, CHUNK // x.element_size())
    return total if out is None or out is total else out.copy_(total)


@register_kernel(
    "comm",
    "all_reduce",
    name="triton_one_shot_all_reduce",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"protocol": ONE_SHOT},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def one_shot_all_reduce(x: Tensor, group: ProcessGroup, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.all_reduce`, which documents the arguments."""
    return _all_reduce(ONE_SHOT, x, group, out)


@register_kernel(
    "comm",
    "all_reduce",
    name="triton_two_shot_all_reduce",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"protocol": TWO_SHOT},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def two_shot_all_reduce(x: Tensor, group: ProcessGroup, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.all_reduce`, which documents the arguments."""
    return _all_reduce(TWO_SHOT, x, group, out)

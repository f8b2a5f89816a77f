"""Greedy verification of draft trees: accepts the path whose tokens are the target model's. One program handles one sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.speculation.trees import made_paths
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")


@register_kernel(
    "speculation",
    "verify_draft_tokens",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("draft_tokens", "dense", (torch.int32, torch.int64)),
    traits={"tree": any, "nodes": at_most(4096)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def verify_draft_tokens(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    parents: Tensor | None,
    out: Tensor | None,
    path_out: Tensor | None,
    counts_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.verify_draft_tokens`, which documents the arguments."""
    batch, nodes = draft_tokens.shape
    made = made_paths(draft_tokens)
    tokens, path, counts = (new if given is None else given for new, given in zip(made, (out, path_out, counts_out), strict=True))
    if batch:
        block = next_power_of_2(nodes)
        device_code.verify_draft_tokens_kernel[(batch,)](
            target_tokens,
            draft_tokens,
            parents,
            tokens,
            path,
            counts,
            *target_tokens.stride(),
            *draft_tokens.stride(),
            *((0, 0) if parents is None else parents.stride()),
            *tokens.stride(),
            *path.stride(),
            counts.stride(0),
            nodes,
            NODES=block,
            num_warps=1 if block <= 128 else 4,
        )
    return tokens, path, counts

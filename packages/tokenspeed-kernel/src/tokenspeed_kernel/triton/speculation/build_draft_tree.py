"""Builds draft trees. One program per sequence selects the candidates with the highest scores, and links each to its parent's
node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, launch_options, may_overlap, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

_WARPS = 8


@register_kernel(
    "speculation",
    "build_draft_tree",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("tokens", "dense", (torch.int32, torch.int64)),
    traits={"candidates": at_most(8192)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def build_draft_tree(
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor,
    root_tokens: Tensor,
    nodes: int,
    out: Tensor | None,
    parents_out: Tensor | None,
    tree_mask_out: Tensor | None,
    depths_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.build_draft_tree`, which documents the arguments."""
    (batch, candidates), device = tokens.shape, tokens.device
    draft = torch.empty(batch, nodes, dtype=tokens.dtype, device=device) if out is None else out
    tree = torch.empty(batch, nodes, dtype=torch.int32, device=device) if parents_out is None else parents_out
    masks = torch.empty(batch, nodes, dtype=torch.int64, device=device) if tree_mask_out is None else tree_mask_out
    depths = torch.empty(batch, nodes, dtype=torch.int32, device=device) if depths_out is None else depths_out
    if batch:
        block, early = next_power_of_2(max(candidates, 16)), may_overlap(device)
        scratch = torch.empty(batch, block + nodes, dtype=torch.int32, device=device)
        device_code.build_draft_tree_kernel[(batch,)](
            tokens,
            scores,
            parents,
            root_tokens,
            draft,
            tree,
            masks,
            depths,
            scratch,
            *tokens.stride(),
            *scores.stride(),
            *parents.stride(),
            root_tokens.stride(0),
            *draft.stride(),
            *tree.stride(),
            *masks.stride(),
            *depths.stride(),
            candidates,
            nodes,
            CANDIDATES=block,
            NODES=next_power_of_2(nodes),
            EARLY=early,
            num_warps=_WARPS,
            **launch_options(early),
        )
    return draft, tree, masks, depths

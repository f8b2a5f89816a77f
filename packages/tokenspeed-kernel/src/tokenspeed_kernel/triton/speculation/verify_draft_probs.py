"""Speculative sampling in three launches: accept or reject draft tokens, sum the residual of the last accepted node, and draw the
last token.

The first kernel walks down the tree. A program looks up two probabilities per child, and reads whole rows only where a rejected
child has siblings. So one program per sequence is enough. For every sequence, the row of its last node is read whole. This row is
split into spans, which many programs sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, for_architecture, next_power_of_2
from tokenspeed_kernel.triton.sampling._rows import spans_of
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.speculation.trees import made_paths
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

# Tokens per loop step. The interpreter takes about as long for few tokens as for many.
_BLOCKS = {"cpu": 4096, "any": 1024}
# Tokens per loop step, and warps, of the program that walks a sequence's drafts. Such a program has an SM/CU to itself.
_WALK_BLOCK, _WALK_WARPS = 4096, 16


@register_kernel(
    "speculation",
    "verify_draft_probs",
    solution="triton",
    capability=TRITON,
    signatures={
        format_signature(target_probs=dense_tensor_format(torch.float32), draft_tokens=dense_tensor_format(dtype))
        for dtype in (torch.int32, torch.int64)
    },
    traits={"tree": any, "nodes": at_most(128)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def verify_draft_probs(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    seed: Tensor,
    offset: Tensor,
    parents: Tensor | None,
    out: Tensor | None,
    path_out: Tensor | None,
    counts_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.verify_draft_probs`, which documents the arguments."""
    batch, nodes, vocab = target_probs.shape
    device = target_probs.device
    made = made_paths(draft_tokens)
    tokens, path, counts = (new if given is None else given for new, given in zip(made, (out, path_out, counts_out), strict=True))
    if batch == 0:
        return tokens, path, counts
    target_probs, draft_probs = (x if x.stride(2) == 1 else x.contiguous() for x in (target_probs, draft_probs))
    seed, offset = seed.contiguous(), offset.contiguous()
    spans = spans_of(target_probs[:, 0])
    factors = torch.empty((batch, 2), dtype=torch.float64, device=device)
    sums = torch.empty((batch, spans.count), dtype=torch.int64, device=device)
    block = for_architecture(_BLOCKS, device)
    probs = (target_probs, draft_probs, *target_probs.stride()[:2], *draft_probs.stride()[:2], draft_probs.shape[1], vocab)
    # The definition rounds after every multiplication, so fused multiply-adds would give other results.
    exact = {"enable_fp_fusion": False}
    device_code.walk_kernel[(batch,)](
        *probs,
        draft_tokens,
        *draft_tokens.stride(),
        parents,
        *((0, 0) if parents is None else parents.stride()),
        seed,
        offset,
        tokens,
        *tokens.stride(),
        path,
        *path.stride(),
        counts,
        counts.stride(0),
        factors,
        nodes,
        NODES=next_power_of_2(nodes),
        BLOCK=_WALK_BLOCK,
        num_warps=_WALK_WARPS,
        **exact,
    )
    last = (path, *path.stride(), counts, counts.stride(0), factors, sums, spans.count, spans.length)
    device_code.sum_spans_kernel[(batch * spans.count,)](*probs, *last, BLOCK=block, num_warps=4, **exact)
    device_code.draw_kernel[(batch,)](
        *probs, *last, seed, offset, tokens, *tokens.stride(), SPANS=spans.block, BLOCK=block, num_warps=4, **exact
    )
    return tokens, path, counts

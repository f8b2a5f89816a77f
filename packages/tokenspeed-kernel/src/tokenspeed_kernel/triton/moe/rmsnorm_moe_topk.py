"""RMSNorm, the router GEMM and the top-k routing of a few tokens, in one kernel.

Each program normalises one token, which is cheap, and computes the token's logits for some experts. Many SMs/CUs therefore read the
router weights in parallel. The programs of a token store their logits to a workspace, and the last program to arrive routes the
token.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, cdiv, has_rows, launch_options, may_overlap, next_power_of_2
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most
from tokenspeed_kernel_base.workspace import keeper

device_code = DeviceModule(__name__ + "_device")

# The largest number of tokens of an eligible call. Each token's programs read the router weights again, from L2. With more
# tokens, one GEMM of all tokens is faster.
MOST_TOKENS = 16


class Tile(NamedTuple):
    """How much of a token one program computes.

    Attributes:
        experts: the number of experts for which a program computes the logits of its token.
        warps: warps of the program.
    """

    experts: int
    warps: int


# H200, 128 experts, hidden size 2880, top-4, bf16 with residual and bias, cold L2, us for 1, 4, 8 and 16 tokens:
# 4 experts and 4 warps 4.3, 4.4, 4.9, 8.2; 8 experts and 4 warps 5.0, 4.9, 5.2, 5.9; 2 experts and 4 warps 4.3, 4.7, 5.2, 8.1;
# 4 experts and 8 warps 4.5, 4.7, 5.2, 8.0; 1 expert and 1 warp 6.0, 6.2, 7.1, 11.3. Three separate kernels (rmsnorm, a cuBLAS GEMM,
# moe_topk) take 10.5, 10.8, 10.8, 11.2.
_FEW, _WARPS = 8, 4
# The largest number of router weights that a program holds in registers: 256 per thread.
_MOST_ELEMENTS = 32768


@functools.cache
def tile_for(tokens: int, hidden: int) -> Tile:
    """Returns the tile for a call with ``tokens`` tokens of hidden size ``hidden``."""
    experts = 4 if tokens <= _FEW else 8
    return Tile(max(1, min(experts, _MOST_ELEMENTS // next_power_of_2(hidden))), _WARPS)


@register_kernel(
    "moe",
    "rmsnorm_moe_topk",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures(("x", "router_weight"), "dense", FLOATS),
    traits={
        "tokens": at_most(MOST_TOKENS),
        # A token and its logits must fit into the registers of one program.
        "hidden": at_most(8192),
        "num_experts": at_most(1024),
        "residual": any,
        "wide_residual": any,
        "router_bias": any,
        "sigmoid": any,
        "sqrtsoftplus": any,
        "renormalize": any,
        "correction_bias": any,
        "grouped": any,
        "scaled": any,
    },
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def rmsnorm_moe_topk(
    x: Tensor,
    norm_weight: Tensor,
    router_weight: Tensor,
    top_k: int,
    eps: float,
    residual: Tensor | None,
    router_bias: Tensor | None,
    scoring: str,
    renormalize: bool,
    correction_bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    scaling_factor: float,
    out: Tensor | None,
    weights_out: Tensor | None,
    ids_out: Tensor | None,
    residual_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.rmsnorm_moe_topk`, which documents the arguments."""
    tokens, hidden = x.shape
    experts = router_weight.shape[1]
    weights = x.new_empty(tokens, top_k, dtype=torch.float32) if weights_out is None else weights_out
    ids = x.new_empty(tokens, top_k, dtype=torch.int32) if ids_out is None else ids_out
    normed = out if out is not None and has_rows(out) else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # A token's first program stores the sum of x and the residual while the token's other programs may still read both. So the sum
    # gets a tensor of its own, which aliases neither.
    total = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    added = x if residual is None else residual if residual.stride(1) == 1 else residual.contiguous()
    if tokens:
        tile = tile_for(tokens, hidden)
        blocks = cdiv(experts, tile.experts)
        early = may_overlap(x.device)
        device = x.get_device()
        stream = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0
        workspace = keeper.get(device, stream, 4 * tokens * experts, tokens)
        device_code.rmsnorm_moe_topk_kernel[(blocks, tokens)](
            x,
            added,
            norm_weight,
            router_weight,
            router_bias,
            correction_bias,
            normed,
            normed if total is None else total,
            workspace.memory.view(x.dtype),
            workspace.counters,
            weights,
            ids,
            hidden,
            eps,
            x.stride(0),
            added.stride(0),
            norm_weight.stride(0),
            router_weight.stride(1),
            router_weight.stride(0),
            0 if router_bias is None else router_bias.stride(0),
            normed.stride(0),
            hidden,
            0 if correction_bias is None else correction_bias.stride(0),
            *weights.stride(),
            *ids.stride(),
            float(scaling_factor),
            HAS_RESIDUAL=residual is not None,
            ROUTER_BIAS=router_bias is not None,
            HIDDEN_PADDED=next_power_of_2(hidden),
            BLOCK=tile.experts,
            BLOCKS=blocks,
            EXPERTS=experts,
            TOP_K=top_k,
            TOP_K_PADDED=next_power_of_2(top_k),
            GROUPS=num_groups,
            GROUPS_PADDED=next_power_of_2(num_groups),
            GROUP_PADDED=next_power_of_2(experts // num_groups),
            TOP_GROUPS=top_groups,
            SCORING=scoring,
            RENORMALIZE=renormalize,
            BIAS=correction_bias is not None,
            PACKED=num_groups == 1 and correction_bias is None and x.element_size() == 2,
            INTERPRETED=abilities(x.device).interpreted,
            EARLY=early,
            num_warps=tile.warps,
            **launch_options(early),
        )
    if out is not None and out is not normed:
        normed = out.copy_(normed)
    if total is None:
        return normed, weights, ids
    return normed, weights, ids, total if residual_out is None else residual_out.copy_(total)

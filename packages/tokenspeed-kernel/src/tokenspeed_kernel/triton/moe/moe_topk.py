"""Routing in one kernel: the top-k experts of each token and their weights.

A program holds the logits of all experts for a tile of tokens in registers. The selection compares int32 keys, which sort as in the
reference: NaN above everything, -0 equal to 0. Among equal keys the lowest expert comes first. Each of ``top_k`` rounds finds the
largest key at the lowest position, and removes this key. The rounds are fast because models have a small ``top_k``. The weights
come from the chosen logits, which are loaded again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, cdiv, launch_options, may_overlap, next_power_of_2, sm_count_of
from tokenspeed_kernel.triton.repeated import Launch, Repeated
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")
_launches = Repeated(lambda: device_code.topk_kernel)


class TopkConfig(NamedTuple):
    """The tile of a program when there are enough tokens to fill the device.

    Attributes:
        elements: logits in a tile, padding included; sets the tokens per program.
        warps: warps of a program.
    """

    # H200, 16384 tokens. 128 experts, top-4: 5.4 us with 512 elements and 1 warp, 5.9 us with 1024 and 4 warps, 11.8 us with 128
    # and 1 warp. 256 experts in 8 groups, top-8: 23.4 us with 512 elements and 1 warp, 43.9 us with 1024 and 4 warps, 24.0 us with
    # 256 and 1 warp. Reductions are fastest within one warp.
    elements: int = 512
    warps: int = 1


@register_kernel(
    "moe",
    "moe_topk",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("logits", "dense", FLOATS),
    traits={
        # The logits of a token are in the registers of one program, which scans them top_k times.
        "num_experts": at_most(8192),
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
def moe_topk(
    logits: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    correction_bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    scaling_factor: float,
    weights_out: Tensor | None,
    ids_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.moe_topk`, which documents the arguments."""
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32) if weights_out is None else weights_out
    ids = logits.new_empty(tokens, top_k, dtype=torch.int32) if ids_out is None else ids_out
    if tokens == 0:
        return weights, ids

    def describe() -> Launch:
        groups_padded = next_power_of_2(num_groups)
        group_padded = next_power_of_2(experts // num_groups)
        rows, warps = _tile(tokens, groups_padded * group_padded, sm_count_of(logits.device))
        early = may_overlap(logits.device)
        return Launch(
            (cdiv(tokens, rows),),
            (
                tokens,
                logits.stride(0),
                logits.stride(1),
                0 if correction_bias is None else correction_bias.stride(0),
                weights.stride(0),
                weights.stride(1),
                ids.stride(0),
                ids.stride(1),
                float(scaling_factor),
            ),
            {
                "EXPERTS": experts,
                "TOP_K": top_k,
                "TOP_K_PADDED": next_power_of_2(top_k),
                "GROUPS": num_groups,
                "GROUPS_PADDED": groups_padded,
                "GROUP_PADDED": group_padded,
                "TOP_GROUPS": top_groups,
                "SCORING": scoring,
                "RENORMALIZE": renormalize,
                "BIAS": correction_bias is not None,
                "PACKED": num_groups == 1 and correction_bias is None and logits.element_size() == 2,
                "ROWS": rows,
                "EARLY": early,
                "num_warps": warps,
                **launch_options(early),
            },
        )

    options = (top_k, scoring, renormalize, num_groups, top_groups, scaling_factor)
    _launches((logits, correction_bias, weights, ids), options, describe)
    return weights, ids


def _tile(tokens: int, padded: int, sm_count: int) -> tuple[int, int]:
    """Returns the number of tokens per program, and of warps per program. ``padded``: padded logits of a token."""
    config = TopkConfig()
    if tokens > 4 * sm_count and padded < config.elements:
        return config.elements // padded, config.warps
    # For few tokens, one token per program is fastest. One warp is fastest while its registers hold the logits. 64 tokens of 128
    # experts take 1.7 us, or 1.9 us with 2 or 4 warps.
    return 1, min(8, max(1, padded // 1024))

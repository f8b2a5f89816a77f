"""MoE routing: the compile-time constants of kernels that route, and a separate launch for many tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._rows import rows
from tokenspeed_kernel_base.discovery import DeviceModule

device = DeviceModule(__name__ + "_device")

MAX_EXPERTS = 1024  # the most experts whose router logits, for one token, a wave holds in registers
_ELEMENTS = 4096  # the most router logits per workgroup of the separate launch


class Routing(NamedTuple):
    """How tokens are routed: compile-time constants.

    Attributes:
        rows: how many tokens a workgroup routes at once, a power of two.
        experts: number of router logits per token, padded to a power of two.
        slots: top_k, padded to a power of two. In a GEMM that also routes, rows times slots is 64.
        top_k: number of experts chosen per token.
        renormalize: whether a token's top-k weights are divided by their sum.
    """

    rows: int
    experts: int
    slots: int
    top_k: int
    renormalize: bool


class Router(NamedTuple):
    """The routing inputs of a kernel that routes tokens before its own work.

    Attributes:
        logits: router logits, [tokens, experts], rows contiguous.
        scaling: factor by which the top-k weights are multiplied.
        routing: the compile-time constants.
    """

    logits: Tensor
    scaling: float
    routing: Routing


def routing_for(tokens: int, slots: int, num_experts: int, top_k: int, renormalize: bool) -> Routing:
    """Returns the constants for a workgroup that routes this many tokens at once."""
    return Routing(power_of_two(tokens), padded_experts(num_experts), slots, top_k, renormalize)


def padded_experts(num_experts: int) -> int:
    """Returns the number of experts, padded to a power of two and to at least the 64 lanes of a wave."""
    return max(64, power_of_two(num_experts))


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least ``count``."""
    return max(1, 1 << (count - 1).bit_length())


def room_for_choice(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Allocates top-k weights, float32, and top-k ids, int32, both ``[tokens, top_k]``, uninitialised."""
    shape = (len(logits), top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def choose(logits: Tensor, top_k: int, renormalize: bool, scaling_factor: float) -> tuple[Tensor, Tensor]:
    """Routes tokens in a separate launch. Returns the top-k weights and ids of `moe_topk` with softmax, without a correction bias
    and without expert groups."""
    tokens, num_experts = logits.shape
    logits = rows(logits)
    weights, ids = room_for_choice(logits, top_k)
    at_once = max(1, min(16, _ELEMENTS // power_of_two(num_experts)))
    routing = routing_for(min(tokens, at_once), power_of_two(top_k), num_experts, top_k, renormalize)
    if tokens:
        device.choose_kernel[(-(-tokens // routing.rows),)](
            logits, logits.stride(0), tokens, num_experts, scaling_factor, ids, weights, routing=routing, num_warps=4
        )
    return weights, ids

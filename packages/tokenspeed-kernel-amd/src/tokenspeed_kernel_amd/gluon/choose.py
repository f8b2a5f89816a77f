"""Chooses the experts of tokens: compile-time constants of kernels, and a separate launch for many tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._rows import rows
from tokenspeed_kernel_base.discovery import DeviceModule

device = DeviceModule(__name__ + "_device")

MAX_EXPERTS = 1024  # the most experts whose logits, for one token, a wave has in registers
_ELEMENTS = 4096  # logits of a program


class Routing(NamedTuple):
    """How experts are chosen. Known to the compiler.

    Attributes:
        rows: how many tokens' experts are chosen at once, a power of two.
        experts: number of experts whose logits a token has, padded to a power of two.
        slots: number of slots per token, padded to a power of two. In a GEMM that also routes, rows times slots is 64.
        top_k: slots of a token.
        renormalize: whether the weights of a token are divided by their sum.
    """

    rows: int
    experts: int
    slots: int
    top_k: int
    renormalize: bool


class Router(NamedTuple):
    """The inputs from which another kernel chooses experts, before its own work.

    Attributes:
        logits: [tokens, experts], rows contiguous.
        scaling: factor by which the weights are multiplied.
        routing: the rule by which experts are chosen.
    """

    logits: Tensor
    scaling: float
    routing: Routing


def routing_for(tokens: int, slots: int, num_experts: int, top_k: int, renormalize: bool) -> Routing:
    """The constants for choosing the experts of this many tokens at once."""
    return Routing(power_of_two(tokens), padded_experts(num_experts), slots, top_k, renormalize)


def padded_experts(num_experts: int) -> int:
    """Experts of a token, padded to a power of two and to the lanes of a wave."""
    return max(64, power_of_two(num_experts))


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return max(1, 1 << (count - 1).bit_length())


def room_for_choice(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns uninitialised weights, float32, and ids, int32, both ``[tokens, top_k]``."""
    shape = (len(logits), top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def choose(logits: Tensor, top_k: int, renormalize: bool, scaling_factor: float) -> tuple[Tensor, Tensor]:
    """Returns the weights and the ids that `moe_topk` gives with softmax, without a correction bias and groups."""
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

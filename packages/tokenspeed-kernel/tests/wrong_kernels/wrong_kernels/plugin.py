"""Declares and registers the kernels. Each wrong kernel has the fault in its name, and is otherwise declared correctly."""

import torch

from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.traits import between

FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
ATTENTION = {"sliding_window": any, "sinks": any, "logit_cap": any, "return_lse": any}


def _prefill(name: str, **declared) -> None:
    settings = {"signatures": format_signatures(("q", "k", "v"), "dense", FLOATS), "traits": ATTENTION, "priority": 1, **declared}
    register_kernel("attention", "mha_prefill", name=name, solution="sample", **settings)(f"wrong_kernels.attention:{name}")


def _decode(name: str) -> None:
    register_kernel(
        "attention",
        "mha_decode_with_kvcache",
        name=name,
        solution="sample",
        signatures=format_signatures(("q", "k_cache", "v_cache"), "dense", FLOATS),
        traits={**ATTENTION, "multi_query": any},
        priority=1,
    )(f"wrong_kernels.attention:{name}")


def _norm(name: str, tags=()) -> None:
    register_kernel(
        "norm",
        "rmsnorm",
        name=name,
        solution="sample",
        signatures=format_signatures("x", "dense", FLOATS),
        traits={"residual": any},
        tags=tags,
        priority=1,
    )(f"wrong_kernels.norm:{name}")


def register() -> None:
    _prefill("wrong_mask_edge")
    _prefill("window_wraps")
    _norm("ignored_out")
    _norm("ignored_eps")
    _prefill("hidden_sync")
    _norm("mutated_input")
    _norm("not_deterministic", tags={"determinism"})
    _prefill("lies_about_head_dim", traits={**ATTENTION, "head_dim": between(1, 320)})
    _decode("nan_on_empty")
    _prefill("wrong_lse_base")
    _prefill("wrong_sink")
    _decode("reads_past_page_table")


def register_right() -> None:
    _prefill("right_prefill", traits={**ATTENTION, "head_dim": between(1, 320)})
    _decode("right_decode")
    _norm("right_rmsnorm", tags={"determinism", "batch_invariant"})

"""Tests `tokenspeed_kernel_base.names`: suggestions for misspelled names."""

from __future__ import annotations

import pytest

from tokenspeed_kernel_base.names import did_you_mean, nearest

KERNELS = ("triton_mm", "triton_rmsnorm", "reference_mm", "mha_prefill", "moe_dispatch", "silu_and_mul", "store_kv_cache")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("triton_rmsnrom", "triton_rmsnorm"),  # two letters swapped
        ("triton_nm", "triton_mm"),
        ("MHA_Prefill", "mha_prefill"),
        ("mha", "mha_prefill"),  # some words of a name, or its words in another order
        ("silu_mul", "silu_and_mul"),
        ("kv_store", "store_kv_cache"),
        ("mha_prefill_fast", "mha_prefill"),
        ("nosuch", None),
        ("reference_nosuch", None),  # the common prefix is no longer than the rest, which differs
        ("triton_foo", None),
        ("m", None),
        ("", None),
        ("?", None),
    ],
)
def test_only_near_names_are_suggested(name: str, near: str | None) -> None:
    assert nearest(name, KERNELS) == near
    assert did_you_mean(name, KERNELS) == (f"; did you mean {near}?" if near else "")


def test_the_nearest_is_suggested_and_of_equally_near_ones_the_first() -> None:
    assert nearest("head_dims", ["heads_dim", "head_dim"]) == "head_dim"
    assert nearest("cat", ["bat", "rat"]) == "bat"
    assert nearest("q", ["x"]) is None
    assert nearest("anything", []) is None

"""Tests which kernel is selected for every kind of MoE layer: this package's kernel, the portable kernel, or none. On a device, the
layers that this package supports are also run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

import tokenspeed_kernel
import tokenspeed_kernel_nvidia
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.selection import NoKernelFoundError
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import MAX_EXPERTS, MAX_PAIRS, MAX_TOP_K, max_k

from .experts import GPT_OSS, RandomLayer, compare

OURS = "cutedsl_moe_apply_mxfp4"
PLAIN: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 96}
_SWIGLU = [{}, {"limit": 7.0}, {"alpha": 1.702, "beta": 1.0}, {"alpha": 1.702, "limit": 7.0, "beta": 1.0}]


def _supported() -> Iterator[dict[str, Any]]:
    """Yields changes of `PLAIN` that this package supports."""
    yield from ({"top_k": top_k} for top_k in range(1, MAX_TOP_K + 1))
    yield from ({"num_experts": experts} for experts in (16, 33, 60, 64, 128, 160, 256, MAX_EXPERTS))
    yield {"num_experts": 1, "top_k": 1}
    yield {"exact_activations": True}
    sizes = (32, 96, 160, 704, 2880, 4064)
    yield from ({"hidden_size": hidden, "intermediate_size": between} for hidden, between in itertools.product(sizes, sizes))
    yield from ({"hidden_size": hidden, "intermediate_size": 64} for hidden in (4096, 7168))
    for swiglu, bias, interleaved, dtype in itertools.product(
        _SWIGLU, (False, True), (False, True), (torch.bfloat16, torch.float16)
    ):
        yield {**swiglu, "bias": bias, "w13_interleaved": interleaved, "dtype": dtype}


SUPPORTED = list(_supported())
# Changes of `PLAIN` that only the portable kernel supports.
PORTABLE: list[dict[str, Any]] = [
    {"top_k": MAX_TOP_K + 1, "num_experts": 16},
    {"num_experts": MAX_EXPERTS + 1},
    {"hidden_size": max_k() + 32},
    {"intermediate_size": max_k() + 32},
    {"dtype": torch.float32},
    {"activation_dtype": "mxfp4"},
    {"weight_format": "dense"},
    {"weight_format": "dense", "hidden_size": 48, "intermediate_size": 2896},
    {"weight_format": "fp8_block", "hidden_size": 2880, "intermediate_size": 1536},
    {"weight_format": "fp8_block", "activation_dtype": "fp8"},
    {"weight_format": "dense", "activation_dtype": "fp8"},
]
# Changes of `PLAIN` that no kernel supports, because blocks of 32 elements share a scale.
REFUSED = [
    {"hidden_size": 2896},
    {"intermediate_size": 48},
    {"weight_format": "dense", "activation_dtype": "mxfp4", "hidden_size": 80},
]


def _plan(solution: str | None, **changes: Any) -> MoEPlan:
    facts = {"weight_format": "mxfp4", **PLAIN, **changes}
    return tokenspeed_kernel.moe_apply.plan(**facts, platform=named_platform("sm_90"), solution=solution)


@pytest.mark.usefixtures("registered")
def test_supported_layers() -> None:
    for changes in SUPPORTED:
        for solution in (None, "cutedsl"):
            assert _plan(solution, **changes).kernel == OURS, changes
            assert _plan(solution, activation_dtype="fp8", **changes).kernel == OURS + "_fp8", changes


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("changes", PORTABLE, ids=str)
def test_layers_that_go_to_the_portable_kernel(changes: dict[str, Any]) -> None:
    with pytest.raises(NoKernelFoundError) as refused:
        _plan("cutedsl", **changes)
    assert refused.value.explanation is not None
    reasons = {v.spec.name: v.reason for v in refused.value.explanation.verdicts if v.spec.solution == "cutedsl"}
    assert set(reasons) == {OURS, OURS + "_fp8"}
    assert all(reasons.values())
    pytest.importorskip("triton")
    assert _plan(None, **changes).kernel.startswith("triton_moe_apply")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_sizes_that_are_no_multiple_of_32_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"size must be a multiple of 32, .*is mxfp4"):
        _plan(None, **changes)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("tokens", [0, 1, 3, 500])
def test_ids_below_zero_and_any_number_of_tokens(tokens: int) -> None:
    layer = RandomLayer(torch.device("cpu"), 8, 2, 64, 96, **GPT_OSS)
    with use_platform(named_platform("sm_90")):
        plan = _plan("cutedsl", **GPT_OSS)
        weights = tokenspeed_kernel.moe_apply.prepare(layer.given, plan)
        x, topk_weights, ids = layer.tokens(tokens)
        ids[ids % 3 == 0] = -1
        explained = tokenspeed_kernel.moe_apply.explain(x, weights, topk_weights, ids, plan)
    assert explained.chosen is not None
    assert explained.chosen.name == OURS
    assert "at most 2^-21 of the row's amax" in str(explained)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("spread", [False, True])
def test_fp8_activations_at_every_number_of_tokens(spread: bool) -> None:
    """Tests that the plan's kernel is selected for `moe_apply`, and that `moe_topk_apply` calls it through its parts. ``spread``:
    float8_e5m2 does not represent some weights exactly."""
    layer = RandomLayer(torch.device("cpu"), 8, 2, 64, 96, activation_dtype="fp8", **GPT_OSS)
    with use_platform(named_platform("sm_90")):
        plan = _plan(None, activation_dtype="fp8", **GPT_OSS)
        if spread:
            layer.spread_scales([1])
        weights = tokenspeed_kernel.moe_apply.prepare(layer.given, plan)
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192):
            x, topk_weights, ids = layer.tokens(tokens)
            chosen = tokenspeed_kernel.moe_apply.explain(x, weights, topk_weights, ids, plan).chosen
            assert chosen is not None
            assert chosen.name == OURS + "_fp8"
            composed = tokenspeed_kernel.moe_topk_apply.explain(x, torch.zeros(tokens, 8), weights, plan).chosen
            assert composed is not None
            assert composed.name == "composed_moe_topk_apply"


# -- on the device -------------------------------------------------------------------------------------------------------------


class PublicLayer(RandomLayer):
    """A layer that is planned, prepared and run with this package's functions alone, without tokenspeed-kernel."""

    def prepare(self) -> None:
        decided = ("activation", "kernel", "weight_layout")
        facts = {field.name: getattr(self.plan, field.name) for field in fields(self.plan) if field.name not in decided}
        self.plan = tokenspeed_kernel_nvidia.moe_apply.plan(**facts, device=self.device)
        self.prepared = tokenspeed_kernel_nvidia.moe_apply.prepare(self.given, self.plan)

    def apply(self, *arguments: Any) -> torch.Tensor:  # type: ignore[override]
        result: torch.Tensor = tokenspeed_kernel_nvidia.moe_apply(*arguments)
        return result


def _public(device: torch.device, **changes: Any) -> PublicLayer:
    options = {**PLAIN, **changes}
    sizes = [options.pop(name) for name in PLAIN]
    return PublicLayer(device, *sizes, **options)


@pytest.mark.parametrize("tokens", [1, 5, MAX_PAIRS])
def test_it_is_exact_where_it_must_be(sm90: torch.device, tokens: int) -> None:
    layer = _public(sm90, exact_activations=True)
    x, weights, ids = layer.outlier_tokens(tokens, 2.0**100)
    layer.check(x, weights, ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 60, 600, 4000])
def test_small_elements_beside_outliers(sm90: torch.device, tokens: int, dtype: torch.dtype) -> None:
    """Tests outliers in every third token, and in the activations of half of the experts. The weights of the outliers are zero."""
    layer = _public(sm90, num_experts=64, top_k=4, bias=True, dtype=dtype)
    assert layer.given.w13_weight_bias is not None
    layer.given.w13_weight_bias[:32, [0, 96]] = 2.0**11
    layer.given.w2_weight[..., 0] &= 0xF0
    x, weights, ids = layer.outlier_tokens(tokens, 2.0**20 if dtype == torch.bfloat16 else 2.0**15)
    plain = torch.arange(tokens) % 3 != 0
    x[plain] = torch.randn_like(x[plain])
    call = x, weights, ids
    layer.check(*call)
    first = layer.run(*call)
    assert all(torch.equal(layer.run(*call), first) for _ in range(20))


@pytest.mark.parametrize("tokens", [1, 5, MAX_PAIRS])
def test_activations_beyond_float16(sm90: torch.device, tokens: int) -> None:
    layer = _public(sm90, dtype=torch.float16)
    layer.check(*layer.wide_tokens(tokens))


@pytest.mark.parametrize("changes", SUPPORTED, ids=str)
def test_it_is_right(sm90: torch.device, changes: dict[str, Any]) -> None:
    """Tests calls with few and with many tokens, with skipped slots, and with experts that have no tokens."""
    layer = _public(sm90, **changes)
    for tokens in (1, 5, MAX_PAIRS // layer.plan.top_k + 3):  # the last number of tokens is too large for the streaming kernel
        x, weights, ids = layer.tokens(tokens)
        layer.check(x, weights, ids)
        ids[ids % 3 == 1] = -1
        weights[ids < 0] = torch.nan
        compare(layer.run(x, weights, ids), layer.wanted(x, weights, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp8_activations_of_any_number_of_tokens(sm90: torch.device, dtype: torch.dtype) -> None:
    """With these numbers of tokens, the layer uses the streaming kernel, then 16-bit MMAs, then fp8 MMAs."""
    layer = _public(sm90, hidden_size=192, activation_dtype="fp8", dtype=dtype, bias=True)
    for tokens in (1, 5, 32, 33, MAX_PAIRS):
        x, weights, ids = layer.tokens(tokens)
        ids[ids % 3 == 1] = -1
        ids[0, 0] = 2
        wanted = layer.wanted(x, weights.nan_to_num(), ids)
        weights[ids < 0] = torch.nan
        assert (layer.run(x, weights, ids).float() - wanted).norm() <= 2e-2 * wanted.norm()

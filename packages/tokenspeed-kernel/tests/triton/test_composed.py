"""Tests fused kernels of composed operators beyond the shared cases: in-place outputs, consecutive calls, and the choice between
the fused kernel and the composed kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.workspace import keeper

DEVICE = default_device()
FUSED = {"rmsnorm_moe_topk": "triton_rmsnorm_moe_topk", "rmsnorm_qkv_rope": "triton_rmsnorm_qkv_rope_64"}


def draw(mode: str, seed: int = 0) -> dict[str, Any]:
    """Makes the random arguments of a small call with a residual."""
    named = {"rmsnorm_moe_topk": "gpt-oss-120b decode 1", "rmsnorm_qkv_rope": "gpt-oss-120b heads, narrow, decode 4 with cache"}
    op = get_operator(mode)
    made = next(c for c in op.all_cases() if c.name == named[mode]).make
    # In float32, rounding does not change which experts are selected.
    tokens = {"rmsnorm_moe_topk": 5, "rmsnorm_qkv_rope": 2}[mode]
    return op.complete(made.vary(tokens=tokens, dtype=torch.float32)(Draw(DEVICE, seed)))  # type: ignore[attr-defined]


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def run(mode: str, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    return getattr(tk, mode)(**arguments, override=FUSED[mode])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["residual", "x"])
@pytest.mark.parametrize("mode", FUSED)
def test_the_sum_may_overwrite_its_operands(mode: str, target: str) -> None:
    arguments = draw(mode)
    wanted = run(mode, copied(arguments))
    given = copied(arguments)
    got = run(mode, {**given, "residual_out": given[target]})
    assert got[-1] is given[target]
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", FUSED)
def test_calls_one_after_another_do_not_disturb_each_other(mode: str) -> None:
    """Successive calls must give correct results, and leave the workspace's counters at zero."""
    for seed in range(3):
        arguments = draw(mode, seed=seed)
        got = run(mode, copied(arguments))
        wanted = getattr(tk, mode)(**copied(arguments), solution="reference")
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    index = torch.device(DEVICE).index or 0 if torch.device(DEVICE).type == "cuda" else -1
    stream = torch.cuda.current_stream().cuda_stream if index >= 0 else 0
    assert not keeper.get(index, stream, 0, 1).counters.any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", FUSED)
def test_weights_in_another_order(mode: str) -> None:
    """Stores the weights with the other axis contiguous. The results must be bitwise equal."""
    arguments = draw(mode)
    name = "router_weight" if mode == "rmsnorm_moe_topk" else "qkv_weight"
    wanted = run(mode, copied(arguments))
    transposed = {**copied(arguments), name: arguments[name].contiguous()}
    assert transposed[name].stride() != arguments[name].stride()
    for one, other in zip(run(mode, transposed), wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("mode", "tokens", "chosen"),
    [
        ("rmsnorm_moe_topk", 16, "triton_rmsnorm_moe_topk"),
        ("rmsnorm_moe_topk", 17, "composed_rmsnorm_moe_topk"),
        ("rmsnorm_qkv_rope", 2, "composed_rmsnorm_qkv_rope"),  # the fused kernel is not faster here
    ],
)
def test_many_tokens_are_left_to_the_parts(mode: str, tokens: int, chosen: str) -> None:
    arguments = draw(mode)
    longer = {
        name: torch.cat([value] * 9)[:tokens] if isinstance(value, Tensor) and name in ("x", "residual", "positions") else value
        for name, value in arguments.items()
    }
    if mode == "rmsnorm_qkv_rope":
        longer["slot_mapping"] = torch.arange(tokens, device=DEVICE)
    found = getattr(tk, mode).explain(**longer).chosen
    assert found is not None
    assert found.name == chosen


@pytest.mark.parametrize(
    ("tokens", "dtype", "chosen"),
    [
        (1, torch.bfloat16, "triton_rmsnorm_qkv_rope_64_amd"),
        (2, torch.bfloat16, "composed_rmsnorm_qkv_rope"),
        (1, torch.float32, "composed_rmsnorm_qkv_rope"),
    ],
)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_one_token_takes_one_launch_on_amd(arch: str, tokens: int, dtype: torch.dtype, chosen: str) -> None:
    op = get_operator("rmsnorm_qkv_rope")
    made = next(c for c in op.all_cases() if c.name == "gpt-oss-120b heads, narrow, decode 4 with cache").make
    arguments = made.vary(tokens=tokens, dtype=dtype)(Draw(torch.device("cpu"), 0))  # type: ignore[attr-defined]
    with use_platform(named_platform(arch)):
        found = tk.rmsnorm_qkv_rope.explain(**op.complete(arguments)).chosen
    assert found is not None
    assert found.name == chosen

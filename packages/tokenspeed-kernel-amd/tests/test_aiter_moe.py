"""Tests the adapter to AITER's MoE kernel. The adapter has not been run on hardware; ``test_aiter`` explains the stand-in."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.moe.moe_apply import _inputs
from tokenspeed_kernel_base.spec import KernelSpec, Priority

from . import aiter_signatures, test_aiter

aiter, specs = test_aiter.aiter, test_aiter.specs  # fixtures

NAME = "aiter_moe_apply_dense"
ACTIVATION, QUANT = SimpleNamespace(Silu=object(), Swiglu=object()), SimpleNamespace(No=object(), per_1x32=object())
# The parameters that the adapter passes.
PASSED = {"hidden_states", "w1", "w2", "topk_weight", "topk_ids", "expert_mask", "activation", "quant_type"}


def shuffle_weight(x: Tensor, layout: tuple[int, int] = (16, 16)) -> Tensor:
    """Shuffles tiles of 16 rows x 64 bytes in chunks of 16 bytes, as ``aiter.ops.shuffle.shuffle_weight`` does."""
    assert layout == (16, 16)
    assert x.is_contiguous()
    piece = 16 // x.element_size()
    tiles = x.unflatten(2, (-1, 32 // piece, piece)).unflatten(1, (-1, 16))  # [expert, tile, row, step, piece, element]
    return tiles.permute(0, 1, 3, 4, 2, 5).reshape(x.shape)


def unshuffled(x: Tensor) -> Tensor:
    piece = 16 // x.element_size()
    tiles = x.reshape(x.shape[0], x.shape[1] // 16, x.shape[2] // 32, 32 // piece, 16, piece)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(x.shape)


def fused_moe(*arguments: Any, **named: Any) -> Tensor:
    """Computes AITER's documented result: gate rows come before up rows, the activation is SiLU, and masked experts are on other
    ranks."""
    given = aiter_signatures.bind("aiter.fused_moe.fused_moe", *arguments, **named).arguments
    assert set(given) == PASSED
    assert given["activation"] is ACTIVATION.Silu
    assert given["quant_type"] is QUANT.No
    x, ids, scale, mask = (given[name] for name in ("hidden_states", "topk_ids", "topk_weight", "expert_mask"))
    w1, w2 = unshuffled(given["w1"]).float(), unshuffled(given["w2"]).float()
    assert x.is_contiguous()
    assert len(x)
    assert ids.dtype == torch.int32
    assert scale.dtype == torch.float32
    assert mask.dtype == torch.int32
    assert mask.tolist() == [1] * len(w1) + [0]
    assert (ids[:, -1] == len(w1)).all(), "AITER takes the last top-k slot for one without an expert"
    assert int(ids.min()) >= 0
    assert int(ids.max()) < len(mask)
    result = torch.zeros(x.shape)
    for token, slot in (ids < len(w1)).nonzero().tolist():
        expert = int(ids[token, slot])
        gate, up = (w1[expert] @ x[token].float()).chunk(2)
        between = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
        result[token] += scale[token, slot] * (w2[expert] @ between)
    return result.to(x.dtype)


@pytest.fixture
def experts(aiter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the stand-in with MoE functions."""
    package = sys.modules["aiter"]
    monkeypatch.setattr(package, "ActivationType", ACTIVATION, raising=False)
    monkeypatch.setattr(package, "QuantType", QUANT, raising=False)
    for name, function in (("aiter.fused_moe", fused_moe), ("aiter.ops.shuffle", shuffle_weight)):
        module = ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)


def cases() -> list[Case]:
    interleaved: dict[str, Any] = {"w13_interleaved": True}
    return [
        Case("bfloat16", _inputs(9, 4, 2, 128, 256)),
        Case("interleaved", _inputs(5, 6, 3, 256, 128, **interleaved)),
        Case("experts of other ranks", _inputs(12, 3, 2, 128, 128, of=9)),
        Case("no tokens", _inputs(0, 4, 2, 128, 128)),
    ]


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(specs: dict[str, KernelSpec], case: Case) -> None:
    verification = verify_case(specs[NAME], case, "cpu")
    assert verification.status is Status.PASSED, verification


@pytest.mark.usefixtures("experts")
def test_what_is_not_served(specs: dict[str, KernelSpec]) -> None:
    """Plans with unsupported options raise an error. A call with ``out`` selects AITER's kernel too."""
    sizes: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 128, "device": "cpu"}
    assert tokenspeed_kernel.moe_apply.plan(**sizes, override=NAME).weight_layout == "aiter_dense"
    refused: list[dict[str, Any]] = [
        *({"bias": True}, {"limit": 7.0}, {"alpha": 1.702}, {"weight_format": "mxfp4"}, {"intermediate_size": 96}),
        {"dtype": torch.float16},
    ]
    for options in refused:
        with pytest.raises(tokenspeed_kernel.NoKernelFoundError, match=NAME):
            tokenspeed_kernel.moe_apply.plan(**{**sizes, **options}, solution="aiter")
    arguments = cases()[0].build()
    prepared = get_operator("moe.moe_apply").prepared(get_operator("moe.moe_apply").complete(arguments), specs[NAME])
    wanted = tokenspeed_kernel.moe_apply(**prepared)
    out = torch.empty_like(wanted)
    assert tokenspeed_kernel.moe_apply(**{**prepared, "out": out}) is out
    assert torch.equal(out, wanted)


def test_it_comes_after_the_portable_kernel(specs: dict[str, KernelSpec]) -> None:
    assert Priority.COMPOSED < specs[NAME].priority < Priority.PORTABLE


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_on_the_device(gfx950: torch.device, specs: dict[str, KernelSpec], case: Case) -> None:
    """Runs the cases with AITER itself on a gfx950. This test has not been run yet."""
    test_aiter.need_the_real_one(gfx950)
    assert verify_case(specs[NAME], case, gfx950).status is Status.PASSED

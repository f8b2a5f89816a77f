"""Tests code that plugins of engines share: the kernel of a call, and the receipt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base import served
from tokenspeed_kernel_base.operator import operators
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.served import NotServedError, Receipt, Row, kernel_for, plan_for
from tokenspeed_kernel_base.served_latent import LatentShape, PrefillShape


class Operator:
    """A fake operator whose explanation the test chooses."""

    def __init__(self, chosen: Any = None, cpu: bool = True, error: Exception | None = None) -> None:
        self.__name__ = "rmsnorm"
        self.chosen, self.cpu, self.error = chosen, cpu, error
        self.arguments: dict[str, Any] = {}

    def explain(self, **arguments: Any) -> Any:
        self.arguments = arguments
        if self.error is not None:
            raise self.error
        platform = SimpleNamespace(is_cpu=self.cpu)
        return SimpleNamespace(chosen=self.chosen, request=SimpleNamespace(platform=platform))


def kernel(solution: str = "triton", *tags: str) -> Any:
    return SimpleNamespace(name="a_kernel", solution=solution, tags=frozenset(tags))


def test_the_kernel_of_a_call() -> None:
    operator: Any = Operator(kernel(), cpu=False)
    assert kernel_for(operator, {"eps": 1e-5}).name == "a_kernel"
    assert operator.arguments == {"eps": 1e-5}
    on_a_cpu: Any = Operator(kernel("reference"))
    assert kernel_for(on_a_cpu, {}).name == "a_kernel"


@pytest.mark.parametrize("error", [TypeError("eps must be a float"), ValueError("eps must be a float")])
def test_a_rejected_call_names_the_operator(error: Exception) -> None:
    operator: Any = Operator(error=error)
    with pytest.raises(NotServedError, match="rmsnorm: eps must be a float"):
        kernel_for(operator, {})


@pytest.mark.parametrize("chosen", [kernel("reference"), kernel("triton", "waits")])
def test_kernels_that_wait_are_not_eligible_on_a_gpu(chosen: Any) -> None:
    operator: Any = Operator(chosen, cpu=False)
    with pytest.raises(NotServedError, match="a_kernel waits for the device"):
        kernel_for(operator, {})


def test_no_kernel() -> None:
    operator: Any = Operator()
    with pytest.raises(NotServedError, match="chosen=None"):
        kernel_for(operator, {})


def test_the_plan_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, device = (4, 2, 64, 32), torch.device("cpu")
    assert plan_for(moe_apply, *sizes, device=device, dtype=torch.bfloat16) == moe_apply.plan(
        *sizes, device=device, dtype=torch.bfloat16
    )
    with pytest.raises(NotServedError, match="weight_format"):
        plan_for(moe_apply, *sizes, device=device, dtype=torch.bfloat16, weight_format="int3")
    monkeypatch.setattr(served, "_blocks_graphs", lambda spec, platform: True)
    with pytest.raises(NotServedError, match=r"only .*moe_apply is eligible, and it waits for the device"):
        plan_for(moe_apply, *sizes, device=device, dtype=torch.bfloat16)


def test_receipt() -> None:
    rows = (Row("norms", "RMSNorm", 5, ("a_kernel",)), Row("attention", "window 128", 1, (), "no kernel\n is eligible"))
    receipt = Receipt(rows, "SGLang")
    assert receipt.served("norms")
    assert not receipt.served("attention")
    assert not receipt.served("experts")
    assert str(receipt).splitlines() == [
        "part       layers  kind        runs on",
        "norms      5       RMSNorm     a_kernel",
        "attention  1       window 128  SGLang's own, because no kernel | is eligible",
    ]


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_calls_of_latent_attention_are_valid(cache: torch.dtype) -> None:
    """Each operator accepts the arguments with which the plugins ask for its kernel."""
    found = {op.mode: op.function for op in operators()}
    shape = LatentShape(4, 64, 16, torch.bfloat16, cache, torch.device("cpu"))
    assert shape.scaled is (cache != torch.bfloat16)
    calls = {**shape.calls(16), "mla_prefill": PrefillShape(4, 48, 32, torch.bfloat16, torch.device("cpu")).call()}
    for name, arguments in calls.items():
        assert kernel_for(found[name], arguments).mode == name

"""MoE layers with random weights, for tests of the MoE kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_amd.gfx950.moe.moe_apply import WEIGHTS
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.moe.moe_apply import _inputs, moe_apply
from tokenspeed_kernel_base.ops.moe.moe_topk_apply import _inputs_and_logits
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.platform import cpu_platform

GPT_OSS: dict[str, Any] = {"w13_interleaved": True, "bias": True, "alpha": 1.702, "limit": 7.0, "beta": 1.0}


class RandomLayer:
    """A layer with its canonical weights and its weights in the kernels' layout."""

    def __init__(
        self,
        device: torch.device,
        experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        weight_format: str = "mxfp4",
        **options: Any,
    ) -> None:
        self.plan: MoEPlan = moe_apply.plan(
            experts, top_k, hidden, intermediate, weight_format=weight_format, platform=cpu_platform(),
            override="reference_moe_apply", **options,
        )  # fmt: skip
        self.random = torch.Generator().manual_seed(hidden + intermediate + experts)
        self.device = device
        projections = (*self._projection(2 * intermediate, hidden), *self._projection(hidden, intermediate))
        largest = {"w13_input_scale": 5.0, "w2_input_scale": 30.0} if self.plan.activation_dtype == "fp8_static" else {}
        scales = {name: torch.tensor([value / 448], device=device) for name, value in largest.items()}
        self.given = MoEWeights(*projections, **scales)
        self.prepared = self.given if weight_format == "dense" else WEIGHTS[weight_format].prepare(self.given, self.plan)

    def _projection(self, rows: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        experts, exponent = self.plan.num_experts, 127 + round(torch.tensor(k**-0.5 / 3).log2().item())
        bias = self._normal(experts, rows) * 0.2 if self.plan.bias else None
        if self.plan.weight_format == "dense":
            return (self._normal(experts, rows, k) * k**-0.5).to(self.plan.dtype), None, bias
        if self.plan.weight_format == "fp8_block":
            scale = torch.rand(experts, -(-rows // 128), -(-k // 128), generator=self.random).to(self.device)
            return self._normal(experts, rows, k).to(torch.float8_e4m3fn), (0.5 + scale) * k**-0.5, bias
        codes = self._bytes(0, 256, experts, rows, k // 2)
        scale = self._bytes(exponent - 2, exponent + 3, experts, rows, k // 32)
        return codes, scale, bias

    def _bytes(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random, dtype=torch.uint8).to(self.device)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.device)

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns random x, top-k weights and top-k ids. No token has an expert twice."""
        chosen = torch.rand(count, self.plan.num_experts, generator=self.random).topk(self.plan.top_k).indices
        weights = torch.softmax(self._normal(count, self.plan.top_k), -1)
        return self._normal(count, self.plan.hidden_size).to(self.plan.dtype), weights, chosen.int().to(self.device)

    def wide_tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `tokens` whose activations and per-slot outputs exceed fp16's range, while the results do not."""
        x, weights, ids = self.tokens(count)
        return x * 512, weights / 2**18, ids

    def wanted(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Returns the reference's result, without rounding at the end."""
        result: Tensor = moe_apply.operator.body(x.float(), self.given, weights, ids, self.plan)
        return result


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Returns the norm of the difference divided by the norm of ``wanted``; NaN if either tensor has a NaN."""
    return float((got.float() - wanted).norm() / wanted.norm())


def mxfp4_cases(mode: str = "moe_apply") -> list[Case]:
    """Returns the operator's cases with mxfp4 weights, without the cases that are sized for a GPU."""
    cases = get_operator(f"moe.{mode}").all_cases()
    return [case for case in cases if not case.large and "mxfp4" in case.name and not case.name.startswith("dense")]


# The options of the calls that reach a kernel, by the end of its name. The operators' own cases do not reach most of these kernels.
REACHED: dict[str, dict[str, Any]] = {
    "": {"activation_dtype": "none"},
    **{
        f"_float32_{name}": {"dtype": torch.float32, "activation_dtype": dtype}
        for name, dtype in (("fp8", "fp8"), ("static_fp8", "fp8_static"), ("mxfp4", "mxfp4"))
    },
}


def reaching(mode: str, weight_format: str, kind: str) -> Case:
    """Returns a call of `moe_apply` or `moe_topk_apply` that reaches the kernel whose name ends with ``kind``."""
    make = _inputs if mode == "moe_apply" else _inputs_and_logits
    return Case("few tokens", make(3, 4, 2, 64, 32, weight_format=weight_format, **REACHED[kind]))

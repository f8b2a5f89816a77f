"""MoE layers with random weights, for tests of MoE kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.platform import cpu_platform
from tokenspeed_kernel_nvidia.cutedsl.mxfp4 import weights as mxfp4_weights

GPT_OSS: dict[str, Any] = {"w13_interleaved": True, "bias": True, "alpha": 1.702, "limit": 7.0, "beta": 1.0}


class RandomLayer:
    """A layer with canonical weights and prepared weights. A subclass whose layers are run implements `apply`."""

    def __init__(self, device: torch.device, experts: int, top_k: int, hidden: int, intermediate: int, **options: Any) -> None:
        self.plan: MoEPlan = moe_apply.plan(
            experts, top_k, hidden, intermediate, weight_format="mxfp4", platform=cpu_platform(),
            override="reference_moe_apply", **options,
        )  # fmt: skip
        self.random = torch.Generator(device).manual_seed(hidden + intermediate + experts)
        self.device = device
        self.given = MoEWeights(*self._projection(2 * intermediate, hidden), *self._projection(hidden, intermediate))
        self.prepare()

    def prepare(self) -> None:
        """Prepares the canonical weights. Tests that change the canonical weights call this method again."""
        self.prepared = mxfp4_weights.prepare_weights(self.given, self.plan)

    def spread_scales(self, experts: Any) -> None:
        """Changes a scale in one row of each of these experts. The row's scales are then too far apart for float8_e5m2."""
        scale = self.given.w13_weight_scale
        assert scale is not None
        for expert in experts:
            scale[expert, 3, 0] -= mxfp4_weights.OCTAVES + 5
        self.prepare()

    def pad_rows(self, experts: Any) -> None:
        """Puts blocks of zeros into two rows of each of these experts, some with negative zeros. The scales of these blocks are far
        from the rows' other scales."""
        for expert in experts:
            for codes, scale in (
                (self.given.w13_weight, self.given.w13_weight_scale),
                (self.given.w2_weight, self.given.w2_weight_scale),
            ):
                assert scale is not None
                codes[expert, 1, :16], codes[expert, 2, 16:32], codes[expert, 4] = 0, 0x80, 0
                scale[expert, 1, 0], scale[expert, 2, 1], scale[expert, 4] = 0, 254, 0
        self.prepare()

    def _projection(self, rows: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        experts, exponent = self.plan.num_experts, 127 + round(torch.tensor(k**-0.5 / 3).log2().item())
        codes = self._bytes(0, 256, experts, rows, k // 2)
        scale = self._bytes(exponent - 2, exponent + 3, experts, rows, k // 32)
        return codes, scale, self._normal(experts, rows) * 0.2 if self.plan.bias else None

    def _bytes(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random, device=self.device, dtype=torch.uint8)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.device)

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns random x, topk_weights and topk_ids. The experts of a token are distinct."""
        chosen = torch.rand(count, self.plan.num_experts, generator=self.random, device=self.device).topk(self.plan.top_k).indices
        weights = torch.softmax(self._normal(count, self.plan.top_k), -1)
        return self._normal(count, self.plan.hidden_size).to(self.plan.dtype), weights, chosen.int()

    def wide_tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `tokens` for which activations and the results of top-k slots exceed float16's range, but the sums over the slots
        do not."""
        x, weights, ids = self.tokens(count)
        return x * 512, weights / 2**18, ids

    def outlier_tokens(self, count: int, outlier: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `tokens` whose elements are 1.25, except for an outlier in the first feature. Also sets the weights of this
        feature in w13 to zero."""
        self.given.w13_weight[..., 0] &= 0xF0
        self.prepare()
        x, weights, ids = self.tokens(count)
        x[:], x[:, 0] = 1.25, outlier
        return x, weights, ids

    def apply(self, *arguments: Any, **options: Any) -> Tensor:
        """Calls the function under test, which takes the arguments of `moe_apply` and possibly further options."""
        raise NotImplementedError

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, out: Tensor | None = None, **options: Any) -> Tensor:
        return self.apply(x, self.prepared, weights, ids, self.plan, out, **options)

    def wanted(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = moe_apply.operator.body(x.float(), self.given, weights, ids, self.plan)
        return result

    def check(self, x: Tensor, weights: Tensor, ids: Tensor, **options: Any) -> None:
        compare(self.run(x, weights, ids, **options), self.wanted(x, weights, ids))


def compare(got: Tensor, wanted: Tensor) -> None:
    """Compares results with the expected results. The tolerances cover the rounding of the activation, of each top-k slot's result,
    and of the sum."""
    assert got.shape == wanted.shape
    if not wanted.numel():
        return
    eps, error = torch.finfo(got.dtype).eps, (got.float() - wanted).abs()
    assert not error.isnan().any()
    assert error.max() <= 3 * eps * wanted.abs().max()
    assert error.square().mean().sqrt() <= 0.6 * eps * wanted.square().mean().sqrt()

"""moe_apply by ``aiter.fused_moe.fused_moe`` with mxfp4 weights. Not run on hardware."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenspeed_kernel_amd.aiter.masked_device import with_masked_slot
from tokenspeed_kernel_amd.aiter.package import load
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights

_aiter = load("aiter")
_fused_moe = load("aiter.fused_moe").fused_moe
_shuffle = load("aiter.ops.shuffle")

_GPT_OSS = "aiter_mxfp4_gpt_oss"
_MULTIPLE = 256  # a common multiple of AITER's tile sizes
_ONE = 127  # the scale 1.0 in e8m0
_LANES = 16  # rows of the weight in one shuffled tile


def prepare_gpt_oss(weights: MoEWeights, plan: MoEPlan) -> MoEWeights:
    """Copies the weights to the layout that ``fused_moe`` reads with GateMode.INTERLEAVE.

    Raises:
        ValueError: alpha, limit or beta differs from GPT-OSS's, which are constants in AITER.
    """
    _require(plan, alpha=1.702, limit=7.0, beta=1.0)
    made = _padded(weights, plan)
    arranged = {}
    for name in ("w13_weight", "w2_weight"):
        gated = name == "w13_weight"
        weight, scale = made[name], made[f"{name}_scale"]
        arranged[name] = _shuffle.shuffle_weight_a16w4(weight, _LANES, gated)
        arranged[f"{name}_scale"] = _shuffle.shuffle_scale_a16w4(scale.flatten(0, 1), plan.num_experts, gated)
        arranged[f"{name}_bias"] = made.get(f"{name}_bias")
    return MoEWeights(**arranged, layout=_GPT_OSS)


def prepare_silu(weights: MoEWeights, plan: MoEPlan) -> MoEWeights:
    """Copies the weights to the layout that ``fused_moe`` reads with GateMode.SEPARATED: all gate rows before all up rows.

    Raises:
        ValueError: the plan has a bias, or an activation other than SiLU.
    """
    _require(plan, alpha=1.0, limit=None, beta=0.0, bias=False)
    made = _padded(weights, plan)
    arranged = {}
    for name in ("w13_weight", "w2_weight"):
        arranged[name] = _shuffle.shuffle_weight(made[name], layout=(16, 16))
        arranged[f"{name}_scale"] = _shuffle.shuffle_scale(made[f"{name}_scale"].flatten(0, 1))
        arranged[f"{name}_bias"] = None
    return MoEWeights(**arranged, layout="aiter_mxfp4_silu")


def _require(plan: MoEPlan, **fixed: Any) -> None:
    """Checks the plan's options. The core checks no traits of a kernel that is requested by name."""
    for name, wanted in fixed.items():
        if getattr(plan, name) != wanted:
            raise ValueError(f"plan.{name} must be {wanted} for {plan.kernel}, got {getattr(plan, name)}")


def _padded(weights: MoEWeights, plan: MoEPlan) -> dict[str, Tensor]:
    """Copies weights, scales and biases, all gate rows before all up rows, and pads rows and columns to multiples of 256. Weights
    and biases are padded with 0, scales with 1.0."""
    hidden, features = _up(plan.hidden_size), _up(plan.intermediate_size)
    made = {}
    for name, rows, k in (("w13_weight", features, hidden), ("w2_weight", hidden, features)):
        for part, width, filling in (("", k // 2, 0), ("_scale", k // 32, _ONE), ("_bias", None, 0)):
            tensor = getattr(weights, name + part)
            if tensor is None:
                continue
            if width is None:
                tensor = tensor.float()[..., None]
            if name == "w13_weight":
                tensor = tensor.unflatten(1, (-1, 2)).transpose(1, 2) if plan.w13_interleaved else tensor.unflatten(1, (2, -1))
            columns = 0 if width is None else width - tensor.shape[-1]
            tensor = pad(tensor, (0, columns, 0, rows - tensor.shape[-2]), value=filling)
            if name == "w13_weight":
                tensor = tensor.flatten(1, 2)
            made[name + part] = (tensor[..., 0] if width is None else tensor).contiguous()
    return made


def _up(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def moe_apply(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel_amd.moe_apply`, but quantises activations as the kernel's declaration says.

    The first call of a configuration takes minutes, because AITER compiles its kernel. Later calls do not synchronise with the
    device. The top-k slots of a token are accumulated with atomic additions, so results may differ in the last bits from run to
    run.
    """
    if not topk_ids.numel():  # AITER rejects an empty batch
        return x.new_empty(x.shape) if out is None else out
    w13, w2 = (each.view(_aiter.dtypes.fp4x2) for each in (weights.w13_weight, weights.w2_weight))
    w13.is_shuffled = w2.is_shuffled = True  # type: ignore[attr-defined]
    scales = {"w1_scale": weights.w13_weight_scale, "w2_scale": weights.w2_weight_scale}
    if weights.layout == _GPT_OSS:
        factors, ids, mask = with_masked_slot(topk_weights, topk_ids, plan.num_experts)
        found: Tensor = _fused_moe(
            pad(x, (0, _up(plan.hidden_size) - plan.hidden_size)).contiguous(),
            w13,
            w2,
            factors,
            ids,
            expert_mask=mask,
            activation=_aiter.ActivationType.Swiglu,
            quant_type=_aiter.QuantType.per_1x32,
            bias1=weights.w13_weight_bias,
            bias2=weights.w2_weight_bias,
            gate_mode="interleave",
            **scales,
        )
    else:
        # Some AITER kernels here reject an expert mask. Therefore top-k slots without an expert use expert 0 with weight 0.
        found = _fused_moe(
            pad(x, (0, _up(plan.hidden_size) - plan.hidden_size)).contiguous(),
            w13,
            w2,
            topk_weights.where(topk_ids >= 0, 0.0).contiguous(),
            topk_ids.clamp(min=0),
            activation=_aiter.ActivationType.Silu,
            quant_type=_aiter.QuantType.per_1x32,
            **scales,
        )
    found = found[:, : plan.hidden_size]
    return torch.clone(found, memory_format=torch.contiguous_format) if out is None else out.copy_(found)

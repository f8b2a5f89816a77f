"""The experts function for transformers' ``ExpertsInterface``. transformers routes the tokens of a mixture-of-experts layer, and
`moe_apply` computes the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tokenspeed_kernel_base.served import NotServedError, plan_for
from tokenspeed_kernel_transformers.kernels import OPS

# The number of elements that share a scale in MXFP4.
_BLOCK = 32
# The attribute in which a layer's module stores its `Arranged` weights.
_ATTRIBUTE = "tokenspeed_arranged"


@dataclass
class Arranged:
    """A layer's plan, which names the selected kernel, and the layer's weights in the layout that this kernel reads.

    Attributes:
        plan: the core's `MoEPlan`.
        weights: the core's `MoEWeights`, in the plan's layout.
    """

    plan: Any
    weights: Any


def experts_forward(module: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns the weighted sum over each token's top-k experts.

    Args:
        module: the layer's experts. The first call arranges their weights, unless `arrange` has been called.
        hidden_states: ``[tokens, hidden]``.
        top_k_index: ``[tokens, top_k]``.
        top_k_weights: ``[tokens, top_k]``.

    Returns:
        ``[tokens, hidden]``.
    """
    if torch.is_grad_enabled():
        own: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
        return own
    arranged = getattr(module, _ATTRIBUTE, None)
    if arranged is None or arranged.plan.top_k != top_k_index.shape[1]:
        arranged = arrange(module, top_k_index.shape[1])
    out: Tensor = OPS.moe_apply(hidden_states, arranged.weights, top_k_weights.float(), top_k_index.int(), arranged.plan)
    return out


def arrange(module: torch.nn.Module, top_k: int) -> Arranged:
    """Arranges a layer's weights for the selected kernel. Call `arrange` again after loading other weights.

    If MXFP4 represents dense weights exactly, they are packed as MXFP4. This restores GPT-OSS's MXFP4 checkpoints, which
    transformers dequantises.

    Args:
        module: the layer's experts.
        top_k: number of experts of each token.

    Raises:
        NotServedError: the layer has a feature that `moe_apply` lacks, or no kernel is eligible.
    """
    layer: Any = module
    refused = {
        "experts without a gate": not layer.has_gate,
        # Older releases of transformers lack these two attributes, so it is unknown whether experts are divided among ranks. Any
        # process group then counts as expert parallelism.
        "a norm after each expert": getattr(layer, "has_post_expert_norm", False),
        "experts divided among ranks": getattr(layer, "_is_expert_parallel", torch.distributed.is_initialized()),
        f"weights of {layer.gate_up_proj.dtype}": not layer.gate_up_proj.is_floating_point() or layer.gate_up_proj.itemsize < 2,
        "weights that are not on a device": layer.gate_up_proj.is_meta,
    }
    found = [feature for feature, present in refused.items() if present]
    if found:
        raise NotServedError(f"it does not run {', '.join(found)}")
    parameters = [layer.gate_up_proj, layer.down_proj, *((layer.gate_up_proj_bias, layer.down_proj_bias) if layer.has_bias else ())]
    # In w13 and w2 the out-features come first, as in torch.nn.Linear.
    w13, w2 = (weight.data.mT if layer.is_transposed else weight.data for weight in parameters[:2])
    biases = [bias.data for bias in parameters[2:]] or [None, None]
    options: dict[str, Any] = {"dtype": w13.dtype, "bias": layer.has_bias, **_activation(layer)}
    experts, hidden, intermediate = w2.shape
    of_w13 = _packed(w13)
    of_w2 = None if of_w13 is None else _packed(w2)
    if of_w13 is None or of_w2 is None:
        weights = OPS.MoEWeights(w13.contiguous(), None, biases[0], w2.contiguous(), None, biases[1])
    else:
        options["weight_format"] = "mxfp4"
        weights = OPS.MoEWeights(*of_w13, biases[0], *of_w2, biases[1])
    plan = plan_for(OPS.moe_apply, experts, top_k, hidden, intermediate, device=w13.device, **options)
    arranged = Arranged(plan, OPS.moe_apply.prepare(weights, plan))
    setattr(layer, _ATTRIBUTE, arranged)
    return arranged


def is_experts(module: torch.nn.Module) -> bool:
    """Returns whether a module has the attributes that transformers' ``use_experts_implementation`` adds."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))


def forget(module: torch.nn.Module) -> None:
    """Drops the arranged weights of a layer, if it has any."""
    vars(module).pop(_ATTRIBUTE, None)


def _activation(layer: Any) -> dict[str, Any]:
    """Returns the plan's options for a layer's activation. The options are found by comparing the layer's activation with the
    core's `swiglu` on random values.
    """
    interleaved = not layer.is_concatenated
    candidates = [{"alpha": 1.0, "limit": None, "beta": 0.0}]
    if hasattr(layer, "alpha") and hasattr(layer, "limit"):
        candidates.append({"alpha": float(layer.alpha), "limit": float(layer.limit), "beta": 1.0})
    draw = torch.Generator().manual_seed(1)
    gate_up = torch.randn(4, 16, generator=draw, dtype=torch.float64) * 8
    with torch.no_grad():
        expected = layer._apply_gate(gate_up)
    for candidate in candidates:
        got = OPS.swiglu(gate_up, **candidate, interleaved=interleaved)
        if torch.allclose(got, expected, rtol=1e-6, atol=1e-6):
            return {**candidate, "w13_interleaved": interleaved}
    raise NotServedError("it does not run the layer's activation, which is no SwiGLU")


def _packed(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns a layer's weight packed as MXFP4, ``(values, scales)``; None if MXFP4 does not represent the weight exactly.

    Experts are packed one at a time. So the check needs little memory, and stops at the first expert that MXFP4 does not represent
    exactly.
    """
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32) or weight.shape[2] % _BLOCK:
        return None
    parts = []
    for expert in weight:
        dense = expert.contiguous()
        part = OPS.quantize_mxfp4(dense)
        if not torch.equal(OPS.dequantize_mxfp4(*part, out_dtype=dense.dtype), dense):
            return None
        parts.append(part)
    values, scales = zip(*parts, strict=True)
    return torch.stack(values), torch.stack(scales)

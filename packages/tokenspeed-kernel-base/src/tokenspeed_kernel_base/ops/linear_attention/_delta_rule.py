"""What `gated_delta_rule_prefill` and `gated_delta_rule_decode` share: the recurrence, checks, traits, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tokenspeed_kernel_base.cases import Cost, Draw, nbytes
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.signature import TensorFormat, dense_tensor_format
from tokenspeed_kernel_base.traits import TraitKind
from tokenspeed_kernel_base.variation import Variation, Want

L2NORM_EPS = 1e-6
"""What is added to the sum of squares of a query or key before its root is taken."""


def scale_of(scale: float | None, k_dim: int) -> float:
    """The factor of the outputs that a call asks for."""
    return k_dim**-0.5 if scale is None else scale


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    qk_l2norm: bool,
    scale: float | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Runs the gated delta rule over the tokens of a batch, one after another, in float32 (float64 where q is).

    Args:
        q, k, v, g, beta, A_log, dt_bias, qk_l2norm, scale: as `gated_delta_rule_decode` takes them.
        states: ``[batch, v_heads, k_dim, v_dim]``, before the first token. Not changed.
        keep: whether the states after every token are wanted, rather than those after the last.

    Returns:
        The outputs ``[batch, tokens, v_heads, v_dim]`` in q's dtype; and wide states ``[batch, v_heads, k_dim, v_dim]`` after the
        last token, or ``[batch, tokens, v_heads, k_dim, v_dim]``.
    """
    dtype, dtype_of_outputs = torch.float64 if q.dtype == torch.float64 else torch.float32, q.dtype
    group = v.shape[2] // max(k.shape[2], 1)
    q, k = (x.to(dtype).repeat_interleave(group, dim=2) for x in (q, k))
    if qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS) for x in (q, k))
    q = q * scale_of(scale, q.shape[-1])
    v, g, beta, state = v.to(dtype), g.to(dtype), beta.to(dtype), states.to(dtype)
    if A_log is not None:
        raw = g if dt_bias is None else g + dt_bias.to(dtype)
        rate = A_log.to(dtype).exp()
        g = -(rate.unsqueeze(-1) if g.dim() == 4 else rate) * softplus(raw)
        beta = beta.sigmoid()
    decay = (g if g.dim() == 4 else g.unsqueeze(-1)).exp()
    outputs, kept = [], []
    for t in range(v.shape[1]):
        state = state * decay[:, t].unsqueeze(-1)
        predicted = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        update = (v[:, t] - predicted) * beta[:, t].unsqueeze(-1)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], update)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        if keep:
            kept.append(state)
    stacked = torch.stack(outputs, 1) if outputs else v.clone()
    return stacked.to(dtype_of_outputs), torch.stack(kept, 1) if keep else state


TRAIT_KINDS: dict[str, TraitKind] = {
    "k_dim": int,
    "v_dim": int,
    "gate": ("channel", "head"),
    "raw_gates": bool,
    "dt_bias": bool,
    "qk_l2norm": bool,
}


def traits_of(q: Tensor, v: Tensor, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, qk_l2norm: bool) -> dict[str, object]:
    """What every call asks of a kernel."""
    return {
        "k_dim": q.shape[-1],
        "v_dim": v.shape[-1],
        "gate": "channel" if g.dim() == q.dim() else "head",
        "raw_gates": A_log is not None,
        "dt_bias": dt_bias is not None,
        "qk_l2norm": qk_l2norm,
    }


def intermediates_of(q: Tensor, g: Tensor) -> tuple[TensorFormat, ...]:
    """Returns the formats of the intermediate values that kernels in chunks round to q's dtype before matrix units multiply them.

    Six: the state, the values less what it recalls, the inverse of a chunk's system, the values that are written, the same with
    their decays, and the weights of outputs. Where each channel has a gate, five more: keys and queries with their decays from the
    chunk's beginning, keys with those to its end, and keys and queries with those to each other. None stands out: in bfloat16 the
    inverse, the weights and both kinds of values leave 1.4e-3 to 1.7e-3 of the outputs each, as the outputs' own rounding does.
    """
    return (dense_tensor_format(q.dtype),) * (6 if g.dim() < q.dim() else 11)


def check_operands(
    check: Checker,
    leading: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    """Checks shapes and dtypes of all but slots. ``leading`` names the axes in front of heads."""
    check.tensor("q", q, f"{leading} heads k_dim", FLOATS)
    check.tensor("k", k, f"{leading} heads k_dim", q.dtype)
    check.tensor("v", v, f"{leading} v_heads v_dim", q.dtype)
    check.divides("heads", "v_heads")
    check.require(check["k_dim"] > 0, "q", "of a k_dim > 0", str(list(q.shape)))
    per_channel = g.dim() == q.dim()
    check.tensor("g", g, f"{leading} v_heads{' k_dim' * per_channel}", FLOATS)
    check.tensor("beta", beta, f"{leading} v_heads", FLOATS)
    wide = {torch.float64} if q.dtype == torch.float64 else {torch.float32, torch.bfloat16}
    check.tensor("states", states, "slots v_heads k_dim v_dim", wide)
    check.tensor("A_log", A_log, "v_heads", FLOATS)
    check.require(dt_bias is None or A_log is not None, "dt_bias", "None, because A_log is None", dt_bias)
    check.tensor("dt_bias", dt_bias, f"v_heads{' k_dim' * per_channel}", FLOATS)


def draw_operands(
    draw: Draw,
    leading: tuple[int, ...],
    heads: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    gate: str,
    raw_gates: bool,
    fused: bool,
    unit: bool,
) -> dict[str, Any]:
    """Draws all that describes tokens.

    Args:
        leading: the axes in front of heads.
        gate: ``"head"`` or ``"channel"``.
        raw_gates: with A_log and dt_bias, as a model has them; otherwise log decays and betas.
        fused: q, k and v are slices of one tensor, as a fused projection leaves them.
        unit: keys are of unit length, without which states grow.
    """
    sizes = [heads * k_dim, heads * k_dim, v_heads * v_dim]
    mixed = draw.normal(*leading, sum(sizes), dtype=dtype)
    parts, dims = torch.split(mixed, sizes, -1), ((heads, k_dim), (heads, k_dim), (v_heads, v_dim))
    q, k, v = (part.view(*leading, *dim) for part, dim in zip(parts, dims, strict=True))
    shape = (v_heads, k_dim) if gate == "channel" else (v_heads,)
    if unit:
        k = torch.nn.functional.normalize(k.double(), dim=-1).to(dtype)
    if not fused:
        q, k, v = (x.contiguous() for x in (q, k, v))
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v}
    if raw_gates:
        arguments["g"] = draw.normal(*leading, *shape, dtype=dtype)
        arguments["beta"] = draw.normal(*leading, v_heads, dtype=dtype)
        # As layers are initialised: rates of 1 to 16, and steps of 0.001 to 0.1.
        steps = draw.uniform(*shape, low=-6.9, high=-2.3).exp()
        arguments |= {"A_log": draw.uniform(v_heads, low=1, high=16).log(), "dt_bias": steps.expm1().log()}
    else:
        # From hardly any decay to one that forgets within a few tokens.
        arguments["g"] = -draw.uniform(*leading, *shape, low=-8, high=1).exp()
        arguments["beta"] = draw.uniform(*leading, v_heads)
    return arguments


def captured_operands(variation: Variation, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None) -> dict[str, Tensor]:
    """Gates and keys for a captured call with which states stay bounded; with normally distributed ones they grow."""
    if variation.want is not Want.CAPTURED:
        return {}
    draw = variation.draw
    unit = torch.nn.functional.normalize(draw.normal(*k.shape), dim=-1).to(k.dtype)
    if A_log is not None:
        return {"k": unit}
    gates = -draw.uniform(*g.shape, low=-8, high=1).exp()
    return {"k": unit, "g": gates.to(g.dtype), "beta": draw.uniform(*beta.shape, dtype=beta.dtype)}


def cost_of(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, moved: int) -> Cost:
    """The work of a call: bytes of all operands and of states that are ``moved``. Each token decays the state, multiplies it with k
    and q, and adds an outer product to it."""
    flops = 7.0 * v.numel() * q.shape[-1]
    return Cost(flops=flops, bytes=nbytes(q, k, v, v, *others) + moved)

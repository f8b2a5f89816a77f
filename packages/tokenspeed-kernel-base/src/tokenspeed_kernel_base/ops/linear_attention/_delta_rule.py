"""Code that `gated_delta_rule_prefill` and `gated_delta_rule_decode` share: recurrence, checks, traits, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Cost, Draw, nbytes
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.ops.activation.softplus import softplus
from tokenspeed_kernel_base.signature import TensorFormat, dense_tensor_format
from tokenspeed_kernel_base.traits import TraitKind
from tokenspeed_kernel_base.variation import Variation, Want

L2NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key, before the square root is taken."""


def scale_of(scale: float | None, k_dim: int) -> float:
    """Returns the scale of the outputs: the given one, or by default ``1 / sqrt(k_dim)``."""
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
    """Runs the gated delta rule over the tokens of a batch, one after another, in float32 (float64 for a float64 q).

    Args:
        q, k, v, g, beta, A_log, dt_bias, qk_l2norm, scale: as for `gated_delta_rule_decode`.
        states: ``[batch, v_heads, k_dim, v_dim]``, before the first token. Not modified.
        keep: whether to return the states after every token, rather than after the last one.

    Returns:
        The outputs ``[batch, tokens, v_heads, v_dim]`` in q's dtype; and the unrounded states ``[batch, v_heads, k_dim, v_dim]``
        after the last token. With ``keep``, states after every token, ``[batch, tokens, v_heads, k_dim, v_dim]``.
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
    """Returns the traits that every call of these two operators requires of a kernel."""
    return {
        "k_dim": q.shape[-1],
        "v_dim": v.shape[-1],
        "gate": "channel" if g.dim() == q.dim() else "head",
        "raw_gates": A_log is not None,
        "dt_bias": dt_bias is not None,
        "qk_l2norm": qk_l2norm,
    }


def intermediates_of(q: Tensor, g: Tensor) -> tuple[TensorFormat, ...]:
    """Returns the formats of the intermediates that chunked kernels round to q's dtype for MMAs.

    There are six intermediates: the state, the residual ``v - S.T @ k``, the inverse of a chunk's triangular system, the values
    written to the state, these values times their decays, and the attention weights of the outputs. With a gate for each channel
    there are five more. Keys and queries are multiplied by their decays from the chunk's start, keys by their decays to the chunk's
    end, and keys and queries by their mutual decays. No intermediate dominates the error. In bfloat16 the inverse, the attention
    weights and both kinds of values each cause an error of 1.4e-3 to 1.7e-3 of the outputs, as does the rounding of the outputs
    themselves.
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
    """Checks shapes and dtypes of all arguments except slots. ``leading`` names the axes before heads."""
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
    """Draws the operands of tokens.

    Args:
        leading: the axes before heads.
        gate: ``"head"`` or ``"channel"``.
        raw_gates: whether to draw A_log, dt_bias and raw gates, as in models; otherwise g holds log decays and beta final values.
        fused: whether q, k and v are slices of one tensor, as after a fused projection.
        unit: whether to normalise keys to unit length; with longer keys, states grow.
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
        # As in the initialisation of layers: rates of 1 to 16, and steps of 0.001 to 0.1.
        steps = draw.uniform(*shape, low=-6.9, high=-2.3).exp()
        arguments |= {"A_log": draw.uniform(v_heads, low=1, high=16).log(), "dt_bias": steps.expm1().log()}
    else:
        # From almost no decay to a decay within a few tokens.
        arguments["g"] = -draw.uniform(*leading, *shape, low=-8, high=1).exp()
        arguments["beta"] = draw.uniform(*leading, v_heads)
    return arguments


def captured_operands(variation: Variation, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None) -> dict[str, Tensor]:
    """Draws gates and keys for a captured call such that states stay bounded. Normally distributed gates and keys would make states
    grow.
    """
    if variation.want is not Want.CAPTURED:
        return {}
    draw = variation.draw
    unit = torch.nn.functional.normalize(draw.normal(*k.shape), dim=-1).to(k.dtype)
    if A_log is not None:
        return {"k": unit}
    gates = -draw.uniform(*g.shape, low=-8, high=1).exp()
    return {"k": unit, "g": gates.to(g.dtype), "beta": draw.uniform(*beta.shape, dtype=beta.dtype)}


def cost_of(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, moved: int) -> Cost:
    """Returns the cost of a call. ``moved``: bytes of the states that the call reads and writes.

    For each token the state is decayed, multiplied by k and by q, and updated by an outer product."""
    flops = 7.0 * v.numel() * q.shape[-1]
    return Cost(flops=flops, bytes=nbytes(q, k, v, v, *others) + moved)

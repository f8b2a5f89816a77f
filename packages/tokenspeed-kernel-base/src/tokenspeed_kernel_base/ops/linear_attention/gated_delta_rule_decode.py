"""The gated delta rule for the new tokens of every request (decode)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.linear_attention import _delta_rule as delta_rule
from tokenspeed_kernel_base.ops.state_space.slots import (
    check_decode_slots,
    check_values_slots,
    draw_slots,
    padding_of,
    read_states,
    states_moved,
    vary_decode,
    write_states,
)
from tokenspeed_kernel_base.variation import Variation


@operator(
    "linear_attention",
    "gated_delta_rule_decode",
    formats=("q", "states"),
    traits={**delta_rule.TRAIT_KINDS, "output_slots": bool},
    mutates=("states",),
    varying=("batch",),
    capacity=("slots",),
)
def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    state_slots: Tensor,
    output_slots: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    qk_l2norm: bool = False,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Applies the gated delta rule (GDN, KDA) to one or several new tokens of every request, with states in a cache.

    Each value head has a state ``S``, ``[k_dim, v_dim]``. Each token updates and reads the state::

        S = exp(g) * S                          gate: decay of the state
        S = S + outer(k, beta * (v - S.T @ k))  delta rule: moves S.T @ k towards v by the fraction beta
        out = scale * S.T @ q

    With one ``g`` per head and token the operator computes a gated delta network (Yang, Kautz & Hatamizadeh, 2024,
    arXiv:2412.06464; Qwen3-Next). With one ``g`` per key channel it computes Kimi Delta Attention (Kimi Team, 2025,
    arXiv:2510.26692). Value head h uses query and key head ``h // (v_heads // heads)``. From the first to the last new token of a
    call, the arithmetic and the state are float32 (float64 for a float64 q). Outputs are rounded to q's dtype once. States are
    rounded to the cache's dtype when they are written.

    The page "Calling operators" states the rules for slots under "States of recurrent layers". With output_slots, the state after
    every draft token is kept. The next call's state_slots then select the state of the last accepted token.

    Args:
        q: float16, bfloat16, float32 or float64 ``[batch, tokens, heads, k_dim]``, at least one new token of each request. May be
            strided, like k, v, g and beta.
        k: like q. Should have unit length, unless qk_l2norm normalises it: longer keys make states grow. This is not checked.
        v: q's dtype ``[batch, tokens, v_heads, v_dim]``; heads divides v_heads.
        g: any float dtype ``[batch, tokens, v_heads]``, or ``[batch, tokens, v_heads, k_dim]`` for a gate of each channel: the
            natural logarithm of the decay factor, <= 0. With A_log, g is the raw output of the layer's projection, see A_log.
        beta: any float dtype ``[batch, tokens, v_heads]``, 0 to 1 (up to 2 if a model allows negative eigenvalues).
        states: float32 or bfloat16 (float64 for a float64 q) ``[slots, v_heads, k_dim, v_dim]``. Written to. May be strided: a
            cache ``[slots, v_heads, v_dim, k_dim]``, as in vLLM and fla, is passed as ``states.transpose(-1, -2)``. If k_dim equals
            v_dim, a missing transpose cannot be detected.
        state_slots: int32 ``[batch]``, each less than ``slots``, the length of states: the slot from which each request's state is
            read. If output_slots is None, the new state is written to the same slot. A negative slot reads zeros. Values in host
            memory are checked.
        output_slots: int32 ``[batch, tokens]``, each less than ``slots``: the slot to which the state after each token is written.
            A state whose slot is negative is not written. None: only the state after the last token is written, to the request's
            slot in state_slots. Written slots must be distinct, and no other request may read them. This is checked if state_slots
            and output_slots lie in host memory.
        A_log: any float dtype ``[v_heads]``. With A_log, g and beta are the raw outputs of the layer's projections, and become
            ``-exp(A_log) * softplus(g + dt_bias)`` and ``sigmoid(beta)``.
        dt_bias: any float dtype ``[v_heads]``, or ``[v_heads, k_dim]`` for a gate of each channel; None means 0. Allowed only with
            A_log.
        qk_l2norm: whether queries and keys are divided by ``sqrt(sum(x^2) + 1e-6)`` first.
        scale: multiplies the outputs; None is ``1 / sqrt(k_dim)``.
        out: receives the outputs. It must not overlap an input.

    Returns:
        q's dtype ``[batch, tokens, v_heads, v_dim]``, contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched or written.

    Example:
        The first token stores 3 under a key. The second token decays the state by half and reads it with the same key.

        >>> import torch
        >>> from tokenspeed_kernel import gated_delta_rule_decode
        >>> q = k = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).view(1, 2, 1, 2)
        >>> v, beta = torch.tensor([3.0, 0.0]).view(1, 2, 1, 1), torch.tensor([1.0, 0.0]).view(1, 2, 1)
        >>> g, states = torch.full((1, 2, 1), 0.5).log(), torch.zeros(4, 1, 2, 1)
        >>> gated_delta_rule_decode(q, k, v, g, beta, states, torch.tensor([2], dtype=torch.int32), scale=1.0).flatten()
        tensor([3.0000, 1.5000])
        >>> states[2].flatten()
        tensor([1.5000, 0.0000])

    Safe in CUDA graphs.
    """
    initial = read_states(states, state_slots)
    keep = output_slots is not None
    outputs, after = delta_rule.recur(q, k, v, g, beta, initial, A_log, dt_bias, qk_l2norm, scale, keep)
    if output_slots is None:
        write_states(states, state_slots, after)
    else:
        write_states(states, output_slots.flatten(), after.flatten(0, 1))
    return outputs


@gated_delta_rule_decode.traits
def _(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    output_slots: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    qk_l2norm: bool,
) -> dict[str, object]:
    return {**delta_rule.traits_of(q, v, g, A_log, dt_bias, qk_l2norm), "output_slots": output_slots is not None}


@gated_delta_rule_decode.check
def _(
    check: Checker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    state_slots: Tensor,
    output_slots: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    delta_rule.check_operands(check, "batch tokens", q, k, v, g, beta, states, A_log, dt_bias)
    check_decode_slots(check, "q", q, state_slots, output_slots)


@gated_delta_rule_decode.check_values(host=("state_slots", "output_slots"))
def _(check: Checker, states: Tensor, state_slots: Tensor | None, output_slots: Tensor | None) -> None:
    check_values_slots(check, states, state_slots, output_slots)


@gated_delta_rule_decode.fake
def _(v: Tensor) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@recipe
def _inputs(
    batch: int,
    tokens: int = 1,
    heads: int = 2,
    v_heads: int = 4,
    k_dim: int = 16,
    v_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    gate: str = "head",
    raw_gates: bool = False,
    outputs: bool = False,
    padding: int = 0,
    fused: bool = False,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws arguments with states at random slots. With ``outputs``, output_slots are passed, and some requests read one slot and
    write to another.
    """

    def make(draw: Draw) -> dict[str, Any]:
        unit = not options.get("qk_l2norm", False)
        slots = batch * (tokens if outputs else 1) + 2
        return {
            **delta_rule.draw_operands(draw, (batch, tokens), heads, v_heads, k_dim, v_dim, dtype, gate, raw_gates, fused, unit),
            "states": draw.normal(slots, v_heads, k_dim, v_dim, dtype=state_dtype),
            **draw_slots(draw, batch, slots, tokens if outputs else None, padding),
            **options,
        }

    return make


@gated_delta_rule_decode.cases
def _() -> list[Case]:
    model: dict[str, Any] = {"k_dim": 128, "v_dim": 128, "raw_gates": True, "qk_l2norm": True, "fused": True}
    qwen3_next: dict[str, Any] = {"heads": 16, "v_heads": 32, **model}
    kimi_linear: dict[str, Any] = {"heads": 32, "v_heads": 32, "gate": "channel", **model}
    few: dict[str, Any] = {"heads": 1, "v_heads": 2}
    return [
        Case("one request, float32", _inputs(1, dtype=torch.float32)),
        Case("float64, a gate of each channel", _inputs(2, 3, dtype=torch.float64, state_dtype=torch.float64, gate="channel")),
        Case("odd sizes, float16, the last of 3 requests is padding", _inputs(3, 1, 1, 3, 20, 9, torch.float16, padding=1)),
        Case("4 tokens in a state each, bfloat16 states", _inputs(2, 4, state_dtype=torch.bfloat16, outputs=True)),
        Case("2 heads of qwen3-next, decode 3", _inputs(3, **{**qwen3_next, **few})),
        Case("2 heads of kimi linear, 3 tokens in a state each", _inputs(2, 3, **{**kimi_linear, **few}, outputs=True, padding=1)),
        Case("raw gates without a bias, scale 0.5", _inputs(2, raw_gates=True, dt_bias=None, scale=0.5, gate="channel")),
        Case("no requests", _inputs(0)),
        *(
            Case(f"{name} decode {batch}", _inputs(batch, **sizes), large=True)
            for name, sizes in (("qwen3-next", qwen3_next), ("kimi linear", kimi_linear))
            for batch in (1, 16, 64, 256)
        ),
        Case("qwen3-next decode 64, 4 tokens in a state each", _inputs(64, 4, **qwen3_next, outputs=True), large=True),
        Case("qwen3-next decode 256, bfloat16 states", _inputs(256, **qwen3_next, state_dtype=torch.bfloat16), large=True),
    ]


@gated_delta_rule_decode.vary
def _(
    variation: Variation,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    state_slots: Tensor,
    output_slots: Tensor | None,
    A_log: Tensor | None,
) -> dict[str, Tensor]:
    drawn = delta_rule.captured_operands(variation, k, g, beta, A_log)
    return {**drawn, **vary_decode(variation, states, state_slots, output_slots)}


gated_delta_rule_decode.work(padding_of)


@gated_delta_rule_decode.cost
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    state_slots: Tensor,
    output_slots: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> Cost:
    others = (g, beta, A_log, dt_bias, state_slots, output_slots)
    return delta_rule.cost_of(q, k, v, *others, moved=states_moved(states, state_slots, output_slots))

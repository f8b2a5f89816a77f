"""The gated delta rule for packed sequences (prefill)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention._checks import check_offsets, check_values_offsets
from tokenspeed_kernel_base.ops.linear_attention import _delta_rule as delta_rule
from tokenspeed_kernel_base.ops.state_space.slots import (
    check_prefill_slots,
    check_values_slots,
    draw_prefill,
    prefill_read,
    prefill_states_moved,
    read_initial_states,
    vary_prefill,
    write_states,
)
from tokenspeed_kernel_base.signature import TensorFormat
from tokenspeed_kernel_base.variation import Variation


@operator(
    "linear_attention",
    "gated_delta_rule_prefill",
    formats=("q", "states"),
    traits={**delta_rule.TRAIT_KINDS, "has_initial_state": bool},
    mutates=("states",),
    varying=("batch", "tokens"),
    capacity=("slots",),
)
def gated_delta_rule_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    cu_seqlens: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    qk_l2norm: bool = False,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Applies the gated delta rule (GDN, KDA) to packed sequences, or to chunks of sequences that continue a state.

    Applies the recurrence of `gated_delta_rule_decode` to all tokens of each sequence, in order. The docstring of
    `gated_delta_rule_decode` explains the gates. The state after the last token is written to the request's slot. Kernels process
    chunks of tokens (Yang, Wang, Zhang, Shen & Kim, 2024, arXiv:2406.06484; with gates Yang, Kautz & Hatamizadeh, 2024,
    arXiv:2412.06464, and Kimi Team, 2025, arXiv:2510.26692). The values that a chunk writes to the state solve a unit triangular
    system. MMA operands may be rounded to q's dtype.

    Args:
        q: float16, bfloat16, float32 or float64 ``[tokens, heads, k_dim]``. May be strided, like k, v, g and beta.
        k: like q. Should have unit length, unless qk_l2norm normalises it: longer keys make states grow. This is not checked.
        v: q's dtype ``[tokens, v_heads, v_dim]``; heads divides v_heads.
        g: any float dtype ``[tokens, v_heads]``, or ``[tokens, v_heads, k_dim]`` for a gate of each channel: the natural
            logarithm of the decay factor, <= 0 and finite. With A_log, g is the raw output of the layer's projection.
        beta: any float dtype ``[tokens, v_heads]``, 0 to 1 (up to 2 if a model allows negative eigenvalues).
        states: float32 or bfloat16 (float64 for a float64 q) ``[slots, v_heads, k_dim, v_dim]``. Written to. May be strided: a
            cache ``[slots, v_heads, v_dim, k_dim]``, as in vLLM and fla, is passed as ``states.transpose(-1, -2)``. If k_dim equals
            v_dim, a missing transpose cannot be detected.
        cu_seqlens: int32 ``[batch + 1]``, the offsets at which sequences begin, then the number of tokens: ``[0, 3, 3, 8]`` means
            sequences of 3, 0 and 5 tokens. Non-decreasing, from 0 to tokens. Values in host memory are checked.
        state_slots: int32 ``[batch]``, distinct slots. A request's slot holds its initial state and receives the state after its
            last token. Negative: the request starts from zeros, and its state is not written. Values in host memory are checked.
        has_initial_state: bool ``[batch]``, True for requests that start from the state in their slot. All other requests start
            from zeros. None: all requests start from zeros. A sequence without tokens writes its initial state to its slot.
        A_log: any float dtype ``[v_heads]``. With A_log, g and beta are the raw outputs of the layer's projections, and become
            ``-exp(A_log) * softplus(g + dt_bias)`` and ``sigmoid(beta)``.
        dt_bias: any float dtype ``[v_heads]``, or ``[v_heads, k_dim]`` for a gate of each channel; None means 0. Allowed only with
            A_log.
        qk_l2norm: whether queries and keys are divided by ``sqrt(sum(x^2) + 1e-6)`` first.
        scale: multiplies the outputs; None is ``1 / sqrt(k_dim)``.
        out: receives the outputs. It must not overlap an input.

    Returns:
        q's dtype ``[tokens, v_heads, v_dim]``, contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched or written.

    Example:
        Sequences of 2 tokens and 1 token. The first token of each sequence stores 3 under a key; the second token reads half of it.

        >>> import torch
        >>> from tokenspeed_kernel import gated_delta_rule_prefill
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> q = k = torch.tensor([1.0, 0.0]).expand(3, 1, 2)
        >>> v, beta = torch.tensor([3.0, 0.0, 3.0]).view(3, 1, 1), torch.tensor([1.0, 0.0, 1.0]).view(3, 1)
        >>> g, states = torch.full((3, 1), 0.5).log(), torch.zeros(4, 1, 2, 1)
        >>> gated_delta_rule_prefill(q, k, v, g, beta, states, ints(0, 2, 3), state_slots=ints(3, 1), scale=1.0).flatten()
        tensor([3.0000, 1.5000, 3.0000])
        >>> states[:, 0, 0, 0]
        tensor([0.0000, 3.0000, 0.0000, 1.5000])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads cu_seqlens on the host.
    """
    initial = read_initial_states(states, state_slots, has_initial_state)
    outputs, after = [v[:0]], []
    offsets = cu_seqlens.tolist()
    for sequence, (start, end) in enumerate(pairwise(offsets)):
        of_q, of_k, of_v, of_g, of_beta = (x[start:end].unsqueeze(0) for x in (q, k, v, g, beta))
        first = initial[sequence : sequence + 1]
        output, state = delta_rule.recur(of_q, of_k, of_v, of_g, of_beta, first, A_log, dt_bias, qk_l2norm, scale, False)
        outputs.append(output[0])
        after.append(state)
    if after:
        write_states(states, state_slots, torch.cat(after))
    return torch.cat(outputs)


@gated_delta_rule_prefill.traits
def _(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    has_initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    qk_l2norm: bool,
) -> dict[str, object]:
    return {**delta_rule.traits_of(q, v, g, A_log, dt_bias, qk_l2norm), "has_initial_state": has_initial_state is not None}


@gated_delta_rule_prefill.intermediates
def _(q: Tensor, g: Tensor) -> tuple[TensorFormat, ...]:
    return delta_rule.intermediates_of(q, g)


@gated_delta_rule_prefill.check
def _(
    check: Checker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    cu_seqlens: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    delta_rule.check_operands(check, "tokens", q, k, v, g, beta, states, A_log, dt_bias)
    check_offsets(check, "cu_seqlens", cu_seqlens)
    check_prefill_slots(check, cu_seqlens, state_slots, has_initial_state)


@gated_delta_rule_prefill.check_values(host=("cu_seqlens", "state_slots"))
def _(check: Checker, q: Tensor, states: Tensor, cu_seqlens: Tensor | None, state_slots: Tensor | None) -> None:
    check_values_offsets(check, "cu_seqlens", cu_seqlens, q.shape[0], "q")
    check_values_slots(check, states, state_slots)


@gated_delta_rule_prefill.fake
def _(v: Tensor) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@recipe
def _inputs(
    lengths: Sequence[int],
    heads: int = 2,
    v_heads: int = 4,
    k_dim: int = 32,
    v_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    gate: str = "head",
    raw_gates: bool = False,
    initial: bool = False,
    padding: int = 0,
    fused: bool = False,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws arguments with states at random slots. With ``initial``, some requests start from the state in their slot."""

    def make(draw: Draw) -> dict[str, Any]:
        unit = not options.get("qk_l2norm", False)
        operands = delta_rule.draw_operands(
            draw, (sum(lengths),), heads, v_heads, k_dim, v_dim, dtype, gate, raw_gates, fused, unit
        )
        slots = len(lengths) + 1
        return {
            **operands,
            "states": draw.normal(slots, v_heads, k_dim, v_dim, dtype=state_dtype),
            **draw_prefill(draw, lengths, slots, True if initial else None, padding),
            **options,
        }

    return make


@gated_delta_rule_prefill.cases
def _() -> list[Case]:
    model: dict[str, Any] = {"k_dim": 128, "v_dim": 128, "raw_gates": True, "qk_l2norm": True, "fused": True}
    qwen3_next: dict[str, Any] = {"heads": 16, "v_heads": 32, **model}
    kimi_linear: dict[str, Any] = {"heads": 32, "v_heads": 32, "gate": "channel", **model}
    one: dict[str, Any] = {"heads": 1, "v_heads": 1}
    exact: dict[str, Any] = {"dtype": torch.float64, "state_dtype": torch.float64}
    return [
        Case("one token, float32", _inputs([1], dtype=torch.float32)),
        Case("lengths 5, 0 and 66, float32", _inputs([5, 0, 66], dtype=torch.float32, initial=True)),
        Case(
            "a gate of each channel, lengths 65 and 3, float32", _inputs([65, 3], dtype=torch.float32, gate="channel", initial=True)
        ),
        Case("float64, a gate of each channel", _inputs([7, 2], **exact, gate="channel", initial=True)),
        Case("odd sizes, float16, the last is padding", _inputs([9, 70], 1, 3, 20, 9, torch.float16, initial=True, padding=1)),
        Case("odd sizes, a gate of each channel, float16", _inputs([67], 1, 2, 36, 40, torch.float16, gate="channel", scale=0.5)),
        Case("one head of qwen3-next, 130 tokens", _inputs([130], **{**qwen3_next, **one}, initial=True)),
        Case("one head of kimi linear, 70 tokens", _inputs([70], **{**kimi_linear, **one}, initial=True)),
        Case("bfloat16 states, raw gates without a bias", _inputs([64], state_dtype=torch.bfloat16, raw_gates=True, dt_bias=None)),
        Case("empty sequences", _inputs([0, 0], initial=True)),
        Case("no sequences", _inputs([])),
        *(
            Case(f"{name} {batch} x {length}", _inputs([length] * batch, **sizes), large=True)
            for name, sizes in (("qwen3-next", qwen3_next), ("kimi linear", kimi_linear))
            for batch, length in ((1, 8192), (8, 1024))
        ),
        Case("qwen3-next 37 to 4000 tokens", _inputs([37, 4000, 515, 1234], **qwen3_next, initial=True), large=True),
        Case("kimi linear 37 to 4000 tokens", _inputs([37, 4000, 515, 1234], **kimi_linear, initial=True), large=True),
    ]


@gated_delta_rule_prefill.vary
def _(
    variation: Variation,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    cu_seqlens: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor | None,
    A_log: Tensor | None,
) -> dict[str, Tensor]:
    drawn = delta_rule.captured_operands(variation, k, g, beta, A_log)
    return {**drawn, **vary_prefill(variation, len(q), cu_seqlens, states, state_slots, has_initial_state)}


gated_delta_rule_prefill.work(prefill_read)


@gated_delta_rule_prefill.cost
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    cu_seqlens: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> Cost:
    moved = prefill_states_moved(states, state_slots, has_initial_state)
    others = (g, beta, A_log, dt_bias, cu_seqlens, state_slots, has_initial_state)
    return delta_rule.cost_of(q, k, v, *others, moved=moved)

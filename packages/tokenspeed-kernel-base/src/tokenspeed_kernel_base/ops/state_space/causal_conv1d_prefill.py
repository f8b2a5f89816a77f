"""Causal 1-D convolution of recurrent layers over whole sequences (prefill)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention._checks import check_offsets, check_values_offsets
from tokenspeed_kernel_base.ops.state_space._convolution import CONVOLUTION_KINDS, check_convolution, convolution_traits, convolve
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
from tokenspeed_kernel_base.variation import Variation


@operator(
    "state_space",
    "causal_conv1d_prefill",
    formats=("x", "states"),
    traits={**CONVOLUTION_KINDS, "has_initial_state": bool},
    mutates=("states",),
    varying=("tokens", "batch"),
    capacity=("slots",),
)
def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    state_slots: Tensor,
    bias: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """Computes a causal depthwise 1-D convolution of packed sequences, and stores the final state of each sequence.

    Within each sequence, ``y[t, c] = activation(bias[c] + sum over i of weight[c, i] * x[t - (width - 1) + i, c])``. Mamba (Gu &
    Dao, 2023, arXiv:2312.00752) has this convolution in front of its state-space layers; gated delta networks use it too. The
    inputs before the first token are the initial state of the sequence, or zeros. The state after a sequence is its last ``width -
    1`` inputs. If the sequence is shorter than ``width - 1``, the state begins with the last inputs of the initial state. The page
    "Calling operators" states the rules for slots under "States of recurrent layers".

    Arithmetic is float32 (float64 for a float64 x); the result is rounded to x's dtype once.

    Args:
        x: float16, bfloat16, float32 or float64 ``[tokens, channels]``. May be strided, for example a slice of a fused
            projection.
        weight: float16, bfloat16, float32 or float64 ``[channels, width]``, width 2, 3 or 4; the last column multiplies the token
            itself.
        cu_seqlens: int32 ``[batch + 1]``, the offsets at which sequences begin, then the number of tokens. Non-decreasing, from 0
            to tokens.
        states: x's dtype or float32 ``[slots, width - 1, channels]``, the last inputs of a request, the oldest first. Written to.
            May be strided.
        state_slots: int32 ``[batch]``, each less than ``slots``, the length of states: the slot to which each sequence's final
            state is written. If has_initial_state is True for a sequence, its initial state is read from the same slot. A sequence
            with a negative slot starts from zeros, and its state is not written. Slots that are not negative must be distinct.
        bias: float16, bfloat16, float32 or float64 ``[channels]``.
        has_initial_state: bool ``[batch]``, True for sequences that start from the state in their slot; None means that no sequence
            does.
        activation: ``"silu"`` or None.
        out: receives the result. It must not overlap x.

    Returns:
        The result ``[tokens, channels]`` in x's dtype.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is written. Values of cu_seqlens and
            state_slots are checked only if they lie in host memory.

    Example:
        A sequence of three tokens that continues inputs 1 and 2.

        >>> import torch
        >>> from tokenspeed_kernel import causal_conv1d_prefill
        >>> x, weight = torch.tensor([[3.0], [4.0], [5.0]]), torch.tensor([[100.0, 10.0, 1.0]])
        >>> states, ints = torch.tensor([[[1.0], [2.0]]]), lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> has_initial_state = torch.tensor([True])
        >>> causal_conv1d_prefill(x, weight, ints(0, 3), states, ints(0), None, has_initial_state, activation=None).flatten()
        tensor([123., 234., 345.])
        >>> states.flatten()
        tensor([4., 5.])

    Safe in CUDA graphs.
    """
    (tokens, channels), width = x.shape, weight.shape[1]
    batch, device = len(state_slots), x.device
    initial = read_initial_states(states, state_slots, has_initial_state)
    if not batch:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    starts, rows = cu_seqlens[:-1].long(), x if tokens else x.new_zeros(1, channels)

    def inputs(sequence: Tensor, place: Tensor) -> Tensor:
        """Returns the convolution's inputs at indices ``place`` of sequences; the first ``width - 1`` come from the initial
        state."""
        given = rows[(starts[sequence] + place - (width - 1)).clamp(0, len(rows) - 1)]
        kept = initial[sequence, place.clamp(max=width - 2)]
        return torch.where((place < width - 1).unsqueeze(-1), kept, given)

    token = torch.arange(tokens, device=device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), token, right=True)
    position = token - starts[sequence]
    result = convolve([inputs(sequence, position + i) for i in range(width)], weight, bias, activation, x.dtype)
    last = cu_seqlens.diff().long().unsqueeze(1) + torch.arange(width - 1, device=device)
    write_states(states, state_slots, inputs(torch.arange(batch, device=device).unsqueeze(1).expand(last.shape), last))
    return result


@causal_conv1d_prefill.traits
def _(weight: Tensor, bias: Tensor | None, activation: str | None, has_initial_state: Tensor | None) -> dict[str, object]:
    return {**convolution_traits(weight, bias, activation), "has_initial_state": has_initial_state is not None}


@causal_conv1d_prefill.check
def _(
    check: Checker,
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    state_slots: Tensor,
    bias: Tensor | None,
    has_initial_state: Tensor | None,
    activation: str | None,
) -> None:
    check_convolution(check, x, "tokens channels", weight, states, bias, activation)
    check_offsets(check, "cu_seqlens", cu_seqlens)
    check_prefill_slots(check, cu_seqlens, state_slots, has_initial_state)


@causal_conv1d_prefill.check_values(host=("cu_seqlens", "state_slots"))
def _(check: Checker, x: Tensor, cu_seqlens: Tensor | None, states: Tensor, state_slots: Tensor | None) -> None:
    check_values_offsets(check, "cu_seqlens", cu_seqlens, x.shape[0], "x")
    check_values_slots(check, states, state_slots)


@causal_conv1d_prefill.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@recipe
def _inputs(
    lengths: Sequence[int],
    channels: int,
    width: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    states_dtype: torch.dtype | None = None,
    bias: bool = False,
    initial: bool | None = True,
    padding: int = 0,
    slots: int | None = None,
    activation: str | None = "silu",
    sliced: bool = False,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws arguments with sequences of these lengths.

    ``initial``: True: some sequences start from states. False: has_initial_state is all False. None: has_initial_state is None.
    ``padding``: the number of sequences, at the end of the batch, that have no slot. With ``sliced``, x is a slice of a wider
    tensor.
    """

    def make(draw: Draw) -> dict[str, Any]:
        tokens, extra = sum(lengths), 16 if sliced else 0
        made = {
            "x": draw.normal(tokens, channels + extra, dtype=dtype)[:, extra:],
            "weight": draw.normal(channels, width, dtype=dtype, scale=width**-0.5),
            "states": draw.normal(len(lengths) + 2 if slots is None else slots, width - 1, channels, dtype=states_dtype or dtype),
            "activation": activation,
            **draw_prefill(draw, lengths, len(lengths) + 2 if slots is None else slots, initial, padding),
        }
        return {**made, "bias": draw.normal(channels, dtype=dtype)} if bias else made

    return make


@causal_conv1d_prefill.cases
def _() -> list[Case]:
    f32, f64 = torch.float32, torch.float64
    qwen3_next = 8192  # query, key and value channels of a layer of Qwen3-Next-80B-A3B
    nemotron_h = 128 * 64 + 2 * 8 * 128  # heads, and groups of B and C, of Nemotron-H-47B
    return [
        Case("one token of 8 channels, float32", _inputs([1], 8, dtype=f32, initial=None)),
        Case("lengths 0 to 4, shorter than the window too", _inputs([3, 0, 1, 4, 2, 0], 40, bias=True, padding=2)),
        Case("width 2, float16, no activation", _inputs([5, 1, 70], 96, 2, torch.float16, activation=None)),
        Case("width 3, float32 states, odd channels 57, sliced", _inputs([66, 2, 1], 57, 3, states_dtype=f32, sliced=True)),
        Case("float64", _inputs([7, 3], 5, dtype=f64, bias=True)),
        Case("float64 with float32 states", _inputs([7, 1], 6, 3, f64, f32)),
        Case("every sequence could start from a state and none does", _inputs([64, 65], 32, initial=False, bias=True)),
        Case("qwen3-next, 1 to 130 tokens", _inputs([1, 130, 63], 256, bias=False, padding=1)),
        Case("empty sequences only", _inputs([0, 0, 0], 24)),
        Case("no slots", _inputs([4, 3], 16, padding=2, slots=0, dtype=f32)),
        Case("no sequences", _inputs([], 16, slots=2)),
        Case("qwen3-next 1 x 8192", _inputs([8192], qwen3_next), large=True),
        Case("qwen3-next 8 x 1024", _inputs([1024] * 8, qwen3_next), large=True),
        Case("qwen3-next 37 to 4000 tokens", _inputs([37, 4000, 515, 1234, 2], qwen3_next, sliced=True), large=True),
        Case("nemotron-h 4 x 4096, bias", _inputs([4096] * 4, nemotron_h, bias=True), large=True),
    ]


@causal_conv1d_prefill.vary
def _(
    variation: Variation, x: Tensor, cu_seqlens: Tensor, states: Tensor, state_slots: Tensor, has_initial_state: Tensor | None
) -> dict[str, Any]:
    return vary_prefill(variation, len(x), cu_seqlens, states, state_slots, has_initial_state)


causal_conv1d_prefill.work(prefill_read)


@causal_conv1d_prefill.cost
def _(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    state_slots: Tensor,
    bias: Tensor | None,
    has_initial_state: Tensor | None,
) -> Cost:
    constant = nbytes(weight, bias, cu_seqlens, state_slots)
    moved = prefill_states_moved(states, state_slots, has_initial_state)
    return Cost(flops=2.0 * weight.shape[1] * x.numel(), bytes=2.0 * nbytes(x) + constant + moved)

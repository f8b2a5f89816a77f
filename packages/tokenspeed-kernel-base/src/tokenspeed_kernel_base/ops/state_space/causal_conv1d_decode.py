"""Causal 1-D convolution of recurrent layers for the new tokens of each request (decode)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.state_space._convolution import CONVOLUTION_KINDS, check_convolution, convolution_traits, convolve
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
    "state_space",
    "causal_conv1d_decode",
    formats=("x", "states"),
    traits={**CONVOLUTION_KINDS, "tokens": int, "output_slots": bool},
    mutates=("states",),
    in_place={"out": ("x",)},
    varying=("batch",),
    capacity=("slots",),
)
def causal_conv1d_decode(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    state_slots: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    output_slots: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes a causal 1-D convolution for one or several new tokens of each request, which continues from states in a cache.

    The states are those that `causal_conv1d_prefill` stores. The state of a request is its last ``width - 1`` inputs. The page
    "Calling operators" states the rules for slots under "States of recurrent layers". With output_slots, the state after each token
    is kept, so no state must be recomputed when draft tokens are rejected.

    Arithmetic is float32 (float64 for a float64 x); the result is rounded to x's dtype once.

    Args:
        x: float16, bfloat16, float32 or float64 ``[batch, tokens, channels]``, at least one token. May be strided.
        weight: float16, bfloat16, float32 or float64 ``[channels, width]``, width 2, 3 or 4; the last column multiplies the token
            itself.
        states: x's dtype or float32 ``[slots, width - 1, channels]``, the oldest inputs first. Written to. May be strided.
        state_slots: int32 ``[batch]``, each less than ``slots``, the length of states: the slot from which each request's state is
            read. If output_slots is None, the new state is written to the same slot. A negative slot reads zeros.
        bias: float16, bfloat16, float32 or float64 ``[channels]``.
        activation: ``"silu"`` or None.
        output_slots: int32 ``[batch, tokens]``, each less than ``slots``: the slot to which the state after each token is written.
            A state whose slot is negative is not written. None: only the state after the last token is written, to the request's
            slot in state_slots. Written slots must be distinct, and no other request may read them.
        out: receives the result; may be x.

    Returns:
        The result ``[batch, tokens, channels]`` in x's dtype.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is written. Values of slots are checked
            only if they lie in host memory.

    Example:
        Two draft tokens after inputs 1 and 2. Slot 1 gets the state after the first token, slot 2 the state after both; slot 0 is
        unchanged.

        >>> import torch
        >>> from tokenspeed_kernel import causal_conv1d_decode
        >>> x, weight = torch.tensor([[[3.0], [4.0]]]), torch.tensor([[100.0, 10.0, 1.0]])
        >>> states, ints = torch.zeros(3, 2, 1), lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> states[0] = torch.tensor([[1.0], [2.0]])
        >>> causal_conv1d_decode(x, weight, states, ints(0), activation=None, output_slots=ints(1, 2).view(1, 2)).flatten()
        tensor([123., 234.])
        >>> states.flatten(1)
        tensor([[1., 2.],
                [2., 3.],
                [3., 4.]])

    Safe in CUDA graphs.
    """
    tokens, width = x.shape[1], weight.shape[1]
    kept = read_states(states, state_slots)
    wide = torch.promote_types(x.dtype, states.dtype)
    inputs = torch.cat((kept.to(wide), x.to(wide)), dim=1)
    result = convolve([inputs[:, i : i + tokens] for i in range(width)], weight, bias, activation, x.dtype)
    if output_slots is None:
        write_states(states, state_slots, inputs[:, tokens:])
    else:
        after = torch.stack([inputs[:, i + 1 : i + width] for i in range(tokens)], dim=1)
        write_states(states, output_slots.flatten(), after.flatten(0, 1))
    return result


@causal_conv1d_decode.traits
def _(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, output_slots: Tensor | None) -> dict[str, object]:
    return {
        **convolution_traits(weight, bias, activation),
        "tokens": x.shape[1],
        "output_slots": output_slots is not None,
    }


@causal_conv1d_decode.check
def _(
    check: Checker,
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    state_slots: Tensor,
    bias: Tensor | None,
    activation: str | None,
    output_slots: Tensor | None,
) -> None:
    check_convolution(check, x, "batch tokens channels", weight, states, bias, activation)
    check_decode_slots(check, "x", x, state_slots, output_slots)


@causal_conv1d_decode.check_values(host=("state_slots", "output_slots"))
def _(check: Checker, states: Tensor, state_slots: Tensor | None, output_slots: Tensor | None) -> None:
    check_values_slots(check, states, state_slots, output_slots)


@causal_conv1d_decode.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@recipe
def _inputs(
    batch: int,
    channels: int,
    tokens: int = 1,
    width: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    states_dtype: torch.dtype | None = None,
    bias: bool = False,
    kept: bool = False,
    padding: int = 0,
    slots: int | None = None,
    activation: str | None = "silu",
    sliced: bool = False,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments. With ``kept``, output_slots are passed. ``padding``: the number of requests, at the end of the batch,
    that have no slot. With ``sliced``, x is a slice of a wider tensor.
    """

    def make(draw: Draw) -> dict[str, Any]:
        extra, held = 16 if sliced else 0, batch * (tokens + 1 if kept else 1) + 2 if slots is None else slots
        made = {
            "x": draw.normal(batch, tokens, channels + extra, dtype=dtype)[..., extra:],
            "weight": draw.normal(channels, width, dtype=dtype, scale=width**-0.5),
            "states": draw.normal(held, width - 1, channels, dtype=states_dtype or dtype),
            "activation": activation,
            **draw_slots(draw, batch, held, tokens if kept else None, padding),
        }
        return {**made, "bias": draw.normal(channels, dtype=dtype)} if bias else made

    return make


@causal_conv1d_decode.cases
def _() -> list[Case]:
    f32, f64 = torch.float32, torch.float64
    qwen3_next, nemotron_h = 8192, 128 * 64 + 2 * 8 * 128
    return [
        Case("one request of 8 channels, float32", _inputs(1, 8, dtype=f32)),
        Case("padded by 2, bias", _inputs(7, 96, bias=True, padding=2)),
        Case("width 2, float16, no activation, 5 tokens", _inputs(3, 40, 5, 2, torch.float16, activation=None)),
        Case("width 3, float32 states, odd channels 57, sliced, 2 tokens", _inputs(5, 57, 2, 3, states_dtype=f32, sliced=True)),
        Case("float64, states of 3 tokens kept", _inputs(4, 6, 3, dtype=f64, kept=True)),
        Case("qwen3-next, states of 4 draft tokens kept, padded by 1", _inputs(6, 256, 4, kept=True, padding=1)),
        Case("states of one token kept, bias", _inputs(9, 24, kept=True, bias=True, dtype=f32)),
        Case("no slots", _inputs(3, 16, padding=3, slots=0)),
        Case("no requests", _inputs(0, 16, 2)),
        *(Case(f"qwen3-next {batch}", _inputs(batch, qwen3_next), large=True) for batch in (1, 16, 64, 256)),
        Case("qwen3-next 64, states of 4 draft tokens kept", _inputs(64, qwen3_next, 4, kept=True), large=True),
        Case("nemotron-h 128, bias", _inputs(128, nemotron_h, bias=True), large=True),
    ]


@causal_conv1d_decode.vary
def _(variation: Variation, states: Tensor, state_slots: Tensor, output_slots: Tensor | None) -> dict[str, Any]:
    return vary_decode(variation, states, state_slots, output_slots)


causal_conv1d_decode.work(padding_of)


@causal_conv1d_decode.cost
def _(x: Tensor, weight: Tensor, states: Tensor, state_slots: Tensor, bias: Tensor | None, output_slots: Tensor | None) -> Cost:
    constant = nbytes(weight, bias, state_slots, output_slots)
    moved = states_moved(states, state_slots, output_slots)
    return Cost(flops=2.0 * weight.shape[1] * x.numel(), bytes=2.0 * nbytes(x) + constant + moved)

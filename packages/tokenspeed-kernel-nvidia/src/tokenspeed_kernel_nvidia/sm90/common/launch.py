"""What launchers of attention have in common: how they name dtypes, hand over sinks, and what they do where a program refuses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned, aligned_cache
from tokenspeed_kernel_nvidia._rows import deliver, to_write

# Of q, keys, values and the output, as configurations have them.
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# How device code tells dtypes of sinks and biases apart; 0 is none.
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
LOG2_E = math.log2(math.e)
# Operands of attention to a paged cache that would be copied whole.
CACHES = ("k_cache", "v_cache")


def scales_of_scores(head_dim: int, softmax_scale: float | None, logit_cap: float) -> tuple[float, float | None]:
    """What programs multiply with to get scores in units of base 2: products of q and k, or where scores are capped, their shares
    of the limit; and what they multiply products with for `softmax_device.cap`, None where scores are not capped.
    """
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    return (logit_cap * LOG2_E, 2.0 * LOG2_E * scale / logit_cap) if logit_cap > 0 else (LOG2_E * scale, None)


def sinks_at(sinks: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Sinks as programs get them: the tensor, which must live until the launch, its address, and its entry of KINDS.

    float64, and what is not contiguous, is copied to float32.
    """
    if sinks is None:
        return None, 0, 0
    kind = KINDS.get(sinks.dtype, 0)
    if not (kind and sinks.is_contiguous()):
        sinks, kind = sinks.float().contiguous(), KINDS[torch.float32]
    return sinks, sinks.data_ptr(), kind


def scales_at(scale: Tensor | None) -> tuple[Tensor | None, int, int]:
    """A scale as programs get it: the tensor, which must live until the launch, its address, and the bytes from one key head's
    to the next; 0 where there is one for all, or none."""
    if scale is None:
        return None, 0, 0
    scale = scale.contiguous()
    return scale, scale.data_ptr(), 0 if scale.numel() == 1 else scale.element_size()


def launched(
    program: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    numbers: tuple[Tensor | None, ...],
    others: tuple[Any, ...],
) -> Tensor:
    """Launches a program, and returns the output: ``out``, or new memory of q's dtype and v's columns if that is None.

    Little is asked of tensors, as every question takes time: programs look at dtypes, shapes and strides themselves.

    Args:
        program: takes q, k, v, the output, ``numbers`` and ``others``, and raises ValueError where it refuses them.
        numbers: lengths, offsets and page tables.
        others: what is no tensor.
    """
    width = v.shape[-1]
    if out is not None:
        written = out
    elif width == q.shape[-1]:  # nearly always, and half the price
        written = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        written = q.new_empty(*q.shape[:-1], width)
    caches = CACHES if k.dim() == 4 else ()
    return deliver(launched_on(program, (q, k, v), written, numbers, others, caches), out)


def launched_on(
    program: Callable[..., Any],
    read: tuple[Tensor, ...],
    written: Tensor,
    numbers: tuple[Tensor | None, ...],
    others: tuple[Any, ...],
    caches: tuple[str, ...],
) -> Tensor:
    """Launches a program on tensors as they are, or on copies where bulk copies could not read or write them.

    Args:
        program: takes ``read``, ``written``, ``numbers`` and ``others``, and raises ValueError where it refuses them.
        read: the operands.
        caches: the names of the last operands, as far as they are caches.

    Returns:
        What was written: ``written``, or other memory for `deliver`.

    Raises:
        ValueError: the program refuses tensors that need no copy.
    """
    given = (*read, written, *numbers)
    try:
        program(*given, *others)
        return written
    except ValueError:  # bulk copies want rows at multiples of 16 bytes, and lists of numbers have no gaps
        plain = len(read) - len(caches)
        operands = map(aligned, read[:plain]), map(aligned_cache, read[plain:], caches)
        rows = to_write(written, written, written.shape)
        taken = *itertools.chain(*operands), rows, *(None if x is None else x.contiguous() for x in numbers)
        if all(one is other for one, other in zip(taken, given, strict=True)):
            raise
    program(*taken, *others)
    return rows

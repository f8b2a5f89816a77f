"""Helpers of attention launchers: dtype names, sinks and scales as raw addresses, and copies of tensors that a kernel rejects."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned, aligned_cache
from tokenspeed_kernel_nvidia._rows import deliver, to_write

# Names of the dtypes of Q, K, V and the output in kernel configurations.
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Dtype tags of sinks and biases for device code; 0 stands for no tensor.
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
LOG2_E = math.log2(math.e)
# Names of the operands that are paged KV caches. A cache with unaligned rows is copied whole, with a warning that names the
# operand.
CACHES = ("k_cache", "v_cache")


def scales_of_scores(head_dim: int, softmax_scale: float | None, logit_cap: float) -> tuple[float, float | None]:
    """Returns ``(scale, cap_factor)``, the kernel's two factors of scores. Scores are in base 2 (``log2(e)`` times base-e scores).

    Without a logit cap, ``scale`` multiplies ``q @ k.T`` and ``cap_factor`` is None. With a cap, ``cap_factor`` is the factor of
    `softmax_device.cap`, and ``scale`` multiplies the result of `softmax_device.cap`.
    """
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    return (logit_cap * LOG2_E, 2.0 * LOG2_E * scale / logit_cap) if logit_cap > 0 else (LOG2_E * scale, None)


def sinks_at(sinks: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Returns the tensor of sinks (keep it alive until the launch), its address, and its dtype's tag in `KINDS`. Without sinks, the
    three results are None, 0 and 0.

    float64 and non-contiguous sinks are copied to float32.
    """
    if sinks is None:
        return None, 0, 0
    kind = KINDS.get(sinks.dtype, 0)
    if not (kind and sinks.is_contiguous()):
        sinks, kind = sinks.float().contiguous(), KINDS[torch.float32]
    return sinks, sinks.data_ptr(), kind


def vector_at(x: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Returns a vector, its address, and its dtype's tag in `KINDS`. Without a vector, the three results are None, 0 and 0.

    A vector that is not contiguous or not 16-byte aligned is copied. A vector of another dtype is copied to float32. Keep the
    returned tensor alive until the launch.
    """
    if x is None:
        return None, 0, 0
    if x.dtype not in KINDS:
        x = x.float()
    x = x if x.stride(0) == 1 and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    return x, x.data_ptr(), KINDS[x.dtype]


def scales_at(scale: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Returns the tensor of fp8 scales (keep it alive until the launch), its address, and its stride between KV heads in bytes.

    The stride is 0 if all heads share one scale. Without scales, the three results are None, 0 and 0.
    """
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
    """Launches a kernel and returns the output: ``out``, or a new tensor of q's dtype with v's head_dim if ``out`` is None.

    Only a few properties of tensors are read here, because each read costs host time. The program checks dtypes, shapes and strides
    itself.

    Args:
        program: the compiled kernel, a function of q, k, v, the output, ``numbers`` and ``others``. It raises ValueError for
            invalid arguments.
        numbers: int32 tensors: lengths, offsets and page tables.
        others: the kernel's arguments that are not tensors.
    """
    width = v.shape[-1]
    if out is not None:
        written = out
    elif width == q.shape[-1]:  # true for most calls; empty_like costs half as much as new_empty
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
    """Launches a kernel on the given tensors, or on aligned copies if bulk copies cannot read or write these.

    Args:
        program: the compiled kernel, a function of ``read``, ``written``, ``numbers`` and ``others``. It raises ValueError for
            invalid arguments.
        read: the operands that the kernel reads.
        written: the tensor that the kernel writes.
        numbers, others: see `launched`.
        caches: the names of the KV caches, which are the last operands of ``read``.

    Returns:
        The tensor that the kernel wrote: ``written``, or a temporary for `deliver`.

    Raises:
        ValueError: the kernel rejects the tensors, although all of them are aligned and contiguous.
    """
    given = (*read, written, *numbers)
    try:
        program(*given, *others)
        return written
    except ValueError:  # bulk copies need 16-byte aligned rows; int32 tensors must be contiguous
        plain = len(read) - len(caches)
        operands = map(aligned, read[:plain]), map(aligned_cache, read[plain:], caches)
        rows = to_write(written, written, written.shape)
        taken = *itertools.chain(*operands), rows, *(None if x is None else x.contiguous() for x in numbers)
        if all(one is other for one, other in zip(taken, given, strict=True)):
            raise
    program(*taken, *others)
    return rows

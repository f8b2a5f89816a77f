"""mha_prefill by ``flashinfer.prefill.trtllm_ragged_attention_deepseek``: TensorRT-LLM's generated kernels, for sm_100 and sm_103.

The kernels must not see a sequence without tokens. So sequence lengths are needed on the host. If the caller passes
``cu_seqlens_cpu``, the call does not wait for the device. Otherwise the call copies the lengths from the device and waits for the
copy. Because of this case, the kernel's declaration (`prefill`) has the tag ``waits``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernel_nvidia._rows import deliver
from tokenspeed_kernel_nvidia.flashinfer._memory import capturing, lse_for, sinks_of, to_write, workspace
from tokenspeed_kernel_nvidia.flashinfer.package import load

_attend = load("flashinfer.prefill", "trtllm_ragged_attention_deepseek")


def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel_nvidia.mha_prefill`. Supports head_dim and v_head_dim 128 and 128, 192 and 128, or
    256 and 256, and no logit cap. Waits for the device if cu_seqlens_cpu is not given.

    Raises:
        RuntimeError: a graph is being captured, and cu_seqlens_cpu has a sequence without tokens.
    """
    written = to_write(out, q, (*q.shape[:2], v.shape[2]))
    lse = lse_for(q, return_lse)
    if not q.numel():  # FlashInfer rejects an empty batch
        out = deliver(written, out)
        return out if lse is None else (out, lse)
    offsets, lengths = _without_empty(cu_seqlens, cu_seqlens_cpu)
    starts = cu_seqlens.contiguous() if offsets is None else offsets
    _attend(
        q if q.stride(2) == 1 else q.contiguous(),
        k if k.stride(2) == 1 else k.contiguous(),
        v if v.stride(2) == 1 else v.contiguous(),
        workspace(q.device),
        starts.diff(),
        max(lengths),
        max(lengths),
        bmm1_scale=q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
        bmm2_scale=1.0,
        o_sf_scale=-1.0,  # the output is not block-scaled
        batch_size=len(lengths),
        # Like the operator's window_left, FlashInfer's does not count the query's own token. FlashInfer adds 1 before it calls its
        # kernels.
        window_left=window_left,
        cum_seq_lens_q=starts,
        cum_seq_lens_kv=starts,
        enable_pdl=None,
        is_causal=True,
        return_lse=return_lse,
        attention_sinks=sinks_of(sinks),
        out=written,
        lse=lse,
    )
    out = deliver(written, out)
    return out if lse is None else (out, lse.mul_(math.log(2)))  # FlashInfer's LSE is in base 2


def _without_empty(offsets: Tensor, on_host: Sequence[int] | Tensor | None) -> tuple[Tensor | None, list[int]]:
    """Returns a new cu_seqlens tensor, on the device, and the lengths of the sequences that have tokens. The new tensor leaves out
    sequences without tokens; it is None if all sequences have tokens. ``on_host``: the call's cu_seqlens_cpu."""
    given = offsets if on_host is None else on_host
    values: list[int] = given.tolist() if isinstance(given, Tensor) else list(given)
    lengths = [end - begin for begin, end in itertools.pairwise(values)]
    if all(lengths):
        return None, lengths
    if capturing(offsets.device):  # a replay would copy from host memory that has been freed
        raise RuntimeError("sequences without tokens must be left out of cu_seqlens where a graph is captured")
    kept = [length for length in lengths if length]
    made = torch.tensor([0, *itertools.accumulate(kept)], dtype=torch.int32)
    if offsets.is_cuda:
        made = made.pin_memory()
    return made.to(offsets.device, non_blocking=True), kept

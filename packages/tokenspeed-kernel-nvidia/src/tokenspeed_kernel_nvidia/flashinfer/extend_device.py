"""mha_extend_with_kvcache by ``flashinfer.prefill.trtllm_batch_context_with_kv_cache``.

On sm_100 and sm_103, FlashInfer calls TensorRT-LLM's generated kernels. These kernels read whole pages, and multiply slots past the
end of a sequence by 0. If such a slot is NaN, so is the result. TensorRT-LLM itself writes zeros to such slots,
https://github.com/NVIDIA/TensorRT-LLM/pull/18925. The operator promises that such slots never affect a result. The adapter cannot
overwrite such slots, because another sequence may have tokens there. So the kernel handles only calls that name it. The caller must
ensure that unused slots are finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_nvidia._rows import deliver
from tokenspeed_kernel_nvidia.flashinfer._memory import alike, counters, pages, sinks_of, to_write, workspace
from tokenspeed_kernel_nvidia.flashinfer.package import load

_attend = load("flashinfer.prefill", "trtllm_batch_context_with_kv_cache")


def mha_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel_nvidia.mha_extend_with_kvcache`. Supports no LSE, no scales and no logit cap.

    The call never waits for the device. Unused slots of the last page of each sequence must hold finite values. If the page table
    has freed pages (-1) left of the window, page 0 must also hold finite values. Make the first call before a graph is captured.

    Raises:
        ValueError: k_cache and v_cache differ in their strides, or their last axis is not contiguous.
        RuntimeError: a graph is being captured, and there has been no call on the device before.
    """
    written = to_write(out, q, tuple(q.shape))
    if not q.numel():  # FlashInfer rejects an empty batch
        return deliver(written, out)
    batch = cache_seqlens.shape[0]
    if cu_seqlens_kv is None:
        cu_seqlens_kv = torch.nn.functional.pad(cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    _attend(
        q if q.stride(2) == 1 else q.contiguous(),
        alike(k_cache, v_cache),
        workspace(q.device),
        pages(page_table, window_left),
        cache_seqlens.contiguous(),
        min(max_seqlen_q, q.shape[0]),
        max_seqlen_k,
        bmm1_scale=q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
        bmm2_scale=1.0,
        batch_size=batch,
        cum_seq_lens_q=cu_seqlens_q.contiguous(),
        cum_seq_lens_kv=cu_seqlens_kv.contiguous(),
        window_left=window_left,
        out=written,
        kv_layout="NHD",
        sinks=sinks_of(sinks),
        causal=is_causal,
        multi_ctas_kv_counter_buffer=counters(q.device, batch * q.shape[1]),
    )
    return deliver(written, out)

"""mha_decode_with_kvcache by ``flashinfer.decode.trtllm_batch_decode_with_kv_cache``.

On sm_100 and sm_103 FlashInfer calls TensorRT-LLM's generated kernels (``trtllm-gen``). It downloads these at first use unless its
package flashinfer-cubin is installed. On sm_90 and sm_120 FlashInfer calls its XQA kernels, which nvcc compiles at first use.
"""

from __future__ import annotations

import math

from torch import Tensor

from tokenspeed_kernel_nvidia._rows import deliver
from tokenspeed_kernel_nvidia.flashinfer._memory import alike, counters, lse_for, pages, sinks_of, to_write, workspace
from tokenspeed_kernel_nvidia.flashinfer.package import load

_attend = load("flashinfer.decode", "trtllm_batch_decode_with_kv_cache")


def mha_decode_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int = 1,
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
    """Implements the operator `tokenspeed_kernel_nvidia.mha_decode_with_kvcache`. Supports one new token per sequence, no scales
    and no logit cap.

    The call never waits for the device. If the page table has freed pages (-1) left of the window, page 0 must hold finite values.
    Make the first call before a graph is captured. That call loads the kernel, which takes minutes if nvcc compiles it, and
    allocates 256 MiB of memory on each stream.

    Raises:
        ValueError: k_cache and v_cache differ in their strides, or their last axis is not contiguous.
        RuntimeError: a graph is being captured, and there has been no call on the device before.
    """
    written = to_write(out, q, tuple(q.shape))
    lse = lse_for(q, return_lse)
    if not q.numel():  # FlashInfer rejects an empty batch
        out = deliver(written, out)
        return out if lse is None else (out, lse)
    _attend(
        q.contiguous(),
        alike(k_cache, v_cache),
        workspace(q.device),
        pages(page_table, window_left),
        cache_seqlens.contiguous(),
        max_seqlen_k,
        # bmm1_scale is the factor of q @ k^T, bmm2_scale the factor of the output.
        bmm1_scale=q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
        bmm2_scale=1.0,
        # Like the operator's window_left, FlashInfer's does not count the query's own token. FlashInfer adds 1 before it calls its
        # kernels.
        window_left=window_left,
        out=written,
        sinks=sinks_of(sinks),
        kv_layout="NHD",  # [pages, page_size, kv_heads, head_dim]
        lse=lse,
        return_lse=return_lse,
        multi_ctas_kv_counter_buffer=counters(q.device, q.shape[0] * q.shape[1]),
    )
    # A sequence that only pads the batch has no tokens. Its result would be 0 / 0.
    empty = (cache_seqlens <= 0).view(-1, 1)
    out = deliver(written.masked_fill_(empty.unsqueeze(2), 0), out)
    # FlashInfer's LSE is in base 2.
    return out if lse is None else (out, lse.mul_(math.log(2)).masked_fill_(empty, -math.inf))

"""All-reduces of other projects, as baselines for `all_reduce.py`: FlashInfer's copies of the kernels of TensorRT-LLM and vLLM.

FlashInfer compiles each kernel at its first call.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# vLLM's buffer holds messages of up to this many bytes. vLLM sends larger messages with another library.
_VLLM_MOST = 8 << 20
_VLLM_CTAS = 36  # the largest number of CTAs that vLLM may launch


def gap(device: torch.device) -> str:
    """Returns the reason why this module's kernels cannot run on a device; empty if they can."""
    if device.type != "cuda":
        return "its kernels are for GPUs"
    return "" if importlib.util.find_spec("flashinfer") is not None else "FlashInfer is not installed"


@functools.cache
def _workspace(rows: int, hidden: int, wide: bool) -> tuple[Any, Any]:
    """Returns the addresses of TensorRT-LLM's workspace, and the handles that keep the workspace's memory alive."""
    from flashinfer.comm.trtllm_ar import trtllm_create_ipc_workspace_for_all_reduce_fusion as create

    handles, addresses, *_ = create(
        dist.get_rank(), dist.get_world_size(), rows, hidden, use_fp32_lamport=wide, group=dist.group.WORLD, create_metadata=True
    )
    return addresses, handles


def trtllm(x: Tensor, most_rows: int, norm: tuple[Tensor, Tensor, float] | None) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a call of TensorRT-LLM's fused all-reduce, launched with PDL like this package's kernels. TensorRT-LLM chooses
    between one-shot and two-shot.

    Args:
        x: the tensor to reduce, ``[rows, hidden]``.
        most_rows: the largest number of rows that this process measures.
        norm: the residual, the norm's weight and its epsilon, to fuse the residual add and the normalisation; or None.
    """
    from flashinfer.comm.trtllm_ar import AllReduceFusionPattern, trtllm_allreduce_fusion

    rows, hidden = x.shape
    addresses, kept = _workspace(most_rows, hidden, x.dtype == torch.float32)
    first, second = torch.empty_like(x), torch.empty_like(x)
    residual, weight, eps = norm if norm is not None else (None, None, None)
    pattern = AllReduceFusionPattern.kAllReduce if norm is None else AllReduceFusionPattern.kARResidualRMSNorm

    def call() -> tuple[Tensor, ...]:
        trtllm_allreduce_fusion(
            allreduce_in=x,
            world_size=dist.get_world_size(),
            world_rank=dist.get_rank(),
            token_num=rows,
            hidden_dim=hidden,
            workspace_ptrs=addresses,
            launch_with_pdl=True,
            trigger_completion_at_end=False,
            fp32_acc=True,
            pattern_code=pattern,
            use_oneshot=None,
            allreduce_out=first if norm is None else None,
            residual_in=residual,
            residual_out=None if norm is None else second,
            norm_out=None if norm is None else first,
            quant_out=None,
            scale_out=None,
            rms_gamma=weight,
            rms_eps=eps,
            scale_factor=None,
            layout_code=None,
        )
        return (first,) if norm is None else (first, second)

    call.__dict__["kept"] = kept
    return call


@functools.cache
def _vllm_state() -> tuple[int, int, Tensor]:
    """Returns the handle of vLLM's all-reduce, the address of this rank's buffer (the other ranks read it), and a tensor that the
    handle needs to stay alive."""
    from flashinfer.comm import vllm_ar
    from flashinfer.comm.cuda_ipc import create_shared_buffer

    rank = dist.get_rank()
    signals, buffers = create_shared_buffer(vllm_ar.meta_size() + _VLLM_MOST), create_shared_buffer(_VLLM_MOST)
    table = torch.empty(_VLLM_MOST, dtype=torch.uint8, device="cuda")
    handle = vllm_ar.init_custom_ar(signals, table, rank, True)
    vllm_ar.register_buffer(handle, buffers)
    return handle, buffers[rank], table


class Vllm:
    """A call of vLLM's custom all-reduce. In a CUDA graph the other ranks read ``x`` directly, so `captured` must exchange its
    address before a replay."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.out = x, torch.empty_like(x)
        self.handle, self.buffer, _ = _vllm_state()

    @staticmethod
    def gap(x: Tensor) -> str:
        """Returns the reason why vLLM cannot reduce a tensor; empty if it can."""
        nbytes = x.numel() * x.element_size()
        return gap(x.device) or ("" if nbytes <= _VLLM_MOST else f"vLLM sends at most {_VLLM_MOST} bytes")

    def __call__(self) -> tuple[Tensor]:
        from flashinfer.comm import vllm_ar

        registered = torch.cuda.is_current_stream_capturing()
        where = (0, 0) if registered else (self.buffer, _VLLM_MOST)
        vllm_ar.all_reduce(self.handle, self.x, self.out, *where, _VLLM_CTAS)
        return (self.out,)

    def captured(self) -> None:
        """Exchanges the addresses of the tensors in a captured graph between the ranks. Every rank must call this method after the
        capture and before the first replay."""
        from flashinfer.comm import vllm_ar

        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, vllm_ar.get_graph_buffer_ipc_meta(self.handle))
        vllm_ar.register_graph_buffers(self.handle, [list(each[0]) for each in every], [list(each[1]) for each in every])

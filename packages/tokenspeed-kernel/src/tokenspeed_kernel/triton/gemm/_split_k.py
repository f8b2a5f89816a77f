"""Split-K for GEMMs with few tiles: several programs share a tile, each over a range of k. A second launch adds the partial sums.

The reduction has a fixed order. So the result does not depend on which program finishes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, launch_options, may_overlap, sm_count_of
from tokenspeed_kernel.triton.repeated import Launch, Repeated
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")
_launches = Repeated(lambda: device_code.sum_splits_kernel)


# A split with fewer elements along k is mostly latency: filling the pipeline, and writing and rereading partial sums.
_SHORTEST = 512
_MOST = 8
# The tile of the output that one program of the reduction handles.
ROWS, COLUMNS = 4, 256


def choose_splits(tiles: int, k: int, multiple: int, device: torch.device, programs_each: int = 1) -> tuple[int, int]:
    """Returns the number of splits of k, and the elements along k per split, a multiple of ``multiple``.

    Each SM/CU gets about ``programs_each`` programs.
    """
    wanted = min(sm_count_of(device) * programs_each // max(tiles, 1), _MOST, k // _SHORTEST)
    splits = max(wanted, 1)
    length = cdiv(cdiv(k, splits), multiple) * multiple
    return max(cdiv(k, max(length, 1)), 1), max(length, 1)


def split_target(out: Tensor, splits: int) -> tuple[Tensor, tuple[int, int, int]]:
    """Returns the tensor to which the GEMM's programs write, and its strides by batch, row and column.

    The tensor is ``out`` for one split, else float32 partial sums ``[splits, batch * m * n]``.
    """
    if splits == 1:
        return out, (out.stride(0) if out.ndim == 3 else 0, out.stride(-2), out.stride(-1))
    m, n = out.shape[-2:]
    return out.new_empty((splits, out.numel()), dtype=torch.float32), (m * n, n, 1)


def sum_splits(partial: Tensor, bias: Tensor | None, out: Tensor, splits: int, interpreted: bool) -> None:
    """Reduces the partial sums of `split_target` and adds the bias. Does nothing for one split."""
    if splits == 1:
        return

    def describe() -> Launch:
        m, n = out.shape[-2:]
        batch = out.shape[0] if out.ndim == 3 else 1
        early = may_overlap(out.device)
        return Launch(
            (cdiv(m, ROWS) * cdiv(n, COLUMNS) * batch,),
            (m, n, out.numel(), out.stride(0) if out.ndim == 3 else 0, out.stride(-2), out.stride(-1)),
            {"SPLITS": splits, "INTERPRETED": interpreted, "EARLY": early, "num_warps": 4, **launch_options(early)},
        )

    _launches((partial, bias, out), (splits, interpreted), describe)

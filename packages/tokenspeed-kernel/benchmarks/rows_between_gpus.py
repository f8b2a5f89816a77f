"""Times the operators that send rows between the GPUs of one machine, and NCCL as the baseline.

python packages/tokenspeed-kernel/benchmarks/rows_between_gpus.py --ranks 2 --json
packages/tokenspeed-kernel/benchmarks/h200_rows_between_gpus.json

``rows`` in the report is the number of rows of each rank's input to `moe_dispatch` and `all_gather`, and of each rank's output from
`reduce_scatter`. `moe_dispatch` followed directly by `moe_combine` is compared with two all-to-alls, in which every rank sends this
number of rows to each rank. The operators' results are first compared with the references' results. As in `all_reduce.py`, 20 calls
are captured into a CUDA graph, and the reported time is that of one call: the median over replays, on the slowest rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import all_reduce as between
import torch
import torch.distributed as dist
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import UNIT

ROWS = (1, 16, 64, 256, 1024, 4096)
EXPERTS, TOP_K = 128, 4  # the sizes of GPT-OSS-120B


def main(arguments: Sequence[str] | None = None) -> int:
    return between.run("rows_between_gpus.py", __doc__, ROWS, measure, arguments)


def measure(
    sizes: Sequence[int], hidden: int, dtype: str, calls: int, device: str, kept: Path | None = None
) -> list[dict[str, Any]]:
    """Measures the implementations at each number of rows. Returns the report's rows, equal on all ranks."""
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    # Each row of the tensor is sent with a header, which is shorter than one `UNIT`.
    most = max(sizes) * (-(-hidden * getattr(torch, dtype).itemsize // UNIT) + 1) * UNIT
    group = ProcessGroup.with_peer_memory(one_shot_bytes=most, two_shot_bytes=0)
    found = []
    for rows in sizes:
        inputs = Inputs(rows, hidden, getattr(torch, dtype), place, group)
        for operator, name, call, reference in implementations(inputs):
            found.append({"operator": operator, "contestant": name, "rows": rows, **_outcome(call, reference, calls, inputs.x)})
        between.keep(found, kept)
    return found


class Inputs:
    """The operands of this rank: tokens with their experts and routing weights, and rows to send to all ranks."""

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> None:
        generator = torch.Generator(device).manual_seed(rows * group.world_size + group.rank)
        draw = functools.partial(torch.randn, generator=generator, device=device)
        self.group, self.x, self.every = group, draw(rows, hidden).to(dtype), draw(group.world_size * rows, hidden).to(dtype)
        self.weights, self.ids = draw(rows, EXPERTS).topk(TOP_K)
        self.ids = self.ids.int()
        self.made = torch.empty_like(self.every)

    def there_and_back(self, **options: Any) -> Tensor:
        rows, _, ids = tk.moe_dispatch(self.x, self.weights, self.ids, EXPERTS, self.group, **options)
        return tk.moe_combine(rows, ids, self.group, **options)

    def two_all_to_alls(self) -> None:
        for _ in range(2):
            dist.all_to_all_single(self.made, self.every)


Implementation = tuple[str, str, Callable[[], Any], Callable[[], Tensor] | None]


def implementations(i: Inputs) -> Iterator[Implementation]:
    """Yields the implementations. Each is the operator, the implementation's name, a call of it, and a call of the reference to
    compare with, or None."""
    library, reference = dist.get_backend(), {"solution": "reference"}
    yield "moe_dispatch, moe_combine", f"{library}, two all-to-alls", i.two_all_to_alls, None
    yield "moe_dispatch, moe_combine", "chosen", i.there_and_back, functools.partial(i.there_and_back, **reference)
    yield "all_gather", library, lambda: dist.all_gather_into_tensor(i.made, i.x), None
    yield "all_gather", "chosen", lambda: tk.all_gather(i.x, i.group), lambda: tk.all_gather(i.x, i.group, **reference)
    yield "reduce_scatter", library, lambda: dist.reduce_scatter_tensor(i.made[: len(i.x)], i.every), None
    yield (
        "reduce_scatter",
        "chosen",
        lambda: tk.reduce_scatter(i.every, i.group),
        lambda: tk.reduce_scatter(i.every, i.group, **reference),
    )


def _outcome(call: Callable[[], Any], reference: Callable[[], Tensor] | None, calls: int, x: Tensor) -> dict[str, Any]:
    exact = None
    if reference is not None:
        wanted, got = reference(), call()
        # The allowed difference. A sum over the ranks may be rounded once, or once per rank.
        slack = 2 * dist.get_world_size() * torch.finfo(x.dtype).eps * float(wanted.abs().max())
        if max(between.everywhere(float((got.float() - wanted.float()).abs().max()))) > slack:
            return {"us": None, "best_us": None, "exact": False, "skipped": False, "reason": "wrong"}
        exact = all(between.everywhere(torch.equal(got, wanted)))
    else:
        call()
    times = between.times(call, calls, x)
    return {"exact": exact, "skipped": False, **between.summary(times), "reason": ""}


if __name__ == "__main__":
    sys.exit(main())

"""Runs every operator between GPUs, one after another on the same peer memory. The results are exact, and are compared on the
device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup

KINDS = ("one_shot", "two_shot")


class Step:
    """Runs the operators of one rank with inputs that depend on the number of earlier runs, and compares the results with the
    expected results.

    Before and after each kernel, this rank waits for a pseudo-random time. It depends on the rank, the index of the wait, and the
    number of runs.
    """

    def __init__(self, group: ProcessGroup, rows: int, hidden: int, kind: str, dtype: torch.dtype = torch.float16) -> None:
        self.group, self.rows, self.hidden, self.kind, self.dtype = group, rows, hidden, kind, dtype
        assert group.peers is not None
        self.device = device = group.peers.device
        self.place = torch.arange(rows * hidden, device=device).view(rows, hidden)
        self.turn = torch.zeros((), dtype=torch.int64, device=device)
        self.mistakes, self.checksum = self.turn.clone(), self.turn.clone()
        self.weight = torch.ones(hidden, dtype=dtype, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __str__(self) -> str:
        return f"{self.kind}, {self.rows} x {self.hidden}, {self.dtype}"

    def values(self, rank: int) -> torch.Tensor:
        """A rank's input in this run: small integers, whose sums are exact."""
        return ((self.place * 7 + self.turn * 13 + rank * 29) % 17 - 8).to(self.dtype)

    def run(self) -> Iterator[None]:
        """Runs all operators once, and yields between kernels. A caller that runs several ranks in one process may synchronise at
        each yield."""
        self.turn += 1
        self.pauses = 0
        group, kind = self.group, self.kind
        x, residual = self.values(group.rank), ((self.place + self.turn) % 5 - 2).to(self.dtype)
        yield from self.pause()
        normed, summed = tk.all_reduce_rmsnorm(x, self.weight, group, 1e-5, residual, override=f"triton_{kind}_all_reduce_rmsnorm")
        yield from self.pause()
        total = tk.all_reduce(x, group, override=f"triton_{kind}_all_reduce")
        yield from self.pause()
        fp8 = f"triton_{kind}_all_reduce_rmsnorm_quantize_fp8"
        q, scale, again = tk.all_reduce_rmsnorm_quantize(x, self.weight, group, tk.Quantization.fp8(), 1e-5, residual, override=fp8)
        yield from self.pause()
        # The comparison is bitwise: the separate operator quantises the normed result of the same inputs.
        q_wanted, scale_wanted = tk.quantize_fp8(normed)
        self.mistakes += (q.view(torch.uint8) != q_wanted.view(torch.uint8)).sum() + (scale != scale_wanted).sum()
        self.mistakes += (again != summed).sum()
        every = [self.values(rank) for rank in range(group.world_size)]
        wanted = sum(every[1:], every[0])
        self.mistakes += (total != wanted).sum() + (summed != wanted + residual).sum()
        unit = 1e-2 if self.dtype == torch.float16 else 4e-2
        self.mistakes += ((normed - torch.nn.functional.rms_norm(summed.float(), (self.hidden,), eps=1e-5)).abs() > unit).sum()
        self.checksum += (normed.view(torch.int16).long() * (self.place % 251 + 1)).sum() % 65521
        yield from self.send_rows(every)

    def send_rows(self, every: list[torch.Tensor]) -> Iterator[None]:
        """Runs the operators that send rows between ranks, on the same peer memory."""
        group, size, rank = self.group, self.group.world_size, self.group.rank
        every_ids = [self.chosen(r) for r in range(size)]
        weights = (every_ids[rank] + 2).float()
        yield from self.pause()
        gathered = tk.all_gather(every[rank], group, override="triton_all_gather")
        yield from self.pause()
        share = tk.reduce_scatter(gathered, group, override="triton_reduce_scatter")
        yield from self.pause()
        rows, row_weights, ids = tk.moe_dispatch(
            every[rank], weights, every_ids[rank], 5 * size, group, override="triton_moe_dispatch"
        )
        yield from self.pause()
        made = rows * (rank + 1)
        yield from self.pause()
        combined = tk.moe_combine(made, ids, group, override="triton_moe_combine")
        yield from self.pause()
        self.mistakes += (gathered != torch.cat(every)).sum() + (share != size * every[rank]).sum()
        global_ids = torch.cat(every_ids)
        held = (global_ids >= 0) & (global_ids // 5 == rank)
        self.mistakes += (ids != torch.where(held, global_ids - 5 * rank, -1)).sum()
        self.mistakes += (row_weights != torch.where(held, global_ids + 2, 0)).sum()
        self.mistakes += (rows != torch.where(held.any(1, keepdim=True), gathered, 0)).sum()
        goes = torch.stack([((every_ids[rank] >= 0) & (every_ids[rank] // 5 == r)).any(1) * (r + 1) for r in range(size)]).sum(0)
        self.mistakes += (combined != every[rank] * goes[:, None]).sum()

    def chosen(self, rank: int) -> torch.Tensor:
        """Returns the expert ids of a rank's tokens, int32 ``[rows, 2]``. A rank has 5 experts. About three in four tokens select
        two experts.

        In some runs no token of a rank selects any expert. In others, all tokens select experts of rank 0, so that the other ranks
        get no rows.
        """
        place = torch.arange(self.rows, device=self.turn.device)[:, None] * 3 + torch.arange(2, device=self.turn.device) * 4
        ids = (place + self.turn + 7 * rank) % (5 * self.group.world_size)
        ids = torch.where(self.turn % 5 == 0, ids % 5, ids)
        return torch.where((place % 4 < 3) & ((self.turn + rank) % 4 != 0), ids, -1).int()

    def pause(self) -> Iterator[None]:
        """Delays this rank by a pseudo-random time of up to 20 us."""
        yield
        self.pauses += 1
        if self.device.type == "cuda":
            from rank_kernels import spin

            spin[(1,)](self.turn, self.group.rank, self.pauses)
            yield

    def run_once(self) -> None:
        for _ in self.run():
            pass

    def capture(self) -> None:
        """Captures a run in a CUDA graph. The caller must have run the step once outside a graph."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run_once()

    def replay(self) -> None:
        assert self.graph is not None
        self.graph.replay()

    def outcome(self) -> tuple[int, int]:
        """Returns the number of wrong elements in all runs, and a checksum that must be equal on all ranks."""
        return int(self.mistakes), int(self.checksum)


def wrong(outcomes: Sequence[tuple[int, int]]) -> str:
    """Describes the faults in the outcomes of all ranks; empty if there are none."""
    mistakes, checksums = zip(*outcomes, strict=True)
    if any(mistakes):
        return f"wrong elements by rank: {mistakes}"
    return "" if len(set(checksums)) == 1 else f"ranks have different bits: {checksums}"

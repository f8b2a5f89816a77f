"""Batches and model runners for tests of attention backends, with the attributes of SGLang's that the backends read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tokenspeed_kernel_sglang.serving import OPTIONS

CONTEXT, SLOTS = 64, 256


def runner_of(model: Any, pool: Any, page_size: int, **options: Any) -> Any:
    """Returns a model runner with four requests. Each request has its own pages, in reversed order."""
    pages = torch.arange(SLOTS // page_size, 0, -1).view(4, -1)
    slots = (pages.unsqueeze(2) * page_size + torch.arange(page_size)).flatten(1)
    fields = {
        "model": model,
        "token_to_kv_pool": pool,
        "req_to_token_pool": SimpleNamespace(req_to_token=slots[:, :CONTEXT].int()),
        "page_size": page_size,
        "dtype": torch.bfloat16,
        "use_mla_backend": False,
        "model_config": SimpleNamespace(context_len=CONTEXT),
        "server_args": SimpleNamespace(**{name: off for name, (_, off) in OPTIONS.items()}),
    }
    return SimpleNamespace(**{**fields, **options})


def make_batch(runner: Any, mode: ForwardMode, prefix: list[int], new: list[int], requests: list[int]) -> Any:
    table = runner.req_to_token_pool.req_to_token
    lengths = torch.tensor([a + b for a, b in zip(prefix, new, strict=True)])
    spans = zip(requests, prefix, lengths.tolist(), strict=True)
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(new),
        req_pool_indices=torch.tensor(requests),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        extend_seq_lens=torch.tensor(new, dtype=torch.int32),
        extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32),
        extend_seq_lens_cpu=new,
        out_cache_loc=torch.cat([table[request, begin:end] for request, begin, end in spans]).long(),
        positions=torch.cat([torch.arange(a, a + b) for a, b in zip(prefix, new, strict=True)]),
    )


def padded(batch: Any | None, size: int) -> Any:
    """Returns what SGLang passes before a graph of ``size`` requests is replayed for a batch; None is an idle batch."""
    real = 0 if batch is None else batch.batch_size
    fill = torch.ones(size - real, dtype=torch.int64)
    empty = torch.empty(0, dtype=torch.int64)
    lengths = torch.cat((empty if batch is None else batch.seq_lens, fill))
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        req_pool_indices=torch.cat((empty if batch is None else batch.req_pool_indices, torch.zeros_like(fill))),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        num_padding=size - real,
        out_cache_loc=empty if batch is None else batch.out_cache_loc,
    )


class Padded:
    """Runs a batch as a captured graph of ``size`` requests does: with further rows, whose slots are 0 in SGLang's buffer."""

    def __init__(self, backend: Any, size: int) -> None:
        self.backend, self.size = backend, size

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, **options: Any) -> torch.Tensor:
        more = self.size - batch.batch_size
        q, k, v = (torch.cat((part, torch.ones(more, *part.shape[1:], dtype=part.dtype))) for part in (q, k, v))
        slots = torch.cat((batch.out_cache_loc, torch.zeros(more, dtype=torch.int64)))
        static = SimpleNamespace(**{**vars(batch), "out_cache_loc": slots})
        return self.backend.forward_decode(q, k, v, layer, static, **options)[: batch.batch_size]


def change(runner: Any, where: str, value: Any) -> None:
    """Sets an attribute of a runner. The path may go through the items of a list."""
    owner, _, name = where.rpartition(".")
    target = runner
    for part in owner.split(".") if owner else ():
        target = target[int(part)] if part.isdigit() else getattr(target, part)
    setattr(target, name, value)


def serve_all_modes(runner: Any, backend: Any, requests: Any) -> None:
    """Passes requests through a prefill, a chunk with a cached prefix, a mixed batch and two decode steps. ``requests`` checks the
    outputs of each step."""
    steps = [
        (ForwardMode.EXTEND, [0, 0], [20, 3], [2, 0]),  # a prefill
        (ForwardMode.EXTEND, [20], [9], [2]),  # the next chunk of a prompt, or a prompt with a cached prefix
        (ForwardMode.MIXED, [29, 3], [1, 11], [2, 0]),
        (ForwardMode.DECODE, [30, 14], [1, 1], [2, 0]),
        (ForwardMode.DECODE, [15, 31], [1, 1], [0, 2]),
    ]
    for mode, prefix, new, which in steps:
        batch = make_batch(runner, mode, prefix, new, which)
        backend.init_forward_metadata(batch)
        requests.step(backend, batch)

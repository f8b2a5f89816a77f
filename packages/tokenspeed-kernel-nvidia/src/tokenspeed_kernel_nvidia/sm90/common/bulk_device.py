"""Bulk copies, L2 prefetches, and stores to the shared memory of other CTAs of a cluster (distributed shared memory)."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute


def bulk_load(to: Any, source: Any, count: Any, barrier: Any, *, once: bool = True) -> None:
    """Starts a bulk copy of ``count`` bytes from global to shared memory; ``barrier`` counts the bytes.

    ``to`` and ``barrier`` are addresses in shared memory. ``to``, ``source`` and ``count`` are multiples of 16.

    Args:
        once: whether these bytes are read only once. L2 then evicts them first (a hint), and keeps data that are reused.
    """
    head, hint, policy = "{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; ", ".L2::cache_hint", ", first"
    if not once:
        head, hint, policy = "{ ", "", ""
    cute.arch.inline_ptx(
        f"{head}cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint}"
        f" [{{$r0}}], [{{$r1}}], {{$r2}}, [{{$r3}}]{policy}; }}",
        read_only_args=[to, source, count, barrier],
    )


def prefetch_bulk(source: Any, count: Any) -> None:
    """Starts a prefetch of ``count`` bytes of global memory into L2; ``source`` and ``count`` are multiples of 16.

    The prefetch never makes data stale: all SMs share L2, so later reads see later writes of other SMs.
    """
    cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[source, count])


def bulk_load_to_pair(to: Any, source: Any, count: Any, barrier: Any) -> None:
    """Like `bulk_load`, but multicast to both CTAs of a cluster of two, to the same shared-memory offset. The barrier at the same
    offset in each CTA counts the bytes that arrive in this CTA.
    """
    cute.arch.inline_ptx(
        "{ .reg .b16 both; mov.b16 both, 3; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}], both; }",
        read_only_args=[to, source, count, barrier],
    )


def of_rank(address: Any, rank: Any) -> Any:
    """Maps a shared-memory address of this CTA to the same offset in the CTA of this rank in the cluster (mapa)."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


def send_word(address: Any, value: Any, barrier: Any) -> None:
    """Stores a 32-bit word to another CTA's shared memory (st.async); that CTA's ``barrier`` counts the four bytes. ``address`` and
    ``barrier`` are results of `of_rank`."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[address, value, barrier],
    )

"""Global memory that CTAs share while they run, and bulk copies of bytes.

A flag is an int32 in global memory. Whoever has written what others will read adds to it (`release_add`), and whoever has seen the
sum that he waited for (`wait_for`) may read that. Both speak for the calling lane; `cute.arch.sync_warp` extends what they order to
the warp, and a barrier to the CTA.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

from cutlass import Int32, Uint32, cute


def acquire_int(address: Any) -> Any:
    """A flag, and what was written before it got this value may be read."""
    return cute.arch.inline_ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def release_add(address: Any, value: Any) -> None:
    """Adds to a flag after all that was written before."""
    cute.arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], {$r1};", read_only_args=[address, value])


def exchange_add(address: Any, value: Any) -> Any:
    """Adds to a flag, and gives what it was: both of `acquire_int` and `release_add`."""
    return cute.arch.inline_ptx(
        "atom.acq_rel.gpu.global.add.s32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[address, value]
    )


def take_ticket(address: Any) -> Any:
    """Adds 1 to a counter that orders nothing, and gives what it was."""
    return cute.arch.inline_ptx(
        "atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[address]
    )


@cute.jit
def wait_for(address: Any, value: Int32) -> None:
    """Waits until a flag has a value."""
    while acquire_int(address) != value:
        pass


def bulk_load(to: Any, source: Any, count: Any, barrier: Any, *, once: bool = True) -> None:
    """Starts the copy of bytes from global to shared memory; ``barrier``, an address like ``to``, counts them.

    All of them are multiples of 16.

    Args:
        once: the L2 cache drops these bytes first: they are read once, and others, instructions among them, again and again.
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
    """Starts to bring bytes of global memory to the L2 cache; both numbers are multiples of 16.

    Whatever others write there afterwards is seen all the same, because all multiprocessors share that cache.
    """
    cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[source, count])


def bulk_load_to_pair(to: Any, source: Any, count: Any, barrier: Any) -> None:
    """Starts a copy to both CTAs of a cluster of two, to the same places; see `bulk_load`. Each CTA's barrier counts its bytes."""
    cute.arch.inline_ptx(
        "{ .reg .b16 both; mov.b16 both, 3; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}], both; }",
        read_only_args=[to, source, count, barrier],
    )


def copy_piece(to: Any, behind: int, source: Any, count: Any) -> None:
    """Starts the copy of 16 bytes from global memory to so many bytes behind an address in shared memory.

    Those beyond the first ``count`` become 0.
    """
    code = f"cp.async.cg.shared.global.L2::128B [{{$r0}} + {behind}], [{{$r1}}], 16, {{$r2}};"
    cute.arch.inline_ptx(code, read_only_args=[to, source, count])


def load_words(space: str, address: Any, count: int) -> Any:
    """1, 2 or 4 neighbouring words."""
    if count == 1:
        return cute.arch.inline_ptx(f"ld.{space}.b32 {{$w0}}, [{{$r0}}];", write_only_types=[Uint32], read_only_args=[address])
    to = ", ".join(f"{{$w{at}}}" for at in range(count))
    return cute.arch.inline_ptx(
        f"ld.{space}.v{count}.b32 {{{to}}}, [{{$r0}}];", write_only_types=[Uint32] * count, read_only_args=[address]
    )


def store_words_shared(address: Any, words: Any) -> None:
    """Four neighbouring words, to shared memory."""
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words])


def store_half(address: Any, value: Any) -> None:
    """A 16-bit number, the lower half of a word, to global memory."""
    cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; st.global.b16 [{$r0}], low; }", read_only_args=[address, value]
    )


def of_rank(address: Any, rank: Any) -> Any:
    """Returns the address that a place in shared memory has in another CTA of the cluster."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


def send_word(address: Any, value: Any, barrier: Any) -> None:
    """Stores a word in a CTA of the cluster, whose barrier counts its four bytes; both addresses are of `of_rank`."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[address, value, barrier],
    )

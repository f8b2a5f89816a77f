"""Flags in global memory that synchronise running CTAs, and other PTX loads, stores and copies.

A flag is an int32 in global memory. A CTA writes its data, then adds to the flag (`release_add`). Another CTA waits until the flag
has the expected value (`wait_for`), then reads the data. The add and the wait order only the calling lane's accesses. Together with
them, `cute.arch.sync_warp` orders the accesses of the warp, and a CTA barrier those of the CTA.

A tagged number is a 64-bit word in global memory: a float32, and an int32 tag. One instruction stores it, so a reader that sees the
tag also sees the value, without a flag.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Uint32, cute


def acquire_int(address: Any) -> Any:
    """Reads a flag with acquire semantics: later reads see all writes that precede the `release_add` whose value is read."""
    return cute.arch.inline_ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def release_add(address: Any, value: Any) -> None:
    """Adds to a flag with release semantics: the lane's earlier writes become visible before the new value of the flag."""
    cute.arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], {$r1};", read_only_args=[address, value])


def relaxed_add(address: Any, value: Any) -> None:
    """Adds to a counter, without ordering other accesses. So it needs no fence, whose time would grow with the loads in flight."""
    cute.arch.inline_ptx("red.relaxed.gpu.global.add.s32 [{$r0}], {$r1};", read_only_args=[address, value])


def exchange_add(address: Any, value: Any) -> Any:
    """Adds to a flag and returns the flag's former value, with acquire and release semantics."""
    return cute.arch.inline_ptx(
        "atom.acq_rel.gpu.global.add.s32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[address, value]
    )


def take_ticket(address: Any) -> Any:
    """Adds 1 to a counter and returns the counter's former value (relaxed: orders no other access)."""
    return cute.arch.inline_ptx(
        "atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[address]
    )


@cute.jit
def wait_for(address: Any, value: Int32) -> None:
    """Spins until the flag at ``address`` equals ``value``, with acquire semantics."""
    while acquire_int(address) != value:
        pass


def copy_piece(to: Any, behind: int, source: Any, count: Any) -> None:
    """Starts an asynchronous copy (cp.async) of 16 bytes from global memory to the shared address ``to + behind``. Both addresses
    are multiples of 16.

    Args:
        to, behind: the shared address, in a register, and an offset in bytes that is known when the kernel is compiled. The offset
            is part of the instruction.
        source: the global address.
        count: how many bytes are read, 0 to 16. The remaining bytes are zero-filled.
    """
    code = f"cp.async.cg.shared.global.L2::128B [{{$r0}} + {behind}], [{{$r1}}], 16, {{$r2}};"
    cute.arch.inline_ptx(code, read_only_args=[to, source, count])


def load_words(space: str, address: Any, count: int) -> Any:
    """Loads 1, 2 or 4 consecutive 32-bit words. Returns one word bare, and several in a sequence. ``space``: PTX's state space,
    with qualifiers, such as ``"shared"`` or ``"global.cg"``."""
    if count == 1:
        return cute.arch.inline_ptx(f"ld.{space}.b32 {{$w0}}, [{{$r0}}];", write_only_types=[Uint32], read_only_args=[address])
    to = ", ".join(f"{{$w{at}}}" for at in range(count))
    return cute.arch.inline_ptx(
        f"ld.{space}.v{count}.b32 {{{to}}}, [{{$r0}}];", write_only_types=[Uint32] * count, read_only_args=[address]
    )


def store_words_shared(address: Any, words: Any) -> None:
    """Stores 2 or 4 consecutive 32-bit words to shared memory."""
    given = ", ".join(f"{{$r{at + 1}}}" for at in range(len(words)))
    cute.arch.inline_ptx(f"st.shared.v{len(words)}.b32 [{{$r0}}], {{{given}}};", read_only_args=[address, *words])


def store_half(address: Any, value: Any) -> None:
    """Stores the lower 16 bits of a 32-bit word to global memory."""
    cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; st.global.b16 [{$r0}], low; }", read_only_args=[address, value]
    )


def load_number(address: Any) -> Any:
    """Loads two consecutive tagged numbers: a float32, its tag, the next float32, and its tag."""
    return cute.arch.inline_ptx(
        "{ .reg .b64 a, b; ld.relaxed.gpu.global.v2.b64 {a, b}, [{$r0}]; mov.b64 {{$w0}, {$w1}}, a; mov.b64 {{$w2}, {$w3}}, b; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def store_number(address: Any, value: Float32, tag: Any) -> None:
    """Stores a float32 and a tag as one 64-bit word."""
    cute.arch.inline_ptx(
        "{ .reg .b64 a; mov.b64 a, {{$r1}, {$r2}}; st.relaxed.gpu.global.b64 [{$r0}], a; }", read_only_args=[address, value, tag]
    )

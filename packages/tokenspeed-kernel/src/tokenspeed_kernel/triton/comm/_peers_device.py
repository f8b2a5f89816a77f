"""Stores 16-byte vectors to the memory of other ranks, and polls for the vectors that they send.

The value itself signals a vector's arrival. A receive buffer holds `SENTINEL` in every 32-bit word, and no sent word has that
value. A 32-bit word is never torn, so a vector has arrived when none of its four words is the sentinel. No flag, fence or second
trip is needed. The rank that reads a vector resets the vector to the sentinel. NCCL's low-latency protocol and the one-shot
all-reduce of TensorRT-LLM work in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads
from triton.language.target_info import is_cuda

from tokenspeed_kernel.triton.quantization._encode_device import round_to

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# 0x80008000: two negative zeros of a 16-bit float.
SENTINEL = tl.constexpr(-2147450880)
_SENTINEL_HEX = "0x80008000"

VECTOR = tl.constexpr(16)
"""Bytes per vector."""


def _poll_asm(pack: int) -> str:
    """Returns PTX that loads ``pack`` vectors until all their words have arrived. Inactive vectors are zeros.

    Every 65536 iterations the loop reads the timer. After a wait longer than the limit (in ns) the loop traps, so that the launch
    fails instead of hanging.
    """
    word = [[f"${plane * pack + item}" for plane in range(4)] for item in range(pack)]
    address = [f"${4 * pack + item}" for item in range(pack)]
    active = [f"${5 * pack + item}" for item in range(pack)]
    limit = f"${6 * pack}"
    lines = [
        "{",
        ".reg .pred again, slow, late;",
        *(f".reg .pred active{item};" for item in range(pack)),
        ".reg .b32 turns, low;",
        ".reg .b64 began, now;",
        "mov.b32 turns, 0;",
        "mov.b64 began, 0;",
        *(f"mov.b32 {register}, 0;" for item in range(pack) for register in word[item]),
        *(f"setp.ne.b32 active{item}, {active[item]}, 0;" for item in range(pack)),
        "AGAIN:",
        *(f"@active{item} ld.relaxed.sys.global.v4.b32 {{{', '.join(word[item])}}}, [{address[item]}];" for item in range(pack)),
        f"setp.eq.b32 again, {word[0][0]}, {_SENTINEL_HEX};",
        *(
            f"setp.eq.or.b32 again, {register}, {_SENTINEL_HEX}, again;"
            for item in range(pack)
            for register in word[item]
            if register != word[0][0]
        ),
        "@!again bra DONE;",
        "add.u32 turns, turns, 1;",
        "and.b32 low, turns, 0xffff;",
        "setp.ne.b32 slow, low, 0;",
        "@slow bra AGAIN;",
        "mov.u64 now, %globaltimer;",
        "setp.eq.b64 late, began, 0;",
        "@late mov.b64 began, now;",
        "sub.u64 now, now, began;",
        f"setp.gt.u64 late, now, {limit};",
        "@late trap;",
        "bra AGAIN;",
        "DONE:",
        "}",
    ]
    return "\n".join(lines)


def _poll_constraints(pack: int) -> str:
    return ",".join(["=&r"] * 4 * pack + ["l"] * pack + ["r"] * pack + ["l"] * pack)


_POLL_1, _POLL_1_REGISTERS = tl.constexpr(_poll_asm(1)), tl.constexpr(_poll_constraints(1))
_POLL_2, _POLL_2_REGISTERS = tl.constexpr(_poll_asm(2)), tl.constexpr(_poll_constraints(2))
_POLL_4, _POLL_4_REGISTERS = tl.constexpr(_poll_asm(4)), tl.constexpr(_poll_constraints(4))

_PUSH = tl.constexpr("""{
.reg .pred active;
setp.ne.b32 active, $6, 0;
@active st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
mov.b32 $0, 0;
}""")


@triton.jit
def words_at(address):
    """Converts the addresses of vectors, int64 ``[vectors]``, to pointers to their words, ``[vectors, 4]``."""
    return address[:, None].to(tl.pointer_type(tl.int32)) + tl.arange(0, 4)[None, :]


@triton.jit
def push(address, words, active):
    """Stores vectors, int32 ``[vectors, 4]``, to addresses, int64 ``[vectors]``, where ``active``.

    There must be at least as many vectors as threads. With fewer vectors, Triton replicates each vector across threads. A late
    replica could arrive after the receiver has reset the sentinel, and be mistaken for a vector of a later call.
    """
    if _INTERPRETED or not is_cuda():
        tl.store(words_at(address), words, mask=active[:, None])
    else:
        tl.static_assert(address.shape[0] >= num_threads(), "a vector would be sent by several threads")
        even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        tl.inline_asm_elementwise(
            _PUSH,
            "=r,l,r,r,r,r,r",
            [address, first, second, third, fourth, active.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def poll(address, active, limit, PACK: tl.constexpr):
    """Polls the vectors at addresses, int64 ``[vectors]``, and returns int32 ``[vectors, 4]``, zeros where not ``active``.

    ``limit``: int64, the longest wait in ns. PACK: how many vectors a thread polls at once. With PACK = 0 the program polls all its
    vectors until all have arrived, without a time limit; this works on any processor.
    """
    if _INTERPRETED or not is_cuda() or PACK == 0:
        # The load has no mask, so that the loop has no divergent branch. With a divergent branch, LLVM would let some threads leave
        # the loop before others, and the loop's barriers would wait for them. Inactive lanes read the smallest address, which is
        # valid.
        at = words_at(tl.where(active, address, tl.min(address, axis=0)))
        words = tl.load(at, volatile=True)
        while tl.max(tl.max(((words == SENTINEL) & active[:, None]).to(tl.int32), axis=1), axis=0) != 0:
            words = tl.load(at, volatile=True)
        words = tl.where(active[:, None], words, 0)
    else:
        ASM: tl.constexpr = _POLL_1 if PACK == 1 else (_POLL_2 if PACK == 2 else _POLL_4)
        REGISTERS: tl.constexpr = _POLL_1_REGISTERS if PACK == 1 else (_POLL_2_REGISTERS if PACK == 2 else _POLL_4_REGISTERS)
        first, second, third, fourth = tl.inline_asm_elementwise(
            ASM,
            REGISTERS,
            [address, active.to(tl.int32), limit.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=PACK,
        )
        words = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (address.shape[0], 4))
    return words


@triton.jit
def clear(address, active):
    """Resets vectors to the sentinel. Call this function after a barrier, because another thread may still be polling the
    vector."""
    push(address, tl.full((address.shape[0], 4), SENTINEL, tl.int32), active)


@triton.jit
def sendable(words, dtype: tl.constexpr):
    """Replaces words equal to the sentinel, which cannot be sent.

    Two 16-bit negative zeros become +0, and a float32 changes by less than 2e-45.
    """
    replacement: tl.constexpr = SENTINEL + 1 if dtype == tl.float32 else 0
    return tl.where(words == SENTINEL, replacement, words)


@triton.jit
def unpack(words, dtype: tl.constexpr):
    """Returns the first and the second element of each word as float32. For float32, the second elements are zeros."""
    if dtype == tl.float32:
        first = words.to(tl.float32, bitcast=True)
        second = tl.zeros_like(first)
    elif dtype == tl.bfloat16:
        first = (words << 16).to(tl.float32, bitcast=True)
        second = (words & -65536).to(tl.float32, bitcast=True)
    else:
        first = words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def pack(first, second, dtype: tl.constexpr):
    """Rounds elements to ``dtype`` and packs them into words: the inverse of `unpack`."""
    if dtype == tl.float32:
        words = first.to(tl.int32, bitcast=True)
    else:
        words = round_to(first, dtype, _INTERPRETED).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words |= round_to(second, dtype, _INTERPRETED).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return words


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """Rounds float32 values to the precision of a dtype, and returns float32."""
    return round_to(value, dtype, _INTERPRETED).to(tl.float32)

"""Two Triton kernels for tests: `spin` only waits, and `send` sends vectors to peer memory."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from tokenspeed_kernel.triton.comm._peers_device import push


@triton.jit(do_not_specialize=["rank", "place"])
def spin(turn, rank, place):  # type: ignore[no-untyped-def]
    """Waits for 0 to 20 us. The time is a hash of the int64 that ``turn`` points to, the rank and ``place``. Half of the times are
    0."""
    mixed = (tl.load(turn) * 7919 + rank * 104729 + place * 1299709) & 0x3FFFFFFF
    mixed = (mixed * 1103515245 + 12345) & 0x3FFFFFFF
    wait = tl.where((mixed >> 20) % 2 == 0, 0, (mixed >> 5) % 20000)
    began = cuda.globaltimer()
    while cuda.globaltimer() - began < wait:
        pass


@triton.jit
def send(address, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sends COUNT vectors of zeros."""
    place = tl.arange(0, COUNT)
    push(address + place.to(tl.int64) * 16, tl.zeros((COUNT, 4), tl.int32), place < COUNT)

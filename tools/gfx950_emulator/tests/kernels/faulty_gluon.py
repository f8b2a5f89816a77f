"""Gluon kernels with one fault each. Some kernels become faulty only when a test edits their code. The faulty line ends with the
tests' marker."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [64], [4], [0]))
FOUR_EACH = gl.constexpr(gl.BlockedLayout([4], [64], [4], [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def copies_in_groups(x_ptr, out_ptr, steps, outstanding: gl.constexpr, block: gl.constexpr):
    """out = x by direct loads to LDS, one step ahead. The kernel is correct if at most 1 group of loads may be outstanding at the
    wait."""
    at = gl.arange(0, block, FOUR_EACH)
    memory = gl.allocate_shared_memory(gl.float32, [2, block], PLAIN)
    async_copy.buffer_load_to_shared(memory.index(0), x_ptr, at)
    async_copy.commit_group()
    for step in range(steps):
        ahead = min(step + 1, steps - 1)
        async_copy.buffer_load_to_shared(memory.index((step + 1) % 2), x_ptr, at + ahead * block)
        async_copy.commit_group()
        async_copy.wait_group(outstanding)
        x = memory.index(step % 2).load(FOUR_EACH)  # BUG
        cdna4.buffer_store(x, out_ptr, at + step * block)


@gluon.jit
def copies_without_waiting(x_ptr, out_ptr, waits: gl.constexpr, block: gl.constexpr):
    """out = x by one direct load to LDS. The kernel waits for the load only if `waits`."""
    at = gl.arange(0, block, FOUR_EACH)
    memory = gl.allocate_shared_memory(gl.float32, [block], PLAIN)
    async_copy.global_load_to_shared(memory, x_ptr + at)
    async_copy.commit_group()
    if waits:
        async_copy.wait_group(0)
    x = memory.load(FOUR_EACH)  # BUG
    gl.store(out_ptr + at, x)


@gluon.jit
def exchanges(x_ptr, out_ptr, block: gl.constexpr):
    """out = x through LDS. Lanes store four adjacent elements at a time, and read single elements that other waves stored. The
    kernel needs the first barrier that the compiler inserts."""
    memory = gl.allocate_shared_memory(gl.float32, [block], PLAIN)
    memory.store(gl.load(x_ptr + gl.arange(0, block, FOUR_EACH)))
    x = memory.load(ONE_EACH)  # BUG
    gl.store(out_ptr + gl.arange(0, block, ONE_EACH), x)


@gluon.jit
def exchanges_twice(x_ptr, out_ptr, block: gl.constexpr):
    """out = x, then 2 x, through the same LDS. The second write needs a barrier after the first read."""
    memory = gl.allocate_shared_memory(gl.float32, [block], PLAIN)
    x = gl.load(x_ptr + gl.arange(0, block, FOUR_EACH))
    memory.store(x)
    first = memory.load(ONE_EACH)
    memory.store(x * 2)  # BUG
    second = memory.load(ONE_EACH)
    at = gl.arange(0, block, ONE_EACH)
    gl.store(out_ptr + at, first)
    gl.store(out_ptr + block + at, second)


@gluon.jit
def reads_what_nobody_wrote(x_ptr, out_ptr, written: gl.constexpr, block: gl.constexpr):
    """out = LDS [block], of which only the first `written` elements were stored."""
    memory = gl.allocate_shared_memory(gl.float32, [block], PLAIN)
    memory.slice(0, written).store(gl.load(x_ptr + gl.arange(0, written, ONE_EACH)))
    gl.barrier()
    gl.store(out_ptr + gl.arange(0, block, ONE_EACH), memory.load(ONE_EACH))  # BUG


@gluon.jit
def branches_on_what_nobody_wrote(out_ptr, initialised: gl.constexpr):
    """out[0] = 1 if any element of LDS is positive. The elements were stored, as 1, only if `initialised`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [1], [0])
    memory = gl.allocate_shared_memory(gl.int32, [64], PLAIN)
    if initialised:
        memory.store(gl.full([64], 1, gl.int32, layout))
    if gl.max(memory.load(layout), 0) > 0:  # BUG
        gl.store(out_ptr, 1)


@gluon.jit
def reads_half(x_ptr, out_ptr, block: gl.constexpr):
    """out = the first half of x through LDS, by reads of 16 bytes."""
    memory = gl.allocate_shared_memory(gl.float32, [block], PLAIN)
    memory.store(gl.load(x_ptr + gl.arange(0, block, FOUR_EACH)))
    half = memory.slice(0, block // 2)
    x = half.load(FOUR_EACH)  # BUG
    gl.store(out_ptr + gl.arange(0, block // 2, FOUR_EACH), x)


@gluon.jit
def scales_what_it_reads(x_ptr, out_ptr, block: gl.constexpr):
    """out = 3 x through LDS. The kernel is correct until a test removes the wait for the read."""
    memory = gl.allocate_shared_memory(gl.float32, [block], PLAIN)
    memory.store(gl.load(x_ptr + gl.arange(0, block, FOUR_EACH)))
    x = memory.load(ONE_EACH)
    gl.store(out_ptr + gl.arange(0, block, ONE_EACH), x * 3)  # BUG


@gluon.jit
def meets_once(x_ptr, out_ptr, block: gl.constexpr):
    """out = x + 1, with an unneeded barrier. In the tests, one wave skips this barrier."""
    at = gl.arange(0, block, ONE_EACH)
    x = gl.load(x_ptr + at)
    gl.barrier()  # BUG
    gl.store(out_ptr + at, x + 1)

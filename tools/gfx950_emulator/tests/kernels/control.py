"""Triton kernels that test control flow and launch geometry: loops, grids, calls, scalar memory, spills."""

import triton
import triton.language as tl


@triton.jit
def collatz(x_ptr, steps_ptr, block: tl.constexpr):
    """steps[i] = the number of Collatz steps of x[i]. Each program loops until all elements of its block are 1. Elements that are 1
    stay 1."""
    pid = tl.program_id(0)
    at = pid * block + tl.arange(0, block)
    x = tl.load(x_ptr + at)
    steps = tl.zeros((block,), tl.int32)
    while tl.max(x, axis=0) > 1:
        steps += (x > 1).to(tl.int32)
        x = tl.where(x > 1, tl.where(x % 2 == 0, x // 2, 3 * x + 1), x)
    tl.store(steps_ptr + at, steps)


@triton.jit
def _collatz_steps(x):
    steps = 0
    while x > 1:
        steps += 1
        if x % 2 == 0:
            x = x // 2
        else:
            x = 3 * x + 1
    return steps


@triton.jit
def collatz_scalar(x_ptr, steps_ptr, n):
    """steps[i] = Collatz steps of the scalar x[i] for each i of this program: i = program, program + programs, ... < n."""
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        tl.store(steps_ptr + i, _collatz_steps(tl.load(x_ptr + i)))


@triton.jit
def collatz_lanes(x_ptr, steps_ptr, block: tl.constexpr):
    """steps = Collatz steps of every element, with a separate loop in each lane."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    steps = tl.map_elementwise(_collatz_steps, tl.load(x_ptr + at))
    tl.store(steps_ptr + at, steps)


@triton.jit
def ragged_sums(values_ptr, starts_ptr, out_ptr, block: tl.constexpr):
    """out[row] = sum of values[starts[row] : starts[row + 1]]. The kernel reads the loop's length, which may be 0, from memory."""
    row = tl.program_id(0)
    start = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1)
    total = tl.zeros((block,), tl.float32)
    for first in range(start, end, block):
        at = first + tl.arange(0, block)
        total += tl.load(values_ptr + at, mask=at < end, other=0.0)
    tl.store(out_ptr + row, tl.sum(total, axis=0))


@triton.jit
def grid_coordinates(out_ptr):
    """out[z, y, x] = the program's own coordinates and the grid's size, packed in decimal digits."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    nx, ny, nz = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    value = ((((x * 10 + y) * 10 + z) * 10 + nx) * 10 + ny) * 10 + nz
    tl.store(out_ptr + (z * ny + y) * nx + x, value)


@triton.jit
def copy_through_table(table_ptr, sizes_ptr, out_ptr, block: tl.constexpr):
    """out[row] = the float32 values at the address in table[row] (int64); elements from sizes[row] on are zero."""
    row = tl.program_id(0)
    source = tl.load(table_ptr + row).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, block)
    x = tl.load(source + at, mask=at < tl.load(sizes_ptr + row), other=0.0)
    tl.store(out_ptr + row * block + at, x)


@triton.jit(noinline=True)
def _square_if_odd(n):
    if n % 2 == 1:
        return n * n
    return n


@triton.jit(noinline=True)
def _weighted_count(n, weight):
    total = 0.0
    while n > 0:
        total += _square_if_odd(n) * weight
        n -= 1
    return total


@triton.jit
def calls(x_ptr, out_ptr, weight):
    """out[program] = f(x[program]) + f(program), where f(n) is weight times the sum of 1..n with odd terms squared. The kernel
    calls functions that are not inlined."""
    pid = tl.program_id(0)
    tl.store(out_ptr + pid, _weighted_count(tl.load(x_ptr + pid), weight) + _weighted_count(pid, weight))


@triton.jit
def shift_within_block(x_ptr, scratch_ptr, out_ptr, block: tl.constexpr):
    """out = each block's elements rotated by 65. The elements pass through global memory, with a barrier between the write and the
    read."""
    pid = tl.program_id(0)
    at = tl.arange(0, block)
    tl.store(scratch_ptr + pid * block + at, tl.load(x_ptr + pid * block + at))
    tl.debug_barrier()
    tl.store(out_ptr + pid * block + at, tl.load(scratch_ptr + pid * block + (at + 65) % block))


@triton.jit
def spilled(x_ptr, out_ptr, rounds, block: tl.constexpr):
    """out [6, block] = x after `rounds` rounds of sums and differences of its six rows. All rows stay live, so there are more
    values than registers."""
    at = tl.arange(0, block)
    a0 = tl.load(x_ptr + at)
    a1 = tl.load(x_ptr + block + at)
    a2 = tl.load(x_ptr + 2 * block + at)
    a3 = tl.load(x_ptr + 3 * block + at)
    a4 = tl.load(x_ptr + 4 * block + at)
    a5 = tl.load(x_ptr + 5 * block + at)
    for _ in range(rounds):
        a0, a1, a2, a3, a4, a5 = a1 + a0, a2 - a0, a3 + a1, a4 - a2, a5 + a3, a0 * 0.5
    tl.store(out_ptr + at, a0)
    tl.store(out_ptr + block + at, a1)
    tl.store(out_ptr + 2 * block + at, a2)
    tl.store(out_ptr + 3 * block + at, a3)
    tl.store(out_ptr + 4 * block + at, a4)
    tl.store(out_ptr + 5 * block + at, a5)


@triton.jit
def many_arguments(
    out_ptr, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, c0, c1, c2, c3, c4,
    block: tl.constexpr,
):  # fmt: skip
    """out = a weighted sum of 25 scalar arguments of several dtypes, plus each element's index."""
    total = a0 + 2 * a1 + 3 * a2 + 4 * a3 + 5 * a4 + 6 * a5 + 7 * a6 + 8 * a7 + 9 * a8 + 10 * a9
    total += 11 * b0 + 12 * b1 + 13 * b2 + 14 * b3 + 15 * b4 + 16 * b5 + 17 * b6 + 18 * b7 + 19 * b8 + 20 * b9
    total += 21 * c0 + 22 * c1 + 23 * c2 + 24 * c3 + 25 * c4
    at = tl.arange(0, block)
    tl.store(out_ptr + at, total.to(tl.float32) + at)


@triton.jit
def fill(out):
    """out = 7."""
    tl.store(out, 7)

"""Triton kernels with atomic operations, in which several workgroups access the same addresses."""

import triton
import triton.language as tl


@triton.jit
def add_to_bins(values_ptr, bins_ptr, totals_ptr, n, block: tl.constexpr):
    """totals[bin] += value for n pairs, in any order, with repeated bins."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    tl.atomic_add(totals_ptr + tl.load(bins_ptr + at, mask=inside, other=0), tl.load(values_ptr + at, mask=inside, other=0), inside)


@triton.jit
def bounds(values_ptr, low_ptr, high_ptr, n, block: tl.constexpr):
    """low[0] and high[0] become the smallest and the largest of n values and of the old contents."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    x = tl.load(values_ptr + at, mask=inside)
    zero = tl.zeros((block,), tl.int32)
    tl.atomic_max(high_ptr + zero, x, mask=inside)
    tl.atomic_min(low_ptr + zero, x, mask=inside)


@triton.jit
def bounds_of_columns(values_ptr, low_ptr, high_ptr, n, block: tl.constexpr):
    """low and high [block] become the smallest and the largest of the old contents and of n values. The values are distributed
    round-robin over `block` columns."""
    column = tl.arange(0, block)
    at = tl.program_id(0) * block + column
    inside = at < n
    x = tl.load(values_ptr + at, mask=inside)
    tl.atomic_max(high_ptr + column, x, mask=inside)
    tl.atomic_min(low_ptr + column, x, mask=inside)


@triton.jit
def combine_bits(values_ptr, out_ptr, n, block: tl.constexpr):
    """out[0], out[1], out[2] = and, or, xor of n values with the old contents."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    x = tl.load(values_ptr + at, mask=inside)
    zero = tl.zeros((block,), tl.int32)
    tl.atomic_and(out_ptr + zero, x, mask=inside)
    tl.atomic_or(out_ptr + 1 + zero, x, mask=inside)
    tl.atomic_xor(out_ptr + 2 + zero, x, mask=inside)


@triton.jit
def tickets(counter_ptr, seen_ptr, order_ptr, block: tl.constexpr):
    """Every element takes a number from counter[0] and marks this number in seen. Every program takes a number from counter[1], and
    stores this number in order."""
    zero = tl.zeros((block,), tl.int32)
    ticket = tl.atomic_add(counter_ptr + zero, 1)
    tl.atomic_add(seen_ptr + ticket, 1)
    tl.store(order_ptr + tl.program_id(0), tl.atomic_add(counter_ptr + 1, 1))


@triton.jit
def multiply_shared(values_ptr, product_ptr):
    """product[0] *= value of this program, by a compare-and-swap loop."""
    x = tl.load(values_ptr + tl.program_id(0))
    old = tl.load(product_ptr)
    done = tl.full((), False, tl.int1)
    while not done:
        found = tl.atomic_cas(product_ptr, old, old * x)
        done = found == old
        old = found


@triton.jit
def critical_section(lock_ptr, log_ptr, count_ptr):
    """Each program executes count[0] += 1 and log[count] = program, without atomics, inside a compare-and-swap spin lock."""
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    count = tl.load(count_ptr, volatile=True)
    tl.store(log_ptr + count, tl.program_id(0))
    tl.store(count_ptr, count + 1)
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def exchange(slots_ptr, out_ptr, block: tl.constexpr):
    """Every program exchanges its own values with the values in the slots, and stores the old values in out."""
    at = tl.arange(0, block)
    mine = (tl.program_id(0) + 1) * block + at
    tl.store(out_ptr + tl.program_id(0) * block + at, tl.atomic_xchg(slots_ptr + at, mine))


@triton.jit
def exchange_if_equal(slots_ptr, expected_ptr, wanted_ptr, found_ptr, block: tl.constexpr):
    """Slots that equal expected become wanted; found = the old values."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    found = tl.atomic_cas(slots_ptr + at, tl.load(expected_ptr + at), tl.load(wanted_ptr + at))
    tl.store(found_ptr + at, found)


@triton.jit
def split_sum(x_ptr, partial_ptr, arrived_ptr, out_ptr, n, block: tl.constexpr):
    """out[0] = sum of n values. Each program stores a partial sum, and the last program to arrive adds all partial sums."""
    pid = tl.program_id(0)
    at = pid * block + tl.arange(0, block)
    tl.store(partial_ptr + pid, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0), axis=0))
    tl.debug_barrier()
    last = tl.num_programs(0) - 1
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == last:
        total = 0.0
        for i in range(last + 1):
            total += tl.load(partial_ptr + i, volatile=True)
        tl.store(out_ptr, total)


@triton.jit
def wait_for_others(flags_ptr, out_ptr):
    """out[program] = 1 + ... + (program + 1). Each program waits for the previous program's flag, and adds to that program's
    sum."""
    pid = tl.program_id(0)
    before = 0
    if pid > 0:
        while tl.atomic_add(flags_ptr + pid - 1, 0, sem="acquire") == 0:
            pass
        before = tl.load(out_ptr + pid - 1, volatile=True)
    tl.store(out_ptr + pid, before + pid + 1)
    tl.debug_barrier()
    tl.atomic_xchg(flags_ptr + pid, 1, sem="release")


@triton.jit
def reverse_through_grid(x_ptr, middle_ptr, arrived_ptr, out_ptr, block: tl.constexpr):
    """out = x reversed, plus 1. Every program writes its block, waits until all programs have arrived, and reads another program's
    block."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    at = pid * block + tl.arange(0, block)
    tl.store(middle_ptr + at, tl.load(x_ptr + at) + 1)
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr, 1, sem="release")
    while tl.atomic_add(arrived_ptr, 0, sem="acquire") < programs:
        pass
    tl.debug_barrier()
    tl.store(out_ptr + at, tl.load(middle_ptr + programs * block - 1 - at, volatile=True))

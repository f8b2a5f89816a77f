"""Triton kernels with one fault each, for the sanitizer. The faulty line ends with the tests' marker."""

import triton
import triton.language as tl


@triton.jit
def reads_too_far(x_ptr, out_ptr, n, past, block: tl.constexpr):
    """out = x for n elements, but reads `past` elements more than n."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at, mask=at < n + past)  # BUG
    tl.store(out_ptr + at, x, mask=at < n)


@triton.jit
def writes_too_far(x_ptr, out_ptr, n, past, block: tl.constexpr):
    """out = x for n elements, but writes `past` elements more than n."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x, mask=at < n + past)  # BUG


@triton.jit
def reads_before(x_ptr, out_ptr, n, shift, block: tl.constexpr):
    """out[i] = x[i] - x[i - shift]. For the first elements, x[i - shift] is out of bounds."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at, mask=at < n)
    before = tl.load(x_ptr + at - shift, mask=at < n)  # BUG
    tl.store(out_ptr + at, x - before, mask=at < n)


@triton.jit
def follows_indices(x_ptr, index_ptr, out_ptr, block: tl.constexpr):
    """out = x[index], without a check of the index."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    index = tl.load(index_ptr + at)
    x = tl.load(x_ptr + index)  # BUG
    tl.store(out_ptr + at, x)


@triton.jit
def adds_to_indices(index_ptr, out_ptr, block: tl.constexpr):
    """out[index] += 1, without a check of the index."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    index = tl.load(index_ptr + at)
    tl.atomic_add(out_ptr + index, 1)  # BUG


@triton.jit
def uses_what_it_loads(x_ptr, y_ptr, out_ptr, block: tl.constexpr):
    """out = 3 x + y. The kernel is correct until a test removes a wait or a load."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    tl.store(out_ptr + at, x * 3 + y)  # BUG


@triton.jit
def waits_for_nobody(flag_ptr, out_ptr):
    """out[program] = program, after a flag is set. No program sets this flag."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire") == 0:  # BUG
        pass
    tl.store(out_ptr + tl.program_id(0), tl.program_id(0))


@triton.jit
def polls_for_nobody(flag_ptr, out_ptr):
    """Like `waits_for_nobody`, with loads instead of atomics."""
    while tl.load(flag_ptr, volatile=True) == 0:  # BUG
        pass
    tl.store(out_ptr + tl.program_id(0), tl.program_id(0))


@triton.jit
def keeps_the_lock(lock_ptr, count_ptr):
    """count += 1 inside a spin lock that is never released."""
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:  # BUG
        pass
    tl.store(count_ptr, tl.load(count_ptr, volatile=True) + 1)

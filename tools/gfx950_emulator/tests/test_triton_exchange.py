"""Tests whole kernels, compiled by unmodified Triton, that exchange data between lanes, waves and workgroups: atomics, reductions,
scans, sorting, gathers."""

from __future__ import annotations

import math

import pytest
import torch
import triton

from gfx950_emulator import emulated_gfx950

from .kernels import atomics, reductions
from .kernels.formats import integers, relative_error

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


# Atomic operations.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_atomic_add(dtype: torch.dtype, rng: torch.Generator) -> None:
    n, bins = 700, 12
    # The sums of such small integers are exact in every dtype, in any order.
    values = integers(rng, -3, 4, n).to(dtype)
    chosen = integers(rng, 0, bins, n)
    totals = torch.ones(bins, dtype=dtype)
    with emulated_gfx950():
        atomics.add_to_bins[(3,)](values, chosen, totals, n, 256)
    expected = torch.ones(bins, dtype=torch.float64).index_add(0, chosen.long(), values.double())
    assert torch.equal(totals.double(), expected)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("bins", [1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_atomic_add_to_an_odd_number_of_halves(dtype: torch.dtype, bins: int, first: int, rng: torch.Generator) -> None:
    """16-bit atomics work on whole dwords. The tensor may contain only one half of a dword."""
    values, chosen = integers(rng, -3, 4, 60).to(dtype), integers(rng, 0, bins, 60)
    memory = integers(rng, -3, 4, bins + 3).to(dtype)
    expected = memory.double()
    expected[first : first + bins].index_add_(0, chosen.long(), values.double())
    with emulated_gfx950():
        atomics.add_to_bins[(1,)](values, chosen, memory[first : first + bins], 60, 64)
    assert torch.equal(memory.double(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.uint32], ids=str)
def test_atomic_bounds_at_one_address(dtype: torch.dtype, rng: torch.Generator) -> None:
    # Triton 3.6 and 3.9 first combine the lanes of a wave that access the same address. Triton then uses unsigned comparisons even
    # if the operation is signed, so the integers of this test are not negative.
    n = 600
    low_end = -(2**31) if dtype.is_floating_point else 0
    x = integers(rng, low_end, 2**31 - 512, n, dtype=torch.int64).to(torch.float32).to(dtype)
    low, high = torch.tensor([2**30]).to(dtype), torch.tensor([7]).to(dtype)
    with emulated_gfx950():
        atomics.bounds[(3,)](x, low, high, n, 256, num_warps=2)
    wide = x.to(torch.float64)
    assert low.to(torch.float64).item() == min(2**30, wide.min().item())
    assert high.to(torch.float64).item() == max(7, wide.max().item())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64], ids=str)
def test_atomic_bounds_of_columns(dtype: torch.dtype, rng: torch.Generator) -> None:
    n = 600
    x = integers(rng, -(2**31), 2**31, n, dtype=torch.int64).to(dtype)
    low, high = torch.full((256,), 5).to(dtype), torch.full((256,), 7).to(dtype)
    with emulated_gfx950():
        atomics.bounds_of_columns[(3,)](x, low, high, n, 256)
    rows = torch.cat((x, torch.full((768 - n,), 6).to(dtype))).reshape(3, 256)
    assert torch.equal(low, rows.amin(0).clamp(max=5))
    assert torch.equal(high, rows.amax(0).clamp(min=7))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_atomic_bits(dtype: torch.dtype, rng: torch.Generator) -> None:
    x = integers(rng, 0, 2**30, 300, dtype=dtype)
    x |= 1 << 20
    x &= ~(1 << 9)
    out = torch.tensor([-1, 0, 12345], dtype=dtype)
    with emulated_gfx950():
        atomics.combine_bits[(2,)](x, out, 300, 256)
    expected = [-1, 0, 12345]
    for value in x.tolist():
        expected = [expected[0] & value, expected[1] | value, expected[2] ^ value]
    assert out.tolist() == expected


def test_atomic_add_returns_what_was_there() -> None:
    counter = torch.zeros(2, dtype=torch.int32)
    seen, order = torch.zeros(4 * 128, dtype=torch.int32), torch.full((4,), -1, dtype=torch.int32)
    with emulated_gfx950():
        atomics.tickets[(4,)](counter, seen, order, 128)
    assert counter.tolist() == [512, 4]
    assert (seen == 1).all()
    assert sorted(order.tolist()) == [0, 1, 2, 3]


def test_compare_and_swap_loop() -> None:
    values = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6], dtype=torch.int32)
    product = torch.tensor([7], dtype=torch.int32)
    with emulated_gfx950():
        atomics.multiply_shared[(8,)](values, product, num_warps=2)
    assert product.item() == 7 * math.prod(values.tolist())


def test_spin_lock() -> None:
    lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    log = torch.full((6,), -1, dtype=torch.int32)
    with emulated_gfx950():
        atomics.critical_section[(6,)](lock, log, count, num_warps=1)
    assert count.item() == 6
    assert sorted(log.tolist()) == list(range(6))
    assert lock.item() == 0


@pytest.mark.skipif(TRITON < (3, 9), reason="Triton 3.6 does not compile an exchange of lanes for this target")
def test_exchange() -> None:
    slots = torch.arange(64, dtype=torch.int32)
    out = torch.full((5, 64), -1, dtype=torch.int32)
    with emulated_gfx950():
        atomics.exchange[(5,)](slots, out, 64, num_warps=1)
    assert sorted(torch.cat((slots, out.flatten())).tolist()) == list(range(6 * 64))
    assert (torch.cat((slots, out.flatten())) % 64 == torch.arange(6 * 64) % 64).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_compare_and_swap_of_lanes(dtype: torch.dtype, rng: torch.Generator) -> None:
    slots = integers(rng, 0, 3, 256, dtype=dtype)
    expected, wanted = integers(rng, 0, 3, 256, dtype=dtype), integers(rng, 10, 20, 256, dtype=dtype)
    before, found = slots.clone(), torch.full_like(slots, -1)
    with emulated_gfx950():
        atomics.exchange_if_equal[(2,)](slots, expected, wanted, found, 128)
    assert torch.equal(found, before)
    assert torch.equal(slots, torch.where(before == expected, wanted, before))


def test_last_arrival_adds_the_parts(rng: torch.Generator) -> None:
    x = torch.randn(1000, generator=rng)
    partial, arrived, out = torch.full((8,), math.nan), torch.zeros(1, dtype=torch.int32), torch.full((1,), math.nan)
    with emulated_gfx950():
        atomics.split_sum[(8,)](x, partial, arrived, out, 1000, 128)
    assert arrived.item() == 8
    torch.testing.assert_close(out.double(), x.double().sum()[None], rtol=1e-6, atol=1e-5)


def test_programs_that_wait_for_one_another() -> None:
    flags, out = torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    with emulated_gfx950():
        atomics.wait_for_others[(6,)](flags, out, num_warps=1)
    assert out.tolist() == [1, 3, 6, 10, 15, 21]


def test_barrier_of_the_whole_grid(rng: torch.Generator) -> None:
    x = integers(rng, 0, 100, 4 * 64)
    middle, arrived, out = torch.zeros_like(x), torch.zeros(1, dtype=torch.int32), torch.zeros_like(x)
    with emulated_gfx950():
        atomics.reverse_through_grid[(4,)](x, middle, arrived, out, 64, num_warps=1)
    assert torch.equal(out, x.flip(0) + 1)


# Exchange between lanes and waves.


@pytest.mark.parametrize(("rows", "columns", "num_warps"), [(3, 100, 1), (2, 1000, 4), (1, 2049, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax(rows: int, columns: int, num_warps: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    x = (torch.randn(rows, columns, generator=rng) * 4).to(dtype)
    out = torch.zeros_like(x)
    with emulated_gfx950():
        reductions.softmax[(rows,)](x, out, columns, triton.next_power_of_2(columns), num_warps=num_warps)
    expected = torch.softmax(x.double(), dim=1)
    assert relative_error(out, expected) <= (1e-6 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_layernorm(dtype: torch.dtype, rng: torch.Generator) -> None:
    rows, columns = 3, 700
    x = (torch.randn(rows, columns, generator=rng) * 2 + 1).to(dtype)
    weight, bias = (torch.randn(columns, generator=rng).to(dtype) for _ in range(2))
    out, mean, rstd = torch.zeros_like(x), torch.zeros(rows), torch.zeros(rows)
    with emulated_gfx950():
        reductions.layernorm[(rows,)](x, weight, bias, out, mean, rstd, columns, 1e-5, 256)
    expected = torch.nn.functional.layer_norm(x.double(), (columns,), weight.double(), bias.double(), 1e-5)
    assert relative_error(out, expected) <= (1e-6 if dtype is torch.float32 else 1e-3)
    torch.testing.assert_close(mean.double(), x.double().mean(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rstd.double(), (x.double().var(1, correction=0) + 1e-5).rsqrt(), rtol=1e-6, atol=0)


def _xor_reduce(x: torch.Tensor, axis: int) -> torch.Tensor:
    out = torch.zeros_like(x.select(axis, 0))
    for part in x.unbind(axis):
        out ^= part
    return out


_REDUCTIONS = {
    "sum": lambda x, axis: x.sum(axis, dtype=x.dtype),
    "max": lambda x, axis: x.amax(axis),
    "min": lambda x, axis: x.amin(axis),
    "argmax": lambda x, axis: torch.from_numpy(x.numpy().argmax(axis)),
    "argmin": lambda x, axis: torch.from_numpy(x.numpy().argmin(axis)),
    "xor": _xor_reduce,
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("sum", torch.int32),
        ("sum", torch.float32),
        ("sum", torch.float64),
        ("max", torch.float32),
        ("max", torch.int64),
        ("min", torch.float16),
        ("argmax", torch.float32),
        ("argmin", torch.int32),
        ("xor", torch.int32),
    ],
    ids=str,
)
def test_reductions(name: str, dtype: torch.dtype, axis: int, rng: torch.Generator) -> None:
    rows, columns = 32, 64
    # There are few distinct values, so argmax and argmin have ties. The sums of such integers are exact.
    x = integers(rng, -40, 40, 2, rows, columns).to(dtype)
    expected = _REDUCTIONS[name](x, axis + 1)
    out = torch.full_like(expected, -99, dtype=torch.int32 if name.startswith("arg") else dtype)
    with emulated_gfx950():
        reductions.reduce[(2,)](x, out, rows, columns, axis, name)
    assert torch.equal(out, expected.to(out.dtype))


@pytest.mark.parametrize("num_warps", [1, 2, 8, 16])
def test_reduction_across_any_number_of_waves(num_warps: int, rng: torch.Generator) -> None:
    x = integers(rng, -1000, 1000, 1, 4, 1024)
    out = torch.zeros(1, 4, dtype=torch.int32)
    with emulated_gfx950():
        reductions.reduce[(1,)](x, out, 4, 1024, 1, "sum", num_warps=num_warps)
    assert torch.equal(out, x.sum(2, dtype=torch.int32))


def test_reduction_of_several_values_at_once(rng: torch.Generator) -> None:
    x = torch.randn(4, 512, generator=rng) * 3 + 10
    mean, variance = torch.zeros(4), torch.zeros(4)
    with emulated_gfx950():
        reductions.mean_and_variance[(4,)](x, mean, variance, 512)
    torch.testing.assert_close(mean.double(), x.double().mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(variance.double(), x.double().var(1, correction=0), rtol=3e-6, atol=0)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("name", "axis"), [("cumsum", 0), ("cumsum", 1), ("cumprod", 1), ("cummax", 0)])
def test_scans(name: str, axis: int, reverse: bool, rng: torch.Generator) -> None:
    rows, columns = 16, 64
    x = integers(rng, 1, 4, rows, columns) if name == "cumprod" else integers(rng, -500, 500, rows, columns)
    out = torch.zeros_like(x)
    with emulated_gfx950():
        reductions.scan[(1,)](x, out, rows, columns, axis, reverse, name, num_warps=2)
    ordered = x.flip(axis) if reverse else x
    if name == "cumsum":
        expected = ordered.cumsum(axis, dtype=torch.int32)
    elif name == "cumprod":
        expected = ordered.cumprod(axis, dtype=torch.int32)
    else:
        expected = ordered.cummax(axis).values
    assert torch.equal(out, expected.flip(axis) if reverse else expected)


@pytest.mark.parametrize("num_warps", [1, 4])
def test_long_scan_across_waves(num_warps: int, rng: torch.Generator) -> None:
    x = integers(rng, -500, 500, 1, 1024)
    out = torch.zeros_like(x)
    with emulated_gfx950():
        reductions.scan[(1,)](x, out, 1, 1024, 1, False, "cumsum", num_warps=num_warps)
    assert torch.equal(out, x.cumsum(1, dtype=torch.int32))


def test_scan_of_pairs(rng: torch.Generator) -> None:
    rows, length = 4, 256
    a, b = torch.rand(rows, length, generator=rng), torch.randn(rows, length, generator=rng)
    out = torch.zeros(rows, length)
    with emulated_gfx950():
        reductions.recurrence[(1,)](a, b, out, rows, length)
    expected, state = torch.zeros(rows, length, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    for t in range(length):
        state = a[:, t].double() * state + b[:, t].double()
        expected[:, t] = state
    assert relative_error(out, expected) <= 1e-6


@pytest.mark.parametrize(
    ("dtype", "columns", "descending"),
    [(torch.float32, 64, False), (torch.float32, 64, True), (torch.int32, 256, False), (torch.int64, 32, True)],
    ids=str,
)
def test_sort(dtype: torch.dtype, columns: int, descending: bool, rng: torch.Generator) -> None:
    x = integers(rng, -90, 90, 4, columns).to(dtype)
    out = torch.zeros_like(x)
    with emulated_gfx950():
        reductions.sort[(1,)](x, out, 4, columns, descending)
    assert torch.equal(out, x.sort(1, descending=descending).values)


def test_topk(rng: torch.Generator) -> None:
    x = torch.randn(8, 128, generator=rng)
    out = torch.zeros(8, 4)
    with emulated_gfx950():
        reductions.topk[(1,)](x, out, 8, 128, 4)
    assert torch.equal(out, x.topk(4, dim=1).values)


def test_flip(rng: torch.Generator) -> None:
    x = torch.randn(8, 128, generator=rng)
    out = torch.zeros_like(x)
    with emulated_gfx950():
        reductions.flip[(1,)](x, out, 8, 128)
    assert torch.equal(out, x.flip(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_transpose(dtype: torch.dtype, rng: torch.Generator) -> None:
    x = integers(rng, -100, 100, 32, 64).to(dtype)
    out = torch.zeros(64, 32, dtype=dtype)
    with emulated_gfx950():
        reductions.transpose[(1,)](x, out, 32, 64)
    assert torch.equal(out, x.T)


def test_interleave_and_split(rng: torch.Generator) -> None:
    x, y = (integers(rng, -(2**31), 2**31, 256) for _ in range(2))
    out, difference = torch.zeros(512, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    with emulated_gfx950():
        reductions.interleave[(1,)](x, y, out, difference, 256)
    assert torch.equal(out, torch.stack((x, y), 1).flatten())
    assert torch.equal(difference, x - y)


@pytest.mark.parametrize("bins", [16, 256])
def test_histogram(bins: int, rng: torch.Generator) -> None:
    n = 900
    x = (torch.rand(n, generator=rng) ** 2 * bins).int()
    out = torch.full((2, bins), -1, dtype=torch.int32)
    with emulated_gfx950():
        reductions.histogram[(2,)](x, out, n, 512, bins)
    expected = torch.stack([torch.bincount(part, minlength=bins) for part in (x[:512], x[512:])])
    assert torch.equal(out, expected.int())


@pytest.mark.parametrize(("axis", "rows", "columns", "taken"), [(1, 16, 64, 64), (0, 64, 16, 32), (1, 4, 256, 128)])
def test_gather(axis: int, rows: int, columns: int, taken: int, rng: torch.Generator) -> None:
    x = torch.randn(rows, columns, generator=rng)
    shape = (taken, columns) if axis == 0 else (rows, taken)
    index = integers(rng, 0, x.shape[axis], *shape)
    out = torch.zeros(shape)
    with emulated_gfx950():
        reductions.gather[(1,)](x, index, out, rows, columns, taken, axis)
    assert torch.equal(out, x.gather(axis, index.long()))

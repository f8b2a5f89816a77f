"""Tests whole kernels that unmodified Triton compiles for gfx950, on the emulator, against references in PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
import triton

from gfx950_emulator import emulated_gfx950

from .kernels import control, elementwise, products
from .kernels.formats import integers, packed_across, random_operand, relative_error

# One operation per element.


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.float64, torch.int8], ids=str
)
def test_add(dtype: torch.dtype, rng: torch.Generator) -> None:
    n = 1000
    x, y = (torch.randn(n, generator=rng) * 20 for _ in range(2))
    x, y = x.to(dtype), y.to(dtype)
    out = torch.full((n + 24,), 77).to(dtype)
    with emulated_gfx950():
        elementwise.add[(4,)](x, y, out, n, 256)
    assert torch.equal(out[:n], x + y)
    assert (out[n:] == 77).all()


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8, 16])
def test_add_with_any_number_of_waves(num_warps: int, rng: torch.Generator) -> None:
    n = 1500
    x, y = (torch.randn(n, generator=rng) for _ in range(2))
    out = torch.zeros(n)
    with emulated_gfx950():
        elementwise.add[(triton.cdiv(n, 1024),)](x, y, out, n, 1024, num_warps=num_warps)
    assert torch.equal(out, x + y)


def test_addresses_that_are_aligned_to_one_element_only(rng: torch.Generator) -> None:
    x, y = (torch.randn(301, generator=rng).to(torch.float16)[1:] for _ in range(2))
    out = torch.zeros(303, dtype=torch.float16)[3:]
    with emulated_gfx950():
        elementwise.add[(2,)](x, y, out, 299, 256)
    assert torch.equal(out[:299], (x + y)[:299])
    assert out[299] == 0


def test_masked_elements_take_the_given_value(rng: torch.Generator) -> None:
    x = integers(rng, -50, 120, 200)
    out = torch.zeros(256, dtype=torch.int32)
    with emulated_gfx950():
        elementwise.select_with_other[(2,)](x, out, 200, 100, 128, num_warps=1)
    padded = torch.cat((x, torch.full((56,), 99, dtype=torch.int32)))
    assert torch.equal(out, torch.where(padded < 100, padded, -7))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
        (torch.float32, torch.float64),
        (torch.float32, torch.int32),
        (torch.float64, torch.float32),
        (torch.float64, torch.int64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e5m2, torch.float16),
        (torch.int32, torch.float32),
        (torch.int64, torch.float32),
        (torch.int64, torch.float64),
        (torch.int32, torch.int8),
        (torch.int8, torch.int64),
        (torch.uint8, torch.float32),
        (torch.int16, torch.bfloat16),
    ],
    ids=str,
)
def test_conversions(source: torch.dtype, target: torch.dtype, rng: torch.Generator) -> None:
    n = 500
    if source.is_floating_point:
        x = torch.randn(n, generator=rng, dtype=torch.float64) * torch.exp2(integers(rng, -12, 8, n))
        x = x.to(torch.float32).clamp(-440, 440).to(source)
    else:
        limits = torch.iinfo(source)
        x = integers(rng, max(limits.min, -(2**40)), min(limits.max, 2**40), n, dtype=source)
    out = torch.zeros(n).to(target)
    with emulated_gfx950():
        elementwise.convert[(2,)](x, out, n, 256)
    assert torch.equal(out.view(torch.uint8), x.to(target).view(torch.uint8))


def test_conversion_rounds_toward_zero_if_asked(rng: torch.Generator) -> None:
    x = torch.randn(300, generator=rng)
    out = torch.zeros(300, dtype=torch.bfloat16)
    with emulated_gfx950():
        elementwise.convert_toward_zero[(2,)](x, out, 300, 256)
    expected = (x.view(torch.int32) & -0x10000).view(torch.float32)
    assert torch.equal(out.float(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64, torch.int16], ids=str)
def test_integer_division_by_values(dtype: torch.dtype, rng: torch.Generator) -> None:
    n = 400
    large = torch.iinfo(dtype).max
    signed = torch.iinfo(dtype).min < 0
    x = integers(rng, -large if signed else 0, large, n, dtype=torch.int64)
    y = integers(rng, 1, 100, n, dtype=torch.int64)
    y[::3] = integers(rng, 1, large, n, dtype=torch.int64)[::3]
    if signed:
        y[::2] *= -1
    x[:3], y[:3] = torch.tensor([large, 0, 7]), torch.tensor([1, 5, large])
    quotient, rest = torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)
    with emulated_gfx950():
        elementwise.divide_integers[(2,)](x.to(dtype), y.to(dtype), quotient, rest, n, 256)
    assert torch.equal(quotient.to(torch.int64), torch.div(x, y, rounding_mode="trunc"))
    assert torch.equal(rest.to(torch.int64), torch.fmod(x, y))


@pytest.mark.parametrize("divisor", [2, 7, 12345])
def test_integer_division_by_a_scalar(divisor: int, rng: torch.Generator) -> None:
    n = 300
    x = integers(rng, -(2**31), 2**31 - 1, n)
    quotient, rest = torch.zeros_like(x), torch.zeros_like(x)
    with emulated_gfx950():
        elementwise.divide_by_scalar[(5,)](x, quotient, rest, divisor, n, 64, num_warps=1)
    pid = torch.arange(n) // 64
    assert torch.equal(quotient.long(), torch.div(x.long(), divisor, rounding_mode="trunc") + pid // divisor)
    assert torch.equal(rest.long(), torch.fmod(x.long(), divisor) + pid % divisor)


def test_float_division(rng: torch.Generator) -> None:
    n = 500
    x = torch.randn(n, generator=rng) * torch.exp2(integers(rng, -60, 60, n))
    y = torch.randn(n, generator=rng) * torch.exp2(integers(rng, -60, 60, n))
    x[:6] = torch.tensor([0.0, 1.0, -1.0, math.inf, 0.0, 1.0])
    y[:6] = torch.tensor([3.0, 0.0, 0.0, 2.0, 0.0, math.inf])
    fast, rounded = torch.zeros(n), torch.zeros(n)
    with emulated_gfx950():
        elementwise.divide_floats[(2,)](x, y, fast, rounded, n, 256)
    torch.testing.assert_close(fast, x / y, rtol=3e-7, atol=0, equal_nan=True)
    torch.testing.assert_close(rounded, x / y, rtol=0, atol=0, equal_nan=True)


_FUNCTIONS = {
    "exp": (torch.exp, -20, 20),
    "exp2": (torch.exp2, -30, 30),
    "log": (torch.log, 0.01, 100),
    "log2": (torch.log2, 0.01, 100),
    "sqrt": (torch.sqrt, 0, 100),
    "sqrt_rn": (torch.sqrt, 0, 100),
    "rsqrt": (torch.rsqrt, 0.01, 100),
    "sin": (torch.sin, -6, 6),
    "cos": (torch.cos, -6, 6),
    "erf": (torch.erf, -3, 3),
    "sigmoid": (torch.sigmoid, -10, 10),
    "floor": (torch.floor, -10, 10),
    "ceil": (torch.ceil, -10, 10),
    "abs": (torch.abs, -10, 10),
    "fma": (lambda x: x * x + x, -10, 10),
    "clamp": (lambda x: x.clamp(-0.5, 0.75), -2, 2),
    "maximum_nan": (lambda x: torch.maximum(x, torch.full_like(x, 0.25)), -2, 2),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_functions(name: str, rng: torch.Generator) -> None:
    reference, low, high = _FUNCTIONS[name]
    n = 500
    x = torch.rand(n, generator=rng) * (high - low) + low
    if name == "maximum_nan":
        x[7] = math.nan
    out = torch.zeros(n)
    with emulated_gfx950():
        elementwise.function[(2,)](x, out, n, name, 256)
    expected = reference(x.double()).float()
    # For a logarithm near 1 and a sine near its zeros, the hardware's functions have a bounded absolute error.
    absolute = 2e-6 if name in ("log", "log2", "sin", "cos") else 0.0
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=absolute, equal_nan=True)


@pytest.mark.parametrize("name", ["exp", "sqrt", "log", "erf"])
def test_functions_of_doubles(name: str, rng: torch.Generator) -> None:
    reference, low, high = _FUNCTIONS[name]
    x = torch.rand(120, generator=rng, dtype=torch.float64) * (high - low) + low
    out = torch.zeros(120, dtype=torch.float64)
    with emulated_gfx950():
        elementwise.function[(1,)](x, out, 120, name, 128, num_warps=1)
    torch.testing.assert_close(out, reference(x), rtol=4e-15, atol=4e-15)


def test_integers_of_64_bits(rng: torch.Generator) -> None:
    n = 200
    x = integers(rng, -(2**63), 2**63 - 1, n, dtype=torch.int64)
    y = integers(rng, -(2**63), 2**63 - 1, n, dtype=torch.int64)
    y[::2] >>= 50
    out = torch.zeros(6, n, dtype=torch.int64)
    with emulated_gfx950():
        elementwise.integer64[(1,)](x, y, out, n, 256)
    unsigned = [(a % 2**64) * (b % 2**64) >> 64 for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    high = torch.tensor([u - 2**64 if u >= 2**63 else u for u in unsigned])
    expected = torch.stack((x * y, x - y, x << (y & 63), x >> (y & 63), torch.maximum(x, y), high))
    assert torch.equal(out, expected)


def test_bit_operations(rng: torch.Generator) -> None:
    n = 300
    x, y = (integers(rng, -(2**31), 2**31 - 1, n) for _ in range(2))
    out = torch.zeros(7, n, dtype=torch.int32)
    with emulated_gfx950():
        elementwise.bits[(2,)](x, y, out, n, 256)
    expected = torch.stack((x & y, x | y, x ^ y, ~x, x << (y & 31), x >> (y & 31), (x & ~y) | (y ^ 0x55)))
    assert torch.equal(out, expected)


def test_logical_shift_of_unsignedintegers(rng: torch.Generator) -> None:
    n = 100
    x, y = (integers(rng, 0, 2**32, n, dtype=torch.int64) for _ in range(2))
    out = torch.zeros(7 * n, dtype=torch.uint32)
    with emulated_gfx950():
        elementwise.bits[(1,)](x.to(torch.uint32), y.to(torch.uint32), out, n, 128, num_warps=2)
    assert torch.equal(out[5 * n : 6 * n].to(torch.int64), x >> (y & 31))


def test_floats_seen_asintegers(rng: torch.Generator) -> None:
    x = torch.randn(100, generator=rng)
    x[0] = math.inf
    out = torch.zeros(100)
    with emulated_gfx950():
        elementwise.reinterpret[(1,)](x, out, 100, 128)
    assert torch.equal(out.view(torch.int32), (x.view(torch.int32) ^ -(2**31)) | 1)


def _philox(seed: int, counter: int) -> float:
    """Returns Philox4x32-10's first word for the counter (counter, 0, 0, 0), mapped to a float32 in [0, 1) as Triton does."""
    c, k = [counter, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        low0, low2 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(low2 >> 32) ^ c[1] ^ k[0], low2 & 0xFFFFFFFF, (low0 >> 32) ^ c[3] ^ k[1], low0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    signed = c[0] - 2**32 if c[0] >= 2**31 else c[0]
    magnitude = torch.tensor(-signed - 1 if signed < 0 else signed).float()
    return float(magnitude * 4.6566127342e-10)


def test_random_numbers() -> None:
    out = torch.zeros(130)
    with emulated_gfx950():
        elementwise.random_numbers[(2,)](out, 2**33 + 17, 130, 128, num_warps=2)
    expected = torch.tensor([_philox(2**33 + 17, i) for i in range(130)])
    assert torch.equal(out, expected)


# Control flow and launch geometry.


def _collatz(x: int) -> int:
    steps = 0
    while x > 1:
        x = x // 2 if x % 2 == 0 else 3 * x + 1
        steps += 1
    return steps


@pytest.mark.parametrize("num_warps", [1, 4])
def test_loop_whose_length_differs_between_workgroups(num_warps: int, rng: torch.Generator) -> None:
    x = integers(rng, 1, 60, 4, 256)
    x[1] = 1
    steps = torch.full_like(x, -1)
    with emulated_gfx950():
        control.collatz[(4,)](x, steps, 256, num_warps=num_warps)
    assert steps.flatten().tolist() == [_collatz(i) for i in x.flatten().tolist()]


def test_loop_over_scalars(rng: torch.Generator) -> None:
    x = integers(rng, 1, 40, 11)
    steps = torch.full_like(x, -1)
    with emulated_gfx950():
        control.collatz_scalar[(3,)](x, steps, 11, num_warps=1)
    assert steps.tolist() == [_collatz(i) for i in x.tolist()]


@pytest.mark.parametrize("num_warps", [1, 4])
def test_loop_whose_length_differs_between_lanes(num_warps: int, rng: torch.Generator) -> None:
    x = integers(rng, 1, 30, 512)
    x[64:128] = 1
    steps = torch.full_like(x, -1)
    with emulated_gfx950():
        control.collatz_lanes[(2,)](x, steps, 256, num_warps=num_warps)
    assert steps.tolist() == [_collatz(i) for i in x.tolist()]


def test_loop_whose_length_is_read_from_memory(rng: torch.Generator) -> None:
    lengths = [0, 5, 700, 1, 0, 256, 130]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    values = torch.randn(sum(lengths), generator=rng)
    out = torch.full((len(lengths),), math.nan)
    with emulated_gfx950():
        control.ragged_sums[(len(lengths),)](values, starts, out, 128, num_warps=2)
    expected = torch.stack([part.double().sum() for part in values.split(lengths)])
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("grid", [(5,), (3, 4), (2, 3, 4)], ids=str)
def test_grids(grid: tuple[int, ...]) -> None:
    nx, ny, nz = (*grid, 1, 1)[:3]
    out = torch.full((nz, ny, nx), -1, dtype=torch.int32)
    with emulated_gfx950():
        control.grid_coordinates[grid](out, num_warps=1)
    expected = [[[int(f"{x}{y}{z}{nx}{ny}{nz}") for x in range(nx)] for y in range(ny)] for z in range(nz)]
    assert out.tolist() == expected


def test_a_kernel_that_has_another_name_in_assembly() -> None:
    name = "fill_" + "and_again_" * 20
    kernel = triton.jit(control.fill.fn, repr=lambda _: name)
    out = torch.zeros(1, dtype=torch.int32)
    with emulated_gfx950() as emulator:
        kernel[(1,)](out)
    assert emulator.launches[0].kernel == name
    assert out.tolist() == [7]


def test_grid_without_programs() -> None:
    out = torch.full((1,), -1, dtype=torch.int32)
    with emulated_gfx950():
        control.grid_coordinates[(0,)](out)
    assert out.item() == -1


def test_pointers_that_are_read_from_memory(rng: torch.Generator) -> None:
    sources = [torch.randn(n, generator=rng) for n in (128, 1, 77)]
    table = torch.tensor([x.data_ptr() for x in sources])
    sizes = torch.tensor([x.numel() for x in sources], dtype=torch.int32)
    out = torch.full((3, 128), math.nan)
    with emulated_gfx950() as emulator:
        for x in sources:
            emulator.share(x)
        control.copy_through_table[(3,)](table, sizes, out, 128, num_warps=2)
    expected = torch.stack([torch.cat((x, torch.zeros(128 - x.numel()))) for x in sources])
    assert torch.equal(out, expected)


def test_calls_of_functions_that_are_not_inlined() -> None:
    x = torch.tensor([0, 1, 10, 37], dtype=torch.int32)
    out = torch.full((4,), math.nan)
    with emulated_gfx950():
        compiled = control.calls[(4,)](x, out, 0.5, num_warps=1)
    assert "s_swappc_b64" in compiled.asm["amdgcn"]
    sums = [sum(i * i if i % 2 else i for i in range(n + 1)) for n in range(38)]
    assert out.tolist() == [0.5 * (sums[n] + sums[pid]) for pid, n in enumerate(x.tolist())]


def test_barrier_between_writes_and_reads_of_global_memory(rng: torch.Generator) -> None:
    x = torch.randn(3, 512, generator=rng)
    scratch, out = torch.zeros_like(x), torch.zeros_like(x)
    with emulated_gfx950():
        control.shift_within_block[(3,)](x, scratch, out, 512, num_warps=8)
    assert torch.equal(out, x.roll(-65, dims=1))


def test_registers_that_are_spilled(rng: torch.Generator) -> None:
    x = torch.randn(6, 2048, generator=rng)
    out = torch.zeros_like(x)
    with emulated_gfx950():
        compiled = control.spilled[(1,)](x, out, 5, 2048, num_warps=1, waves_per_eu=4)
    assert "scratch_store" in compiled.asm["amdgcn"]
    a = list(x)
    for _ in range(5):
        a = [a[1] + a[0], a[2] - a[0], a[3] + a[1], a[4] - a[2], a[5] + a[3], a[0] * 0.5]
    assert torch.equal(out, torch.stack(a))


def test_many_arguments() -> None:
    values = [1, 2**40, 0.5, 16, 17, -3, -(2**35), 2.25, 0, 1, 5, 6, 7, -8, 9, 32, 1.75, 11, 12, 13, 14, 15, 64, 3, 2]
    out = torch.zeros(64)
    with emulated_gfx950():
        control.many_arguments[(1,)](out, *values, 64, num_warps=1)
    total = sum((i + 1) * v for i, v in enumerate(values))
    torch.testing.assert_close(out.double(), total + torch.arange(64, dtype=torch.float64), rtol=1e-6, atol=0)


# Matmul.


@pytest.mark.parametrize(
    ("dtype", "stages", "blocks", "num_warps"),
    [
        (torch.float32, 1, (32, 32, 32), 4),
        (torch.float32, 2, (64, 32, 16), 2),
        (torch.bfloat16, 1, (32, 32, 64), 1),
        (torch.bfloat16, 2, (64, 64, 32), 4),
        (torch.bfloat16, 3, (64, 32, 64), 4),
        (torch.float16, 2, (64, 64, 64), 8),
        (torch.float16, 3, (16, 16, 32), 1),
        (torch.float8_e4m3fn, 1, (32, 32, 64), 4),
        (torch.float8_e4m3fn, 2, (64, 64, 128), 4),
        (torch.float8_e5m2, 2, (32, 64, 64), 2),
        (torch.float64, 1, (16, 16, 16), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("tail", [False, True])
def test_matmul(
    dtype: torch.dtype, stages: int, blocks: tuple[int, int, int], num_warps: int, tail: bool, rng: torch.Generator
) -> None:
    block_m, block_n, block_k = blocks
    m, n, k = (block_m + 9, block_n - 3, 2 * block_k + 7) if tail else (block_m, block_n, 4 * block_k)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    a, b = torch.randn(m, k, generator=rng).to(dtype), torch.randn(k, n, generator=rng).to(dtype)
    c = torch.zeros(m, n, dtype=wide)
    grid = (triton.cdiv(m, block_m), triton.cdiv(n, block_n))
    with emulated_gfx950():
        products.matmul[grid](a, b, c, m, n, k, n, 1, *blocks, stages, tail, num_warps=num_warps)
    assert relative_error(c, a.double() @ b.double()) <= (1e-14 if dtype is torch.float64 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_matmul_with_k_contiguous_and_a_narrow_result(dtype: torch.dtype, rng: torch.Generator) -> None:
    m, n, k = 64, 64, 128
    a, b = torch.randn(m, k, generator=rng).to(dtype), torch.randn(n, k, generator=rng).to(dtype)
    c = torch.zeros(m, n, dtype=torch.bfloat16)
    with emulated_gfx950():
        products.matmul[(2, 1)](a, b, c, m, n, k, 1, k, 32, 64, 64, 2, False)
    assert relative_error(c, a.double() @ b.double().T) <= 5e-3


@pytest.mark.parametrize("instruction", [16, 32])
def test_matmul_by_either_matrix_instruction(instruction: int, rng: torch.Generator) -> None:
    a, b = torch.randn(64, 128, generator=rng).bfloat16(), torch.randn(128, 64, generator=rng).bfloat16()
    c = torch.zeros(64, 64)
    with emulated_gfx950():
        products.matmul[(1, 1)](a, b, c, 64, 64, 128, 64, 1, 64, 64, 64, 2, False, num_warps=2, matrix_instr_nonkdim=instruction)
    assert relative_error(c, a.double() @ b.double()) <= 1e-6


def test_matmul_ofintegers(rng: torch.Generator) -> None:
    a, b = integers(rng, -128, 128, 32, 64, dtype=torch.int8), integers(rng, -128, 128, 64, 32, dtype=torch.int8)
    c = torch.zeros(32, 32, dtype=torch.int32)
    with emulated_gfx950():
        products.matmul_of_integers[(1,)](a, b, c, 32, 32, 64)
    assert torch.equal(c, a.int() @ b.int())


@pytest.mark.parametrize(
    ("a_format", "b_format"),
    [
        ("e2m1", "e2m1"),
        ("e4m3", "e2m1"),
        ("e2m1", "e4m3"),
        ("e4m3", "e4m3"),
        ("e5m2", "e5m2"),
        ("e5m2", "e2m1"),
        ("bf16", "e2m1"),
        ("e2m1", "bf16"),
        ("fp16", "e2m1"),
        ("bf16", "e4m3"),
    ],
)
@pytest.mark.parametrize(("m", "n", "k", "stages"), [(32, 32, 256, 1), (64, 64, 512, 2)])
def test_scaled_matmul(a_format: str, b_format: str, m: int, n: int, k: int, stages: int, rng: torch.Generator) -> None:
    a, a_scale, a_values = random_operand(a_format, m, k, rng)
    b, b_scale, b_values = random_operand(b_format, n, k, rng)
    c = torch.zeros(m, n)
    packs = [2 if form == "e2m1" else 1 for form in (a_format, b_format)]
    with emulated_gfx950():
        products.scaled_matmul[(m // 32, n // 32)](
            a, a_scale, b, b_scale, c, m, n, k, a_format, b_format, *packs, 32, 32, 128, stages
        )
    expected = a_values @ b_values.T
    # Unless both operands have scales, the MMAs are in bfloat16 or float16, which represent the scaled values exactly.
    assert relative_error(c, expected) <= 1e-6


@pytest.mark.parametrize(
    ("a_format", "a_along_k", "b_along_k"),
    [("e4m3", True, False), ("e2m1", True, False), ("e2m1", False, False), ("e2m1", False, True)],
)
@pytest.mark.parametrize(("m", "n", "stages"), [(16, 32, 1), (64, 64, 2)])
def test_scaled_matmul_of_fp4_packed_across_k(
    a_format: str, a_along_k: bool, b_along_k: bool, m: int, n: int, stages: int, rng: torch.Generator
) -> None:
    """Results are correct if a byte holds elements of two rows. Transposing reads of 4-bit elements unpack such operands."""
    k = 256
    a, a_scale, a_values = random_operand(a_format, m, k, rng)
    b, b_scale, b_values = random_operand("e2m1", n, k, rng)
    stored = [x if along_k else packed_across(x) for x, along_k in ((a, a_along_k), (b, b_along_k))]
    c = torch.zeros(m, n)
    with emulated_gfx950():
        compiled = products.scaled_matmul_packed_across[(1,)](
            stored[0], a_scale, stored[1], b_scale, c, k, a_format, a_along_k, b_along_k, m, n, 128, stages
        )
    assert "ds_read_b64_tr_b4" in compiled.asm["amdgcn"]
    assert relative_error(c, a_values @ b_values.T) <= 1e-6


@pytest.mark.parametrize(("m", "n", "k"), [(64, 32, 64), (50, 40, 72)])
def test_matmul_by_tensor_descriptors(m: int, n: int, k: int, rng: torch.Generator) -> None:
    a, b = torch.randn(m, k, generator=rng).half(), torch.randn(n, k, generator=rng).half()
    c = torch.zeros(m, n)
    with emulated_gfx950():
        products.matmul_by_descriptors[(2, 2)](a, b, c, m, n, k, 32, 32, 32)
    assert relative_error(c, a.double() @ b.double().T) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chained_products(dtype: torch.dtype, rng: torch.Generator) -> None:
    a, b, c = (torch.randn(64, 32, generator=rng).to(dtype) for _ in range(3))
    out = torch.zeros(64, 32)
    with emulated_gfx950():
        products.chained_products[(1,)](a, b, c, out, 64, 32)
    middle = (a.double() @ b.double().T).to(dtype)
    assert relative_error(out, middle.double() @ c.double()) <= 2e-4


def test_persistent_programs(rng: torch.Generator) -> None:
    m, n, k = 96, 64, 64
    a, b = torch.randn(m, k, generator=rng).bfloat16(), torch.randn(k, n, generator=rng).bfloat16()
    c = torch.zeros(m, n)
    with emulated_gfx950():
        products.persistent_matmul[(4,)](a, b, c, m, n, k, 32, 32)
    assert relative_error(c, a.double() @ b.double()) <= 1e-6

"""Tests Triton kernels that are compiled for sm_90 and executed on the emulator."""

from __future__ import annotations

import pytest
import torch

from sm90_emulator import EmulationError, emulated_sm90

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
TensorDescriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets its kernels in this process", allow_module_level=True)


@triton.jit
def _product(a, b, c, scale, rows, depth, SIZES: tl.constexpr, STAGES: tl.constexpr):
    row, column = tl.program_id(0) * SIZES[0] + tl.arange(0, SIZES[0]), tl.arange(0, SIZES[1])
    total = tl.zeros([SIZES[0], SIZES[1]], tl.float32)
    for begin in tl.range(0, depth, SIZES[2], num_stages=STAGES):
        inner = begin + tl.arange(0, SIZES[2])
        left = tl.load(a + row[:, None] * depth + inner[None, :], mask=(row < rows)[:, None], other=0.0)
        right = tl.load(b + inner[:, None] * SIZES[1] + column[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + row[:, None] * SIZES[1] + column[None, :], total * scale, mask=(row < rows)[:, None])


@triton.jit
def _described_product(a, b, c, rows, depth, SIZES: tl.constexpr):
    row = tl.program_id(0) * SIZES[0]
    total = tl.zeros([SIZES[0], SIZES[1]], tl.float32)
    for begin in tl.range(0, depth, SIZES[2], num_stages=3):
        total = tl.dot(a.load([row, begin]), b.load([0, begin]).T, total)
    c[0].store([row, 0], total)


def _multiplied(rows: int, out_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, shape, generator=generator).half() for shape in ((rows, 128), (128, 32)))
    c = torch.full((out_rows, 32), float("nan"))
    _product[(triton.cdiv(rows, 64),)](a, b, c, 0.5, rows, 128, SIZES=(64, 32, 64), STAGES=3, num_warps=4)
    assert torch.equal(c[:rows], 0.5 * (a.float() @ b.float()))
    return c


@pytest.mark.parametrize("seed", [0, 1])
def test_products_of_warpgroups_with_operands_that_are_copied_ahead(seed: int) -> None:
    with emulated_sm90(seed=seed, triton=True) as emulator:
        c = _multiplied(70, 72)
    assert c[70:].isnan().all()
    (launch,) = emulator.launches
    assert launch.kernel == "_product"
    assert launch.geometry.grid == (2, 1, 1)
    # There are two CTAs of four warps, each with 128 / 16 wgmmas.
    assert launch.products == 2 * 4 * 8


@pytest.mark.parametrize("seed", [0, 1])
def test_tensor_descriptors(seed: int) -> None:
    """Out-of-bounds rows and columns are loaded as zeros and are not stored. One descriptor is in a tuple."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, shape, generator=generator).half() for shape in ((72, 104), (24, 104)))
    room = torch.full((72, 32), float("nan"))
    maps = [TensorDescriptor.from_tensor(a[:70], [64, 64]), TensorDescriptor.from_tensor(b, [32, 64])]
    into = TensorDescriptor(room, [70, 24], [32, 1], [64, 32])
    with emulated_sm90(seed=seed, triton=True) as emulator:
        _described_product[(2,)](*maps, (into,), 70, 104, SIZES=(64, 32, 64), num_warps=4)
    assert torch.equal(room[:70, :24], a[:70].float() @ b.float().T)
    assert room[70:].isnan().all()
    assert room[:, 24:].isnan().all()
    assert emulator.launches[0].copied_bytes > 2 * 64 * 96 * 2


def test_what_lies_in_no_tensor_is_not_accessed() -> None:
    with emulated_sm90(triton=True), pytest.raises(EmulationError, match="out-of-bounds"):
        _multiplied(70, 60)


def test_tritons_device_is_there_in_the_block_alone() -> None:
    before = triton.runtime.driver._active
    with emulated_sm90(triton=True):
        assert triton.runtime.driver.active.get_current_target().arch == 90
    assert triton.runtime.driver._active is before
    with emulated_sm90():
        assert triton.runtime.driver._active is before

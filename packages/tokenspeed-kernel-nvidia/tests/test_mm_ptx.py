"""Tests GEMMs of few rows without a GPU: the emulator runs small GEMMs with the PTX that a GPU would run."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
pytest.importorskip("sm90_emulator")

from sm90_emulator.launching import launch
from sm90_emulator.memory import Memory
from sm90_emulator.programs import ptx
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.ops.gemm._inputs import dense, fp8, micro
from tokenspeed_kernel_base.ops.gemm.mm import mm as operator
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands
from tokenspeed_kernel_base.signature import dtype_name
from tokenspeed_kernel_nvidia.cutedsl.launch import KINDS
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import CLUSTER, GROUP, QUAD_BYTES, Config, config_of, layout_of
from tokenspeed_kernel_nvidia.sm90.gemm.mm.launch import kinds_of, mm_program, split_program
from tokenspeed_kernel_nvidia.sm90.gemm.mm.split_config import CLUSTER as SPLIT
from tokenspeed_kernel_nvidia.sm90.gemm.mm.split_config import SplitConfig, split_numbers_of, split_of

CPU = torch.device("cpu")
BF16, F16, SINGLE = torch.bfloat16, torch.float16, torch.float32
# By name: a function that draws operands in a format, and the result's dtype.
CALLS = {
    "dense bfloat16": (partial(dense, bias=BF16), BF16),
    "dense float16": (partial(dense, dtype=F16, bias=SINGLE), F16),
    "fp8 weights, channel": (partial(fp8, a_scale="", b_scale="channel", a_dtype=BF16, bias=BF16), BF16),
    "fp8 weights, block": (partial(fp8, a_scale="", b_scale="block", a_dtype=F16), F16),
    "fp8, token and channel": (partial(fp8, a_scale="token", b_scale="channel", out_dtype=SINGLE), SINGLE),
    "fp8, blocks": (partial(fp8, a_scale="block", b_scale="block", out_dtype=SINGLE), SINGLE),
    "mxfp4 weights": (partial(micro, a="dense", b="mxfp4", out_dtype=SINGLE), SINGLE),
}
TOLERANCE = {BF16: 4.5e-3, F16: 6e-4, SINGLE: 1e-5}


@functools.cache
def text_of(config: Config | SplitConfig) -> str:
    return ptx(split_program if isinstance(config, SplitConfig) else mm_program, config)


def bytes_of(x: Tensor) -> Any:
    return x.contiguous().view(torch.uint8).numpy().reshape(-1)


def table_of(memory: Memory, scale: Tensor | None) -> list[int]:
    if scale is None:
        return [0, 0, 0]
    stored = scale.mT if scale.ndim == 2 else scale  # callers of `mm` store two-dimensional scales transposed
    row, column = (scale.mT.contiguous().mT.stride()) if scale.ndim == 2 else (0, 0)
    return [memory.put(bytes_of(stored)), row, column]


def run(name: str, m: int, k: int, n: int, ctas: int, sharing: Any = "", seed: int = 0, long: bool = False) -> None:
    made, dtype = CALLS[name]
    given = operator.operator.complete(Case(name, made(m, k, n)).build(CPU, seed))
    a, b, bias = (given[each] for each in ("a", "b", "bias"))
    weights, scales = kinds_of(b, given["b_scale"])
    row_bytes = b.shape[0] * b.element_size()
    config = config_of(dtype_name(a.dtype), weights, scales, dtype_name(dtype), m, sharing, row_bytes, long)
    memory = Memory(1 << 24)
    out = memory.put(np.full(m * n * dtype.itemsize, 0x44, np.uint8))
    share = n // (ctas // config.cluster)
    part = -(-row_bytes // (QUAD_BYTES * config.cluster)) * QUAD_BYTES
    layout = layout_of(config, m, min(row_bytes, part))
    assert layout is not None
    scales_of = [number for each in ("a_scale", "b_scale") for number in table_of(memory, given[each])]
    arguments = [
        memory.put(bytes_of(b.mT)), row_bytes, row_bytes, part, share, n - share * (ctas // config.cluster),
        layout.stages, layout.ring, memory.put(bytes_of(a)), k * a.element_size(), m, n, layout.chunk_bytes,
        16.0 / layout.chunk_bytes, layout.scales, layout.activations, out, n, 1,
        *([0, 0] if bias is None else [memory.put(bytes_of(bias)), KINDS[bias.dtype]]), *scales_of,
    ]  # fmt: skip
    launch(text_of(config), arguments, config.threads + 32, (ctas,), memory, cluster=config.together, seed=seed + 1)
    _check(memory, out, given, dtype, m, n)


def _check(memory: Memory, out: int, given: dict[str, Any], dtype: torch.dtype, m: int, n: int) -> None:
    a, b, bias = (given[each] for each in ("a", "b", "bias"))
    got = torch.from_numpy(memory.get(out, np.uint8, m * n * dtype.itemsize)).view(dtype).view(m, n)
    wide_a, wide_b = decode_operands("mm", a, b, given["a_scale"], given["b_scale"])
    wanted = wide_a.double() @ wide_b.double() + (0 if bias is None else bias.double())
    off = (got.double() - wanted).norm() / wanted.norm()
    assert off <= TOLERANCE[dtype], off


@pytest.mark.parametrize(("m", "k", "n"), [(1, 288, 8), (16, 4360, 13), (9, 72, 3)])
def test_split_rows(m: int, k: int, n: int) -> None:
    """Tests clusters whose CTAs split k. Some CTAs have no part of k, some rows do not exist, and warps have several 64-byte
    parts."""
    name = "dense bfloat16" if n > 8 else "dense float16"
    made, dtype = CALLS[name]
    given = operator.operator.complete(Case(name, made(m, k, n)).build(CPU, 0))
    a, b, bias = (given[each] for each in ("a", "b", "bias"))
    config = split_of(dtype_name(a.dtype), dtype_name(dtype), m, 2 * k)
    memory = Memory(1 << 24)
    out = memory.put(np.full(m * n * dtype.itemsize, 0x44, np.uint8))
    part = -(-2 * k // (QUAD_BYTES * SPLIT)) * QUAD_BYTES
    ctas, _ = split_numbers_of(m, n)
    arguments = [
        memory.put(bytes_of(b.mT)), 2 * k, 2 * k, part, memory.put(bytes_of(a)), 2 * k, m, n, out, n, 1,
        memory.put(bytes_of(bias)), KINDS[bias.dtype],
    ]  # fmt: skip
    launch(text_of(config), arguments, config.threads, (ctas,), memory, cluster=SPLIT, seed=1)
    _check(memory, out, given, dtype, m, n)


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_weights(name: str) -> None:
    """Tests two CTAs with different numbers of rows, a partly filled tile, and rows that end within a stage."""
    run(name, 3, 288, 21, 2)
    run(name, 11, 96, 9, 1)


def test_long_gemms() -> None:
    """Tests the configuration with more warps, with several groups of rows, and a row that ends within a stage."""
    run("fp8 weights, channel", 1, 2880, GROUP + 3, 1, long=True)
    run("fp8 weights, channel", 4, 3104, 21, 2, long=True)


@pytest.mark.parametrize("m", [2, 9])
def test_several_groups_and_chunks(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests rows of several chunks, whose partial sums are accumulated, and several groups, which each load the activations
    again."""
    layout = layout_of(config_of("bfloat16", "dense", "none", "bfloat16", m), m, 4608)
    assert layout is not None
    short = dataclasses.replace(layout, chunk_bytes=2048, stages=2)
    monkeypatch.setattr(f"{__name__}.layout_of", lambda *given: short)
    run("dense bfloat16", m, 2304, GROUP + 3, 1)


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("n", [7, 39])
def test_clusters(m: int, n: int) -> None:
    """Tests a cluster whose CTAs split k. The last CTA has a shorter part of each row, and some CTAs have no rows to write."""
    run("dense bfloat16", m, 1856, n, CLUSTER, "weights")


def test_two_clusters() -> None:
    run("dense float16", 3, 1792, 11, 2 * CLUSTER, "weights")


def test_pairs() -> None:
    """Tests clusters of two CTAs that multicast the activations to each other."""
    run("dense bfloat16", 11, 288, 21, 4, "activations")
    run("dense float16", 16, 1056, 9, 2, "activations")

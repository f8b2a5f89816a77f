"""Products of fp8 by fp8 of many rows against the reference: on the emulator where there is no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.ops.gemm._inputs import fp8, micro
from tokenspeed_kernel_base.ops.gemm.mm import mm as operator
from tokenspeed_kernel_nvidia import _machine
from tokenspeed_kernel_nvidia.sm90.gemm import mm_fp8 as module
from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8 import kind_of, mm_fp8, signatures_of, steps_of
from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8_config import SERVED, Config, Served, clusters_of, config_of, every_config

BF16, F16, SINGLE = torch.bfloat16, torch.float16, torch.float32
# Of a result's norm. One number that is rounded to bfloat16 is off by 3.9e-3 at most.
TOLERANCE = {BF16: 4.5e-3, F16: 6e-4, SINGLE: 1e-6}
# What scales a call has, and what `kind_of` says of it.
SCALES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "token and channel": ((fp8, {"a_scale": "token", "b_scale": "channel"}), ("row", "float32", 128, 1)),
    "token and tensor": ((fp8, {"a_scale": "token", "b_scale": "tensor"}), ("row", "float32", 128, 1)),
    "tensor": ((fp8, {"a_scale": "tensor", "b_scale": "tensor"}), ("row", "float32", 128, 1)),
    "blocks": ((fp8, {"a_scale": "block", "b_scale": "block"}), ("block", "float32", 128, 128)),
    "blocks, e8m0": ((fp8, {"a_scale": "block", "b_scale": "block", "scales": "e8m0"}), ("block", "byte", 128, 128)),
    "blocks, packed": ((fp8, {"a_scale": "block", "b_scale": "block", "scales": "packed"}), ("block", "byte", 128, 128)),
    "rows of 128": ((fp8, {"a_scale": "block", "b_scale": "block1d"}), ("column", "float32", 128, 1)),
    "rows of 128, packed": ((fp8, {"a_scale": "block", "b_scale": "block1d", "scales": "packed"}), ("column", "byte", 128, 1)),
    "blocks of 64": ((fp8, {"a_scale": "block", "b_scale": "block", "block": 64}), ("column", "float32", 64, 64)),
    "rows of 64, e8m0": (
        (fp8, {"a_scale": "block", "b_scale": "block1d", "block": 64, "scales": "e8m0"}),
        ("column", "byte", 64, 1),
    ),
    "blocks of 32": ((fp8, {"a_scale": "block", "b_scale": "block", "block": 32}), ("column", "float32", 32, 32)),
    "mxfp8": ((micro, {"a": "mxfp8", "b": "mxfp8"}), ("column", "byte", 32, 1)),
}


@pytest.fixture(params=["gpu", "emulator"])
def sm(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where to compute: on a GPU, or on an emulated one with two clusters, which so have several tiles each."""
    if request.param == "gpu":
        yield request.getfixturevalue("sm90")
        return
    emulator = pytest.importorskip("sm90_emulator")
    pytest.importorskip("cutlass")
    if torch.cuda.is_available():
        pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process")
    with _fresh(), emulator.emulated_sm90(multiprocessors=4, uninitialised=True, seed=1):
        yield torch.device("cpu")


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    _machine.multiprocessors.cache_clear()
    module._launch_of.cache_clear()
    yield
    _machine.multiprocessors.cache_clear()
    module._launch_of.cache_clear()


def arguments_of(device: torch.device, name: str, m: int, k: int, n: int, **options: Any) -> dict[str, Any]:
    (make, given), _ = SCALES[name]
    return operator.operator.complete(Case(name, make(m, k, n, **given, **options)).build(device, 0))


def check(arguments: dict[str, Any], **changes: Any) -> Tensor:
    """Compares all numbers, and the worst one."""
    bias = None if arguments["bias"] is None else arguments["bias"].float()
    wanted = operator(**{**arguments, "out": None, "out_dtype": SINGLE, "bias": bias}, solution="reference").double()
    dtype = arguments["out_dtype"] or BF16
    out = torch.full(wanted.shape, torch.nan, dtype=dtype, device=wanted.device)
    got = mm_fp8(**{**arguments, "out": out, **changes})
    assert got is changes.get("out", out)
    off = got.double() - wanted
    assert float(off.norm()) <= TOLERANCE[dtype] * float(wanted.norm()), f"{float(off.norm() / wanted.norm()):.2e}"
    size = wanted.norm() / wanted.numel() ** 0.5
    assert float(off.abs().max()) <= 8 * TOLERANCE[dtype] * float(size), f"{float(off.abs().max() / size):.2e}"
    return got


@pytest.mark.parametrize("name", SCALES)
def test_scales(sm: torch.device, name: str) -> None:
    """Tiles that are not full, some whose other half lies beyond all rows, and a last block that is short."""
    arguments = arguments_of(sm, name, 600, 416, 520, bias=BF16)
    assert kind_of(arguments["b"], arguments["a_scale"], arguments["b_scale"]) == SCALES[name][1]
    assert torch.equal(check(arguments), check(arguments))


@pytest.mark.parametrize(("m", "k", "n"), [(1, 16, 8), (129, 128, 264), (256, 48, 1032), (300, 1424, 136)])
def test_sizes(sm: torch.device, m: int, k: int, n: int) -> None:
    for name in ("token and channel", "blocks"):
        check(arguments_of(sm, name, m, k, n))


@pytest.mark.parametrize("bias", [None, "own", SINGLE], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, SINGLE], ids=str)
def test_results_and_biases(sm: torch.device, dtype: torch.dtype, bias: Any) -> None:
    given = {} if bias is None else {"bias": dtype if bias == "own" else bias}
    check(arguments_of(sm, "token and channel", 290, 160, 392, out_dtype=dtype, **given))


def test_memory_that_lies_otherwise(sm: torch.device) -> None:
    """Weights along n, rows with gaps, scales of any strides, and a result with gaps: some are copied."""
    arguments = arguments_of(sm, "blocks", 140, 272, 136)
    gaps = torch.zeros(140, 280, dtype=torch.float8_e4m3fn, device=sm)
    gaps[:, :272] = arguments["a"]
    out = torch.full((140, 140), torch.nan, dtype=BF16, device=sm)
    changes = {"a": gaps[:, :272], "b": arguments["b"].contiguous(), "out": out[:, :136]}
    changes["a_scale"] = arguments["a_scale"].t().contiguous().t()
    check(arguments, **changes)
    assert out[:, 136:].isnan().all()


def test_no_rows(sm: torch.device) -> None:
    assert mm_fp8(**arguments_of(sm, "token and channel", 0, 64, 16)).shape == (0, 16)


@pytest.mark.parametrize("name", ["token and channel", "blocks", "rows of 128", "mxfp8"])
def test_nothing_is_read_before_it_is_there(name: str) -> None:
    """Copies and products happen as late as they may, or at random times."""
    emulator = pytest.importorskip("sm90_emulator")
    pytest.importorskip("cutlass")
    if torch.cuda.is_available():
        pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process")
    arguments = arguments_of(torch.device("cpu"), name, 530, 1440, 520)
    for options in ({"copies": "late"}, {"seed": 2}, {"seed": 3}):
        with _fresh(), emulator.emulated_sm90(multiprocessors=4, uninitialised=True, **options):
            check(arguments)


def test_infinities_stay_in_their_rows(sm: torch.device) -> None:
    """A scale of e8m0 may be NaN, and a factor infinite."""
    arguments = arguments_of(sm, "blocks, e8m0", 140, 272, 136)
    arguments["a_scale"] = arguments["a_scale"].clone()
    arguments["a_scale"].view(torch.uint8)[3, 1] = 255
    got = mm_fp8(**arguments)
    assert got[3].isnan().all()
    assert got.isnan().any(1).sum() == 1


def test_tiles_are_narrow_where_wide_ones_are_few() -> None:
    wide = config_of("row", "float32", 128, "bfloat16", 4096, 4096, 132)
    assert (wide.halves, clusters_of(wide, 4096, 4096)) == (2, 256)
    assert config_of("row", "float32", 128, "bfloat16", 1024, 2048, 132).halves == 1


@pytest.mark.parametrize("served", SERVED, ids=lambda served: served.name)
def test_every_program_that_is_chosen_is_compiled_ahead(served: Served) -> None:
    configs, chosen = served.configs(), set()
    for out in served.outs:
        for m in (64, 8192):
            chosen.add(config_of(served.scales, served.stored, served.block, out, m, 4096, 132))
    assert chosen == {*configs}
    assert {*configs} <= {*every_config()}


@pytest.mark.parametrize("served", SERVED, ids=lambda served: served.name)
def test_declared_scales_are_those_of_the_programs(served: Served) -> None:
    """Each line of the table declares what `kind_of` tells to be its own, and no format is declared twice."""
    own = {name for name, (_, kind) in SCALES.items() if kind[:3] == (served.scales, served.stored, served.block)}
    signatures = {operator.operator.request(arguments_of(torch.device("cpu"), name, 40, 416, 520)).signature for name in own}
    assert signatures
    assert signatures <= signatures_of(served)
    assert not any(signatures_of(served) & signatures_of(other) for other in SERVED if other is not served)


def test_shared_memory_of_every_program() -> None:
    """Operands and results fit, with what is beside them."""
    for config in every_config():
        side = 4 * (128 + 2 * config.columns) + 16 * (config.stages + 1)
        scales = 4 * config.stages * config.parts * config.columns if config.scales == "column" else 0
        head = -(-(side + scales) // 1024) * 1024
        assert head + config.stages * (config.a_bytes + config.b_bytes) + 8 * config.panels * 2048 <= 227 * 1024


def test_steps_of_packed_scales() -> None:
    """Four exponents of a number are bytes beside each other."""
    packed = torch.zeros(3, 5, dtype=torch.int32).t()
    assert steps_of(packed, 0)[1:] == (4 * packed.stride(1), 4 * packed.stride(0), 1)
    assert steps_of(torch.zeros(1), 0)[1:] == (0, 0, 0)
    single = torch.zeros(6, 7)
    assert steps_of(single, 1)[1:] == (28, 16, 4)


def test_a_configuration_says_what_it_is() -> None:
    assert dataclasses.replace(Config("column", "byte", "bfloat16", 32)).parts == 4

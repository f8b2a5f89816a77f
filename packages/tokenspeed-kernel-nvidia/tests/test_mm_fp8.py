"""Tests GEMMs of many rows with two fp8 operands against the reference. The tests run on the emulator if there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.launchers import unchecked
from tokenspeed_kernel_base.ops.gemm._inputs import fp8
from tokenspeed_kernel_base.ops.gemm.mm import mm as operator
from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8 import launch as module
from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8.config import SUPPORTED, Config, Scales, Stored, Supported, config_of, every_config
from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8.launch import kind_of, mm_fp8_program, signatures_of, steps_of
from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8.launch import mm_fp8 as launcher_of_mm_fp8

from .launched import emulated, fresh

mm_fp8 = unchecked(operator, launcher_of_mm_fp8)

BF16, SINGLE = torch.bfloat16, torch.float32
# The tolerance relative to a result's norm. Rounding an element to bfloat16 gives an error of at most 3.9e-3.
TOLERANCE = 4.5e-3
# The scales of calls, and how `kind_of` classifies them.
SCALES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "blocks, e8m0": ({"b_scale": "block", "scales": "e8m0"}, ("block", "byte", 128, 128)),
    "blocks, packed": ({"b_scale": "block", "scales": "packed"}, ("block", "byte", 128, 128)),
    "rows of 128": ({"b_scale": "block1d"}, ("column", "float32", 128, 1)),
    "rows of 128, e8m0": ({"b_scale": "block1d", "scales": "e8m0"}, ("column", "byte", 128, 1)),
    "rows of 128, packed": ({"b_scale": "block1d", "scales": "packed"}, ("column", "byte", 128, 1)),
    "blocks of 64": ({"b_scale": "block", "block": 64}, ("column", "float32", 64, 64)),
    "rows of 64": ({"b_scale": "block1d", "block": 64}, ("column", "float32", 64, 1)),
}


@pytest.fixture(params=["gpu", "emulator"])
def sm(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Yields the device: a GPU, or an emulated device that runs only two clusters, so that each cluster has several tiles."""
    if request.param == "gpu":
        with fresh(module._launch_of):
            yield request.getfixturevalue("sm90")
        return
    with emulated(module._launch_of, 4, seed=1):
        yield torch.device("cpu")


def arguments_of(device: torch.device, name: str, m: int, k: int, n: int, **options: Any) -> dict[str, Any]:
    made = fp8(m, k, n, a_scale="block", **SCALES[name][0], **options)
    return operator.operator.complete(Case(name, made).build(device, 0))


def check(arguments: dict[str, Any], **changes: Any) -> Tensor:
    """Calls the kernel, and checks the total error and the error of the worst element against the reference."""
    bias = None if arguments["bias"] is None else arguments["bias"].float()
    wanted = operator(**{**arguments, "out": None, "out_dtype": SINGLE, "bias": bias}, solution="reference").double()
    out = torch.full(wanted.shape, torch.nan, dtype=BF16, device=wanted.device)
    got = mm_fp8(**{**arguments, "out": out, **changes})
    assert got is changes.get("out", out)
    off = got.double() - wanted
    assert float(off.norm()) <= TOLERANCE * float(wanted.norm()), f"{float(off.norm() / wanted.norm()):.2e}"
    size = wanted.norm() / wanted.numel() ** 0.5
    assert float(off.abs().max()) <= 8 * TOLERANCE * float(size), f"{float(off.abs().max() / size):.2e}"
    return got


@pytest.fixture(params=[1, 2], ids=["narrow", "wide"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forces tiles of one width, whatever the number of tiles."""

    def chosen(scales: Scales, stored: Stored, block: int, m: int, n: int, count: int) -> Config:
        return Config(scales, stored, block, request.param)

    monkeypatch.setattr(module, "config_of", chosen)


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", SCALES)
def test_scales(sm: torch.device, name: str) -> None:
    """Tests sizes at which some tiles are partly filled, the second half of some tiles is past all columns, and the last block is
    short."""
    arguments = arguments_of(sm, name, 600, 416, 520, bias=BF16)
    assert kind_of(arguments["b"], arguments["a_scale"], arguments["b_scale"]) == SCALES[name][1]
    assert torch.equal(check(arguments), check(arguments))


@pytest.mark.parametrize(("m", "k", "n"), [(1, 16, 8), (129, 128, 264), (256, 48, 1032), (300, 1424, 136)])
def test_sizes(sm: torch.device, m: int, k: int, n: int) -> None:
    for name in ("rows of 128", "blocks, e8m0"):
        check(arguments_of(sm, name, m, k, n))


@pytest.mark.parametrize("bias", [None, BF16, SINGLE], ids=str)
def test_biases(sm: torch.device, bias: Any) -> None:
    check(arguments_of(sm, "blocks, e8m0", 290, 160, 392, **({} if bias is None else {"bias": bias})))


def test_other_strides_and_alignments(sm: torch.device) -> None:
    """Tests weights that are contiguous along n, rows with gaps, scales with any strides, and a result with gaps. The launcher
    copies some of these tensors."""
    arguments = arguments_of(sm, "rows of 128", 140, 272, 136)
    gaps = torch.zeros(140, 280, dtype=torch.float8_e4m3fn, device=sm)
    gaps[:, :272] = arguments["a"]
    out = torch.full((140, 140), torch.nan, dtype=BF16, device=sm)
    changes = {"a": gaps[:, :272], "b": arguments["b"].contiguous(), "out": out[:, :136]}
    changes["a_scale"] = arguments["a_scale"].t().contiguous().t()
    check(arguments, **changes)
    assert out[:, 136:].isnan().all()


def test_no_rows(sm: torch.device) -> None:
    assert mm_fp8(**arguments_of(sm, "rows of 128", 0, 64, 16)).shape == (0, 16)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", ["blocks, e8m0", "rows of 128", "blocks of 64"])
def test_nothing_is_read_before_it_is_there(name: str) -> None:
    """Tests copies and wgmmas that complete as late as possible, or at random times."""
    arguments = arguments_of(torch.device("cpu"), name, 530, 1440, 520)
    for options in ({"copies": "late"}, {"seed": 2}, {"seed": 3}):
        with emulated(module._launch_of, 4, **options):
            check(arguments)


def test_infinities_stay_in_their_rows(sm: torch.device) -> None:
    """Asserts that a NaN e8m0 scale makes only its row of results NaN."""
    arguments = arguments_of(sm, "blocks, e8m0", 140, 272, 136)
    arguments["a_scale"] = arguments["a_scale"].clone()
    arguments["a_scale"].view(torch.uint8)[3, 1] = 255
    got = mm_fp8(**arguments)
    assert got[3].isnan().all()
    assert got.isnan().any(1).sum() == 1


@pytest.mark.parametrize(("m", "n", "halves"), [(256, 2048, 1), (512, 4096, 1), (1024, 2048, 1), (4096, 7168, 2), (4096, 4096, 2)])
def test_tiles_are_as_wide_as_was_measured_to_be_quicker(m: int, n: int, halves: int) -> None:
    for served in SUPPORTED:
        assert config_of(served.scales, served.stored, served.block, m, n, 132).halves == halves


@pytest.mark.parametrize("served", SUPPORTED, ids=lambda served: served.name)
def test_every_program_that_is_chosen_is_compiled_ahead(served: Supported) -> None:
    configs = served.configs()
    assert {config_of(served.scales, served.stored, served.block, m, 4096, 132) for m in (512, 8192)} == {*configs}
    assert {*configs} <= {*mm_fp8_program.usual()}


@pytest.mark.parametrize("served", SUPPORTED, ids=lambda served: served.name)
def test_declared_scales_are_those_of_the_programs(served: Supported) -> None:
    """Asserts for each line of `SUPPORTED` that the declared formats include those of calls with these scales, and that no format
    is declared twice."""
    own = {name for name, (_, kind) in SCALES.items() if kind[:3] == (served.scales, served.stored, served.block)}
    signatures = {operator.operator.request(arguments_of(torch.device("cpu"), name, 40, 416, 520)).signature for name in own}
    assert signatures
    assert signatures <= signatures_of(served)
    assert not any(signatures_of(served) & signatures_of(other) for other in SUPPORTED if other is not served)


def test_shared_memory_of_every_program() -> None:
    """Asserts that operands, results, scales and barriers fit into shared memory."""
    for config in every_config():
        side = 4 * config.columns + 16 * (config.stages + 1)
        scales = 4 * config.stages * config.parts * config.columns if config.scales == "column" else 0
        head = -(-(side + scales) // 1024) * 1024
        assert head + config.stages * (config.a_bytes + config.b_bytes) + 8 * config.panels * 2048 <= 227 * 1024


def test_steps_of_packed_scales() -> None:
    """Asserts that strides of scales are in bytes: four packed exponents are consecutive bytes."""
    packed = torch.zeros(3, 5, dtype=torch.int32).t()
    assert steps_of(packed, 0)[1:] == (4 * packed.stride(1), 4 * packed.stride(0), 1)
    single = torch.zeros(6, 7)
    assert steps_of(single, 1)[1:] == (28, 16, 4)

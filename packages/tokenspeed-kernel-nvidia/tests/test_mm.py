"""Tests GEMMs of few rows against float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.checks import HALVES
from tokenspeed_kernel_base.ops.gemm._inputs import fp8, micro
from tokenspeed_kernel_base.ops.gemm.mm import mm as operator
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands
from tokenspeed_kernel_nvidia import _programs
from tokenspeed_kernel_nvidia.sm90.gemm.mm import launch as module
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import (
    BLOCK,
    CLUSTER,
    GROUP,
    HEAD_BYTES,
    ROWS,
    SHARED_BYTES,
    STAGES,
    every_config,
    layout_of,
    sharing_of,
)
from tokenspeed_kernel_nvidia.sm90.gemm.mm.launch import mm as launcher_of_mm
from tokenspeed_kernel_nvidia.sm90.gemm.mm.split_config import CLUSTER as SPLIT
from tokenspeed_kernel_nvidia.sm90.gemm.mm.split_config import MOST_ROWS, SplitConfig, every_split_config, is_split, split_of
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.launch import mm as launcher_of_split_k

from .launched import as_operator

mm = as_operator(launcher_of_mm)
mm_split_k = as_operator(launcher_of_split_k)

DTYPES = sorted(HALVES, key=str)
SINGLE = torch.float32
# Tolerances relative to a result's norm. Rounding an element gives an error of at most 3.9e-3 in bfloat16, and 4.9e-4 in float16.
TOLERANCE = {torch.bfloat16: 4.5e-3, torch.float16: 6e-4, SINGLE: 1e-5}


def _numbers(device: torch.device, *shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    draw = torch.Generator(device).manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=draw, device=device) * scale).to(dtype)


def _wanted(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    product = a.double() @ b.double()
    return product if bias is None else product + bias.double()


def _check(got: Tensor, wanted: Tensor) -> None:
    """Checks the total error and the error of the worst element. An element at a wrong index, or an element that lacks a part of k,
    has a large error."""
    assert got.shape == wanted.shape
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} numbers are not finite"
    off, limit = got.double() - wanted, TOLERANCE[got.dtype]
    assert float(off.norm()) <= limit * float(wanted.norm()), f"relative error {float(off.norm() / wanted.norm()):.2e}"
    size = wanted.norm() / wanted.numel() ** 0.5
    assert float(off.abs().max()) <= 8 * limit * float(size), f"worst number {float(off.abs().max() / size):.2e} of what is usual"


def _run(
    device: torch.device,
    m: int,
    k: int,
    n: int,
    dtype: torch.dtype = torch.bfloat16,
    bias: torch.dtype | None = None,
    kernel: Any = mm,
    **options: Any,
) -> Tensor:
    a, weight = _numbers(device, m, k, dtype=dtype), _numbers(device, n, k, dtype=dtype, seed=1, scale=k**-0.5)
    given = None if bias is None else _numbers(device, n, dtype=bias)
    out = torch.full((m, n), torch.nan, dtype=options.get("out_dtype") or dtype, device=device)
    got = kernel(a, weight.t(), bias=given, out=out, **options)
    assert got is out
    _check(got, _wanted(a, weight.t(), given))
    return got


@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 15, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(sm90: torch.device, dtype: torch.dtype, m: int) -> None:
    _run(sm90, m, 2880, 5120, dtype)
    _run(sm90, m, 2880, 128, dtype, dtype)


@pytest.mark.parametrize(
    ("k", "n"), [(2880, 5120), (4096, 2880), (2880, 128), (7168, 2112), (2880, 20000), (28672, 300), (7168, 256)]
)
@pytest.mark.parametrize("m", [1, 16])
def test_shapes_of_models(sm90: torch.device, m: int, k: int, n: int) -> None:
    _run(sm90, m, k, n, bias=torch.bfloat16)


@pytest.mark.parametrize("bias", [None, "own", SINGLE], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_k_split_over_a_cluster(sm90: torch.device, dtype: torch.dtype, bias: Any) -> None:
    for m, k, n in ((17, 4096, 2880), (32, 4096, 2880), (32, 3080, 2048), (25, 3208, 2501)):
        _run(sm90, m, k, n, dtype, dtype if bias == "own" else bias, kernel=mm_split_k)


@pytest.mark.parametrize("k", [8, 16, 24, 40, 64, 504, 512, 520, 1016, 1024, 1032, 2048, 2056, 4096, 4104, 9000])
def test_edges_of_k(sm90: torch.device, k: int) -> None:
    """Tests values of k at which the last load, chunk or stage is only partly filled."""
    for m, n in itertools.product((5, 12), (3, 300, 1500)):
        _run(sm90, m, k, n, out_dtype=SINGLE)


@pytest.mark.parametrize("n", [1, 2, 8, 131, 132, 133, 264, 1055, 1056, 1057, 1188, 6335, 6336, 6337, 8447, 8448, 8449, 17000])
def test_edges_of_n(sm90: torch.device, n: int) -> None:
    """Tests values of n that are smaller than the number of CTAs, or leave tiles and groups partly filled."""
    for m, k in itertools.product((3, 12), (264, 4360)):
        _run(sm90, m, k, n, bias=SINGLE)


@pytest.mark.parametrize("out_dtype", [None, SINGLE], ids=str)
@pytest.mark.parametrize("bias", [None, "own", SINGLE], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_biases_and_results(sm90: torch.device, dtype: torch.dtype, bias: Any, out_dtype: torch.dtype | None) -> None:
    for m, n in itertools.product((1, 11), (40, 2000)):
        _run(sm90, m, 512, n, dtype, (out_dtype or dtype) if bias == "own" else bias, out_dtype=out_dtype)


def test_random_calls(sm90: torch.device) -> None:
    """Makes 200 calls with random options of every kind."""
    draw = random.Random(3)
    for _ in range(200):
        dtype = draw.choice(DTYPES)
        out_dtype = draw.choice([None, SINGLE])
        bias = draw.choice([None, SINGLE, out_dtype or dtype])
        k, n = 8 * draw.randrange(1, draw.choice([20, 200, 900])), draw.randrange(1, draw.choice([50, 300, 3000, 12000]))
        _run(sm90, draw.randrange(1, 17), k, n, dtype, bias, out_dtype=out_dtype)


def test_infinities_and_nan(sm90: torch.device) -> None:
    """Asserts that infinities and NaN affect only their rows and columns, and that memory past a row's end has no effect."""
    k, n = 328, 500
    a, weight = (_numbers(sm90, rows, k, dtype=torch.bfloat16) for rows in (6, n))
    weight[3, 7], weight[40, k - 1], a[2, 0] = torch.inf, torch.nan, torch.inf
    got, wanted = mm(a, weight.t(), out_dtype=SINGLE), (a.float() @ weight.float().t())
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3, equal_nan=True)


def test_strides(sm90: torch.device) -> None:
    """Tests tensors that are slices of larger tensors, results with gaps, and other layouts of weights."""
    dtype = torch.bfloat16
    wide, stack = _numbers(sm90, 9, 1000, dtype=dtype), _numbers(sm90, 700, 1000, dtype=dtype, scale=0.05)
    bias = _numbers(sm90, 700, 2, dtype=dtype)[:, 0]
    for a, weight in (
        (wide[:, :400], stack[:, 8:408]),
        (wide[::2, 3:403], stack[::2, 1:401]),
        (wide[:, :800:2], stack[:, 1:801:2]),
    ):
        b = weight.t()
        given = bias[: len(weight)]
        field = torch.full((b.shape[1], 2 * len(a)), 7.0, dtype=dtype, device=sm90)
        out = field[:, ::2].t()
        assert mm(a, b, bias=given, out=out) is out
        _check(out, _wanted(a, b, given))
        assert (field[:, 1::2] == 7).all()
        for other in (b.contiguous(), b.contiguous().t().contiguous().t()):
            _check(mm(a, other, bias=given), _wanted(a, b, given))
            _check(mm(a, other, bias=given.float(), out_dtype=SINGLE), _wanted(a, b, given))


def test_the_same_again(sm90: torch.device) -> None:
    for m, k, n in ((1, 2880, 5120), (16, 4096, 2880), (3, 2880, 128)):
        first = _run(sm90, m, k, n)
        for _ in range(20):
            assert torch.equal(first, _run(sm90, m, k, n))


def test_a_row_alone(sm90: torch.device) -> None:
    """Asserts that a row's result does not depend on other rows, if all calls use the same program."""
    a, weight = _numbers(sm90, 8, 2880, dtype=torch.bfloat16), _numbers(sm90, 700, 2880, dtype=torch.bfloat16)
    together = mm(a, weight.t())
    for row in range(8):
        assert torch.equal(together[row : row + 1], mm(a[row : row + 1], weight.t()))


def test_a_graph_whose_inputs_change(sm90: torch.device) -> None:
    a, weight = _numbers(sm90, 16, 2880, dtype=torch.bfloat16), _numbers(sm90, 3000, 2880, dtype=torch.bfloat16, scale=0.02)
    bias = _numbers(sm90, 3000, dtype=torch.bfloat16)
    mm(a, weight.t(), bias=bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        few, many = mm(a[:3], weight.t(), bias=bias), mm(a, weight.t(), bias=bias)
    for seed in range(5):
        a.copy_(_numbers(sm90, 16, 2880, dtype=torch.bfloat16, seed=seed))
        weight.copy_(_numbers(sm90, 3000, 2880, dtype=torch.bfloat16, seed=seed + 50, scale=0.02))
        bias.copy_(_numbers(sm90, 3000, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        wanted = _wanted(a, weight.t(), bias)
        _check(few, wanted[:3])
        _check(many, wanted)


@pytest.mark.parametrize("graphed", [False, True])
def test_results_of_the_preceding_kernel_are_visible(sm90: torch.device, graphed: bool) -> None:
    """Tests kernels that overlap (PDL). Each result is the activations of the next call, and the weights of another call right
    after it."""
    n, k = 2000, 2048
    weight, back = (_numbers(sm90, *shape, dtype=torch.bfloat16, scale=0.05) for shape in ((n, k), (k, n)))
    start = _numbers(sm90, 16, k, dtype=torch.bfloat16)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def chain() -> None:
        x = start
        for _ in range(20):
            wide = mm(x, weight.t())
            narrow = mm(wide, back.t())
            scores = mm(x, narrow.t())  # the preceding kernel wrote ``narrow``
            steps.append((x, wide, scores))
            x = narrow

    chain()
    if graphed:
        torch.cuda.synchronize()
        steps.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        for _ in range(3):
            for _, wide, scores in steps:
                wide.fill_(torch.nan)
                scores.fill_(torch.nan)
            graph.replay()
    torch.cuda.synchronize()
    for (x, wide, scores), (narrow, _, _) in itertools.pairwise(steps):
        _check(wide, _wanted(x, weight.t()))
        _check(narrow, _wanted(wide, back.t()))
        _check(scores, _wanted(x, narrow.t()))


def test_two_streams(sm90: torch.device) -> None:
    inputs = [(_numbers(sm90, m, k, dtype=torch.bfloat16), _numbers(sm90, n, k, dtype=torch.bfloat16)) for m, k, n in
              ((1, 2880, 5120), (16, 4096, 2880))]  # fmt: skip
    wanted = [_wanted(a, weight.t()) for a, weight in inputs]
    streams = [torch.cuda.Stream(sm90) for _ in inputs]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for index, (a, weight) in enumerate(inputs):
            with torch.cuda.stream(streams[index]):
                found[index].append(mm(a, weight.t()))
    torch.cuda.synchronize()
    for several, each in zip(found, wanted, strict=True):
        for got in several:
            _check(got, each)
            assert torch.equal(got, several[0])


# -- weights with scales -------------------------------------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn
SCALED = {
    **{f"fp8 weights, {b}": (E4M3, partial(fp8, a_scale="", b_scale=b)) for b in ("tensor", "channel", "block")},
    **{f"fp8, {a} and {b}": (E4M3, partial(fp8, a_scale=a, b_scale=b)) for a, b in
       (("tensor", "tensor"), ("token", "tensor"), ("tensor", "channel"), ("token", "channel"), ("block", "block"))},
    "mxfp4 weights": (torch.uint8, partial(micro, a="dense", b="mxfp4")),
}  # fmt: skip


def _scaled(device: torch.device, name: str, m: int, k: int, n: int, dtype: torch.dtype | None, seed: int = 0) -> dict[str, Any]:
    """Returns the arguments of a GEMM, with an output. ``dtype`` is the dtype of dense activations."""
    options: dict[str, Any] = {} if dtype is None or name == "mxfp4 weights" else {"a_dtype": dtype}
    arguments = operator.operator.complete(Case(name, SCALED[name][1](m, k, n, **options)).build(device, seed))
    return {**arguments, "out": torch.full((m, n), torch.nan, dtype=dtype or torch.bfloat16, device=device)}


def _run_scaled(device: torch.device, name: str, m: int, k: int, n: int, dtype: torch.dtype | None, **changed: Any) -> Tensor:
    arguments = {**_scaled(device, name, m, k, n, dtype, k + n), **changed}
    if changed.get("out_dtype"):
        arguments["out"] = arguments["out"].to(changed["out_dtype"])
    got = mm(**arguments)
    assert got is arguments["out"]
    operands = decode_operands("mm", *(arguments[each] for each in ("a", "b", "a_scale", "b_scale")))
    _check(got, _wanted(*operands, arguments["bias"]))
    return got


def _dtypes(name: str) -> list[torch.dtype | None]:
    """Returns the activation dtypes that the kernel supports for this entry of `SCALED`."""
    return list(DTYPES) if name.startswith("fp8 weights") else [torch.bfloat16] if name.startswith("mx") else [None]


@pytest.mark.parametrize("name", SCALED)
def test_scales(sm90: torch.device, name: str) -> None:
    for dtype, m in itertools.product(_dtypes(name), (1, 8, 16)):
        for k, n in ((2880, 5120), (4096, 2880), (2880, 128), (7168, 2112), (96, 40), (2880, 20000)):
            _run_scaled(sm90, name, m, k, n, dtype)
            _run_scaled(sm90, name, m, k, n, dtype, out_dtype=SINGLE, bias=_numbers(sm90, n, dtype=SINGLE))


@pytest.mark.parametrize("name", SCALED)
def test_random_scaled_calls(sm90: torch.device, name: str) -> None:
    draw = random.Random(name)
    for _ in range(60):
        k, n = 32 * draw.randrange(1, draw.choice([5, 60, 300])), draw.randrange(1, draw.choice([50, 300, 3000, 12000]))
        _run_scaled(sm90, name, draw.randrange(1, 17), k - 16 * (k > 32 and name != "mxfp4 weights"), n, draw.choice(_dtypes(name)))


@pytest.mark.parametrize("name", SCALED)
def test_scaled_strides(sm90: torch.device, name: str) -> None:
    """Tests other layouts of scales, and weights that are slices of wider weights or not row-major."""
    dtype = _dtypes(name)[0]
    arguments = _scaled(sm90, name, 5, 512, 700, dtype)
    first = mm(**arguments).clone()
    for each in ("a_scale", "b_scale"):
        if arguments[each] is not None and arguments[each].ndim == 2:
            turned = arguments[each].mT.contiguous().mT
            assert torch.equal(mm(**{**arguments, each: turned}), first)
    b = arguments["b"]
    stack = torch.zeros(b.shape[1], b.shape[0] + 48, dtype=torch.uint8, device=sm90)
    stack[:, 16:-32] = b.t().view(torch.uint8)
    sliced = stack[:, 16:-32].view(b.dtype).t()
    for other in (sliced, b.view(torch.uint8).contiguous().view(b.dtype)):
        assert torch.equal(mm(**{**arguments, "b": other}), first)


def test_every_fp8_number(sm90: torch.device) -> None:
    """Tests every fp8 value except NaN as a weight and as an activation."""
    codes = torch.tensor([code for code in range(256) if code % 128 != 127], dtype=torch.uint8, device=sm90).view(E4M3)
    one = torch.ones(1, device=sm90)
    k = 256
    diagonal = torch.zeros(254, k, device=sm90)
    diagonal[range(254), range(254)] = codes.float()
    for dtype in (*DTYPES, E4M3):
        a = torch.ones(3, k, device=sm90).to(dtype)
        scale = one if dtype == E4M3 else None
        got = mm(a, diagonal.to(E4M3).t(), scale, one, out_dtype=SINGLE)
        assert torch.equal(got, codes.float().expand(3, -1))
    a = torch.zeros(2, 256, device=sm90)
    a[:, :254] = codes.float()
    eye = torch.eye(256, device=sm90).to(E4M3)
    assert torch.equal(mm(a.to(E4M3), eye.t(), one, one, out_dtype=SINGLE), a)


def test_every_mxfp4_number(sm90: torch.device) -> None:
    """Tests each e2m1 value with each scale, the smallest, the largest and NaN included."""
    row = torch.arange(256, device=sm90)
    packed = torch.zeros(256, 256, 16, dtype=torch.uint8, device=sm90)  # [row, scale, byte], k = 256 * 32
    packed[row, row] = torch.arange(16, dtype=torch.uint8, device=sm90) * 17
    scale = torch.full((256, 256), 127, dtype=torch.uint8, device=sm90)
    scale[row, row] = row.to(torch.uint8)
    b, b_scale = packed.view(256, -1).t(), scale.t()
    for place in (0, 1, 5, 14, 30, 31):  # positions in a block of 32 elements
        a = torch.zeros(4, 256, 32, dtype=torch.bfloat16, device=sm90)
        a[:, :, place] = 1
        a = a.view(4, -1)
        wanted = a.cpu().float() @ decode_operands("mm", a, b, None, b_scale)[1].cpu()
        got = mm(a, b, None, b_scale, out_dtype=SINGLE)
        # Subnormal results may be 0.
        torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=2.0**-126, equal_nan=True)


# -- without a GPU -------------------------------------------------------------------------------------------------------------


def test_configurations() -> None:
    """Asserts that every configuration fits into shared memory for rows of any length, and reads shared memory without bank
    conflicts."""
    every = every_config()
    assert len(set(every)) == len(every)
    for config in every:
        assert config.pitch % 128 == 64
        assert GROUP % config.cluster == GROUP % ROWS == 0
        assert config.threads // (GROUP // config.cluster) > 0
        for m, row_bytes in itertools.product((1, config.tokens), (16, 64, 1000, 5760, 8192, 30000, 1 << 20)):
            layout = layout_of(config, m, row_bytes)
            assert layout is not None
            assert layout.size <= SHARED_BYTES
            assert 1 <= layout.stages <= STAGES
            assert layout.chunk_bytes % config.part_bytes == 0
            assert HEAD_BYTES <= layout.scales <= layout.activations < layout.ring < layout.size
            assert (layout.activations % 16, layout.ring % 128, layout.chunk_bytes % BLOCK) == (0, 0, 0)
            assert layout.activations + config.planes * m * (layout.chunk_bytes + 64) <= layout.ring


def test_how_clusters_split_the_work() -> None:
    """Asserts how the CTAs of a cluster share work. If weights have few rows, the CTAs split k, and the cluster's rows are one
    group. If there are many rows of activations, the CTAs share these rows."""
    assert sharing_of("dense", 1, 128, 5760, 132) == "weights"
    assert sharing_of("dense", 16, 640, 3584, 132) == "weights"
    assert sharing_of("dense", 16, 641, 5760, 132) == "activations"
    assert sharing_of("dense", 8, 641, 5760, 132) == ""
    assert sharing_of("dense", 8, 128, 3583, 132) == ""
    assert sharing_of("dense", 16, 131, 64, 132) == ""  # one CTA of a pair would have no weight row
    assert sharing_of("mxfp4", 16, 128, 5760, 132) == ""
    # With k = 16384, whole rows of activations do not fit into shared memory.
    assert sharing_of("dense", 16, 5120, 8192, 132) == "activations"
    assert sharing_of("dense", 16, 5120, 16384, 132) == ""
    for quads in range(CLUSTER * (CLUSTER - 1), 200):
        part = -(-quads // CLUSTER)
        assert part * (CLUSTER - 1) < quads


def test_which_rows_are_split() -> None:
    """Asserts that the kernel that splits k supports weight rows of up to 8192 elements. Longer rows, or more rows, use the other
    kernel."""
    for m, k in itertools.product((1, 8, 9, 16), (8, 2880, 7168, 8192)):
        assert is_split(m, MOST_ROWS, 2 * k)
        config = split_of("bfloat16", "bfloat16", m, 2 * k)
        assert config.tokens >= m
        assert SPLIT * config.part_bytes >= 2 * k
    assert not is_split(1, 128, 2 * 8200)
    assert not is_split(1, MOST_ROWS + 1, 5760)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Records the configurations and arguments of launches. Checks tensors in the same way as compiled programs."""
    found: list[tuple[Any, tuple[Any, ...]]] = []

    def record(program: Any, config: Any) -> Any:
        def launch(a: Tensor, b: Tensor, out: Tensor, *others: Any) -> None:
            for rows in (a, b.t()):
                if rows.stride(1) != 1 or rows.stride(0) * rows.element_size() % 16 or rows.data_ptr() % 16:
                    raise ValueError("refused")
            found.append((config, (a, b, out, *others)))

        return launch

    module._launch_of.cache_clear()
    monkeypatch.setattr(_programs.Program, "__call__", record)
    monkeypatch.setattr(module, "sm_count_of", lambda device: 132)
    yield found
    module._launch_of.cache_clear()


def test_used_programs_are_compiled_ahead_of_time(asked: list[tuple[Any, tuple[Any, ...]]]) -> None:
    listed = {*every_config(), *every_split_config()}
    for dtype, out_dtype, m, n, k in itertools.product(
        DTYPES, (None, SINGLE), (1, 8, 9, 16), (1, 100, 5120, 9000), (64, 2048, 9000)
    ):
        mm(torch.zeros(m, k, dtype=dtype), torch.zeros(n, k, dtype=dtype).t(), out_dtype=out_dtype)
        config, (_, _, out, *numbers) = asked.pop()
        assert config in listed
        assert config.tokens >= m
        split = isinstance(config, SplitConfig)
        assert split == (n <= 100 and k < 9000)
        assert out.dtype == (out_dtype or dtype)
        together = SPLIT if split else config.together
        assert len(numbers) == (4 if split else 15)
        ctas, size = numbers[2 if split else 8], numbers[-1]
        assert 1 <= ctas <= min(together * n, 132)
        assert ctas % together == 0
        assert size <= SHARED_BYTES


@pytest.mark.parametrize("bias", [None, torch.bfloat16, SINGLE], ids=str)
def test_other_layouts(asked: list[tuple[Any, tuple[Any, ...]]], bias: torch.dtype | None) -> None:
    """Asserts that a call runs on PyTorch's GEMM if this GEMM supports the layout. Otherwise, the weights are copied."""
    device = torch.device("cpu")
    a, weight = (_numbers(device, rows, 72, dtype=torch.bfloat16) for rows in (5, 30))
    given = None if bias is None else _numbers(device, 60, dtype=bias)[::2]
    out = torch.zeros(5, 30, dtype=torch.bfloat16)
    b = weight.t().contiguous()
    assert mm(a, b, bias=given, out=out) is out
    if bias == SINGLE:
        (_, (_, copy, _, *others)) = asked.pop()
        assert torch.equal(copy, b)
        assert copy.stride() == (1, 72)
        assert others[1] == 1
    else:
        assert not asked
        _check(out, _wanted(a, b, given))
    mm(a[:, :64].t().contiguous().t(), weight[:, :64].t(), bias=given)
    _, (copy, kept, *_) = asked.pop()
    assert copy.is_contiguous()
    assert kept.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("name", SCALED)
def test_scales_are_passed_by_address(asked: list[tuple[Any, tuple[Any, ...]]], name: str) -> None:
    """Asserts that scales are passed by address, with strides of 0 if one scale applies to all elements, and that programs are
    among those compiled ahead of time."""
    device = torch.device("cpu")
    for dtype, m, n in itertools.product(_dtypes(name), (1, 16), (100, 5120)):
        arguments = _scaled(device, name, m, 320, n, dtype)
        for out_dtype in (None, SINGLE):
            mm(**{**arguments, "out": None, "out_dtype": out_dtype})
            config, (a, b, out, _, _, *tables) = asked.pop()
            assert config in set(every_config())
            assert out.dtype == (out_dtype or dtype or torch.bfloat16)
            assert {a.dtype, b.dtype} <= {torch.uint8, *DTYPES}
            for scale, table in zip((arguments["a_scale"], arguments["b_scale"]), (tables[:3], tables[3:6]), strict=True):
                if scale is None:
                    assert table == [0, 0, 0]
                else:
                    assert table == [scale.data_ptr(), *(scale.stride() if scale.ndim == 2 else (0, 0))]
    block = name.rpartition(" ")[2] == "block"
    assert config.scales == ("mx" if name.startswith("mx") else "block" if block else "row")

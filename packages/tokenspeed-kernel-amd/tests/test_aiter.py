"""Tests the adapters to AITER. The adapters have not been run on hardware, because AITER needs an AMD GPU.

The tests use a stand-in that runs on any machine: a module aiter whose functions have AITER's signatures, and compute AITER's
documented results in PyTorch on a CPU. If AITER's source violates the operator's contract, the stand-in does so too, or raises an
error. So an adapter may declare every case that passes. The last test is for a gfx950 with AITER itself.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
import tokenspeed_kernel_amd
from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel.workbench.numerics.verify import refusal
from tokenspeed_kernel_amd.aiter import package as aiter_package
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.attention._inputs import paged, ragged
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelLoadWarning, KernelRegistry, register_package
from tokenspeed_kernel_base.spec import KernelSpec, Priority

from . import aiter_signatures

_CALLS: list[str] = []


def _with_signature(name: str) -> Callable[[Callable[[dict[str, Any]], Any]], Callable[..., Any]]:
    """Returns a decorator that gives a function the signature of the AITER function ``name``. The decorated function receives all
    arguments in one dict."""

    def decorate(body: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = aiter_signatures.bind(name, *args, **kwargs)
            passed = set(bound.arguments)
            bound.apply_defaults()
            ignored = {"min_seqlen_q", "deterministic", "how_v3_bf16_cvt"}
            unused = {p for p, v in bound.arguments.items() if p in passed and p not in _READ[name] and v not in (None, 0.0)}
            assert not unused - ignored, f"the stand-in does not know {unused}"
            _CALLS.append(name)
            return body(bound.arguments)

        return call

    return decorate


_READ = {
    "aiter.flash_attn_varlen_func": {
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal", "window_size",
        "return_lse", "out", "sink_ptr",
    },
    "aiter.ops.triton.attention.unified_attention.unified_attention": {
        "q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal",
        "window_size", "block_table", "sinks",
    },
}  # fmt: skip


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes attention of one sequence. Query i sees keys ``i + behind - left`` to ``i + behind + right``. A negative ``left`` or
    ``right`` means no bound."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(ratio, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    behind = k.shape[0] - q.shape[0]
    distance = torch.arange(k.shape[0]) - torch.arange(q.shape[0])[:, None] - behind
    hidden = distance > right if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, q.shape[0], 1)], 2)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1)


@_with_signature("aiter.flash_attn_varlen_func")
def _flash_attn_varlen_func(given: dict[str, Any]) -> Any:
    q, k, v, out, sinks = (given[name] for name in ("q", "k", "v", "out", "sink_ptr"))
    assert not torch.is_grad_enabled()
    assert q.shape[2] == v.shape[2]
    assert q.dtype == k.dtype == v.dtype == out.dtype
    assert out.shape == (*q.shape[:2], v.shape[2])
    assert out.stride(2) == 1
    assert given["softmax_scale"] > 0
    starts = {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    assert all(start.dtype == torch.int32 and start.is_contiguous() and start.numel() > 1 for start in starts.values())
    begins, lengths = starts["cu_seqlens_q"].tolist(), starts["cu_seqlens_q"].diff()
    assert begins == starts["cu_seqlens_k"].tolist()
    assert min(given["max_seqlen_q"], given["max_seqlen_k"]) >= lengths.max()
    left, right, first = given["window_size"]
    # A bound beyond the longest sequence has no effect.
    left, right = (-1 if bound >= given["max_seqlen_k"] else bound for bound in (left, right))
    assert first == 0
    if q.shape[2] == 128:
        assert sinks is None, "the assembly kernels would ignore the sinks"
        assert left != 0, "the assembly kernels refuse a window of the token alone"
    if sinks is not None:
        assert sinks.dtype == torch.float32
        assert sinks.is_contiguous()
        assert not given["return_lse"], "undocumented"
    right = 0 if given["causal"] else right
    lse = torch.empty(q.shape[1], q.shape[0])
    for begin, length in zip(begins, lengths.tolist(), strict=False):
        rows = slice(begin, begin + length)
        if length:
            out[rows], lse[:, rows] = _attend(q[rows], k[rows], v[rows], given["softmax_scale"], left, right, sinks)
    return (out, lse) if given["return_lse"] else out


@_with_signature("aiter.ops.triton.attention.unified_attention.unified_attention")
def _unified_attention(given: dict[str, Any]) -> Tensor:
    q, k, v, out, lens, table = (given[name] for name in ("q", "k", "v", "out", "seqused_k", "block_table"))
    assert given["causal"]
    assert q.shape == out.shape
    assert k.shape == v.shape
    assert 1 == q.stride(2) == out.stride(2) == table.stride(1)  # the other strides of these tensors are unrestricted
    assert lens.is_contiguous()
    assert given["cu_seqlens_q"].is_contiguous()
    assert given["cu_seqlens_q"].shape[0] == len(lens) + 1
    assert given["sinks"] is None or given["sinks"].is_contiguous()
    assert given["max_seqlen_k"] >= lens.max()
    assert given["max_seqlen_q"] <= q.shape[0]
    page_size, tile = k.shape[1], 64
    # AITER masks tiles only if a page has several tiles. With split-KV, if a page is smaller than a tile, the tile has the page's
    # size.
    masked = page_size % tile == 0 and page_size > tile
    begins = given["cu_seqlens_q"].tolist()
    for index, length in enumerate(lens.tolist()):
        rows = slice(begins[index], begins[index + 1])
        new = rows.stop - rows.start
        assert new <= given["max_seqlen_q"]
        if not new:
            continue
        if length < new:  # some query sees no key: AITER divides by zero or reads stale memory
            out[rows] = torch.nan
            continue
        pages = table[index, : -(-length // page_size)].long()
        keys, values = k[pages].flatten(0, 1), v[pages].flatten(0, 1)
        spoilt = not masked and not torch.isfinite(values[length:]).all()
        window = given["window_size"][0]
        result, _ = _attend(q[rows], keys[:length], values[:length], given["softmax_scale"], window, 0, given["sinks"])
        out[rows] = torch.nan if spoilt else result
    return out


@pytest.fixture
def aiter_missing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes amd-aiter appear not to be installed. PyPI's unrelated package named aiter may be installed."""
    real = metadata.version

    def version(name: str) -> str:
        if name == "amd-aiter":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(aiter_package.metadata, "version", version)
    aiter_package.find_gap.cache_clear()
    yield
    aiter_package.find_gap.cache_clear()


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the stand-in appear to be installed, on a pretended gfx950 with tensors on the CPU."""
    for name in _READ:
        parts = name.split(".")[:-1]
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules or not hasattr(sys.modules[path], "_stand_in"):
                module = ModuleType(path)
                module.__path__ = []
                module._stand_in = True  # type: ignore[attr-defined]
                monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(sys.modules["aiter"], "flash_attn_varlen_func", _flash_attn_varlen_func, raising=False)
    unified = sys.modules["aiter.ops.triton.attention.unified_attention"]
    monkeypatch.setattr(unified, "unified_attention", _unified_attention, raising=False)
    monkeypatch.setattr(aiter_package, "find_gap", lambda: None)
    _CALLS.clear()
    _forget_adapters()
    with use_platform(replace(named_platform("gfx950"), pretended=False, emulated=True)):
        yield
    _forget_adapters()


def _forget_adapters() -> None:
    """Makes the adapters import AITER again, because they keep a reference to the imported module."""
    for name in [name for name in sys.modules if name.startswith("tokenspeed_kernel_amd.aiter.") and name.endswith("_device")]:
        parent, _, last = name.rpartition(".")
        del sys.modules[name]
        delattr(sys.modules[parent], last)


@functools.cache
def _names() -> tuple[str, ...]:
    return tuple(spec.name for spec in register_package("tokenspeed_kernel_amd") if spec.solution == "aiter")


@pytest.fixture
def specs() -> Iterator[dict[str, KernelSpec]]:
    """Yields the kernels' declarations. Registers the kernels anew before and after the test, so that no kernel is loaded or
    excluded from an earlier test."""
    registry = KernelRegistry.get()
    installed = _unregister_all(registry)
    register_package("tokenspeed_kernel_amd")
    yield {name: registry.get_by_name(name) for name in _names()}
    _unregister_all(registry)
    if installed:
        register_package("tokenspeed_kernel_amd")


def _unregister_all(registry: KernelRegistry) -> bool:
    """Unregisters this package's kernels. Returns whether there were any."""
    names = [spec.name for spec in registry.list_kernels() if spec.solution in ("gluon", "aiter")]
    for name in names:
        registry.unregister(name)
    return bool(names)


# -- without AITER -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("aiter_missing")
def test_without_it_the_kernels_say_so(specs: dict[str, KernelSpec]) -> None:
    q = torch.zeros(4, 4, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    for platform in ("gfx942", "gfx950"):
        with use_platform(named_platform(platform)):
            explained = tokenspeed_kernel.mha_prefill.explain(q, q, q, offsets)
        verdicts = {verdict.spec.name: verdict for verdict in explained.verdicts}
        assert not verdicts["aiter_mha_prefill_64"].accepted
        assert verdicts["aiter_mha_prefill_64"].reason == "needs amd-aiter"
    assert all(spec.capability.gap(named_platform("gfx950")) == "needs amd-aiter" for spec in specs.values())


def test_other_machines_are_refused_first(specs: dict[str, KernelSpec]) -> None:
    for platform in ("sm_90", "cpu", "gfx90a"):
        for spec in specs.values():
            assert spec.capability.gap(named_platform(platform)).startswith(("needs an ", "needs architecture"))


@pytest.mark.parametrize(
    ("version", "gap"),
    [
        ("0.1.20", None),
        ("0.1.20.post2.dev46+ge4048607a", None),
        ("1.0", None),
        ("0.1.7.post2.dev18", "needs amd-aiter >= 0.1.20, this is 0.1.7.post2.dev18"),
        ("unknown", "needs amd-aiter >= 0.1.20, this is unknown"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, gap: str | None) -> None:
    monkeypatch.setattr(aiter_package.metadata, "version", lambda name: version)
    monkeypatch.setattr(aiter_package.importlib.util, "find_spec", lambda name: name)
    assert aiter_package.find_gap.__wrapped__() == gap


def test_a_package_without_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_package.metadata, "version", lambda name: "0.1.20")
    monkeypatch.setattr(aiter_package.importlib.util, "find_spec", lambda name: None)
    assert "is not found" in str(aiter_package.find_gap.__wrapped__())


def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, specs: dict[str, KernelSpec]) -> None:
    """If AITER cannot be imported, its kernels are excluded with a warning, and the call falls back to other kernels."""
    (tmp_path / "aiter.py").write_text("raise ValueError('an argument that this Triton does not know')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(aiter_package, "find_gap", lambda: None)
    _forget_adapters()
    q = torch.zeros(4, 4, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    said = "aiter_mha_prefill_64 .* left out: .* aiter cannot be imported: ValueError: an argument"
    machine = replace(named_platform("gfx942"), features=frozenset(), pretended=False, emulated=True)
    with use_platform(machine), pytest.warns(KernelLoadWarning, match=said):
        out = tokenspeed_kernel.mha_prefill(q, q, q, offsets)
    assert torch.equal(out, q)


@pytest.mark.parametrize("name", _names())
def test_an_adapter_exists(specs: dict[str, KernelSpec], name: str) -> None:
    """The adapter has the operator's parameters. The test parses the adapter's source, because importing the adapter would import
    AITER."""
    module = KernelRegistry.get().module_of(name)
    path = Path(tokenspeed_kernel_amd.__path__[0]).parent / (module.replace(".", "/") + ".py")
    defined = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    mode = specs[name].mode
    parameters = [argument.arg for argument in defined[mode].args.args]
    assert parameters == list(inspect.signature(getattr(tokenspeed_kernel, mode)).parameters)[: len(parameters)]


# -- with the stand-in ---------------------------------------------------------------------------------------------------------


def _prefill(**options: Any) -> dict[str, Any]:
    return ragged([5, 70], 8, 2, **options)(Draw(torch.device("cpu"), 0))


def _decode(**options: Any) -> dict[str, Any]:
    return paged([5, 0, 300], None, 8, 2, page_size=128, **options)(Draw(torch.device("cpu"), 0))


@pytest.mark.usefixtures("aiter")
@pytest.mark.parametrize(
    ("operator", "arguments", "served"),
    [
        ("mha_prefill", _prefill(), "aiter_mha_prefill_64"),
        ("mha_prefill", _prefill(window_left=0, return_lse=True), "aiter_mha_prefill_64"),
        ("mha_prefill", _prefill(window_left=7, sinks=True), "aiter_mha_prefill_64_sinks"),
        ("mha_prefill", _prefill(return_lse=True, sinks=True), None),
        ("mha_prefill", _prefill(logit_cap=3.0), None),
        ("mha_prefill", _prefill(head_dim=128, return_lse=True), "aiter_mha_prefill_128"),
        ("mha_prefill", _prefill(head_dim=128, window_left=0), None),
        ("mha_prefill", _prefill(head_dim=128, sinks=True), None),
        ("mha_prefill", _prefill(head_dim=128, v_head_dim=64), None),
        ("mha_prefill", _prefill(dtype=torch.float32), None),
        ("mha_decode_with_kvcache", _decode(sinks=True, window_left=3), "aiter_mha_decode_with_kvcache_64"),
        ("mha_decode_with_kvcache", _decode(head_dim=128), "aiter_mha_decode_with_kvcache_128"),
        ("mha_decode_with_kvcache", _decode(return_lse=True), None),
        ("mha_decode_with_kvcache", _decode(logit_cap=3.0), None),
        ("mha_decode_with_kvcache", _decode(max_seqlen_q=2), None),
        ("mha_decode_with_kvcache", _decode(cache_dtype=torch.float8_e4m3fn), None),
    ],
)
def test_what_is_declared(specs: dict[str, KernelSpec], operator: str, arguments: dict[str, Any], served: str | None) -> None:
    op = get_operator(operator)
    taking = [name for name, spec in specs.items() if spec.mode == operator and refusal(op, spec, op.complete(arguments)) is None]
    assert taking == ([] if served is None else [served])


@pytest.mark.usefixtures("aiter")
def test_it_ranks_below_all_kernels_that_have_run(specs: dict[str, KernelSpec]) -> None:
    assert all(Priority.COMPOSED < spec.priority < Priority.PORTABLE for spec in specs.values())
    ranked = [spec.name for spec in KernelRegistry.get().get_for_operator("attention", "mha_prefill")]
    positions = [
        ranked.index(name) for name in ("gluon_mha_prefill", "triton_mha_prefill", "aiter_mha_prefill_64", "reference_mha_prefill")
    ]
    assert positions == sorted(positions)


ATTENTION = [name for name in _names() if "_mha_" in name]


@pytest.mark.usefixtures("aiter")
@pytest.mark.parametrize("name", ATTENTION)
def test_cases_of_the_operator(specs: dict[str, KernelSpec], name: str) -> None:
    """Runs the core's checks on the small declared cases: values, out=, unchanged arguments."""
    spec = specs[name]
    op = get_operator(spec.operator)
    results = [verify_case(spec, case, "cpu") for case in op.all_cases() if not case.large]
    assert_none_wrong(results)
    # No case has page size 128; the tests below use it.
    assert any(result.status is Status.PASSED for result in results) == name.startswith("aiter_mha_prefill")


@pytest.mark.usefixtures("aiter")
def test_prefill_of_wide_heads(specs: dict[str, KernelSpec]) -> None:
    spec = specs["aiter_mha_prefill_128"]
    for dtype in (torch.bfloat16, torch.float16):
        case = Case(str(dtype), ragged([1, 90, 0, 7], 8, 2, 128, dtype=dtype, softmax_scale=0.1, return_lse=True))
        assert verify_case(spec, case, "cpu").status is Status.PASSED


def _paged_cases(mode: str) -> list[Case]:
    """Returns cases like the operators' own cases, but with page sizes 128 and 256, which are rare in the operators' cases."""
    rows = {
        "mha_decode_with_kvcache": [([1, 127, 128, 129, 0, 300], None)],
        "mha_extend_with_kvcache": [([140, 20, 300, 128], [12, 20, 1, 0])],
        "mha_with_kvcache": [([1, 300, 200, 140], [1, 1, 200, 17]), ([4, 9], [0, 0])],
    }[mode]
    shapes: list[dict[str, Any]] = [
        {},
        {"window_left": 0},
        {"window_left": 63, "sinks": True, "dtype": torch.float16},
        {"page_size": 256, "softmax_scale": 0.3, "sinks": True},
        {"head_dim": 128, "window_left": 100, "sinks": True},
    ]
    fixed = {"is_causal": True} if mode == "mha_extend_with_kvcache" else {}
    return [
        Case(str(shape), paged(lens, new, 8, 2, stale=True, running_sums=bool(fixed), **{"page_size": 128, **shape, **fixed}))
        for lens, new in rows
        for shape in shapes
    ]


@pytest.mark.usefixtures("aiter")
@pytest.mark.parametrize("mode", ["mha_decode_with_kvcache", "mha_extend_with_kvcache", "mha_with_kvcache"])
def test_paged_attention(specs: dict[str, KernelSpec], mode: str) -> None:
    """Compares the kernels with the reference. Cache slots without a token hold NaN."""
    for case in _paged_cases(mode):
        results = [verify_case(spec, case, "cpu") for spec in specs.values() if spec.mode == mode]
        assert_none_wrong(results)
        assert sorted(result.status.value for result in results) == ["passed", "skipped"]
    assert set(_CALLS) == {"aiter.ops.triton.attention.unified_attention.unified_attention"}


@pytest.mark.usefixtures("aiter")
@pytest.mark.parametrize("mode", ["mha_extend_with_kvcache", "mha_with_kvcache"])
def test_no_more_new_tokens_are_announced_than_there_are(specs: dict[str, KernelSpec], mode: str) -> None:
    known = _paged_cases(mode)[0]
    case = dataclasses.replace(known, make=lambda draw: {**known.make(draw), "max_seqlen_q": 2**40})
    results = [verify_case(spec, case, "cpu") for spec in specs.values() if spec.mode == mode]
    assert_none_wrong(results)
    assert sorted(result.status.value for result in results) == ["passed", "skipped"]


@pytest.mark.usefixtures("aiter")
def test_the_stand_in_shows_why_small_pages_are_not_declared() -> None:
    from tokenspeed_kernel_amd.aiter.decode_device import mha_decode_with_kvcache

    arguments = paged([20], None, 8, 2, page_size=16, stale=True)(Draw(torch.device("cpu"), 0))
    assert mha_decode_with_kvcache(**arguments).isnan().any()


@pytest.mark.usefixtures("aiter")
def test_other_strides(specs: dict[str, KernelSpec]) -> None:
    """Results are correct if q and out are slices of wider tensors, the caches are views of one tensor, and the page table is
    column-major."""
    from tokenspeed_kernel_amd.aiter.decode_device import mha_decode_with_kvcache

    arguments = _decode()
    wanted = tokenspeed_kernel.mha_decode_with_kvcache(**arguments, solution="reference")
    arguments["k_cache"], arguments["v_cache"] = torch.stack([arguments["k_cache"], arguments["v_cache"]], 1).unbind(1)
    arguments["q"] = torch.cat([arguments["q"], arguments["q"]], 1)[:, 8:]
    arguments["page_table"] = arguments["page_table"].T.contiguous().T
    wide = torch.full((5, 8, 64), 7.0, dtype=torch.bfloat16)
    out = wide[1:4]
    assert mha_decode_with_kvcache(**arguments, out=out) is out
    torch.testing.assert_close(out, wanted, atol=1e-2, rtol=2e-2)
    assert (wide[[0, 4]] == 7).all()
    turned = torch.full((3, 64, 8), 7.0, dtype=torch.bfloat16).mT
    assert mha_decode_with_kvcache(**arguments, out=turned) is turned
    assert torch.equal(turned, out)


@pytest.mark.usefixtures("aiter")
def test_a_prefill_into_columns() -> None:
    from tokenspeed_kernel_amd.aiter.prefill_device import mha_prefill

    arguments = _prefill(return_lse=True)
    turned = torch.full((75, 64, 8), 7.0, dtype=torch.bfloat16).mT
    out, lse = mha_prefill(**arguments, out=turned)
    assert out is turned
    wanted = mha_prefill(**arguments)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
    assert lse.is_contiguous()


@pytest.mark.usefixtures("aiter")
def test_bounds_of_a_prefill_come_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is max_seqlen if given, otherwise the longest of the host's lengths if given, otherwise the number of all tokens,
    which no bound exceeds. The device's offsets are never read."""
    from tokenspeed_kernel_amd.aiter import prefill_device

    seen: list[int] = []
    monkeypatch.setattr(prefill_device, "_attend", lambda *args, **kwargs: seen.append(args[5]))
    arguments = _prefill()
    lengths = [0, 5, 75]
    on_host: list[dict[str, Any]] = [{"cu_seqlens_cpu": lengths}, {"cu_seqlens_cpu": torch.tensor(lengths)}]
    for hints in ({"max_seqlen": 71}, {"max_seqlen": 2**40}, *on_host, {}):
        prefill_device.mha_prefill(**arguments, **hints)
    assert seen == [71, 75, 70, 70, 75]


# -- AITER itself --------------------------------------------------------------------------------------------------------------


def need_the_real_one(device: torch.device) -> None:
    """Skips the test unless there is a gfx950 with AITER."""
    if device.type == "cpu":
        pytest.skip("needs a gfx950")
    gap = aiter_package.aiter_gap()
    if gap is not None:
        pytest.skip(gap)
    _forget_adapters()


@pytest.mark.parametrize("name", ATTENTION)
def test_on_the_device(gfx950: torch.device, specs: dict[str, KernelSpec], name: str) -> None:
    """Runs the cases with AITER itself on a gfx950. This test has not been run yet."""
    need_the_real_one(gfx950)
    spec = specs[name]
    own = [Case("ragged", ragged([1, 90, 0, 7], 8, 2, 128))] if spec.mode == "mha_prefill" else _paged_cases(spec.mode)
    results = [verify_case(spec, case, gfx950) for case in (*get_operator(spec.operator).all_cases(), *own)]
    assert_none_wrong(results)
    assert any(result.status is Status.PASSED for result in results)

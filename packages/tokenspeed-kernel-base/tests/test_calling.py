"""Tests guarantees of every operator call. Wrong arguments are rejected, whatever was called before. No input is overwritten before
it is read. No tensor is kept alive. Calls that need gradients are rejected."""

from __future__ import annotations

import gc
import inspect
import math
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base import calling, config, memo, memory
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import plain_function
from tokenspeed_kernel_base.ops.activation.swiglu import swiglu
from tokenspeed_kernel_base.ops.attention.mha_decode_with_kvcache import mha_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mha_prefill import mha_prefill
from tokenspeed_kernel_base.ops.gemm.mm import mm
from tokenspeed_kernel_base.ops.kvcache.store_kv_cache import store_kv_cache
from tokenspeed_kernel_base.ops.norm.qk_rmsnorm import qk_rmsnorm
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel, register_package
from tokenspeed_kernel_base.selection import NoKernelFoundError, explain_selection, kernel_override, select_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature

X, W = torch.randn(4, 8), torch.ones(8)


def decode_arguments(sequences: int = 3, pages: int = 4) -> dict[str, Any]:
    return {
        "q": torch.randn(sequences, 2, 8),
        "k_cache": torch.randn(pages * sequences, 4, 1, 8),
        "v_cache": torch.randn(pages * sequences, 4, 1, 8),
        "page_table": torch.arange(sequences * pages, dtype=torch.int32).view(sequences, pages),
        "cache_seqlens": torch.full((sequences,), 5, dtype=torch.int32),
        "max_seqlen_k": 8,
    }


# -- tensors that are not dense ----------------------------------------------------------------------------------------------------

UNUSUAL = {
    "sparse": lambda: torch.randn(4, 8).to_sparse(),
    "sparse_csr": lambda: torch.randn(4, 8).to_sparse_csr(),
    "mkldnn": lambda: torch.randn(4, 8).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4, 8), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR", "ignore:.*quantize")
@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL.keys())
@pytest.mark.parametrize("argument", ["x", "weight", "residual", "out"])
def test_a_tensor_that_is_not_dense_is_refused(make: Callable[[], Tensor], argument: str) -> None:
    """Asserts that the tensor is also rejected after correct calls. The fast path compares a call with remembered calls, and cannot
    read the strides of a nested tensor."""
    right: dict[str, Any] = {"x": X, "weight": W}
    if argument not in right:
        right[argument] = torch.randn(4, 8)
    for _ in range(2):
        rmsnorm(**right)
        with pytest.raises(TypeError, match=f"rmsnorm: {argument} .* dense storage .*, got a "):
            rmsnorm(**{**right, argument: make()})


# -- options -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [True, np.int64(3), np.bool_(True), 3.0])
def test_the_type_of_an_int_is_looked_at_whatever_was_called_before(wrong: Any) -> None:
    arguments = decode_arguments()
    for right in (1, 3):
        mha_decode_with_kvcache(**arguments, window_left=right)
    with pytest.raises(TypeError, match="window_left must be int, got"):
        mha_decode_with_kvcache(**arguments, window_left=wrong)


@pytest.mark.parametrize("wrong", [1, 1.0, np.bool_(True), np.int64(1)])
def test_the_type_of_a_flag_is_looked_at_whatever_was_called_before(wrong: Any) -> None:
    arguments = decode_arguments()
    mha_decode_with_kvcache(**arguments, return_lse=True)
    with pytest.raises(TypeError, match="return_lse must be bool, got"):
        mha_decode_with_kvcache(**arguments, return_lse=wrong)


@pytest.mark.parametrize("wrong", [True, np.float32(1.0), np.True_, "1"])
def test_the_type_of_a_float_is_looked_at_whatever_was_called_before(wrong: Any) -> None:
    for right in (1.0, 1):
        rmsnorm(X, W, right)
    with pytest.raises(TypeError, match="rmsnorm: eps must be float, got"):
        rmsnorm(X, W, wrong)


@pytest.mark.parametrize("huge", [10**400, -(10**400), 1e300])
def test_a_float_that_no_kernel_can_hold_is_refused(huge: float) -> None:
    with pytest.raises(ValueError, match=r"swiglu: limit .* float within ±3.4e\+38, got "):
        swiglu(torch.randn(3, 8), limit=huge)


@pytest.mark.parametrize("wrong", ["", "01", b"01", 3])
def test_a_hint_is_a_sequence_or_a_tensor(wrong: Any) -> None:
    q = torch.randn(2, 1, 8)
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"cu_seqlens_cpu .* sequence of int, .* None, got"):
        mha_prefill(q, q, q, cu_seqlens, cu_seqlens_cpu=wrong)


@pytest.mark.parametrize("wrong", [np.int64(5), 5.0, True, None])
def test_the_type_of_a_bound_is_looked_at(wrong: Any) -> None:
    arguments = decode_arguments()
    mha_decode_with_kvcache(**arguments)
    with pytest.raises(TypeError, match="max_seqlen_k must be int, got"):
        mha_decode_with_kvcache(**{**arguments, "max_seqlen_k": wrong})


def test_a_bound_that_grows_is_decided_once() -> None:
    arguments = decode_arguments()
    caller = mha_decode_with_kvcache.caller
    mha_decode_with_kvcache(**{**arguments, "max_seqlen_k": 7})
    before = len(caller._memo)
    for longest in range(5, 17):
        mha_decode_with_kvcache(**{**arguments, "max_seqlen_k": longest})
    assert len(caller._memo) == before
    for wrong, message in (
        (17, "at most 16, because page_table has 4 pages of 4 tokens for each sequence"),
        (-1, "at least 0"),
        (4, "at most max_seqlen_k = 4"),
    ):
        with pytest.raises(ValueError, match=message):
            mha_decode_with_kvcache(**{**arguments, "max_seqlen_k": wrong})


def test_a_bound_is_for_the_check_alone(declare: Callable[..., Any]) -> None:
    def bounded(x: Tensor, longest: int) -> Tensor:
        return x

    function = declare(bounded, formats=("x",), bounds=("longest",))
    with pytest.raises(TypeError, match=r"traits hook asks for longest, .* bound a size"):

        @function.traits
        def _(longest: int) -> dict[str, Any]:
            return {"longest": longest}


# -- memory that is written to -----------------------------------------------------------------------------------------------------


def _buffer() -> Tensor:
    return torch.randn(40, 8)


OVERLAPS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "rmsnorm, outputs": (
        lambda b: rmsnorm(b[:4], W, residual=b[4:8], out=b[8:12], residual_out=b[9:13]),
        "out must not overlap residual_out",
    ),
    "rmsnorm, shifted": (lambda b: rmsnorm(b[:4], W, out=b[1:5]), "out must not overlap x.*; it may only be x itself"),
    "mm": (lambda b: mm(b[:8], b[8:16], out=b[9:17]), "out must not overlap b"),
    "qk_rmsnorm": (
        lambda b: qk_rmsnorm(b[:4].view(4, 1, 8), b[4:8].view(4, 1, 8), W, W, q_out=b[6:10].view(4, 1, 8)),
        "q_out must not overlap k",
    ),
    "store_kv_cache": (
        lambda b: store_kv_cache(
            b[:4].view(4, 1, 8), b[4:8].view(4, 1, 8), b[:8].view(2, 4, 1, 8), b[16:24].view(2, 4, 1, 8), torch.arange(4)
        ),
        "k_cache must not overlap k",
    ),
    "mha_prefill": (
        lambda b: mha_prefill(*(b[4 * i : 4 * i + 4].view(4, 1, 8) for i in range(3)), _OFFSETS, out=b[2:6].view(4, 1, 8)),
        "out must not overlap q",
    ),
    "expanded": (lambda b: rmsnorm(b[:4], W, out=b[10:11].expand(4, 8)), "out must not have several elements at one address"),
}
_OFFSETS = torch.tensor([0, 4], dtype=torch.int32)


@pytest.mark.parametrize(("call", "message"), OVERLAPS.values(), ids=OVERLAPS.keys())
def test_memory_that_is_read_is_not_written_to(call: Callable[[Tensor], Any], message: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            call(_buffer())


def test_overlaps_are_found_after_right_calls() -> None:
    buffer = _buffer()
    before = buffer.clone()
    for _ in range(3):  # the first call takes the slow path; later calls hit the memo, then the comparison
        rmsnorm(buffer[:4], W, out=buffer[8:12])
    buffer.copy_(before)
    for start in (1, 3):
        with pytest.raises(ValueError, match="out must not overlap x"):
            rmsnorm(buffer[:4], W, out=buffer[start : start + 4])
    assert torch.equal(buffer, before)
    wanted = rmsnorm(buffer[:4], W)
    assert torch.equal(rmsnorm(buffer[:4], W, out=buffer[:4]), wanted)


def test_parts_of_one_projection_do_not_overlap() -> None:
    qkv = torch.randn(5, 4 + 2 + 2, 8)
    q, k, _ = qkv.split([4, 2, 2], dim=1)
    wanted = qk_rmsnorm(q.clone(), k.clone(), W, W)
    for _ in range(3):
        fresh = qkv.clone()
        q, k, _ = fresh.split([4, 2, 2], dim=1)
        got = qk_rmsnorm(q, k, W, W, q_out=q, k_out=k)
        assert all(map(torch.equal, got, wanted))


def test_tensors_are_checked_again_only_at_new_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    op, checked = qk_rmsnorm.operator, []
    check = op.check_overlaps

    def counted(arguments: dict[str, Any]) -> None:
        checked.append(arguments["q"])
        check(arguments)

    def run(q: Tensor, k: Tensor) -> None:
        qk_rmsnorm(q, k, W, W, q_out=q, k_out=k)

    monkeypatch.setattr(op, "check_overlaps", counted)
    monkeypatch.setattr(calling, "_MOST_ADDRESSES", 2)
    qk_rmsnorm.caller.forget()
    buffers = [torch.randn(5, 8, 8) for _ in range(4)]
    for qkv in buffers * 2:
        run(*qkv.split([4, 2, 2], dim=1)[:2])
    assert len(checked) == 1, "when the call was decided"
    for qkv in buffers:
        run(qkv[:, :4], qkv[:, 6:])
    assert len(checked) == 2, "the keys are at another distance from the queries"
    with pytest.raises(ValueError, match="must not overlap"):
        run(buffers[0][:, :4], buffers[0][:, 3:5])
    assert len(checked) == 3


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        (lambda b: b[:, :3], lambda b: b[:, 3:], False),
        (lambda b: b[:, :4], lambda b: b[:, 3:], True),
        (lambda b: b[:6, 2:], lambda b: b[5:, :2], False),
        (lambda b: b[:6, 2:], lambda b: b[5:, 1:3], True),
        (lambda b: b.t()[:2], lambda b: b[:, 2:], False),
        (lambda b: b[::2], lambda b: b[1::2], False),
        (lambda b: b[::2], lambda b: b[2:4], True),
        (lambda b: b[:, ::2], lambda b: b[:, 1::2], False),
        (lambda b: b[:0], lambda b: b, False),
        (lambda b: b[3], lambda b: b.view(torch.int16)[3, 5:7], True),
        (lambda b: b.as_strided((2, 2, 2), (1, 9, 24)), lambda b: b.as_strided((3,), (9,), 30), False),
        (lambda b: b.as_strided((2, 2, 2), (1, 9, 24)), lambda b: b.as_strided((3,), (8,), 17), True),
    ],
)
def test_overlap(one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], share: bool) -> None:
    buffer = torch.zeros(10, 6)
    first, second = one(buffer), other(buffer)
    expected = False
    marks = torch.zeros(10 * 6 * 4, dtype=torch.bool)
    for tensor in (first, second):  # compute the expected result byte by byte
        if not tensor.numel():
            continue
        places = torch.arange(0, 10 * 6 * 4, tensor.element_size()).as_strided(
            tensor.shape, tensor.stride(), (tensor.data_ptr() - buffer.data_ptr()) // tensor.element_size()
        )
        mine = torch.zeros_like(marks)
        for byte in range(tensor.element_size()):
            mine[places.reshape(-1) + byte] = True
        expected |= bool((mine & marks).any())
        marks |= mine
    assert expected == share
    assert memory.overlap(first, second) == memory.overlap(second, first) == share


# -- gradients ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["x", "weight", "residual"])
def test_operators_are_for_inference(argument: str) -> None:
    arguments: dict[str, Any] = {"x": X, "weight": W, "residual": X}
    graded = {**arguments, argument: arguments[argument].clone().requires_grad_()}
    compiled = torch.compile(lambda **a: rmsnorm(**a), backend="eager", fullgraph=True)
    for _ in range(2):
        rmsnorm(**arguments)
        with pytest.raises(RuntimeError, match=f"rmsnorm: {argument} requires a gradient"):
            rmsnorm(**graded)
        with pytest.raises(RuntimeError, match=f"{argument} requires a gradient, .* inference"):
            compiled(**graded)
    with torch.no_grad():
        assert not rmsnorm(**graded)[0].requires_grad
        assert torch.equal(compiled(**graded)[0], rmsnorm(**arguments)[0])
    with torch.inference_mode():
        rmsnorm(**graded)


# -- values in host memory ---------------------------------------------------------------------------------------------------------


def test_host_tensors_are_not_kept_alive() -> None:
    seen = []
    for sequences in (1, 2, 3, 2, 1):
        arguments = decode_arguments(sequences)
        mha_decode_with_kvcache(**arguments)
        seen += [weakref.ref(arguments["page_table"]), weakref.ref(arguments["cache_seqlens"])]
    del arguments
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)


# -- torch.compile -----------------------------------------------------------------------------------------------------------------


def test_a_boolean_output_survives_torch_compile(declare: Callable[..., Any]) -> None:
    def above(x: Tensor, limit: float = 0.0, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x > limit, x.clone()

    function = declare(above, formats=("x",))

    @function.fake
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x, dtype=torch.bool), torch.empty_like(x)

    compiled = torch.compile(lambda x: function(x, 0.5), backend="eager", fullgraph=True)
    for got, wanted in zip(compiled(X), (X > 0.5, X), strict=True):
        assert torch.equal(got, wanted)


# -- hooks -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["check", "traits", "fake", "cases", "cost", "formats", "work"])
def test_hooks_belong_to_the_declaration(hook: str) -> None:
    with pytest.raises(TypeError, match=f"norm.rmsnorm: its {hook} hook .*test_calling"):

        @getattr(rmsnorm, hook)  # type: ignore[misc, untyped-decorator, unused-ignore]
        def _() -> None: ...

    with pytest.raises(TypeError, match="its check_values hook is declared in"):
        rmsnorm.check_values(host=())
    with pytest.raises(ValueError, match="weight must be of shape"):
        rmsnorm(X, W[:3])


def test_a_hook_is_declared_once(declare: Callable[..., Any]) -> None:
    def twice(x: Tensor) -> Tensor:
        return x

    function = declare(twice, formats=("x",))

    @function.check
    def _(check: Checker, x: Tensor) -> None: ...

    with pytest.raises(TypeError, match="its check hook is declared twice"):

        @function.check
        def _(check: Checker) -> None: ...


# -- errors travel -----------------------------------------------------------------------------------------------------------------


def test_explanations_and_their_errors_can_be_pickled() -> None:
    explanation = rmsnorm.explain(X, W)
    assert str(pickle.loads(pickle.dumps(explanation))) == str(explanation)
    with pytest.raises(NoKernelFoundError) as caught:
        rmsnorm(X, W, solution="nobody")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert str(copy.explanation) == str(caught.value.explanation)


# -- functions of one package ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lonely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Writes a package with one kernel of mm, and yields the package's name."""
    folder = tmp_path / "lonely_kernels" / "cpu"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "mm.py").write_text(
        "import torch\n"
        "from tokenspeed_kernel_base.registry import register_kernel\n"
        "from tokenspeed_kernel_base.signature import format_signatures\n\n"
        "@register_kernel('gemm', 'mm', name='lonely_mm', solution='lonely', priority=19,\n"
        "                 signatures=format_signatures(('a', 'b'), 'dense', {torch.float32}), traits={'bias': {False}})\n"
        "def mm(a, b, a_scale, b_scale, bias, out_dtype, alpha, out):\n"
        "    return a @ b + 100\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "lonely_kernels"
    for name in [name for name in sys.modules if name.startswith("lonely_kernels")]:
        del sys.modules[name]


def test_a_function_of_a_package_uses_its_own_kernels_only(lonely: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    function = plain_function(mm, lonely)
    assert torch.equal(function(a, b), a @ b + 100)
    assert torch.equal(mm(a, b), a @ b), "who else sees its kernels is for plugins to say"
    assert [verdict.spec.name for verdict in function.explain(a, b).verdicts] == ["lonely_mm"]
    assert (function.__doc__, inspect.signature(function)) == (mm.__doc__, inspect.signature(mm))
    with pytest.raises(NoKernelFoundError, match=r"x lonely_mm +formats: "):
        function(a.double(), b.double())
    with pytest.raises(ValueError, match=r"^mm: "):
        function(a, b[:3])
    with kernel_override("gemm", "mm", "reference_mm"):
        assert torch.equal(function(a, b), a @ b + 100), "what others want of all callers is not asked of it"
    compiled = torch.compile(lambda a, b: function(a, b), backend="eager", fullgraph=True)
    assert torch.equal(compiled(a, b), a @ b + 100)

    def said(kernel: str) -> list[str]:
        memo.invalidate()
        with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as caught:
            patched.setattr(config, "_settings", config.Settings(env_overrides={"GEMM_MM": kernel}))
            warnings.simplefilter("default")
            for rows in (3, 2, 1):
                assert torch.equal(function(a[:rows], b), a[:rows] @ b + 100)
        return [str(warning.message) for warning in caught]

    assert said("reference_mm") == [], "another package's kernel serves other callers"
    assert said("lonely_nm") == [
        f"TOKENSPEED_KERNEL_OVERRIDE_GEMM_MM is ignored by {lonely}.mm: no kernel named lonely_nm; did you mean lonely_mm?"
    ]

    memo.invalidate()
    assert [spec.name for spec in register_package(lonely)] == ["lonely_mm"]
    assert torch.equal(mm(a, b), a @ b + 100)


def test_infinite_options_are_left_to_the_operator() -> None:
    with pytest.raises(ValueError, match="softmax_scale must be positive and finite"):
        mha_prefill(*(torch.randn(2, 1, 8),) * 3, torch.tensor([0, 2], dtype=torch.int32), softmax_scale=math.inf)


def test_a_kernel_that_is_eligible_only_by_name(registry: KernelRegistry) -> None:
    for name, priority, reason in (("quick", 16, "slots that hold no token must be finite"), ("plain", 4, "")):
        register_kernel("norm", "x", name=name, solution="x", signatures=None, priority=priority, only_by_name=reason)(lambda: None)
    wanted = format_signature(x=dense_tensor_format(torch.float32))
    assert select_kernel("norm", "x", wanted).name == "plain"
    said = explain_selection("norm", "x", wanted)
    assert " x quick  name: is eligible only for calls that name it: slots that hold no token must be finite" in said
    assert select_kernel("norm", "x", wanted, override="quick").name == "quick"

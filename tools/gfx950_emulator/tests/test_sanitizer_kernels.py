"""Tests kernels with seeded faults: each fault is reported with its kind, the instruction and the line of the kernel's source.

Every kernel also runs without its fault. Without its fault, the kernel causes no report and gives the correct result. So only the
fault can cause the report.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton

from gfx950_emulator import SanitizerError, emulated_gfx950

from .kernels import faulty_triton

GLUON = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)
if GLUON:
    from .kernels import faulty_gluon

needs_gluon = pytest.mark.skipif(
    not GLUON, reason=f"Gluon for gfx950 as used here came with triton 3.9; this is {triton.__version__}"
)
Edit = Callable[[str, str], str]


def _line_at_fault(kernel: triton.JITFunction) -> tuple[str, int]:
    lines, first = inspect.getsourcelines(kernel.fn)
    marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# BUG")]
    assert len(marked) == 1, f"{kernel.__name__} has {len(marked)} marked lines"
    return Path(inspect.getsourcefile(kernel.fn)).name, marked[0]


def _assert_reported(report: SanitizerError, kind: str, kernel: triton.JITFunction, mnemonic: str) -> None:
    """Asserts that the report has this kind, refers to the marked line, and names kernel, instruction and line."""
    assert report.kind == kind, str(report)
    name, line = _line_at_fault(kernel)
    assert report.source is not None, str(report)
    assert (Path(report.source[0]).name, report.source[1]) == (name, line), str(report)
    text = str(report)
    assert kernel.__name__ in text
    assert f"{name}:{line}" in text
    assert re.search(mnemonic, text), text


def _without(pattern: str, occurrence: int = 0) -> Edit:
    """Returns an edit that removes one matching line of the code (the last matching line if `occurrence` is -1)."""

    def edit(kernel: str, text: str) -> str:
        lines = text.splitlines(keepends=True)
        matching = [i for i, line in enumerate(lines) if re.search(pattern, line)]
        assert matching, f"the code of {kernel} has no line like {pattern}"
        del lines[matching[occurrence]]
        return "".join(lines)

    return edit


def _without_wait(counter: str, after: str) -> Edit:
    """Returns an edit that removes a counter from an s_waitcnt: the first one with this counter after a line that matches
    `after`."""

    def edit(kernel: str, text: str) -> str:
        lines = text.splitlines(keepends=True)
        start = next(i for i, line in enumerate(lines) if re.search(after, line))
        at = next(i for i in range(start, len(lines)) if "s_waitcnt" in lines[i] and counter in lines[i])
        lines[at] = re.sub(rf"{counter}\(\d+\)", "", lines[at])
        if not re.search(r"cnt\(", lines[at]):
            del lines[at]
        return "".join(lines)

    return edit


def _replaced(pattern: str, replacement: str) -> Edit:
    """Returns an edit that replaces the first match of a pattern."""

    def edit(kernel: str, text: str) -> str:
        changed, count = re.subn(pattern, replacement, text, count=1, flags=re.MULTILINE)
        assert count == 1, f"the code of {kernel} has nothing like {pattern}"
        return changed

    return edit


# Accesses outside of the tensors.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("kernel", ["reads_too_far", "writes_too_far"])
@pytest.mark.parametrize("n", [250, 256, 511])
def test_one_element_past_a_tensor(kernel: str, dtype: torch.dtype, n: int) -> None:
    function = getattr(faulty_triton, kernel)
    x = torch.arange(n).to(dtype)
    out = torch.zeros(n, dtype=dtype)
    with emulated_gfx950():
        function[(2,)](x, out, n, 0, 256)
        assert torch.equal(out, x)
        with pytest.raises(SanitizerError) as caught:
            function[(2,)](x, out, n, 1, 256)
    _assert_reported(caught.value, "out-of-bounds", function, r"_load_|_store_")


@pytest.mark.parametrize("sanitize", [True, False])
def test_bounds_of_the_storage(sanitize: bool) -> None:
    """The kernel reads padding that its caller sliced off. This is an error, unless ``bounds="storage"`` permits it."""
    memory, out = torch.randn(256), torch.zeros(30)
    x = memory[100:130]
    with emulated_gfx950(sanitize=sanitize), pytest.raises(SanitizerError, match="is 0 bytes past the end"):
        faulty_triton.reads_too_far[(1,)](x, out, 30, 1, 256)
    with emulated_gfx950(sanitize=sanitize, bounds="storage"):
        faulty_triton.reads_too_far[(1,)](x, out, 30, 1, 256)
        assert torch.equal(out, x)
        faulty_triton.reads_too_far[(1,)](x, out, 30, 126, 256)
        with pytest.raises(SanitizerError, match="past the end of argument x_ptr of 1024 bytes"):
            faulty_triton.reads_too_far[(1,)](x, out, 30, 127, 256)


def test_bounds_are_of_the_view_or_the_storage() -> None:
    with pytest.raises(ValueError, match="bounds must be one of view, storage, got 'tensor'"), emulated_gfx950(bounds="tensor"):
        pass


@pytest.mark.parametrize("num_warps", [1, 4])
def test_elements_before_a_tensor(num_warps: int) -> None:
    x, out = torch.arange(200.0), torch.full((200,), 7.0)
    with emulated_gfx950():
        faulty_triton.reads_before[(1,)](x, out, 200, 0, 256, num_warps=num_warps)
        assert (out == 0).all()
        with pytest.raises(SanitizerError) as caught:
            faulty_triton.reads_before[(1,)](x, out, 200, 1, 256, num_warps=num_warps)
    _assert_reported(caught.value, "out-of-bounds", faulty_triton.reads_before, r"_load_dword")


@pytest.mark.parametrize("bad", [100, -1, 10**8])
def test_one_lane_with_a_wrong_index(bad: int) -> None:
    x, out = torch.randn(100), torch.zeros(128)
    index = torch.arange(128, dtype=torch.int32) % 100
    with emulated_gfx950():
        faulty_triton.follows_indices[(1,)](x, index, out, 128, num_warps=2)
        assert torch.equal(out, x[index.long()])
        index[77] = bad
        with pytest.raises(SanitizerError) as caught:
            faulty_triton.follows_indices[(1,)](x, index, out, 128, num_warps=2)
    _assert_reported(caught.value, "out-of-bounds", faulty_triton.follows_indices, r"_load_dword")


def test_atomic_outside_of_a_tensor() -> None:
    out = torch.zeros(50, dtype=torch.int32)
    index = torch.arange(64, dtype=torch.int32) % 50
    with emulated_gfx950():
        faulty_triton.adds_to_indices[(1,)](index, out, 64, num_warps=1)
        assert out.sum() == 64
        index[9] = 50
        with pytest.raises(SanitizerError) as caught:
            faulty_triton.adds_to_indices[(1,)](index, out, 64, num_warps=1)
    _assert_reported(caught.value, "out-of-bounds", faulty_triton.adds_to_indices, r"_atomic_add")


@needs_gluon
def test_read_past_the_lds_of_a_workgroup() -> None:
    x, out = torch.randn(1024), torch.zeros(512)
    with emulated_gfx950():
        faulty_gluon.reads_half[(1,)](x, out, 1024)
    assert torch.equal(out, x[:512])
    with (
        emulated_gfx950(edit=_replaced(r"^(\tds_read_b128 [^\n;]*?)( offset:\d+)?$", r"\1 offset:65520")),
        pytest.raises(SanitizerError) as caught,
    ):
        faulty_gluon.reads_half[(1,)](x, out, 1024)
    _assert_reported(caught.value, "out-of-bounds", faulty_gluon.reads_half, "ds_read_b128")


# Missing waits.


@pytest.mark.parametrize("load", [0, 1])
def test_result_of_a_load_that_was_not_waited_for(load: int) -> None:
    kernel = faulty_triton.uses_what_it_loads
    x, y, out = torch.randn(256), torch.randn(256), torch.zeros(256)
    with emulated_gfx950():
        kernel[(1,)](x, y, out, 256)
    torch.testing.assert_close(out, x * 3 + y, rtol=1e-6, atol=1e-6)
    loads = r"^\t(buffer|global)_load_dword"
    edits = [_without_wait("vmcnt", loads), _replaced(r"vmcnt\(0\)", "vmcnt(1)")]
    with emulated_gfx950(edit=edits[load]), pytest.raises(SanitizerError) as caught:
        kernel[(1,)](x, y, out, 256)
    _assert_reported(caught.value, "wait", kernel, r"v_\w+")


@needs_gluon
def test_result_of_a_read_from_lds_that_was_not_waited_for() -> None:
    kernel = faulty_gluon.scales_what_it_reads
    x, out = torch.randn(1024), torch.zeros(1024)
    with emulated_gfx950():
        kernel[(1,)](x, out, 1024)
    assert torch.equal(out, x * 3)
    with emulated_gfx950(edit=_without_wait("lgkmcnt", r"^\tds_read")), pytest.raises(SanitizerError) as caught:
        kernel[(1,)](x, out, 1024)
    _assert_reported(caught.value, "wait", kernel, r"v_\w+")


@needs_gluon
def test_direct_loads_with_one_group_too_many_outstanding() -> None:
    kernel = faulty_gluon.copies_in_groups
    x, out = torch.randn(4 * 1024), torch.zeros(4 * 1024)
    with emulated_gfx950():
        kernel[(1,)](x, out, 4, 1, 1024)
        assert torch.equal(out, x)
        with pytest.raises(SanitizerError) as caught:
            kernel[(1,)](x, out, 4, 2, 1024)
    _assert_reported(caught.value, "wait", kernel, "ds_read")


@needs_gluon
def test_direct_load_that_was_not_waited_for() -> None:
    kernel = faulty_gluon.copies_without_waiting
    x, out = torch.randn(1024), torch.zeros(1024)
    with emulated_gfx950():
        kernel[(1,)](x, out, True, 1024)
        assert torch.equal(out, x)
    with emulated_gfx950(edit=_without_wait("vmcnt", "global_load_lds")), pytest.raises(SanitizerError) as caught:
        kernel[(1,)](x, out, True, 1024)
    _assert_reported(caught.value, "wait", kernel, "ds_read")


# Races between waves.


@needs_gluon
def test_missing_barrier_between_write_and_read() -> None:
    kernel = faulty_gluon.exchanges
    x, out = torch.randn(1024), torch.zeros(1024)
    with emulated_gfx950():
        kernel[(2,)](x, out, 1024)
    assert torch.equal(out, x)
    with emulated_gfx950(edit=_without(r"^\ts_barrier")), pytest.raises(SanitizerError) as caught:
        kernel[(2,)](x, out, 1024)
    _assert_reported(caught.value, "race", kernel, "ds_read")


@needs_gluon
def test_missing_barrier_between_read_and_write() -> None:
    kernel = faulty_gluon.exchanges_twice
    x, out = torch.randn(1024), torch.zeros(2048)
    with emulated_gfx950():
        kernel[(1,)](x, out, 1024)
    assert torch.equal(out, torch.cat((x, x * 2)))
    with emulated_gfx950(edit=_without(r"^\ts_barrier", 1)), pytest.raises(SanitizerError) as caught:
        kernel[(1,)](x, out, 1024)
    _assert_reported(caught.value, "race", kernel, "ds_write")


# Uninitialised data.


@needs_gluon
def test_lds_that_nobody_wrote() -> None:
    kernel = faulty_gluon.reads_what_nobody_wrote
    x, out = torch.randn(1024), torch.zeros(1024)
    with emulated_gfx950():
        kernel[(1,)](x, out, 1024, 1024)
        assert torch.equal(out, x)
        with pytest.raises(SanitizerError) as caught:
            kernel[(1,)](x, out, 512, 1024)
    _assert_reported(caught.value, "uninitialised", kernel, "_store_|ds_read")


@needs_gluon
def test_branch_on_lds_that_nobody_wrote() -> None:
    kernel = faulty_gluon.branches_on_what_nobody_wrote
    out = torch.zeros(1, dtype=torch.int32)
    with emulated_gfx950():
        kernel[(1,)](out, True, num_warps=1)
        assert out.item() == 1
        with pytest.raises(SanitizerError) as caught:
            kernel[(1,)](out, False, num_warps=1)
    assert caught.value.kind == "uninitialised"
    assert "branches_on_what_nobody_wrote" in str(caught.value)


def test_register_that_nobody_wrote() -> None:
    kernel = faulty_triton.uses_what_it_loads
    x, y, out = torch.randn(256), torch.randn(256), torch.zeros(256)
    edit = _without(r"^\t(buffer|global)_load_dword")
    with emulated_gfx950(edit=edit), pytest.raises(SanitizerError) as caught:
        kernel[(1,)](x, y, out, 256)
    _assert_reported(caught.value, "uninitialised", kernel, "_store_|v_")


# Alignment, barriers, deadlocks.


@needs_gluon
@pytest.mark.parametrize(("mnemonic", "offset"), [("ds_read_b128", 4), ("ds_read_b128", 8)])
def test_misaligned_access_of_16_bytes(mnemonic: str, offset: int) -> None:
    kernel = faulty_gluon.reads_half
    x, out = torch.randn(1024), torch.zeros(512)
    edit = _replaced(rf"^(\t{mnemonic} [^\n;]*?)( offset:\d+)?$", rf"\1 offset:{offset}")
    with emulated_gfx950(edit=edit), pytest.raises(SanitizerError) as caught:
        kernel[(1,)](x, out, 1024)
    _assert_reported(caught.value, "misaligned", kernel, mnemonic)


@needs_gluon
def test_barrier_that_one_wave_passes_by() -> None:
    kernel = faulty_gluon.meets_once
    x, out = torch.randn(256), torch.zeros(256)
    with emulated_gfx950():
        kernel[(1,)](x, out, 256)
    assert torch.equal(out, x + 1)

    def edit(name: str, text: str) -> str:
        text = _replaced(r"^(meets_once:.*\n)", r"\1\tv_readfirstlane_b32 s90, v0\n")(name, text)
        skip = r"\ts_cmp_eq_u32 s90, 64\n\ts_cbranch_scc1 .Lpassed_by\n\1\n.Lpassed_by:"
        return _replaced(r"^(\ts_barrier)$", skip)(name, text)

    with emulated_gfx950(edit=edit), pytest.raises(SanitizerError) as caught:
        kernel[(1,)](x, out, 256)
    _assert_reported(caught.value, "barrier-divergence", kernel, "s_barrier")


@pytest.mark.parametrize("kernel", ["waits_for_nobody", "polls_for_nobody"])
@pytest.mark.parametrize("programs", [1, 3])
def test_flag_that_nobody_sets(kernel: str, programs: int) -> None:
    function = getattr(faulty_triton, kernel)
    flag, out = torch.ones(1, dtype=torch.int32), torch.full((programs,), -1, dtype=torch.int32)
    with emulated_gfx950():
        function[(programs,)](flag, out, num_warps=1)
        assert out.tolist() == list(range(programs))
        flag.zero_()
        with pytest.raises(SanitizerError) as caught:
            function[(programs,)](flag, out, num_warps=1)
    assert caught.value.kind == "deadlock"
    assert caught.value.source is not None
    assert (Path(caught.value.source[0]).name, caught.value.source[1]) == _line_at_fault(function), str(caught.value)


def test_lock_that_is_not_given_back() -> None:
    kernel = faulty_triton.keeps_the_lock
    lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with emulated_gfx950():
        kernel[(1,)](lock, count, num_warps=1)
        assert count.item() == 1
        lock.zero_()
        with pytest.raises(SanitizerError) as caught:
            kernel[(3,)](lock, count, num_warps=1)
    assert caught.value.kind == "deadlock"
    assert caught.value.source is not None
    assert (Path(caught.value.source[0]).name, caught.value.source[1]) == _line_at_fault(kernel), str(caught.value)

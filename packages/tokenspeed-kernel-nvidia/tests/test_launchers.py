"""Tests properties that all launchers share, without a GPU. Launches are recorded instead of run.

The recorded programs reject the same arguments as compiled programs.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base import alignment
from tokenspeed_kernel_nvidia import _programs
from tokenspeed_kernel_nvidia.cutedsl.launch import CACHES, DTYPES, launched
from tokenspeed_kernel_nvidia.sm90.attention.decode import config as decode_config
from tokenspeed_kernel_nvidia.sm90.attention.decode import launch as decode
from tokenspeed_kernel_nvidia.sm90.attention.prefill import config as prefill_config
from tokenspeed_kernel_nvidia.sm90.attention.prefill import launch as prefill
from tokenspeed_kernel_nvidia.sm90.attention.supported import GQA_RATIOS, HEAD_DIMS, PAGE_SIZES
from tokenspeed_kernel_nvidia.sm90.attention.window import launch as window
from tokenspeed_kernel_nvidia.sm90.common.registers import left_by

from .launched import as_operator

MODULES = (decode, prefill, window)


def _forget() -> None:
    for module in MODULES:
        for value in vars(module).values():
            if hasattr(value, "cache_clear") and getattr(value, "__module__", None) == module.__name__:
                value.cache_clear()


def _refuse(handed: tuple[Any, ...]) -> None:
    """Raises ValueError for the same arguments as compiled programs: tensors that bulk copies cannot read or write, and lengths
    that are not contiguous."""
    for tensor in handed:
        if isinstance(tensor, Tensor) and tensor.ndim != 2:  # a decode's page table may have any strides
            step = 8 if tensor.dtype in DTYPES else 1
            *outer, last = tensor.stride()
            if tensor.data_ptr() % (2 * step) or last != 1 or any(stride % step for stride in outer):
                raise ValueError("refused")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, Any, tuple[Any, ...]]]]:
    """Records the programs, configurations and arguments of launches."""
    found: list[tuple[Any, Any, tuple[Any, ...]]] = []

    def record(program: Any, config: Any) -> Any:
        def launch(*arguments: Any) -> None:
            _refuse(arguments)
            found.append((program, config, arguments))

        return launch

    _forget()
    monkeypatch.setattr(_programs.Program, "__call__", record)
    for module in MODULES:
        monkeypatch.setattr(module, "sm_count_of", lambda device: 132)
        if module is not window:
            monkeypatch.setattr(module, "keeper", SimpleNamespace(get=lambda *_: SimpleNamespace(memory_at=0, counters_at=0)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    yield found
    _forget()


def _calls(heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields calls of every launcher, for short and for long sequences."""
    offsets, lengths = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([30, 4], dtype=torch.int32)
    q = torch.zeros(4, heads, head_dim, dtype=dtype)
    k, v = torch.zeros(2, 4, kv_heads, head_dim, dtype=dtype)
    for windowed in (False, True):
        module, left = (window, 127) if windowed else (prefill, -1)
        yield as_operator(module.mha_prefill), {"q": q, "k": k, "v": v, "cu_seqlens": offsets, "window_left": left}
        for most in (64, 8192):  # upper bounds of the lengths of short and of long sequences
            cache = torch.zeros(4, page_size, kv_heads, head_dim, dtype=dtype)
            table = torch.zeros(2, -(-most // page_size), dtype=torch.int32)
            paged = {"k_cache": cache, "v_cache": cache.clone(), "page_table": table, "cache_seqlens": lengths, "window_left": left}
            new = {"cu_seqlens_q": offsets, "cu_seqlens_kv": None, "max_seqlen_q": most, "is_causal": True}
            yield as_operator(module.mha_extend_with_kvcache), {"q": q, **paged, **new, "max_seqlen_k": most}
            for count in {1, 2, max(decode.ROWS) // (heads // kv_heads)}:
                rows = torch.zeros(2 * count, heads, head_dim, dtype=dtype)
                yield as_operator(decode.mha_decode_with_kvcache), {"q": rows, **paged, "max_seqlen_k": most, "max_seqlen_q": count}


OTHERS = [*itertools.product((1, 8, 16), decode_config.WIDTHS, (1, 16), DTYPES)]
SHAPES = [*itertools.product(GQA_RATIOS, HEAD_DIMS, PAGE_SIZES, DTYPES)]


def test_programs_that_launchers_use_are_compiled_ahead_of_time(asked: list[tuple[Any, Any, tuple[Any, ...]]]) -> None:
    for (ratio, head_dim, page_size, dtype), kv_heads in itertools.product(SHAPES, (1, 8)):
        for launcher, arguments in _calls(ratio * kv_heads, kv_heads, head_dim, page_size, dtype):
            for sinks in (None, torch.bfloat16, torch.float64):
                given = None if sinks is None else torch.zeros(ratio * kv_heads, dtype=sinks)
                launcher(**arguments, sinks=given)
    for (ratio, (head_dim, v_head_dim), page_size, dtype), kv_heads in itertools.product(OTHERS, (1, 8)):
        heads = ratio * kv_heads
        for cache_dtype, logit_cap, most in itertools.product((dtype, torch.float8_e4m3fn), (0.0, 30.0), (64, 8192)):
            caches = (torch.zeros(4, page_size, kv_heads, width, dtype=cache_dtype) for width in (head_dim, v_head_dim))
            paging = torch.zeros(2, most // page_size, dtype=torch.int32), torch.tensor([30, 4], dtype=torch.int32), most
            q = torch.zeros(2, heads, head_dim, dtype=dtype)
            out = as_operator(decode.mha_decode_with_kvcache)(q, *caches, *paging, logit_cap=logit_cap)
            assert isinstance(out, Tensor)
            assert out.shape == (2, heads, v_head_dim)
    programs = {program.name: program for program, _, _ in asked}
    listed = {name: set(program.configs()) for name, program in programs.items()}
    missing = {f"{program.name} {config}" for program, config, _ in asked if config not in listed[program.name]}
    assert missing == set()
    assert len(listed) == len(MODULES)


def test_freed_pages_are_left_to_the_device(asked: list[tuple[Any, Any, tuple[Any, ...]]]) -> None:
    """Asserts that the launcher passes a page table with -1 to the kernel unchanged. The kernel knows the lengths, and does not
    read freed pages."""
    for launcher, arguments in _calls(16, 2, 64, 64, torch.bfloat16):
        if "page_table" in arguments:
            table = arguments["page_table"].fill_(-1)
            launcher(**arguments)
            handed = [given for given in asked[-1][2] if isinstance(given, Tensor) and given.data_ptr() == table.data_ptr()]
            assert [given.tolist() for given in handed] == [table.tolist()]
            assert (table == -1).all()


def _apart(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def _shifted(tensor: Tensor) -> Tensor:
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return flat[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("layout", [_apart, _shifted], ids=["elements apart", "between multiples of 16 bytes"])
def test_other_layouts_are_copied(asked: list[tuple[Any, Any, tuple[Any, ...]]], layout: Any) -> None:
    """Asserts that for every layout of the caller's tensors, programs receive aligned rows, and ``out`` is returned."""
    for launcher, arguments in _calls(16, 2, 64, 16, torch.bfloat16):
        given = {name: layout(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}
        out = layout(torch.zeros_like(arguments["q"]))
        got, lse = launcher(**given, sinks=layout(torch.zeros(16)), out=out, return_lse=True)
        assert got is out
        assert lse.is_contiguous()
        _, _, handed = asked.pop()
        assert any(isinstance(tensor, Tensor) and tensor.dtype == torch.bfloat16 for tensor in handed)


def test_copying_a_cache_warns_once(asked: list[tuple[Any, Any, tuple[Any, ...]]]) -> None:
    alignment._warn_of_copies.cache_clear()
    said = []
    for launcher, arguments in _calls(16, 2, 64, 16, torch.bfloat16):
        for name in CACHES if "k_cache" in arguments else ():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                launcher(**{**arguments, name: _shifted(arguments[name])})
            said += [str(each.message).split()[0] for each in caught if each.category is alignment.CacheCopyWarning]
    assert said == list(CACHES)


def test_a_refusal_that_no_copy_helps_is_raised() -> None:
    """Asserts that the launcher does not call a program again with copies if the program rejects tensors that bulk copies can
    read."""
    asked = []

    def refuse(*given: Any) -> None:
        asked.append(given)
        raise ValueError("too many heads")

    q, cache, lengths = torch.zeros(2, 4, 64).half(), torch.zeros(3, 16, 2, 64).half(), torch.tensor([3, 4])
    with pytest.raises(ValueError, match="too many heads"):
        launched(refuse, q, cache, cache, None, (lengths, None), (1.0,))
    assert len(asked) == 1
    with pytest.raises(ValueError, match="too many heads"):
        launched(refuse, q, _shifted(cache), cache, None, (lengths, None), (1.0,))
    assert len(asked) == 3
    assert all(alignment.is_aligned(tensor) for tensor in asked[-1][:4])


def test_registers_that_a_warpgroup_is_left() -> None:
    assert left_by(512, 3, 160) == 32
    assert left_by(384, 2, 232) == 40
    assert left_by(384, 2, 224) == 56  # not 64: a launch of 384 threads gets 3 x 168 = 504 registers, not 512
    assert all(config.producer_registers >= 24 for config in prefill_config.every_config())  # setmaxnreg's minimum

"""Tests that the programs listed for ahead-of-time compilation are exactly those that attention launchers use for all declared
calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any, get_args

import pytest
import torch

from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec, Priority
from tokenspeed_kernel_nvidia.sm90.attention.decode import launch as decode
from tokenspeed_kernel_nvidia.sm90.attention.decode.config import WIDTHS, Work
from tokenspeed_kernel_nvidia.sm90.attention.prefill import launch as prefill
from tokenspeed_kernel_nvidia.sm90.attention.supported import GQA_RATIOS, PAGE_SIZES

PREFILLS = {"mha_prefill", "mha_extend_with_kvcache", "mla_prefill"}


def admits(spec: KernelSpec, **stated: Any) -> bool:
    """Returns whether a kernel's declaration supports a request with these traits. A flag that the declaration does not name is
    unsupported."""
    constraints = ((spec.traits.get(name), value) for name, value in stated.items())
    return all(value is not True if known is None else known.accepts(value) for known, value in constraints)


def dtypes(spec: KernelSpec, *roles: str) -> Iterator[tuple[torch.dtype, ...]]:
    """Yields the supported combinations of dtypes of the operands in these roles."""
    for signature in spec.format_signatures or ():
        yield tuple(signature.format_for(role).storage_dtype for role in roles)


def decodes(spec: KernelSpec) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of `decode._program_of` for all calls that a kernel supports."""
    for (k_dim, v_dim), page_size, ratio, new, capped in itertools.product(
        WIDTHS, (1, *PAGE_SIZES), range(1, 17), (1, 2, 3, 4, 8, 16, 32, 64), (False, True)
    ):
        traits = {"head_dim": k_dim, "v_head_dim": v_dim, "page_size": page_size, "gqa_ratio": ratio, "logit_cap": capped}
        several = {"multi_query": True, "new_tokens": new} if new > 1 else {}
        if not admits(spec, **traits, **several):
            continue
        for (q, cache), work, (kv_heads, close) in itertools.product(
            dtypes(spec, "q", "k_cache"), get_args(Work), ((4, False), (4, True), (3, True))
        ):
            if work != "many short" or kv_heads % 4 == 0:
                yield q, cache, (k_dim, v_dim), page_size, ratio * kv_heads, kv_heads, new, work, capped, close and q != cache, 0


def prefills(spec: KernelSpec) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of `prefill._program_of` for all calls that a kernel supports."""
    paged, expanded = spec.mode == "mha_extend_with_kvcache", spec.mode == "mla_prefill"
    for (k_dim, v_dim), page_size, ratio, capped, windowed, own_kv in itertools.product(
        WIDTHS, PAGE_SIZES if paged else (0,), GQA_RATIOS, (False, True), (False, True), (False, True) if expanded else (False,)
    ):
        traits = {"head_dim": k_dim, "v_head_dim": v_dim, "gqa_ratio": ratio, "logit_cap": capped, "sliding_window": windowed}
        traits |= {"page_size": page_size} if paged else {}
        if admits(spec, **traits, **({"own_kv_lengths": own_kv} if expanded else {})):
            for q, cache in dtypes(spec, "q", "k_cache" if paged else "k"):
                yield q, cache, k_dim, ratio, 1, page_size, windowed, 0, v_dim, capped, own_kv


def asked_of(module: ModuleType, name: str, calls: Any, specs: list[KernelSpec], monkeypatch: pytest.MonkeyPatch) -> dict[Any, int]:
    """Returns the configurations that a launcher's module uses, each with the highest priority of the kernels that use it."""
    found: dict[Any, int] = {}
    monkeypatch.setattr(module, "sm_count_of", lambda device: 132)
    asked: list[Any] = []
    monkeypatch.setattr(module, name, asked.append)
    program_of = functools.cache(module._program_of.__wrapped__)
    for spec in sorted(specs, key=lambda spec: spec.priority):
        for arguments in calls(spec):
            program_of(*arguments)
        found |= dict.fromkeys(asked, spec.priority)
        asked.clear()
        program_of.cache_clear()
    return found


def test_programs_of_decode(registered: KernelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that launchers use exactly the listed programs. Kernels that are preferred to the portable kernel use exactly the
    programs listed as usual."""
    listed = decode.decode_program
    specs = [spec for spec in registered.list_kernels() if spec.solution == "cutedsl" and spec.mode == "mha_decode_with_kvcache"]
    asked = asked_of(decode, "decode_program", decodes, specs, monkeypatch)
    assert asked.keys() == {*listed.configs()}
    assert {config for config, priority in asked.items() if priority > Priority.PORTABLE} == {*listed.usual()}
    assert 0 < len(listed.usual()) < len(listed.configs())


def test_programs_of_prefill(registered: KernelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that launchers use exactly the listed programs."""
    listed = prefill.prefill_program
    specs = [
        spec
        for spec in registered.list_kernels()
        if spec.solution == "cutedsl" and spec.mode in PREFILLS and not is_of_window(spec)
    ]
    asked = asked_of(prefill, "prefill_program", prefills, specs, monkeypatch)
    assert asked.keys() == {*listed.configs()}


def is_of_window(spec: KernelSpec) -> bool:
    """Returns whether the kernel belongs to the module `window`, which has its own programs."""
    return "_kvcache_window_" in spec.name or "_prefill_window_" in spec.name

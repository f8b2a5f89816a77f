"""mha_extend_with_kvcache against the core's reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import mha_extend_with_kvcache as operator
from tokenspeed_kernel.cases import Case
from tokenspeed_kernel.numerics import Status, verify_case
from tokenspeed_kernel.numerics.verify import refusal
from tokenspeed_kernel.operator import get_operator
from tokenspeed_kernel.registry import KernelRegistry, KernelSpec
from tokenspeed_kernel_amd import mha_extend_with_kvcache, plugin

from .paging import check, inputs, longest_loop_without_loops, reference, spills


def _run(device: torch.device, kv_lens: list[int], q_lens: list[int], **options: Any) -> None:
    arguments = inputs(device, kv_lens, q_lens, **{"is_causal": True, **options})
    check(mha_extend_with_kvcache(**arguments, return_lse=True), reference(operator, arguments))


@pytest.mark.parametrize("page_size", [16, 64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("longest", [1, 8, 16, pytest.param(40, marks=pytest.mark.slow)])
def test_lengths(gfx950: torch.device, longest: int, page_size: int) -> None:
    """Every tile, 16 to 128 rows; stretches of none, one and all tokens of a sequence, and caches that end at pages and blocks."""
    kv_lens, q_lens = [63, 64, 65, 0, 1, 200], [min(longest, 7), 1, longest, 0, 1, longest]
    _run(gfx950, kv_lens, q_lens, page_size=page_size)


@pytest.mark.parametrize("longest", [8, *(pytest.param(longest, marks=pytest.mark.slow) for longest in (1, 3, 16))])
@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_divided_sequences(gfx950: torch.device, longest: int, is_causal: bool) -> None:
    """Keys of long sequences are divided; others have one unit, or no new tokens at all."""
    _run(gfx950, [900, 64, 0, 65, 700], [longest, 1, 0, 0, min(longest, 2)], page_size=64, is_causal=is_causal, sinks=True)


@pytest.mark.parametrize("window_left", [0, 127, *(pytest.param(w, marks=pytest.mark.slow) for w in (1, 128, 1000))])
def test_windows(gfx950: torch.device, window_left: int) -> None:
    _run(gfx950, [300, 129, 5], [70, 1, 5], window_left=window_left, sinks=True, page_size=64)


@pytest.mark.parametrize("window_left", [-1, pytest.param(13, marks=pytest.mark.slow)])
def test_not_causal(gfx950: torch.device, window_left: int) -> None:
    """Also more queries than keys, and no keys."""
    _run(gfx950, [100, 5, 0], [9, 8, 2], window_left=window_left, is_causal=False)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), pytest.param(8, 1, marks=pytest.mark.slow)])
def test_head_ratios(gfx950: torch.device, heads: int, kv_heads: int) -> None:
    _run(gfx950, [70, 140], [9, 33], heads=heads, kv_heads=kv_heads, dtype=torch.float16)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(128, 128), *(pytest.param(*dims, marks=pytest.mark.slow) for dims in ((128, 64), (64, 128)))]
)
def test_head_dims(gfx950: torch.device, head_dim: int, v_head_dim: int) -> None:
    _run(gfx950, [37, 300], [20, 33], head_dim=head_dim, v_head_dim=v_head_dim, page_size=64)


@pytest.mark.slow
def test_everything_together(gfx950: torch.device) -> None:
    options = {"window_left": 31, "logit_cap": 5.0, "softmax_scale": 0.2, "sinks": True}
    _run(gfx950, [190, 1, 131], [60, 1, 131], page_size=64, dtype=torch.float16, **options)


@pytest.mark.slow
def test_more_pages_than_are_listed_together(gfx950: torch.device) -> None:
    _run(gfx950, [4500], [20], heads=1, kv_heads=1)


def test_lengths_are_not_read_on_the_host(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed_kernel_amd.gfx950.attention.extend import mha_extend_with_kvcache as launch

    arguments = inputs(gfx950, [100, 9], [3, 4], is_causal=True)
    wanted = reference(operator, arguments)

    def refuse(*_: Any) -> Any:
        raise AssertionError("a value of a tensor was read on the host")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "__int__", "__bool__", "__index__"):
            patch.setattr(Tensor, name, refuse)
        got = launch(**arguments, return_lse=True)
    check(got, wanted)


# -- the operator's cases ------------------------------------------------------------------------------------------------------


@pytest.fixture
def registered() -> KernelSpec:
    """The kernel as the plugin declares it."""
    registry = KernelRegistry.get()
    if "gluon_mha_extend_with_kvcache" not in {spec.name for spec in registry.list_kernels()}:
        plugin.register()
    return registry.get_by_name("gluon_mha_extend_with_kvcache")


def _cases() -> list[Any]:
    op = get_operator("attention.mha_extend_with_kvcache")
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow, *([pytest.mark.amd] if case.large else [])])
        for case in op.all_cases()
    ]


@pytest.mark.parametrize("case", _cases())
def test_a_case_of_the_operator(gfx950: torch.device, registered: KernelSpec, case: Case) -> None:
    """Through the operator, with out= and again without, by the core's own checks."""
    if case.large and gfx950.type == "cpu":
        pytest.skip("is sized for a GPU")
    op = get_operator("attention.mha_extend_with_kvcache")
    refused = refusal(op, registered, op.complete(case.build(gfx950)))
    if refused is not None:
        pytest.skip(f"the kernel does not declare it: {refused}")
    result = verify_case(registered, case, gfx950)
    assert result.status is Status.PASSED, f"{result.reason}\n{result.traceback}"
    assert result.comparisons


# -- what the compiler made of it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "options"),
    [
        (8, {}),
        *(
            pytest.param(new, options, marks=pytest.mark.slow)
            for new, options in ((1, {}), (4, {}), (32, {}), (8, {"window_left": 127}), (32, {"head_dim": 128}))
        ),
    ],
    ids=str,
)
def test_resources(emulator: Any, new: int, options: dict[str, Any]) -> None:
    """Nothing spilled, two waves on a SIMD, no bank conflict, no loop around a buffer instruction, and a dense hot loop."""
    from gfx950_emulator.occupancy import occupancy

    shape = {"heads": 16, "kv_heads": 2, "sinks": True, "page_size": 64, "is_causal": True, **options}
    mha_extend_with_kvcache(**inputs(torch.device("cpu"), [400], [new], **shape))
    launch = emulator.launches[0]
    text = launch.program.assembly.text
    assert spills(text) == {"sgpr_spill_count": 0, "vgpr_spill_count": 0, "private_segment_fixed_size": 0}
    assert occupancy(launch.program.assembly, launch.waves, launch.lds).waves_per_simd >= 2
    assert launch.counters.total("lds_conflicts") == 0
    assert "s_cbranch_execnz" not in text
    body = longest_loop_without_loops(text)
    assert 16 * len(body) <= 412 * sum(name.startswith("v_mfma") for name in body)

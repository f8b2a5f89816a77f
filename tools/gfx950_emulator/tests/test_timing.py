"""Tests the timing model: rates and latencies of single execution units, their overlap, and ratios between whole kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gfx950_emulator import emulated_gfx950
from gfx950_emulator.driver import LaunchReport
from gfx950_emulator.occupancy import Occupancy
from gfx950_emulator.snippet import Snippet
from gfx950_emulator.timing import NOTICE, Prediction, Simulation, instruction_costs, instructions_of, predict, simulate

from .kernels import elementwise, products

LANES = np.arange(64)


def _time(text: str, waves: int = 1, copies: int = 1, **state: object) -> Simulation:
    """Simulates one workgroup that runs these instructions, or several copies of this workgroup on one CU."""
    snippet = Snippet(text, waves=waves, counters=True, **state).run()
    return simulate(instruction_costs(snippet.counters), [instructions_of(snippet.counters, 0)] * copies)


def _repeat(count: int, *instructions: str) -> str:
    return "\n".join(instructions * count)


BF16 = "v_mfma_f32_32x32x16_bf16 a[{d}:{e}], v[0:3], v[4:7], a[{d}:{e}]"
_ZEROS = {"v": dict.fromkeys(range(32), 0), "a": dict.fromkeys(range(64), 0)}


def _products(count: int, accumulators: int = 4, form: str = BF16) -> str:
    """Returns MFMAs that accumulate onto ``accumulators`` results in rotation."""
    return "\n".join(form.format(d=16 * (i % accumulators), e=16 * (i % accumulators) + 15) for i in range(count))


# Rates


def test_matrix_cores_reach_their_peak() -> None:
    count = 200
    result = _time(_products(count), waves=4, **_ZEROS)
    # 2.5 PFLOP/s dense in bf16 (CDNA 4 white paper): 4096 FLOP per cycle and CU.
    flops = 4 * count * 2 * 32 * 32 * 16
    assert flops / result.cycles == pytest.approx(4096, rel=0.02)
    assert result.busy["MFMA"] > 0.98


def test_matrix_rates_of_narrow_formats() -> None:
    form = "v_mfma_f32_32x32x64_f8f6f4 a[{{d}}:{{e}}], v[0:{a}], v[8:{b}], a[{{d}}:{{e}}]{modifiers}"
    fp8 = _time(_products(100, form=form.format(a=7, b=15, modifiers="")), **_ZEROS)
    fp4 = _time(_products(100, form=form.format(a=3, b=11, modifiers=" cbsz:4 blgp:4")), **_ZEROS)
    bf16 = _time(_products(100), **_ZEROS)
    # Per operation, fp8 takes half the time of bf16, and fp4 a quarter. The fp8 and fp4 MFMAs do four times as many operations.
    assert fp8.cycles / bf16.cycles == pytest.approx(2, rel=0.05)
    assert fp4.cycles / bf16.cycles == pytest.approx(1, rel=0.05)


def test_more_products_take_longer() -> None:
    times = [_time(_products(count), **_ZEROS).cycles for count in (1, 2, 4, 8, 16, 64)]
    assert times == sorted(set(times))
    assert times[-1] / times[-2] == pytest.approx(4, rel=0.2)


def test_accumulating_onto_one_result_costs_nothing_but_using_it_does() -> None:
    independent = _time(_products(32, accumulators=4), **_ZEROS).cycles
    chained = _time(_products(32, accumulators=1), **_ZEROS).cycles
    form = "v_mfma_f32_16x16x32_bf16 v[{}:{}], v[{}:{}], v[4:7], 0"
    apart = _time(_repeat(16, form.format(12, 15, 0, 3), form.format(16, 19, 0, 3)), **_ZEROS).cycles
    used = _time(_repeat(16, form.format(12, 15, 16, 19), form.format(16, 19, 12, 15)), **_ZEROS).cycles
    assert chained == independent
    assert apart == pytest.approx(32 * 16, rel=0.1)
    assert used == pytest.approx(32 * 16 * (4 + 5) / 4, rel=0.1), "4 passes, and 5 issue slots until the result can be read"


@pytest.mark.parametrize(
    ("instruction", "cycles"),
    [
        ("v_add_f32_e32 v1, v0, v0", 4),
        ("v_fma_f32 v1, v0, v0, v0", 4),
        ("v_pk_fma_f32 v[2:3], v[0:1], v[0:1], v[0:1]", 4),
        ("v_mul_lo_u32 v1, v0, v0", 4),
        ("v_exp_f32_e32 v1, v0", 8),
        ("v_rcp_f32_e32 v1, v0", 8),
        ("v_cvt_f32_f16_e32 v1, v0", 16),
        ("s_add_i32 s4, s4, 1", 4),
        ("s_nop 3", 16),
    ],
)
def test_cycles_of_an_instruction(instruction: str, cycles: int) -> None:
    count = 100
    result = _time(_repeat(count, instruction), v=dict.fromkeys(range(4), 0), s={4: 0})
    assert result.cycles == pytest.approx(count * cycles, abs=16)


def test_waves_share_a_simd_but_not_different_ones() -> None:
    text = _repeat(100, "v_add_f32_e32 v1, v0, v0")
    one, four, five, eight = (_time(text, waves=waves, v={0: 0}).cycles for waves in (1, 4, 5, 8))
    assert one == four
    assert five == eight
    assert eight / four == pytest.approx(2, rel=0.02)


def test_slow_instructions_hold_the_unit_for_other_waves() -> None:
    four, eight = (_time(_repeat(100, "v_exp_f32_e32 v1, v0"), waves=waves, v={0: 0}).cycles for waves in (4, 8))
    assert eight / four == pytest.approx(2, rel=0.02)


def test_units_of_one_simd_work_side_by_side() -> None:
    vector, scalar = (_repeat(200, text) for text in ("v_exp_f32_e32 v1, v0", "s_add_i32 s4, s4, 1"))
    split = f"s_cmp_lt_u32 s5, 4\ns_cbranch_scc1 one\n{scalar}\ns_endpgm\none:\n{vector}"
    both = _time(split, waves=8, v={0: 0}, s={4: 0, 5: np.arange(8)})
    assert both.cycles == pytest.approx(200 * 8, rel=0.05), "scalar instructions of waves 4 to 7 hide behind those of 0 to 3"


def test_vector_instructions_hide_behind_matrix_ones() -> None:
    matrix, vector = _products(50), _repeat(300, "v_add_f32_e32 v20, v21, v21")
    split = f"s_cmp_lt_u32 s5, 4\ns_cbranch_scc1 one\n{vector}\ns_endpgm\none:\n{matrix}"
    together = _time(split, waves=8, s={5: np.arange(8)}, **_ZEROS)
    assert together.cycles == pytest.approx(max(50 * 32, 300 * 4), rel=0.05)


# LDS


def _lds(instruction: str, offsets: np.ndarray, waves: int) -> float:
    """Returns the bytes per cycle of 200 LDS instructions per wave."""
    values = {0: np.tile(offsets, waves), **dict.fromkeys(range(4, 8), 0)}
    result = _time(_repeat(200, instruction) + "\ns_waitcnt lgkmcnt(0)", waves=waves, v=values, lds=160 * 1024)
    return waves * 200 * 1024 / result.cycles


def test_lds_bandwidth() -> None:
    # Reads reach 256 bytes per clock (CDNA 4 white paper), a pair of SIMDs at most half of that. Writes use two ports of 64 bytes
    # per clock, which also transfer the addresses.
    assert _lds("ds_read_b128 v[4:7], v0", LANES * 16, waves=16) == pytest.approx(256, rel=0.1)
    assert _lds("ds_read_b128 v[4:7], v0", LANES * 16, waves=1) == pytest.approx(128, rel=0.1)
    assert 75 < _lds("ds_write_b128 v0, v[4:7]", LANES * 16, waves=16) < 128


def test_bank_conflicts_cost_time() -> None:
    free, conflicting = (_lds("ds_read_b128 v[4:7], v0", LANES * stride, waves=8) for stride in (144, 128))
    assert free / conflicting == pytest.approx(8, rel=0.1), "a phase of 16 rows of 128 bytes uses two groups of banks of 16"


def test_latency_of_lds() -> None:
    result = _time("ds_read_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v2, v1", v={0: LANES * 4}, lds=256)
    assert 48 <= result.cycles <= 80
    assert result.spent["LDS"] > result.cycles / 2


# Global memory


def _address(array: np.ndarray) -> dict[int, np.ndarray]:
    at = array.ctypes.data + LANES.astype(np.uint64) * np.uint64(4)
    return {0: (at & np.uint64(0xFFFFFFFF)).astype(np.uint32), 1: (at >> np.uint64(32)).astype(np.uint32)}


def test_latency_of_memory_and_of_cache() -> None:
    data = np.zeros(8192, np.uint8)
    state = {"v": _address(data), "arrays": [data]}
    once = _time("global_load_dword v4, v[0:1], off\ns_waitcnt vmcnt(0)", **state).cycles
    again = _time(
        "global_load_dword v4, v[0:1], off\ns_waitcnt vmcnt(0)\nglobal_load_dword v4, v[0:1], off\ns_waitcnt vmcnt(0)", **state
    ).cycles
    assert once == pytest.approx(768, rel=0.05), "HBM"
    assert again - once == pytest.approx(256, rel=0.1), "L2"


def test_loads_under_way_together_take_as_long_as_one() -> None:
    data = np.zeros(8192, np.uint8)
    state = {"v": _address(data), "arrays": [data]}
    loads = [f"global_load_dword v{4 + i}, v[0:1], off offset:{256 * i}" for i in range(8)]
    together = _time("\n".join([*loads, "s_waitcnt vmcnt(0)"]), **state)
    apart = _time("\n".join(f"{load}\ns_waitcnt vmcnt(0)" for load in loads), **state)
    assert apart.cycles / together.cycles > 6
    assert together.spent["global memory"] > 0.8 * together.cycles


def test_a_wait_for_older_loads_does_not_wait_for_younger_ones() -> None:
    data = np.zeros(8192, np.uint8)
    work = _repeat(150, "v_add_f32_e32 v20, v21, v21")
    loads = (
        "global_load_dword v4, v[0:1], off\n{between}\nglobal_load_dword v5, v[0:1], off offset:256\n"
        "s_waitcnt vmcnt({left})\n{after}\ns_waitcnt vmcnt(0)"
    )
    state = {"v": {**_address(data), 21: 0}, "arrays": [data]}
    eager = _time(loads.format(between=work, left=1, after=work), **state).cycles
    lazy = _time(loads.format(between=work, left=0, after=work), **state).cycles
    assert lazy - eager > 300


def test_loads_ahead_hide_latency() -> None:
    data = np.zeros(8192, np.uint8)
    state = {"arrays": [data], "v": {**_address(data), **dict.fromkeys(range(4, 20), 0)}, "a": dict.fromkeys(range(64), 0)}
    load, multiply = (
        "global_load_dwordx4 v[{at}:{to}], v[0:1], off offset:{offset}",
        _products(16).replace("v[0:3]", "v[{at}:{to}]"),
    )
    single, double = [], [load.format(at=8, to=11, offset=0)]
    for step in range(8):
        at, ahead = 8 + 4 * (step % 2), 8 + 4 * ((step + 1) % 2)
        single += [load.format(at=8, to=11, offset=256 * step), "s_waitcnt vmcnt(0)", multiply.format(at=8, to=11)]
        double += [
            load.format(at=ahead, to=ahead + 3, offset=256 * step + 256),
            "s_waitcnt vmcnt(1)",
            multiply.format(at=at, to=at + 3),
        ]
    slow, fast = (_time("\n".join(text), **state) for text in (single, double))
    assert slow.cycles / fast.cycles > 1.5
    assert fast.busy["MFMA"] > slow.busy["MFMA"]


def test_other_workgroups_hide_latency() -> None:
    data = np.zeros(8192, np.uint8)
    text = f"global_load_dword v30, v[0:1], off\ns_waitcnt vmcnt(0)\n{_products(8)}"
    state = {"v": {**dict.fromkeys(range(32), 0), **_address(data)}, "a": dict.fromkeys(range(64), 0), "arrays": [data]}
    one, four = _time(text, **state), _time(text, copies=4, **state)
    assert four.workgroups == 4
    assert four.cycles < 1.1 * one.cycles


# Barriers and branches


def test_a_barrier_waits_for_the_slowest_wave() -> None:
    work = _repeat(500, "v_add_f32_e32 v1, v0, v0")
    text = f"s_cmp_lt_u32 s5, 1\ns_cbranch_scc0 join\n{work}\njoin:\ns_barrier\nv_add_f32_e32 v1, v0, v0"
    result = _time(text, waves=4, v={0: 0}, s={5: np.arange(4)})
    assert result.cycles == pytest.approx(500 * 4, rel=0.1)
    assert result.spent["barrier"] == pytest.approx(3 * 500 * 4, rel=0.1), "three waves waited"


def test_waves_that_end_do_not_keep_others_at_a_barrier() -> None:
    text = "s_cmp_lt_u32 s5, 1\ns_cbranch_scc1 out\ns_barrier\nv_add_f32_e32 v1, v0, v0\nout:\ns_nop 0"
    result = _time(text, waves=4, v={0: 0}, s={5: np.arange(4)})
    assert 0 < result.cycles < 200
    assert result.simulated == 1


def test_time_is_accounted_for() -> None:
    text = f"ds_read_b32 v1, v0\ns_waitcnt lgkmcnt(0)\n{_products(10)}\ns_barrier\nv_exp_f32_e32 v1, v0"
    state = {"v": {**_ZEROS["v"], 0: LANES * 4}, "a": _ZEROS["a"], "lds": 256}
    result = _time(text, **state)
    assert sum(result.spent.values()) == pytest.approx(result.cycles)
    assert all(0 <= share <= 1 for share in result.busy.values())


def test_long_traces_are_extrapolated() -> None:
    text = f"s_mov_b32 s4, 0\nagain:\n{_products(8)}\ns_add_i32 s4, s4, 1\ns_cmp_lt_u32 s4, 100\ns_cbranch_scc1 again"
    snippet = Snippet(text, counters=True, **_ZEROS).run()
    costs, traces = instruction_costs(snippet.counters), [instructions_of(snippet.counters, 0)]
    whole, part = simulate(costs, traces), simulate(costs, traces, max_instructions=300)
    assert whole.simulated == 1
    assert 0.2 < part.simulated < 0.4
    assert part.cycles == pytest.approx(whole.cycles, rel=0.02)


# Whole kernels


def _product(m: int, n: int, k: int, stages: int) -> LaunchReport:
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.empty(m, n)
    with emulated_gfx950(counters=True, sanitize=False) as emulator:
        products.matmul[(m // 128, n // 128)](a, b, c, m, n, k, n, 1, 128, 128, 64, stages, False)
    return emulator.launches[0]


def test_a_pipelined_product_beats_a_plain_one() -> None:
    plain, pipelined = (predict(_product(128, 128, 512, stages)) for stages in (1, 2))
    assert 1.1 < plain.cycles / pipelined.cycles < 4
    assert pipelined.full.busy["MFMA"] > plain.full.busy["MFMA"]


def test_time_grows_with_the_depth_of_a_product_and_not_with_free_compute_units() -> None:
    short, long, wide = (predict(_product(*sizes, 2)) for sizes in ((128, 128, 512), (128, 128, 1024), (256, 128, 512)))
    assert long.cycles / short.cycles == pytest.approx(2, rel=0.25)
    # Two workgroups read the same second operand, so half of its loads hit L2.
    assert 0.7 < wide.cycles / short.cycles <= 1.01


def _addition(n: int) -> LaunchReport:
    x, out = torch.ones(n), torch.empty(n)
    with emulated_gfx950(counters=True, sanitize=False) as emulator:
        elementwise.add[(n // 256,)](x, x, out, n, 256)
    return emulator.launches[0]


def test_the_grid_is_bound_by_memory_or_by_its_fullest_unit() -> None:
    small, large = predict(_addition(1 << 10)), predict(_addition(1 << 20))
    # x is read once, and out is written once.
    assert large.memory_seconds == pytest.approx(2 * 4 * (1 << 20) / 8e12)
    assert large.seconds >= large.memory_seconds
    for found in (small, large):
        slow = max(found.compute_seconds, found.memory_seconds * 8 / 6.6)
        assert found.achievable_seconds == pytest.approx(2.3e-6 + slow)
    assert small.bound_by == "global memory latency"
    # There are 4096 workgroups on 256 CUs with 8 workgroups each, so they take two rounds.
    assert 1.2 < large.compute_seconds / small.compute_seconds < 8


@pytest.mark.parametrize(
    ("valu", "mfma", "bound"),
    [
        (0.9, 0.3, "VALU throughput"),
        (0.6, 0.3, "MFMA latency (VALU 60% busy)"),
        (0.6, 0.86, "MFMA throughput"),
        (0.4, 0.3, "MFMA latency"),
    ],
)
def test_what_a_compute_unit_is_bound_by(valu: float, mfma: float, bound: str) -> None:
    spent = {"MFMA": 50.0, "VALU": 40.0, "LDS": 10.0}
    assert Simulation(1, 100.0, spent, {"VALU": valu, "MFMA": mfma, "LDS": 0.1}).bound_by == bound


@pytest.mark.parametrize(("length", "measured"), [(1024, 9.74), (2048, 16.2), (4096, 25.3), (8192, 45.3)])
def test_the_achievable_time_against_published_measurements(length: int, measured: float) -> None:
    """The achievable time has an error of at most 10%. The measured call is a decode of 16 sequences with 8 KV heads of 64 in bf16.
    It has two launches, and reads each key and value once."""
    memory = 2 * 2 * 16 * length * 8 * 64
    idle = Simulation(1, 1.0, {"issue": 1.0}, {"VALU": 0.0})
    fits = Occupancy(1, 1.0, {"LDS": 1}, "LDS", 64, 0, 32, 64, 0)
    launches = [Prediction("decode", 0, idle, idle, fits, 0.0, bytes_ / 8e12) for bytes_ in (memory, 0)]
    assert sum(launch.achievable_seconds for launch in launches) * 1e6 == pytest.approx(measured, rel=0.1)


def test_idle_workgroups_cost_little() -> None:
    """The predicted time hardly changes if 63 workgroups without work are added. The kernel is persistent."""
    m = n = 64
    a, b, c = torch.randn(m, 64).bfloat16(), torch.randn(64, n).bfloat16(), torch.empty(m, n)
    with emulated_gfx950(counters=True, sanitize=False) as emulator:
        for workgroups in (1, 64):
            products.persistent_matmul[(workgroups,)](a, b, c, m, n, 64, 64, 32)
    alone, idle = (predict(launch) for launch in emulator.launches)
    assert idle.workgroup == 0
    assert idle.cycles == pytest.approx(alone.cycles, rel=0.1)


def test_a_launch_without_counters_has_no_time() -> None:
    x, out = torch.ones(256), torch.empty(256)
    with emulated_gfx950(sanitize=False) as emulator:
        elementwise.add[(1,)](x, x, out, 256, 256)
    with pytest.raises(ValueError, match="executed without counters"):
        predict(emulator.launches[0])


def test_the_notice_says_what_it_is_for() -> None:
    assert "ratios" in NOTICE
    assert "never" in NOTICE

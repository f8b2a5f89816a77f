"""Tests the counters of bank conflicts, cache lines, instructions and occupancy, with patterns whose counts are known."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from gfx950_emulator import emulated_gfx950
from gfx950_emulator.assembly import Assembly
from gfx950_emulator.bank_conflicts import ConflictCache, conflict_cycles, phase_count
from gfx950_emulator.counters import Counters, Line
from gfx950_emulator.hardware import MI300X
from gfx950_emulator.occupancy import occupancy
from gfx950_emulator.snippet import Snippet

from .kernels import elementwise, products

LANES = np.arange(64)

# The lanes of each phase and the number of banks, as measured on gfx950 hardware:
# github.com/HazyResearch/HipKittens, analysis/paper_experiments/phases/*/phase_results.txt and bank_results.txt.
MEASURED = {
    (16, False): (64, [[0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27],
                       [4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 28, 29, 30, 31],
                       [32, 33, 34, 35, 44, 45, 46, 47, 52, 53, 54, 55, 56, 57, 58, 59],
                       [36, 37, 38, 39, 40, 41, 42, 43, 48, 49, 50, 51, 60, 61, 62, 63]]),
    (8, False): (64, [list(range(32)), list(range(32, 64))]),
    (12, False): (32, [[0, 1, 2, 3, 20, 21, 22, 23], [4, 5, 6, 7, 16, 17, 18, 19], [8, 9, 10, 11, 28, 29, 30, 31],
                       [12, 13, 14, 15, 24, 25, 26, 27], [32, 33, 34, 35, 52, 53, 54, 55], [36, 37, 38, 39, 48, 49, 50, 51],
                       [40, 41, 42, 43, 60, 61, 62, 63], [44, 45, 46, 47, 56, 57, 58, 59]]),
    (8, True): (32, [list(range(first, first + 16)) for first in (0, 16, 32, 48)]),
}  # fmt: skip


def _conflicts_by_definition(offsets: list[int], size: int, store: bool) -> int:
    """Returns the extra cycles of one wave, computed lane by lane and bank by bank."""
    banks, groups = MEASURED[size, store]
    extra = 0
    for group in groups:
        wanted: dict[int, set[int]] = {}
        for lane in group:
            for word in range(size // 4):
                if offsets[lane] >= 0:
                    dword = offsets[lane] // 4 + word
                    wanted.setdefault(dword % banks, set()).add(dword)
        extra += max((len(dwords) for dwords in wanted.values()), default=1) - 1
    return extra


@pytest.mark.parametrize(("size", "store"), MEASURED)
def test_conflicts_of_random_patterns(size: int, store: bool) -> None:
    rng = np.random.default_rng(size + store)
    step = {12: 16}.get(size, size)
    patterns = [rng.integers(0, limit // step, 64) * step for limit in (256, 1024, 65536) for _ in range(20)]
    patterns += [np.where(rng.random(64) < 0.3, -1, pattern) for pattern in patterns]
    expected = [_conflicts_by_definition(pattern.tolist(), size, store) for pattern in patterns]
    assert len(set(expected)) > 5
    assert conflict_cycles(np.array(patterns), size, store).tolist() == expected


@pytest.mark.parametrize(
    ("size", "store", "offsets", "extra"),
    [
        pytest.param(4, False, LANES * 4, 0, id="b32 read, contiguous"),
        pytest.param(4, False, LANES * 0, 0, id="b32 read, broadcast"),
        pytest.param(4, False, LANES * 8, 1, id="b32 read, every second dword"),
        pytest.param(4, False, LANES * 256, 63, id="b32 read, one bank"),
        pytest.param(4, True, LANES * 4, 0, id="b32 write, contiguous"),
        pytest.param(4, True, LANES * 128, 2 * 31, id="b32 write, one bank of 32"),
        pytest.param(4, False, LANES * 128, 31, id="b32 read, two banks of 64"),
        pytest.param(2, False, LANES * 2, 0, id="u16 read, two lanes a dword"),
        pytest.param(8, False, LANES * 8, 0, id="b64 read, contiguous"),
        pytest.param(8, False, LANES * 256, 2 * 31, id="b64 read, one pair of banks"),
        pytest.param(8, True, LANES * 128, 4 * 15, id="b64 write, one pair of banks"),
        pytest.param(16, False, LANES * 16, 0, id="b128 read, contiguous"),
        pytest.param(16, False, LANES * 128, 4 * 7, id="b128 read, rows of 64 half words"),
        pytest.param(16, False, LANES * 256, 4 * 15, id="b128 read, rows of 128 half words"),
        pytest.param(16, False, LANES * 144, 0, id="b128 read, rows of 64 half words, padded by 8"),
        pytest.param(16, True, LANES * 16, 0, id="b128 write, contiguous"),
        pytest.param(16, True, LANES * 128, 8 * 7, id="b128 write, rows of 64 half words"),
    ],
)
def test_conflicts_of_known_patterns(size: int, store: bool, offsets: np.ndarray, extra: int) -> None:
    assert conflict_cycles(offsets[None], size, store).tolist() == [extra]


@pytest.mark.parametrize(
    ("size", "phases", "offsets", "extra"),
    [
        pytest.param(4, 2, LANES * 4, 0, id="b32 read, contiguous"),
        pytest.param(4, 2, LANES * 128, 2 * 31, id="b32 read, one bank of 32"),
        pytest.param(8, 4, LANES * 8, 0, id="b64 read, contiguous"),
        pytest.param(8, 4, LANES * 136, 0, id="b64 read, rows of 64 half words, padded by 4"),
        pytest.param(16, 8, LANES * 16, 0, id="b128 read, contiguous"),
        pytest.param(16, 8, LANES * 128, 8 * 7, id="b128 read, rows of 64 half words"),
        pytest.param(16, 8, LANES * 144, 0, id="b128 read, rows of 64 half words, padded by 8"),
    ],
)
def test_phases_of_gfx942(size: int, phases: int, offsets: np.ndarray, extra: int) -> None:
    """gfx942 has 32 banks for reads, and the phases of Composable Kernel's documentation."""
    assert conflict_cycles(offsets[None], size, False, device=MI300X).tolist() == [extra]
    assert phase_count(size, False, MI300X) == phases


def test_lanes_that_are_off_conflict_with_nobody() -> None:
    offsets = np.where(LANES < 32, LANES * 256, -1)
    assert conflict_cycles(offsets[None], 4, False).tolist() == [31]
    assert conflict_cycles(np.full((1, 64), -1), 4, False).tolist() == [0]


def test_atomics_on_one_dword_take_turns() -> None:
    same = np.zeros((1, 64), np.int64)
    assert conflict_cycles(same, 4, True, atomic=True).tolist() == [2 * 31]
    assert conflict_cycles(same, 4, True).tolist() == [0]


def test_remembered_patterns_are_told_apart() -> None:
    cache = ConflictCache()
    rows = LANES * 128
    for offsets in (rows, rows + 256, rows + 16, np.where(LANES < 8, rows, -1), np.where(LANES < 8, rows + 512, -1), rows + rows):
        assert cache.cycles(offsets[None], 16, False, False).tolist() == conflict_cycles(offsets[None], 16, False).tolist()


def _lines(text: str, **state: object) -> list[Line]:
    """Runs instructions with counters, and returns the counters of instructions that access memory."""
    snippet = Snippet(text, counters=True, **state).run()
    assert isinstance(snippet.counters, Counters)
    return [line for line in snippet.counters.lines() if line.accesses or line.lds_accesses]


def test_lds_instructions_are_counted_per_wave() -> None:
    (line,) = _lines("ds_read_b128 v[4:7], v0", v={0: np.tile(LANES * 128, 2)}, lds=64 * 128, waves=2)
    assert (line.executions, line.lds_accesses, line.lds_bytes) == (2, 2, 2 * 64 * 16)
    assert (line.lds_cycles, line.lds_conflicts) == (2 * (4 + 28), 2 * 28)


def test_both_halves_of_read2_count() -> None:
    (line,) = _lines("ds_read2st64_b32 v[4:5], v0 offset0:0 offset1:1", v={0: LANES * 4}, lds=512)
    assert (line.executions, line.lds_accesses, line.lds_bytes, line.lds_cycles, line.lds_conflicts) == (1, 2, 512, 2, 0)


def test_transposing_reads_write_and_atomics_of_lds() -> None:
    text = "ds_read_b64_tr_b16 v[4:5], v0\nds_write_b64 v0, v[6:7]\nds_add_u32 v1, v2"
    read, write, add = _lines(text, v={0: LANES * 8, 1: 0, 2: 1, 6: 0, 7: 0}, lds=512)
    assert (read.lds_cycles, read.lds_conflicts) == (2, 0)
    assert (write.lds_cycles, write.lds_conflicts) == (4, 0)
    assert (add.lds_cycles, add.lds_conflicts) == (2 + 62, 62)


def _address(array: np.ndarray, offsets: np.ndarray) -> dict[int, np.ndarray]:
    """Returns values of v0 and v1: the lower and upper halves of each lane's global address."""
    at = array.ctypes.data + offsets.astype(np.uint64)
    return {0: (at & np.uint64(0xFFFFFFFF)).astype(np.uint32), 1: (at >> np.uint64(32)).astype(np.uint32)}


@pytest.mark.parametrize(
    ("width", "offsets", "lines", "ideal"),
    [
        pytest.param("dword", LANES * 4, 2, 2, id="contiguous"),
        pytest.param("dword", LANES[::-1] * 4, 2, 2, id="backwards"),
        pytest.param("dword", LANES * 4 + 64, 3, 2, id="contiguous, not aligned"),
        pytest.param("dword", LANES * 8, 4, 2, id="every second"),
        pytest.param("dword", LANES * 128, 64, 2, id="a line each"),
        pytest.param("dword", LANES * 0, 1, 2, id="all the same"),
        pytest.param("dwordx4", LANES * 16, 8, 8, id="16 bytes, contiguous"),
        pytest.param("dwordx4", LANES * 256, 64, 8, id="16 bytes, rows"),
        pytest.param("dwordx4", LANES * 256 + 120, 128, 8, id="16 bytes across two lines"),
        pytest.param("ubyte", LANES, 1, 1, id="bytes"),
    ],
)
def test_cache_lines_of_a_load(width: str, offsets: np.ndarray, lines: int, ideal: int) -> None:
    data = np.zeros(64 * 256 + 256, np.uint8)
    (line,) = _lines(f"global_load_{width} v[4:7], v[0:1], off" if width == "dwordx4" else f"global_load_{width} v4, v[0:1], off",
                     v=_address(data, offsets), arrays=[data])  # fmt: skip
    assert (line.accesses, line.lines, line.ideal_lines, line.fresh_lines) == (1, lines, ideal, lines)
    assert line.bytes == 64 * {"dword": 4, "dwordx4": 16, "ubyte": 1}[width]


def test_only_lanes_that_are_on_and_in_range_count() -> None:
    data = np.zeros(4096, np.uint8)
    (line,) = _lines("global_load_dword v4, v[0:1], off", v=_address(data, LANES * 32), arrays=[data], s={"exec": 0xFF})
    assert (line.bytes, line.lines, line.ideal_lines) == (8 * 4, 2, 1)
    base = data.ctypes.data
    resource = {4: base & 0xFFFFFFFF, 5: base >> 32, 6: 128, 7: 0x27000}
    (line,) = _lines("buffer_load_dword v4, v0, s[4:7], 0 offen", v={0: LANES * 4}, arrays=[data], s=resource)
    assert (line.bytes, line.lines) == (128, 1)


def test_fresh_lines_are_counted_once_for_loads_and_once_for_stores() -> None:
    data = np.zeros(1024, np.uint8)
    text = "global_load_dword v4, v[0:1], off\nglobal_load_dword v5, v[0:1], off offset:128\nglobal_store_dword v[0:1], v6, off"
    first, second, store = _lines(text, v={**_address(data, LANES * 4), 6: 0}, arrays=[data])
    assert [line.fresh_lines for line in (first, second, store)] == [2, 1, 2]


def test_lines_of_two_waves_count_for_each() -> None:
    data = np.zeros(1024, np.uint8)
    (line,) = _lines("global_load_dword v4, v[0:1], off", v=_address(data, np.tile(LANES * 4, 2)), arrays=[data], waves=2)
    assert (line.executions, line.accesses, line.lines, line.fresh_lines) == (2, 2, 4, 2)


def test_direct_loads_to_lds_count_on_both_sides() -> None:
    data = np.zeros(1024, np.uint8)
    (line,) = _lines("global_load_lds_dwordx4 v[0:1], off", v=_address(data, LANES * 16), arrays=[data], s={"m0": 0}, lds=1024)
    assert (line.bytes, line.lines, line.lds_bytes, line.lds_cycles, line.lds_conflicts) == (1024, 8, 1024, 8, 0)


def test_loops_count_each_turn_of_each_wave() -> None:
    text = """
    s_mov_b32 s4, 0
    again:
    v_add_u32_e32 v1, 1, v1
    s_add_i32 s4, s4, 1
    s_cmp_lt_u32 s4, s5
    s_cbranch_scc1 again
    """
    snippet = Snippet(text, v={1: 0}, s={5: np.array([3, 7])}, waves=2, counters=True).run()
    counters = snippet.counters
    assert counters.by_mnemonic() == Counter(
        v_add_u32=10, s_add_i32=10, s_cmp_lt_u32=10, s_cbranch_scc1=10, s_mov_b32=2, s_endpgm=2
    )
    assert counters.by_unit() == Counter(valu=10, salu=22, branch=10, end=2)
    blocks = counters.trace.waves_of(0)
    assert [len(blocks[wave]) for wave in (0, 1)] == [1 + 3 + 1, 1 + 7 + 1]


def test_totals_of_an_addition() -> None:
    n = 1000
    x, y, out = torch.arange(n, dtype=torch.float32), torch.ones(n), torch.empty(n)
    with emulated_gfx950(counters=True) as emulator:
        elementwise.add[(4,)](x, y, out, n, 256)
    counters = emulator.launches[0].counters
    assert counters.total("bytes", "load") == 8 * n
    assert counters.total("bytes", "store") == 4 * n
    assert counters.memory_bytes == 3 * 32 * 128, "4000 bytes are 31.25 lines"
    assert counters.coalescing == 1.0
    assert counters.by_mnemonic()["v_add_f32"] == 16
    assert counters.mfma_flops == 0


@pytest.mark.parametrize("k", [64, 128])
def test_totals_of_a_product(k: int) -> None:
    m = n = 128  # each of a workgroup's four waves has 32 x 32 of the 64 x 64 elements
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.empty(m, n)
    with emulated_gfx950(counters=True) as emulator:
        products.matmul[(2, 2)](a, b, c, m, n, k, n, 1, 64, 64, 32, 1, False)
    counters = emulator.launches[0].counters
    assert counters.mfma_flops == 2 * m * n * k
    assert counters.total("bytes", "load") >= 2 * (m * k * 2 + k * n * 2), "every workgroup loads its rows and columns"
    assert counters.memory_bytes == (m * k + k * n) * 2 + m * n * 4
    assert counters.instructions == emulator.launches[0].wave_instructions
    assert counters.instructions == sum(counters.by_unit().values()) == sum(counters.by_mnemonic().values())


def test_lines_name_the_source() -> None:
    x, out = torch.ones(256), torch.empty(256)
    with emulated_gfx950(counters=True) as emulator:
        elementwise.add[(1,)](x, x, out, 256, 256)
    loads = [line for line in emulator.launches[0].counters.lines() if "load_dword" in line.instruction.text and line.accesses]
    assert loads
    assert all(line.instruction.source is not None and line.instruction.source[0].endswith("elementwise.py") for line in loads)


def test_without_counters_nothing_is_counted() -> None:
    x, out = torch.ones(256), torch.empty(256)
    with emulated_gfx950() as emulator:
        elementwise.add[(1,)](x, x, out, 256, 256)
    assert emulator.launches[0].counters is None


def _kernel(vgprs: int, accum_offset: int = 0, sgprs: int = 30) -> Assembly:
    """Returns a kernel that has only register counts. vgprs is the count from v0 to the last accumulation register."""
    descriptor = {"next_free_vgpr": vgprs, "accum_offset": accum_offset or -(-vgprs // 4) * 4, "next_free_sgpr": sgprs - 6}
    return Assembly("kernel", (), {}, descriptor, (), {"sgpr_count": sgprs})


@pytest.mark.parametrize(
    ("vgprs", "accum_offset", "per_simd"),
    [(1, 0, 8), (64, 0, 8), (65, 0, 7), (72, 0, 7), (73, 0, 6), (80, 0, 6), (84, 0, 5), (96, 0, 5), (97, 0, 4), (128, 0, 4),
     (129, 0, 3), (168, 0, 3), (169, 0, 2), (207, 0, 2), (256, 0, 2), (256, 128, 2), (264, 256, 1), (419, 256, 1), (512, 256, 1)],
)  # fmt: skip
def test_occupancy_by_vector_registers(vgprs: int, accum_offset: int, per_simd: int) -> None:
    fits = occupancy(_kernel(vgprs, accum_offset), waves=4, lds=0)
    assert (fits.workgroups, fits.waves_per_simd) == (per_simd, per_simd)
    assert fits.limiter == ("VGPRs" if per_simd < 8 else "waves")
    assert fits.vgprs + fits.agprs == vgprs
    assert fits.agprs == (vgprs - accum_offset if accum_offset else 0)


@pytest.mark.parametrize(
    ("lds", "waves", "workgroups", "limiter"),
    [
        (0, 4, 8, "waves"),
        (16 * 1024, 4, 8, "waves"),  # 16640 bytes are allocated, so LDS would fit 9 workgroups
        (49712, 4, 3, "LDS"),  # 49920 bytes are allocated
        (54272, 4, 2, "LDS"),  # 55040 bytes are allocated; without rounding up, three would fit
        (66368, 4, 2, "LDS"),  # 66560 bytes are allocated
        (105376, 4, 1, "LDS"),
        (160 * 1024, 4, 1, "LDS"),
        (81920, 8, 2, "LDS"),  # exactly half of LDS
        (81921, 8, 1, "LDS"),
        (16832, 1, 9, "LDS"),
        (0, 1, 32, "waves"),
        (0, 2, 16, "waves"),
        (0, 16, 2, "waves"),
        (0, 6, 5, "waves"),
    ],
)
def test_occupancy_by_lds_and_waves(lds: int, waves: int, workgroups: int, limiter: str) -> None:
    fits = occupancy(_kernel(32), waves, lds)
    assert (fits.workgroups, fits.limiter) == (workgroups, limiter)
    assert fits.waves_per_simd == workgroups * waves / 4


@pytest.mark.parametrize(("sgprs", "per_simd"), [(96, 8), (97, 7), (106, 7), (112, 7)])
def test_occupancy_by_scalar_registers(sgprs: int, per_simd: int) -> None:
    assert occupancy(_kernel(32, sgprs=sgprs), waves=4, lds=0).workgroups == per_simd

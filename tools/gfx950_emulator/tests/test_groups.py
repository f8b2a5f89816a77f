"""Tests groups of waves in lockstep: every representation of scalar registers, divergence and reconvergence, and outstanding
operations."""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emulator.access import Access
from gfx950_emulator.binding import Bound
from gfx950_emulator.constants import EXEC, VCC
from gfx950_emulator.group import Group, HighHalf, LaneMask
from gfx950_emulator.outstanding import Deferred, Outstanding, Stored, entries
from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import UnknownInstruction

from .isa import MASK32, MASK64, WAVE, bits_of, random_lanes, random_words

# Wait counters


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("s_waitcnt vmcnt(0)", {"vmcnt": 0}), ("s_waitcnt lgkmcnt(3)", {"lgkmcnt": 3}),
        ("s_waitcnt vmcnt(5) lgkmcnt(0)", {"vmcnt": 5, "lgkmcnt": 0}),
        ("s_waitcnt vmcnt(1) & lgkmcnt(2)", {"vmcnt": 1, "lgkmcnt": 2}),
        ("s_waitcnt vmcnt(63) expcnt(7) lgkmcnt(15)", {"vmcnt": 63, "expcnt": 7, "lgkmcnt": 15}),
        ("s_waitcnt 0", {"vmcnt": 0, "expcnt": 0, "lgkmcnt": 0}), ("s_waitcnt 0xcf7f", {"vmcnt": 63, "expcnt": 7, "lgkmcnt": 15}),
        ("s_waitcnt 0x4172", {"vmcnt": 18, "expcnt": 7, "lgkmcnt": 1}),
    ],
)  # fmt: skip
def test_wait_limits(text: str, limits: dict[str, int]) -> None:
    """In the immediate of s_waitcnt, vmcnt is bits [15:14] and [3:0], expcnt [6:4], and lgkmcnt [11:8]."""
    assert Snippet(text).program.bound[0].extra == limits


def test_wait_for_what_does_not_exist() -> None:
    with pytest.raises(UnknownInstruction, match="vscnt"):
        Snippet("s_waitcnt vscnt(0)")


def _loads(count: int) -> list[Bound]:
    return [Bound(lambda g: None, memory=Access("global", "load", 4, "vmcnt")) for _ in range(count)]


def _deferred(bound: Bound, lanes: list[int], address: int = 0) -> Deferred:
    columns = np.array(lanes)
    return Deferred(bound, columns, address + 4 * columns, columns[None].astype(np.uint32) + 1)


def _queue(*vector: object, local: tuple = ()) -> Outstanding:
    queue = Outstanding()
    queue.vector, queue.local = list(vector), list(local)
    return queue


class _Waiting:
    """A stand-in for the part of a group that wait counters use. The stand-in records the calls that it receives."""

    def __init__(self) -> None:
        self.landed: list[Deferred] = []
        self.arrived_: list[object] = []
        self.machine = self.local = self.shadow = self

    def arrive(self, group: object, entry: Deferred) -> None:
        self.landed.append(entry)

    def arrived(self, finished: list) -> None:
        self.arrived_ += finished


@pytest.mark.parametrize("limit", range(6))
def test_the_oldest_operations_are_waited_for(limit: int) -> None:
    a, b, c = _loads(3)
    flying = _deferred(b, [1, 5])
    queue, group = _queue(a, flying, b, c), _Waiting()
    queue.wait_vector(group, limit)
    done = max(0, 4 - limit)
    assert group.arrived_ == [a, flying, b, c][:done]
    assert group.landed == ([flying] if done >= 2 else [])
    assert queue.vector == [a, flying, b, c][done:]
    queue.wait_vector(group, 0)
    assert queue.vector == []
    assert group.landed == [flying]


def test_scalar_loads_may_overtake() -> None:
    """Scalar loads may overtake one another. So while a scalar load is outstanding, only a wait with limit 0 guarantees its
    data."""
    scalar = Bound(lambda g: None, memory=Access("scalar", "load", 4, "lgkmcnt"))
    lds = [Bound(lambda g: None, memory=Access("lds", "load", 4, "lgkmcnt")) for _ in range(2)]
    queue, group = _queue(local=(lds[0], scalar, lds[1])), _Waiting()
    for limit in (3, 2, 1):
        queue.wait_local(group, limit)
        assert group.arrived_ == []
    queue.wait_local(group, 0)
    assert group.arrived_ == [lds[0], scalar, lds[1]]
    queue, group = _queue(local=tuple(lds)), _Waiting()
    queue.wait_local(group, 1)
    assert group.arrived_ == lds[:1]


def test_what_is_outstanding_parts_with_the_waves() -> None:
    a, b = _loads(2)
    stored = Stored(np.array([3, 70, 130]), np.array([0, 4, 8]), 4)
    queue = _queue(a, _deferred(b, [0, 64, 65, 190]), local=((a, stored),))
    part = queue.select(np.r_[128:192, 64:128], 192)  # waves 2 and 1, in this order
    assert part.vector[0] is a
    assert part.vector[1].columns.tolist() == [64, 65, 62]
    assert part.vector[1].addresses.tolist() == [256, 260, 760]
    assert part.vector[1].values.tolist() == [[65, 66, 191]]
    assert part.local[0][1].columns.tolist() == [70, 2]
    assert part.local[0][1].addresses.tolist() == [4, 8]
    assert queue.vector[1].columns.tolist() == [0, 64, 65, 190], "the group that parted keeps its own"


def test_what_is_outstanding_meets_at_the_newest() -> None:
    a, b, c = _loads(3)
    first = _queue(a, _deferred(b, [2]), c)
    second = _queue(_deferred(b, [1], 1000), b)
    whole = Outstanding.join([first, second], [2, 1])
    assert len(whole.vector) == 3
    assert whole.vector[0] is a
    assert [entry.columns.tolist() for entry in entries(whole.vector[1:2])] == [[2], [2 * WAVE + 1]]
    assert [entry.addresses.tolist() for entry in entries(whole.vector[1:2])] == [[8], [1004]]
    assert list(entries(whole.vector[2:])) == [c, b]
    group = _Waiting()
    whole.wait_vector(group, 1)
    assert len(group.landed) == 2
    whole.wait_vector(group, 0)
    assert group.arrived_[-2:] == [c, b], "every instruction that was outstanding in some waves is told to have arrived"
    assert list(entries(Outstanding.join([_queue(a), _queue(a), _queue()], [1, 1, 1]).vector)) == [a]


# Groups


def _state(group: Group) -> dict[tuple[int, int], tuple]:
    """Returns the whole state of every wave, by slot and wave."""
    whole = {}
    scalars = {i: np.broadcast_to(np.asarray(group.s32(i)), group.waves) for i in range(112)}
    masks = {i: group.lane_mask(i).reshape(group.waves, WAVE) for i in (4, 6, 8, 20, VCC, EXEC)}
    scc = np.broadcast_to(group.scc, group.waves)
    for i in range(group.waves):
        lanes = slice(i * WAVE, (i + 1) * WAVE)
        whole[int(group.slot[i]), int(group.wave[i])] = (
            group.registers[:, lanes].tobytes(),
            tuple(int(values[i]) for values in scalars.values()),
            tuple(mask[i].tobytes() for mask in masks.values()),
            bool(scc[i]),
            group.mode,
            group.pc,
            tuple(group.columns()[lanes]),
        )
    return whole


def _mixed_group(waves: int) -> Group:
    """Returns a group whose scalar registers have every kind of representation."""
    rng = np.random.default_rng(6)
    group = (
        Snippet(
            """
        v_cmp_gt_u32_e64 s[4:5], v1, v2
        v_cmp_lt_u32_e32 vcc, v1, v2
        v_cmp_ne_u32_e64 s[6:7], v1, v2
        v_cmp_ne_u32_e64 s[8:9], v1, v2
        v_cmp_gt_u32_e64 s[20:21], v2, v1
        s_mov_b32 s7, 5
        s_mov_b32 s8, s30
        s_mov_b32 s21, s5
        s_mov_b64 exec, s[4:5]
        s_cmp_gt_u32 s30, s31
        s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1
        """,
            v={1: random_lanes(rng, waves), 2: random_lanes(rng, waves)},
            s={30: np.array(random_words(rng, waves)), 31: 1 << 20, 32: 0x1234, 33: np.arange(waves) // 2},
            waves=waves,
            registers=3,
        )
        .run()
        .group
    )
    kinds = {type(value) for value in group.s}
    assert kinds == {int, np.ndarray, LaneMask, HighHalf}
    return group


@pytest.mark.parametrize(
    "split", [[[0], [1, 2, 3, 4, 5]], [[5, 3, 1], [0, 2, 4]], [[2], [0], [5], [1, 4], [3]], [[0, 1, 2, 3, 4, 5]]]
)
def test_waves_part_and_meet(split: list[list[int]]) -> None:
    group = _mixed_group(6)
    before = _state(group)
    parts = [group.select(np.array(waves)) for waves in split]
    for waves, part in zip(split, parts, strict=True):
        assert _state(part) == {(0, wave): before[0, wave] for wave in waves}
    whole = Group.join(parts)
    assert _state(whole) == before
    assert whole.wave.tolist() == [wave for waves in split for wave in waves]
    assert isinstance(whole.s[4], LaneMask)
    assert whole.s[5] is whole.s[4].high
    assert type(whole.s[32]) is int
    again = Group.join([whole.select(np.array([i])) for i in reversed(range(6))])
    assert _state(again) == before


def test_parts_do_not_share_state() -> None:
    group = _mixed_group(4)
    before = _state(group)
    part = group.select(np.array([1, 2]))
    part.registers[...] = 0
    part.set_s32(30, 1)
    part.set_s64(EXEC, 0)
    part.set_lane_mask(4, np.zeros(2 * WAVE, bool))
    part.mode, part.pc, part.scc = 0, 99, False
    part.queue.vector.append(_loads(1)[0])
    assert _state(group) == before
    assert group.queue.vector == []


def test_meeting_with_masks_in_some_and_numbers_in_others() -> None:
    group = _mixed_group(4)
    parts = [group.select(np.array([0, 1])), group.select(np.array([2, 3]))]
    parts[0].set_s64(4, 0xF0F0F0F012345678)
    parts[1].set_s64(VCC, np.array([1, 1 << 63], np.uint64))
    parts[1].s[21] = parts[1].s[5]  # half of another mask
    expected = _state(parts[0]) | _state(parts[1])
    assert _state(Group.join(parts)) == expected


def test_scalars_of_every_kind_are_written_and_read() -> None:
    group = Snippet("s_nop 0", waves=3, registers=2).run().group
    low, high = np.array([1, 2, MASK32]), np.array([0, MASK32, 1 << 31])
    both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    for index in (10, VCC, EXEC):
        group.set_s64(index, both)
        assert np.array_equal(group.s64(index), both)
        assert np.array_equal(group.s32(index), low)
        assert np.array_equal(group.s32(index + 1), high)
        assert np.array_equal(group.lane_mask(index), np.concatenate([bits_of(int(m)) for m in both]))
        group.set_s32(index, 7)
        assert group.s64(index).tolist() == [int(h) << 32 | 7 for h in high]
        group.set_s32(index + 1, low)
        assert group.s64(index).tolist() == [int(x) << 32 | 7 for x in low]
        group.set_s64(index, 0xFFFFFFFF00000000)
        assert group.s64(index) == 0xFFFFFFFF00000000
        assert group.lane_mask(index).sum() == 3 * 32
    assert not group.full
    group.set_s64(EXEC, MASK64)
    assert group.full


def test_scalars_as_lanes_see_them() -> None:
    group = Snippet("s_nop 0", s={4: np.array([5, 0xBF800000]), 6: 0xBF800000, 8: (2 << 32) | 3}, waves=2, registers=2).run().group
    assert group.broadcast(6) == 0xBF800000
    assert group.broadcast_f32(6) == -1.0
    assert group.broadcast_i32(6) == np.int32(-0x40800000)
    assert group.broadcast_u64(8) == (2 << 32) | 3
    assert group.broadcast_u32(4).tolist() == [5] * WAVE + [0xBF800000] * WAVE
    assert group.broadcast_f32(4)[WAVE:].tolist() == [-1.0] * WAVE
    assert group.broadcast(4).dtype == np.uint32


@pytest.mark.parametrize("mask", [MASK64, 0, 0x00FF00FF00FF00FF])
def test_pairs_of_vector_registers(mask: int) -> None:
    rng = np.random.default_rng(7)
    low, high, new = random_lanes(rng), random_lanes(rng), rng.integers(0, 1 << 63, WAVE).astype(np.float64)
    group = Snippet("s_nop 0", v={0: low, 1: high}, s={"exec": mask}, registers=2).run().group
    old = [int(h) << 32 | int(x) for x, h in zip(low, high, strict=True)]
    assert group.pair(0).tolist() == old
    group.set_pair(0, new)
    on = bits_of(mask)
    assert group.pair(0).tolist() == [int(n) if o else x for n, o, x in zip(new.view(np.uint64), on, old, strict=True)]

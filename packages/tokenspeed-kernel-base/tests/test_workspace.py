"""Tests workspaces, which outlive launches, on the host. A stream is an integer here, and each test sets whether it is captured."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from tokenspeed_kernel_base.workspace import Keeper, Workspace

CPU = torch.device("cpu")


class Pretended:
    """A `Keeper` of workspaces on the host, with fake streams."""

    def __init__(self, arena: int = 1000) -> None:
        self.capturing = False
        self.waited: list[int] = []
        self.keeper = Keeper(arena, capturing=lambda: self.capturing, device_of=lambda device: CPU, wait=self.waited.append)


@pytest.fixture
def pretended() -> Pretended:
    return Pretended()


def _places(found: Workspace) -> range:
    return range(found.counters_at, found.counters_at + 4 * found.count)


def test_it_is_kept_for_each_stream(pretended: Pretended) -> None:
    get = pretended.keeper.get
    first = get(0, 1, 400, 10)
    assert get(0, 1, 200, 10) is first
    others = [get(0, 2, 200, 10), get(1, 1, 200, 10)]
    assert len({found.memory_at for found in (first, *others)}) == 3
    assert (first.nbytes, first.count) == (400, 10)
    assert (first.memory.data_ptr(), first.counters.data_ptr()) == (first.memory_at, first.counters_at)
    assert (first.memory.dtype, first.counters.dtype) == (torch.uint8, torch.int32)
    assert pretended.waited == [0, 1], "once for each device's arena"


def test_it_grows_on_demand(pretended: Pretended) -> None:
    get = pretended.keeper.get
    first = get(0, 1, 400, 10)
    larger = get(0, 1, 401, 5)
    assert (larger.nbytes, larger.count) == (800, 10)
    assert not larger.counters.any()
    assert pretended.keeper._outgrown == [first], "a kernel may be using it"
    assert get(0, 1, 400, 10) is get(0, 1, 800, 10) is larger
    assert get(0, 1, 5000, 30).nbytes == 5000
    grown = [get(0, 3, size, 0) for size in range(1, 2000)]
    assert len({id(found) for found in grown}) <= 12, "in few steps"


def test_captured_launches_share_no_counters(pretended: Pretended) -> None:
    """Asserts that each captured launch has its own counters, although all captures of PyTorch use the same stream. Counters must
    still be available after the arena is used up."""
    get = pretended.keeper.get
    eager = [get(0, 1, 100, 30)]
    found = []
    for _ in range(5):
        pretended.capturing = True
        found += [get(0, 7, 100, 30) for _ in range(25)]
        pretended.capturing = False
        eager.append(get(0, 1, 100, 30))
    assert all(one is eager[0] for one in eager)
    assert not any(one.counters.any() for one in found)
    taken = sorted((_places(one) for one in [eager[0], *found]), key=lambda places: places.start)
    assert all(before.stop <= after.start for before, after in itertools.pairwise(taken))


def test_counters_of_captured_launches_are_aligned(pretended: Pretended) -> None:
    """Asserts that all addresses have the same alignment, because Triton compiles a program for each alignment of an argument."""
    pretended.keeper.get(0, 1, 64, 8)
    pretended.capturing = True
    for count in (2, 1, 16, 3, 5, 8):
        workspace = pretended.keeper.get(0, 1, 64, count)
        assert workspace.counters_at % 16 == 0
        assert len(workspace.counters) == count


def test_a_capture_without_a_call_before(pretended: Pretended) -> None:
    pretended.capturing = True
    first, second = (pretended.keeper.get(0, 7, 100, 30) for _ in range(2))
    assert not first.counters.any()
    assert first.counters_at != second.counters_at
    assert len(pretended.keeper._outgrown) == 2, "their memory stays theirs"
    pretended.capturing = False
    assert pretended.keeper.get(0, 7, 100, 30) not in (first, second)


def test_more_than_an_arena_holds(pretended: Pretended) -> None:
    pretended.keeper.get(0, 1, 0, 5000)
    pretended.capturing = True
    assert pretended.keeper.get(0, 7, 0, 4000).count == 4000
    assert not pretended.keeper._outgrown, "an arena holds at least as much as was asked for by the call that provided it"


def test_nothing_is_captured_on_the_default_stream() -> None:
    def fails() -> bool:
        raise AssertionError("asked without need")

    keeper = Keeper(capturing=fails, device_of=lambda device: CPU, wait=lambda device: None)
    assert keeper.get(0, 0, 10, 1) is keeper.get(0, 0, 10, 1)
    with pytest.raises(AssertionError, match="without need"):
        keeper.get(0, 1, 10, 1)


def test_a_host_without_a_device() -> None:
    keeper = Keeper(16)
    assert keeper.get(-1, 0, 10, 1).memory.device == CPU
    assert keeper.standing(-1, 0, 10).tolist() == [0] * 10


def test_standing_memory(pretended: Pretended) -> None:
    standing = pretended.keeper.standing
    pretended.capturing = True
    with pytest.raises(RuntimeError, match=r"on cpu once before a graph.*100 bytes"):
        standing(0, 7, 100)
    pretended.capturing = False
    first = standing(0, 7, 100)
    assert first.tolist() == [0] * 100
    first[3] = 1
    assert standing(0, 7, 80) is first
    assert standing(0, 8, 100) is not first
    pretended.capturing = True
    assert standing(0, 8, 100) is first, "that of the first call"
    with pytest.raises(RuntimeError, match="it needs 200 bytes"):
        standing(0, 8, 200)
    pretended.capturing = False
    larger = standing(0, 7, 200)
    assert larger.shape == (200,)
    assert pretended.keeper._standing[0][7] == [first, larger], "a graph may name the first"


def test_threads_get_one_workspace_for_one_stream(pretended: Pretended) -> None:
    """Asserts that threads share one workspace if they launch on one stream. These launches run one after the other on the
    device."""
    found: list[Workspace] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.append(pretended.keeper.get(0, 1, 64, 8))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1

"""Barriers in shared memory, between the warps that load tiles and the warps that compute with them.

A ring has a fixed number of stages. A producer waits until a stage is empty, says how many bytes will arrive, and starts the bulk
copies; the copies themselves complete the barrier. A consumer waits until the stage is full, and releases it when it has read it.
A barrier has a phase bit that flips each time it completes, so whoever waits names the phase that must have ended. `Cursor` holds
the stage and that phase together.

All containers are frozen dataclasses: CuteDSL carries those through loops only where they are assigned.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute


@dataclass(frozen=True)
class Cursor:
    """A position in a ring: the stage, and the phase of its barrier that is waited for."""

    stage: Int32
    phase: Int32


def first_to_fill() -> Cursor:
    """Where a producer begins. Stages that were never filled count as released."""
    return Cursor(Int32(0), Int32(1))


def first_to_read() -> Cursor:
    """Where a consumer begins."""
    return Cursor(Int32(0), Int32(0))


def nth_to_fill(index: Int32, stages: int) -> Cursor:
    """The producer's ``index``-th stage, where the index is counted anyway."""
    return Cursor(index % stages, (index // stages + 1) % 2)


def nth_to_read(index: Int32, stages: int) -> Cursor:
    """A consumer's ``index``-th stage, where the index is counted anyway."""
    return Cursor(index % stages, index // stages % 2)


@cute.jit
def advance(at: Cursor, stages: cutlass.Constexpr[int]) -> Cursor:
    """The next stage."""
    stage, phase = at.stage + 1, at.phase
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return Cursor(stage, phase)


@cute.jit
def last_filled(at: Cursor, stages: cutlass.Constexpr[int]) -> Cursor:
    """What a producer waits for (`Pipeline.acquire`) until all is released that it has filled. ``at``: where it would go on."""
    stage, phase = at.stage - 1, at.phase ^ 1
    if stage < 0:
        stage = Int32(stages - 1)
        phase ^= 1
    return Cursor(stage, phase)


@cute.jit
def skip(at: Cursor, step: cutlass.Constexpr[int], stages: cutlass.Constexpr[int]) -> Cursor:
    """Some stages on, where others have those in between. ``step``: at most all."""
    stage, phase = at.stage + step, at.phase
    if stage >= stages:
        stage -= stages
        phase ^= 1
    return Cursor(stage, phase)


@dataclass(frozen=True)
class Barriers:
    """A barrier for each stage of a ring.

    Attributes:
        first: that of stage 0.
    """

    first: cute.Pointer

    def init(self, stage: int, arrivals: int) -> None:
        """Makes a stage's barrier one whose phase ends after so many arrivals. By one thread, before anyone uses it."""
        cute.arch.mbarrier_init(self.first + stage, arrivals)

    def of(self, at: Cursor) -> cute.Pointer:
        """The barrier of a stage, for a bulk copy to complete."""
        return self.first + at.stage

    def wait(self, at: Cursor) -> None:
        """Waits until the phase that the cursor names has ended."""
        cute.arch.mbarrier_wait(self.first + at.stage, at.phase)

    def poll(self, at: Cursor) -> Boolean:
        """Whether that phase has ended."""
        return cute.arch.mbarrier_test_wait(self.first + at.stage, at.phase)

    def arrive(self, at: Cursor) -> None:
        """The calling lane arrives."""
        cute.arch.mbarrier_arrive(self.first + at.stage)

    def expect(self, at: Cursor, count: int | Int32) -> None:
        """The calling lane arrives, and the phase ends only when bulk copies have brought so many bytes."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.first + at.stage, count)


@dataclass(frozen=True)
class Pipeline:
    """A ring with one producer warp.

    Attributes:
        full: completed by the producer's copies.
        empty: completed by the consumers, each of which arrives once a stage.
    """

    full: Barriers
    empty: Barriers

    def init(self, stage: int, consumers: int) -> None:
        """Makes a stage's barriers, for one producer and some consumers. By one thread, before anyone uses them."""
        self.full.init(stage, 1)
        self.empty.init(stage, consumers)

    def acquire(self, at: Cursor) -> None:
        """The producer waits until a stage is empty."""
        self.empty.wait(at)

    def commit(self, at: Cursor, count: int | Int32) -> None:
        """The producer's calling lane says how many bytes its copies will bring."""
        self.full.expect(at, count)

    def wait(self, at: Cursor) -> None:
        """A consumer waits until a stage is full."""
        self.full.wait(at)

    @cute.jit
    def release(self, at: Cursor) -> None:
        """A consumer warp is done with a stage; one of its lanes says so."""
        barrier = self.empty.of(at)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)


def pipeline(full: Any, empty: Any) -> Pipeline:
    """A ring whose barriers lie in these members of a shared-memory struct."""
    return Pipeline(Barriers(full.data_ptr()), Barriers(empty.data_ptr()))

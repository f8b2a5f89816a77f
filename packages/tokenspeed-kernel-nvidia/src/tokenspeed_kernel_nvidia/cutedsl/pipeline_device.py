"""mbarrier pipelines between the producer warp that loads tiles and the consumer warps that compute on them.

A ring buffer has a fixed number of stages. The producer waits until a stage is empty, arrives on the stage's full barrier with the
number of expected bytes, and issues the bulk copies. The full barrier completes when all of these bytes have arrived. A consumer
waits until the stage is full. When the consumer has read the stage, it arrives on the stage's empty barrier. An mbarrier has a
phase bit that flips at each completion. So a wait names the phase that must have ended. `Cursor` holds the stage and that phase.

All containers are frozen dataclasses. CuteDSL makes a frozen dataclass a loop-carried value only if the loop assigns it.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute


@dataclass(frozen=True)
class Cursor:
    """A position in a ring buffer: the stage, and the phase of the stage's barrier that must end before the stage is used."""

    stage: Int32
    phase: Int32


def first_to_fill() -> Cursor:
    """Returns the cursor of the first stage that the producer fills. Its phase makes stages that were never filled count as
    empty."""
    return Cursor(Int32(0), Int32(1))


def first_to_read() -> Cursor:
    """Returns the cursor of the first stage that a consumer reads."""
    return Cursor(Int32(0), Int32(0))


def nth_to_fill(index: Int32, stages: int) -> Cursor:
    """Returns the cursor of the ``index``-th stage that the producer fills, counted from 0, for callers that keep a running
    index."""
    return Cursor(index % stages, (index // stages + 1) % 2)


def nth_to_read(index: Int32, stages: int) -> Cursor:
    """Returns the cursor of the ``index``-th stage that a consumer reads, counted from 0, for callers that keep a running index."""
    return Cursor(index % stages, index // stages % 2)


@cute.jit
def advance(at: Cursor, stages: cutlass.Constexpr[int]) -> Cursor:
    """Returns the cursor of the next stage."""
    stage, phase = at.stage + 1, at.phase
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return Cursor(stage, phase)


@cute.jit
def last_filled(at: Cursor, stages: cutlass.Constexpr[int]) -> Cursor:
    """Returns the cursor of the last filled stage, for the producer: once `Pipeline.acquire` of it returns, consumers have released
    all stages. ``at``: the cursor of the next stage to fill."""
    stage, phase = at.stage - 1, at.phase ^ 1
    if stage < 0:
        stage = Int32(stages - 1)
        phase ^= 1
    return Cursor(stage, phase)


@cute.jit
def skip(at: Cursor, step: cutlass.Constexpr[int], stages: cutlass.Constexpr[int]) -> Cursor:
    """Returns the cursor ``step`` stages further, for a warp that skips the stages in between because other warps use them.
    ``step`` is at most ``stages``."""
    stage, phase = at.stage + step, at.phase
    if stage >= stages:
        stage -= stages
        phase ^= 1
    return Cursor(stage, phase)


@cute.jit
def issued_before(at: Cursor, step: cutlass.Constexpr[int], stages: cutlass.Constexpr[int]) -> Cursor:
    """Returns the cursor with which a consumer reads the stage that was filled ``step`` stages earlier, for a producer that waits
    until that stage's copies have arrived. ``at``: the cursor of the next stage to fill; ``step`` is at most ``stages``."""
    stage, phase = at.stage - step, at.phase ^ 1
    if stage < 0:
        stage += stages
        phase ^= 1
    return Cursor(stage, phase)


@dataclass(frozen=True)
class Barriers:
    """One mbarrier for each stage of a ring buffer.

    Attributes:
        first: the barrier of stage 0.
    """

    first: cute.Pointer

    def init(self, stage: int, arrivals: int) -> None:
        """Initialises a stage's barrier to complete after ``arrivals`` arrivals. Called by one thread, before any use."""
        cute.arch.mbarrier_init(self.first + stage, arrivals)

    def of(self, at: Cursor) -> cute.Pointer:
        """Returns the barrier of the cursor's stage, to pass to a bulk copy."""
        return self.first + at.stage

    def wait(self, at: Cursor) -> None:
        """Waits until the cursor's phase of the stage's barrier has ended."""
        cute.arch.mbarrier_wait(self.first + at.stage, at.phase)

    def poll(self, at: Cursor) -> Boolean:
        """Whether the cursor's phase of the stage's barrier has ended, without waiting."""
        return cute.arch.mbarrier_test_wait(self.first + at.stage, at.phase)

    def arrive(self, at: Cursor) -> None:
        """The calling lane arrives on the stage's barrier."""
        cute.arch.mbarrier_arrive(self.first + at.stage)

    def expect(self, at: Cursor, count: int | Int32) -> None:
        """The calling lane arrives on the stage's barrier and expects ``count`` bytes: the phase ends only after bulk copies have
        delivered these bytes."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.first + at.stage, count)


@dataclass(frozen=True)
class Pipeline:
    """A ring buffer with one producer warp.

    Attributes:
        full: the barriers that the producer and its copies complete.
        empty: the barriers that the consumer warps complete; each warp arrives once per filled stage.
    """

    full: Barriers
    empty: Barriers

    def init(self, stage: int, consumers: int) -> None:
        """Initialises a stage's barriers for one producer and ``consumers`` consumers. Called by one thread, before any use."""
        self.full.init(stage, 1)
        self.empty.init(stage, consumers)

    def acquire(self, at: Cursor) -> None:
        """The producer waits until a stage is empty."""
        self.empty.wait(at)

    def commit(self, at: Cursor, count: int | Int32) -> None:
        """The producer's calling lane arrives on the full barrier and expects ``count`` bytes from its copies."""
        self.full.expect(at, count)

    def wait(self, at: Cursor) -> None:
        """A consumer waits until a stage is full."""
        self.full.wait(at)

    @cute.jit
    def release(self, at: Cursor) -> None:
        """A consumer warp releases a stage: one lane arrives on the stage's empty barrier."""
        barrier = self.empty.of(at)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)


def pipeline(full: Any, empty: Any) -> Pipeline:
    """Returns a `Pipeline` whose full and empty barriers are these two members of a shared-memory struct."""
    return Pipeline(Barriers(full.data_ptr()), Barriers(empty.data_ptr()))

"""Benchmarks of kernels on their operators' cases, the inputs of the tests. Results are verified before kernels are timed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenspeed_kernel.workbench import worlds
from tokenspeed_kernel.workbench.benchmark.baselines import Baseline, Unsupported, verify_baseline
from tokenspeed_kernel.workbench.benchmark.machine import GpuState, Monitor, gpu_monitor, reference_time
from tokenspeed_kernel.workbench.benchmark.noise import warnings_of
from tokenspeed_kernel.workbench.benchmark.results import Launch, Method, Row
from tokenspeed_kernel.workbench.benchmark.roofline import Roofline, share_of
from tokenspeed_kernel.workbench.benchmark.timing import Call, Timing, default_cache, host_time, sample, sample_graph
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Status, default_device, verify_case
from tokenspeed_kernel_base.cases import Case, Cost, nbytes
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

_COPIED_BYTES = 8 << 30
# The fewest and the most timed calls per row, over all rounds.
_FEWEST, _MOST = 10, 1000
# Seconds and calls for measuring launch overhead.
_LAUNCH_BUDGET_S, _LAUNCHES = 0.01, 20
# In a graph that runs this long (microseconds), the launch of the graph is a negligible part of the time. A longer graph would
# measure no better.
_GRAPH_US = 5000.0

Competitor = KernelSpec | Baseline


def bench_kernel(
    spec: Competitor,
    cases: Iterable[Case] | None = None,
    device: torch.device | str | None = None,
    *,
    large: bool = False,
    **options: Any,
) -> list[Row]:
    """Times a registered kernel on its operator's cases, one row per case.

    Args:
        spec: the kernel's declaration, from the registry; or a baseline.
        cases: the cases to run; the operator's if not given.
        device: the device; `default_device` if not given.
        large: whether to include the operator's cases that are sized for a GPU. Has no effect if ``cases`` is given.
        options: fields of the `Method`, by name.
    """
    if cases is None:
        cases = [case for case in get_operator(spec.operator).all_cases() if large or not case.large]
    return bench([(spec, case) for case in cases], device, **options)


def bench_case(spec: Competitor, case: Case, device: torch.device | str | None = None, **options: Any) -> Row:
    """Times a registered kernel or a baseline on one case. See `bench`."""
    return bench([(spec, case)], device, **options)[0]


def bench(runs: Sequence[tuple[Competitor, Case]], device: torch.device | str | None = None, **options: Any) -> list[Row]:
    """Times kernels on cases for which their results are correct. Returns a row for each kernel and case in ``runs``, in order.

    For a registered kernel, the timed function is what `Operator.bind` returns; for a baseline, what `Baseline.bound` returns. The
    time includes the allocation of outputs, but not dispatch.

    Args:
        runs: pairs of a kernel or baseline and a case.
        device: the device; `default_device` if not given.
        options: fields of the `Method`, by name.
    """
    where = default_device() if device is None else torch.device(device)
    method = method_for(where, **options)
    measurements = [Measurement(competitor, case, where, method) for competitor, case in runs]
    run_rounds(measurements)
    return rows_of(measurements)


def method_for(device: torch.device, **options: Any) -> Method:
    """Returns a `Method` with defaults for the device.

    The default is cold caches on a GPU. With cold caches, each call in a CUDA graph has its own copy of the inputs. So each call
    finds cold caches.
    """
    cache = options.pop("cache", None) or default_cache(device)
    copies = options.pop("copies", None) or (max(options.get("graph_calls", 0), 1) if cache == "cold" else 1)
    return Method(cache=cache, copies=copies, **options)


def run_rounds(
    measurements: Sequence[Measurement], begin: Callable[[str], None] = lambda step: None, after: Callable[[], None] = lambda: None
) -> None:
    """Measures report rows in rounds: every row once, then every row again, and so on. So a slow drift of the machine makes a
    row's rounds differ, and is noticed.

    Args:
        measurements: one measurement per row, all with the same `Method`. `rows_of` converts measurements to report rows, and can
            do so after any step.
        begin: called before each step with the step's name. There are rows x rounds steps.
        after: called after each step.
    """
    monitors = {device: gpu_monitor(device) for device in {measurement.device for measurement in measurements}}
    for index in range(max((measurement.method.rounds for measurement in measurements), default=0)):
        for each in measurements:
            begin(f"{each.competitor.name}: {each.case.name}" + f", round {index + 1}" * bool(index))
            if index == 0:
                each.verify()
            each.add_round(monitors[each.device])
            after()


def rows_of(measurements: Iterable[Measurement], roofline: Roofline | None = None) -> list[Row]:
    """Returns a report row for each measurement that has started. ``roofline``: the peak rates, for each row's fraction of peak."""
    measurements = [measurement for measurement in measurements if measurement.status]
    times = [time_us for measurement in measurements for time_us in measurement.reference_us]
    usual_us = statistics.median(times) if times else None
    return [measurement.row(roofline, usual_us) for measurement in measurements]


@dataclass
class Measurement:
    """The measurement of a report row, while it is in progress."""

    competitor: Competitor
    case: Case
    device: torch.device
    method: Method
    status: str = ""
    reason: str = ""
    rounds: list[list[float]] = field(default_factory=list)
    reference_us: list[float] = field(default_factory=list)
    states: list[GpuState] = field(default_factory=list)
    cost: Cost | None = None
    operands: tuple[torch.dtype, ...] = ()
    launch: Launch | None = None

    def verify(self) -> None:
        """Verifies the results of the kernel or baseline. If they are wrong, the kernel or baseline is not timed."""
        result: CaseResult
        if isinstance(self.competitor, Baseline):
            result = verify_baseline(self.competitor, self.case, self.device)
        else:
            result = verify_case(self.competitor, self.case, self.device)
        passed = result.status is Status.PASSED
        self.status, self.reason = ("measured", "") if passed else (result.status.value, result.reason)

    def add_round(self, monitor: Monitor | None) -> None:
        if self.status != "measured":
            return
        if self.case.world_size > 1 and worlds.current_size() == 1:
            if not self.rounds:  # the first round starts the processes, and they measure all rounds
                self._measure_in_world()
            return
        try:
            self.reference_us.append(reference_time(self.device))
            with torch.no_grad():
                self._time(self._calls(), monitor)
        except Unsupported as reason:
            self.status, self.reason = Status.SKIPPED.value, str(reason)
        except Exception as error:  # for example out of memory; further rows must still be measured
            self.status, self.reason = Status.ERROR.value, f"while timing: {type(error).__name__}: {error}"

    def _measure_in_world(self) -> None:
        """Measures all rounds in one process per rank. The slowest rank's times are kept, because a call is done when all ranks are
        done.
        """
        if isinstance(self.competitor, Baseline):
            self.status, self.reason = Status.SKIPPED.value, "baselines are timed in one process"
            return
        args = self.competitor.name, self.case.name, self.device.type, self.method
        try:
            measured = worlds.run_world(_measure_as_rank, self.case.world_size, args, device=self.device)
        except worlds.WorldError as error:
            self.status, self.reason = Status.ERROR.value, f"while timing: {str(error).splitlines()[-1]}"
            return
        slowest = max(measured, key=lambda each: statistics.median(t for times in each["rounds"] for t in times))
        for name, value in slowest.items():
            setattr(self, name, value)

    def _calls(self) -> list[Call]:
        """Returns calls on the case's arguments and on copies of them: `Method.copies` calls, or as many as fit in
        `_COPIED_BYTES`.
        """
        op = get_operator(self.competitor.operator)
        arguments = op.complete(self.case.build(self.device))
        if isinstance(self.competitor, KernelSpec):
            arguments = op.prepared(arguments, self.competitor)
        if not self.rounds:
            self.cost = op.cost_of(arguments) if op.has_hook("cost") else None
            self.operands = tuple(fmt.storage_dtype for _, fmt in op.request(arguments).signature.roles)
        of_one = sum(nbytes(tensor) for _, tensor in tensor_arguments(op.parameters, arguments))
        count = max(1, min(self.method.copies, _COPIED_BYTES // max(of_one, 1)))
        copies = [arguments, *(copy.deepcopy(arguments) for _ in range(count - 1))]
        if isinstance(self.competitor, Baseline):
            return [self.competitor.bound(each) for each in copies]
        kernel = op.function.bind(*arguments.values(), override=self.competitor.name)
        return [functools.partial(kernel, *each.values()) for each in copies]

    def _time(self, calls: list[Call], monitor: Monitor | None) -> None:
        method, rounds = self.method, self.method.rounds

        def look() -> None:
            if monitor is not None:
                state = monitor()
                self.states += [state] if state is not None else []

        options: dict[str, Any] = {
            "budget_s": method.budget_s / rounds,
            "cache": method.cache,
            "fewest": max(3, -(-_FEWEST // rounds)),
            "most": -(-_MOST // rounds),
            "expected_us": worlds.agreed(statistics.median(self.rounds[0])) if self.rounds else self._expected_us(calls),
            "meanwhile": look,
        }
        if self.launch is None and (self.device.type == "cuda" or method.graph_calls):
            expected_us = self._expected_us(calls)
            alone = sample(
                calls, self.device, budget_s=_LAUNCH_BUDGET_S, cache=method.cache, most=_LAUNCHES, expected_us=expected_us
            )
            self.launch = Launch(host_time(calls[0], self.device, _LAUNCHES), worlds.agreed(statistics.median(alone)))
        if method.graph_calls:
            assert self.launch is not None
            count = min(method.graph_calls, math.ceil(_GRAPH_US / self.launch.event_us))
            in_graph = [calls[index % len(calls)] for index in range(count)]
            self.rounds.append(sample_graph(in_graph, self.device, **options))
        else:
            self.rounds.append(sample(calls, self.device, **options))

    def _expected_us(self, calls: list[Call]) -> float | None:
        """Estimates the time of a call with several ranks. All ranks must make the same number of calls, so they agree on one
        estimate.

        Returns None with one rank, where `sample` estimates the time itself.
        """
        if worlds.current_size() == 1:
            return None
        few = sample(calls, self.device, budget_s=0.0, cache=self.method.cache, fewest=3, most=3, expected_us=1.0)
        return worlds.agreed(statistics.median(few))

    def row(self, roofline: Roofline | None, usual_us: float | None) -> Row:
        known = Row(
            self.competitor.name,
            self.competitor.operator,
            self.case.name,
            self.status,
            self.reason,
            solution=self.competitor.solution,
            version=self.competitor.version if isinstance(self.competitor, Baseline) else "",
        )
        if self.status != "measured" or not self.rounds:
            return known
        timing, cost = Timing.of(self.rounds), self.cost
        return dataclasses.replace(
            known,
            timing=timing,
            tflops=cost.flops / timing.median_us / 1e6 if cost else None,
            gb_per_s=cost.bytes / timing.median_us / 1e3 if cost else None,
            share=share_of(cost, timing.median_us, self.operands, roofline) if cost and roofline else None,
            launch=self.launch and self._launch(self.launch, timing),
            warnings=warnings_of(timing, self.states, self.reference_us, usual_us),
            reference_us=tuple(float(f"{time_us:.5g}") for time_us in self.reference_us),
            state=min(self.states, key=lambda state: state.sm_clock_mhz, default=None),
        )

    def _launch(self, launch: Launch, timing: Timing) -> Launch:
        return dataclasses.replace(launch, graph_us=timing.median_us) if self.method.graph_calls else launch


def _measure_as_rank(kernel: str, case_name: str, device: str, method: Method) -> dict[str, Any]:
    """Measures a kernel as one of several ranks, and returns the attributes of the resulting `Measurement` by name."""
    spec = KernelRegistry.get().get_by_name(kernel)
    case = next(case for case in get_operator(spec.operator).all_cases() if case.name == case_name)
    measurement = Measurement(spec, case, default_device() if device == "cuda" else torch.device(device), method, "measured")
    for _ in range(method.rounds):
        measurement.add_round(None)
        if measurement.status != "measured":  # the error ends all ranks, which would otherwise wait for this rank
            raise RuntimeError(measurement.reason)
    kept = ("rounds", "reference_us", "cost", "operands", "launch")
    return {name: getattr(measurement, name) for name in kept}

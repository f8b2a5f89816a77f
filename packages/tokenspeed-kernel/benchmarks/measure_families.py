"""Measures the families of operators in `families.py` and the best available baselines, at the sizes of real models, on one GPU and
within a time limit.

python packages/tokenspeed-kernel/benchmarks/measure_families.py --output packages/tokenspeed-kernel/benchmarks/h200_families.json
python packages/tokenspeed-kernel/benchmarks/measure_families.py --family sampling --site FOLDER --check --output sampling.json
python packages/tokenspeed-kernel/benchmarks/table.py  # prints the report's tables

The script measures every eligible kernel, and every baseline of ``family_baselines.py`` and ``family_baselines_vllm.py`` that can
be imported; ``--site`` adds folders to Python's search path. Each result is first compared with the result of the operator's
reference. If the reference takes too long, results are compared with the first kernel's. ``checked`` in the report names what a
result was compared with. A kernel or baseline whose result is beyond the tolerance is not timed.

A CUDA graph of several calls is timed. The calls use different copies of the arguments in turn. The copies together are more than
twice as large as the L2 cache, so caches are cold for each call. Caches are not flushed by writes, because the timed calls would
then have to write back dirty lines. The graphs of all kernels and baselines alternate. The reported time is that of one call: the
median over all rounds.

Operators alternate, so each operator has results if ``--seconds`` ends the run. Baselines that tune themselves get
``--baseline-seconds`` for their first call; their tuning results stay in Triton's cache. ``--check`` compiles and checks, but does
not time. It stores no tuning results, because other processes may use the device at the same time. ``--checked`` reads a report
that ``--check`` wrote for the same commit, and skips the checks that passed there. So families can be checked in parallel and
measured one after another. The roofline is measured last.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import family_baselines
import family_baselines_vllm
from bounded import OutOfTimeError, tune_quickly, within
from families import FAMILIES, Shape, shapes
from family_baselines import InForm

from tokenspeed_kernel.workbench.benchmark import Baseline, Method, Report, Row, Unsupported, as_text, failure_of, measure_roofline
from tokenspeed_kernel.workbench.benchmark.runner import absent_of, lost, metadata_of, with_times
from tokenspeed_kernel.workbench.benchmark.timing import captured, sample
from tokenspeed_kernel.workbench.numerics.compare import decoded_outputs, same_bits
from tokenspeed_kernel.workbench.numerics.tolerance import tolerance_for
from tokenspeed_kernel.workbench.numerics.verify import refusal, written_to
from tokenspeed_kernel_base.cases import nbytes
from tokenspeed_kernel_base.lowering import as_list
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.signature import Decoded
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_base.storage import replace_file

Call = Callable[[], Any]
Arguments = dict[str, Any]

# Calls use copies of the arguments in turn, so that a call does not find its arguments in the L2 cache (50 MB on an H200). There
# are so many copies that calls touch _TOUCHED bytes before a copy is used again, but at most _COPIES copies. Together they have at
# most _COPIED_BYTES bytes, but there are always at least two.
_TOUCHED, _COPIES, _COPIED_BYTES = 130e6, 384, 30 << 30
# The minimum duration of a graph's replay in microseconds. The launch of such a graph is negligible.
_GRAPH_US = 1500.0
# The time limit of a reference, in seconds.
_CHECK_S = 5.0
# The relative errors of results that passed the check in earlier runs, by operator, case and kernel.
Known = Mapping[tuple[str, str, str], float]

# If fewer seconds than this are left, no further call is measured.
_LEAST_S = 1.0


@dataclass
class Implementation:
    """A kernel or a baseline, and its measurements of one call so far.

    Attributes:
        who: the kernel's declaration, or the baseline.
        status: the outcome so far, see `Row`.
        error: the largest relative error of an output, see `relative_error`; None if unknown or not finite.
        checked: what the results were compared with: "reference", or a kernel's name. "before" if they passed the check in a
            ``--check`` run.
    """

    who: KernelSpec | Baseline
    status: str = "measured"
    reason: str = ""
    error: float | None = None
    checked: str = ""
    rounds: list[list[float]] = field(default_factory=list)
    replay: Call | None = None
    calls: int = 1

    def guarded(self, step: Callable[[], None]) -> None:
        """Runs a step of the measurement, unless an earlier step failed. An error is recorded as the status."""
        if self.status == "measured":
            failure = failure_of(step, {OutOfTimeError: "no time"})
            self.status, self.reason = failure or (self.status, self.reason)

    def bound(self, op: Operator[Any, Any], arguments: Arguments) -> Call:
        """Returns a callable that runs the kernel or baseline on these arguments."""
        if isinstance(self.who, Baseline):
            refused = self.who.refusal(op, arguments)
            if refused is not None:
                raise Unsupported(refused)
            return self.who.bound(arguments)
        given = op.prepared(arguments, self.who)
        return functools.partial(op.function.bind(*given.values(), override=self.who.name), *given.values())


@dataclass(frozen=True)
class Effort:
    """The time that measurements may take.

    Attributes:
        rounds: rounds of timing; 0 to check outputs only.
        budget_s: seconds for timing one kernel or baseline in one round.
        baseline_s: seconds that a baseline may take for its first call.
        end: when to stop, in seconds of `time.monotonic`.
    """

    rounds: int
    budget_s: float
    baseline_s: float
    end: float

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def implementations(op: Operator[Any, Any], arguments: Arguments, without: str) -> list[Implementation]:
    """Returns the kernels that are eligible for a call, without the reference, and the operator's baselines. Those whose name
    matches the regular expression ``without`` are left out."""
    specs = KernelRegistry.get().get_for_operator(op.family, op.mode)
    kernels = [spec for spec in specs if not spec.is_reference and refusal(op, spec, arguments) is None]
    values = [value for module in (family_baselines, family_baselines_vllm) for value in vars(module).values()]
    baselines = {value.name: value for value in values if isinstance(value, Baseline) and value.operator == str(op)}
    everyone = [*map(Implementation, kernels), *map(Implementation, baselines.values())]
    return [each for each in everyone if not (without and re.search(without, each.who.name))]


# -- checking ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The outputs that a call must have, and the contents that its mutated arguments must have after the call. ``by``: what
    computed these values, "reference" or a kernel's name.
    """

    outputs: list[Tensor]
    written: Mapping[str, Tensor]
    by: str


def relative_error(got: Any, expected: Tensor) -> float:
    """Returns the norm of the difference divided by the norm of the expected tensor. Infinite if shape, dtype or non-finite values
    differ."""
    if not isinstance(got, Tensor) or (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return math.inf
    if same_bits(got, expected):
        return 0.0
    if not expected.is_floating_point():
        return math.inf
    given, wanted = got.float(), expected.float()
    finite = wanted.isfinite()
    if not bool((finite | (given == wanted) | (given.isnan() & wanted.isnan())).all()):
        return math.inf
    difference, size = (torch.linalg.vector_norm(x.where(finite, 0.0)) for x in (given - wanted, wanted))
    error = float(difference / size) if difference else 0.0
    return error if math.isfinite(error) else math.inf


def check(op: Operator[Any, Any], implementation: Implementation, arguments: Arguments, got: Any, expected: Expected) -> None:
    """Compares the result ``got`` of a kernel or baseline with the expected one, and records error and status in
    ``implementation``.

    A kernel's mutated arguments are compared, too. A baseline's mutated arguments are compared only if the operator has no outputs,
    because a baseline may write elsewhere. Only the relative error of a whole tensor is checked, because among millions of elements
    some may exceed the tolerance for single elements. `verify` checks single elements.
    """
    implementation.checked = expected.by
    if len(as_list(got)) != len(expected.outputs):
        implementation.status, implementation.reason = (
            "failed",
            f"it gives {len(as_list(got))} tensors, not {len(expected.outputs)}",
        )
        return
    request = op.request(arguments)
    pairs: list[tuple[Any, Any]] = list(zip(as_list(got), expected.outputs, strict=True))
    exact = op.exact
    if op.has_hook("decoded") and not exact:
        pairs = list(zip(*(decoded_outputs(op, arguments, side) for side in (as_list(got), expected.outputs)), strict=True))
    if isinstance(implementation.who, KernelSpec) or not pairs:
        written = written_to(op, arguments)
        pairs += [(written[name], wanted) for name, wanted in expected.written.items()]
    worst = 0.0
    for value, wanted in pairs:
        kind = wanted.format if isinstance(wanted, Decoded) else wanted.dtype
        values = (value.values, wanted.values) if isinstance(wanted, Decoded) else (value, wanted)
        error, limit = relative_error(*values), tolerance_for(kind, request, exact=exact).norm
        worst = max(worst, error)
        if error > limit:
            implementation.status, implementation.reason = "failed", f"relative error {error:.2g} is above {limit:.2g}"
    implementation.error = worst if math.isfinite(worst) else None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def expected_of(op: Operator[Any, Any], arguments: Arguments, seconds: float) -> Expected | None:
    """Runs the reference on copies of the arguments. Returns None if the reference takes longer than ``seconds`` or runs out of
    memory."""
    twin = copy.deepcopy(arguments)
    try:
        with within(seconds), torch.no_grad():
            outputs = as_list(op.reference(*twin.values()))
            _synchronize(next(iter(tensor_arguments(op.parameters, twin)))[1].device)
    except (OutOfTimeError, torch.OutOfMemoryError):
        return None
    return Expected(outputs, written_to(op, twin), "reference")


# -- timing ------------------------------------------------------------------------------------------------------------------------


def copies_of(op: Operator[Any, Any], arguments: Arguments, touched: float) -> list[Arguments]:
    """Returns the arguments and copies of them, which calls use in turn. If memory allows, there are so many copies that calls
    touch `_TOUCHED` bytes before they use a copy again. ``touched``: the bytes that one call touches."""
    held = sum(nbytes(tensor) for _, tensor in tensor_arguments(op.parameters, arguments))
    count = min(1 + math.ceil(_TOUCHED / max(touched, 1.0)), _COPIES, max(2, int(_COPIED_BYTES // max(held, 1))))
    return [arguments, *(copy.deepcopy(arguments) for _ in range(count - 1))]


def prepare(op: Operator[Any, Any], implementation: Implementation, copies: Sequence[Arguments], device: torch.device) -> None:
    """Captures a kernel's or baseline's calls on the copies of the arguments in a CUDA graph. On a CPU there are no graphs, and
    only the call on the first copy is timed. The results of one call per copy are kept alive, so these calls write to different
    memory.
    """
    kept: list[Any] = [None] * len(copies)

    def keeping(index: int, call: Call) -> Call:
        def called() -> None:
            kept[index] = call()

        return called

    calls = [keeping(index, implementation.bound(op, arguments)) for index, arguments in enumerate(copies)]
    if device.type != "cuda":
        implementation.replay = calls[0]
        return
    alone_us = statistics.median(sample(calls[0], device, budget_s=0.0, cache="warm", fewest=3, most=3))
    implementation.calls = len(calls) * max(1, math.ceil(_GRAPH_US / alone_us / len(calls)))
    implementation.replay = captured([calls[index % len(calls)] for index in range(implementation.calls)], device)


def add_round(implementation: Implementation, device: torch.device, budget_s: float) -> None:
    if implementation.replay is None:
        raise RuntimeError("it has not been prepared")
    known = statistics.median(implementation.rounds[0]) * implementation.calls if implementation.rounds else None
    times = sample(implementation.replay, device, budget_s=budget_s, cache="warm", fewest=3, most=20, expected_us=known)
    implementation.rounds.append([time_us / implementation.calls for time_us in times])


def measure(
    shape: Shape, device: torch.device, effort: Effort, without: str = "", known: Known = MappingProxyType({})
) -> tuple[list[Implementation], Any]:
    """Measures all eligible kernels and all baselines on one call. Returns the measurements and the call's cost. Kernels and
    baselines in ``known`` are not checked again."""
    op = get_operator(shape.operator)
    arguments = op.complete(shape.case.build(device))
    cost = op.cost_of(arguments)
    who = implementations(op, arguments, without)
    expected: Expected | None = None

    def first_call(implementation: Implementation) -> None:
        nonlocal expected
        twin = copy.deepcopy(arguments)
        with within(min(effort.baseline_s, effort.left)):
            call = implementation.bound(op, twin)
            got = call()
            _synchronize(device)
        error = known.get((str(op), shape.case.name, implementation.who.name))
        if error is not None:
            implementation.error, implementation.checked = error, "before"
            return
        got = call.form(got) if isinstance(call, InForm) else got
        if expected is None:
            expected = expected_of(op, arguments, min(_CHECK_S, effort.left))
        if expected is None:
            expected = Expected([value.clone() for value in as_list(got)], written_to(op, twin), implementation.who.name)
        check(op, implementation, twin, got, expected)

    for each in who:
        each.guarded(functools.partial(first_call, each))
    if not effort.rounds:
        return who, cost
    expected = None
    copies = copies_of(op, arguments, cost.bytes)
    for each in who:
        each.guarded(functools.partial(prepare, op, each, copies, device))
    for index in range(effort.rounds):
        for each in who[index % len(who) :] + who[: index % len(who)]:
            each.guarded(functools.partial(add_round, each, device, effort.budget_s))
    for each in who:
        each.replay = None  # the measurement of the next call needs the memory that graphs hold
    return who, cost


# -- the report --------------------------------------------------------------------------------------------------------------------


def rows_of(shape: Shape, who: Iterable[Implementation], cost: Any) -> Iterator[dict[str, Any]]:
    """Yields a row of the report for each kernel and baseline that was measured on a call. A row has the fields of a workbench
    `Row`, the call's family, the relative error, and whether the row is a baseline's."""
    for each in who:
        baseline, version = isinstance(each.who, Baseline), ""
        # A package that consists of files in a folder has no metadata, but may have __version__.
        if isinstance(each.who, Baseline) and each.who.package:
            version = each.who.version or getattr(sys.modules.get(each.who.name), "__version__", "")
        operator, solution = str(get_operator(shape.operator)), each.who.solution
        known = Row(each.who.name, operator, shape.case.name, each.status, each.reason, solution=solution, version=version)
        if each.rounds and each.status == "measured":
            known = with_times(known, each.rounds, cost)
        extra = {"family": shape.family, "peer": baseline, "relative_error": each.error, "checked": each.checked}
        yield {**dataclasses.asdict(known), **extra}


def line_of(shape: Shape, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line to print for a call: the time of each kernel and baseline, or the reason why there is no time."""
    said = []
    for row in rows:
        name = row["solution"]
        if row["timing"] is not None:
            rates = f"{row['gb_per_s'] / 1e3:.2f} TB/s" + (f" {row['tflops']:.0f} TF" if row["tflops"] >= 10 else "")
            said.append(f"{name} {row['timing']['median_us']:.1f} us" + (f" {rates}" if not row["peer"] else ""))
        elif row["status"] not in ("measured", "skipped", "absent"):
            said.append(f"{name} {row['status']}: {row['reason'][:90]}")
        elif row["status"] == "measured":
            said.append(f"{name} off {row['relative_error']:.1e}")
    return f"{shape.name[:76]} | " + " | ".join(said or ["nothing serves it here"])


def document(rows: Sequence[Mapping[str, Any]], report: Report, unmeasured: Sequence[Shape]) -> dict[str, Any]:
    """Returns a report that the workbench's `load_report` can read. Its rows have additional values. ``unmeasured`` lists the calls
    that the time limit left out."""
    return {**report.to_dict(), "rows": list(rows), "unmeasured": [shape.name for shape in unmeasured]}


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", default=[], choices=FAMILIES, help="this one; repeatable; all if not given")
    parser.add_argument("--only", default="", metavar="REGEX", help="calls whose operator or case matches")
    parser.add_argument("--without", default="", metavar="REGEX", help="leave out kernels and baselines whose name matches")
    where = {"action": "append", "type": Path, "default": [], "metavar": "FOLDER"}
    parser.add_argument("--site", "--peers", **where, help="a folder with further packages; repeatable")
    parser.add_argument("--seconds", type=float, default=110.0, help="of the whole run (110)")
    first_call = "of a baseline's first call, in which it may tune itself (15)"
    parser.add_argument("--baseline-seconds", "--peer-seconds", type=float, default=15.0, help=first_call)
    parser.add_argument("--check", action="store_true", help="check the outputs, time nothing")
    parser.add_argument("--checked", action="append", type=Path, default=[], metavar="FILE", help="a report of --check; repeatable")
    parser.add_argument("--list", action="store_true", help="print the calls, measure nothing")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--commit", default="", help="of this code, where it is a copy that is no checkout")
    return parser.parse_args(words)


def command_of(words: Sequence[str]) -> str:
    """Returns the command line for the report, without options that name folders and files of this machine."""
    kept, skip = [], False
    for word in words:
        private = word in ("--site", "--peers", "--output", "--commit", "--checked") and not skip
        if not skip and not private:
            kept.append(word)
        skip = private
    return shlex.join(["python", "packages/tokenspeed-kernel/benchmarks/measure_families.py", *kept])


def known_of(files: Iterable[Path], commit: str) -> Known:
    """Reads the results that passed the check from reports that ``--check`` wrote.

    Raises:
        ValueError: a report is of another commit.
    """
    known: dict[tuple[str, str, str], float] = {}
    for file in files:
        found = json.loads(file.read_text())
        if not commit or found["metadata"]["git_commit"] != commit:
            raise ValueError(f"{file} is of commit {found['metadata']['git_commit'] or 'unknown'}, this is {commit or 'unknown'}")
        right = [row for row in found["rows"] if row["status"] == "measured" and row["relative_error"] is not None]
        known |= {(row["operator"], row["case"], row["kernel"]): row["relative_error"] for row in right}
    return known


def run(given: argparse.Namespace, device: torch.device, command: str, wanted: Sequence[Shape]) -> dict[str, Any]:
    """Measures the wanted calls. Prints a line and writes the report after each call. Returns the report as JSON values."""
    begun = time.monotonic()
    rounds = 0 if given.check else 3
    effort = Effort(rounds, 0.006, given.baseline_seconds, begun + given.seconds)
    metadata = metadata_of(given, command, device)
    known = known_of(given.checked, metadata.git_commit)
    method = Method("cold" if device.type == "cuda" else "warm", 1, _COPIES, effort.budget_s * rounds, rounds)
    report = Report(metadata, (), None, method)
    rows: list[dict[str, Any]] = []
    unmeasured, broken = list(wanted), ""
    for shape in wanted:
        if broken or effort.left < _LEAST_S:
            break
        try:
            who, cost = measure(shape, device, effort, given.without, known)
        except (RuntimeError, ValueError, TypeError) as error:  # for example, the arguments exceed the memory
            print(f"{shape.name[:76]} | not measured: {type(error).__name__}: {str(error)[:90]}", flush=True)
        else:
            unmeasured.remove(shape)
            of_shape = list(rows_of(shape, who, cost))
            rows += of_shape
            print(line_of(shape, of_shape), flush=True)
            if given.output is not None:
                replace_file(given.output, as_text(document(rows, report, unmeasured)))
        broken = lost(device)
    if broken:
        print(f"stopped: {broken}")
    elif rounds and device.type == "cuda":
        report = dataclasses.replace(report, roofline=measure_roofline(device))
    print(f"{len(wanted) - len(unmeasured)} of {len(wanted)} calls in {time.monotonic() - begun:.0f} s")
    made = document(rows, report, unmeasured)
    if given.output is not None:
        replace_file(given.output, as_text(made))
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = options_of(words)
    wanted = [shape for shape in shapes(given.family or FAMILIES) if re.search(given.only, shape.name)]
    if given.list:
        print("\n".join(f"{shape.family}: {shape.name}" for shape in wanted))
        return
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    sys.path[:0] = [str(folder) for folder in given.site]
    tune_quickly(keep=not given.check)
    device = torch.device("cuda", torch.cuda.current_device())
    made = run(given, device, command_of(sys.argv[1:] if words is None else words), wanted)
    for name, reason in absent_of(made["rows"]).items():
        print(f"absent: {name}: {reason[:100]}")


if __name__ == "__main__":
    main()

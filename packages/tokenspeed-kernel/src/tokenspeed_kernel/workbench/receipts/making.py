"""Makes receipts: of a model from its configuration, and of a process from the selections that it has made."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tokenspeed_kernel.plugins import list_plugins, plugin_failures
from tokenspeed_kernel.workbench.benchmark.roofline import Roofline, share_of
from tokenspeed_kernel.workbench.benchmark.roofline_cache import kept_roofline
from tokenspeed_kernel.workbench.doctor import versions
from tokenspeed_kernel.workbench.models import (
    DECODE_SIZES,
    PREFILL_SIZES,
    Call,
    Model,
    Step,
    calls_of,
    model_of,
    steps_of,
)
from tokenspeed_kernel.workbench.numerics.recipes import asked, request_without_values
from tokenspeed_kernel.workbench.receipts.records import Receipt
from tokenspeed_kernel.workbench.receipts.rows import Passed, Row
from tokenspeed_kernel.workbench.watching import Record, ReplayError, load, replay
from tokenspeed_kernel_base import config, measured
from tokenspeed_kernel_base.cases import Cost
from tokenspeed_kernel_base.operator import get_operator, operators
from tokenspeed_kernel_base.parameters import check_types
from tokenspeed_kernel_base.platform import PlatformInfo, current_platform, driver_version
from tokenspeed_kernel_base.reach import why_unreachable
from tokenspeed_kernel_base.selection import RANKS, Explanation, Request, consider, override_in_force, selections_made
from tokenspeed_kernel_base.signature import dtype_name

_MOST_PASSED = 3  # a row names at most this many rejected kernels
# Kernels that these gates reject are for other devices, callers or formats: no call of the same model could select them.
_FOR_OTHERS = (None, "package", "solution", "platform", "formats")

Source = str | Path | Mapping[str, Any] | Model


class _Outcome(NamedTuple):
    """The selection for one call of a model at one size, and the predicted time with the prediction's source."""

    call: Call
    size: int
    explanation: Explanation
    us: float | None
    by: str


def receipt(
    model: Source | None = None,
    *,
    calls: str | Path | None = None,
    platform: PlatformInfo | None = None,
    decode_sizes: Sequence[int] = DECODE_SIZES,
    prefill_sizes: Sequence[int] = PREFILL_SIZES,
    context: int = 4096,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    activation_dtype: str = "none",
    ranks: int = 1,
    roofline: Roofline | None = None,
) -> Receipt:
    """Returns which kernel is selected for each call, why the next best kernel is not selected, and the predicted time.

    Nothing is launched, compiled or measured. Without arguments, the calls are those for which this process has selected kernels so
    far. The selection is repeated for the receipt. Predicted times come from tuned results of the kernel, else from a measured
    roofline. If there is neither, the call has no predicted time.

    Args:
        model: the name of a preset, the path of a Hugging Face config.json or its folder, or its contents.
        calls: a file of captured calls (`start_shape_capture`) instead of a model.
        platform: the platform to select for; the current one if not given.
        decode_sizes: numbers of sequences of the decode steps.
        prefill_sizes: numbers of prompt tokens of the prefills.
        context: tokens of each sequence in the cache during a decode step.
        page_size: tokens of a page of the cache.
        dtype: dtype of the model's activations.
        cache_dtype: dtype of keys and values in the cache; ``dtype`` if not given.
        activation_dtype: the format that experts quantise their inputs to, see `MoEPlan`.
        ranks: number of ranks for tensor parallelism; the calls are those of one rank, without communication.
        roofline: the device's roofline; if not given, the one that `tokenspeed-kernel bench` has measured on this device.

    Raises:
        ModelError: the model is unknown or its configuration cannot be used.
        ReplayError, UnreadableCaptureError, OSError: the file of captured calls cannot be used.
    """
    where = platform or current_platform()
    roof = kept_roofline(where) if roofline is None else roofline
    settings: dict[str, Any] = {}
    if model is not None:
        described = (model if isinstance(model, Model) else model_of(model)).on_rank(ranks)
        subject = described.name
        options = {"context": context, "page_size": page_size, "dtype": dtype, "cache_dtype": cache_dtype}
        steps = steps_of(decode_sizes, prefill_sizes, **options, activation_dtype=activation_dtype)
        rows = _model_rows(described, steps, where, roof)
        settings = {
            "context": context,
            "page_size": page_size,
            "dtype": dtype_name(dtype),
            "cache_dtype": dtype_name(cache_dtype or dtype),
            "activation_dtype": activation_dtype,
            "ranks": ranks,
        }
    elif calls is not None:
        subject = Path(calls).name
        rows = [_captured_row(record, where, roof) for record in load(calls).records]
    else:
        subject = "process"
        rows = [row_of(consider(request, override)) for request, override in selections_made()]
    packages = {plugin.package: plugin.version for plugin in list_plugins()}
    found = {**versions(), **packages, "driver": driver_version(where.vendor)}
    return Receipt(
        subject,
        where.device_name,
        where.arch,
        {name: version for name, version in found.items() if version},
        settings,
        tuple(_notes(where)),
        tuple(rows),
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _notes(platform: PlatformInfo) -> Iterator[str]:
    for failure in plugin_failures():
        yield f"plugin {failure.name} failed to load: {failure.error}"
    for op in operators():
        setting = config.settings().override_for(op.family, op.mode)
        why = None if setting is None else why_unreachable(setting[0], str(op), platform)
        if setting is not None and why is not None:
            yield f"{setting[1]} = {setting[0]}: {why}"


# -- models --------------------------------------------------------------------------------------------------------------------


def _model_rows(model: Model, steps: Iterable[Step], platform: PlatformInfo, roofline: Roofline | None) -> list[Row]:
    """Returns the rows of a model's calls. Sizes of a call for which the same kernel is selected for the same reasons share a
    row.
    """
    by_call: dict[tuple[str, str, str], list[_Outcome]] = {}
    for step in steps:
        for call in calls_of(model, step):
            outcome = _outcome(call, step.size, platform, roofline)
            by_call.setdefault((step.phase, call.operator, call.role), []).append(outcome)
    rows = []
    for (phase, _, _), outcomes in by_call.items():
        for _, same in itertools.groupby(outcomes, key=lambda outcome: _decision(outcome.explanation)):
            rows.append(_row(phase, list(same)))
    return rows


def _outcome(call: Call, size: int, platform: PlatformInfo, roofline: Roofline | None) -> _Outcome:
    op = get_operator(call.operator)
    arguments = op.complete(call.arguments)
    check_types(op.mode, op.parameters, arguments)
    request = replace(op.request(arguments), platform=platform)
    explanation = op.consider_prepared(request, arguments, override_in_force(op.family, op.mode))
    return _Outcome(call, size, explanation, *_predicted(explanation, op.cost_of(arguments), roofline))


def _decision(explanation: Explanation) -> tuple[Any, ...]:
    chosen = explanation.chosen
    config = tuple(explanation.verdicts[0].config.items()) if chosen is not None else ()
    return chosen and chosen.name, config, tuple((each.kernel, each.gate, each.rank) for each in _passed(explanation))


def _row(phase: str, outcomes: Sequence[_Outcome]) -> Row:
    first = outcomes[0]
    row = row_of(first.explanation)
    return replace(
        row,
        phase=phase,
        role=first.call.role,
        times=first.call.times,
        sizes=tuple(outcome.size for outcome in outcomes),
        predicted_us=tuple(outcome.us for outcome in outcomes),
        predicted_by=tuple(outcome.by for outcome in outcomes),
    )


# -- processes -----------------------------------------------------------------------------------------------------------------


def _captured_row(record: Record, platform: PlatformInfo, roofline: Roofline | None) -> Row:
    """Returns the row of a captured call. The kernel is selected now; the reason says if another kernel ran at the capture."""
    op = get_operator(record["operator"])
    case = replay(record)
    found = request_without_values(op, case) if case.large else asked(op, case)
    if found is None:
        raise ReplayError(f"a call of {op} was captured whose request depends on values: {case.name}")
    request, arguments = found
    request = replace(request, platform=platform)
    explanation = op.consider_prepared(request, arguments, override_in_force(op.family, op.mode))
    us, by = _predicted(explanation, None if case.large else op.cost_of(arguments), roofline)
    row = row_of(explanation)
    was = record["kernel"]
    reason = row.reason if row.kernel == was else f"{row.reason}; {was} ran when the call was captured"
    return replace(row, times=record["count"], reason=reason, predicted_us=(us,), predicted_by=(by,))


def row_of(explanation: Explanation) -> Row:
    """Returns the row of a selection: the selected kernel, and why other kernels were not selected."""
    request, chosen = explanation.request, explanation.chosen
    taken = explanation.verdicts[0] if chosen is not None else None
    return Row(
        "process",
        request.operator,
        "",
        0,
        (),
        "" if chosen is None else chosen.name,
        "" if chosen is None else chosen.solution,
        "; ".join(((explanation.problem or "no kernel is eligible") if taken is None else taken.reason, *explanation.notes)),
        {} if taken is None else dict(taken.config),
        tuple(_passed(explanation)),
        str(request.signature),
        dict(request.traits),
    )


# -- why not, and how long -----------------------------------------------------------------------------------------------------


def _passed(explanation: Explanation) -> list[Passed]:
    """Returns kernels that were not selected: first rejected kernels with a higher priority than the selected kernel's, then the
    next best eligible kernel."""
    chosen = explanation.chosen
    accepted = [verdict for verdict in explanation.verdicts if verdict.accepted]
    rejected = [verdict for verdict in explanation.verdicts if verdict.gate not in _FOR_OTHERS]
    above = [verdict for verdict in rejected if chosen is None or verdict.spec.priority > chosen.priority]
    above.sort(key=lambda verdict: (-verdict.spec.priority, verdict.spec.name))
    found = [Passed(v.spec.name, v.gate or "", "", v.reason) for v in above[:_MOST_PASSED]]
    if chosen is not None and len(accepted) > 1:
        best, second = accepted[0], accepted[1]
        behind = (name for name, mine, other in zip(RANKS, best.rank, second.rank, strict=False) if mine != other)
        found.append(Passed(second.spec.name, "", next(behind, RANKS[-1]), second.reason))
    return found


def _predicted(explanation: Explanation, cost: Cost | None, roofline: Roofline | None) -> tuple[float | None, str]:
    """Returns the predicted time of the selected kernel in microseconds, and the source of the prediction (see `Row`)."""
    if explanation.chosen is None:
        return None, ""
    request: Request = explanation.request
    found = measured.find(request.operator, request.signature, request.traits, request.buckets, request.platform)
    tuned = found.results.get(explanation.chosen.name)
    if tuned is not None:
        return tuned.us, "table"
    if roofline is None or cost is None:
        return None, ""
    operands = [fmt.storage_dtype for _, fmt in request.signature.roles]
    # In 1 us, the call would reach this fraction of the roofline. So the shortest time that the roofline allows is this many
    # microseconds.
    return share_of(cost, 1.0, operands, roofline).part, "roofline"

"""Commands that only show information: ``doctor``, ``ops``, ``explain`` and ``plugins``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import typer

from tokenspeed_kernel.plugins import disabled_plugins, list_plugins, plugin_failures
from tokenspeed_kernel.workbench.cli.find import find_operator
from tokenspeed_kernel.workbench.cli.output import fail, print_json, print_table, print_wrapped, unknown
from tokenspeed_kernel.workbench.doctor import Diagnosis, diagnose
from tokenspeed_kernel.workbench.numerics.recipes import asked, request_without_values, typical_cases, vary_towards
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import Operator, operators
from tokenspeed_kernel_base.platform import named_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import GATES, Explanation, Override, Request, SelectionObjective, override_in_force
from tokenspeed_kernel_base.signature import dtype_name
from tokenspeed_kernel_base.traits import describe_kind, format_traits

# -- doctor -------------------------------------------------------------------------------------------------------------------


def doctor(as_json: bool) -> None:
    diagnosis = diagnose()
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        _print_diagnosis(diagnosis)
    raise typer.Exit(not diagnosis.healthy)


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    def section(title: str, facts: dict[str, Any]) -> None:
        typer.echo(title)
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            shown = ", ".join(value) or "none" if isinstance(value, list) else value
            typer.echo(f"  {name:<{width}}  {shown}")
        typer.echo()

    platform = dict(diagnosis.platform)
    if platform:
        platform["memory"] = f"{platform['memory'] / 2**30:.1f} GiB" if platform["memory"] else "unknown"
    section("platform", platform)
    section("versions", diagnosis.versions)
    section("kernels", diagnosis.kernels)
    section("settings", {s.name: f"{s.value}  ({s.source})" for s in diagnosis.settings})
    plugins = {p.name: f"{p.package} {p.version}, {p.num_kernels} kernels" for p in diagnosis.plugins}
    plugins.update(dict.fromkeys(diagnosis.disabled, "disabled"))
    plugins.update({f.name: f"{f.package} {f.version}, failed: {f.error}" for f in diagnosis.failures})
    section("plugins", plugins or {"none": "installed"})
    for name, trace in [*((f"plugin {f.name}", f.traceback) for f in diagnosis.failures), *diagnosis.load_failures.items()]:
        typer.echo(f"{name} failed:")
        typer.echo("\n".join(f"  {line}" for line in trace.rstrip().splitlines()) + "\n")
    for finding in diagnosis.findings:
        typer.echo(f"{'problem' if finding.problem else 'advice'}: {finding.what}\n  -> {finding.remedy}")
    typer.echo("all well" if diagnosis.healthy else "not well: see the problems above")


# -- ops ----------------------------------------------------------------------------------------------------------------------


def ops(name: str | None, as_json: bool) -> None:
    if name is not None:
        _show_operator(find_operator(name), as_json)
        return
    if as_json:
        print_json([_summary(op) for op in operators()])
        return
    by_family: dict[str, list[Operator[Any, Any]]] = {}
    for op in operators():
        by_family.setdefault(op.family, []).append(op)
    for family, mine in by_family.items():
        typer.secho(family, bold=True)
        width = max(len(op.mode) for op in mine)
        for op in mine:
            print_wrapped(_plain_purpose(op), f"  {op.mode:<{width}}  ", " " * (width + 4))
    typer.echo(f"\n{len(operators())} operators; tokenspeed-kernel ops NAME shows one in full")


def purpose(op: Operator[Any, Any]) -> str:
    """Returns an operator's purpose: the first line of its docstring."""
    return inspect.cleandoc(op.body.__doc__ or "").partition("\n")[0]


def _plain_purpose(op: Operator[Any, Any]) -> str:
    """Returns an operator's `purpose` without backticks, for plain text."""
    return purpose(op).replace("`", "")


def _summary(op: Operator[Any, Any]) -> dict[str, Any]:
    specs = KernelRegistry.get().get_for_operator(op.family, op.mode)
    return {
        "operator": str(op),
        "purpose": _plain_purpose(op),
        "parameters": [*op.names],
        "kernels": [spec.name for spec in specs],
        "solutions": sorted({spec.solution for spec in specs}),
    }


def _show_operator(op: Operator[Any, Any], as_json: bool) -> None:
    signature = f"{op.mode}{inspect.signature(op.body, eval_str=True)}"
    contract = inspect.cleandoc(op.body.__doc__ or "")
    cases = [{"name": case.name, "large": case.large} for case in op.all_cases()]
    traits = {name: describe_kind(kind) for name, kind in op.interface.all_traits().items()}
    formats = {name: list(named) for name, named in op.interface.formats.items()}
    if as_json:
        facts = {"signature": signature, "docstring": contract, "traits": traits, "formats": formats, "cases": cases}
        print_json({**_summary(op), **facts})
        return
    typer.echo(f"{op.family}.{signature}\n\n{contract}\n\ntraits")
    for name, kind in traits.items():
        typer.echo(f"  {name}: {kind}")
    typer.echo("\nformats")
    for name, named in formats.items():
        typer.echo(f"  {name}: {', '.join(named)}")
    typer.echo("\nkernels")
    for spec in KernelRegistry.get().get_for_operator(op.family, op.mode):
        typer.echo(f"  {spec.name}  ({spec.solution}, priority {spec.priority}, {spec.origin})")
    typer.echo("\ncases")
    for case in cases:
        typer.echo(f"  {case['name']}" + "  (large)" * bool(case["large"]))


# -- explain ------------------------------------------------------------------------------------------------------------------


def explain(
    op: str,
    changes: list[str] | None,
    platform: str | None,
    objective: str | None,
    solution: str | None,
    override: str | None,
    case: str | None,
    all_names: bool,
    as_json: bool,
) -> None:
    found = find_operator(op)
    starts = _cases(found, case)
    chosen = _varied(found, starts, changes or ())
    request, arguments = _request_and_arguments(found, chosen)
    registry = KernelRegistry.get()
    solutions = sorted({spec.solution for spec in registry.get_for_operator(found.family, found.mode)})
    if solution is not None and solution not in solutions:
        unknown(f"solution of {found}", solution, solutions)
    wanted = override_in_force(found.family, found.mode)
    if override is not None:
        try:
            wanted = Override(registry.get_by_name(override, str(found)).name, "--override")
        except KeyError as error:
            fail(error.args[0])
    try:
        where = request.platform if platform is None else named_platform(platform)
    except ValueError as error:
        fail(error)
    wanted_objective = request.objective if objective is None else SelectionObjective(objective)
    request = dataclasses.replace(request, platform=where, objective=wanted_objective, solution=solution)
    explanation = found.consider_prepared(request, arguments, wanted)
    if as_json:
        changed = "" if chosen in starts else str(chosen.make)
        print_json({"case": chosen.name, "changed_to": changed, **explanation.to_dict()})
    else:
        _print_explanation(explanation, chosen.name + ("" if chosen in starts else f", changed to {chosen.make}"), all_names)
    raise typer.Exit(explanation.chosen is None)


def _cases(op: Operator[Any, Any], name: str | None) -> list[Case]:
    """Returns the operator's cases to start from: the case with this name, or all small cases, the typical ones first."""
    if name is None:
        return typical_cases(op) or fail(f"{op} has no small case: name one with --case")
    cases = op.all_cases()
    found = [case for case in cases if case.name == name] or [case for case in cases if name.lower() in case.name.lower()]
    return found[:1] or unknown(f"case of {op}", name, [case.name for case in cases])


def _request(op: Operator[Any, Any], case: Case) -> Request:
    """Returns the selection request of a case's call."""
    return _request_and_arguments(op, case)[0]


def _request_and_arguments(op: Operator[Any, Any], case: Case) -> tuple[Request, dict[str, Any]]:
    """Returns the selection request of a case's call, and the call's arguments. Tensors of a large case are fake if possible."""
    return (request_without_values(op, case) if case.large else None) or asked(op, case)


def _varied(op: Operator[Any, Any], starts: Sequence[Case], changes: Sequence[str]) -> Case:
    """Returns a case with the traits and operand dtypes that ``changes`` name. The case is made by changing the recipe of the first
    starting case that allows this.

    A recipe makes all arguments of a call, so the call's formats, sizes and traits stay consistent.
    """
    wanted = dict(_wanted(op, starts[0], change) for change in changes)
    case, missed = vary_towards(op, starts, wanted, functools.partial(_possible_request, op))
    if not missed:
        return case
    value = wanted[missed]
    said = dtype_name(value) if isinstance(value, torch.dtype) else value
    return fail(f"no call of {op} with {missed}={said} could be made from {starts[0].name!r}; --case starts from another one")


def _possible_request(op: Operator[Any, Any], case: Case) -> Request | None:
    """Returns the selection request of a case's call; None if the operator rejects the call."""
    try:
        return _request(op, case)
    except Exception:  # a recipe may raise anything for inconsistent values
        return None


def _wanted(op: Operator[Any, Any], case: Case, change: str) -> tuple[str, Any]:
    """Parses a change on the command line, ``name=value``: a trait and its value, or an operand and its dtype."""
    name, equals, text = change.partition("=")
    if not equals or not text:
        fail(f"a change is written trait=value or role=dtype, got {change!r}")
    requests = [_request(op, other) for other in [case, *(c for c in op.all_cases() if not c.large)]]
    roles = {role for request in requests for role, _ in request.signature.roles}
    known = [request.traits[name] for request in requests if request.traits.get(name) is not None]
    if name in roles and (not known or _dtype(text) is not None):
        dtype = _dtype(text)
        if dtype is None and text in op.interface.formats.get(name, ()):
            fail(f"{name}={text} is a format and no dtype; --case starts from a call that has it: tokenspeed-kernel ops {op.mode}")
        return (name, dtype) if dtype is not None else unknown("dtype", text, [*_DTYPES, *_SHORT], _SOME_DTYPES)
    if not known:
        traits = dict.fromkeys(trait for request in requests for trait in request.traits)
        unknown(f"trait or operand of {op}", name, [*traits, *sorted(roles)])
    value, like = _value(text), known[0]
    if isinstance(like, bool) != isinstance(value, bool):
        fail(f"{name} is {'a flag, true or false' if isinstance(like, bool) else 'not a flag'}; got {text!r}")
    if isinstance(like, (int, float)) and not isinstance(value, (int, float)):
        fail(f"{name} is a number; got {text!r}")
    if isinstance(value, (int, float)) and value < 0 <= min(known):  # no search would find a call with a negative size
        fail(f"{name} is 0 or more; got {text!r}")
    if isinstance(like, str):
        value = text if text in known else _SHORT.get(text.lower(), text)
        seen = dict.fromkeys(str(other) for other in known)
        if value not in seen:
            unknown(f"value of {name}", text, seen)
    return name, value


_DTYPES = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
_SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "fp8_e5m2": "float8_e5m2",
}
_SOME_DTYPES = "for example float32, bfloat16 (bf16), float16 (fp16), float8_e4m3fn (fp8), float8_e5m2 (fp8_e5m2)"


def _dtype(text: str) -> torch.dtype | None:
    """Returns the dtype with this name: PyTorch's name, or a short name. Returns None for an unknown name."""
    name = _SHORT.get(text.lower(), text)
    return getattr(torch, name) if name in _DTYPES else None


def _value(text: str) -> bool | int | float | str | None:
    words: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


# If more kernels than this are rejected for the same reason, they are counted, not named.
_FEW = 3


def _print_explanation(explanation: Explanation, case: str, all_names: bool) -> None:
    """Prints the selection request, then the rejected kernels by reason, then the eligible kernels, of which the last is
    selected.
    """
    request = explanation.request
    facts = {
        "case": case,
        "formats": str(request.signature),
        "traits": ", ".join(f"{name}={value}" for name, value in sorted(request.traits.items())) or "none",
        "sizes": format_traits(request.sizes),
        "solution": request.solution,
        "override": f"{explanation.override.kernel} ({explanation.override.source})" if explanation.override else "",
    }
    print_wrapped(f"{request.operator} on {request.platform}, objective {request.objective.value}")
    for name, value in [*facts.items(), *(("tuned", note) for note in explanation.notes)]:
        if value:
            print_wrapped(value, f"  {name:<8}  ", " " * 12)
    gates = [*GATES]
    rejections = sorted(explanation.rejections.items(), key=lambda group: gates.index(group[0][0]))
    if rejections:
        rejected = sum(len(names) for _, names in rejections)
        hint = "" if all_names or all(len(names) <= _FEW for _, names in rejections) else "; --all names them"
        typer.echo(f"\nrejected: {rejected} of {len(explanation.verdicts)} kernels{hint}")
    for (gate, reason), names in rejections:
        print_wrapped(f"{gate}: {_counted(reason, len(names))}", "  ", " " * 6)
        if all_names or len(names) <= _FEW:
            print_wrapped(", ".join(names), " " * 6, " " * 6, dim=True)
    accepted = [verdict for verdict in explanation.verdicts if verdict.accepted]
    if accepted:
        typer.echo("\neligible, the best last")
    width = max((len(verdict.spec.name) for verdict in accepted), default=0)
    backend = max((len(verdict.spec.solution) for verdict in accepted), default=0)
    for verdict in reversed(accepted):
        runs = verdict.spec is explanation.chosen
        first = f"{'->' if runs else '  '} {verdict.spec.name:<{width}}  {verdict.spec.solution:<{backend}}  "
        print_wrapped(verdict.reason, first, " " * len(first), **({"fg": "green", "bold": True} if runs else {}))
    if explanation.chosen is None:
        typer.echo()
        print_wrapped(f"no kernel is eligible{': ' if explanation.problem else ''}{explanation.problem}")


def _counted(reason: str, kernels: int) -> str:
    """Returns the reason for which kernels are rejected; for several kernels, as a sentence with their number.

    >>> _counted("needs an AMD device", 28)
    '28 kernels need an AMD device'
    """
    if kernels == 1:
        return reason
    return f"{kernels} kernels need {reason[6:]}" if reason.startswith("needs ") else f"{kernels} kernels: {reason}"


# -- plugins ------------------------------------------------------------------------------------------------------------------


def plugin_list(as_json: bool) -> None:
    loaded, disabled, failed = list_plugins(), disabled_plugins(), plugin_failures()
    if as_json:
        print_json(
            {
                "loaded": [dataclasses.asdict(info) for info in loaded],
                "disabled": disabled,
                "failed": [dataclasses.asdict(failure) for failure in failed],
            }
        )
        return
    rows = [[p.name, "loaded", p.package, p.version, str(p.num_kernels), ""] for p in loaded]
    rows += [[name, "disabled", "", "", "", ""] for name in disabled]
    rows += [[f.name, "failed", f.package, f.version, "", f.error] for f in failed]
    if rows:
        print_table(["plugin", "status", "package", "version", "kernels", "error"], rows)
    else:
        typer.echo("no plugins are installed")


def plugin_info(name: str, as_json: bool) -> None:
    loaded = {info.name: info for info in list_plugins()}
    failed = {failure.name: failure for failure in plugin_failures()}
    if name in loaded:
        info, registry = loaded[name], KernelRegistry.get()
        registered = {spec.name for spec in registry.list_kernels()}
        specs = [registry.get_by_name(kernel) for kernel in info.kernel_names if kernel in registered]
        if as_json:
            kernels = [{"name": s.name, "operator": s.operator, "solution": s.solution, "priority": s.priority} for s in specs]
            print_json({"status": "loaded", **dataclasses.asdict(info), "kernels": kernels})
            return
        typer.echo(f"{info.name} of {info.package} {info.version}: {info.num_kernels} kernels\n")
        if specs:
            print_table(
                ["kernel", "operator", "solution", "priority"],
                [[s.name, s.operator, s.solution, str(s.priority)] for s in specs],
            )
    elif name in failed:
        failure = failed[name]
        if as_json:
            print_json({"status": "failed", **dataclasses.asdict(failure)})
        else:
            typer.echo(f"{failure.name} of {failure.package} {failure.version} failed to load:\n\n{failure.traceback.rstrip()}")
        raise typer.Exit(1)
    elif name in disabled_plugins():
        if as_json:
            print_json({"status": "disabled", "name": name})
        else:
            typer.echo(f"{name} is disabled")
    else:
        unknown("plugin", name, [*loaded, *failed, *disabled_plugins()])

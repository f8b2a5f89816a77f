"""The commands: arguments, options and help. Functions in ``tokenspeed_kernel.workbench.cli`` run the commands.

This module imports neither PyTorch nor the core. A command's own module is imported when the command runs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenspeed_kernel_command import options as o
from tokenspeed_kernel_command.installed import version, without

__all__ = ["DECLARED", "app", "implementation"]

DECLARED: list[tuple[str, Callable[..., None]]] = []  # each command's module in ``workbench.cli``, and its function here

_PLAIN: dict[str, Any] = {
    "no_args_is_help": True,
    "rich_markup_mode": None,  # help and errors are plain text in a terminal and in a pipe alike
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    **_PLAIN,
)
_plugins = typer.Typer(help="Packages that bring kernels.", **_PLAIN)
_pack = typer.Typer(help="Kernels that are compiled ahead of time, to ship with an image.", **_PLAIN)
_capture = typer.Typer(help="What was really called.", **_PLAIN)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenspeed-kernel {version()}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)]


@app.callback()
def _root(version: Version = False) -> None:
    """Operators for LLM inference, and the kernel that serves each best on the machine at hand."""


def _command(
    module: str, group: typer.Typer = app, name: str | None = None, **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that declares a command.

    The decorated function only gives the command's name, options and help. A function of the same name, in a module of
    ``workbench.cli``, runs the command.

    Args:
        module: name of the module in ``workbench.cli``.
        group: the command's group of commands.
        name: name of the command; the function's if not given.
        settings: further settings for typer.
    """

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**arguments: Any) -> None:
            given = {key: value.value if isinstance(value, Enum) else value for key, value in arguments.items()}
            implementation(module, function.__name__)(**given)

        DECLARED.append((module, function))
        return group.command(name, **settings)(run)

    return declare


def implementation(module: str, function: str) -> Callable[..., None]:
    """Imports the function that runs a command."""
    try:
        found: Callable[..., None] = getattr(importlib.import_module(f"tokenspeed_kernel.workbench.cli.{module}"), function)
    except ModuleNotFoundError as error:
        without(error)
    return found


@_command("show")
def doctor(as_json: o.AsJson = False) -> None:
    """Show platform, versions, settings and plugins, and what to do about what is wrong. Exit code 1 if something is wrong."""


@_command("show")
def ops(name: o.ShownName = None, as_json: o.AsJson = False) -> None:
    """List the operators, or show one: signature, contract, kernels and cases."""


@_command("show")
def explain(
    op: o.OperatorName,
    changes: o.Changes = None,
    platform: o.PlatformName = None,
    objective: o.Objective = None,
    solution: o.Solution = None,
    override: o.KernelName = None,
    case: o.CaseName = None,
    all_names: o.AllNames = False,
    as_json: o.AsJson = False,
) -> None:
    """Say which kernel would serve a call, and why not the others. Exit code 1 if no kernel is eligible.

    For an operator with prepared weights, this is the kernel for which the weights would be prepared.
    """


@_command("verify")
def verify(
    targets: o.Targets = None,
    case: o.CaseNames = None,
    large: o.Large = False,
    captured: o.Captured = None,
    solution: o.Solution = None,
    plugin: o.Plugin = None,
    device: o.Device = None,
    repeat: o.Repeat = None,
    conformance: o.Conformance = None,
    shrink_seconds: o.Shrink = 10.0,
    seed: o.Seed = 0,
    junit_file: o.Junit = None,
    output: o.Outcome = None,
    as_json: o.AsJson = False,
) -> None:
    """Run kernels against their operators' references. Exit code 1 if any is wrong, or if all are skipped.

    With --plugin or --conformance, run all checks of the conformance kit: values at the limits of traits, out=, unchanged inputs,
    waiting for the device, accesses out of bounds and more.
    """


@_command("bench")
def bench(
    target: o.Target = None,
    case: o.CaseNames = None,
    large: o.Large = False,
    captured: o.Captured = None,
    solution: o.Solution = None,
    solutions: o.Solutions = None,
    baseline: o.Baselines = None,
    output: o.ReportFile = None,
    append: o.Append = False,
    device: o.Device = None,
    budget: o.Budget = 0.5,
    rounds: o.Rounds = 7,
    graph: o.Graph = 0,
    cache: o.CacheState = None,
    rotate: o.Rotate = None,
    no_cache: o.NoCache = False,
    remeasure: o.Remeasure = False,
    reports: o.Compare = None,
    threshold: o.Threshold = o.THRESHOLD,
    confidence: o.Confidence = o.CONFIDENCE,
    as_json: o.AsJson = False,
) -> None:
    """Time kernels, after checking their results. Exit code 1 if any is wrong.

    With --compare, show the differences between two reports instead. Exit code 1 if a row became slower or wrong.
    """


@_command("tune")
def tune(
    source: o.TunedCalls = None,
    op: o.TunedOp = None,
    case: o.CaseNames = None,
    large: o.Large = False,
    kernel: o.Kernels = None,
    budget: o.TuningBudget = 10.0,
    device: o.Device = None,
    listing: o.ListThem = False,
    clear: o.Clear = False,
    stale: o.StaleOnly = False,
    export: o.Export = None,
    trials: o.AllTrials = False,
    as_json: o.AsJson = False,
) -> None:
    """Measure kernels and their configurations, and keep the fastest correct one for selection.

    Exit code 1 if every trial of some case failed.
    """


@_command("profile", context_settings={"allow_interspersed_args": False})
def profile(program: o.Program, output: o.Found = None, sort: o.Sort = None, top: o.Top = 30, as_json: o.AsJson = False) -> None:
    """Run a program and show what its operator calls took, by kernel and shape. Exit code of the program.

    Totals are in milliseconds, medians per call in microseconds. "host" is the time until calls returned to their caller. "device"
    is the time on a GPU, without launch overhead. "share" is the row's fraction of all calls' device time, or of their host time
    if no call has a device time. Replays of CUDA graphs and kernels called through bind are not recorded. With --json, the
    program's output goes to stderr.
    """


@_command("report")
def report(
    files: o.Reports, output: o.Page = Path("report.html"), plots: o.Plots = None, title: o.Title = "Kernels, measured"
) -> None:
    """Make one HTML file of benchmark reports: rooflines, cases, history and all figures.

    Several reports of one device form the device's history. The newest row of each kernel and case is shown.
    """


@_command("receipt")
def receipt(
    words: o.Receipted = None,
    calls: o.ReceiptCalls = None,
    platform: o.PlatformName = None,
    batch: o.Batches = None,
    tokens: o.PromptTokens = None,
    context: o.Context = 4096,
    page_size: o.PageSize = 64,
    dtype: o.ModelDtype = "bfloat16",
    cache_dtype: o.CacheDtype = None,
    activation_dtype: o.ActivationDtype = "none",
    ranks: o.Ranks = 1,
    roofline: o.RooflineReport = None,
    output: o.ReceiptFile = None,
    as_json: o.AsJson = False,
) -> None:
    """Say which kernel serves each call of a model or capture, why not the next, and the time.

    The time is predicted; nothing is launched or measured. Exit code 1 if no kernel serves a call; of `receipt diff A.json B.json`,
    if kernels differ.
    """


@_command("warmup")
def warmup(words: o.Words = None, plugin: o.Warmed = None) -> None:
    """Let plugins compile ahead of time what they would compile when it is first called.

    Arguments after -- are passed to the plugins: `tokenspeed-kernel warmup --plugin NAME -- --help` shows a plugin's arguments. A
    plugin that compiles has an entry point with its name in the group "tokenspeed_kernel.warmup". Portable kernels need no warm-up.
    Exit code 1 if a plugin fails, 130 after an interrupt. Programs that were compiled before an interrupt are kept.
    """


@_command("pack", _pack, "build")
def pack_build(
    source: o.PackSource,
    arch: o.PackArch,
    output: o.PackFolder,
    batch: o.Batches = None,
    tokens: o.PromptTokens = None,
    context: o.Context = 4096,
    page_size: o.PageSize = 64,
    dtype: o.ModelDtype = "bfloat16",
    cache_dtype: o.CacheDtype = None,
    activation_dtype: o.ActivationDtype = "none",
    ranks: o.Ranks = 1,
    jobs: o.Jobs = None,
    as_json: o.AsJson = False,
) -> None:
    """Compile what calls need into a folder, for a device that this machine need not have. Exit code 1 if a call cannot be run.

    Each call is run as on the device, but nothing is launched. So the pack has the programs of the kernels that the device would
    select, in their configurations. After an interrupt, the same command goes on with the rest. Processes use the packs that
    TOKENSPEED_KERNEL_PACKS names.
    """


@_command("pack", _pack, "check")
def pack_check(
    folder: o.PackName,
    source: o.CheckedSource = None,
    batch: o.Batches = None,
    tokens: o.PromptTokens = None,
    context: o.Context = 4096,
    page_size: o.PageSize = 64,
    dtype: o.ModelDtype = "bfloat16",
    cache_dtype: o.CacheDtype = None,
    activation_dtype: o.ActivationDtype = "none",
    ranks: o.Ranks = 1,
    jobs: o.Jobs = None,
    as_json: o.AsJson = False,
) -> None:
    """Say whether a pack can be used here, and what calls would still compile. Exit code 1 for a damaged file, or if any would.

    If a call needs several programs, the first missing program is named.
    """


@_command("show", _plugins, "list")
def plugin_list(as_json: o.AsJson = False) -> None:
    """List the plugins: loaded, disabled and failed."""


@_command("show", _plugins, "info")
def plugin_info(name: o.PluginName, as_json: o.AsJson = False) -> None:
    """Show one plugin: its kernels, or why it failed. Exit code 1 if it failed."""


@_command("capture", _capture, "show")
def show_calls(files: o.Captures, op: o.CapturedOp = None, as_json: o.AsJson = False) -> None:
    """Show captured calls, the most frequent first: operator, kernel, count, shapes and options."""


@_command("capture", _capture, "merge")
def merge_files(files: o.Captures, output: o.Into, as_json: o.AsJson = False) -> None:
    """Merge captures into one file, whose previous contents are replaced."""


app.add_typer(_plugins, name="plugins")
app.add_typer(_pack, name="pack")
app.add_typer(_capture, name="capture")

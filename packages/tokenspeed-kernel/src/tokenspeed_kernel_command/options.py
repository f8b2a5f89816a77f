"""The types of the commands' arguments and options, as typer reads them. Types that several commands use come first.

Typer evaluates these annotations at run time.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[str | None, typer.Argument(metavar="[KERNEL|OP]", help="A kernel, or all of an operator's; all if left out.")]
Targets = Annotated[
    list[str] | None, typer.Argument(metavar="[KERNEL|OP]...", help="Kernels, or all of the operators'; all if left out.")
]
CaseNames = Annotated[
    list[str] | None,
    typer.Option("--case", help="Only cases of this name, or with this in their name. May be given several times."),
]
Large = Annotated[bool, typer.Option("--large", help="Also the cases that are sized for a GPU.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, gpu or gpu:1; where kernels run by default if left out.")]
Plugin = Annotated[str | None, typer.Option("--plugin", help="Only kernels of this plugin.")]
Solution = Annotated[str | None, typer.Option("--solution", help="Only kernels made with this.")]
Captured = Annotated[Path | None, typer.Option("--from", help="Cases like the calls that were captured to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
ReportFile = Annotated[Path | None, typer.Option("--output", help="Write the report to this JSON file, too.")]

# -- ops, plugins, explain ----------------------------------------------------------------------------------------------------

ShownName = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show this operator in full.")]
PluginName = Annotated[str, typer.Argument(metavar="NAME")]


class Objectives(str, Enum):
    """The values of `SelectionObjective`. That class is in the base package, which this package must not import."""

    DEFAULT = "default"
    PORTABILITY = "portability"
    DETERMINISM = "determinism"
    ACCURACY = "accuracy"
    DEBUG = "debug"


OperatorName = Annotated[str, typer.Argument(metavar="OP")]
Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TRAIT=VALUE|ROLE=DTYPE]...", help="What to change in the case's request: sinks=true q=bf16."),
]
PlatformName = Annotated[str | None, typer.Option("--platform", help="As if on cpu, sm_90, h100, gfx950, mi355x...")]
Objective = Annotated[Objectives | None, typer.Option("--objective")]
KernelName = Annotated[str | None, typer.Option("--override", help="Ask for this kernel by name.")]
AllNames = Annotated[bool, typer.Option("--all", help="Name every kernel, also where many are rejected for one reason.")]
CaseName = Annotated[str | None, typer.Option("--case", help="The call to start from; a typical one if left out.")]

# -- verify -------------------------------------------------------------------------------------------------------------------

Repeat = Annotated[
    int | None,
    typer.Option("--repeat", min=2, help="So many runs must give the same bits; if left out, two of kernels tagged determinism."),
]
Conformance = Annotated[
    bool | None,
    typer.Option(
        "--conformance/--no-conformance", help="All checks, one row each; with --plugin they are run if this is left out."
    ),
]
Shrink = Annotated[float, typer.Option("--shrink", min=0.0, help="Seconds to look for a smaller call that fails; 0 does not.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the inputs.")]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE.xml", help="Also write the outcome as JUnit XML.")]
Outcome = Annotated[Path | None, typer.Option("--output", metavar="FILE.json", help="Also write the outcome as JSON.")]

# -- bench --------------------------------------------------------------------------------------------------------------------

Solutions = Annotated[
    str | None,
    typer.Option("--solutions", metavar="A,B,...", help="Only these, side by side, and how they compare with the first."),
]
Baselines = Annotated[
    list[Path] | None,
    typer.Option(
        "--baseline",
        "--peer",
        metavar="FILE.py",
        help="Also the baselines that this file declares.",
    ),
]
Append = Annotated[bool, typer.Option("--append", help="Add to what --output holds: another run of the same command.")]
Graph = Annotated[
    int, typer.Option("--graph", min=0, help="Calls in one CUDA graph, on inputs of their own, to time without launches.")
]
Budget = Annotated[float, typer.Option("--budget", min=0.001, help="Seconds of measuring a case.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Over how many rounds these are spread; --compare wants 4 or more.")]
CacheState = Annotated[
    str | None,
    typer.Option(
        "--cache", metavar="cold|warm", help="The GPU's caches before each call: flushed, or as the call before left them."
    ),
]
Rotate = Annotated[
    int | None,
    typer.Option("--rotate", min=1, help="Copies of the inputs, used in turn. 1 if left out; with --graph as many as its calls."),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Neither read nor keep the device's measured roofline.")]
Remeasure = Annotated[bool, typer.Option("--remeasure", help="Measure the device's roofline again, and keep it.")]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", metavar="A.json B.json", help="Measure nothing: compare two reports. Exit code 1 if B is worse."),
]
Threshold = Annotated[float, typer.Option("--threshold", min=0.0, help="With --compare: smaller differences are none. 0.03 is 3%.")]
Confidence = Annotated[float, typer.Option("--confidence", min=0.5, max=0.9999, help="With --compare: of the intervals.")]
THRESHOLD, CONFIDENCE = 0.03, 0.95  # the same defaults as the workbench's `compare`

# -- tune ---------------------------------------------------------------------------------------------------------------------

TunedCalls = Annotated[
    Path | None, typer.Option("--from", metavar="FILE", help="Tune on the calls that this file has: a shape capture.")
]
TunedOp = Annotated[str | None, typer.Option("--op", metavar="OP", help="Tune on this operator's cases.")]
Kernels = Annotated[
    list[str] | None,
    typer.Option("--kernel", metavar="KERNEL", help="Only this kernel and its configurations. May be given several times."),
]
TuningBudget = Annotated[
    float, typer.Option("--budget", min=0.01, help="Seconds of measuring a case, compilation included, verification left out.")
]
ListThem = Annotated[bool, typer.Option("--list", help="Show the results there are for this device, stale ones with the reason.")]
Clear = Annotated[bool, typer.Option("--clear", help="Remove this machine's results for this device; with --op, of that operator.")]
StaleOnly = Annotated[bool, typer.Option("--stale", help="With --clear: only those that do not hold any more.")]
Export = Annotated[
    Path | None,
    typer.Option("--export", metavar="FILE", help="Add the results that hold for this device to a table, to ship in a wheel."),
]
AllTrials = Annotated[bool, typer.Option("--trials", help="Show every candidate that was tried.")]

# -- profile, report, warmup, capture -----------------------------------------------------------------------------------------


class Order(str, Enum):
    """The columns by which rows of a profile can be sorted."""

    DEVICE = "device"
    HOST = "host"
    CALLS = "calls"


Program = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run, with its arguments.", show_default=False)]
Found = Annotated[Path | None, typer.Option("--output", help="Write what was found to this JSON file, too.")]
Sort = Annotated[
    Order | None,
    typer.Option("--sort", help="Sort by this, largest first; by time on the device if left out, on the host where there is none."),
]
Top = Annotated[int, typer.Option("--top", min=0, help="Print so many rows at most; 0 for all.")]

Reports = Annotated[list[Path], typer.Argument(metavar="FILE.json...", help="What `bench --output` wrote.")]
Page = Annotated[Path, typer.Option("-o", "--output", help="The HTML file.")]
Plots = Annotated[Path | None, typer.Option("--plots", metavar="FOLDER", help="Write the plots there as well, as PNG and SVG.")]
Title = Annotated[str, typer.Option("--title", help="What stands at its top.")]

Receipted = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL | diff A.json B.json]",
        help="A preset (gpt-oss-120b), or a Hugging Face config.json or its folder; or two receipts to compare.",
        show_default=False,
    ),
]
ReceiptCalls = Annotated[Path | None, typer.Option("--from", metavar="FILE", help="Of the calls that this capture has.")]
Batches = Annotated[
    list[int] | None, typer.Option("--batch", min=1, help="Sequences of a decode step; may be given several times.")
]
PromptTokens = Annotated[list[int] | None, typer.Option("--tokens", min=1, help="Tokens of a prompt; may be given several times.")]
Context = Annotated[int, typer.Option("--context", min=1, help="Tokens of each sequence in the cache of a decode step.")]
PageSize = Annotated[int, typer.Option("--page-size", min=1, help="Tokens of a page of the cache.")]
ModelDtype = Annotated[str, typer.Option("--dtype", help="Of activations: bfloat16, float16 or float32.")]
CacheDtype = Annotated[
    str | None, typer.Option("--cache-dtype", help="Of keys and values, as float8_e4m3fn; the model's if left out.")
]
ActivationDtype = Annotated[
    str, typer.Option("--activation-dtype", help="The format that experts quantise their inputs to: none, fp8, mxfp4.")
]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Ranks of tensor parallelism.")]
RooflineReport = Annotated[
    Path | None, typer.Option("--roofline", metavar="REPORT.json", help="A report of bench, whose roofline gives predicted times.")
]
ReceiptFile = Annotated[Path | None, typer.Option("--output", help="Also write it to this file: .json, or .html for a page.")]

Warmed = Annotated[str | None, typer.Option("--plugin", metavar="PLUGIN", help="Only this one.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[-- WORD...]", help="What to tell them.", show_default=False)]

_CALLS = "A file of captured calls; or a model: gpt-oss-120b, or a config.json. The options from --batch to --ranks are for models."
PackSource = Annotated[str, typer.Argument(metavar="CALLS|MODEL", help=_CALLS)]
CheckedSource = Annotated[str | None, typer.Argument(metavar="[CALLS|MODEL]", help=_CALLS)]
PackName = Annotated[Path, typer.Argument(metavar="FOLDER", help="The pack.")]
PackArch = Annotated[str, typer.Option("--arch", help="The device: sm_90a, gfx950, h200, mi355x...")]
PackFolder = Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="The new pack.")]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Processes; as many as there are cores if left out.")]

Captures = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files that shapes were captured to.")]
CapturedOp = Annotated[str | None, typer.Option("--op", help="Only calls of this operator.")]
Into = Annotated[Path, typer.Option("-o", "--output", help="The file that receives the sum.")]

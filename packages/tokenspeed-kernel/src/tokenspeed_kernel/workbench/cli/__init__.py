"""The command line: ``tokenspeed-kernel``. Needs the extra ``[tools]``; nothing below imports it."""

from __future__ import annotations

import typer

from tokenspeed_kernel.workbench.cli.bench import bench
from tokenspeed_kernel.workbench.cli.capture import merge_files, show_calls
from tokenspeed_kernel.workbench.cli.profile import profile
from tokenspeed_kernel.workbench.cli.report import report
from tokenspeed_kernel.workbench.cli.show import doctor, explain, ops, plugin_info, plugin_list
from tokenspeed_kernel.workbench.cli.tune import tune
from tokenspeed_kernel.workbench.cli.verify import verify
from tokenspeed_kernel.workbench.cli.warmup import warmup

__all__ = ["app"]

_SETTINGS = {"help_option_names": ["-h", "--help"]}
# Help and errors are plain text in a terminal and in a pipe alike.
app = typer.Typer(
    help="Operators for LLM inference, and the kernel that serves each best on the machine at hand.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_SETTINGS,
)
app.command()(doctor)
app.command()(ops)
app.command()(explain)
app.command()(verify)
app.command()(bench)
app.command()(tune)
app.command(context_settings={"allow_interspersed_args": False})(profile)
app.command()(report)
app.command()(warmup)

_plugins = typer.Typer(help="Packages that bring kernels.", no_args_is_help=True, rich_markup_mode=None, context_settings=_SETTINGS)
_plugins.command("list")(plugin_list)
_plugins.command("info")(plugin_info)
app.add_typer(_plugins, name="plugins")

_capture = typer.Typer(help="What was really called.", no_args_is_help=True, rich_markup_mode=None, context_settings=_SETTINGS)
_capture.command("show")(show_calls)
_capture.command("merge")(merge_files)
app.add_typer(_capture, name="capture")

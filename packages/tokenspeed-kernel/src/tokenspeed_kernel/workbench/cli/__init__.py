"""The command line ``tokenspeed-kernel``. It needs the extra ``[tools]``; no other module imports it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tokenspeed_kernel.version import __version__
from tokenspeed_kernel.workbench.cli.bench import bench
from tokenspeed_kernel.workbench.cli.capture import merge_files, show_calls
from tokenspeed_kernel.workbench.cli.profile import profile
from tokenspeed_kernel.workbench.cli.report import report
from tokenspeed_kernel.workbench.cli.show import doctor, explain, ops, plugin_info, plugin_list
from tokenspeed_kernel.workbench.cli.tune import tune
from tokenspeed_kernel.workbench.cli.verify import verify
from tokenspeed_kernel.workbench.cli.warmup import warmup

__all__ = ["app"]

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


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenspeed-kernel {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)]


@app.callback()
def _root(version: Version = False) -> None:
    """Operators for LLM inference, and the kernel that serves each best on the machine at hand."""


for command in (doctor, ops, explain, verify, bench, tune):
    app.command()(command)
app.command(context_settings={"allow_interspersed_args": False})(profile)
app.command()(report)
app.command()(warmup)

_plugins = typer.Typer(help="Packages that bring kernels.", **_PLAIN)
_plugins.command("list")(plugin_list)
_plugins.command("info")(plugin_info)
app.add_typer(_plugins, name="plugins")

_capture = typer.Typer(help="What was really called.", **_PLAIN)
_capture.command("show")(show_calls)
_capture.command("merge")(merge_files)
app.add_typer(_capture, name="capture")

"""``report``: renders benchmark reports as one HTML page."""

from __future__ import annotations

from pathlib import Path

import typer

from tokenspeed_kernel.workbench.benchmark.results import ReportError, load_report
from tokenspeed_kernel.workbench.cli.output import fail
from tokenspeed_kernel_base.installation import requirement
from tokenspeed_kernel_base.storage import replace_file


def report(files: list[Path], output: Path, plots: Path | None, title: str) -> None:
    try:
        # Imported here, because these libraries load slowly and no other command needs them.
        from tokenspeed_kernel.workbench.report import devices_of, render_page, write_plots
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("jinja2", "matplotlib"):
            raise
        fail(f"this needs {error.name}: pip install {requirement('tokenspeed-kernel[tools]')}")
    if not output.parent.is_dir():
        fail(f"--output {output}: there is no folder {output.parent}")
    try:
        devices = devices_of((file.name, load_report(file)) for file in files)
    except (ReportError, OSError) as error:
        fail(error)
    if not any(device.rows() for device in devices):
        fail("there is nothing to show: no row was measured")
    replace_file(output, render_page(devices, title))
    typer.echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
    if plots is not None:
        typer.echo(f"{plots}: {len(write_plots(devices, plots))} plots")

"""``receipt``: shows which kernel runs for which call, and the differences between two receipts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import typer

from tokenspeed_kernel.workbench.benchmark.results import ReportError, load_report
from tokenspeed_kernel.workbench.benchmark.roofline import Roofline
from tokenspeed_kernel.workbench.cli.output import fail, print_json, unknown
from tokenspeed_kernel.workbench.models import DECODE_SIZES, PREFILL_SIZES, ModelError
from tokenspeed_kernel.workbench.receipts import Receipt, ReceiptError, difference_lines, differences, read_receipt
from tokenspeed_kernel.workbench.receipts import receipt as made
from tokenspeed_kernel.workbench.watching import ReplayError
from tokenspeed_kernel_base.installation import requirement
from tokenspeed_kernel_base.platform import named_platform
from tokenspeed_kernel_base.storage import replace_file

_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")


def receipt(
    words: list[str] | None,
    calls: Path | None,
    platform: str | None,
    batch: list[int] | None,
    tokens: list[int] | None,
    context: int,
    page_size: int,
    dtype: str,
    cache_dtype: str | None,
    activation_dtype: str,
    ranks: int,
    roofline: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    named = words or []
    if named[:1] == ["diff"]:
        _show_differences(named[1:], as_json)
        return
    if len(named) > 1 or bool(named) == (calls is not None):
        fail("name one model, or the file of captured calls with --from, or two receipts after diff")
    if output is not None and output.suffix not in (".json", ".html"):
        fail(f"--output {output}: the name must end in .json or .html")
    if output is not None and not output.parent.is_dir():
        fail(f"--output {output}: there is no folder {output.parent}")
    try:
        found = made(
            named[0] if named else None,
            calls=calls,
            platform=None if platform is None else named_platform(platform),
            decode_sizes=batch or DECODE_SIZES,
            prefill_sizes=tokens or PREFILL_SIZES,
            context=context,
            page_size=page_size,
            dtype=dtype_named(dtype),
            cache_dtype=None if cache_dtype is None else dtype_named(cache_dtype),
            activation_dtype=activation_dtype,
            ranks=ranks,
            roofline=None if roofline is None else _roofline(roofline),
        )
    except (ModelError, ReplayError, OSError, ValueError, TypeError) as error:
        fail(error)
    if output is not None:
        _write(found, output)
    if as_json:
        print_json(found.to_dict())
    else:
        typer.echo(str(found))
    raise typer.Exit(any(not row.kernel for row in found.rows))


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype with this name. If it is not one of the dtypes that models may have, the command ends."""
    if name not in _DTYPES:
        unknown("dtype", name, _DTYPES)
    found: torch.dtype = getattr(torch, name)
    return found


def _roofline(file: Path) -> Roofline:
    try:
        found = load_report(file).roofline
    except (ReportError, OSError) as error:
        fail(error)
    return found or fail(f"--roofline {file}: the report has no roofline")


def _write(found: Receipt, output: Path) -> None:
    if output.suffix == ".json":
        found.save(output)
        return
    try:
        # Imported here, because its libraries load slowly and no other output needs them.
        from tokenspeed_kernel.workbench.report.receipt import render_receipt
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("jinja2", "matplotlib"):
            raise
        fail(f"a page needs {error.name}: pip install {requirement('tokenspeed-kernel[tools]')}")
    replace_file(output, render_receipt(found))


def _show_differences(files: list[str], as_json: bool) -> None:
    if len(files) != 2:
        fail(f"diff takes two receipts, got {len(files)}")
    try:
        before, after = (read_receipt(file) for file in files)
    except (ReceiptError, OSError) as error:
        fail(error)
    found = differences(before, after)
    if as_json:
        values: list[dict[str, Any]] = [vars(each) for each in found]
        print_json(values)
    else:
        typer.echo("\n".join(difference_lines(found)) or "the receipts are equal")
    raise typer.Exit(any(each.kind == "kernel" for each in found))

"""``pack``: makes kernel packs, and shows which compiled programs a pack has and lacks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer

from tokenspeed_kernel.workbench import packing
from tokenspeed_kernel.workbench.cli.output import fail, print_json, print_table, progress
from tokenspeed_kernel.workbench.cli.receipt import dtype_named
from tokenspeed_kernel.workbench.models import DECODE_SIZES, PREFILL_SIZES, steps_of
from tokenspeed_kernel.workbench.packing import Outcome, Source
from tokenspeed_kernel.workbench.watching import ReplayError
from tokenspeed_kernel_base.packs import PackError, read_pack, toolchain_gap

_INTERRUPTED = 130


def pack_build(
    source: str,
    arch: str,
    output: Path,
    batch: list[int] | None,
    tokens: list[int] | None,
    context: int,
    page_size: int,
    dtype: str,
    cache_dtype: str | None,
    activation_dtype: str,
    ranks: int,
    jobs: int | None,
    as_json: bool,
) -> None:
    packed = _source(source, batch, tokens, context, page_size, dtype, cache_dtype, activation_dtype, ranks)
    outcomes = _followed(packed, packing.build(packed, arch, output, _jobs(jobs)), "compiling")
    pack = read_pack(output)
    programs, failed = pack.manifest["programs"], [outcome for outcome in outcomes if outcome.error]
    if as_json:
        print_json({"pack": str(output), "arch": pack.manifest["arch"], "files": len(pack.files), "programs": programs})
    else:
        rows = [[each["compiler"], each["kernel"], each["program"], f"{each['seconds']:.1f}"] for each in programs]
        print_table(["compiler", "kernel", "program", "seconds"], sorted(rows))
        typer.echo(f"\n{len(programs)} programs compiled for {len(outcomes)} calls on {pack.manifest['arch']}, in {output}")
    _show_failures(failed)
    raise typer.Exit(bool(failed))


def pack_check(
    folder: Path,
    source: str | None,
    batch: list[int] | None,
    tokens: list[int] | None,
    context: int,
    page_size: int,
    dtype: str,
    cache_dtype: str | None,
    activation_dtype: str,
    ranks: int,
    jobs: int | None,
    as_json: bool,
) -> None:
    try:
        pack = read_pack(folder)
    except PackError as error:
        fail(f"the pack {folder} is not used: {error}")
    damaged = [name for name in pack.files if not pack.is_intact(name)]
    gaps = {}
    for compiler in packing.compilers():
        made, here = pack.manifest["toolchains"].get(compiler.COMPILER), compiler.toolchain()
        if made is not None and made != here:
            gaps[compiler.COMPILER] = toolchain_gap(made, here)
    outcomes: list[Outcome] = []
    if source is not None:
        with tempfile.TemporaryDirectory() as cache:
            checked = _source(source, batch, tokens, context, page_size, dtype, cache_dtype, activation_dtype, ranks)
            work = packing.run(checked, pack.manifest["arch"], Path(cache), folder.absolute(), _jobs(jobs))
            outcomes = _followed(checked, work, "checking")
    missing, failed = [o for o in outcomes if o.missing], [o for o in outcomes if o.error]
    if as_json:
        calls = [{"operator": o.operator, "case": o.case, "kernel": o.kernel, "missing": o.missing} for o in missing]
        print_json({"pack": str(folder), "damaged": damaged, "other_versions": gaps, "calls": len(outcomes), "missing": calls})
    else:
        for file in damaged:
            typer.echo(f"damaged: {file}")
        for compiler, gap in gaps.items():
            typer.echo(f"programs of {compiler} are not used: {gap}")
        for outcome in missing:
            typer.echo(outcome.missing)
        typer.echo(f"{len(pack.files)} files for {pack.manifest['arch']}, {len(damaged)} damaged")
        if source is not None:
            advice = "; build a pack that has them: tokenspeed-kernel pack build" if missing else ""
            typer.echo(f"{len(missing)} of {len(outcomes)} calls would compile{advice}")
    _show_failures(failed)
    raise typer.Exit(bool(damaged or gaps or missing or failed))


def _source(
    name: str,
    batch: list[int] | None,
    tokens: list[int] | None,
    context: int,
    page_size: int,
    dtype: str,
    cache_dtype: str | None,
    activation_dtype: str,
    ranks: int,
) -> Source:
    steps = steps_of(
        batch or DECODE_SIZES,
        tokens or PREFILL_SIZES,
        context=context,
        page_size=page_size,
        dtype=dtype_named(dtype),
        cache_dtype=None if cache_dtype is None else dtype_named(cache_dtype),
        activation_dtype=activation_dtype,
    )
    return Source(name, tuple(steps), ranks)


def _jobs(given: int | None) -> int:
    return given or max(1, len(os.sched_getaffinity(0)))


def _followed(source: Source, outcomes: Iterator[Outcome], what: str) -> list[Outcome]:
    """Returns all outcomes of the calls of ``source``, and shows a progress bar until the last arrives."""
    done = []
    try:
        with progress(len(source.calls()), what) as begin:
            for outcome in outcomes:
                begin(f"{outcome.operator} {outcome.case}")
                done.append(outcome)
    except (OSError, ReplayError, ValueError) as error:
        fail(error)
    except KeyboardInterrupt:
        typer.echo(f"interrupted after {len(done)} calls; the same command goes on with the rest", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    return done


def _show_failures(failed: list[Outcome]) -> None:
    for outcome in failed:
        typer.echo(f"not run: {outcome.operator}, {outcome.case}: {outcome.error}", err=True)

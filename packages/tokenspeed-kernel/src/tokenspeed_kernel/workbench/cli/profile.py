"""``profile``: shows where a program spends its time, by kernel."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from tokenspeed_kernel.workbench.benchmark.metadata import collect_metadata
from tokenspeed_kernel.workbench.cli.output import fail, print_json, print_table
from tokenspeed_kernel.workbench.watching import CallTime, Process, read_times
from tokenspeed_kernel_base import config
from tokenspeed_kernel_base.storage import replace_file

_COLUMNS = ["operator", "kernel", "dtype", "shape", "calls", "host ms", "host us", "device ms", "device us", "share"]
FORMAT, VERSION = "tokenspeed-kernel profile", 1


def profile(program: list[str], output: Path | None, sort: str | None, top: int, as_json: bool) -> None:
    if output is not None and not output.parent.is_dir():
        fail(f"--output {output}: there is no folder {output.parent}")
    with tempfile.TemporaryDirectory(prefix="tokenspeed-kernel-profile-") as folder:
        code = _run(program, Path(folder), quiet=as_json)
        processes, found = read_times(Path(folder))
    found = _sorted(found, sort)
    table = _table(program, code, processes, found)
    if output is not None:
        replace_file(output, json.dumps(table, indent=2) + "\n")
    if as_json:
        print_json(table)
    else:
        _print(processes, found, top)
    raise typer.Exit(code if code >= 0 else 128 - code)


def _run(command: Sequence[str], folder: Path, *, quiet: bool) -> int:
    """Runs a command until it ends. Returns its exit code, or minus the number of the signal that ended it."""
    environment = {**os.environ, config.PREFIX + "PROFILE": str(folder)}
    # Ctrl-C also reaches the program, and the program decides whether to stop. This process ignores the signal, so that it can show
    # the calls that the program has made until then.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        restore = (lambda: signal.signal(signal.SIGINT, before)) if os.name == "posix" else None
        sys.stdout.flush()
        stdout = sys.stderr.fileno() if quiet else None
        return subprocess.run(command, env=environment, check=False, stdout=stdout, preexec_fn=restore).returncode
    except OSError as error:
        fail(f"{command[0]} cannot be run: {error.strerror}")
    finally:
        signal.signal(signal.SIGINT, before)


def _sorted(found: list[CallTime], by: str | None) -> list[CallTime]:
    by = by or ("device" if any(each.device.count for each in found) else "host")
    keys = {
        "device": lambda each: (_device_us(each) or 0.0, each.host.total_us),
        "host": lambda each: each.host.total_us,
        "calls": lambda each: each.host.count,
    }
    return sorted(found, key=keys[by], reverse=True)


def _device_us(each: CallTime) -> float | None:
    """Returns the device time of all calls of a kind, extrapolated from the calls that were timed on the device; None if none was
    timed there.
    """
    return each.device.total_us / each.device.count * each.host.count if each.device.count else None


def _fractions(found: Sequence[CallTime]) -> list[float | None]:
    """Returns the fraction of the total time that the calls of each kind take: of the device time if any call was timed on the
    device, else of the host time.
    """
    on_device = [_device_us(each) for each in found]
    if not any(on_device):
        on_device = [each.host.total_us for each in found]
    whole = sum(time_us or 0.0 for time_us in on_device)
    return [time_us / whole if time_us is not None and whole else None for time_us in on_device]


def _table(command: Sequence[str], code: int, processes: Sequence[Process], found: Sequence[CallTime]) -> dict[str, Any]:
    calls = []
    for each, share in zip(found, _fractions(found), strict=True):
        times: dict[str, Any] = {"calls": each.host.count, "host_us": each.host.total_us, "host_median_us": each.host.median_us}
        if each.device.count:
            times |= {"device_us": _device_us(each), "device_median_us": each.device.median_us, "device_calls": each.device.count}
        calls.append({**dataclasses.asdict(each.kind), **times, "share": share})
    return {
        "format": FORMAT,
        "version": VERSION,
        "metadata": dataclasses.asdict(collect_metadata(shlex.join(command))),
        "exit_code": code,
        "processes": [dataclasses.asdict(process) for process in processes],
        "calls": calls,
    }


def _print(processes: Sequence[Process], found: Sequence[CallTime], top: int) -> None:
    typer.echo()
    if not processes:
        typer.echo("nothing to show: the program did not import tokenspeed_kernel")
        return
    if not found:
        typer.echo("nothing to show: the program called no operator")
        return
    shown = list(zip(found, _fractions(found), strict=True))[: top or None]
    print_table(_COLUMNS, (_cells(each, share) for each, share in shown))
    if len(shown) < len(found):
        typer.echo(f"... and {len(found) - len(shown)} more; --top 0 shows all")
    host_s = sum(each.host.total_us for each in found) / 1e6
    calls = sum(each.host.count for each in found)
    many = f"{len(processes)} processes, the longest" if len(processes) > 1 else "one process,"
    typer.echo(
        f"\n{many} {processes[0].seconds:.3g} s; {calls} calls of {len(found)} kinds held their callers up for {host_s:.3g} s"
    )


def _cells(each: CallTime, share: float | None) -> list[str]:
    kind, device_us = each.kind, _device_us(each)
    device = ["", ""] if device_us is None else [f"{device_us / 1e3:.3f}", f"{each.device.median_us:.1f}"]
    host = [f"{each.host.total_us / 1e3:.3f}", f"{each.host.median_us:.1f}"]
    return [kind.operator, kind.kernel, kind.dtype, kind.shape, str(each.host.count), *host, *device, _percent(share)]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"

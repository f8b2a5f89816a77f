"""Tests capture files: many processes, killed processes, full disks, and files that are not captures."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Process, run_python, start_python

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.watching import Contents, ShapeCapture, UnreadableCaptureError, captures, load
from tokenspeed_kernel.workbench.watching.records import add_to
from tokenspeed_kernel_base import storage

# A program that captures calls with 1, 2 and 3 rows until it is told to stop. It sometimes prints the number of its calls so far.
WRITER = """
import sys, torch, tokenspeed_kernel as tk
tensors = [torch.ones(n, 8) for n in (1, 2, 3)]
made = 0
print("ready", flush=True)
while made < int(sys.argv[1]):
    tk.silu_and_mul(tensors[made % 3])
    made += 1
"""


def record(number: int, count: int = 1, samples: tuple[Any, ...] = ()) -> dict[str, Any]:
    work = {"seen": len(samples), "samples": list(samples), "histograms": {}}
    return {"operator": f"f.m{number}", "kernel": "k", "traits": {}, "arguments": {}, "count": count, "work": work}


def counts(contents: Contents) -> dict[str, int]:
    return {found["operator"]: found["count"] for found in contents.records}


def written(path: Path) -> int:
    """The number of calls in the file; 0 if the file does not exist yet."""
    return sum(counts(load(path)).values()) if path.exists() else 0


def wait_until(happened: Callable[[], bool]) -> None:
    while not happened():
        time.sleep(0.01)


def tidy(path: Path) -> bool:
    return [found.name for found in path.parent.iterdir()] == [path.name]


def start_writer(path: Path, calls: int) -> Process | subprocess.Popen[str]:
    environment = {**os.environ, "TOKENSPEED_KERNEL_CAPTURE_SHAPES": str(path), "OMP_NUM_THREADS": "1"}
    process = start_python("-c", WRITER, str(calls), env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_several_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    add_to(path, Contents([record(0, 2, ({"n": [1]},))], {"f.m9": 1}))
    add_to(path, Contents([record(0, 3, ({"n": [1]}, {"n": [2]})), record(1)], {"f.m9": 1, "f.m8": 1}))
    contents = load(path)
    assert counts(contents) == {"f.m0": 5, "f.m1": 1}
    assert contents.dropped == {"f.m9": 2, "f.m8": 1}
    assert contents.records[0]["work"] == {"seen": 3, "samples": [{"n": [1]}, {"n": [2]}], "histograms": {}}
    assert tidy(path)


def test_a_copy_is_a_capture(tmp_path: Path) -> None:
    """A copy can be read even if another process was writing to the file while it was copied."""
    kept = ShapeCapture(tmp_path / "shapes")
    kept.record("f.m", "k", 1, {}, {})
    kept.write()
    shutil.copy(tmp_path / "shapes", tmp_path / "copy")
    kept.finish()
    assert counts(load(tmp_path / "copy")) == {"f.m": 1}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_capture_in_a_read_only_folder_is_read(tmp_path: Path) -> None:
    add_to(tmp_path / "shapes", Contents([record(0)]))
    (tmp_path / "shapes").chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        assert counts(load(tmp_path / "shapes")) == {"f.m0": 1}
        with pytest.raises(OSError, match="shapes: attempt to write a readonly database"):
            add_to(tmp_path / "shapes", Contents([record(0)]))
    finally:
        tmp_path.chmod(0o700)


def test_on_a_full_disk_nothing_is_written_by_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shapes"
    add_to(path, Contents([record(0)]))
    begin = storage._begin

    def full(*args: Any) -> Any:
        connection = begin(*args)
        connection.execute("PRAGMA max_page_count = 4")
        return connection

    many = Contents([record(number) for number in range(500)])
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_begin", full)
        with pytest.raises(OSError, match="shapes: database or disk is full"):
            add_to(path, many)
    assert counts(load(path)) == {"f.m0": 1}
    add_to(path, many)
    assert len(counts(load(path))) == 500
    assert tidy(path)


@pytest.mark.parametrize("text", ["not json\n", '{"some": "json"}\n', "x" * 5000])
def test_other_files_are_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(UnreadableCaptureError, match="notes holds no captured shapes"):
        load(path)
    with pytest.raises(UnreadableCaptureError, match="notes holds no captured shapes"):
        ShapeCapture(path)
    assert path.read_text() == text
    assert tidy(path)


def test_other_databases_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other"
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE rows (key, value)")
    before = path.read_bytes()
    for use in (load, ShapeCapture):
        with pytest.raises(UnreadableCaptureError, match=r"other holds no captured shapes: .*database of another program"):
            use(path)
    assert path.read_bytes() == before


def test_an_empty_file_is_a_capture_of_nothing(tmp_path: Path) -> None:
    """A process that is killed while it creates the file leaves an empty file. An empty file must be readable and writable."""
    (tmp_path / "shapes").write_bytes(b"")
    assert load(tmp_path / "shapes") == Contents()
    add_to(tmp_path / "shapes", Contents([record(0)]))
    assert counts(load(tmp_path / "shapes")) == {"f.m0": 1}


def test_captures_of_other_releases_are_refused(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"format": "tokenspeed-kernel shapes", "version": 1}\n')
    with pytest.raises(UnreadableCaptureError, match="lines is a capture of an older release"):
        load(tmp_path / "lines")
    add_to(tmp_path / "shapes", Contents())
    with contextlib.closing(sqlite3.connect(tmp_path / "shapes")) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(UnreadableCaptureError, match="has version 99, this release reads version 2"):
        load(tmp_path / "shapes")


def test_a_damaged_capture_is_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    add_to(path, Contents([record(number) for number in range(500)]))
    whole = path.read_bytes()
    damaged = whole[:4096] + bytes(len(whole) - 4096)
    path.write_bytes(damaged)
    storage.warn_once.cache_clear()
    with pytest.raises(UnreadableCaptureError, match=r"shapes holds no captured shapes: .*malformed"):
        load(path)
    with pytest.warns(storage.StorageWarning, match=r"shapes are damaged: .*kept as .*shapes\.corrupt"):
        add_to(path, Contents([record(0)]))
    assert counts(load(path)) == {"f.m0": 1}
    assert (tmp_path / "shapes.corrupt").read_bytes() == damaged


def test_nothing_was_captured(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no captured shapes at"):
        load(tmp_path / "shapes")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        ShapeCapture(tmp_path / "file" / "shapes")
    environment = {**os.environ, "TOKENSPEED_KERNEL_CAPTURE_SHAPES": str(tmp_path / "file" / "shapes")}
    done = run_python("-c", "import tokenspeed_kernel", env=environment)
    assert done.returncode == 1
    assert "ConfigurationError: shapes cannot be captured to" in done.stderr


def test_writing_goes_on_when_the_disk_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "_SECONDS_BETWEEN_WRITES", 0.01)
    path = tmp_path / "shapes"
    failing = [False]

    def refuse(*args: Any) -> None:
        if failing[0]:
            raise OSError(28, "No space left on device")
        add_to(*args)

    monkeypatch.setattr(captures, "add_to", refuse)
    kept = ShapeCapture(path)
    failing[0] = True
    with pytest.warns(UserWarning, match="cannot be written to .*No space left") as said:  # noqa: PT031
        kept.record("f.m", "k", 1, {}, {})
        wait_until(lambda: bool(said.list))
    assert counts(load(path)) == {}
    failing[0] = False
    wait_until(lambda: bool(counts(load(path))))
    assert counts(load(path)) == {"f.m": 1}
    kept.finish()


def test_captured_calls_reach_the_file_soon(tmp_path: Path) -> None:
    process = start_writer(tmp_path / "shapes", 10**9)
    try:
        for _ in range(2):  # while the writer continues to count
            before = written(tmp_path / "shapes")
            wait_until(lambda before=before: written(tmp_path / "shapes") > before)  # type: ignore[misc]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("times", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_processes_leave_readable_files(tmp_path: Path, times: int) -> None:
    """Kills processes while they write to the file. The file must stay readable and keep all earlier calls. The next process that
    ends must remove what killed processes left beside the file."""
    path = tmp_path / "shapes"
    before = 0
    for turn in range(times):
        process = start_writer(path, 10**9)
        wait_until(lambda before=before: written(path) > before)  # type: ignore[misc]
        time.sleep(0.05 * (turn % 5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        contents = load(path)
        assert {record["operator"] for record in contents.records} <= {"activation.silu_and_mul"}
        assert {record["arguments"]["x"]["shape"][0] for record in contents.records} <= {1, 2, 3}
        now = sum(record["count"] for record in contents.records)
        assert now > before
        before = now
    assert start_writer(path, 9).wait() == 0
    assert sum(record["count"] for record in load(path).records) == before + 9
    assert tidy(path)


@pytest.mark.parametrize("calls", [300, pytest.param(30000, marks=pytest.mark.slow)])
def test_processes_that_end_by_themselves_lose_nothing(tmp_path: Path, calls: int) -> None:
    path = tmp_path / "shapes"
    processes = [start_writer(path, calls) for _ in range(4)]
    while any(process.poll() is None for process in processes):
        contents = load(path)
        assert sum(record["count"] for record in contents.records) <= 4 * calls
    assert [process.wait() for process in processes] == [0] * 4
    found = {record["arguments"]["x"]["shape"][0]: record["count"] for record in load(path).records}
    assert found == dict.fromkeys((1, 2, 3), 4 * calls // 3)
    assert tidy(path)


def _child(path: Path, calls: int) -> None:
    for _ in range(calls):
        tk.silu_and_mul(torch.ones(7, 8))
    wait_until(lambda: any(found["arguments"]["x"]["shape"] == [7, 8] and found["count"] == calls for found in load(path).records))
    os._exit(0)  # like a worker that exits without cleaning up


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked on POSIX")
def test_a_forked_process_counts_its_own_calls(tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    with tk.shape_capture(path):
        tk.silu_and_mul(torch.ones(5, 8))
        child = multiprocessing.get_context("fork").Process(target=_child, args=(path, 3))
        child.start()
        tk.silu_and_mul(torch.ones(5, 8))
        child.join()
    assert {found["arguments"]["x"]["shape"][0]: found["count"] for found in load(path).records} == {5: 2, 7: 3}
    assert tidy(path)


def test_captures_of_one_file_from_threads_and_nested(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(tk.shape_capture(tmp_path / "shapes"))
        tk.silu_and_mul(torch.ones(5, 8))
    assert [found["count"] for found in load(tmp_path / "shapes").records] == [3]


def test_without_sqlite_the_core_is_imported_all_the_same(tmp_path: Path) -> None:
    program = f"""if True:
        import sys
        sys.modules["sqlite3"] = sys.modules["fcntl"] = None
        import tokenspeed_kernel as tk, torch
        tk.silu_and_mul(torch.ones(1, 8))
        try:
            tk.start_shape_capture({str(tmp_path / "shapes")!r})
        except OSError as error:
            print(error)"""
    done = run_python("-c", program)
    assert done.stdout == "this Python was built without sqlite3, which locks and captures need\n", done.stderr

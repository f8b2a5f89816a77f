"""Captures in files: many processes, killed ones, cut lines."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.capture import UnreadableCaptureError, load
from tokenspeed_kernel.workbench.recording import Contents, Journal, ShapeCapture, journal, read, recorder

# Counts calls of n rows until it is told to stop, and says how many of each it has made, in steps.
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


def tidy(path: Path) -> bool:
    return [found.name for found in path.parent.iterdir()] == [path.name]


def start_writer(path: Path, calls: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "TOKENSPEED_KERNEL_CAPTURE_SHAPES": str(path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(calls)], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_part_counts_once_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    mine, known = Journal(path), set[int]()
    mine.write({0: record(0), 1: record(1, 5)}, known, {})
    assert counts(read(path)) == {"f.m0": 1, "f.m1": 5}
    mine.write({0: record(0, 7)}, known, {"f.m9": 2})
    assert counts(read(path)) == {"f.m0": 7, "f.m1": 5}
    assert read(path).dropped == {"f.m9": 2}
    mine.finish()
    assert counts(read(path)) == {"f.m0": 7, "f.m1": 5}
    assert read(path).dropped == {"f.m9": 2}
    assert tidy(path)


def test_several_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    first, second = Journal(path), Journal(path)
    first.write({0: record(0, 2, ({"n": [1]},))}, set(), {"f.m9": 1})
    second.write({0: record(0, 3, ({"n": [1]}, {"n": [2]})), 1: record(1)}, set(), {"f.m9": 1, "f.m8": 1})
    first.finish()
    assert counts(read(path)) == {"f.m0": 5, "f.m1": 1}
    second.finish()
    contents = read(path)
    assert counts(contents) == {"f.m0": 5, "f.m1": 1}
    assert contents.dropped == {"f.m9": 2, "f.m8": 1}
    assert contents.records[0]["work"] == {"seen": 3, "samples": [{"n": [1]}, {"n": [2]}], "histograms": {}}
    assert tidy(path)


def test_a_line_that_was_cut_off_is_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    mine = Journal(path)
    mine.write({0: record(0, 3)}, set(), {})
    (part,) = journal._part_files(path)
    whole = part.read_bytes()
    for cut in range(1, len(whole)):
        part.write_bytes(whole[:-cut])
        assert counts(read(path)) == {}
    part.write_bytes(whole + b'{"record": 0, "cou')
    assert counts(read(path)) == {"f.m0": 3}


def test_a_part_is_written_anew_when_most_of_it_is_superseded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_SUPERSEDED_LINES", 10)
    path = tmp_path / "shapes"
    mine, known = Journal(path), set[int]()
    (part,) = journal._part_files(path)
    for count in range(1, 100):
        mine.write({0: record(0, count), 1: record(1, 2 * count)}, known, {})
        assert counts(read(path)) == {"f.m0": count, "f.m1": 2 * count}
        assert len(part.read_text().splitlines()) < 40
    assert not journal._abandoned(path), "it is still the process's own"
    mine.finish()
    assert counts(read(path)) == {"f.m0": 99, "f.m1": 198}
    assert tidy(path)


def test_killed_between_adding_and_deleting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shapes"
    mine = Journal(path)
    mine.write({0: record(0, 3)}, set(), {})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            mine.finish()
    assert counts(read(path)) == {"f.m0": 3}
    mine.discard()
    other = Journal(path)
    other.write({0: record(0)}, set(), {})
    other.finish()
    assert counts(read(path)) == {"f.m0": 4}
    assert tidy(path)


def test_a_full_disk_leaves_no_half_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shapes"
    mine, known = Journal(path), set[int]()
    mine.write({0: record(0)}, known, {})
    append = journal._append

    def fill(file: Any, lines: Any) -> None:
        file.write(b'{"record": 1, "op')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "_append", fill)
    with pytest.raises(OSError, match="No space"):
        mine.write({1: record(1)}, known, {})
    monkeypatch.setattr(journal, "_append", append)
    mine.write({1: record(1)}, known, {})
    assert counts(read(path)) == {"f.m0": 1, "f.m1": 1}


@pytest.mark.parametrize("text", ["", "not json\n", '{"some": "json"}\n', '["list"]\n', '{"format": "tokenspeed-kernel shapes"}'])
def test_other_files_are_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(UnreadableCaptureError, match="notes holds no captured shapes"):
        load(path)
    mine = Journal(path)
    mine.write({0: record(0)}, set(), {})
    with pytest.raises(UnreadableCaptureError):
        mine.finish()
    assert path.read_text() == text


def test_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shapes").write_text(json.dumps({"format": journal.FORMAT, "version": 99}) + "\n")
    with pytest.raises(UnreadableCaptureError, match="version 99 of captured shapes, this reads version 1"):
        load(tmp_path / "shapes")


def test_nothing_was_captured(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no captured shapes at"):
        load(tmp_path / "shapes")
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        ShapeCapture(tmp_path / "file" / "shapes")
    environment = {**os.environ, "TOKENSPEED_KERNEL_CAPTURE_SHAPES": str(tmp_path / "file" / "shapes")}
    done = subprocess.run([sys.executable, "-c", "import tokenspeed_kernel"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ConfigurationError: shapes cannot be captured to" in done.stderr


def test_writing_goes_on_when_the_disk_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_SECONDS_BETWEEN_WRITES", 0.01)
    path = tmp_path / "shapes"
    failing = [True]
    write = Journal.write

    def refuse(self: Journal, *args: Any) -> None:
        if failing[0]:
            raise OSError(28, "No space left on device")
        write(self, *args)

    monkeypatch.setattr(Journal, "write", refuse)
    kept = ShapeCapture(path)
    with pytest.warns(UserWarning, match="captured shapes cannot be written to .*No space left"):  # noqa: PT031
        kept.record("f.m", "k", 1, {}, {})
        time.sleep(0.2)
    assert counts(read(path)) == {}
    failing[0] = False
    deadline = time.monotonic() + 10
    while not counts(read(path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert counts(read(path)) == {"f.m": 1}
    kept.finish()


def test_what_was_captured_is_soon_in_the_file(tmp_path: Path) -> None:
    process = start_writer(tmp_path / "shapes", 10**9)
    try:
        time.sleep(2.5 * recorder._SECONDS_BETWEEN_WRITES)
        early = sum(counts(load(tmp_path / "shapes")).values())
        time.sleep(2.5 * recorder._SECONDS_BETWEEN_WRITES)
        late = sum(counts(load(tmp_path / "shapes")).values())
    finally:
        process.kill()
        process.wait()
    assert 0 < early < late


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_processes_leave_readable_files(tmp_path: Path, times: int) -> None:
    """And whoever ends next takes in what they left."""
    path = tmp_path / "shapes"
    before = 0
    for turn in range(times):
        process = start_writer(path, 10**9)
        time.sleep(0.02 * (turn % 5) + 0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        contents = load(path)
        assert {record["operator"] for record in contents.records} <= {"activation.silu_and_mul"}
        assert {record["arguments"]["x"]["shape"][0] for record in contents.records} <= {1, 2, 3}
        now = sum(record["count"] for record in contents.records)
        assert now >= before
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


def _child(calls: int) -> None:
    for _ in range(calls):
        tk.silu_and_mul(torch.ones(7, 8))
    time.sleep(4 * recorder._SECONDS_BETWEEN_WRITES)
    os._exit(0)  # as a worker that is ended without cleaning up


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked on POSIX")
def test_a_forked_process_counts_its_own_calls(tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    with tk.shape_capture(path):
        tk.silu_and_mul(torch.ones(5, 8))
        child = multiprocessing.get_context("fork").Process(target=_child, args=(3,))
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

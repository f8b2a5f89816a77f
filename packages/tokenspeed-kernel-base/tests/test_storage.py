"""Tests files that several processes share: atomic replacement, locks, databases."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tokenspeed_kernel_base import storage
from tokenspeed_kernel_base.storage import DamagedFileError, Database, StorageWarning, locked, replace_file, set_aside

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def database(folder: Path) -> Database:
    return Database(folder / "rows", "test", 1)


# -- whole files ---------------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, "text")
    replace_file(path, b"\xff\n")
    assert path.read_bytes() == b"\xff\n"
    assert names(path.parent) == {"file"}


def test_a_file_that_cannot_be_replaced_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, "old")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file"}
    with pytest.raises(OSError, match=r"Not a directory"):
        replace_file(path / "below", "new")


def test_a_damaged_file_is_set_aside_with_a_warning(tmp_path: Path) -> None:
    storage.warn_once.cache_clear()
    (tmp_path / "file").write_text("damaged")
    with pytest.warns(StorageWarning, match=r"file is damaged; kept as .*file\.corrupt"):
        set_aside(tmp_path / "file", "file is damaged")
    assert names(tmp_path) == {"file.corrupt"}
    with pytest.warns(StorageWarning, match=r"absent is damaged; which cannot be set aside: "):
        set_aside(tmp_path / "absent", "absent is damaged")


# -- locks ---------------------------------------------------------------------------------------------------------------------


def test_a_lock_is_waited_for_no_longer_than_wanted(tmp_path: Path) -> None:
    with locked(tmp_path / "x"):  # the lock stays held, so the wait ends at its time limit
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=r"another process has held .*x\.lock for 0\.1 s"), locked(tmp_path / "x", 0.1):
            pass
        assert time.monotonic() - begun >= 0.1
        with locked(tmp_path / "y", 0.0):
            pass
    with locked(tmp_path / "x", 0.0):
        pass
    assert names(tmp_path) == {"x.lock", "y.lock"}


def test_threads_take_turns(tmp_path: Path) -> None:
    inside: list[int] = []

    def work() -> None:
        for _ in range(5):
            with locked(tmp_path / "x"):
                inside.append(1)
                assert len(inside) == 1
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == []


def test_the_holder_removes_what_killed_writers_left(tmp_path: Path) -> None:
    for left in (".x.1-2.part", ".x.1-2.part.so", ".y.1-2.part"):
        (tmp_path / left).touch()
    with locked(tmp_path / "x"):
        assert names(tmp_path) == {"x.lock", ".y.1-2.part"}


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = f"""if True:
        import pathlib, sys
        from tokenspeed_kernel_base.storage import locked
        with locked(pathlib.Path({str(tmp_path / "x")!r})):
            print("held", flush=True)
            sys.stdin.read()"""
    holder = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError), locked(tmp_path / "x", 0.1):
        pass
    holder.kill()
    holder.communicate()
    with locked(tmp_path / "x", 0.0):
        pass


@forks
def test_a_forked_process_holds_none_of_its_parents_locks(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with locked(tmp_path / "x"):
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(TimeoutError), locked(tmp_path / "x", 0.0):
                    pass
                os.write(writing, b"refused")
                with locked(tmp_path / "x", math.inf):  # the parent holds this lock: wait until the parent releases it
                    os._exit(0)
            finally:
                os._exit(1)
        os.close(writing)
        assert os.read(reading, 7) == b"refused"
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0


@forks
def test_the_lock_is_let_go_though_a_child_has_it_open(tmp_path: Path) -> None:
    with locked(tmp_path / "x"):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with locked(tmp_path / "x", 0.0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# -- databases -----------------------------------------------------------------------------------------------------------------


def test_rows_come_back_and_the_file_stands_alone(tmp_path: Path) -> None:
    with database(tmp_path).changing() as rows:
        assert rows.get("a") is None
        rows.put("a", {"n": [1, None, "x"]})
        rows.put("b", 2)
        rows.put("a", {"n": [1, None, "y"]})
        assert rows.get("a") == {"n": [1, None, "y"]}
    assert database(tmp_path).read() == {"a": {"n": [1, None, "y"]}, "b": 2}
    assert names(tmp_path) == {"rows"}


def test_a_change_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    with database(tmp_path).changing() as rows:
        rows.put("a", 1)
    with pytest.raises(ZeroDivisionError), database(tmp_path).changing() as rows:
        rows.put("a", 2 // 0)
    with pytest.raises(TypeError, match="not JSON serializable"), database(tmp_path).changing() as rows:
        rows.put("b", rows.put("a", 2) or object())
    assert database(tmp_path).read() == {"a": 1}
    assert names(tmp_path) == {"rows"}


def test_other_content_and_other_versions_are_refused(tmp_path: Path) -> None:
    with database(tmp_path).changing() as rows:
        rows.put("a", 1)
    with pytest.raises(DamagedFileError, match="rows is a database of another program"):
        Database(tmp_path / "rows", "TEST", 1).read()
    with (
        pytest.raises(DamagedFileError, match="rows has version 1, this release reads version 2"),
        Database(tmp_path / "rows", "test", 2).changing(),
    ):
        pass
    (tmp_path / "text").write_text("x" * 2000)
    with pytest.raises(DamagedFileError, match="text: file is not a database"):
        Database(tmp_path / "text", "test", 1).read()
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent"):
        Database(tmp_path / "absent", "test", 1).read()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder: unable to open database file"), Database(tmp_path / "folder", "test", 1).changing():
        pass


def _add(folder: Path, times: int) -> None:
    for _ in range(times):
        with database(folder).changing() as rows:
            rows.put("sum", (rows.get("sum") or 0) + 1)
    os._exit(0)


@forks
def test_processes_and_threads_that_are_forked_from_lose_nothing(tmp_path: Path) -> None:
    """The process forks while another thread keeps writing. A child that inherited an unfinished change would hang or corrupt the
    file."""
    stop, written = threading.Event(), [0]

    def write() -> None:
        while not stop.is_set():
            with database(tmp_path).changing() as rows:
                rows.put("mine", written[0] + 1)
            written[0] += 1

    thread = threading.Thread(target=write)
    thread.start()
    context = multiprocessing.get_context("fork")
    try:
        for _ in range(5):
            children = [context.Process(target=_add, args=(tmp_path, 4)) for _ in range(2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
                assert child.exitcode == 0
    finally:
        stop.set()
        thread.join()
    assert database(tmp_path).read() == {"sum": 40, "mine": written[0]}

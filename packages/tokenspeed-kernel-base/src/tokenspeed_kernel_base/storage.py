"""Reads and writes files that several processes share. A killed process damages no file. Needs only the standard library.

Every file is written in one of three ways:

* `replace_file`: a small file that is always written whole, such as a report, a table of results or a compiled program.
* `locked`: work that one process does while others wait, such as changing a file of results, or compiling once.
* `Database`: a file that many processes add to all the time, such as a capture of calls.

The locks are locks of SQLite databases. These locks work on every system, and the operating system releases them when their process
ends. SQLite's state in memory must not be used on both sides of a fork. So a connection exists for one operation only, and a fork
waits until no thread is inside SQLite. A forked child closes the connections of locks that it inherits. The parent still holds
these locks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlite3

# Time limit for acquiring a database's lock, and time between two attempts. Writers hold a lock for milliseconds.
_PATIENCE_S = 10.0
_POLL_S = 0.01
_PART = ".part"

_inside = threading.Lock()  # held while this process is inside SQLite
_held: set[sqlite3.Connection] = set()  # connections of held locks


class StorageWarning(UserWarning):
    """A file could not be read or written; the message says how the program continues."""


@functools.cache
def warn_once(message: str) -> None:
    """Issues a `StorageWarning`, once per message and process."""
    warnings.warn(message, StorageWarning, stacklevel=4)


class DamagedFileError(OSError):
    """A file's content does not match its name: the file was damaged, or another program wrote it."""


# -- whole files ---------------------------------------------------------------------------------------------------------------


def part_of(path: Path) -> Path:
    """Returns the path of a temporary file beside ``path``, unique to this thread. `replace_file` writes this file and renames it
    to ``path``. `locked` removes temporary files of killed writers.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}{_PART}")


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file atomically: readers find either the old content or the new content.

    Raises:
        OSError: the file cannot be written. The old content is unchanged.
    """
    part = part_of(path)
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def set_aside(path: Path, problem: str) -> None:
    """Renames a damaged file to ``<name>.corrupt``, so that it can be inspected and a new file can take its place. Warns.

    Args:
        path: the file.
        problem: text of the warning; it names the file.
    """
    try:
        kept = f"kept as {path.replace(path.with_name(path.name + '.corrupt'))}"
    except OSError as error:
        kept = f"which cannot be set aside: {error}"
    warn_once(f"{problem}; {kept}")


# -- locks ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Holds a file's lock inside the block: no other thread or process can acquire it. Removes temporary files of killed writers.

    Args:
        path: the file; need not exist. The lock is ``<name>.lock`` beside it. A missing folder is created.
        patience_s: seconds to wait for the lock.

    Raises:
        TimeoutError: another thread or process held the lock for ``patience_s``.
        OSError: the lock file cannot be created.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    connection = _begin(lock, "journal_mode = MEMORY", patience_s)
    _held.add(connection)
    _inside.release()
    try:
        for left in path.parent.glob(f".{path.name}.*{_PART}*"):
            left.unlink(missing_ok=True)
        yield
    finally:
        with _inside:
            _held.discard(connection)
            connection.close()


def _sqlite() -> Any:
    """The module ``sqlite3``, imported on demand: the import takes time, and some builds of Python lack it. The caller of the first
    call must hold `_inside`, which delays forks: a child that is forked while another thread imports a module can never import that
    module."""
    try:
        import sqlite3
    except ImportError:
        raise OSError("this Python was built without sqlite3, which locks and captures need") from None
    return sqlite3


def _begin(path: Path, setting: str, patience_s: float) -> sqlite3.Connection:
    """Returns a connection that holds a database's write lock. `_inside` is then acquired, and the caller must release it."""
    until = time.monotonic() + patience_s
    while True:
        _inside.acquire()
        try:
            return _begun(path, setting)
        except TimeoutError:
            _inside.release()
        except BaseException:
            _inside.release()
            raise
        if time.monotonic() > until:
            raise TimeoutError(f"another process has held {path} for {patience_s:g} s")
        time.sleep(_POLL_S)


def _begun(path: Path, setting: str) -> sqlite3.Connection:
    lite = _sqlite()
    connection: sqlite3.Connection | None = None
    try:
        connection = lite.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        connection.execute(f"PRAGMA {setting}")
        connection.execute("BEGIN IMMEDIATE")
        return connection
    except lite.DatabaseError as error:
        if connection is not None:
            connection.close()
        raise _as_oserror(path, error) from None


def _after_fork_in_child() -> None:
    _inside.release()
    for connection in _held:  # changes no file, because nothing was written; the parent process keeps its locks
        connection.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_inside.acquire, after_in_parent=_inside.release, after_in_child=_after_fork_in_child)


# -- databases -----------------------------------------------------------------------------------------------------------------


class Rows:
    """The rows of a database, inside a `Database.changing` block. Keys are text, values are JSON values."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, key: str) -> Any:
        """The value in the row of a key; None if there is no such row."""
        found = self._connection.execute("SELECT value FROM rows WHERE key = ?", (key,)).fetchone()
        return None if found is None else json.loads(found[0])

    def put(self, key: str, value: Any) -> None:
        self._connection.execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (key, json.dumps(value)))


class Database:
    """A table of values by key in one SQLite file. Any number of processes can read and change it.

    A `changing` block takes effect completely or not at all, even if the process is killed. SQLite keeps a rollback journal instead
    of a write-ahead log. A write-ahead log would be a second file to copy, would require write access to the folder for readers,
    and does not work on network file systems.

    Args:
        path: the file; need not exist.
        content: four ASCII letters that name the content. The file stores ``content`` and ``version``, and both are checked when it
            is opened.
        version: version of the row format, 1 or more.
    """

    def __init__(self, path: Path, content: str, version: int) -> None:
        self.path, self._version = path, version
        self._application = int.from_bytes(content.encode("ascii"), "big")

    def read(self) -> dict[str, Any]:
        """All rows of the database; empty if the file is empty. Writes nothing, and works while other processes write.

        Raises:
            FileNotFoundError: the file does not exist.
            DamagedFileError: the file is another kind of database, or has another version.
            OSError: the file cannot be read.
        """
        if not self.path.exists():
            raise FileNotFoundError(f"there is no file {self.path}")
        uri = f"{self.path.absolute().as_uri()}?mode=rw"
        with _inside:
            sqlite3 = _sqlite()
        try:
            with _inside, contextlib.closing(sqlite3.connect(uri, timeout=_PATIENCE_S, uri=True)) as db:
                found = db.execute("SELECT key, value FROM rows").fetchall() if self._is_ours(db) else []
                return {key: json.loads(value) for key, value in found}
        except sqlite3.DatabaseError as error:
            raise _as_oserror(self.path, error) from None

    @contextlib.contextmanager
    def changing(self) -> Iterator[Rows]:
        """Holds the database's write lock inside the block, and yields the rows. Creates the file and its folder if they are
        missing.

        Nothing changes if the block or this function raises an error. Keep the block short: a fork of this process waits until the
        block ends.

        Raises:
            DamagedFileError: the file is another kind of database, or has another version.
            OSError: the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = _begin(self.path, "synchronous = NORMAL", _PATIENCE_S)
        sqlite3 = _sqlite()
        try:
            connection.execute(f"PRAGMA busy_timeout = {_PATIENCE_S * 1e3:.0f}")  # a commit waits for readers
            if not self._is_ours(connection):
                connection.execute("CREATE TABLE rows (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
                connection.execute(f"PRAGMA application_id = {self._application}")
                connection.execute(f"PRAGMA user_version = {self._version}")
            yield Rows(connection)
            connection.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            raise _as_oserror(self.path, error) from None
        finally:
            connection.close()
            _inside.release()

    def _is_ours(self, connection: sqlite3.Connection) -> bool:
        """Whether a database has the content and the version of this object. False for an empty database."""
        (application,), (version,) = (
            connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
        )
        if (application, version) == (self._application, self._version):
            return True
        if application == self._application:
            raise DamagedFileError(f"{self.path} has version {version}, this release reads version {self._version}")
        if application or connection.execute("SELECT 1 FROM sqlite_master").fetchone() is not None:
            raise DamagedFileError(f"{self.path} is a database of another program")
        return False


def _as_oserror(path: Path, error: sqlite3.DatabaseError) -> OSError:
    """Converts a SQLite error to an OSError whose message can be understood without knowledge of SQLite."""
    if "is locked" in str(error):
        return TimeoutError(f"another process holds {path}")
    if type(error) is _sqlite().DatabaseError:  # the file is no database or is damaged; all other errors have subclasses
        return DamagedFileError(f"{path}: {error}")
    return OSError(f"{path}: {error}")

"""Starts Python programs in processes that have imported PyTorch already. The import takes most of a short program's time.

`run_python` and `start_python` replace ``subprocess.run`` and ``subprocess.Popen`` for ``[sys.executable, ...]``. The new process
is a fork of a server, which has imported PyTorch and no module of this repository. So a program that must not import PyTorch, and
one that needs options of the interpreter, must run in a new process of `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any


def run_python(
    *command: str, env: Mapping[str, str] | None = None, cwd: Path | str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program, and returns its exit code and its output.

    Args:
        command: the words after ``python``: ``-c PROGRAM WORDS...``, ``-m MODULE WORDS...`` or ``FILE WORDS...``.
        env: the program's environment variables; by default, those of this process.
        cwd: the folder in which the program runs; by default, that of this process.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = start_python(*command, stdout=out, stderr=err, env=env, cwd=cwd).wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def start_python(
    *command: str,
    stdin: IO[str] | int | None = None,
    stdout: IO[str] | int | None = None,
    stderr: IO[str] | int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
) -> Process | subprocess.Popen[str]:
    """Starts a program, see `run_python`. The streams are files, file descriptors, ``subprocess.PIPE`` for stdin and stdout, or
    None for this process's own streams."""
    if sys.platform != "linux":
        return subprocess.Popen([sys.executable, *command], stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd, text=True)
    return Process(command, (stdin, stdout, stderr), {**(os.environ if env is None else env)}, os.path.abspath(cwd or os.getcwd()))


class Process:
    """A running program, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, command: tuple[str, ...], streams: tuple[Any, ...], env: dict[str, str], cwd: str) -> None:
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self._status, reporting = socket.socketpair()
        given = [*streams]
        if given[0] == subprocess.PIPE:
            given[0], writing = os.pipe()
            self.stdin = os.fdopen(writing, "w")
        if given[1] == subprocess.PIPE:
            reading, given[1] = os.pipe()
            self.stdout = os.fdopen(reading)
        files = [stream.fileno() if hasattr(stream, "fileno") else stream for stream in given]
        files = [number if file is None else file for number, file in enumerate(files)]
        message = json.dumps([command, env, cwd]).encode()
        socket.send_fds(_server(), [message], [reporting.fileno(), *files])
        reporting.close()
        for one, other in zip(given, streams, strict=True):
            if one != other:  # the program's end of a pipe
                os.close(one)
        self._lines = self._status.makefile()
        self.pid = int(self._lines.readline())

    def wait(self) -> int:
        """Waits for the program's end, and returns its exit code, which is negative after a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(int(self._lines.readline()))
            self._lines.close()
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """Returns the exit code, or None while the program runs."""
        if self.returncode is None:
            self._status.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self._status.recv(1, socket.MSG_PEEK)
                self._status.setblocking(True)
                return self.wait()
            self._status.setblocking(True)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> socket.socket:
    """Starts the server of this process, and returns the socket for requests. The server ends when this process ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(theirs.fileno())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # read when PyTorch is imported
    server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
    theirs.close()

    def stop() -> None:
        ours.close()
        server.wait()

    atexit.register(stop)
    return ours


# -- the server --------------------------------------------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> list[str]:
    """Forks a process for each request. Returns only in these processes, with the command to run."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    requests.close()
    command, environment, folder = json.loads(message)
    status, *streams = files
    pid = os.fork()
    if pid:  # this process waits for the program, while the server forks others
        for file in streams:
            os.close(file)
        os.write(status, b"%d\n" % pid)
        os.write(status, b"%d\n" % os.waitpid(pid, 0)[1])
        os._exit(0)
    os.close(status)
    for number, file in enumerate(streams):
        os.dup2(file, number)
    for file in streams:
        os.close(file)
    os.chdir(folder)
    before, after = ([*filter(None, env.get("PYTHONPATH", "").split(os.pathsep))] for env in (os.environ, environment))
    sys.path[:] = [*after, *(path for path in sys.path if path not in before)]
    os.environ.clear()
    os.environ.update(environment)
    return command  # type: ignore[no-any-return]


def _run(command: list[str]) -> None:
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path.insert(0, "")
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(command[1], "<string>", "exec"), vars(module))
    elif command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    import torch  # noqa: F401

    gc.freeze()  # so that the end of a program does not look through PyTorch's objects
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))

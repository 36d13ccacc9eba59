"""Several trainings at a time on one machine."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PROBE = (sys.executable, "-c", "import torch; torch.ones(1, device='cuda').sum().item()")
MPS_TIMEOUT = 120  # seconds that any command of MPS may take


@contextmanager
def shared_gpu(
    say: Callable[[str], None], *, wanted: bool = True, probe: Sequence[str] = PROBE
) -> Iterator[dict[str, str]]:
    """Starts the service for a `with` block, where it is installed and works.

    A service that runs already, as `CUDA_MPS_PIPE_DIRECTORY` says, is used and left alone.

    Args:
        say: called with a line where the processes have to take turns instead.
        wanted: False for nothing at all.
        probe: a command that fails if the GPU cannot be used through the service.

    Yields:
        What to put into the environment of the processes.
    """
    if not wanted or PIPES in os.environ:
        yield {}
        return
    program = shutil.which(CONTROL)
    if program is None:
        say(f"{CONTROL} is not installed: the processes take turns on the GPU")
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        environment = {PIPES: str(Path(folder, "pipe")), LOGS: str(Path(folder, "log"))}
        for path in environment.values():
            Path(path).mkdir()
        started = _succeeds([program, "-d"], environment)
        try:
            works = started and _succeeds(probe, environment)
            if not works:
                what = "does not work" if started else "does not start"
                say(f"{CONTROL} {what} here: the processes take turns on the GPU")
            yield environment if works else {}
        finally:
            if started:
                _succeeds([program], environment, said=b"quit\n")


def _succeeds(command: Sequence[str], environment: dict[str, str], said: bytes = b"") -> bool:
    try:
        done = subprocess.run(  # noqa: S603
            command,
            input=said,
            # not pipes: the daemon keeps what it was started with open
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
            timeout=MPS_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


LAST = 12  # lines of what a failed process said
PATIENCE = 10.0  # seconds to end in, asked to


@dataclass(frozen=True)
class Job:
    """A process to run: its name and its command."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """A process that ended badly: its exit status and the last lines of its standard error."""

    job: Job
    status: int
    lines: tuple[str, ...]


@dataclass(eq=False)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    thread: threading.Thread = field(init=False)

    def failure(self) -> Failure | None:
        """Returns how it ended, if badly; None if well."""
        status = self.process.wait()
        self.thread.join()
        with self.errors as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
        return Failure(self.job, status, tuple(lines[-LAST:])) if status else None


def run_jobs(
    jobs: Sequence[Job],
    heard: Callable[[Job, str], None],
    *,
    at_once: int,
    environment: Mapping[str, str] | None = None,
) -> list[Failure]:
    """Runs all jobs, so many at once; one that fails does not stop the others.

    If this is interrupted or asked to end, so are all processes, before it raises.

    Args:
        jobs: in the order to start them.
        heard: called, in this thread, with every line of a job's standard output.
        at_once: how many run at the same time.
        environment: on top of that of this process.

    Returns:
        The failures, in the order of the jobs.
    """
    if at_once < 1:
        raise ValueError(f"{at_once} processes at once: at least 1 is needed")
    waiting, running, failures = list(jobs), list[_Running](), list[Failure]()
    said: queue.Queue[tuple[_Running, str | None]] = queue.Queue()
    with _ended_like_interrupted():
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(_start(waiting.pop(0), said, environment or {}))
                one, line = _next(said)
                if line is not None:
                    heard(one.job, line)
                    continue
                running.remove(one)
                failure = one.failure()
                failures += [] if failure is None else [failure]
        except BaseException:
            _stop([one.process for one in running])
            for one in running:
                one.failure()  # closes its files
            raise
    return sorted(failures, key=lambda failure: jobs.index(failure.job))


def _start(
    job: Job, said: queue.Queue[tuple[_Running, str | None]], environment: Mapping[str, str]
) -> _Running:
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # a file never fills up, as a pipe does
    process = subprocess.Popen(  # noqa: S603
        job.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
    )
    one = _Running(job, process, errors)

    def listen() -> None:
        assert process.stdout is not None  # noqa: S101
        with process.stdout as lines:
            for line in lines:
                said.put((one, line.decode(errors="replace").rstrip()))
        said.put((one, None))

    one.thread = threading.Thread(target=listen, daemon=True)
    one.thread.start()
    return one


def _next(
    said: queue.Queue[tuple[_Running, str | None]],
) -> tuple[_Running, str | None]:
    while True:
        with suppress(queue.Empty):
            return said.get(timeout=0.5)  # without a limit, some systems do not hear Ctrl-C


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Asks politely, then less so; a second Ctrl-C does not wait."""
    try:
        for ask in (signal.SIGINT, signal.SIGTERM):
            for process in processes:
                if process.poll() is None:
                    process.send_signal(ask)
            late = time.monotonic() + PATIENCE
            while any(process.poll() is None for process in processes):
                if time.monotonic() > late:
                    break
                time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """Lets SIGTERM and a closed terminal raise KeyboardInterrupt, so that nothing is left over."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {name: signal.signal(getattr(signal, name), interrupt) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)

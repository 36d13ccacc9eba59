"""Several trainings at a time on one machine, as processes that share a GPU through MPS."""

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
    warn: Callable[[str], None], *, enabled: bool = True, probe: Sequence[str] = PROBE
) -> Iterator[dict[str, str]]:
    """Starts NVIDIA's MPS service for a `with` block, if it is installed and works.

    A service that `CUDA_MPS_PIPE_DIRECTORY` names is used, and keeps running afterwards.

    Args:
        warn: Function that is called with a message if the processes have to take turns instead.
        enabled: Whether to use the service at all.
        probe: Command that fails if the GPU cannot be used through the service.

    Yields:
        Environment variables for the processes.
    """
    if not enabled or PIPES in os.environ:
        yield {}
        return
    program = shutil.which(CONTROL)
    if program is None:
        warn(f"{CONTROL} is not installed: the processes take turns on the GPU")
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
                warn(f"{CONTROL} {what} here: the processes take turns on the GPU")
            yield environment if works else {}
        finally:
            if started:
                _succeeds([program], environment, stdin=b"quit\n")


def _succeeds(command: Sequence[str], environment: dict[str, str], stdin: bytes = b"") -> bool:
    try:
        done = subprocess.run(  # noqa: S603
            command,
            input=stdin,
            # not pipes: the daemon would keep them open
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
            timeout=MPS_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


LAST = 12  # lines of standard error that are kept of a failed process
PATIENCE = 10.0  # seconds that a process has to end after a signal


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
        """Waits for the process; returns its failure, or None if it succeeded."""
        status = self.process.wait()
        self.thread.join()
        with self.errors as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
        return Failure(self.job, status, tuple(lines[-LAST:])) if status else None


def run_jobs(
    jobs: Sequence[Job],
    on_line: Callable[[Job, str], None],
    *,
    at_once: int,
    environment: Mapping[str, str] | None = None,
) -> list[Failure]:
    """Runs jobs, several at a time; a job that fails does not stop the others.

    If this process is interrupted or terminated, it ends all jobs before it raises.

    Args:
        jobs: Jobs in the order to start them.
        on_line: Function that is called, in this thread, with every line that a job prints.
        at_once: Number of jobs that run at the same time.
        environment: Environment variables on top of those of this process.

    Returns:
        The failures, in the order of the jobs.
    """
    if at_once < 1:
        raise ValueError(f"{at_once} processes at once: at least 1 is allowed")
    waiting, running, failures = list(jobs), list[_Running](), list[Failure]()
    lines: queue.Queue[tuple[_Running, str | None]] = queue.Queue()
    with _signals_as_interrupts():
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(_start(waiting.pop(0), lines, environment or {}))
                source, line = _next(lines)
                if line is not None:
                    on_line(source.job, line)
                    continue
                running.remove(source)
                failure = source.failure()
                failures += [] if failure is None else [failure]
        except BaseException:
            _stop([item.process for item in running])
            for item in running:
                item.failure()  # closes its files
            raise
    return sorted(failures, key=lambda failure: jobs.index(failure.job))


def _start(
    job: Job, lines: queue.Queue[tuple[_Running, str | None]], environment: Mapping[str, str]
) -> _Running:
    """Starts a job whose output goes to `lines`, with None for the end of it."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe would fill up
    process = subprocess.Popen(  # noqa: S603
        job.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C reaches only this process, which passes it on
    )
    running = _Running(job, process, errors)

    def listen() -> None:
        assert process.stdout is not None  # noqa: S101
        with process.stdout as output:
            for line in output:
                lines.put((running, line.decode(errors="replace").rstrip()))
        lines.put((running, None))

    running.thread = threading.Thread(target=listen, daemon=True)
    running.thread.start()
    return running


def _next(
    lines: queue.Queue[tuple[_Running, str | None]],
) -> tuple[_Running, str | None]:
    while True:
        with suppress(queue.Empty):
            return lines.get(timeout=0.5)  # without a limit, some systems do not notice Ctrl-C


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Sends SIGINT, later SIGTERM, and in the end kills; a second Ctrl-C kills at once."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            for process in processes:
                if process.poll() is None:
                    process.send_signal(number)
            deadline = time.monotonic() + PATIENCE
            while any(process.poll() is None for process in processes):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt, so that no process is left running."""
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

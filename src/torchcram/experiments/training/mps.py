"""NVIDIA's Multi-Process Service, by which several processes compute on one GPU at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PROBE = (sys.executable, "-c", "import torch; torch.ones(1, device='cuda').sum().item()")
PATIENCE = 120  # seconds for any of it


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
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0

"""The command line and the examples, as the tests call them."""

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from torchcram.cli import app

SGD = "digits/convnet-digits/sgd"
CRAM = "digits/convnet-digits/cram-plus-multi"
ROOT = Path(__file__).parent.parent


def command(*arguments):
    """Runs a command in this process."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def succeed(*arguments):
    """Runs a command that is to succeed."""
    done = command(*arguments)
    assert done.exit_code == 0, done.output
    return done


def fail(*arguments, code=None):
    """Runs a command that is to fail in one line, which is returned; `code` is 1 or 2 if not said.

    tests/cli/test_cli_usage.py tells which errors have which.
    """
    done = command(*arguments)
    assert done.exit_code in ((1, 2) if code is None else (code,)), done.output
    assert isinstance(done.exception, SystemExit)  # no traceback
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.stderr.splitlines()[-1] == line
    return line


def run_example(name, *arguments, cwd, launch=(), **options):
    """Runs an example that is to succeed in a process of its own; returns what it printed."""
    alone = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, *launch, str(ROOT / "examples" / f"{name}.py"), *arguments],
        cwd=cwd,
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout

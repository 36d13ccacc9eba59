"""The command line, as the tests call it."""

from typer.testing import CliRunner

from torchcram.cli import app

SGD = "digits/convnet-digits/sgd"
CRAM = "digits/convnet-digits/cram-plus-multi"


def command(*arguments):
    """Runs a command in this process."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def succeed(*arguments):
    """Runs a command that is to succeed."""
    done = command(*arguments)
    assert done.exit_code == 0, done.output
    return done


def fail(*arguments):
    """Runs a command that is to fail in one line, which is returned."""
    done = command(*arguments)
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)  # no traceback
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.stderr.splitlines()[-1] == line
    return line

"""The command line: `torchcram` and `python -m torchcram`."""

from torchcram.cli.app import app

# in the order that the help has the commands in
from torchcram.cli import listing, models, train, compress, derive, sweep, report, demo  # isort: skip

__all__ = ["app", "compress", "demo", "derive", "listing", "models", "report", "sweep", "train"]

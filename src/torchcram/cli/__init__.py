"""The command line: `torchcram` and `python -m torchcram`."""

from torchcram.cli.app import app

# imported in the order that the help lists the commands in
from torchcram.cli import listing, train, compress, export, bench  # isort: skip
from torchcram.cli import derive, transfer, sweep, report, demo  # isort: skip

__all__ = [
    "app",
    "bench",
    "compress",
    "demo",
    "derive",
    "export",
    "listing",
    "report",
    "sweep",
    "train",
    "transfer",
]

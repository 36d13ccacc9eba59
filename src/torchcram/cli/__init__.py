"""The command line: `torchcram` and `python -m torchcram`."""

from torchcram.cli.app import app

# imported in the order that the help lists the commands in
from torchcram.cli import listing, train, compress, export, bench  # isort: skip
from torchcram.cli import finetune, transfer, sweep, report, demo  # isort: skip

__all__ = [
    "app",
    "bench",
    "compress",
    "demo",
    "export",
    "finetune",
    "listing",
    "report",
    "sweep",
    "train",
    "transfer",
]

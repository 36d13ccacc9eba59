"""`python -m torchcram`."""

from torchcram.cli import app

app(prog_name="torchcram")

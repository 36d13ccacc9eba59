"""Progress of trainings: bars on a terminal, lines in a file, JSON for a program."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from torchcram.experiments.training.log import EpochRecord
    from torchcram.experiments.training.trainer import Progress

LINES = 20  # printed for a training, about, at most


class Style(str, Enum):
    """How progress is shown."""

    auto = "auto"
    json = "json"


@dataclass(frozen=True)
class Watch:
    """A display of progress.

    Attributes:
        training: Function that returns, for the name of a training, the callback for its epochs.
        bars: Whether progress is shown by bars, on a terminal.
    """

    training: Callable[[str], Progress]
    bars: bool = False

    def pieces(self, name: str, total: int) -> Callable[[object], None] | None:
        """Returns a callback for each of `total` pieces of work; None without bars."""
        if not self.bars:
            return None
        update, done = self.training(name), itertools.count(1)
        return lambda _: update(next(done), total, None)


def say(line: str) -> None:
    """Prints a line to standard error."""
    typer.echo(line, err=True)


@contextmanager
def watching(style: Style = Style.auto, *, silent: bool = False) -> Iterator[Watch]:
    """Shows progress on standard error for a `with` block, or as JSON on standard output."""
    from rich.console import Console

    console = Console(stderr=True)
    if silent:
        yield Watch(lambda _: _nothing)
    elif style is Style.json:
        yield Watch(_json)
    elif console.is_terminal:
        with _bars(console) as training:
            yield Watch(training, bars=True)
    else:
        yield Watch(_lines)


def forward(line: str, update: Progress) -> None:
    """Forwards a line of JSON progress from another process; other lines are ignored."""
    from torchcram.experiments.training.log import EpochRecord

    try:
        progress = json.loads(line)
        record = None if progress["record"] is None else EpochRecord(**progress["record"])
        done, epochs = float(progress["done"]), int(progress["epochs"])
    except (ValueError, TypeError, KeyError):
        return
    update(done, epochs, record)


def forward_all(line: str, training: Callable[[str], Progress]) -> None:
    """Forwards a line of JSON progress from a process with several trainings, by their names."""
    try:
        name = json.loads(line)["name"]
    except (ValueError, TypeError, KeyError):
        return
    forward(line, training(str(name)))


def _json(name: str) -> Progress:
    def update(done: float, epochs: int, record: EpochRecord | None) -> None:
        values = None if record is None else asdict(record)
        progress = {"name": name, "done": done, "epochs": epochs, "record": values}
        typer.echo(json.dumps(progress))  # which flushes

    return update


def _nothing(_done: float, _epochs: int, _record: EpochRecord | None) -> None:
    pass


def _lines(name: str) -> Progress:
    from torchcram.report.summary import counted

    begun = False

    def update(done: float, epochs: int, record: EpochRecord | None) -> None:
        nonlocal begun
        if not begun:
            resumed = f", continued after {done:.0f}" if done else ""
            typer.echo(f"{name}: {counted(epochs, 'epoch')}{resumed}", err=True)
            begun = True
        if record is None:
            return
        every = -(-epochs // LINES)
        if record.epoch % every == 0 or record.epoch == epochs:
            typer.echo(f"{name}: epoch {record.epoch} of {epochs}, {_metrics(record)}", err=True)

    return update


@contextmanager
def _bars(console: Console) -> Iterator[Callable[[str], Progress]]:
    from rich import progress
    from rich.markup import escape
    from rich.table import Column
    from rich.text import Text

    class Metrics(progress.ProgressColumn):
        """The only column that a narrow terminal cuts off."""

        def render(self, task: progress.Task) -> Text:
            return Text(task.fields["metrics"], no_wrap=True, overflow="ellipsis")

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None, table_column=Column(ratio=1)),
        progress.TextColumn("{task.completed:.0f}/{task.total}"),
        Metrics(),
        progress.TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    )
    tasks: dict[str, progress.TaskID] = {}
    latest: dict[str, str] = {}
    with progress.Progress(*columns, console=console, expand=True) as bars:

        def training(name: str) -> Progress:
            def update(done: float, epochs: int, record: EpochRecord | None) -> None:
                if name not in tasks:
                    tasks[name] = bars.add_task(escape(name), total=epochs, metrics="")
                if record is not None:
                    latest[name] = _metrics(record)
                bars.update(tasks[name], completed=done, metrics=latest.get(name, ""))

            return update

        yield training


def _metrics(record: EpochRecord) -> str:
    from torchcram.report.summary import percent_sign, score_text

    parts, sign = [f"loss {record.loss:.4f}"], percent_sign(record.metric)
    if record.accuracy is not None:
        parts.append(f"{record.metric} {score_text(record.accuracy, record.metric)}{sign}")
    if record.compressed_accuracy is not None:
        compressed = score_text(record.compressed_accuracy, record.metric)
        parts.append(f"compressed {compressed}{sign}")
    return ", ".join([*parts, f"{record.images_per_second:.0f} {record.unit}/s"])

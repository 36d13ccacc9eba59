"""The progress of trainings: bars where someone watches, lines in a file, JSON for a program."""

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

LINES = 20  # at most, about, of a training


class Style(str, Enum):
    """How progress is shown."""

    auto = "auto"
    json = "json"


@dataclass(frozen=True)
class Watch:
    """What shows progress.

    Attributes:
        training: called with the name of a training, gives what is to be told of its epochs.
        bars: whether it does so by bars, on a terminal.
    """

    training: Callable[[str], Progress]
    bars: bool = False

    def pieces(self, name: str, total: int) -> Callable[[object], None] | None:
        """Returns what to call after each of so many pieces of work that take no epochs."""
        if not self.bars:
            return None
        tell, done = self.training(name), itertools.count(1)
        return lambda _: tell(next(done), total, None)


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


def hear(tell: Progress, line: str) -> None:
    """Tells what another process said as JSON; lines that are something else are passed over."""
    from torchcram.experiments.training.log import EpochRecord

    try:
        news = json.loads(line)
        record = None if news["record"] is None else EpochRecord(**news["record"])
        done, epochs = float(news["done"]), int(news["epochs"])
    except (ValueError, TypeError, KeyError):
        return
    tell(done, epochs, record)


def _json(name: str) -> Progress:
    def tell(done: float, epochs: int, record: EpochRecord | None) -> None:
        said = None if record is None else asdict(record)
        news = {"name": name, "done": done, "epochs": epochs, "record": said}
        typer.echo(json.dumps(news))  # which is flushed

    return tell


def _nothing(_done: float, _epochs: int, _record: EpochRecord | None) -> None:
    pass


def _lines(name: str) -> Progress:
    from torchcram.report.summary import counted

    begun = False

    def tell(done: float, epochs: int, record: EpochRecord | None) -> None:
        nonlocal begun
        if not begun:
            where = f", continued after {done:.0f}" if done else ""
            typer.echo(f"{name}: {counted(epochs, 'epoch')}{where}", err=True)
            begun = True
        if record is None:
            return
        every = -(-epochs // LINES)
        if record.epoch % every == 0 or record.epoch == epochs:
            typer.echo(f"{name}: epoch {record.epoch} of {epochs}, {_news(record)}", err=True)

    return tell


@contextmanager
def _bars(console: Console) -> Iterator[Callable[[str], Progress]]:
    from rich import progress
    from rich.markup import escape
    from rich.table import Column
    from rich.text import Text

    class News(progress.ProgressColumn):
        """What a small terminal has the end of cut off, rather than any other column."""

        def render(self, task: progress.Task) -> Text:
            return Text(task.fields["news"], no_wrap=True, overflow="ellipsis")

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None, table_column=Column(ratio=1)),
        progress.TextColumn("{task.completed:.0f}/{task.total}"),
        News(),
        progress.TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    )
    tasks: dict[str, progress.TaskID] = {}
    latest: dict[str, str] = {}
    with progress.Progress(*columns, console=console, expand=True) as bars:

        def training(name: str) -> Progress:
            def tell(done: float, epochs: int, record: EpochRecord | None) -> None:
                if name not in tasks:
                    tasks[name] = bars.add_task(escape(name), total=epochs, news="")
                if record is not None:
                    latest[name] = _news(record)
                bars.update(tasks[name], completed=done, news=latest.get(name, ""))

            return tell

        yield training


def _news(record: EpochRecord) -> str:
    parts = [f"loss {record.loss:.4f}"]
    if record.accuracy is not None:
        parts.append(f"{record.metric} {100 * record.accuracy:.2f} %")
    if record.compressed_accuracy is not None:
        parts.append(f"compressed {100 * record.compressed_accuracy:.2f} %")
    return ", ".join([*parts, f"{record.images_per_second:.0f} {record.unit}/s"])

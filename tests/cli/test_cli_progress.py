import io
import json
from dataclasses import asdict, replace

import pytest
import rich.console
from rich.table import Table

from torchcram.cli.output import show
from torchcram.cli.progress import Style, forward, watching
from torchcram.experiments.training.log import EpochRecord

RECORD = EpochRecord(
    epoch=1,
    loss=0.25,
    compressed_loss=None,
    accuracy=0.5,
    lr=0.1,
    mask_change=0.0,
    images_per_second=1234.5,
    seconds=1.0,
)


def test_long_trainings_have_few_lines(capsys):
    with watching() as watch:
        tell = watch.training("mine")
        tell(0, 200, None)
        for epoch in range(1, 201):
            tell(epoch - 0.5, 200, None)
            tell(epoch, 200, replace(RECORD, epoch=epoch, accuracy=None))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "mine: 200 epochs"
    assert lines[1] == "mine: epoch 10 of 200, loss 0.2500, 1234 images/s"
    assert lines[-1].startswith("mine: epoch 200 of 200")
    assert len(lines) == 21


def test_one_epoch_is_one(capsys):
    with watching() as watch:
        watch.training("mine")(0, 1, None)
    assert capsys.readouterr().err == "mine: 1 epoch\n"


def test_what_one_process_says_another_hears(capsys):
    with watching(Style.json) as watch:
        tell = watch.training("mine")
        tell(0, 2, None)
        tell(0.5, 2, None)
        tell(1, 2, RECORD)
    heard = []
    for line in capsys.readouterr().out.splitlines():
        forward(line, lambda *news: heard.append(news))
    assert heard == [(0, 2, None), (0.5, 2, None), (1, 2, RECORD)]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Files already downloaded",
        "[]",
        "3",
        '{"done": 1}',
        '{"done": "x", "epochs": 2, "record": null}',
        json.dumps({"done": 1, "epochs": 2, "record": {**asdict(RECORD), "more": 1}}),
    ],
)
def test_other_lines_are_passed_over(line):
    forward(line, lambda *_: pytest.fail("was told"))


@pytest.fixture
def terminal(monkeypatch):
    """Consoles that write to a terminal, which is a text here."""
    text = io.StringIO()
    text.width = 90
    real = rich.console.Console

    def console(**options):
        options.pop("stderr", None)
        return real(file=text, force_terminal=True, width=text.width, color_system=None, **options)

    monkeypatch.setattr(rich.console, "Console", console)
    return text


def test_someone_who_watches_sees_bars(terminal):
    with watching() as watch:
        assert watch.bars
        tell = watch.training("[mine]")
        tell(0, 2, None)
        tell(1, 2, RECORD)
        piece = watch.pieces("compressing", 3)
        piece(object())
        piece(object())
    last = terminal.getvalue()
    assert "[mine]" in last
    assert "1/2 loss 0.2500, accuracy 50.00 %, 1234 images/s" in last
    assert "2/3" in last


def test_a_small_terminal_has_no_room_for_all_news_but_for_the_time(terminal):
    terminal.width = 80
    with watching() as watch:
        tell = watch.training("cram-plus-multi seed 0")
        tell(0, 200, None)
        tell(1, 200, RECORD)
    last = terminal.getvalue().splitlines()[-2]
    assert "1/200 loss 0.2500, accuracy 50.00 %" in last
    assert last.endswith(" --:--")


def test_only_bars_show_pieces():
    with watching() as watch:
        assert watch.pieces("compressing", 3) is None


def table(width):
    made = Table()
    made.add_column("x" * width)
    return made


def test_a_table_is_as_wide_as_it_needs_unless_someone_watches(capsys, terminal, monkeypatch):
    show(table(200), narrow=table(20))
    assert "x" * 20 + " " in terminal.getvalue()
    assert "x" * 21 not in terminal.getvalue()
    monkeypatch.undo()
    show(table(200), narrow=table(20))
    assert "x" * 200 in capsys.readouterr().out

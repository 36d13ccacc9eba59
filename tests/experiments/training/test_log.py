import builtins
import json
import warnings
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcram.experiments.training import log as runlog
from torchcram.experiments.training.log import EpochRecord, RunLog, read_log

ONE = EpochRecord(
    epoch=1,
    loss=2.5,
    compressed_loss=None,
    accuracy=0.25,
    lr=0.1,
    mask_change=0.01,
    images_per_second=1e4,
    seconds=3.5,
)


LEFT_OUT = {  # of the file, where they are as for images and one process
    "processes": 1,
    "metric": "accuracy",
    "unit": "images",
    "compressed_accuracy": None,
    "others": None,
}


def record(epoch, loss=1.0):
    return replace(ONE, epoch=epoch, loss=loss)


@pytest.fixture(autouse=True)
def _first_writers(monkeypatch):
    """Numbers event files from 0: of one second, TensorBoard reads number 10 before number 9."""
    try:
        from tensorboard.summary.writer import event_file_writer
    except ImportError:
        return
    first = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", first)


@pytest.fixture
def no_board(monkeypatch):
    monkeypatch.setattr(runlog, "_tensorboard", lambda *_: None)


def write(folder, *epochs, first=1, loss=1.0):
    with RunLog(folder, first=first) as log:
        for epoch in epochs:
            log.write(record(epoch, loss))


def scalars(folder):
    """What TensorBoard shows: (step, value) by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


@pytest.mark.usefixtures("no_board")
def test_records_come_back(tmp_path):
    write(tmp_path / "run", 1, 2)
    assert read_log(tmp_path / "run") == [record(1), record(2)]
    first, _ = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert json.loads(first) | LEFT_OUT == asdict(record(1))


@pytest.mark.usefixtures("no_board")
def test_the_number_of_processes_is_said_where_there_are_several(tmp_path):
    records = [record(1), replace(record(2), processes=2)]
    with RunLog(tmp_path) as log:
        for one in records:
            log.write(one)
    assert read_log(tmp_path) == records
    said = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert "processes" not in said[0]
    assert said[1]["processes"] == 2


def test_there_is_no_log_at_first(tmp_path):
    assert read_log(tmp_path) == []


@pytest.mark.usefixtures("no_board")
def test_a_record_is_on_the_disk_before_the_log_is_closed(tmp_path):
    log = RunLog(tmp_path)
    log.write(record(1))
    assert read_log(tmp_path) == [record(1)]
    log.close()


@pytest.mark.usefixtures("no_board")
def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    write(tmp_path, 1, 2, 3)
    write(tmp_path, 3, 4, first=3, loss=9.0)
    assert read_log(tmp_path) == [record(1), record(2), record(3, 9.0), record(4, 9.0)]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_line_cut_in_half_is_dropped(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runlog, "_tensorboard", lambda *_: None)
        write(folder, 1, 2)
        path = folder / "log.jsonl"
        whole = path.read_bytes()
        second = whole.index(b"\n") + 1
        path.write_bytes(whole[: data.draw(st.integers(second, len(whole) - 1))])
        assert read_log(folder) == [record(1)]
        write(folder, 2, first=2)
        assert path.read_bytes() == whole


@pytest.mark.usefixtures("no_board")
@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        '{"epoch": 1}',
        json.dumps({**asdict(ONE), "epoch": "1"}),
        json.dumps({**asdict(ONE), "loss": "1"}),
        json.dumps({**asdict(ONE), "lr": float("nan")}),
        "[" * 100_000,
        "\0\0",
    ],
)
def test_a_bad_line_in_the_middle_is_named(tmp_path, line):
    write(tmp_path, 1)
    path = tmp_path / "log.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.warns(UserWarning, match=r"log\.jsonl, line 1, is not a record"):
        assert read_log(tmp_path) == [record(1)]
    with pytest.warns(UserWarning, match="line 1, is not a record"):
        write(tmp_path, 2, first=2)
    assert read_log(tmp_path) == [record(1), record(2)]


@pytest.mark.usefixtures("no_board")
def test_what_is_no_number_is_refused(tmp_path):
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match="not JSON compliant"):
        log.write(record(1, float("nan")))
    assert read_log(tmp_path) == []


def test_tensorboard_shows_every_number_once_after_resuming(tmp_path, monkeypatch):
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    # files of one process and second are read in the order of their names, 10 before 9
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))
    write(tmp_path, 1, 2, 3)
    write(tmp_path, 3, 4, first=3, loss=9.0)
    shown = scalars(tmp_path)
    assert shown["loss"] == [(1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0)]
    assert shown["accuracy"] == [(epoch, 0.25) for epoch in (1, 2, 3, 4)]
    assert shown.keys() == asdict(ONE).keys() - {"epoch", "compressed_loss", *LEFT_OUT}


def test_tensorboard_shows_a_first_epoch_that_was_done_again_once(tmp_path):
    pytest.importorskip("tensorboard")
    write(tmp_path, 1)
    write(tmp_path, 1, 2, loss=9.0)
    assert scalars(tmp_path)["loss"] == [(1, 9.0), (2, 9.0)]


def test_without_tensorboard_the_lines_are_written_and_it_is_said_once(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "torch.utils.tensorboard":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    runlog._warn_no_tensorboard.cache_clear()
    with pytest.warns(UserWarning, match="tensorboard is not installed"):
        write(tmp_path, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(tmp_path, 2, first=2)
    assert read_log(tmp_path) == [record(1), record(2)]
    assert not (tmp_path / "tensorboard").exists()

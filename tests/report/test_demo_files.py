import io
from pathlib import Path

import pytest
from matplotlib.image import imread
from result_samples import cram, result, seed, sgd

from torchcram.experiments.demo import run_demo
from torchcram.report.demo import TITLE, accuracy_plot, curves, write_demo, write_files
from torchcram.report.summary import percent, summaries


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp("demo"), epochs=1)


def test_curves_begin_dense_and_follow_global_sparsity():
    first, second = curves([sgd(), cram()])
    assert first == [pytest.approx(pair) for pair in ((0, 88.7), (50, 88.31), (95, 24))]
    assert second == [pytest.approx(pair) for pair in ((0, 90), (50, 89), (90, 88))]


def test_the_picture_is_a_png_with_both_colours_in_it():
    picture = accuracy_plot([sgd(), cram()])
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(io.BytesIO(picture))[..., :3]
    assert pixels.shape[1] >= 1000
    for colour in ("D55E00", "0072B2"):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        assert (abs(pixels - channels).max(-1) < 0.02).sum() > 500


def test_the_picture_names_epochs_and_passes(monkeypatch):
    labels = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.plot", lambda *_, label, **__: labels.append(label) or []
    )
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda *_, **__: None)
    plain = result("sgd", [seed(0, 0.9, {})], title="SGD", cram=None, train={"epochs": 1})
    accuracy_plot([plain, cram()])
    assert labels == ["SGD, 1 epoch", "CrAM+-Multi, 20 epochs, two passes a step"]


def test_all_files_are_written_and_replaced(demo, tmp_path):
    folder = tmp_path / "new" / "folder"
    written = write_demo(demo.runs, folder)
    assert set(folder.iterdir()) == set(written.values())
    assert set(written) == {"picture", "page", "table"}
    page, table = (written[name].read_text() for name in ("page", "table"))
    assert page.startswith("<!DOCTYPE html>")
    assert TITLE in page
    assert "Speed and size" in page
    for shown in demo.results:
        assert f"| {shown.title} | {percent(shown.seeds[0].dense)} |" in table
        for operator, row in summaries(shown).items():
            assert f"`{operator}`" in table
            assert f"{percent(row.after.mean)} (" in table
            assert operator in page
            assert percent(row.before.mean) in page
    written["page"].write_text("old")
    write_demo(demo.runs, folder)
    assert written["page"].read_text() == page
    assert len(list(folder.iterdir())) == 3


def test_a_failure_leaves_everything_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"old")
    write = Path.write_bytes

    def full_disk(path, content):
        write(path, content[: len(content) // 2])
        if b"second" in content:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_files(tmp_path, {"a": b"first", "b": b"second"})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"

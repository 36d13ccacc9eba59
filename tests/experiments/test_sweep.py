import json

import pytest
from hypothesis import given, strategies
from runs import CPU, Stop, digits, one_thread, recipe, stop_after

from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.io import yaml_text
from torchcram.experiments.sweep import folder_name, read_grid, sweep
from torchcram.experiments.training.run_folder import read_run

TO = "compress.to=[global:0.5, global:0.9]"


def trial(*points, epochs=2):
    return {point: recipe(TO, *point, method="sgd", epochs=epochs) for point in points}


@pytest.fixture(scope="module")
def data():
    return digits()


def swept(recipes, out, data, **options):
    with one_thread():
        return sweep(recipes, out, **{"data": data, "device": CPU, "seed": 0, **options})


SLOW, GOOD, WILD = ("optimizer.lr=0.0001",), ("optimizer.lr=0.1",), ("optimizer.lr=1e30",)


def test_the_best_comes_first_and_failures_last(tmp_path, data):
    heard = []

    def progress(name):
        heard.append(name)
        return lambda *_: None

    points = swept(trial(WILD, SLOW, GOOD), tmp_path, data, progress=progress)
    assert [point.overrides for point in points] == [GOOD, SLOW, WILD]
    assert heard == ["optimizer.lr=1e30", "optimizer.lr=0.0001", "optimizer.lr=0.1"]
    best, slow, wild = points
    assert best.score > slow.score
    assert best.score == pytest.approx(sum(best.targets.values()) / 2)
    assert best.targets.keys() == {"global:0.5", "global:0.9"}
    assert (wild.score, wild.dense, wild.targets) == (None, None, {})
    assert "the training loss is" in wild.failed
    for point in (best, slow):
        _, info = read_run(tmp_path / point.folder)
        assert info.data.train_images + info.data.test_images == 320
        assert 25 <= info.data.test_images <= 35
        (seed,) = read_result(tmp_path / point.folder / "validation.json").seeds
        assert seed.dense == point.dense == info.finished.accuracy
        assert not (tmp_path / point.folder / "result.json").exists()


def test_it_can_be_scored_on_other_operators(tmp_path, data):
    (point,) = swept(trial(GOOD), tmp_path, data, score=["int4", "global:.9"])
    assert point.targets.keys() == {"global:0.5", "global:0.9", "int4"}
    assert point.score == pytest.approx((point.targets["int4"] + point.targets["global:0.9"]) / 2)


def test_equal_scores_stay_in_order(tmp_path, data):
    same = [("train.label_smoothing=0",), ("optimizer.nesterov=false",), ("optimizer.lr=0.05",)]
    points = swept(trial(*same, epochs=1), tmp_path, data)
    assert [point.overrides for point in points] == same
    assert len({point.score for point in points}) == 1


def test_a_stopped_sweep_continues(tmp_path, data):
    recipes = trial(GOOD, SLOW)
    whole = swept(recipes, tmp_path / "whole", data)
    with pytest.raises(Stop):
        swept(recipes, tmp_path / "cut", data, make_step=stop_after(4 * 2 + 4 + 1))
    assert swept(recipes, tmp_path / "cut", data) == whole


def test_grids_multiply():
    assert read_grid(["cram.rho=0.01, 0.05", "train.batch_size=64,128"]) == [
        ("cram.rho=0.01", "train.batch_size=64"),
        ("cram.rho=0.01", "train.batch_size=128"),
        ("cram.rho=0.05", "train.batch_size=64"),
        ("cram.rho=0.05", "train.batch_size=128"),
    ]
    assert read_grid(["cram.operators=[global:0.5],[global:0.5, int4]"]) == [
        ('cram.operators=["global:0.5"]',),
        ('cram.operators=["global:0.5", "int4"]',),
    ]
    assert read_grid(["cram.rule=CrAM,CrAM+", "cram.normalize=null,true"])[1] == (
        "cram.rule=CrAM",
        "cram.normalize=true",
    )


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["cram.rho"], "allowed is KEY=VALUE,VALUE"),
        (["=3"], "allowed is KEY=VALUE,VALUE"),
        (["cram.rho="], "allowed is KEY=VALUE,VALUE"),
        (["cram.rho=1], [2"], "is not YAML"),
        (["cram.rho=1,1"], "a value is given twice"),
        (["cram.rho=1,2", "cram.rho=3"], "cram.rho is given twice"),
        (["data.augment=none,shift"], "is the same for all points"),
        (["name=a/b/c"], "is the same for all points"),
    ],
)
def test_bad_grids_are_named(texts, said):
    with pytest.raises(ValueError, match="grid ") as caught:
        read_grid(texts)
    assert said in str(caught.value)


values = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats(allow_nan=False, allow_infinity=False)
    | strategies.text(strategies.characters(codec="ascii", categories=("L", "N", "P", "S", "Z"))),
    lambda inner: strategies.lists(inner, max_size=3),
    max_leaves=4,
)


@given(strategies.lists(values, min_size=1, max_size=4, unique_by=json.dumps))
def test_overrides_read_back_as_the_values(given_values):
    (key,) = {"cram.rho"}
    points = read_grid([f"{key}={json.dumps(given_values)[1:-1]}"])
    found = [yaml_text.parse(point[0].partition("=")[2], "point") for point in points]
    assert found == given_values


overrides = strategies.text("a=,_-:[ /", max_size=60).map("a=".__add__)


@given(
    strategies.lists(
        strategies.lists(overrides, min_size=1, max_size=3).map(tuple),
        min_size=2,
        max_size=5,
        unique=True,
    )
)
def test_folder_names_are_all_different_and_short(points):
    names = [folder_name(point) for point in points]
    assert len(set(names)) == len(points)
    assert all(
        len(name) <= 120 and "/" not in name and name not in ("", ".", "..") for name in names
    )


def test_folder_names_say_what_is_in_them():
    assert folder_name(("cram.rho=0.1", "optimizer.lr=2e-05")) == "cram.rho=0.1,optimizer.lr=2e-05"

"""Summaries of transfers, their tables and their picture, from made-up results."""

import json
import runpy
from pathlib import Path

import pytest
from PIL import Image
from result_samples import result, seed

from torchcram.experiments.evaluation.results import TransferSource, write_result
from torchcram.experiments.recipe import recipe_names
from torchcram.report.markdown_tables import markdown_table
from torchcram.report.results_table import result_table
from torchcram.report.summary import trained_for
from torchcram.report.transfer import cells, summarize

ROOT = Path(__file__).parents[2]
DRAWING = runpy.run_path(str(ROOT / "docs" / "transfer.py"))
TINY = "tiny-imagenet-200/resnet18-64"


def moved(method, at, task, *accuracies, dense=None, model="resnet18-64"):
    """A result with one accuracy for every seed."""
    zeros = 0.0 if at == "dense" else float(at.split(":")[1])
    source = TransferSource(
        recipe=f"{TINY}/{method}",
        title=method.upper(),
        at=at,
        target=f"{task}/{model}/transfer",
        dense=f"{TINY}/{dense or method}",
        sparsity=zeros,
        model_sparsity=zeros * 0.9,
    )
    seeds = [seed(number, value, {}, source=source) for number, value in enumerate(accuracies)]
    name = f"transfer-of-{method}-{at.replace(':', '-')}"
    return result(name, seeds, title=name, task=task, model=model, data=task)


def everything():
    return [
        moved("sgd", "global:0.9", "cats", 0.6, 0.7),
        moved("sgd", "dense", "cats", 0.7, 0.9),
        moved("sgd", "global:0.9", "dogs", 0.9),
        moved("sgd", "dense", "dogs", 0.95),
        moved("sgd", "global:0.8", "cats", 0.9),
        moved("dpf", "global:0.9", "cats", 0.7, dense="sgd"),
        moved("dpf", "global:0.9", "dogs", 0.95, dense="sgd"),
        result("sgd", [seed(0, 0.5, {})], task="cats"),
    ]


def test_the_increase_is_relative_to_the_dense_model_of_the_same_source():
    summary = summarize(everything())
    assert summary.tasks == ("cats", "dogs")
    rows = {(row.title, row.at): row for row in summary.rows}
    assert list(rows) == [
        ("SGD", "dense"),
        ("SGD", "global:0.8"),
        ("SGD", "global:0.9"),
        ("DPF", "global:0.9"),
    ]
    cats, dogs = rows["SGD", "global:0.9"].tasks
    assert (cats.error, cats.dense_error) == pytest.approx((0.35, 0.2))
    assert (cats.increase, cats.seeds) == (pytest.approx(0.75), 2)  # of the means over the seeds
    assert dogs.increase == pytest.approx(1.0)
    assert rows["SGD", "global:0.9"].mean == pytest.approx(0.875)
    assert rows["SGD", "dense"].mean == 0
    assert rows["SGD", "global:0.8"].mean is None  # it was not transferred to dogs
    cats, dogs = rows["DPF", "global:0.9"].tasks
    assert (cats.increase, dogs.increase) == pytest.approx((0.5, 0.0))


def test_nothing_is_divided_by_an_error_of_zero():
    results = [moved("sgd", "dense", "cats", 1.0), moved("sgd", "global:0.9", "cats", 0.9)]
    (_, row) = summarize(results).rows
    assert (row.tasks[0].increase, row.mean) == (None, None)
    assert cells(summarize(results))[1][1] == ["SGD", "global:0.9", "10.00 (-)", "-"]
    (row,) = summarize(results[1:]).rows
    assert row.tasks[0].dense_error is None
    assert summarize([]).rows == ()


def test_tasks_of_one_name_are_told_apart():
    results = [moved("sgd", "dense", "cats", 0.9, model=model) for model in ("a", "b")]
    assert summarize(results).tasks == ("cats/a/transfer", "cats/b/transfer")


def test_the_table_in_markdown():
    lines = markdown_table(everything(), f"transfer {TINY} dpf sgd sam").splitlines()
    assert lines[0] == "| source | at | `cats` | `dogs` | mean |"
    assert lines[2] == "| DPF | `global:0.9` | 30.00 (+50.0) | 5.00 (+0.0) | +25.0 |"
    assert lines[3] == "| SGD | `dense` | 20.00 | 5.00 |  |"
    assert lines[4] == "| SGD | `global:0.8` | 10.00 (-50.0) | - | - |"
    assert lines[6] == "| SAM | not run yet |  |  |  |"
    assert lines[8].startswith("Test error in %;")
    assert "| DPF |" in markdown_table(everything(), f"transfer {TINY}")
    with pytest.raises(ValueError, match="names no sources"):
        markdown_table(everything(), "transfer sgd")


def test_a_sparse_model_is_not_called_dense():
    sparse, dense = everything()[:2]
    assert (trained_for(sparse), trained_for(dense)) == ("global:0.9", None)
    assert "zeros of global:0.9 held" in str(result_table(sparse).title)


def test_the_picture_carries_its_numbers(tmp_path):
    for each in everything():
        write_result(each, tmp_path / each.path)
    assert DRAWING["read_curves"](tmp_path) == {
        "mean over the tasks": {"sgd": [(0, 0), (90, 87.5)]},
        "cats": {"sgd": [(0, 0), (80, -50), (90, 75)]},
        "dogs": {"sgd": [(0, 0), (90, 100)]},
    }
    DRAWING["draw"](tmp_path, tmp_path / "transfer.png")
    shown = json.loads(Image.open(tmp_path / "transfer.png").text["Description"])
    assert shown == json.loads(json.dumps(DRAWING["read_curves"](tmp_path)))


def test_models_trained_for_single_sparsities_share_a_curve(tmp_path):
    for each in [
        moved("sgd", "dense", "cats", 0.8),
        moved("acdc-k90", "global:0.9", "cats", 0.7, dense="sgd"),
        moved("acdc-k80", "global:0.8", "cats", 0.75, dense="sgd"),
        moved("cram-plus-k50", "dense", "cats", 0.8),
        moved("cram-plus-k70", "dense", "cats", 0.8),  # has no curve
        moved("sgd-k80", "global:0.8", "cats", 0.7, dense="sgd"),
    ]:
        write_result(each, tmp_path / each.path)
    curves = DRAWING["read_curves"](tmp_path)["cats"]
    assert list(curves.items()) == [
        ("sgd", [(0, 0)]),
        ("cram-plus-k50", [(0, 0)]),
        ("acdc", [(80, 25), (90, 50)]),
    ]


def test_every_source_of_the_picture_has_a_style_and_a_recipe():
    sparse = [f"{method}-k{level}" for method in DRAWING["PER_TARGET"] for level in (80, 90)]
    assert {f"{TINY}/{method}" for method in (*DRAWING["FOR_ALL"], *sparse)} <= {*recipe_names()}
    assert {*DRAWING["FOR_ALL"], *DRAWING["PER_TARGET"]} <= DRAWING["figures"].STYLES.keys()


def test_nothing_is_drawn_without_results(tmp_path):
    with pytest.raises(ValueError, match="has no results of transfers"):
        DRAWING["draw"](tmp_path, tmp_path / "transfer.png")


def test_the_committed_picture_is_up_to_date():
    picture = DRAWING["PICTURE"]
    assert picture.exists() == bool(DRAWING["read_curves"]())
    if picture.exists():
        shown = json.loads(Image.open(picture).text["Description"])
        assert shown == json.loads(json.dumps(DRAWING["read_curves"]()))

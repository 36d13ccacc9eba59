"""The picture and the tables of accuracy against cost, from made-up results."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from result_samples import seed

from torchcram.experiments.evaluation.results import merge_seed, write_result
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.overrides import with_length

ROOT = Path(__file__).parent.parent
FRONTIER = runpy.run_path(str(ROOT / "docs" / "frontier.py"))
RESNET, SQUAD = "cifar10-jpeg/resnet20", "squad/minilm-l6"


@pytest.fixture
def write(tmp_path):
    """Writes a result: of the recipe as it is, or among those of other lengths."""

    def write(name, epochs=None, *, dense=0.8, seeds=1, **changes):
        recipe = load_recipe(name, [f"{key}={value}" for key, value in changes.items()])
        if epochs is not None:
            recipe = with_length(recipe, epochs)
        result = None
        for number in range(seeds):
            after = {
                target: dense - 0.01 * place for place, target in enumerate(recipe.compress.to)
            }
            result = merge_seed(result, recipe, seed(number, dense + 0.01 * number, after))
        folder = tmp_path if epochs is None else tmp_path / "frontier"
        write_result(result, folder / result.path)
        return result

    return write


def points(tmp_path, panel, target, form):
    return FRONTIER["read_curves"](tmp_path)[panel][target][form]


def test_lengths_of_a_form_are_points_in_the_order_of_their_passes(write, tmp_path):
    for epochs, dense in ((160, 0.89), (20, 0.8), (40, 0.85)):
        write(f"{RESNET}/cram-plus-multi", epochs, dense=dense)
    write(f"{RESNET}/cram-plus-multi", dense=0.9)
    write(f"{RESNET}/cram-plus-multi-1.5x", 27)
    write(f"{RESNET}/cram-plus-multi-1x", 40)
    write(f"{RESNET}/sgd-2x", dense=0.7)
    write(f"{RESNET}/cram-plus-multi-30-90", 40, dense=0.4)  # another method
    write(f"{RESNET}/cram-plus-multi-uniform", dense=0.4)
    whole = points(tmp_path, RESNET, "dense", "CrAM+, 2.0x")
    assert whole == [(40, 80, 0), (80, 85, 0), (320, 89, 0), (400, 90, 0)]
    assert [point[0] for point in points(tmp_path, RESNET, "global:0.5", "CrAM+, 1.5x")] == [40.5]
    assert points(tmp_path, RESNET, "global:0.9", "CrAM+, 1.0x") == [(40, 77, 0)]
    assert points(tmp_path, RESNET, "dense", "plain") == [(400, 70, 0)]
    assert SQUAD not in FRONTIER["read_curves"](tmp_path)


def test_seeds_have_a_mean_and_a_deviation_and_more_of_them_count(write, tmp_path):
    write(f"{SQUAD}/adam-long", dense=0.5)
    write(f"{SQUAD}/adam-long", 8, seeds=3)
    assert points(tmp_path, SQUAD, "dense", "plain") == [(8, 81, 1)]
    write(f"{SQUAD}/adam-long", seeds=3, dense=0.6)
    assert points(tmp_path, SQUAD, "dense", "plain") == [(8, 61, 1)]  # the first of equals


def test_other_settings_than_the_length_are_refused(write, tmp_path):
    write(f"{RESNET}/sgd")
    write(f"{RESNET}/sgd", 40, **{"optimizer.lr": 0.2})
    with pytest.raises(ValueError, match=r"sgd-40-epochs.json .* differ in optimizer\.lr"):
        FRONTIER["read_curves"](tmp_path)


def test_the_tables_are_in_the_order_of_cost_and_go_into_their_sections(write, tmp_path):
    write(f"{RESNET}/cram-plus-multi", 20, seeds=2)
    write(f"{RESNET}/cram-plus-multi-1x", 30)
    write(f"{RESNET}/cram-plus-multi-1x", 10)
    write(f"{RESNET}/sgd-2x")
    lines = FRONTIER["table"](RESNET, tmp_path).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    assert rows[0][:4] == ["method", "epochs", "passes", "dense"]
    assert [row[:4] for row in rows[2:]] == [
        ["CrAM+-Multi, 1.0x", "10", "10", "80.00"],
        ["CrAM+-Multi, 1.0x", "30", "30", "80.00"],
        ["CrAM+-Multi", "20", "40", "80.50 ± 0.71"],
        ["SGD", "400", "400", "80.00"],
    ]
    assert len({len(row) for row in rows}) == 1
    assert "Passes: forward and backward over the training set." in lines[-1]
    page = f"a\n<!-- frontier:{RESNET} -->\nold\n<!-- end frontier -->\nb\n"
    text, missing = FRONTIER["update"](page, tmp_path)
    assert missing == []
    assert text.startswith(f"a\n<!-- frontier:{RESNET} -->\n| method |")
    assert text.endswith("\n<!-- end frontier -->\nb\n")
    assert FRONTIER["update"](text, tmp_path) == (text, [])
    write(f"{SQUAD}/adam-long")
    assert FRONTIER["update"](text, tmp_path) == (text, [])  # one length makes no table
    write(f"{SQUAD}/adam-long", 4)
    assert FRONTIER["update"](text, tmp_path) == (text, [SQUAD])


@pytest.mark.parametrize("everything", [False, True])
def test_the_picture_carries_its_numbers(write, tmp_path, everything):
    write(f"{RESNET}/cram-plus-multi-1x", 20, dense=0.9)
    write(f"{RESNET}/cram-plus-multi-1x", 40, dense=0.9)
    write(f"{SQUAD}/cram-plus-multi-long-1x", 4)  # one length alone is not drawn
    if everything:
        for form in ("cram-plus-multi", "cram-plus-multi-1.5x", "sgd"):
            for epochs in (20, 80):
                write(f"{RESNET}/{form}", epochs, dense=0.4 if form == "sgd" else 0.85, seeds=2)
        write(f"{SQUAD}/cram-plus-multi-long-1x", 8)
        result = write(f"{SQUAD}/adam-long")
        few = replace(result.seeds[0], targets=result.seeds[0].targets[:1])
        write_result(replace(result, seeds=(few,)), tmp_path / result.path)  # not at every target
    picture = tmp_path / "frontier.png"
    FRONTIER["draw"](tmp_path, picture)
    image = Image.open(picture)
    shown = json.loads(image.text["Description"])
    assert shown == json.loads(json.dumps(FRONTIER["several_lengths"](tmp_path)))
    assert list(shown) == [RESNET, SQUAD][: 1 + everything]
    assert image.width > 1000


def test_nothing_is_drawn_without_results(tmp_path):
    with pytest.raises(ValueError, match="has no results of several lengths of cifar10"):
        FRONTIER["draw"](tmp_path, tmp_path / "frontier.png")


def test_the_picture_and_the_tables_are_up_to_date():
    picture, page = FRONTIER["PICTURE"], FRONTIER["PAGE"].read_text("utf-8")
    assert picture.exists() == ("<!-- frontier:" in page)
    if picture.exists():
        shown = json.loads(Image.open(picture).text["Description"])
        curves = FRONTIER["several_lengths"]()
        assert shown == json.loads(json.dumps(curves)), "draw it anew: python docs/frontier.py"
        assert FRONTIER["update"](page) == (page, []), "write it anew: python docs/frontier.py"

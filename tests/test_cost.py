"""The picture and the tables of what several sparsities cost, from made-up results."""

import json
import runpy
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from PIL import Image
from result_samples import seed

from torchcram.experiments.evaluation.results import merge_seed, write_result
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.overrides import finetune_recipe

ROOT = Path(__file__).parent.parent
COST = runpy.run_path(str(ROOT / "docs" / "cost.py"))
RESNET, SQUAD = "cifar10-jpeg/resnet20", "squad/minilm-l6"
TARGETS = COST["PANELS"][RESNET].targets


@pytest.fixture
def write(tmp_path):
    """Writes the result of a recipe, or of fine-tuning after it, with a score at each target."""

    def write(name, *scores, at=None, seeds=1):
        recipe = load_recipe(name)
        if at is not None:
            recipe = finetune_recipe(recipe, at)
        targets = recipe.compress.to if at is None else (at,)
        result = None
        for number in range(seeds):
            known = dict(zip(targets, (score + number / 100 for score in scores), strict=False))
            # the score of a method before batch-norm tuning, which counts for no table
            dense = 0.95 if recipe.method is None else next(iter(known.values())) + 0.005
            result = merge_seed(result, recipe, seed(number, dense, known))
        write_result(result, tmp_path / result.path)
        return result

    return write


def read(tmp_path, panel=RESNET):
    return COST["read_curves"](tmp_path)[panel]


def test_a_training_for_all_targets_is_paid_once(write, tmp_path):
    write(f"{RESNET}/cram-plus-multi", 0.9, 0.89, 0.88, 0.87, 0.86)
    write(f"{RESNET}/cram-plus-multi-1x", 0.9, 0.89, 0.88, 0.87)
    write(f"{RESNET}/sfw", 0.8, 0.7, 0.6, 0.5, 0.4)
    write(f"{RESNET}/dpf-k50", 0.9)
    assert read(tmp_path)["sfw"].scores == {"global:0.5": (80, 0)}  # that DPF was trained for
    for level in (70, 80, 90, 95):
        write(f"{RESNET}/dpf-k{level}", 0.8)
    curves = read(tmp_path)
    assert list(curves) == ["cram-plus-multi", "cram-plus-multi-1x", "sfw", "dpf"]
    assert curves["cram-plus-multi"].passes == [400] * 5
    assert curves["cram-plus-multi"].scores["global:0.95"] == (86, 0)
    assert curves["cram-plus-multi-1x"].passes == [200] * 4  # not measured at 95 %
    assert curves["sfw"].passes == [200] * 5


def test_trainings_for_single_targets_add_up_to_the_first_that_is_missing(write, tmp_path):
    write(f"{RESNET}/cram-plus-multi", 0.9)
    for level in (50, 70, 90):
        write(f"{RESNET}/acdc-k{level}", level / 100)
    write(f"{RESNET}/str-k90", 0.4)
    write(f"{RESNET}/str-k80", 0.4)
    curves = read(tmp_path)
    assert curves["acdc"].passes == [200, 400]
    assert curves["acdc"].scores == {
        "global:0.5": (50, 0),
        "global:0.7": (70, 0),
        "global:0.9": (90, 0),
    }
    assert curves["str"].passes == []
    assert list(curves["str"].scores) == ["global:0.8", "global:0.9"]
    write(f"{RESNET}/acdc-k80", 0.8)
    assert read(tmp_path)["acdc"].passes == [200, 400, 600, 800]


def test_a_target_that_few_methods_have_is_left_out(write, tmp_path):
    write(f"{RESNET}/cram-plus-multi", 0.9, 0.8, 0.7)
    for method in ("acdc", "dpf", "gradual-magnitude"):
        write(f"{RESNET}/{method}-k70", 0.7)
    write(f"{RESNET}/str-k50", 0.4)
    curves = read(tmp_path)
    assert curves["dpf"].passes == [200]
    assert curves["cram-plus-multi"].scores == {"global:0.7": (80, 0)}
    assert "str" not in curves


def test_fine_tuning_adds_its_passes_to_those_of_the_training(write, tmp_path):
    for method, passes in (("cram-plus-multi", 400), ("sgd", 200)):
        write(f"{RESNET}/{method}", 0.9, 0.8)
        for at, score in zip(TARGETS[:2], (0.91, 0.85), strict=True):
            write(f"{RESNET}/{method}", score, at=at)
        curves = COST["_read_panel"](RESNET, tmp_path)
        assert curves[method].passes == [passes] * 2
        assert curves[f"{method}-finetune"].passes == [passes + 20, passes + 40]
        assert curves[f"{method}-finetune"].scores == {"global:0.5": (91, 0), "global:0.7": (85, 0)}
    assert read(tmp_path).keys() == curves.keys()


def test_fine_tuning_of_models_for_single_targets_adds_its_passes_to_each(write, tmp_path):
    for level, at in zip((50, 70, 80), TARGETS, strict=False):
        write(f"{RESNET}/dpf-k{level}", 0.8)
        if level < 80:
            write(f"{RESNET}/dpf-k{level}", 0.85, at=at)
    curves = COST["_read_panel"](RESNET, tmp_path)
    assert curves["dpf"].passes == [200, 400, 600]
    assert curves["dpf-finetune"].passes == [220, 440]
    assert curves["dpf-finetune"].scores == {"global:0.5": (85, 0), "global:0.7": (85, 0)}
    assert "| DPF, fine-tuned | 220 | 440 |" in COST["table"](RESNET, curves)


@pytest.mark.parametrize("method", ["sgd", "dpf-k50"])
def test_fine_tuning_alone_is_not_a_whole_training(write, tmp_path, method):
    write(f"{RESNET}/{method}", 0.9, at="global:0.5")
    assert COST["_read_panel"](RESNET, tmp_path) == {}


def test_early_stopping_of_older_results_is_at_most(write, tmp_path):
    write(f"{SQUAD}/cram-plus-multi-long", 0.8)
    write(f"{SQUAD}/cram-plus-multi-long", 0.8, at="uniform:0.5")
    write(f"{SQUAD}/movement-k50", 0.7)
    curves = read(tmp_path, SQUAD)
    assert curves["cram-plus-multi-finetune"].passes == [17.8]
    assert [name for name, curve in curves.items() if curve.at_most] == ["cram-plus-multi-finetune"]
    assert "| CrAM+, 2.0x, fine-tuned | ≤ 17.8 | 80.00 |" in COST["table"](SQUAD, curves)
    assert RESNET not in COST["read_curves"](tmp_path)


def test_a_model_that_was_trained_for_another_pattern_counts_by_its_sparsity(write, tmp_path):
    write(f"{SQUAD}/cram-plus-multi-long", 0.8)
    write(f"{SQUAD}/l0-k50", 0.7)
    assert load_recipe(f"{SQUAD}/l0-k50").method.target == "global:0.5"
    assert read(tmp_path, SQUAD)["l0"].scores == {"uniform:0.5": (70, 0)}


def test_epochs_have_to_be_known(write, tmp_path):
    result = write(f"{RESNET}/sgd", 0.9)
    unknown = replace(result, recipe={**result.recipe, "train": {}})
    write_result(unknown, tmp_path / result.path)
    with pytest.raises(ValueError, match=r"sgd\.json does not say its epochs"):
        COST["read_curves"](tmp_path)


def test_the_table_has_passes_and_scores(write, tmp_path):
    write(f"{RESNET}/cram-plus-multi", 0.9, 0.89, seeds=3)
    write(f"{RESNET}/gradual-magnitude-k50", 0.7, seeds=2)
    write(f"{RESNET}/gradual-magnitude-k70", 0.6)
    lines = COST["table"](RESNET, read(tmp_path)).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == [
        "method",
        *(f"for {count}" for count in (1, 2)),
        *(f"`{target}`" for target in TARGETS[:2]),
        "seeds",
    ]
    assert rows[2][:3] + rows[2][-1:] == ["CrAM+, 2.0x", "400", "400", "3"]
    assert rows[3][:3] + rows[3][-1:] == ["Gradual magnitude", "200", "400", "1 to 2"]
    assert rows[2][3:5] == ["91.00 ± 1.00", "90.00 ± 1.00"]
    assert rows[3][3:5] == ["70.50 ± 0.71", "60.00"]


def everything(write):
    """Results of all methods at the first two targets."""
    for panel, settings in COST["PANELS"].items():
        scores = (0.9, 0.88)
        for method, shared, each in settings.trainings():
            if shared and not each:
                write(f"{panel}/{shared}", *scores)
            elif shared:
                for at, score in zip(settings.targets, scores, strict=False):
                    write(f"{panel}/{shared}", score, at=at)
            else:
                targets = settings.targets if method.endswith(COST["TUNED"]) else [None] * 2
                for (recipe, *_), at, score in zip(each, targets, scores, strict=False):
                    write(f"{panel}/{recipe}", score, at=at)


def test_the_picture_carries_its_numbers_and_the_page_gets_it(write, tmp_path):
    everything(write)
    picture, page = tmp_path / "cost.png", tmp_path / "page.md"
    page.write_text("a\n<!-- cost:tables -->\nold\n<!-- end cost -->\nb\n")
    COST["main"](tmp_path, picture, page)
    image = Image.open(picture)
    shown = json.loads(image.text["Description"])
    assert shown == plain(COST["read_curves"](tmp_path))
    assert [len(curves) for curves in shown.values()] == [4 + 4 + 4 + 4, 3 + 3 + 6 + 6]
    assert shown[RESNET]["str"]["passes"] == [200, 400]
    assert shown[SQUAD]["l0"]["passes"] == [16, 32]
    assert image.width > 1000
    text = page.read_text()
    assert text.startswith("a\n<!-- cost:tables -->\n![")
    assert "](cost.png)" in text
    assert text.count("| method | for 1 |") == 2
    content = COST["content"](COST["read_curves"](tmp_path))
    assert text == f"a\n<!-- cost:tables -->\n{content}\n<!-- end cost -->\nb\n"


def test_a_page_without_the_section_stays_as_it_is(write, tmp_path, capsys):
    write(f"{RESNET}/cram-plus-multi", 0.9)
    write(f"{RESNET}/dpf-k50", 0.9)
    page = tmp_path / "page.md"
    page.write_text("a\n")
    COST["main"](tmp_path, tmp_path / "cost.png", page)
    assert page.read_text() == "a\n"
    said = capsys.readouterr()
    assert "| DPF | 200 |" in said.out
    assert f"{SQUAD} has no CrAM+; it needs one of cram-plus-multi-long.json" in said.err


@pytest.mark.parametrize("known", ["cram-plus-multi", "dpf-k50", "dpf-k70"])
def test_without_a_comparison_nothing_is_written(write, tmp_path, known):
    write(f"{RESNET}/{known}", 0.9)
    write(f"{RESNET}/sgd", 0.9)
    if known == "dpf-k70":
        write(f"{RESNET}/cram-plus-multi", 0.9)  # not measured at 70 %
    picture, page = tmp_path / "cost.png", tmp_path / "page.md"
    page.write_text("<!-- cost:tables -->\n<!-- end cost -->\n")
    with pytest.raises(SystemExit) as stopped:
        COST["main"](tmp_path, picture, page)
    lacking = "has no CrAM+; it needs one of cram-plus-multi.json"
    if known == "cram-plus-multi":
        lacking = "it needs one of sgd-finetune-global-0.5.json"
    assert f"{tmp_path / RESNET} has no " in str(stopped.value)
    assert lacking in str(stopped.value)
    assert not picture.exists()
    assert page.read_text() == "<!-- cost:tables -->\n<!-- end cost -->\n"


def plain(curves):
    return {
        panel: {name: json.loads(json.dumps(asdict(curve))) for name, curve in known.items()}
        for panel, known in curves.items()
    }


def test_every_method_has_a_style():
    for panel in COST["PANELS"].values():
        labels = [COST["style"](method).label for method, _, _ in panel.trainings()]
        assert len(set(labels)) == len(labels)


def test_the_picture_and_the_page_are_up_to_date():
    picture, page = COST["PICTURE"], COST["PAGE"].read_text("utf-8")
    assert picture.exists() == ("](cost.png)" in page)
    if picture.exists():
        curves = COST["read_curves"]()
        shown = json.loads(Image.open(picture).text["Description"])
        assert shown == plain(curves), "draw it anew: python docs/cost.py"
        assert COST["content"](curves) in page, "write it anew: python docs/cost.py"

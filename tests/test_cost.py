"""The picture of what several sparsities cost."""

import json
import runpy
from pathlib import Path

import pytest
from PIL import Image
from report.test_costs import RESNET, SQUAD, trained

from torchcram.experiments.evaluation.results import write_result

ROOT = Path(__file__).parent.parent
COST = runpy.run_path(str(ROOT / "docs" / "cost.py"))


@pytest.fixture
def write(tmp_path):
    """Writes the result of a recipe."""

    def write(name, *scores, **options):
        made = trained(name, *scores, **options)
        write_result(made, tmp_path / made.path)

    return write


def everything(write):
    """Results of all methods at the first two targets."""
    for panel, settings in COST["PANELS"].items():
        for method in settings.methods:
            for at in settings.targets[:2]:
                level = f"{100 * float(at.partition(':')[2]):.4g}"
                try:
                    write(f"{panel}/{method}", *[0.9] * 8)
                    write(f"{panel}/{method}", 0.9, at=at)
                except ValueError:  # no such recipe: one for each target
                    write(f"{panel}/{method}-k{level}", 0.88)
                    write(f"{panel}/{method}-k{level}", 0.89, at=at)


def test_the_picture_carries_its_numbers(write, tmp_path):
    everything(write)
    picture = tmp_path / "cost.png"
    COST["main"](tmp_path, picture)
    image = Image.open(picture)
    shown = json.loads(image.text["Description"])
    assert shown == json.loads(json.dumps(COST["described"](COST["read_panels"](tmp_path))))
    assert [len(curves) for curves in shown.values()] == [2 * 8, 2 * 9]
    assert shown[RESNET]["str"]["passes"] == [200, 400]
    assert shown[SQUAD]["l0, fine-tuned"]["passes"] == [17.8, 35.6]
    assert image.width > 1000


@pytest.mark.parametrize("known", ["cram-plus-multi", "dpf-k70"])
def test_without_a_comparison_nothing_is_written(write, tmp_path, known):
    write(f"{RESNET}/{known}", 0.9)
    write(f"{RESNET}/sgd", 0.9)
    picture = tmp_path / "cost.png"
    with pytest.raises(SystemExit, match=r"needs CrAM\+ and a method that trains for each target"):
        COST["main"](tmp_path, picture)
    assert not picture.exists()


def test_every_method_has_a_style(write, tmp_path):
    everything(write)
    for name, comparison in COST["read_panels"](tmp_path).items():
        labels = [COST["style"](COST["PANELS"][name], cost).label for cost in comparison.methods]
        assert len(set(labels)) == len(labels)


def test_the_picture_is_up_to_date():
    curves = COST["described"](COST["read_panels"]())
    shown = json.loads(Image.open(COST["PICTURE"]).text["Description"])
    assert shown == json.loads(json.dumps(curves)), "draw it anew: python docs/cost.py"

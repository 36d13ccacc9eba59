"""Models of other packages and of files, in recipes."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from runs import CPU, digits, run
from torch import nn

from torchcram.experiments.models import build_model
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.training.trainer import load_trained

SGD = "digits/convnet-digits/sgd"
NETS = """
from torch import nn

import layers_beside

NUMBER = 3


def mlp(num_classes, width=8):
    hidden = layers_beside.hidden(width)
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, num_classes))


class Net(nn.Sequential):
    def __init__(self, *, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))


def text(num_classes):
    return "text"


def nothing():
    return nn.Identity()
"""
LAYERS = """
from torch import nn


def hidden(width):
    return nn.Linear(64, width), nn.ReLU()
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A file with factories, which imports the one beside it."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "nets.py").write_text(NETS)
    (folder / "layers_beside.py").write_text(LAYERS)
    monkeypatch.delitem(sys.modules, "layers_beside", raising=False)
    return folder / "nets.py"


def widths(model):
    return [layer.out_features for layer in model if isinstance(layer, nn.Linear)]


def test_a_factory_of_a_file_gets_the_classes_and_the_arguments(nets):
    before = list(sys.path)
    model = build_model(f"{nets}:mlp", classes=5, args={"width": 16})
    assert widths(model) == [16, 5]
    assert widths(build_model(f"{nets}:mlp", classes=3)) == [8, 3]
    assert isinstance(build_model(f"{nets}:Net", classes=3), nn.Sequential)
    assert sys.path == before


def test_a_file_that_changed_is_read_again(nets):
    first = build_model(f"{nets}:Net", classes=3)
    assert type(build_model(f"{nets}:Net", classes=3)) is type(first)
    nets.write_text(NETS.replace("width=8", "width=9"))
    assert widths(build_model(f"{nets}:mlp", classes=3)) == [9, 3]


def test_a_factory_of_a_module(nets, monkeypatch):
    monkeypatch.syspath_prepend(nets.parent)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    assert widths(build_model("nets:mlp", classes=2, args={"width": 4})) == [4, 2]
    monkeypatch.delitem(sys.modules, "nets")


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("{}:mpl", {}, "'mpl' is not there (did you mean 'mlp'?)"),
        ("{}:NUMBER", {}, "'NUMBER' is not callable"),
        ("{}:mlp", {"depth": 2}, "'depth'; given: num_classes, depth; allowed: num_classes, width"),
        ("{}:nothing", {}, "given: num_classes; allowed: no arguments"),
        ("{}:text", {}, "the factory returned str; allowed: an nn.Module"),
        ("{}x.py:mlp", {}, "nets.pyx.py cannot be read: No such file"),
        ("not_a_package.nets:mlp", {}, "not_a_package.nets cannot be imported: No module named"),
    ],
)
def test_what_cannot_be_built_says_why(nets, name, args, says):
    name = name.format(nets)
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        build_model(name, classes=2, args=args)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("code", ["import not_installed", "def mlp(:"])
def test_a_file_that_cannot_be_imported_is_named(nets, code):
    nets.write_text(code)
    with pytest.raises(ValueError, match=r"nets.py cannot be imported: "):
        build_model(f"{nets}:mlp", classes=2)


def test_models_of_timm(monkeypatch):
    calls = []
    timm = ModuleType("timm")
    timm.is_model = lambda name: name == "resnet10t"
    timm.list_models = lambda: ["resnet10t"]
    timm.create_model = lambda name, **given: calls.append((name, given)) or nn.Linear(2, 2)
    monkeypatch.setitem(sys.modules, "timm", timm)
    build_model("timm/resnet10t", classes=7, args={"drop_rate": 0.1}, pretrained=True)
    assert calls == [("resnet10t", {"pretrained": True, "num_classes": 7, "drop_rate": 0.1})]
    with pytest.raises(ValueError, match=r"no model 'resnet10' \(did you mean 'resnet10t'\?\)"):
        build_model("timm/resnet10", classes=7)


def test_without_timm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"'timm/resnet10t' needs timm .*: pip install timm"):
        build_model("timm/resnet10t", classes=7)


def test_paths_are_relative_to_the_recipe_and_to_the_folder_of_set(nets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("code/base.yaml").write_text(f"extends: {SGD}\nmodel: {{name: './nets.py:mlp'}}\n")
    Path("below").mkdir()
    Path("below/mine.yaml").write_text("extends: ../code/base.yaml\nmodel: {args: {width: 4}}\n")
    recipe = load_recipe("below/mine.yaml")
    assert (recipe.model.name, recipe.model.args) == (f"{nets}:mlp", {"width": 4})
    assert recipe.name == "digits/nets-mlp/mine"
    given = ["model.name=code/nets.py:Net", "name=digits/net/sgd"]
    assert load_recipe(SGD, given).model.name == f"{nets}:Net"
    assert load_recipe(SGD, ["model.name=package.nets:mlp"]).model.name == "package.nets:mlp"
    Path("other.yaml").write_text(f"extends: {SGD}\nmodel: {{name: 'package.nets:mlp'}}\n")
    assert load_recipe("other.yaml").name == "digits/nets-mlp/other"
    assert "args" not in load_recipe(SGD).to_dict()["model"]


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["model.args={width: 3}"], "model.args is .*allowed: null, as model.name is 'convnet"),
        (["model.name=timm/"], "model.name is 'timm/'.*timm/NAME, package.module:factory, ./file"),
        (["model.name=a.b:c d"], "model.name is 'a.b:c d'"),
        (["model.name=a:b", "model.args={num_classes: 3}"], "model.args.num_classes is 3"),
        (["model.name=a:b", "model.args={when: 2020-01-01}"], "model.args is .*allowed: texts"),
        (["model.name=a:b", "model.args={by: {1: 2}}"], "model.args is .*allowed: texts"),
        (["model.name=a:b", "model.args=[1]"], r"model.args is \[1\]"),
        (["model.name=a:b", "model.pretrained=true"], "model.pretrained is True; allowed: false"),
        (["model.name=a:b", "text={task: squad}", "data.augment=none"], "a model for language"),
    ],
)
def test_what_a_recipe_may_say_of_models(texts, says):
    with pytest.raises(ValueError, match=says):
        load_recipe(SGD, texts)


def test_a_run_knows_its_model_wherever_it_is_loaded(nets, tmp_path, monkeypatch):
    monkeypatch.chdir(nets.parent)
    given = ["model.name=./nets.py:mlp", "model.args={width: 12}", "train.epochs=1"]
    recipe = load_recipe(SGD, [*given, "schedule.warmup_epochs=0"])
    run(tmp_path / "run", recipe, digits(64, 20))
    monkeypatch.chdir(tmp_path)
    again = load_trained(tmp_path / "run", CPU)
    assert again.recipe == recipe
    assert widths(again.model) == [12, 10]


def test_a_model_that_gives_other_scores_is_refused(nets, tmp_path):
    nets.write_text(
        "from torch import nn\n"
        "def wide(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 11))\n"
        "def pair(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Pair())\n"
        "def none(num_classes):\n"
        "    return nn.Flatten()\n"
        "class Pair(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x, x\n"
    )
    for name, says in {
        "wide": r"gives \(1, 11\) .*allowed: a tensor of shape \(1, 10\)",
        "pair": r"gives tuple .*allowed: a tensor of shape \(1, 10\)",
        "none": "Flatten has no parameters to train",
    }.items():
        with pytest.raises(ValueError, match=says):
            run(tmp_path / name, load_recipe(SGD, [f"model.name={nets}:{name}"]), digits(64, 20))

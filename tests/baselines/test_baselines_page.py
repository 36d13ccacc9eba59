"""The page about the methods says what they are and what they take."""

import inspect
import re
from pathlib import Path

import pytest
from problems import batches, build, sgd, train
from test_protocol import METHODS as MAKERS

from torchcram import baselines, parse_operator, sparsity
from torchcram.baselines.registry import METHODS
from torchcram.experiments.recipe import load_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text()
ROW = re.compile(r"^\| `([\w-]+)` \| `(\w+)` \| (.*?) \| (yes|no) \| (yes|no) \|$", re.MULTILINE)
TARGETS = {"global": "global:0.5", "uniform": "uniform:0.5", "row": "row:0.5", "nm": "nm:2:4"}


def takes(kind, target):
    try:
        kind.check_operator(parse_operator(target))
    except ValueError:
        return False
    return True


def test_the_table_has_every_method_as_it_is():
    rows = {name: cells for name, *cells in ROW.findall(PAGE)}
    assert list(rows) == list(METHODS)
    for name, (kind, targets, shards, captured) in rows.items():
        method = METHODS[name].kind
        assert getattr(baselines, kind) is method
        allowed = [f"`{word}`" for word, target in TARGETS.items() if takes(method, target)]
        assert targets == " ".join(allowed), name
        kinds = [base for base in method.__mro__ if issubclass(base, baselines.Baseline)]
        whole = any("self.require_whole()" in inspect.getsource(base) for base in kinds)
        assert shards == ("no" if whole else "yes"), name
        assert captured == ("yes" if method.capturable_steps else "no"), name


@pytest.mark.parametrize("method", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("target", ["row:0.5", "nm:2:4"])
def test_a_training_ends_at_exactly_each_kind_of_target(method, target):
    model = build()
    if not takes(type(method(model, sgd(model))), target):
        with pytest.raises(ValueError, match="no single sparsity"):
            method(model, sgd(model), target)
        return
    optimizer = method(model, sgd(model), target)
    train(model, optimizer, batches())
    masks = optimizer.finish()
    assert sparsity(optimizer.weights) == 0.5
    for mask in masks.values():
        assert set(mask.view(-1, 4 if target == "nm:2:4" else mask.shape[1]).sum(1).tolist()) == {
            2 if target == "nm:2:4" else mask.shape[1] // 2
        }


def test_the_recipes_of_the_page_load(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    for name in re.findall(r"mine\.yaml:([\w-]+)", text):
        assert load_recipe(f"{tmp_path / 'mine.yaml'}:{name}").method is not None
    recipe = load_recipe(f"{tmp_path / 'mine.yaml'}:dpf-k90")
    assert recipe.title == "DPF, trained for 90 %"

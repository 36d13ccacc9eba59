"""The list of all keys of a recipe."""

from pathlib import Path

import figures
import recipe_keys as page

from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.keys import REQUIRED, recipe_keys


def leaves(section, prefix=""):
    for name, value in section.items():
        yield prefix + name
        if isinstance(value, dict) and not name.endswith("args"):
            yield from leaves(value, f"{prefix}{name}.")


def test_every_key_has_a_meaning_and_a_default():
    keys = {key.name: key for key in recipe_keys()}
    assert all(key.meaning and "None" not in key.meaning for key in keys.values())
    assert keys["name"].default == keys["train.epochs"].default == REQUIRED
    assert keys["cram"].default == keys["cram.rho"].default == "null"
    assert keys["cram.sparse_gradients"].default == "true"
    assert keys["cram.operators"].default == "[]"
    assert keys["optimizer.lr"].default == "0.1"
    assert keys["task.args"].default == "{}"
    assert keys["train.early_stopping.patience"].meaning.startswith("Number of tests in a row")
    assert keys["cram.compressed_share"].meaning.endswith("a step as cheap as a plain one.")


def test_every_key_of_recipes_is_there():
    keys = {key.name for key in recipe_keys()}
    for name in ("cifar10/resnet20/cram-plus-multi-1x", "squad/minilm-l6/platon-k80"):
        assert set(leaves(load_recipe(name).to_dict())) <= keys


def test_the_page_has_all_keys(tmp_path):
    text = page.PAGE.read_text("utf-8")
    assert figures.section(*page.SECTION, page.table()) in text, "python docs/recipe_keys.py"
    copy = Path(tmp_path, "page.md")
    copy.write_text("a\n<!-- keys:recipe -->\nold\n<!-- end keys -->\nb\n")
    page.main(copy)
    assert copy.read_text("utf-8") == f"a\n{figures.section(*page.SECTION, page.table())}\nb\n"

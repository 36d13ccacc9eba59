import pytest
from commands import CRAM, command, succeed

from torchcram import parse_operator
from torchcram.cli.listing import OPERATORS
from torchcram.experiments.data import dataset_names
from torchcram.experiments.models import model_names
from torchcram.experiments.recipe import recipe_names


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("recipes", recipe_names()),
        ("models", model_names()),
        ("datasets", dataset_names()),
        ("operators", [name for name, _, _ in OPERATORS]),
    ],
)
def test_all_names_are_listed_in_whole(what, names):
    lines = succeed("list", what).stdout.splitlines()
    for name in names:
        assert [line for line in lines if line.startswith(f"│ {name} ")], name


def test_recipes_have_their_titles():
    (line,) = [line for line in succeed("list", "recipes").stdout.splitlines() if CRAM in line]
    assert [cell.strip() for cell in line.strip("│").split("│")] == [CRAM, "CrAM+-Multi", "40"]


def test_examples_of_operators_are_operators():
    for _, example, _ in OPERATORS:
        assert str(parse_operator(example)) == example


def test_anything_else_is_refused():
    done = command("list", "colours")
    assert done.exit_code == 2
    assert "datasets" in done.stderr

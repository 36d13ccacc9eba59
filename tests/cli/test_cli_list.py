import json

import pytest
from commands import CRAM, command, fail, succeed

from torchcram.baselines.registry import METHODS
from torchcram.cli.listing import OPERATORS
from torchcram.experiments.data.images import dataset_names
from torchcram.experiments.models import model_names
from torchcram.experiments.recipe import recipe_names
from torchcram.experiments.recipe.keys import recipe_keys
from torchcram.pruners import parse_pruner
from torchcram.pruners.parse import KINDS


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("recipes", recipe_names()),
        ("models", model_names()),
        ("datasets", dataset_names()),
        ("operators", [name for name, _, _ in OPERATORS]),
        ("methods", ["cram", *METHODS]),
        ("keys", [key.name for key in recipe_keys()]),
    ],
)
def test_all_names_are_listed_in_whole(what, names):
    lines = succeed("list", what).stdout.splitlines()
    for name in names:
        assert [line for line in lines if line.startswith(f"│ {name} ")], name


def test_recipes_have_their_titles():
    (line,) = [
        line for line in succeed("list", "recipes").stdout.splitlines() if f"{CRAM} " in line
    ]
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        CRAM,
        "CrAM+-Multi",
        "40",
        "80",
    ]


def test_examples_of_operators_are_operators():
    for _, example, _ in OPERATORS:
        assert str(parse_pruner(example)) == example


@pytest.mark.parametrize("name", ["global", "uniform", "row", "nm", "int", *KINDS])
def test_every_kind_of_operator_is_listed(name):
    shown = [row["operator"] for row in json.loads(succeed("list", "operators", "--json").stdout)]
    assert [operator for operator in shown if operator.startswith(name)]


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_options_of_pruners_are_listed(kind):
    said = " ".join(text for name, _, text in OPERATORS if name.startswith(f"{kind.kind}:"))
    for letter, option in kind.letters.items():
        assert f"{letter} {option}" in said


@pytest.mark.parametrize("text", ["digits/", "MINILM-L6/adam", "cifar10-jpeg/resnet18/sgd"])
def test_names_are_filtered(text):
    done = succeed("list", "recipes", text, "--json")
    names = [row["recipe"] for row in json.loads(done.stdout)]
    assert names == [name for name in recipe_names() if text.lower() in name]
    assert names
    shown = succeed("list", "recipes", text).stdout.splitlines()
    rows = [line for line in shown if line.startswith("│")]
    assert len(rows) == len(names)


def test_other_lists_are_filtered_too():
    models = json.loads(succeed("list", "models", "vgg16-", "--json").stdout)
    assert models == [{"model": "vgg16-cifar"}]
    rows = json.loads(succeed("list", "datasets", "cifar10", "--json").stdout)
    assert [row["dataset"] for row in rows] == [n for n in dataset_names() if "cifar10" in n]
    assert len(json.loads(succeed("list", "operators", "int", "--json").stdout)) == 2


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_filter_that_nothing_matches_is_an_error(options):
    said = "error: no recipes with 'resnet21' in their names"
    assert fail("list", "recipes", "resnet21", *options, code=1) == said


def test_json_has_what_the_table_has():
    rows = json.loads(succeed("list", "recipes", CRAM, "--json").stdout)
    assert rows == [
        {"recipe": CRAM, "title": "CrAM+-Multi", "epochs": 40, "passes": 80},
        {"recipe": f"{CRAM}-1.5x", "title": "CrAM+-Multi, 1.5x", "epochs": 40, "passes": 60},
        {"recipe": f"{CRAM}-1x", "title": "CrAM+-Multi, 1.0x", "epochs": 40, "passes": 40},
    ]
    rows = json.loads(succeed("list", "operators", "--json").stdout)
    assert [tuple(row.values()) for row in rows] == list(OPERATORS)
    assert rows[0].keys() == {"operator", "example", "what_it_does"}


def test_methods_have_their_arguments():
    rows = json.loads(succeed("list", "methods", "--json").stdout)
    assert rows[0].keys() == {"method", "arguments", "what_it_does"}
    assert [row["method"] for row in rows] == ["cram", *METHODS]
    assert [row["arguments"] for row in rows[1:]] == [
        ", ".join(method.arguments) for method in METHODS.values()
    ]
    assert json.loads(succeed("list", "methods", "ACDC", "--json").stdout) == [
        {
            "method": "acdc",
            "arguments": "warmup, period, end",
            "what_it_does": "alternates phases of dense and of pruned training",
        }
    ]
    line = "error: no methods with 'magic' in their names"
    assert fail("list", "methods", "magic", code=1) == line


def test_anything_else_is_refused():
    done = command("list", "colours")
    assert done.exit_code == 2
    assert "datasets" in done.stderr

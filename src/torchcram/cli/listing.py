"""torchcram list."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import errors_in_a_line

OPERATORS = (
    ("global:SPARSITY", "global:0.9", "zeroes that part of all weights, the smallest ones"),
    ("uniform:SPARSITY", "uniform:0.8", "the same in every layer"),
    ("global:LOW-HIGH", "global:0.3-0.9", "a range to train over; uniform too"),
    ("nm:N:M", "nm:2:4", "keeps the N largest of every M along the inputs"),
    ("intBITS", "int4", "rounds to that many bits, a scale for every output channel"),
    ("intBITS:gSIZE", "int4:g64", "the same, a scale for every group of that many inputs"),
    ("ONE+OTHER", "global:0.8+int4", "one after the other"),
)


class What(str, Enum):
    """What there is to list."""

    recipes = "recipes"
    models = "models"
    datasets = "datasets"
    operators = "operators"


@app.command("list")
def list_(what: Annotated[What, typer.Argument(help="What to list.")]) -> None:
    """List the recipes, models, data sets or operators there are."""
    with errors_in_a_line():
        from torchcram.cli.tables import names_table, show

        header, rows = {
            What.recipes: _recipes,
            What.models: _models,
            What.datasets: _datasets,
            What.operators: _operators,
        }[what]()
        show(names_table(what.value, header, rows))


Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _recipes() -> Rows:
    from torchcram.experiments.recipe import load_recipe, recipe_names

    found = [(name, load_recipe(name)) for name in recipe_names()]
    return ("recipe", "title", "epochs"), [
        (name, one.title, str(one.train.epochs)) for name, one in found
    ]


def _models() -> Rows:
    from torchcram.experiments.models import model_names
    from torchcram.experiments.text.names import ALLOWED

    return ("model",), [(name,) for name in [*model_names(), *ALLOWED]]


def _datasets() -> Rows:
    from torchcram.experiments.data import dataset_names
    from torchcram.experiments.text.tasks import TASKS

    rows = [*dataset_names().items()]
    rows += [(name, task.title) for name, task in TASKS.items()]
    rows.append(("NAME", "any folder or archive NAME/<split>/<class>/*.jpg in the data folder"))
    return ("data set", "what it is"), [tuple(row) for row in rows]


def _operators() -> Rows:
    return ("operator", "example", "what it does"), list(OPERATORS)

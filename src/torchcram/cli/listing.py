"""torchcram list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import errors_in_a_line

OPERATORS = (
    (
        "global:SPARSITY",
        "global:0.9",
        "zeroes the given fraction of all weights, the smallest in magnitude",
    ),
    ("uniform:SPARSITY", "uniform:0.8", "the same fraction in every layer"),
    ("row:SPARSITY", "row:0.5", "the same fraction for every output of a layer"),
    (
        "global:LOW-HIGH",
        "global:0.3-0.9",
        "a range of sparsities to train over; uniform and row too",
    ),
    ("nm:N:M", "nm:2:4", "keeps the N largest of every M weights along the inputs"),
    ("intBITS", "int4", "rounds to the given number of bits, with a scale per output channel"),
    ("intBITS:gSIZE", "int4:g64", "the same, with a scale per group of inputs of the given size"),
    ("FIRST+SECOND", "global:0.8+int4", "applies the first, then the second"),
    ("PATTERN", "row:0.5", "pattern of a pruner: one of global, uniform, row and nm"),
    (
        "wanda@PATTERN",
        "wanda@nm:2:4",
        "pruner: zeroes weights by magnitude times the norm of the input",
    ),
    (
        "sparsegpt@PATTERN",
        "sparsegpt@row:0.5",
        "pruner: updates the kept weights to compensate for the zeroed ones; not global",
    ),
    (
        "sparsegpt:OPTIONS@PATTERN",
        "sparsegpt:b64@nm:2:4",
        "options, each a letter and a number: b block size, d damping",
    ),
    (
        "obs@PATTERN",
        "obs@uniform:0.7",
        "pruner: zeroes the weights that matter least to the loss, estimated from gradients",
    ),
    (
        "obs:OPTIONS@PATTERN",
        "obs:m64:r8@uniform:0.7",
        "options: m gradients, b block size, d damping, r recomputations",
    ),
)

WHAT_CRAM_DOES = "adds the gradient at the compressed weights; one training serves all targets"

Row = tuple[str | int | float, ...]


class What(str, Enum):
    """Kinds of things to list."""

    recipes = "recipes"
    models = "models"
    datasets = "datasets"
    operators = "operators"
    tasks = "tasks"
    methods = "methods"
    keys = "keys"


@app.command("list")
def list_(
    what: Annotated[What, typer.Argument(metavar="WHAT", help="Kind of things to list.")],
    text: Annotated[
        str | None,
        typer.Argument(metavar="FILTER", help="Text that names must contain, such as resnet20."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the available recipes, models, datasets, operators, tasks, methods or recipe keys."""
    with errors_in_a_line():
        columns, rows = {
            What.recipes: _recipes,
            What.models: _models,
            What.datasets: _datasets,
            What.operators: _operators,
            What.tasks: _tasks,
            What.methods: _methods,
            What.keys: _keys,
        }[what]((text or "").lower())
        if not rows:
            raise ValueError(f"no {what.value} with {text!r} in their names")
        if as_json:
            _print_json(columns, rows)
            return
        from torchcram.cli.output import names_table, show

        cells = [tuple(map(str, row)) for row in rows]
        show(names_table(what.value, columns, cells))


Listing = tuple[tuple[str, ...], list[Row]]


def _recipes(text: str) -> Listing:
    from torchcram.experiments.recipe import load_recipe, recipe_names
    from torchcram.report.summary import rounded

    recipes = [load_recipe(name) for name in recipe_names() if text in name.lower()]
    return ("recipe", "title", "epochs", "passes"), [
        (recipe.name, recipe.title, recipe.train.epochs, rounded(recipe.passes))
        for recipe in recipes
    ]


def _models(text: str) -> Listing:
    from torchcram.experiments.models import FORMS, model_names
    from torchcram.experiments.models.text import ALLOWED

    return ("model",), _with([(name,) for name in [*model_names(), *FORMS, *ALLOWED]], text)


def _datasets(text: str) -> Listing:
    from torchcram.experiments.data.images import dataset_names
    from torchcram.experiments.data.text.formats import TEXT_FORMATS

    rows: list[Row] = [*dataset_names().items()]
    rows += [(name, task.title) for name, task in TEXT_FORMATS.items()]
    rows.append(("NAME", "any folder or archive NAME/<split>/<class>/*.jpg in the data folder"))
    running = "running text for language-modelling: NAME/train.txt and NAME/test.txt, or .jsonl"
    rows.append(("NAME", running))
    return ("dataset", "what it is"), _with(rows, text)


def _operators(text: str) -> Listing:
    rows = [*OPERATORS, *_registered()]
    return ("operator", "example", "what it does"), _with(rows, text)


def _tasks(text: str) -> Listing:
    from torchcram.experiments.tasks import (
        TASKS,
        ImageClassification,
        QuestionAnswering,
        SentenceClassification,
    )

    def summary(kind: type) -> str:
        return (kind.__doc__ or "").strip().partition("\n")[0]

    rows: list[Row] = [
        ("(no section task or text)", summary(ImageClassification)),
        ("text.task: squad", summary(QuestionAnswering)),
        ("text.task: sst2, mrpc, rte, cola", summary(SentenceClassification)),
    ]
    for name in TASKS.names():
        try:
            kind = TASKS.find(name)
            rows.append((f"task.name: {name}", summary(kind) if kind else ""))
        except ValueError as error:  # noqa: PERF203
            rows.append((f"task.name: {name}", str(error)))
    return ("in a recipe", "what it is"), _with(rows, text)


def _methods(text: str) -> Listing:
    from torchcram.baselines.registry import CRAM, find_method, method_names

    rows: list[Row] = [(CRAM, "those of the section cram", WHAT_CRAM_DOES)]
    for name in method_names():
        try:
            method = find_method(name)
        except ValueError as error:  # of another package
            rows.append((name, "", str(error)))
            continue
        if method is not None:
            rows.append((name, ", ".join(method.arguments), method.summary))
    return ("method", "arguments", "what it does"), _with(rows, text)


def _keys(text: str) -> Listing:
    from torchcram.experiments.recipe.keys import recipe_keys

    rows: list[Row] = [(key.name, key.default, key.meaning) for key in recipe_keys()]
    return ("key", "default", "what it is"), _with(rows, text)


def _registered() -> Iterator[tuple[str, str, str]]:
    """Yields a row for every operator and pruner of other packages, including broken ones."""
    from torchcram.operators.parse import OPERATORS as REGISTERED
    from torchcram.pruners.parse import PRUNERS

    for names, form in ((REGISTERED, "{}:..."), (PRUNERS, "{}@PATTERN")):
        for name in names.names():
            try:
                kind = names.find(name)
            except ValueError as error:
                yield form.format(name), "", str(error)
                continue
            first, *_ = (kind.__doc__ or "").strip().splitlines() or [""]
            before = "" if names is REGISTERED else "pruner: "
            yield form.format(name), "", f"{before}{first}"


def _with(rows: Sequence[Row], text: str) -> list[Row]:
    """Returns the rows whose names contain a text."""
    return [row for row in rows if text in str(row[0]).lower()]


def _print_json(columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Prints a list of objects whose keys are the columns of the table."""
    import json

    keys = [column.replace(" ", "_") for column in columns]
    objects = [dict(zip(keys, row, strict=True)) for row in rows]
    typer.echo(json.dumps(objects, indent=2))

"""Recipes: a training and the compressions after it, as YAML files with a strict schema.

The files that come along are recipes/<task>/<model>/<method>.yaml; a file may say
`extends: <task>/<model>/<method>` and then only what is different.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcram.experiments.io import yaml_text
from torchcram.experiments.io.dataclass_io import (
    did_you_mean,
)
from torchcram.experiments.models import short_name, with_absolute_path
from torchcram.experiments.recipe.schema import Recipe

if TYPE_CHECKING:
    from importlib.abc import Traversable


SUFFIXES = (".yaml", ".yml")


def recipe_names() -> list[str]:
    """Returns the names of all recipes that come along, sorted."""
    return sorted(_names(_packaged(), ""))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Loads a recipe.

    A file of the user's that does not say its name is called after its data, its model and itself.
    The path of a file in `model.name` is relative to the recipe's file, or to the working folder in
    `overrides`; it becomes absolute. No code of a model is run.

    Args:
        name_or_path: one of `recipe_names()`, or a file that ends in .yaml.
        overrides: such as "cram.rho=0.1", "cram=null" or "compress.to=[global:0.5, int4]".

    Raises:
        ValueError: naming the file, the key, what was given and what is allowed.
        OSError: if there is no such file.
    """
    source = _Source.find(name_or_path)
    data, read = _read(source, ())
    data = yaml_text.override(data, overrides)
    if isinstance(data, dict) and "name" not in data:
        data["name"] = source.name or _name_for(data, source)
    where = ", which extends ".join(read)
    return Recipe.from_dict(data, where + (f", with {' '.join(overrides)}" if overrides else ""))


@dataclass(frozen=True)
class _Source:
    """A file, what messages call it, and its name where it is a recipe that comes along."""

    file: Traversable
    where: str
    name: str | None = None

    @classmethod
    def find(cls, name_or_path: str | Path, beside: Traversable | None = None) -> _Source:
        text = str(name_or_path)
        if isinstance(name_or_path, Path) or text.endswith(SUFFIXES):
            path = beside.parent / text if isinstance(beside, Path) else Path(text)
            return cls(path.resolve(), str(path))
        names = recipe_names()
        if text not in names:
            raise ValueError(
                f"there is no recipe {text!r}{did_you_mean(text, names)}; allowed: a name that "
                "`torchcram list recipes` shows, or a file that ends in .yaml"
            )
        return cls(_packaged().joinpath(f"{text}.yaml"), f"recipes/{text}.yaml", text)


def _read(source: _Source, before: tuple[str, ...]) -> tuple[Any, list[str]]:
    """Returns the data of a file on top of what it extends, and what files these are."""
    if str(source.file) in before:
        raise ValueError(f"{source.where} extends itself")
    try:
        text = source.file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source.where} is not UTF-8: {error}") from None
    data = yaml_text.parse(text, source.where)
    _resolve_model_(data, source)
    if not isinstance(data, dict) or "extends" not in data:
        return data, [source.where]
    try:
        base = _Source.find(str(data.pop("extends")), source.file)
    except ValueError as error:
        raise ValueError(f"{source.where}: extends: {error}") from None
    below, read = _read(base, (*before, str(source.file)))
    if isinstance(below, dict):
        below.pop("name", None)  # two recipes of one name would share their results
    return yaml_text.merged(below, data), [source.where, *read]


def _resolve_model_(data: object, source: _Source) -> None:
    """Makes the path of a model's file absolute; it is relative to the file of the recipe."""
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or not isinstance(source.file, Path):
        return
    if isinstance(model.get("name"), str):
        model["name"] = with_absolute_path(model["name"], source.file.parent)


def _packaged() -> Traversable:
    return importlib.resources.files("torchcram").joinpath("recipes")


def _names(folder: Traversable, above: str) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _names(entry, f"{above}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield above + entry.name.removesuffix(".yaml")


def _name_for(data: Mapping[str, Any], source: _Source) -> str:
    parts = [Path(source.where).stem]
    for section in ("model", "data"):
        found = data.get(section)
        name = found.get("name") if isinstance(found, dict) else None
        parts.insert(0, short_name(str(name)))
    return "/".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part).lstrip("._-") for part in parts)

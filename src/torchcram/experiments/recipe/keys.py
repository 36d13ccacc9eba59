"""Keys of a recipe with their defaults and meanings, from the docstrings of the schema."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from torchcram.experiments.recipe.schema import Recipe

REQUIRED = "required"
_ATTRIBUTE = re.compile(r"^    (\w+): (.+?)(?=^    \w+: |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class RecipeKey:
    """A key of a recipe.

    Attributes:
        name: Dotted name, as `--set` takes it.
        default: Default as in YAML, or "required".
        meaning: Meaning in words.
    """

    name: str
    default: str
    meaning: str


def recipe_keys() -> list[RecipeKey]:
    """Returns all keys of a recipe, the keys of a section after the section itself."""
    return list(_keys(Recipe, ""))


def _keys(kind: type, prefix: str) -> Iterator[RecipeKey]:
    hints, meanings = get_type_hints(kind), _meanings(kind)
    for field in fields(kind):
        name = prefix + field.name
        yield RecipeKey(name, _default(field), meanings[field.name])
        for part in (hints[field.name], *get_args(hints[field.name])):
            if isinstance(part, type) and is_dataclass(part):
                yield from _keys(part, f"{name}.")


def _meanings(kind: type) -> dict[str, str]:
    """Returns the descriptions of the attributes in the docstring of a dataclass."""
    _, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    in_yaml = re.sub(r"\bNone\b", "null", attributes)
    return {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(in_yaml)}


def _default(field: Field[Any]) -> str:
    value = field.default
    if value is MISSING:
        return REQUIRED if field.default_factory is MISSING else str(field.default_factory())
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "[]" if value == () else str(value)

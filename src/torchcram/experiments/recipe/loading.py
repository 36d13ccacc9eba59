"""Recipes from YAML files.

A file has one recipe, or a family of recipes that share a base:

    base:  # what all of them share
      data: {name: cifar10, augment: crop-flip}
      model: {name: resnet20}
      ...
    methods:  # what each of them changes
      sgd: {title: SGD}
      cram-plus-multi: {title: CrAM+-Multi, cram: {rule: CrAM+, ...}}
      cram-plus-multi-tau20: {from: cram-plus-multi, title: ..., cram: {mask_interval: 20}}
    variants:  # the same methods for another dataset or model
      cifar10-jpeg/resnet20: {data: {name: cifar10-jpeg}}
      cifar10/vgg16: {methods: [sgd], model: {name: vgg16-cifar}}  # only these methods

The recipes of the package are such families. recipes/cifar10/resnet20.yaml has the recipes
cifar10/resnet20/<method> and those of its variants, cifar10-jpeg/resnet20/<method>. In a file of
the user, a recipe of a family is FILE:<method> or, of a variant, FILE:<task>/<model>/<method>.

A single recipe, or the base of a family, may say `extends: <recipe>` and then only what differs
from that recipe, which is a name of the package or a file, relative to the file that names it.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcram.experiments.io import yaml_text
from torchcram.experiments.io.dataclass_io import build, did_you_mean
from torchcram.experiments.io.files import slug
from torchcram.experiments.models import short_name, with_absolute_path
from torchcram.experiments.recipe.family import RecipeFamily
from torchcram.experiments.recipe.schema import Recipe

if TYPE_CHECKING:
    from importlib.abc import Traversable

_FILE = re.compile(r"(.*\.ya?ml)(?::([^:]*))?", re.DOTALL)  # path, name of a recipe in the family


def recipe_names() -> list[str]:
    """Returns the names of all recipes of the package, sorted."""
    return sorted(_packaged_recipes())


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Loads a recipe.

    A recipe in a file of the user that does not say its name is called "<dataset>/<model>/<file>",
    with the method in place of the file where the file has several. The path of a file in
    `model.name` is relative to the recipe's file, or to the working folder in `overrides`; it
    becomes absolute. No code of a model is run.

    Args:
        name_or_path: Name of a recipe of the package, or path of a file that ends in .yaml; where
            the file has several recipes, followed by a colon and the method.
        overrides: Changes, such as "cram.rho=0.1", "cram=null" or "compress.to=[global:0.5, int4]".

    Raises:
        ValueError: If a key or a value is not allowed; the message names the file, the key, what
            was given and what is allowed.
        OSError: If there is no such file.
    """
    source = _find(name_or_path)
    settings, files = _follow_extends(source)
    settings = yaml_text.override(settings, overrides)
    if isinstance(settings, dict) and "name" not in settings:
        settings = {**settings, "name": source.name or _name_for(settings, source.method)}
    where = ", which extends ".join(files)
    changes = f", with {' '.join(overrides)}" if overrides else ""
    return Recipe.from_dict(settings, where + changes)


@dataclass(frozen=True)
class _Source:
    """Settings of a recipe as its file has them.

    Attributes:
        settings: Settings, not merged with the recipe that they extend.
        where: File, and the name within a family, for messages.
        identity: Text that is the same for the same recipe however its path is written.
        method: Last part of the name of a recipe that says none.
        name: Name of a recipe of the package, or of a variant.
        folder: Folder that paths in the settings start from; None in the package.
    """

    settings: object
    where: str
    identity: str
    method: str
    name: str | None = None
    folder: Path | None = None


def _find(name_or_path: str | Path, folder: Path | None = None) -> _Source:
    """Returns a recipe of the package or of a file, whose path starts from `folder`."""
    match = _FILE.fullmatch(str(name_or_path))
    if match is not None:
        return _from_file((folder or Path()) / match[1], match[2])
    if isinstance(name_or_path, Path):
        return _from_file(name_or_path, None)
    recipes = _packaged_recipes()
    if name_or_path not in recipes:
        raise ValueError(
            f"there is no recipe {name_or_path!r}{did_you_mean(name_or_path, recipes)}; allowed: a "
            "name that `torchcram list recipes` shows, or a file that ends in .yaml"
        )
    return recipes[name_or_path]


def _from_file(path: Path, name: str | None) -> _Source:
    """Reads a file of the user.

    Args:
        path: Path of the file.
        name: Name of a recipe in a family; None where the file has one recipe.
    """
    settings = _parse(path, str(path))
    family = _family(settings, str(path))
    where = str(path) if name is None else f"{path}:{name}"
    if family is None and name is not None:
        raise ValueError(f"{where}: the file has no methods; allowed: {path}")
    if family is not None:
        allowed = f"{path}:NAME with one of the names {', '.join(family.names)}"
        if name is None:
            raise ValueError(f"{path} has several recipes; allowed: {allowed}")
        if name not in family.names:
            meant = did_you_mean(name, family.names)
            raise ValueError(f"{path} has no recipe {name!r}{meant}; allowed: {allowed}")
        settings = family.settings(name)
    folder = path.resolve().parent
    return _Source(
        settings=_with_absolute_model(settings, folder),
        where=where,
        identity=f"{path.resolve()}:{name}",
        method=path.stem if name is None else name,
        name=name if name is not None and "/" in name else None,
        folder=folder,
    )


def _parse(file: Traversable, where: str) -> object:
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error}") from None
    return yaml_text.parse(text, where)


def _family(settings: object, where: str) -> RecipeFamily | None:
    """Returns the family that a file has, or None where it has a single recipe."""
    if isinstance(settings, dict) and settings.keys() & {"base", "methods", "variants"}:
        return build(RecipeFamily, settings, where)
    return None


def _follow_extends(source: _Source, before: tuple[str, ...] = ()) -> tuple[Any, list[str]]:
    """Returns the settings of a recipe on top of those it extends, and the files of all of them."""
    if source.identity in before:
        raise ValueError(f"{source.where} extends itself")
    if not isinstance(source.settings, dict) or "extends" not in source.settings:
        return source.settings, [source.where]
    settings = dict(source.settings)
    try:
        extended = _find(str(settings.pop("extends")), source.folder)
    except ValueError as error:
        raise ValueError(f"{source.where}: extends: {error}") from None
    base, files = _follow_extends(extended, (*before, source.identity))
    if isinstance(base, dict):  # two recipes of one name would share their results
        base = {key: value for key, value in base.items() if key != "name"}
    return yaml_text.merged(base, settings), [source.where, *files]


def _with_absolute_model(settings: object, folder: Path) -> object:
    """Returns settings with an absolute path where the model is a function of a file."""
    model = settings.get("model") if isinstance(settings, dict) else None
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(name, str):
        return settings
    return yaml_text.merged(settings, {"model": {"name": with_absolute_path(name, folder)}})


@functools.cache
def _packaged_recipes() -> Mapping[str, _Source]:
    """Returns the recipes of the package by name."""
    return _recipes_below(importlib.resources.files("torchcram").joinpath("recipes"))


def _recipes_below(folder: Traversable) -> dict[str, _Source]:
    """Returns the recipes of the families below a folder by name."""
    recipes: dict[str, _Source] = {}
    for path, file in _yaml_files(folder):
        where = f"recipes/{path}.yaml"
        family = build(RecipeFamily, _parse(file, where), where)
        for key in family.names:
            name = key if "/" in key else f"{path}/{key}"
            if name in recipes:
                raise ValueError(f"{where}:{key} is also {recipes[name].where}")
            recipes[name] = _Source(
                settings=family.settings(key),
                where=f"{where}:{key}",
                identity=name,
                method=key,
                name=name,
            )
    return recipes


def _yaml_files(folder: Traversable, above: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yields the paths of the files in a folder, without .yaml, and the files."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _yaml_files(entry, f"{above}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield above + entry.name.removesuffix(".yaml"), entry


def _name_for(settings: Mapping[str, Any], method: str) -> str:
    """Returns "<dataset>/<model>/<method>", in characters that are allowed in names."""
    parts = [method]
    for key in ("model", "data"):
        section = settings.get(key)
        name = section.get("name") if isinstance(section, dict) else None
        parts.insert(0, short_name(str(name)))
    return "/".join(slug(part).lstrip("._-") for part in parts)

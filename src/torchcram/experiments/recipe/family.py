"""Families of recipes: the methods for a dataset and a model, in one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchcram import NM, Operator
from torchcram.experiments.io.dataclass_io import (
    BadValue,
    did_you_mean,
    require,
    require_one_of,
    shown,
)
from torchcram.experiments.io.files import slug
from torchcram.experiments.io.yaml_text import merged
from torchcram.experiments.recipe.checks import read_operator
from torchcram.experiments.recipe.schema import Recipe

_SETTINGS = tuple(section.name for section in dataclasses.fields(Recipe) if section.name != "name")


@dataclass(frozen=True)
class RecipeFamily:
    """Recipes that share a base.

    The settings of a recipe are the base, changed by its variant, by the method that its own method
    starts from, and by its own method, in this order.

    Attributes:
        base: Settings of all recipes. `extends` names a recipe that they are put on top of.
        methods: Settings of each method. `from` names another method that it starts from. With
            `targets`, a list of operators, it stands for a method per target, such as dpf-k90 for
            global:0.9, which trains for this target and is compressed to it.
        variants: Settings of each variant, which is called "<task>/<model>": the same methods for
            another dataset or model. `methods` lists those that it has; by default it has all.
    """

    base: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_keys("base", self.base, "extends")
        require(bool(self.methods), "methods", self.methods, "at least one method")
        for method, settings in self.methods.items():
            require("/" not in method, "methods", method, "names without a slash")
            _require_keys(f"methods.{method}", settings, "from", "targets")
        object.__setattr__(self, "methods", dict(_one_per_target(self.methods)))
        for method in self.methods:
            self._lineage(method)
        for variant, settings in self.variants.items():
            require(variant.count("/") == 1, "variants", variant, "names <task>/<model>")
            _require_keys(f"variants.{variant}", settings, "methods")
            if "methods" in settings:
                self._check_methods(f"variants.{variant}.methods", settings["methods"])

    @property
    def names(self) -> list[str]:
        """Names of the recipes: "<method>", and "<task>/<model>/<method>" for variants."""
        names = list(self.methods)
        for variant, settings in self.variants.items():
            names += [f"{variant}/{method}" for method in settings.get("methods", self.methods)]
        return names

    def settings(self, name: str) -> dict[str, Any]:
        """Returns the settings of a recipe, one of `names`."""
        variant, _, method = name.rpartition("/")
        settings = merged(self.base, self.variants.get(variant, {}))
        for ancestor in reversed(self._lineage(method)):
            settings = merged(settings, self.methods[ancestor])
        return {key: value for key, value in settings.items() if key not in ("from", "methods")}

    def _lineage(self, method: str) -> list[str]:
        """Returns a method, the one that it starts from, and so on.

        Raises:
            BadValue: If one of them starts from an unknown method, or from itself.
        """
        lineage = [method]
        while "from" in self.methods[lineage[-1]]:
            key, start = f"methods.{lineage[-1]}.from", self.methods[lineage[-1]]["from"]
            require(isinstance(start, str), key, start, "the name of a method")
            require_one_of(key, start, self.methods)
            allowed = "a method that does not start from this one"
            require(start not in lineage, key, start, allowed)
            lineage.append(start)
        return lineage

    def _check_methods(self, key: str, methods: object) -> None:
        if not (isinstance(methods, list) and methods):
            raise BadValue(key, f"is {shown(methods)}", "a list of methods")
        for name in methods:
            require(isinstance(name, str), key, name, "names of methods")
            require_one_of(key, name, self.methods)
        require(len(set(methods)) == len(methods), key, methods, "every method once")


def _one_per_target(
    methods: Mapping[str, dict[str, Any]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields methods by name; a method with `targets` once for every target."""
    for method, settings in methods.items():
        if "targets" not in settings:
            yield method, settings
            continue
        key, targets = f"methods.{method}.targets", settings["targets"]
        if not (isinstance(targets, list) and targets):
            raise BadValue(key, f"is {shown(targets)}", "a list of operators")
        require(isinstance(settings.get("method"), dict), key, targets, "null, without `method`")
        others = {name: value for name, value in settings.items() if name != "targets"}
        for index, text in enumerate(targets):
            operator = read_operator(f"{key}[{index}]", text)
            title = settings.get("title", method)
            target = {
                "title": f"{title}{trained_words(operator)}",
                "method": {"target": str(operator)},
                "compress": {"to": [str(operator)]},
            }
            yield f"{method}{target_suffix(operator)}", merged(others, target)


def trained_words(operator: Operator) -> str:
    """Returns what titles end with: ", trained for 90 %" for a sparsity of 0.9, or for "2:4"."""
    level = getattr(operator, "sparsity", None)
    words = str(operator)
    if isinstance(level, float):
        words = f"{100 * level:.4g} %"
    elif isinstance(operator, NM):
        words = f"{operator.keep}:{operator.group}"
    return f", trained for {words}"


def target_suffix(operator: Operator) -> str:
    """Returns what names end with: "-k90" for a sparsity of 0.9, otherwise the text of it."""
    level = getattr(operator, "sparsity", None)
    return f"-k{100 * level:.4g}" if isinstance(level, float) else f"-{slug(str(operator))}"


def _require_keys(section: str, settings: dict[str, Any], *also: str) -> None:
    """Raises `BadValue` unless the keys are those of a recipe, except `name`, or `also`."""
    allowed = (*also, *_SETTINGS)
    for key in settings:
        if key not in allowed:
            problem = f"is no known key{did_you_mean(key, allowed)}"
            raise BadValue(f"{section}.{key}", problem, ", ".join(allowed))

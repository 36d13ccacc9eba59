"""What `prepare` did with each layer of a model, attached to the model that it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from torchcram.runtime.cpu.batches import BatchSplitter
from torchcram.runtime.cpu.image_parts import ForImageSize, ImageParts
from torchcram.runtime.cpu.replace_layers import Choice

_REPORT = "_torchcram_report"


def report(model: nn.Module) -> tuple[Choice, ...]:
    """Returns what `prepare` did with each layer of `model`.

    Args:
        model: Model that `prepare` returned.

    Raises:
        ValueError: If the model does not come from `prepare`.
    """
    choices: tuple[Choice, ...] | None = getattr(model, _REPORT, None)
    if choices is None:
        raise ValueError(
            f"this {type(model).__name__} does not come from torchcram.runtime.prepare"
        )
    return choices


def with_report(model: nn.Module, choices: Iterable[Choice]) -> nn.Module:
    """Attaches to a model what `report` returns for it, and returns the model."""
    setattr(model, _REPORT, tuple(choices))
    return model


def with_inner_reports(model: nn.Module) -> nn.Module:
    """Returns a model in eval mode, with the reports of the models that it runs images by."""
    choices = [
        replace(choice, name=prefix + choice.name)
        for prefix, inner in _inner_models(model).items()
        for choice in report(inner)
    ]
    return with_report(model, choices).eval()


def stays_dense(choice: Choice, why: str) -> Choice:
    """Returns the choice for a layer that stays dense because the model as a whole does."""
    reason = f"{choice.reason}, but {why}"
    return replace(choice, sparse=False, reason=reason) if choice.sparse else choice


def renamed(choices: Iterable[Choice], model: nn.Module) -> list[Choice]:
    """Returns choices for the layers of an original model with their names in a prepared one.

    Args:
        choices: Choices with the names in the original model.
        model: Prepared model.
    """
    names = dict(_names_in(model))
    return [replace(choice, name=names.get(choice.name, choice.name)) for choice in choices]


def original_names(model: nn.Module) -> list[Choice]:
    """Returns the report of a prepared model with the names of the original one."""
    names = {name: original for original, name in _names_in(model)}
    return [replace(choice, name=names.get(choice.name, choice.name)) for choice in report(model)]


def _names_in(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the names of modules in the original model and in a prepared one."""
    for prefix, inner in _inner_models(model).items():
        for name, _ in inner.named_modules():
            yield name, prefix + name


def _inner_models(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the graphs that a model runs images by, with the beginnings of their names."""
    if isinstance(model, (BatchSplitter, ForImageSize)):
        inner = {"model.": model.model}
    elif isinstance(model, ImageParts):
        inner = {f"{index}.": part for index, part in enumerate(model)}
    else:
        return {"": model}
    return {
        outer + prefix: graph
        for outer, within in inner.items()
        for prefix, graph in _inner_models(within).items()
    }

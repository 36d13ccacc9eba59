"""Record of the weights that CrAM trained for compression, and their names without wrappers.

A model that was trained with a dense classifier loses accuracy when the classifier is compressed as
well; compressing it warns of that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torchcram.messages import list_names, warn_caller

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch drops them from names, too


class _Training:
    """Training of a model for compression by one optimizer, which warns once."""

    def __init__(self) -> None:
        self.warned = False


_trained: WeakIdKeyDictionary = WeakIdKeyDictionary()  # _Training by parameter


def mark_trained(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Records `weights` as those weights of `model` that are trained for compression."""
    training = _Training()
    for parameter in model.parameters():
        _trained.pop(parameter, None)
    for weight in weights.values():
        _trained[weight] = training


def copy_marks(model: nn.Module, twin: nn.Module) -> None:
    """Copies the record of the parameters of `model` to those of its copy `twin`."""
    for parameter, copied in zip(model.parameters(), twin.parameters(), strict=True):
        if parameter in _trained:
            _trained[copied] = _trained[parameter]


def trained_weights(model: nn.Module) -> list[str]:
    """Returns the names of the weights that CrAM trained for compression; empty if unknown."""
    return [name for name, parameter in model.named_parameters() if parameter in _trained]


def warn_of_untrained(weights: Mapping[str, Tensor]) -> None:
    """Warns once per training if some of `weights` were trained for compression, but not all."""
    trainings = [_trained[weight] for weight in weights.values() if weight in _trained]
    untrained = [name for name, weight in weights.items() if weight not in _trained]
    if not trainings or not untrained or trainings[0].warned:
        return
    trainings[0].warned = True
    warn_caller(
        f"{len(untrained)} of the {len(weights)} weights to compress were left dense in training "
        f"with CrAM: {list_names(untrained)}. optimizer.compress(target), or compress(model, "
        "target, weights=optimizer.weights), compresses what was trained for it"
    )


def warn_of_other_weights(trained: Iterable[str], here: Iterable[str]) -> None:
    """Warns if a training continues with other weights to compress than before."""
    before, now = set(trained), set(here)
    if before != now:
        parts = [
            f"{when}: {list_names(sorted(names))}"
            for when, names in (("only before", before - now), ("only now", now - before))
            if names
        ]
        warn_caller(f"the state is of a training that compressed other weights; {'; '.join(parts)}")


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module inside DDP and `torch.compile`."""
    wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    inner = model.module if wrapped else getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, torch.nn.Module) else model


def plain_name(model: nn.Module, name: str) -> str:
    """Returns the name of a parameter in the model without wrappers (DDP, compile)."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
        parts.remove("module")
    return ".".join(parts)

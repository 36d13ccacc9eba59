"""Prepared models are marked: their packed weights cannot be saved, compressed or trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torchcram.weights import PREPARED

if TYPE_CHECKING:
    from torch import nn


def mark_prepared_(prepared: nn.Module, model: nn.Module) -> None:
    """Marks a model whose layers were replaced, unless all of them stayed as they were.

    Its `save_pretrained` becomes an error: Transformers would write what the layers hold, and
    `from_pretrained` initialises whatever it does not find under the names that it knows, with no
    more than a warning.

    Args:
        prepared: Model whose layers may have been replaced.
        model: Model that it was prepared from.
    """
    if prepared.state_dict().keys() == model.state_dict().keys():
        return
    prepared.__dict__[PREPARED] = True
    if callable(getattr(prepared, "save_pretrained", None)):
        prepared.__dict__["save_pretrained"] = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
    raise RuntimeError(
        "a prepared model cannot be saved: its weights are packed for this machine. Save the model "
        "that it was prepared from, and prepare it again after loading"
    )

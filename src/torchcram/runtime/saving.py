"""Prepared models of Transformers are not saved: nothing could load them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch import nn


def refuse_saving_(prepared: nn.Module, model: nn.Module) -> None:
    """Makes `save_pretrained` of a prepared model an error if it would write other weights.

    Transformers writes what the layers hold, and `from_pretrained` initialises whatever it does not
    find under the names that it knows, with no more than a warning.

    Args:
        prepared: Model whose layers may have been replaced.
        model: Model that it was prepared from.
    """
    saves = callable(getattr(prepared, "save_pretrained", None))
    if saves and prepared.state_dict().keys() != model.state_dict().keys():
        prepared.__dict__["save_pretrained"] = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
    raise RuntimeError(
        "a prepared model cannot be saved: its weights are packed for this machine. Save the model "
        "that it was prepared from, and prepare it again after loading"
    )

"""Section of a recipe that says which model to train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchcram.experiments.io.dataclass_io import (
    UNLESS_DEFAULT,
    require,
    require_one_of,
    require_pattern,
    require_plain,
)
from torchcram.experiments.models import (
    FORMS,
    TIMM,
    TORCHVISION,
    is_model_name,
    own_model_names,
    takes_args,
    with_absolute_path,
)
from torchcram.experiments.models.text import ALLOWED, is_text_model


@dataclass(frozen=True)
class ModelConfig:
    """Section `model`: the model and its initial weights.

    Attributes:
        name: Name of the model; the path of a file in it is made absolute.
        pretrained: Whether to start from the weights that torchvision, timm or Transformers have.
        freeze: Regular expression; parameters in whose names it is found are not trained.
        args: Keyword arguments for a model of timm or of a factory.
    """

    name: str
    pretrained: bool = False
    freeze: str | None = field(default=None, metadata=UNLESS_DEFAULT)
    args: dict[str, Any] | None = field(default=None, hash=False, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        text = is_text_model(self.name)
        if not is_model_name(self.name) and not text:
            names = [*own_model_names(), f"{TORCHVISION}NAME", *FORMS, *ALLOWED]
            require_one_of("name", self.name, names)
        object.__setattr__(self, "name", with_absolute_path(self.name))
        known = not self.pretrained or text or self.name.startswith((TORCHVISION, TIMM))
        require(known, "pretrained", self.pretrained, f"false, as model.name is {self.name!r}")
        require_pattern("freeze", self.freeze)
        self._check_args()

    def _check_args(self) -> None:
        if self.args is None:
            return
        allowed = f"null, as model.name is {self.name!r}"
        require(takes_args(self.name), "args", self.args, allowed)
        for key in ("num_classes", "pretrained"):
            allowed = "other arguments: the data says num_classes, model.pretrained the other"
            require(key not in self.args, f"args.{key}", self.args.get(key), allowed)
        require_plain("args", self.args)

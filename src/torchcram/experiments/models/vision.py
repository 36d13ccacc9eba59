"""Models of torchvision, with its weights where they are on this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchcram.experiments.io.dataclass_io import did_you_mean

# with these, the model returns scores alone, and does not warn about how it starts
_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def torchvision_names() -> list[str]:
    """Returns the names of the classification models; none where torchvision is missing."""
    try:
        from torchvision import models
    except ImportError:
        return []
    return list(models.list_models(module=models))


def require_torchvision_name(name: str) -> None:
    """Raises ValueError unless torchvision classifies by a model of that name."""
    from torchvision import models

    names = models.list_models(module=models)
    if name not in names:
        raise ValueError(
            f"torchvision has no model {name!r}{did_you_mean(name, names)}; allowed: "
            + ", ".join(names)
        )


def torchvision_model(name: str, classes: int) -> nn.Module:
    """Returns a freshly initialised model."""
    from torchvision import models

    options = _OPTIONS.get(name, {})
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    return model


def pretrained_model(name: str) -> tuple[nn.Module, int]:
    """Returns a model with its default weights, and how many classes these are made for.

    The file of weights is to be in the cache of torch.hub: nothing is downloaded.

    Raises:
        FileNotFoundError: saying what file to put where.
        ValueError: if the file is not the one that torchvision made, a truncated one say.
    """
    from torchvision import models

    weights = models.get_model_weights(name).DEFAULT
    url = str(weights.url)
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    if not path.is_file():
        raise FileNotFoundError(
            f"the weights of torchvision/{name} are not on this machine: put {url} at {path}"
        )
    _check_hash(path)
    options = {key: value for key, value in _OPTIONS.get(name, {}).items() if key != "init_weights"}
    return models.get_model(name, weights=weights, **options), len(weights.meta["categories"])


def _check_hash(path: Path) -> None:
    """Raises ValueError unless the name, as in resnet50-11ad3fa6.pth, goes with the content."""
    expected = path.stem.rsplit("-", 1)[-1]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if not digest.hexdigest().startswith(expected):
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {digest.hexdigest()}, which is to begin with "
            f"{expected!r}; delete it and fetch it again"
        )

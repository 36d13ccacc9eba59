"""Image models by name: our own, those of torchvision and of timm, and factories."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchcram.experiments.io.dataclass_io import did_you_mean
from torchcram.experiments.models.factories import (
    FORMS,
    TIMM,
    build_from_factory,
    build_from_timm,
    is_factory,
    takes_args,
)
from torchcram.experiments.models.small import VGG, ConvNet, ResNet18, resnet20

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


TORCHVISION = "torchvision/"
DIGITS_WIDTHS = (12, 24, 48)


def _for_64(name: str, classes: int) -> nn.Module:
    """A ResNet of torchvision for 64x64 images: 32x32, not 16x16, where the blocks begin."""
    model = torchvision_model(name, classes)
    stem = nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.conv1, model.maxpool = stem, nn.Identity()
    return model


_MODELS: dict[str, Callable[[int], nn.Module]] = {
    "convnet-digits": lambda classes: ConvNet(DIGITS_WIDTHS, classes=classes),
    "resnet20": resnet20,
    "resnet18-cifar": ResNet18,
    "vgg16-cifar": lambda classes: VGG(classes=classes),
    "resnet18-64": lambda classes: _for_64("resnet18", classes),
    "resnet50-64": lambda classes: _for_64("resnet50", classes),
}


def own_model_names() -> list[str]:
    """Returns the names of the models that are put together here."""
    return list(_MODELS)


def model_names() -> list[str]:
    """Returns all names that `build_model` takes; those of torchvision where it is installed."""
    return own_model_names() + [TORCHVISION + name for name in torchvision_names()]


def is_model_name(name: str) -> bool:
    """Whether the name may be one, without asking torchvision or others."""
    torchvision = name.startswith(TORCHVISION) and name != TORCHVISION
    return name in _MODELS or torchvision or takes_args(name)


def build_model(
    name: str, *, classes: int, pretrained: bool = False, args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Returns a model, freshly initialised.

    Args:
        name: one of `model_names()`, or one of the forms that `models.factories` explains.
        classes: how many scores it gives.
        pretrained: start from the default weights of torchvision, which are to be in the cache of
            torch.hub; the last layer is a fresh one if `classes` is not what they were made for.
            Those of timm are found by timm.
        args: Keyword arguments for a model of timm or of a factory.

    Raises:
        ValueError: naming what was given and what is allowed.
        FileNotFoundError: if the pretrained weights are not on this machine.
    """
    if classes < 1:
        raise ValueError(f"classes={classes!r}: allowed is 1 or more")
    if takes_args(name):
        return _build_elsewhere(name, classes, pretrained, args or {})
    if args:
        raise ValueError(f"{name} takes no arguments; allowed: those of {', '.join(FORMS)}")
    if name in _MODELS:
        if pretrained:
            raise ValueError(f"{name} has no pretrained weights; allowed: {TORCHVISION}NAME")
        return _MODELS[name](classes)
    if not is_model_name(name):
        raise ValueError(
            f"there is no model {name!r}{did_you_mean(name, model_names())}; allowed: "
            f"{', '.join(_MODELS)}, {TORCHVISION}NAME, {', '.join(FORMS)}"
        )
    theirs = name.removeprefix(TORCHVISION)
    require_torchvision_name(theirs)
    if not pretrained:
        return torchvision_model(theirs, classes)
    model, known = pretrained_model(theirs)
    if known != classes:
        replace_head_(model, classes)
    return model


def _build_elsewhere(
    name: str, classes: int, pretrained: bool, args: Mapping[str, Any]
) -> nn.Module:
    if not is_factory(name):
        return build_from_timm(name, classes=classes, args=args, pretrained=pretrained)
    if pretrained:
        raise ValueError(
            f"{name} has no pretrained weights but what its factory loads; allowed: "
            f"{TORCHVISION}NAME, {TIMM}NAME"
        )
    return build_from_factory(name, classes=classes, args=args)


def replace_head_(model: nn.Module, classes: int) -> None:
    """Puts a fresh Linear layer with `classes` outputs in the place of the last one of `model`.

    Raises:
        ValueError: if `model` has no Linear layer.
    """
    name, old = _head(model)
    fresh = nn.Linear(
        old.in_features,
        classes,
        bias=old.bias is not None,
        device=old.weight.device,
        dtype=old.weight.dtype,
    )
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, fresh)


def _head(model: nn.Module) -> tuple[str, nn.Linear]:
    layers = [item for item in model.named_modules() if isinstance(item[1], nn.Linear)]
    if not layers or not layers[-1][0]:
        raise ValueError(f"{type(model).__name__} has no Linear layer in it, so no last one either")
    name, layer = layers[-1]
    assert isinstance(layer, nn.Linear)  # noqa: S101
    return name, layer

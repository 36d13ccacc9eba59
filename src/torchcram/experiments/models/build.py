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
from torchcram.experiments.models.small import (
    VGG,
    ConvNet,
    ResNet18,
    VisionTransformer,
    resnet20,
)

# with these options the model returns scores alone, and does not warn about its initialisation
_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def torchvision_names() -> list[str]:
    """Returns the names of torchvision's classification models; none if it is not installed."""
    try:
        from torchvision import models
    except ImportError:
        return []
    return list(models.list_models(module=models))


def require_torchvision_name(name: str) -> None:
    """Raises ValueError unless torchvision has a classification model of that name."""
    from torchvision import models

    names = models.list_models(module=models)
    if name not in names:
        raise ValueError(
            f"torchvision has no model {name!r}{did_you_mean(name, names)}; allowed: "
            + ", ".join(names)
        )


def torchvision_model(name: str, classes: int) -> nn.Module:
    """Returns a model of torchvision, freshly initialised."""
    from torchvision import models

    options = _OPTIONS.get(name, {})
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    return model


def pretrained_model(name: str) -> tuple[nn.Module, int]:
    """Returns a model of torchvision with its default weights, and their number of classes.

    The file of weights must be in the cache of torch.hub: nothing is downloaded.

    Raises:
        FileNotFoundError: If the file is missing; the message says what file to put where.
        ValueError: If the file is not the one of torchvision; it may be truncated.
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
    """Raises ValueError unless the content has the hash of the name, as resnet50-11ad3fa6.pth."""
    expected = path.stem.rsplit("-", 1)[-1]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if not digest.hexdigest().startswith(expected):
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {digest.hexdigest()}, which must begin with "
            f"{expected!r}; delete it and fetch it again"
        )


TORCHVISION = "torchvision/"
DIGITS_WIDTHS = (12, 24, 48)


def _for_64(name: str, classes: int) -> nn.Module:
    """Returns a ResNet of torchvision for 64x64 images, whose blocks begin at 32x32, not 16x16."""
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
    "vit-cifar": lambda classes: VisionTransformer(classes=classes),
    "resnet18-64": lambda classes: _for_64("resnet18", classes),
    "resnet50-64": lambda classes: _for_64("resnet50", classes),
}


def own_model_names() -> list[str]:
    """Returns the names of our own models."""
    return list(_MODELS)


def model_names() -> list[str]:
    """Returns all names that `build_model` takes, with those of torchvision if it is installed."""
    return own_model_names() + [TORCHVISION + name for name in torchvision_names()]


def is_model_name(name: str) -> bool:
    """Returns whether a name has the form of a model name; torchvision is not asked."""
    torchvision = name.startswith(TORCHVISION) and name != TORCHVISION
    return name in _MODELS or torchvision or takes_args(name)


def build_model(
    name: str, *, classes: int, pretrained: bool = False, args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Returns a model, freshly initialised.

    Args:
        name: Name of the model, one of `model_names()` or of the forms in `models.factories`.
        classes: Number of scores that the model gives.
        pretrained: Whether to start from the default weights of torchvision, which must be in the
            cache of torch.hub, or from those that timm has. The last layer is initialised if the
            weights are for another number of classes.
        args: Keyword arguments for a model of timm or of a factory.

    Raises:
        ValueError: If there is no such model, or it does not take the arguments.
        FileNotFoundError: If the pretrained weights are not on this machine.
    """
    if classes < 1:
        raise ValueError(f"classes must be at least 1, got {classes!r}")
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
    """Replaces the last Linear layer of a model by a fresh one with `classes` outputs.

    Raises:
        ValueError: If the model has no Linear layer.
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

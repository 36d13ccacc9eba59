"""What a recipe says, as objects: the model, the optimizer, the batches."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch.optim import SGD, AdamW

from torchcram import CrAM, compressible_weights
from torchcram.experiments.data.images import (
    AnyData,
    DataSet,
    PictureSet,
    ResidentBatches,
    StreamBatches,
    make_batches,
)
from torchcram.experiments.data.text.batches import TextBatches
from torchcram.experiments.data.text.datasets import TextSet
from torchcram.experiments.models import build_model
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.recipe.torch_names import make_optimizer
from torchcram.experiments.seeds import global_seed
from torchcram.experiments.training.parallel import cores
from torchcram.optim.rules import RULES

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram import Weights
    from torchcram.experiments.recipe import OptimizerConfig, Recipe

TEST_PIXELS = 1 << 21  # of a batch, about: small enough for any GPU, large enough to keep it busy
TEST_BATCH = (64, 2048)  # images, at least and at most


def build_initial_model(
    recipe: Recipe, *, classes: int, seed: int, pretrained: bool | None = None
) -> nn.Module:
    """Returns the model of a recipe with the weights of a seed; no global generator moves.

    Args:
        recipe: whose section `model` counts.
        classes: how many scores it gives.
        seed: of what is random in the weights.
        pretrained: instead of what the recipe says, where the weights are to be replaced anyway.
    """
    if pretrained is None:
        pretrained = recipe.model.pretrained
    with global_seed(seed):
        if recipe.text is None:
            model = build_model(
                recipe.model.name, classes=classes, pretrained=pretrained, args=recipe.model.args
            )
        else:
            from torchcram.experiments.models.text import build_text_model

            model = build_text_model(recipe.model.name, recipe.text.task, pretrained=pretrained)
    if recipe.model.freeze is not None:
        _freeze_(model, recipe.model.freeze)
    return model


def _freeze_(model: nn.Module, pattern: str) -> None:
    found = [value for name, value in model.named_parameters() if re.search(pattern, name)]
    if not found or len(found) == len(list(model.parameters())):
        which = "all parameters" if found else "no parameter"
        raise ValueError(f"model.freeze={pattern!r} matches {which} of {type(model).__name__}")
    for parameter in found:
        parameter.requires_grad_(False)


def build_batches(
    recipe: Recipe,
    data: AnyData,
    *,
    train: bool,
    device: torch.device,
    seed: int,
    ranks: Ranks = SINGLE,
) -> ResidentBatches | StreamBatches | TextBatches:
    """Returns the training batches of a recipe, or test batches of a size that suits the images.

    Args:
        recipe: whose sections `train` and `data` count.
        data: that they are from.
        train: which of them.
        device: where they go.
        seed: of order and augmentation.
        ranks: Processes that share the work; rank 0 writes the files.
    """
    batch_size = recipe.train.batch_size
    if isinstance(data, TextSet):
        return TextBatches(
            data.train if train else data.test,
            batch_size=batch_size,
            device=device,
            seed=seed,
            train=train,
            shard=ranks.shard,
        )
    if not train:
        _, height, width = image_shape(recipe, data)
        batch_size = max(TEST_BATCH[0], min(TEST_PIXELS // (height * width), TEST_BATCH[1]))
    return make_batches(
        data,
        train=train,
        batch_size=batch_size,
        augment=recipe.data.augment,
        device=device,
        seed=seed,
        image_size=recipe.data.image_size,
        workers=None if ranks.local_world_size == 1 else max(1, cores() // ranks.local_world_size),
        shard=ranks.shard,
    )


def image_shape(recipe: Recipe, data: DataSet | PictureSet) -> tuple[int, int, int]:
    """Returns the channels, height and width of the images that a model sees."""
    if isinstance(data, DataSet):
        height, width, channels = data.test.images.shape[1:]
        return channels, height, width
    size = recipe.data.image_size or 1
    return 3, size, size


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Moves a model to a device, where convolutions on a GPU find channels last."""
    if device.type == "cuda":
        return model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
    return model.to(device)


def build_optimizer(recipe: Recipe, model: nn.Module, *, seed: int) -> Optimizer:
    """Returns the optimizer of a recipe: `CrAM` around the base optimizer, or that one bare.

    Args:
        recipe: whose sections `optimizer` and `cram` count.
        model: where it is to be trained; on a GPU the base optimizer is a fused one.
        seed: of the draws of operators.
    """
    base = _base(recipe.optimizer, model)
    cram = recipe.cram
    if cram is None:
        return base
    rule = RULES[cram.rule]
    return CrAM(
        model,
        base,
        cram.operators,
        rho=cram.rho,
        rule=rule,
        sparse_gradients=cram.sparse_gradients,
        normalize=cram.normalize,
        mask_interval=cram.mask_interval,
        base_step_probability=cram.base_step_probability,
        weights=trained_weights(recipe, model) if rule.compresses else None,
        seed=seed,
    )


def trained_weights(recipe: Recipe, model: nn.Module) -> Weights:
    """Returns the weights that training compresses; all compressible ones where it does not."""
    cram = recipe.cram
    if cram is None:
        return compressible_weights(model)
    return compressible_weights(model, only=cram.only, skip=cram.skip, dense_ends=cram.dense_ends)


def target_weights(recipe: Recipe, model: nn.Module) -> Weights:
    """Returns the weights that are compressed after training."""
    compress = recipe.compress
    return compressible_weights(model, only=compress.only, dense_ends=compress.dense_ends)


def _base(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameters to train")
    fused = True if parameters[0].is_cuda else None  # None: torch chooses
    if config.name == "sgd":
        return SGD(
            parameters,
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            fused=fused,
        )
    if config.name == "adamw":
        return AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=fused)
    return make_optimizer(
        config.name,
        parameters,
        lr=config.lr,
        weight_decay=config.weight_decay,
        args=config.args or {},
    )

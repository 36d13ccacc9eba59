"""Builds what a recipe describes: model, optimizer, batches, and the weights to compress."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import SGD, AdamW

from torchcram import CrAM, compressible_weights
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.recipe.adapters import merged_model
from torchcram.experiments.recipe.torch_names import make_optimizer
from torchcram.experiments.seeds import global_seed
from torchcram.optim.rules import RULES
from torchcram.sharding import is_sharded

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram import Weights
    from torchcram.experiments.recipe.schema import OptimizerConfig, Recipe
    from torchcram.experiments.tasks import Batches


def build_initial_model(
    recipe: Recipe, *, classes: int, seed: int, pretrained: bool | None = None
) -> nn.Module:
    """Returns the model of a recipe; no global random generator is changed.

    Args:
        recipe: Recipe that names the model.
        classes: Number of outputs.
        seed: Seed of the initial weights.
        pretrained: Whether to load pretrained weights, instead of what the recipe says.
    """
    if pretrained is None:
        pretrained = recipe.model.pretrained
    with global_seed(seed):
        model = recipe.build_task().build_model(classes=classes, pretrained=pretrained)
    if recipe.model.freeze is not None:
        _freeze_(model, recipe.model.freeze)
    return model


def _freeze_(model: nn.Module, pattern: str) -> None:
    frozen = [value for name, value in model.named_parameters() if re.search(pattern, name)]
    if not frozen or len(frozen) == len(list(model.parameters())):
        which = "all parameters" if frozen else "no parameter"
        raise ValueError(f"model.freeze={pattern!r} matches {which} of {type(model).__name__}")
    for parameter in frozen:
        parameter.requires_grad_(False)


def build_batches(
    recipe: Recipe,
    data: Any,  # noqa: ANN401
    *,
    train: bool,
    device: torch.device,
    seed: int,
    ranks: Ranks = SINGLE,
) -> Batches:
    """Returns the training batches of a recipe, or the test batches; see `Task.batches`."""
    return recipe.build_task().batches(
        data,
        train=train,
        batch_size=recipe.train.batch_size,
        device=device,
        seed=seed,
        ranks=ranks,
    )


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Moves a model to a device, with the weights of convolutions in channels_last on a GPU."""
    if device.type == "cuda":
        return model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
    return model.to(device)


def build_optimizer(
    recipe: Recipe, model: nn.Module, *, seed: int, steps_per_epoch: int | None = None
) -> Optimizer:
    """Returns the optimizer of a recipe: `CrAM` or a method around the base optimizer, or this.

    Args:
        recipe: Recipe with the sections `optimizer` and `cram`.
        model: Model on the device that it is trained on; on a GPU the base optimizer is fused.
        seed: Seed of the choice of operators.
        steps_per_epoch: Number of steps in an epoch, which times of a method are converted by.

    Raises:
        BadValue: If the arguments of a method do not fit the length of the training.
    """
    base = _base(recipe.optimizer, model)
    cram, method = recipe.cram, recipe.method
    if method is not None:
        if steps_per_epoch is None:
            raise ValueError(f"{method.name} needs the number of steps in an epoch")
        return method.build(
            model,
            base,
            weights=cram_weights(recipe, model),
            epochs=recipe.train.epochs,
            steps_per_epoch=steps_per_epoch,
            seed=seed,
        )
    if cram is None:
        return base
    rule = RULES[cram.rule]
    return _cram_class(recipe)(
        model,
        base,
        cram.operators,
        rho=cram.rho,
        rule=rule,
        sparse_gradients=cram.sparse_gradients,
        normalize=cram.normalize,
        mask_interval=cram.mask_interval,
        base_step_probability=cram.base_step_probability,
        weights=_named_in(model, cram_weights(recipe, model)) if rule.compresses else None,
        seed=seed,
    )


def _cram_class(recipe: Recipe) -> type[CrAM]:
    """Returns the wrapper that knows what is trained: weights, or adapters of them."""
    if recipe.lora is None:
        return CrAM
    from torchcram.integrations.peft import LoraCrAM

    return LoraCrAM


def _named_in(model: nn.Module, weights: Weights) -> Weights:
    """Returns weights by their names in `model`, which adapters may have changed."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(weight)]: weight for weight in weights.values()}


def cram_weights(recipe: Recipe, model: nn.Module) -> Weights:
    """Returns the weights that are compressed in training; in plain training, all that can be."""
    section = recipe.cram or recipe.method
    only = recipe.build_task().compressed_by_default
    options: dict[str, Any] = {}
    if section is not None:
        only = section.only or only
        options = {"skip": section.skip, "dense_ends": section.dense_ends}
    with merged_model(model):  # weights have their own names there
        return compressible_weights(model, only=only, **options)


def target_weights(recipe: Recipe, model: nn.Module) -> Weights:
    """Returns the weights that are compressed after training.

    A model that a method has trained sparse is compressed where the method pruned it, unless the
    section compress says otherwise.
    """
    compress = recipe.compress
    if recipe.method is not None and compress.only is None and not compress.dense_ends:
        return cram_weights(recipe, model)
    only = compress.only or recipe.build_task().compressed_by_default
    return compressible_weights(model, only=only, dense_ends=compress.dense_ends)


def _base(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameters to train")
    fused = True if parameters[0].is_cuda else None  # None: torch chooses
    if config.name == "sgd":
        if is_sharded(parameters[0]):
            fused = None  # torch has no fused step of SGD for shards
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

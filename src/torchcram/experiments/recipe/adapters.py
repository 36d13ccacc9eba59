"""LoRA adapters of a training by recipe: added to the model, trained, and merged for every test.

W    frozen weight of a layer       B A  its adapter, of scale alpha / rank
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.conv import _ConvNd

from torchcram import compressible_weights, hold_masks
from torchcram.experiments.seeds import global_seed
from torchcram.integrations.adapters import has_adapters
from torchcram.messages import list_names
from torchcram.weights import is_conv1d

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchcram import Masks
    from torchcram.experiments.recipe.schema import LoraConfig, Recipe


ADAPTER = "recipe"  # name by which adapters of a recipe differ from those that a model brings along


def has_recipe_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters that `add_adapters_` has added."""
    return has_adapters(model) and any(
        ADAPTER in getattr(module, "lora_A", ()) for module in model.modules()
    )


def require_peft() -> None:
    """Raises ValueError that says what to install, if peft is missing."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ValueError(f'lora needs peft: pip install "torchcram[lora]" ({error})') from error


def add_adapters_(recipe: Recipe, model: nn.Module, *, seed: int) -> None:
    """Adds the adapters of a recipe to a model, and freezes all that is not trained.

    Without a section `lora`, nothing is changed.

    Args:
        recipe: Recipe with the section `lora`.
        model: Model without adapters.
        seed: Seed of the initial weights of A; B is zero, so that outputs do not change.

    Raises:
        ValueError: If peft is missing, or a pattern does not match what it should.
    """
    lora = recipe.lora
    if lora is None:
        return
    require_peft()
    if has_adapters(model):
        raise ValueError(f"{recipe.name}: lora adds adapters, and the model has some already")
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    layers = _layers(recipe, lora, model)
    pattern = "|".join(re.escape(layer) for layer in layers)  # peft matches whole names
    config = PeftConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=pattern
    )
    with global_seed(seed):
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    del model.peft_config
    if lora.also_train is not None:
        _train_also_(lora.also_train, model, layers)


def _layers(recipe: Recipe, lora: LoraConfig, model: nn.Module) -> list[str]:
    """Returns the names of the layers that get an adapter."""
    only = lora.targets or recipe.build_task().compressed_by_default
    try:
        weights = compressible_weights(model, only=only)
    except ValueError as error:
        raise ValueError(f"{recipe.name}: lora.targets: {error}") from None
    possible = {f"{name}.weight" for name in _adaptable(model)}
    if lora.targets is not None and (others := weights.keys() - possible):
        raise ValueError(
            f"{recipe.name}: lora.targets={lora.targets!r} matches {list_names(sorted(others))}; "
            "allowed: weights of Linear, Conv1D and convolution layers without groups"
        )
    if not (chosen := [name for name in weights if name in possible]):
        raise ValueError(
            f"{recipe.name}: {type(model).__name__} has no layer that takes an adapter"
        )
    return [name.removesuffix(".weight") for name in chosen]


def _adaptable(model: nn.Module) -> Iterator[str]:
    """Yields the names of layers whose output can be changed by an adapter."""
    hidden = {  # attention reads the weights of its layers and does not call them
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
    }
    for name, module in model.named_modules():
        whole = not isinstance(module, _ConvNd) or module.groups == 1
        kind = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
        if (kind or is_conv1d(module)) and whole and id(module) not in hidden:
            yield name


def _train_also_(pattern: str, model: nn.Module, layers: list[str]) -> None:
    """Makes further parameters trained; their names are those without adapters."""
    adapted = {f"{layer}.weight" for layer in layers}
    named = {
        plain: parameter
        for name, parameter in model.named_parameters()
        if re.search(pattern, plain := name.replace(".base_layer.", ".")) and ".lora_" not in name
    }
    if not named:
        raise ValueError(f"lora.also_train={pattern!r} matches no parameter")
    if both := sorted(adapted & named.keys()):
        raise ValueError(
            f"lora.also_train={pattern!r} matches {list_names(both)}, which have an adapter; "
            "allowed: other parameters"
        )
    for parameter in named.values():
        parameter.requires_grad_(True)


def merged_model(model: nn.Module) -> AbstractContextManager[object]:
    """Merges the adapters of a model for a `with` block, in which its layers are plain ones.

    In the block the model has the names and weights that are saved and compressed after training;
    after it, W is back bit for bit. A model without adapters of a recipe is not changed.
    """
    if not has_recipe_adapters(model):
        return nullcontext()
    from torchcram.integrations.peft.merge import merged_model

    return merged_model(model)


def hold_adapted_masks(
    model: nn.Module, optimizer: Optimizer, masks: Masks
) -> AbstractContextManager[object]:
    """Holds masks by the names without adapters, for a `with` block.

    Frozen weights keep their zeros when adapters are merged; weights that are trained themselves
    are held by the optimizer.

    Args:
        model: Model with adapters.
        optimizer: Optimizer that trains it.
        masks: Masks on the device of the model.
    """
    from torchcram.integrations.peft import hold_lora_masks

    named = {name.replace(".base_layer.", "."): value for name, value in model.named_parameters()}
    trained = {name: named[name] for name in masks if named[name].requires_grad}
    frozen = {name: mask for name, mask in masks.items() if name not in trained}
    held = ExitStack()
    if frozen:
        held.enter_context(hold_lora_masks(model, frozen))
    if trained:
        held.enter_context(hold_masks(optimizer, trained, {name: masks[name] for name in trained}))
    return held

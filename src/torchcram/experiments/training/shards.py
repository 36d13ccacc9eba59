"""Sharded training (FSDP2): parameters are cut over the ranks, and gathered for tests and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from torchcram.sharding import fsdp_modules, is_sharded, reshard

if TYPE_CHECKING:
    from torchcram.experiments.ranks import Ranks
    from torchcram.experiments.recipe import Recipe

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def check_sharded(recipe: Recipe, ranks: Ranks, *, holds_masks: bool) -> None:
    """Raises ValueError for what sharded training does not do, before it begins.

    Args:
        recipe: Recipe to train with.
        ranks: Processes that train together.
        holds_masks: Whether the training holds the masks of its start.
    """
    if ranks.world_size == 1:
        raise ValueError("sharded training needs several processes: start them by torchrun")
    batch_size, interval = recipe.train.batch_size, recipe.cram and recipe.cram.mask_interval
    refused = {
        "the section method": recipe.method is not None,
        "the section lora": recipe.lora is not None,
        "train.ema": recipe.train.ema is not None,
        "train.early_stopping": recipe.train.early_stopping is not None,
        f"cram.mask_interval={interval}": (interval or 1) > 1,
        "held masks": holds_masks,
        f"train.batch_size={batch_size}, which {ranks.world_size} processes do not divide": (
            batch_size % ranks.world_size != 0
        ),
    }
    for what, given in refused.items():
        if given:
            raise ValueError(f"{recipe.name}: sharded training does not work with {what}")


@torch.no_grad()
def shard_(model: nn.Module, device: torch.device, ranks: Ranks) -> None:
    """Shards the parameters of a model over the ranks, those of each numbered block together.

    Args:
        model: Model on `device`; all ranks get the weights of rank 0.
        device: Device of the model.
        ranks: Processes that train together.
    """
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor, src=0)
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    for block in numbered_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def numbered_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules in the outermost lists of a model, such as the layers of a decoder."""
    for child in model.children():
        if isinstance(model, nn.ModuleList) and not isinstance(child, _CONTAINERS):
            yield child
        else:
            yield from numbered_blocks(child)


@torch.no_grad()
def gather_into_(whole: nn.Module, model: nn.Module) -> None:
    """Copies the weights and buffers of a sharded model into a whole one; all ranks call it."""
    reshard(fsdp_modules(model))
    targets = whole.state_dict()
    for name, value in model.state_dict().items():
        targets[name].copy_(_full(value))


def gathered(state: Any, *, keep: bool) -> Any:  # noqa: ANN401
    """Returns a state with whole tensors on the CPU in place of shards; all ranks call it.

    Args:
        state: Tensor, or mappings, lists and tuples of tensors and other values.
        keep: Whether this rank needs the tensors; they are empty where it does not.
    """
    if isinstance(state, Tensor):
        if not is_sharded(state):
            return state
        whole = _full(state)
        return whole.cpu() if keep else whole.new_empty(0)
    if isinstance(state, Mapping):
        return {key: gathered(value, keep=keep) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(gathered(value, keep=keep) for value in state)
    return state


def shard_as(value: Tensor, like: Tensor) -> Tensor:
    """Returns a whole tensor as another tensor is sharded, or as it is if that one is whole."""
    if not is_sharded(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded = cast(Any, like)
    moved = value.to(like.device)  # every rank has the whole tensor and takes its rows
    return distribute_tensor(moved, sharded.device_mesh, sharded.placements, src_data_rank=None)


def _full(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole

"""Checks that all ranks of a training were given the same model, operators and options."""

from __future__ import annotations

import hashlib
import json
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch import Tensor, nn


Settings = dict[str, list[str]]
"""Settings of an optimizer: lines of text by topic."""

_Value = TypeVar("_Value")
Wrapped = Any  # a `CrAM`, whose module imports this one


def require_alike(optimizer: Wrapped) -> None:
    """Compares the settings on all ranks of a DDP or FSDP model; does nothing for other models.

    Raises:
        ValueError: If settings differ, on every rank, naming the differences.
    """
    groups = [peers.group for peers in optimizer._shard_context.everyone] or _ddp_groups(
        optimizer.model
    )
    if groups:
        _compare(optimizer, groups)


def require_alike_everywhere(optimizer: Wrapped) -> None:
    """Compares the settings on all ranks, for loops that wrap the model later.

    Raises:
        ValueError: If settings differ, on every rank, naming the differences.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _compare(optimizer, [dist.group.WORLD])


def _compare(optimizer: Wrapped, groups: list[Any]) -> None:
    settings = _settings(optimizer)
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    if len(set(_all_gather(digest, groups).values())) > 1:
        differences = _differences(_all_gather(settings, groups))
        raise ValueError(f"processes were given different {differences}")


def _ddp_groups(model: nn.Module) -> list[Any]:
    model = getattr(model, "_orig_mod", model)  # compiled
    if not isinstance(model, DistributedDataParallel) or not dist.is_initialized():
        return []
    group = model.process_group
    return [group] if dist.get_world_size(group) > 1 else []


def _all_gather(value: _Value, groups: list[Any]) -> dict[int, _Value]:
    """Returns the values of all ranks, gathered over one dimension of the mesh after another."""
    by_rank = {dist.get_rank(): value}
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, by_rank, group=group)
        by_rank = {rank: value for values in gathered for rank, value in values.items()}
    return dict(sorted(by_rank.items()))


def _settings(optimizer: Wrapped) -> Settings:
    names = {id(parameter): name for name, parameter in optimizer.model.named_parameters()}
    sampler = optimizer._sampler
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        groups += [
            f"{names.get(id(p))} {_kind(p)} in group {number}, rho {optimizer._rho_of(group)}"
            for p in group["params"]
        ]
    options = (
        "sparse_gradients",
        "normalize",
        "base_step_probability",
        "max_ascent_norm",
        "replay_randomness",
        "check_finite",
        "allow_plain_steps",
    )
    return {
        "operators": [str(operator) for operator in optimizer.operators],
        "rules": [repr(optimizer.rule)],
        "rho": [repr(optimizer.rho)],
        "options": [
            *(f"{name}={getattr(optimizer, name)!r}" for name in options),
            f"mask_interval={sampler.mask_interval}",
        ],
        "seeds": [repr(sampler.seed)],
        "base optimizers": [type(optimizer.base).__name__],
        "weights": [f"{name} {_kind(weight)}" for name, weight in optimizer.weights.items()],
        "parameters": groups,
    }


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _differences(by_rank: dict[int, Settings]) -> str:
    """Returns the first line of every topic in which ranks differ, and the ranks that have it."""
    differences = []
    for topic in next(iter(by_rank.values())):
        listed = (settings[topic] for settings in by_rank.values())
        for lines in zip_longest(*listed, fillvalue="none"):
            if len(set(lines)) > 1:
                pairs = list(zip(by_rank, lines, strict=True))
                ranks = {line: [rank for rank, own in pairs if own == line] for line in lines}
                differences.append(
                    f"{topic}: " + ", ".join(f"{line} on {_ranks(r)}" for line, r in ranks.items())
                )
                break
    return "; ".join(differences)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

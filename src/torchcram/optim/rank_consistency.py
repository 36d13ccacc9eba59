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

    from torchcram.optim.cram import CrAM

Given = dict[str, list[str]]
"""What an optimizer was given: by topic, a line each."""

_Value = TypeVar("_Value")


def require_alike(optimizer: CrAM) -> None:
    """Compares what was given on all processes of a DDP or FSDP model; does nothing for others.

    Raises:
        ValueError: on every process, with what differs and where.
    """
    groups = [peers.group for peers in optimizer._shard_context.everyone] or _ddp_groups(
        optimizer.model
    )
    if groups:
        _compare(optimizer, groups)


def require_alike_everywhere(optimizer: CrAM) -> None:
    """Compares what was given on all processes there are: for loops that wrap the model later.

    Raises:
        ValueError: on every process, with what differs and where.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _compare(optimizer, [dist.group.WORLD])


def _compare(optimizer: CrAM, groups: list[Any]) -> None:
    given = _given(optimizer)
    digest = hashlib.sha256(json.dumps(given).encode()).hexdigest()
    if len(set(_on_all(digest, groups).values())) > 1:
        raise ValueError(f"processes were given different {_differences(_on_all(given, groups))}")


def _ddp_groups(model: nn.Module) -> list[Any]:
    model = getattr(model, "_orig_mod", model)  # compiled
    if not isinstance(model, DistributedDataParallel) or not dist.is_initialized():
        return []
    group = model.process_group
    return [group] if dist.get_world_size(group) > 1 else []


def _on_all(value: _Value, groups: list[Any]) -> dict[int, _Value]:
    """Returns the values of all processes by rank; groups are the dimensions of meshes, in turn."""
    found = {dist.get_rank(): value}
    for group in groups:
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, found, group=group)
        found = {rank: one for some in told for rank, one in some.items()}
    return dict(sorted(found.items()))


def _given(optimizer: CrAM) -> Given:
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


def _differences(given: dict[int, Given]) -> str:
    """Says of every topic where processes differ: the first line that does."""
    told = []
    for topic in next(iter(given.values())):
        for lines in zip_longest(*(one[topic] for one in given.values()), fillvalue="none"):
            if len(set(lines)) > 1:
                ranks = {
                    line: [rank for rank, other in zip(given, lines, strict=True) if other == line]
                    for line in dict.fromkeys(lines)
                }
                told.append(
                    f"{topic}: " + ", ".join(f"{line} on {_ranks(r)}" for line, r in ranks.items())
                )
                break
    return "; ".join(told)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

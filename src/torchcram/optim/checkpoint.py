"""Checkpoints by `torch.distributed.checkpoint` that any number of ranks can save and load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from torchcram.layers import local_weights
from torchcram.optim.sampler import pack_bits, unpack_bits
from torchcram.sharding import is_sharded, local
from torchcram.trained import plain_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.optim.cram import CrAM


class TrainingState(Stateful):
    """State of a training, for `torch.distributed.checkpoint` to save and load.

        dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)
        dcp.load({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)

    Weights, moments and masks are saved as they are sharded. Training may continue with other
    shards, without shards, or under DDP, and draws the operators that it would have drawn. Model,
    optimizer, operators, rule and `mask_interval` must be the same.

    Args:
        model: Model that is trained, wrapped or not.
        optimizer: Optimizer that trains it.
    """

    def __init__(self, model: nn.Module, optimizer: CrAM) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; a checkpoint may also be loaded into its tensors."""
        self.optimizer._shard_context.reshard()
        state = self.optimizer._extra_state()["cram"]
        kept = {(operator, at): masks for operator, at, masks in state["masks"]}
        slots = self._slots()
        begun = self._begun()
        draws = {
            "generator": state["generator"].numpy().tobytes().hex(),
            "begun": begun,
            "uses": state["uses"],
            "slots": [slot if slot in kept else None for slot in slots],
            "weights": state["weights"],
        }
        optimizer: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimizer.base)
        if not begun:
            self.optimizer.base.state.clear()  # torch has taken a step to create it
        self._begin_states(optimizer["state"])
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": optimizer,
            "draws": json.dumps(draws),
            "masks": {
                str(byte): self._bytes([kept.get(slot) for slot in slots[byte : byte + 8]])
                for byte in range(0, len(slots), 8)
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state."""
        set_model_state_dict(self.model, state_dict["model"])
        set_optimizer_state_dict(
            self.model, self.optimizer.base, optim_state_dict=state_dict["optimizer"]
        )
        draws = json.loads(state_dict["draws"])
        for name, parameter in self._trained():
            if name not in draws["begun"]:
                self.optimizer.base.state.pop(parameter, None)
        generator = torch.frombuffer(bytearray.fromhex(draws["generator"]), dtype=torch.uint8)
        masks = []
        for number, slot in enumerate(draws["slots"]):
            if slot is not None:
                held = state_dict["masks"][str(number // 8 * 8)]
                masks.append((*slot, self._bits(held, number % 8)))
        state = {"generator": generator, "uses": draws["uses"], "masks": masks}
        if "weights" in draws:
            state["weights"] = draws["weights"]
        self.optimizer._read_extra_state({"cram": state})()

    def _slots(self) -> list[tuple[str, int]]:
        """Returns every operator in every pass of the rule: each may have masks to keep."""
        optimizer = self.optimizer
        if optimizer._sampler.mask_interval == 1:
            return []
        passes = range(len(optimizer.rule.passes), 0, -1)
        return [(str(operator), at) for operator in optimizer.operators for at in passes]

    def _bytes(self, packed: list[Mapping[str, Tensor] | None]) -> dict[str, Tensor]:
        """Puts up to eight masks of each weight into one byte per entry, sharded as the weight."""
        local_shards = local_weights(self.optimizer.weights)
        by_name = {}
        for name, weight in self.optimizer.weights.items():
            shard = local_shards[name]
            bits = torch.zeros_like(shard, dtype=torch.uint8)
            for bit, masks in enumerate(packed):
                if masks is not None and name in masks:
                    bits |= unpack_bits(masks[name], shard).to(torch.uint8) << bit
            by_name[plain_name(self.model, name)] = _sharded_as(weight, bits)
        return by_name

    def _bits(self, held: Mapping[str, Tensor], bit: int) -> dict[str, Tensor]:
        """Returns the masks in one bit of the bytes that `_bytes` returns, packed."""
        names = {name: plain_name(self.model, name) for name in self.optimizer.weights}
        return {name: pack_bits((local(held[plain]) >> bit) & 1) for name, plain in names.items()}

    def _begin_states(self, states: dict[str, Any]) -> None:
        """Adds states of zeros for parameters that have had no gradient yet; loading drops them.

        They are needed because torch loads a checkpoint into states of all parameters.
        """
        if not states:
            return
        parameters = dict(self._trained())
        # not a scalar, whose moments have the shape of the step count
        name = max(states, key=lambda name: parameters[name].dim())
        known, shape = states[name], parameters[name].shape
        for other in parameters.keys() - states.keys():
            states[other] = {
                key: torch.zeros_like(parameters[other] if value.shape == shape else value)
                for key, value in known.items()
                if torch.is_tensor(value)
            }

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters that the optimizer trains, by their names without wrappers."""
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in trained and parameter.requires_grad:
                yield plain_name(self.model, name), parameter

    def _begun(self) -> list[str]:
        """Returns the names of the parameters that the base optimizer has a state for."""
        states = self.optimizer.base.state
        return [name for name, parameter in self._trained() if states.get(parameter)]


def _sharded_as(weight: Tensor, shard: Tensor) -> Tensor:
    """Returns a DTensor with the sharding of `weight` whose local shard is `shard`."""
    if not is_sharded(weight):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard,
        weight.device_mesh,  # type: ignore[attr-defined]
        weight.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )

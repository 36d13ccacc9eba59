"""How the parameters of a model are sharded over ranks."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from torchcram.optim.gradients import Gradients, norm
from torchcram.sharding import all_peers, fsdp_modules, is_sharded, local, part_of, reshard

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.sharding import Peers


class ShardContext:
    """What a step has to know of sharding, and nothing to do where there is none.

    Attributes:
        sharded: whether a parameter is a DTensor, of which this process holds some rows.

    Raises:
        ValueError: if one is sharded in a way that is not supported.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = fsdp_modules(model)
        reshard(self._modules)
        named = dict(model.named_parameters())
        self.sharded = any(map(is_sharded, named.values()))
        self.everyone: list[Peers] = all_peers(list(named.values())) if self.sharded else []
        self._sharers: dict[int, Peers] = {}  # by the id of a parameter: who has its other rows
        for name, parameter in named.items() if self.sharded else ():
            if (part := part_of(name, parameter)) is not None:
                self._sharers[id(parameter)] = part.peers
        self._groups = {peers.group: peers for peers in self._sharers.values()}

    def here(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns what this process holds of `tensors`, in the same memory."""
        return [local(tensor) for tensor in tensors] if self.sharded else tensors

    def norm(self, gradients: Gradients) -> Tensor:
        """Returns the length of all gradients together, that on other processes included."""
        if not self.sharded:
            return norm([gradient for _, gradient in gradients], 2)
        whole: list[Tensor] = []  # a copy of each on every process
        cut: dict[object, list[Tensor]] = {group: [] for group in self._groups}
        for parameter, gradient in gradients:
            sharers = self._sharers.get(id(parameter))
            (whole if sharers is None else cut[sharers.group]).append(local(gradient))
        lengths = [norm(whole, 2).double().reshape(1)]
        for group, peers in self._groups.items():
            # one after another in the order of the ranks: the same sum on all replicas
            lengths.append(peers.gather(norm(cut[group], 2).double()))
        device = gradients[0][1].device
        together = torch.cat([length.to(device) for length in lengths])
        wide = any(gradient.dtype == torch.float64 for _, gradient in gradients)
        length: Tensor = torch.linalg.vector_norm(together)
        return length.to(torch.float64 if wide else torch.float32)

    def any_of(self, flags: Tensor) -> Tensor:
        """Returns `flags`, True or 1.0 wherever some process has it so."""
        if not self.everyone:
            return flags
        found = flags.float()  # backends lack a maximum of bool
        for peers in self.everyone:
            peers.maximum_(found)
        return found.to(flags.dtype)

    def reshard(self) -> None:
        """Lets the next forward pass see the parameters as they are now."""
        reshard(self._modules)

    def recover(self) -> None:
        """Gets FSDP out of a pass that an exception ended."""
        inside: set[int] = set()
        for module in self._modules:
            if not hasattr(module, "reset_iter_state"):  # torch before it could
                _make_idle(module)
            elif id(module) not in inside:
                with suppress(RuntimeError):  # its root is outside this model
                    module.reset_iter_state()
            inside.update(map(id, module.modules()))


def _make_idle(module: Any) -> None:  # noqa: ANN401
    """Lets `reshard` drop what an unfinished forward has gathered."""
    state = module._get_fsdp_state()
    for one in (state, state._fsdp_param_group):
        if one is not None:
            one._training_state = type(one._training_state).IDLE

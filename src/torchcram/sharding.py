"""Tensors of which every rank holds some rows: the shards of FSDP2.

Everything here works on the local shards; nothing gathers a whole tensor.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


class Peers:
    """Ranks that tensors are sharded over, and collective operations among them.

    Args:
        mesh: Device mesh of a sharded tensor.
        dim: Dimension of the mesh that the ranks lie along.
    """

    def __init__(self, mesh: Any, dim: int) -> None:  # noqa: ANN401
        self.rank: int = mesh.get_local_rank(dim)
        self.size: int = mesh.size(dim)
        self.group: dist.ProcessGroup = mesh.get_group(dim)
        self._device = torch.device(mesh.device_type)

    def add_up_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all ranks."""
        self._reduce_(tensor, dist.ReduceOp.SUM)

    def maximum_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its maximum over all ranks."""
        self._reduce_(tensor, dist.ReduceOp.MAX)

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, stacked in the order of the ranks."""
        sent = tensor.to(self._device).reshape(-1).contiguous().view(torch.uint8)
        gathered = sent.new_empty(self.size * sent.numel())  # bytes: backends lack some dtypes
        dist.all_gather_into_tensor(gathered, sent, group=self.group)
        return gathered.view(tensor.dtype).view(self.size, *tensor.shape).to(tensor.device)

    def _reduce_(self, tensor: Tensor, operation: Any) -> None:  # noqa: ANN401
        moved = tensor.to(self._device)
        dist.all_reduce(moved, operation, group=self.group)
        if moved is not tensor:
            tensor.copy_(moved)


@dataclass(frozen=True)
class Part:
    """Rows (dimension 0) of a whole tensor that one rank holds.

    Attributes:
        shape: Shape of the whole tensor.
        peers: Ranks that hold its rows, in order.
    """

    shape: torch.Size
    peers: Peers

    @property
    def here(self) -> range:
        """Rows on this rank."""
        return self.rows(self.peers.rank)

    def rows(self, rank: int) -> range:
        """Returns the rows on a rank: the same number on each, fewer on the last ranks."""
        count = self.shape[0]
        each = -(-count // self.peers.size)
        return range(min(rank * each, count), min((rank + 1) * each, count))


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether `tensor` is a DTensor, without importing the module that defines them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Returns the rows of `tensor` on this rank, in the same memory; a plain tensor unchanged."""
    if not is_sharded(tensor):
        return tensor
    shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def part_of(name: str, tensor: Tensor) -> Part | None:
    """Returns which rows of `tensor` are on this rank; None if all of them are.

    Raises:
        ValueError: If it is sharded other than by rows over one dimension of its mesh.
    """
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor import Shard

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    by_rows = all(type(placements[dim]) is Shard and placements[dim].dim == 0 for dim in cut)
    if not by_rows or len(cut) > 1:
        raise ValueError(
            f"{name!r} is placed as {tuple(placements)}; allowed is Replicate() on every dimension "
            "of the mesh, and Shard(0) on one of them (FSDP, also with replicas)"
        )
    if not cut or mesh.size(cut[0]) == 1:
        return None
    part = Part(tensor.shape, Peers(mesh, cut[0]))
    if len(part.here) != len(local(tensor)):
        raise ValueError(
            f"{name!r} has {len(local(tensor))} rows on this rank, expected {len(part.here)}"
        )
    return part


def all_peers(tensors: Sequence[Tensor]) -> list[Peers]:
    """Returns one entry for every dimension of every mesh that `tensors` lie on."""
    meshes: dict[Any, None] = {}
    for tensor in tensors:
        if is_sharded(tensor):
            meshes[tensor.device_mesh] = None  # type: ignore[attr-defined]
    return [Peers(mesh, dim) for mesh in meshes for dim in range(mesh.ndim) if mesh.size(dim) > 1]


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Returns the modules in `model` that `fully_shard` was applied to, outer ones first."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return (
        [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]
    )


def has_shards(model: nn.Module) -> bool:
    """Returns whether the parameters of a model are sharded, also while FSDP has gathered them."""
    return bool(fsdp_modules(model)) or any(map(is_sharded, model.parameters()))


def reshard(modules: Sequence[Any]) -> None:
    """Drops the gathered copies of parameters, so that the next forward gathers them anew."""
    for module in modules:
        module.reshard()


def complete_blocks(tensor: Tensor, part: Part, block: int) -> tuple[Tensor, int]:
    """Adds to the local rows those of other ranks that share a block with them.

    A block is `block` consecutive rows of the whole tensor, whose number of rows is a multiple of
    it. Only rows of blocks that span ranks are sent: at most 2 (block - 1) from every rank.

    Returns:
        Rows of all blocks that overlap the local rows, and how many of them precede the local rows.
    """
    edges = [_rows_of_cut_blocks(part.rows(rank), block) for rank in range(part.peers.size)]
    width = max(map(len, edges))
    if width == 0:
        return tensor, 0
    here = part.here
    sent = tensor.new_zeros(width, *tensor.shape[1:])
    ours = edges[part.peers.rank]
    sent[: len(ours)] = tensor[[row - here.start for row in ours]]
    gathered = part.peers.gather(sent).flatten(0, 1)  # (ranks x width, ...)
    index = {
        row: rank * width + at for rank, rows in enumerate(edges) for at, row in enumerate(rows)
    }
    if not here:
        return tensor, 0
    earlier, later = _missing(here, block)
    before = [index[row] for row in range(here.start - earlier, here.start)]
    after = [index[row] for row in range(here.stop, here.stop + later)]
    return torch.cat([gathered[before], tensor, gathered[after]]), len(before)


def _missing(rows: range, block: int) -> tuple[int, int]:
    """Returns how many rows before and after `rows` belong to the same blocks."""
    return rows.start % block, -rows.stop % block


def _rows_of_cut_blocks(rows: range, block: int) -> list[int]:
    """Returns those of `rows` whose block continues on another rank."""
    head = range(rows.start, min(rows.start + -rows.start % block, rows.stop))
    tail = range(max(rows.stop - rows.stop % block, rows.start), rows.stop)
    return sorted({*head, *tail})


def block_maxima(tensor: Tensor, part: Part, block: int) -> Tensor:
    """Returns the maximum of every block of rows of the whole tensor, over all ranks.

    Args:
        tensor: Local rows; no value is negative.
        part: Rows that `tensor` holds of the whole tensor.
        block: Number of consecutive rows in a block; the number of all rows is a multiple of it.
    """
    here = part.here
    largest = tensor.new_zeros(part.shape[0] // block, *tensor.shape[1:])
    if here:
        filled = [tensor.new_zeros(n, *tensor.shape[1:]) for n in _missing(here, block)]
        maxima = torch.cat([filled[0], tensor, filled[1]]).unflatten(0, (-1, block)).amax(1)
        first = here.start // block
        largest[first : first + len(maxima)] = maxima
    part.peers.maximum_(largest)
    return largest


def norm(tensors: list[Tensor], order: float) -> Tensor:
    """Returns the norm of all `tensors` together, on the device of the first."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros(())
    half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
    each = list(torch._foreach_norm(tensors, order, dtype=torch.float32 if half else None))
    if len({length.device for length in each}) > 1:
        each = [length.to(each[0].device) for length in each]
    joint: Tensor = torch.linalg.vector_norm(torch.stack(each), order)
    return joint


def _norms(tensors: list[Tensor]) -> Tensor:
    """Returns the norm of each tensor, (n,), at least in float32, on the device of the first."""
    half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
    each = torch._foreach_norm(tensors, 2, dtype=torch.float32 if half else None)
    device = tensors[0].device
    wide = torch.float64 if any(n.dtype == torch.float64 for n in each) else torch.float32
    return torch.stack([length.to(device, wide) for length in each])


class ShardContext:
    """Sharding of the parameters of a model; without shards its methods do nothing.

    Attributes:
        sharded: Whether a parameter is a DTensor, of which this rank holds some rows.
        everyone: Ranks of the model, for every dimension of every mesh.

    Raises:
        ValueError: If a parameter is sharded in a way that is not supported.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = fsdp_modules(model)
        reshard(self._modules)
        named = dict(model.named_parameters())
        self.sharded = any(map(is_sharded, named.values()))
        self.everyone: list[Peers] = all_peers(list(named.values())) if self.sharded else []
        self._sharers: dict[int, Peers] = {}  # ranks with the other rows, by id of the parameter
        for name, parameter in named.items() if self.sharded else ():
            if (part := part_of(name, parameter)) is not None:
                self._sharers[id(parameter)] = part.peers
        self._groups = {peers.group: peers for peers in self._sharers.values()}

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the rows of `tensors` on this rank, in the same memory."""
        return [local(tensor) for tensor in tensors] if self.sharded else tensors

    def norm(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns the norm of all gradients together, with the rows on other ranks."""
        if not self.sharded:
            return norm([gradient for _, gradient in gradients], 2)
        whole: list[Tensor] = []  # not sharded: every rank holds a copy
        cut: dict[object, list[Tensor]] = {group: [] for group in self._groups}
        for parameter, gradient in gradients:
            sharers = self._sharers.get(id(parameter))
            (whole if sharers is None else cut[sharers.group]).append(local(gradient))
        lengths = [norm(whole, 2).double().reshape(1)]
        for group, peers in self._groups.items():
            # summed in the order of the ranks, so that all ranks get the same sum
            lengths.append(peers.gather(norm(cut[group], 2).double()))
        device = gradients[0][1].device
        together = torch.cat([length.to(device) for length in lengths])
        wide = any(gradient.dtype == torch.float64 for _, gradient in gradients)
        length: Tensor = torch.linalg.vector_norm(together)
        return length.to(torch.float64 if wide else torch.float32)

    def norms(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns the norm of each tensor, with the rows on other ranks, on the first device.

        Args:
            pairs: Parameters, and the tensors that are sharded as they are.
        """
        each = _norms(self.local([tensor for _, tensor in pairs]))
        for group, peers in self._groups.items():
            cut = [
                number
                for number, (parameter, _) in enumerate(pairs)
                if (sharers := self._sharers.get(id(parameter))) and sharers.group == group
            ]
            # in the order of the ranks, so that all ranks get the same norms
            each[cut] = torch.linalg.vector_norm(peers.gather(each[cut]), dim=0)
        return each

    def any_of(self, flags: Tensor) -> Tensor:
        """Returns `flags`, each True or 1.0 if it is so on any rank."""
        if not self.everyone:
            return flags
        maxima = flags.float()  # backends lack a maximum of bool
        for peers in self.everyone:
            peers.maximum_(maxima)
        return maxima.to(flags.dtype)

    def reshard(self) -> None:
        """Makes the next forward pass use the parameters as they are now."""
        reshard(self._modules)

    def recover(self) -> None:
        """Resets FSDP after an exception has ended a pass."""
        inside: set[int] = set()
        for module in self._modules:
            if not hasattr(module, "reset_iter_state"):  # an earlier version of torch
                _make_idle(module)
            elif id(module) not in inside:
                with suppress(RuntimeError):  # its root is outside this model
                    module.reset_iter_state()
            inside.update(map(id, module.modules()))


def _make_idle(module: Any) -> None:  # noqa: ANN401
    """Allows `reshard` to drop what an unfinished forward has gathered."""
    state = module._get_fsdp_state()
    for holder in (state, state._fsdp_param_group):
        if holder is not None:
            holder._training_state = type(holder._training_state).IDLE

"""Tensors of which every process holds some rows: the shards of FSDP2.

Everything here works on what a process holds itself; nothing gathers a whole tensor.
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
    """Processes among which tensors are cut, and what they tell one another.

    Args:
        mesh: the device mesh of a sharded tensor.
        dim: the dimension of it that the processes lie along.
    """

    def __init__(self, mesh: Any, dim: int) -> None:  # noqa: ANN401
        self.rank: int = mesh.get_local_rank(dim)
        self.size: int = mesh.size(dim)
        self.group: dist.ProcessGroup = mesh.get_group(dim)
        self._device = torch.device(mesh.device_type)

    def add_up_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all processes."""
        self._reduce_(tensor, dist.ReduceOp.SUM)

    def maximum_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its maximum over all processes."""
        self._reduce_(tensor, dist.ReduceOp.MAX)

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all processes, stacked in the order of the ranks."""
        sent = tensor.to(self._device).reshape(-1).contiguous().view(torch.uint8)
        found = sent.new_empty(self.size * sent.numel())  # bytes: backends lack some dtypes
        dist.all_gather_into_tensor(found, sent, group=self.group)
        return found.view(tensor.dtype).view(self.size, *tensor.shape).to(tensor.device)

    def _reduce_(self, tensor: Tensor, how: Any) -> None:  # noqa: ANN401
        there = tensor.to(self._device)
        dist.all_reduce(there, how, group=self.group)
        if there is not tensor:
            tensor.copy_(there)


@dataclass(frozen=True)
class Part:
    """The rows (dimension 0) of a whole tensor that one process holds.

    Attributes:
        shape: of the whole tensor.
        peers: the processes that hold its rows, in order.
    """

    shape: torch.Size
    peers: Peers

    @property
    def here(self) -> range:
        """The rows on this process."""
        return self.rows(self.peers.rank)

    def rows(self, rank: int) -> range:
        """Returns the rows on the process of that rank: as many on each, fewer at the end."""
        count = self.shape[0]
        each = -(-count // self.peers.size)
        return range(min(rank * each, count), min((rank + 1) * each, count))


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether `tensor` is a DTensor, without importing what defines them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Returns the rows of `tensor` on this process, in the same memory; a plain one as it is."""
    if not is_sharded(tensor):
        return tensor
    here: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return here


def part_of(name: str, tensor: Tensor) -> Part | None:
    """Returns which rows of `tensor` are on this process; None if all of them are.

    Raises:
        ValueError: if it is cut in any way but by rows over one dimension of its mesh.
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
        raise ValueError(f"{name!r} has {len(local(tensor))} rows here, not {len(part.here)}")
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
    module = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(module, "FSDPModule", None)
    return [] if kind is None else [one for one in model.modules() if isinstance(one, kind)]


def reshard(modules: Sequence[Any]) -> None:
    """Drops the gathered copies of parameters, so that the next forward gathers what is there."""
    for module in modules:
        module.reshard()


def complete_blocks(tensor: Tensor, part: Part, block: int) -> tuple[Tensor, int]:
    """Adds to the rows here those on other processes that share a block with them.

    A block is `block` consecutive rows of the whole, whose number is a multiple of it. What travels
    is the rows of blocks that a boundary cuts: at most 2 (block - 1) from every process.

    Returns:
        The rows of all blocks that begin, end or go on here, and how many come before ours.
    """
    edges = [_rows_of_cut_blocks(part.rows(rank), block) for rank in range(part.peers.size)]
    width = max(map(len, edges))
    if width == 0:
        return tensor, 0
    here = part.here
    sent = tensor.new_zeros(width, *tensor.shape[1:])
    ours = edges[part.peers.rank]
    sent[: len(ours)] = tensor[[row - here.start for row in ours]]
    found = part.peers.gather(sent).flatten(0, 1)  # (ranks x width, ...)
    place = {
        row: rank * width + at for rank, rows in enumerate(edges) for at, row in enumerate(rows)
    }
    if not here:
        return tensor, 0
    earlier, later = _missing(here, block)
    before = [place[row] for row in range(here.start - earlier, here.start)]
    after = [place[row] for row in range(here.stop, here.stop + later)]
    return torch.cat([found[before], tensor, found[after]]), len(before)


def _missing(rows: range, block: int) -> tuple[int, int]:
    """How many rows before and after `rows` belong to blocks that begin or end elsewhere."""
    return rows.start % block, -rows.stop % block


def _rows_of_cut_blocks(rows: range, block: int) -> list[int]:
    head = range(rows.start, min(rows.start + -rows.start % block, rows.stop))
    tail = range(max(rows.stop - rows.stop % block, rows.start), rows.stop)
    return sorted({*head, *tail})


def block_maxima(tensor: Tensor, part: Part, block: int) -> Tensor:
    """Returns the maximum of every block of rows of the whole, of which some are elsewhere.

    Args:
        tensor: the rows here, none of them negative.
        part: which those are.
        block: how many consecutive rows of the whole a block is; their number is a multiple of it.
    """
    here = part.here
    largest = tensor.new_zeros(part.shape[0] // block, *tensor.shape[1:])
    if here:
        filled = [tensor.new_zeros(n, *tensor.shape[1:]) for n in _missing(here, block)]
        found = torch.cat([filled[0], tensor, filled[1]]).unflatten(0, (-1, block)).amax(1)
        first = here.start // block
        largest[first : first + len(found)] = found
    part.peers.maximum_(largest)
    return largest


def norm(tensors: list[Tensor], order: float) -> Tensor:
    """Returns the norm of all `tensors` together, on the device of the first."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros(())
    half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
    each = list(torch._foreach_norm(tensors, order, dtype=torch.float32 if half else None))
    if len({one.device for one in each}) > 1:
        each = [one.to(each[0].device) for one in each]
    together: Tensor = torch.linalg.vector_norm(torch.stack(each), order)
    return together


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

    def norm(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
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

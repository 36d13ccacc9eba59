"""The processes that train together, or a single one, and the shard of a batch that each takes."""

from __future__ import annotations

import gc
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from torchcram.experiments.io.dict_diff import explain_differences

if TYPE_CHECKING:
    from torch import nn
    from torch._C._distributed_c10d import Store

T = TypeVar("T")


class Shard(NamedTuple):
    """The part of a batch, or of the batches, that one rank takes.

    Attributes:
        rank: Number of the part, from 0.
        world_size: Number of parts.
    """

    rank: int = 0
    world_size: int = 1

    def within(self, size: int) -> slice:
        """Returns the rows of a batch of `size` in this shard; shards differ by one row at most.

        Raises:
            ValueError: If a shard would be empty.
        """
        if size < self.world_size:
            raise ValueError(
                f"a batch of {size} images cannot be divided into {self.world_size} parts"
            )
        return slice(size * self.rank // self.world_size, size * (self.rank + 1) // self.world_size)

    def among(self, count: int) -> range:
        """Returns the numbers of those out of `count` whole batches that are in this shard."""
        return range(self.rank, count, self.world_size)

    def rows(self, size: int) -> int:
        """Returns the number of rows of a batch of `size` in this shard."""
        return len(range(size)[self.within(size)])

    def share(self, size: int) -> float:
        """Returns the fraction of a batch of `size` in this shard, from 0 to 1."""
        return self.rows(size) / size


WHOLE = Shard()


@dataclass(frozen=True)
class Ranks:
    """The processes of one training, seen from one of them; a single one by default.

    Every rank calls every method, in the same order. A single process needs no process group;
    several have joined the default one, with a backend that takes CPU tensors.

    Attributes:
        rank: Rank of this process, from 0.
        world_size: Number of processes.
        local_rank: Rank of this process on its machine, from 0.
        local_world_size: Number of processes on its machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and shows progress."""
        return self.rank == 0

    @property
    def shard(self) -> Shard:
        """The part of the data that this rank takes."""
        return Shard(self.rank, self.world_size)

    def broadcast_from_rank0(self, make: Callable[[], T]) -> T:
        """Calls `make` on rank 0 alone and returns its result on every rank.

        Raises:
            ValueError: If `make` fails; on rank 0 the error itself.
        """
        if self.world_size == 1:
            return make()
        from torch import distributed as dist

        made: T | None = None
        failure: Exception | None = None
        if self.is_first:
            try:
                made = make()
            except Exception as error:  # noqa: BLE001  # raised below
                failure = error
        message: list[Any] = [made, None if failure is None else _describe(failure)]
        dist.broadcast_object_list(message, src=0)
        if failure is not None:
            raise failure
        if message[1] is not None:
            raise ValueError(message[1])
        result: T = message[0]
        return result

    def run_on_all(self, make: Callable[[], T]) -> T:
        """Calls `make` on every rank; if it fails on one, all ranks raise.

        Raises:
            ValueError: If `make` fails on some ranks, naming them and what went wrong there; the
                error itself where it is the same on all.
        """
        if self.world_size == 1:
            return make()
        failure: Exception | None = None
        try:
            made = make()
        except Exception as error:  # noqa: BLE001  # raised below
            failure = error
        reports = self.all_gather(
            (platform.node(), None if failure is None else _describe(failure))
        )
        if failure is not None and len({text for _, text in reports}) == 1:
            raise failure
        bad = [f"{_name(rank, reports)}: {text}" for rank, (_, text) in enumerate(reports) if text]
        if bad:
            raise ValueError("; ".join(bad)) from failure
        return made

    def require_same(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError on every rank, naming what differs, unless all pass the same."""
        if self.world_size == 1:
            return
        reports = self.all_gather((platform.node(), dict(settings)))
        for rank, (_, other) in enumerate(reports):
            if different := explain_differences(other, reports[0][1]):
                raise ValueError(
                    f"{_name(rank, reports)} has other settings than process 0: "
                    f"{'; '.join(different)}"
                )

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Returns the sum over the ranks of each value."""
        if self.world_size == 1:
            return list(values)
        from torch import distributed as dist

        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        sums: list[float] = tensor.tolist()
        return sums

    @torch.no_grad()
    def broadcast_buffers_(self, model: nn.Module) -> None:
        """Puts the buffers that the model has on rank 0 into those of all ranks."""
        if self.world_size == 1:
            return
        from torch import distributed as dist

        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)

    def all_gather(self, mine: T) -> list[T]:
        """Returns the objects of all ranks, in the order of the ranks."""
        if self.world_size == 1:
            return [mine]
        from torch import distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, mine)
        return gathered


SINGLE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """Joins the processes that torchrun has started, for a `with` block; `SINGLE` without them.

    Raises:
        ValueError: If another process is gone; the work has to begin anew then.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" not in os.environ or world_size == 1:
        yield SINGLE
        return
    from torch import distributed as dist
    from torch.distributed.rendezvous import rendezvous

    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    rank, local_rank, local_world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    try:
        store, _, _ = next(rendezvous("env://"))
        if local_world_size == world_size:
            # torchrun keeps the store of a single machine, and with it the addresses of processes
            # that it has replaced; several machines may count restarts differently
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"restart {restart}", store)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        yield Ranks(rank, world_size, local_rank, local_world_size)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]  # no file, no line
        raise ValueError(f"another process is gone: {reason}") from error
    # not after an error, which the other ranks notice when this process is gone
    _leave_together(store, world_size)
    gc.collect()  # a model that still holds the group would keep its threads running
    dist.destroy_process_group()


def _leave_together(store: Store, world_size: int) -> None:
    """Waits until no rank needs another one any more.

    Not by a collective: a thread of gloo lets go of its tensor later, and where that is while the
    interpreter shuts down, it aborts the process.
    """
    with suppress(RuntimeError):  # the store is gone, and so are the others: all had finished
        store.add("finished", 1)
        while store.add("finished", 0) < world_size:
            time.sleep(0.01)


def _describe(error: Exception) -> str:
    in_file = isinstance(error, OSError) and error.filename is not None and error.strerror
    text = f"{error.filename}: {error.strerror}" if in_file else str(error)  # type: ignore[attr-defined]
    return text or type(error).__name__


def _name(rank: int, reports: list[tuple[str, Any]]) -> str:
    machines = {machine for machine, _ in reports}
    return f"process {rank}" + (f" on {reports[rank][0]}" if len(machines) > 1 else "")

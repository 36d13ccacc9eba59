"""The processes that train together, or one alone."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchcram.experiments.data.parts import Part
from torchcram.experiments.io.dict_diff import explain_differences

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """Processes with the same work, each with a part of the data; a single one by default.

    All methods are to be called by all processes, in the same order. One alone needs no process
    group; several have joined the default one, which takes tensors of the CPU at least.

    Attributes:
        rank: of this process, from 0.
        count: of processes.
        local_rank: of this process on its machine, from 0.
        local_count: of processes on its machine.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and tells of progress."""
        return self.rank == 0

    @property
    def part(self) -> Part:
        """What this process takes of the data."""
        return Part(self.rank, self.count)

    def from_first(self, make: Callable[[], T]) -> T:
        """Returns what `make` gives in the first process, the only one to call it.

        Raises:
            ValueError: with what went wrong in the first; there it is the error itself.
        """
        if self.count == 1:
            return make()
        from torch import distributed as dist

        made: T | None = None
        failed: Exception | None = None
        if self.first:
            try:
                made = make()
            except Exception as error:  # noqa: BLE001  # raised below
                failed = error
        said: list[Any] = [made, None if failed is None else _in_words(failed)]
        dist.broadcast_object_list(said, src=0)
        if failed is not None:
            raise failed
        if said[1] is not None:
            raise ValueError(said[1])
        result: T = said[0]
        return result

    def agree(self, make: Callable[[], T]) -> T:
        """Calls `make` in every process; if it fails in one, all raise.

        Raises:
            ValueError: naming the process and what went wrong there; the error itself where that is
                the same everywhere.
        """
        if self.count == 1:
            return make()
        failed: Exception | None = None
        try:
            made = make()
        except Exception as error:  # noqa: BLE001  # raised below
            failed = error
        said = self._gathered((platform.node(), None if failed is None else _in_words(failed)))
        if failed is not None and len({text for _, text in said}) == 1:
            raise failed
        bad = [f"{_name(rank, said)}: {text}" for rank, (_, text) in enumerate(said) if text]
        if bad:
            raise ValueError("; ".join(bad)) from failed
        return made

    def require_alike(self, what: Mapping[str, Any]) -> None:
        """Raises ValueError in every process, naming what differs, unless all give the same."""
        if self.count == 1:
            return
        said = self._gathered((platform.node(), dict(what)))
        for rank, (_, other) in enumerate(said):
            if different := explain_differences(other, said[0][1]):
                raise ValueError(
                    f"{_name(rank, said)} is given other work than process 0: "
                    f"{'; '.join(different)}"
                )

    def sums(self, *values: float) -> list[float]:
        """Returns the sum over the processes of each value."""
        if self.count == 1:
            return list(values)
        from torch import distributed as dist

        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        found: list[float] = sums.tolist()
        return found

    def _gathered(self, mine: T) -> list[T]:
        from torch import distributed as dist

        said: list[Any] = [None] * self.count
        dist.all_gather_object(said, mine)
        return said


ALONE = Team()


@contextmanager
def joined() -> Iterator[Team]:
    """Joins the processes that torchrun has started, for a `with` block; alone without them.

    Raises:
        ValueError: if another process is gone, for which nothing but to begin anew is left.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" not in os.environ or count == 1:
        yield ALONE
        return
    from torch import distributed as dist
    from torch.distributed.rendezvous import rendezvous

    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    rank, local_rank, local_count = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    try:
        store, _, _ = next(rendezvous("env://"))
        if local_count == count:
            # torchrun keeps the store of a single machine, and with it the addresses of processes
            # that it has replaced; several machines may count restarts differently
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"restart {restart}", store)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
        team = Team(rank, count, local_rank, local_count)
        yield team
        team.sums(0)  # none goes while another still needs it
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        said = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]  # without file and line
        raise ValueError(f"another process is gone: {said}") from error
    # not after an error, of which the others hear when this process is gone
    dist.destroy_process_group()


def _in_words(error: Exception) -> str:
    known = isinstance(error, OSError) and error.filename is not None and error.strerror
    said = f"{error.filename}: {error.strerror}" if known else str(error)  # type: ignore[attr-defined]
    return said or type(error).__name__


def _name(rank: int, said: list[tuple[str, Any]]) -> str:
    machines = {machine for machine, _ in said}
    return f"process {rank}" + (f" on {said[rank][0]}" if len(machines) > 1 else "")

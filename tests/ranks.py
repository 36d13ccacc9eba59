"""Runs a function in several processes that talk to one another, as torchrun would."""

import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing


def run_ranks(count, function, *arguments, seconds=200):
    """Calls `function(rank, *arguments)` in `count` processes; an error in any is raised here.

    Args:
        count: of processes.
        function: of a module, so that other processes find it.
        arguments: that can be pickled.
        seconds: after which all of them are ended and TimeoutError is raised.

    Returns:
        How many of them came to the end of it.
    """
    ended = multiprocessing.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        passed = (count, folder, ended, function, arguments)
        running = multiprocessing.spawn(_begin_and_leave, passed, nprocs=count, join=False)
        _wait(running.processes, seconds, lambda left: running.join(timeout=left))
    return ended.value


def outcomes_of_ranks(count, function, *arguments, seconds=60):
    """Does as `run_ranks`, but lets every process come to an end of its own.

    Returns:
        What each of them raised, as text; "" of one that came to the end, None of one that died.
    """
    ended = multiprocessing.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        passed = (count, folder, ended, function, arguments)
        processes = multiprocessing.spawn(_tell, passed, nprocs=count, join=False).processes
        _wait(processes, seconds, lambda left: not _join_one(processes, left))
        told = [Path(folder) / f"told-{rank}" for rank in range(count)]
        return [file.read_text() if file.exists() else None for file in told]


def _join_one(processes, left):
    alive = [process for process in processes if process.is_alive()]
    if alive:
        alive[0].join(left)
    return any(process.is_alive() for process in processes)


def _wait(processes, seconds, ended):
    limit = time.monotonic() + seconds
    while not ended(max(limit - time.monotonic(), 0)):
        if time.monotonic() >= limit:
            for process in processes:
                process.kill()
            raise TimeoutError(f"processes that still ran after {seconds} s were ended")


def _begin(rank, count, folder, ended, function, arguments):
    torch.set_num_threads(1)
    meet = (Path(folder) / "meet").as_uri()  # a file: no port that others may take
    limit = timedelta(seconds=100)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=count, timeout=limit)
    try:
        function(rank, *arguments)
        dist.barrier()  # none goes while another still needs it
        with ended.get_lock():
            ended.value += 1
    finally:
        dist.destroy_process_group()


def _begin_and_leave(*arguments):
    """Ends the process at once where all went well.

    While Python is taken down, threads of torch's process groups have been seen to abort it.
    """
    _begin(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _tell(rank, count, folder, ended, function, arguments):
    told = ""
    try:
        _begin(rank, count, folder, ended, function, arguments)
    except Exception as error:  # noqa: BLE001
        told = f"{type(error).__name__}: {error}"
    (Path(folder) / f"told-{rank}").write_text(told)
    os._exit(0)


def assert_same_on_all_ranks(tensors):
    """Every rank holds the same bits."""
    for name, tensor in tensors.items():
        first = tensor.detach().clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, tensor), name

"""`torchcram train` under torchrun: what it refuses, and real processes that are killed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import held_rank
import pytest
import torch
from commands import SGD, fail, succeed
from held_rank import HELD

from torchcram.cli import errors
from torchcram.cli.options import find_device_of
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.training.log import read_log

ONE = ["--set", "compress.to=[global:0.9]", "--set", "train.batch_size=400"]  # to be quick
LINE = ["train", SGD, *ONE, "--device", "cpu", "--out", "run"]


@pytest.fixture
def two(monkeypatch):
    """What torchrun tells the first of two processes."""
    for name, value in (("RUN_ID", "none"), ("RESTART_COUNT", "0")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    for name, value in (("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2), ("RANK", 0), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    return monkeypatch


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "recipes"],
        ["compress", "run"],
        ["evaluate", "run"],
        ["finetune", "run", "--at", "global:0.9"],
        ["transfer", "run", "--at", "global:0.9", "--to", SGD],
        ["sweep", SGD, "--grid", "cram.rho=0.1"],
        ["report", "run"],
        ["results"],
        ["demo"],
    ],
)
def test_other_commands_are_for_one_process(arguments):
    line = fail(*arguments)
    assert f"error: {arguments[0]} runs in one process, and torchrun has started 2" in line
    assert line.endswith(": start it without torchrun")


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--parallel"], "--parallel and torchrun exclude each other"),
        (["--compile"], "--compile works in one process, and torchrun has started 2"),
    ],
)
def test_options_for_one_process_are_refused(options, said):
    assert said in fail("train", SGD, *options)
    assert not Path("runs").exists()


def test_a_process_beside_the_first_waits_before_it_tells(two):
    two.setenv("RANK", "3")
    two.setenv("LOCAL_RANK", "1")
    waited = []
    two.setattr(errors.time, "sleep", waited.append)
    assert fail("results").startswith("error: process 3: results runs in one process")
    assert waited == [errors.PATIENCE]


def test_one_process_of_torchrun_is_alone(two):
    two.setenv("WORLD_SIZE", "1")
    succeed(*LINE, "--epochs", 1)
    assert read_log(Path("run"))[0].processes == 1
    assert '"processes"' not in Path("run", "log.jsonl").read_text()


def test_every_process_has_a_gpu_of_its_own(monkeypatch):
    taken = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    second = Ranks(rank=5, world_size=6, local_rank=1, local_world_size=2)
    assert find_device_of(second, "auto") == torch.device("cuda:1")
    assert taken == [torch.device("cuda:1")]
    assert find_device_of(second, "cpu") == torch.device("cpu")
    assert find_device_of(SINGLE, "cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="--device cuda:1: torchrun assigns the GPUs"):
        find_device_of(second, "cuda:1")
    with pytest.raises(ValueError, match="3 processes need a GPU each, and torch finds 2 on"):
        find_device_of(Ranks(0, 3, 0, 3), "cuda")


def torchrun(*arguments, processes=2):
    """Starts torchrun with this Python."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes)]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


@pytest.mark.slow
def test_parameters_are_sharded_by_an_option():
    launcher = torchrun("-m", "torchcram", *LINE, "--epochs", 2, "--sharded")
    told, problems = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, problems
    assert "run: run" in told
    succeed(*LINE[:-1], "alone", "--epochs", 2)
    ours, theirs = (read_log(Path(folder)) for folder in ("run", "alone"))
    assert ours[-1].processes == 2
    # the statistics of batch norm are those of each half of a batch
    assert ours[-1].loss == pytest.approx(theirs[-1].loss, rel=0.1)


def wait_until_held(launcher):
    """Waits until rank 1 rests in the middle of the third epoch."""
    late = time.monotonic() + 200
    while not HELD.exists():
        assert launcher.poll() is None, launcher.stderr.read()
        assert time.monotonic() < late
        time.sleep(0.01)


def ranks_of(launcher):
    """The processes that a launcher has started, by rank."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
            environment = (stat.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for word in environment:
            if parent == str(launcher.pid) and word.startswith(b"RANK="):
                found[int(word[5:])] = int(stat.parent.name)
    return found


def end(launcher):
    """Leaves nothing behind, whatever happened."""
    for pid in [*ranks_of(launcher).values(), launcher.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.communicate()


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


@needs_proc
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_is_started_again_and_the_run_goes_on(rank):
    line = [*LINE, "--epochs", 6]
    launcher = torchrun("--max-restarts", 3, held_rank.__file__, *line)
    try:
        wait_until_held(launcher)
        os.kill(ranks_of(launcher)[rank], signal.SIGKILL)
        shown, said = launcher.communicate(timeout=200)
    finally:
        end(launcher)
    assert launcher.returncode == 0, said
    assert shown.count("│ dense ") == 1
    assert shown.splitlines()[-1] == "run: run"
    begun = [line for line in said.splitlines() if line.startswith("sgd seed 0: 6 epochs")]
    assert begun == ["sgd seed 0: 6 epochs", "sgd seed 0: 6 epochs, continued after 2"]
    records = read_log(Path("run"))
    assert [record.epoch for record in records] == list(range(1, 7))
    assert {record.processes for record in records} == {2}
    assert read_result("run/result.json").seeds[0].processes == 2
    assert succeed(*line).stdout == shown


@needs_proc
def test_ctrl_c_ends_all_and_one_process_goes_on():
    line = [*LINE, "--epochs", 6]
    launcher = torchrun(held_rank.__file__, *line)
    try:
        wait_until_held(launcher)
        ranks = ranks_of(launcher)
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=200)
    finally:
        end(launcher)
    assert sorted(ranks) == [0, 1]
    assert not [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
    assert said.count("stopped; the same command continues where it was") == 1
    assert "error: " not in said
    assert "continued after 2" in succeed(*line).stderr.splitlines()[0]
    assert [record.processes for record in read_log(Path("run"))] == [2, 2, 1, 1, 1, 1]

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import CRAM, SGD, command, succeed

from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.machine import cores
from torchcram.experiments.training.parallel import Failure

ONE = ["--set", "compress.to=[global:0.9]"]
LINE = ["train", SGD, *ONE, "--parallel", "--results", "results", "--device", "cpu"]


def test_two_seeds_at_once_are_as_two_in_turn():
    done = succeed(*LINE, "--epochs", 1, "--seed", 0, "--seed", 1)
    assert "over 2 seeds" in done.stdout
    assert [one.seed for one in read_result(f"results/{SGD}.json").seeds] == [0, 1]
    for seed in (0, 1):
        assert f"sgd seed {seed}: epoch 1 of 1, loss " in done.stderr
        assert f"run: runs/{SGD}/seed{seed}" in done.stdout
    succeed("train", SGD, *ONE, "--epochs", 1, "--seed", 1, "--out", "turn", "--device", "cpu")
    one = Path("runs", SGD, "seed1", "model.safetensors").read_bytes()
    assert Path("turn", "model.safetensors").read_bytes() == one


@pytest.mark.slow
def test_several_lengths_at_once_are_as_several_in_turn():
    lengths = ["--epochs", 1, "--epochs", 2]
    done = succeed(*LINE, CRAM, *lengths, "--seed", 0, "--jobs", 2)
    succeed("train", SGD, CRAM, *ONE, *lengths, "--out", "turn", "--results", "turned")
    for recipe in (SGD, CRAM):
        for epochs in (1, 2):
            name = f"{recipe}-{epochs}-epochs"
            assert f"run: runs/{name}/seed0" in done.stdout
            one, other = (read_result(f"{folder}/{name}.json") for folder in ("results", "turned"))
            assert one.recipe == other.recipe
            assert one.title == other.title
            assert one.seeds[0].dense == other.seeds[0].dense


def test_a_failure_is_told_and_the_others_are_shown(monkeypatch):
    succeed("train", SGD, *ONE, "--epochs", 1, "--device", "cpu")

    def only_the_first(jobs, _heard, *, at_once, environment):
        assert at_once == 1
        assert environment["OMP_NUM_THREADS"] == str(cores())
        return [Failure(jobs[1], 3, ("before", "error: it is broken"))]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torchcram.cli.train_runs.run_jobs", only_the_first)
    done = command(*LINE, "--epochs", 1, "--seed", 0, "--seed", 1, "--jobs", 1)
    assert done.exit_code == 1
    assert done.stderr == (
        "error: sgd seed 1 ended with exit status 3:\n  before\n  error: it is broken\n"
    )
    assert f"run: runs/{SGD}/seed0" in done.stdout
    assert "seed1" not in done.stdout


def test_every_option_reaches_the_processes(monkeypatch, run):
    heard = {}

    def listen(jobs, _heard, **_):
        heard.update((job.name, job.command) for job in jobs)
        return [Failure(job, 1, ()) for job in jobs]

    monkeypatch.setattr("torchcram.cli.train_runs.run_jobs", listen)
    command(
        *(*LINE, CRAM, "--seed", 3, "--epochs", 2, "--data", "there", "--out", "all", "--eager"),
        *("--eval-interval", 5, "--from", run),
    )
    assert heard.keys() == {"sgd seed 3", "cram-plus-multi seed 3"}
    words = heard["cram-plus-multi seed 3"]
    assert words[:5] == (sys.executable, "-m", "torchcram", "train", CRAM)
    said = " ".join(words[5:])
    for option in (
        "--progress json",
        "--seed 3",
        f"--out all/{CRAM}/seed3",
        "--data there",
        "--device cpu",
        "--eval-interval 5",
        "--set compress.to=[global:0.9]",
        "--epochs 2",
        f"--from {run}",
        "--results results",
        "--eager",
    ):
        assert option in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
@pytest.mark.parametrize("ask", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_all(ask):
    line = [sys.executable, "-m", "torchcram", *LINE, "--epochs", "9999", "--seed", "0"]
    parent = subprocess.Popen(
        [*line, "--seed", "1", "--jobs", "2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        late = time.monotonic() + 60
        while len(list(Path("runs").rglob("epoch-0001.pt"))) < 1:
            assert parent.poll() is None, parent.stderr.read()
            assert time.monotonic() < late
            time.sleep(0.01)
        children = _children(parent.pid)
        parent.send_signal(ask)
        _, errors = parent.communicate(timeout=60)
    finally:
        parent.kill()
    assert parent.returncode == 130
    assert errors.splitlines()[-1] == "stopped; the same command continues where it was"
    assert len(children) == 2
    assert not [pid for pid in children if _runs(pid)]


def _children(pid):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if parent == str(pid):
            found.append(int(path.parent.name))
    return found


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

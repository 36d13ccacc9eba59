"""Every example is short, runs, and prints the accuracy dense and at its targets."""

import re
from pathlib import Path

import pytest
from commands import run_example

ROOT = Path(__file__).parent.parent
NEEDS = {
    "plain_loop": ("sklearn",),
    "ddp": ("sklearn",),
    "fsdp": ("sklearn",),
    "lightning_digits": ("sklearn", "lightning"),
    "transformers_trainer": ("sklearn", "transformers", "accelerate"),
    "accelerate_loop": ("sklearn", "accelerate"),
}
SPREAD = ("ddp", "fsdp")  # over processes
# A thread of gloo that lets go of its last tensor while the interpreter shuts down aborts a process
# that has done its work; torchrun starts the processes again.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=3", "--nproc-per-node=2"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_examples_are_short(example):
    assert len(example.read_text().splitlines()) < 60


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_runs(name, tmp_path):
    for module in NEEDS[name]:
        pytest.importorskip(module)
    launch = TORCHRUN if name in SPREAD else []
    printed = run_example(name, "2", cwd=tmp_path, launch=launch)
    scores = dict(re.findall(r"^(\S+): (\d+\.\d)%$", printed, re.MULTILINE))
    assert len(scores) == 4, printed
    assert {"dense", "accuracy"} & {next(iter(scores))}
    assert float(next(iter(scores.values()))) > 15  # ten classes, two epochs

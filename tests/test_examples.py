"""Every example is short, runs, and prints the accuracy dense and at its targets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_examples_are_short(example):
    assert len(example.read_text().splitlines()) < 60


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_runs(name, tmp_path):
    for module in NEEDS[name]:
        pytest.importorskip(module)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2"] if name in SPREAD else []
    alone = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, *launch, str(ROOT / "examples" / f"{name}.py"), "2"],
        cwd=tmp_path,
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = re.findall(r"^(\S+): (\d+\.\d)%$", ran.stdout, re.MULTILINE)
    assert len(found) == 4, ran.stdout
    assert {"dense", "accuracy"} & {found[0][0]}
    assert float(found[0][1]) > 15  # ten classes, two epochs

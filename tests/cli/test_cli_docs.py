"""Every command in the documentation of training and transfer runs, in the order of the pages."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from commands import command, succeed

from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.training.log import read_log

PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("training.md", "transfer.md")]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
TRAINING = ("train", "finetune", "transfer", "sweep")


def run_torchrun(*words):
    together = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(together, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "run: " in done.stdout


def quicker(words):
    """The command with one epoch, whatever the page has."""
    if "--epochs" in words:
        at = words.index("--epochs")
        words = [*words[:at], *words[at + 2 :]]
    return [*words, "--epochs", "1"]


def test_the_commands_of_the_pages_run():
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text())]
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 15
    for line in lines:
        dollar, program, *words = shlex.split(line)
        if program == "torchrun":
            run_torchrun(*words, "--epochs", "1")
            continue
        assert (dollar, program) == ("$", "torchcram")
        if "cifar10" in line:  # which is not here
            done = command(*[word for word in words if word != "--download"])
            assert re.match(r"error: dataset '(cifar10|my-images)' is not in ", done.stderr)
            continue
        if words[0] in TRAINING and words.count("--epochs") < 2:
            words = quicker(words)
        succeed(*[word for word in words if word != "--parallel"])
    assert Path("report.html").exists()
    moved = Path("runs/transfer-results/digits/convnet-digits")
    assert (moved / "sgd-of-cram-plus-multi-global-0.9.json").exists()
    assert Path("runs/digits/convnet-digits/my-nm/seed0/result.json").exists()
    sparse = Path("runs/digits/convnet-digits/dpf-k90")
    assert read_result(sparse / "seed0" / "result.json").recipe["method"]["name"] == "dpf"
    assert Path("results/digits/convnet-digits/sgd.json").exists()
    lengths = Path("results/lengths/digits/convnet-digits").iterdir()
    assert {path.name for path in lengths} == {
        f"cram-plus-multi-1x-{epochs}-epochs.json" for epochs in (2, 4)
    }
    assert read_log(Path("runs/two"))[0].processes == 2

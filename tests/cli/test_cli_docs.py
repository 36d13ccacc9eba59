"""Every command in the documentation of training runs, in the order of the page."""

import re
import shlex
from pathlib import Path

from commands import command, succeed

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
TRAINING = ("train", "finetune", "transfer", "sweep")


def test_the_commands_of_the_page_run():
    lines = [line for block in BLOCK.findall(PAGE.read_text()) for line in block.splitlines()]
    assert len(lines) > 15
    for line in lines:
        dollar, program, *words = shlex.split(line)
        assert (dollar, program) == ("$", "torchcram")
        if "cifar10" in line:  # which is not here
            done = command(*[word for word in words if word != "--download"])
            assert re.match(r"error: data set '(cifar10|my-images)' is not in ", done.stderr)
            continue
        if words[0] in TRAINING:
            words += ["--epochs", "1"]  # quicker than the page has it
        succeed(*[word for word in words if word != "--parallel"])
    assert Path("report.html").exists()
    assert Path("runs/digits/convnet-digits/my-nm/seed0/result.json").exists()
    assert Path("results/digits/convnet-digits/sgd.json").exists()

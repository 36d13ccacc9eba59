"""Mistakes in a command line: a line as every other error, and exit status 2."""

import pytest
from commands import SGD, command, fail


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compress"], "Missing argument 'RUN'"),
        (["nothing"], "No such command 'nothing'"),
        (["--nothing"], "No such option: --nothing"),
        (["train", SGD, "--nothing"], "No such option: --nothing"),
        (["train", SGD, "--seed", "many"], "Invalid value for '--seed'"),
        (["train", SGD, "--seed", -1], "Invalid value for '--seed'"),
        (["train", SGD, "--progress", "dots"], ": 'dots' is not one of 'auto', 'json'"),
        (["list", "colours"], "colours"),
        (["list", "recipes", "cifar10", "resnet20"], "unexpected extra argument"),
        (["report"], "Missing argument 'RUN"),
    ],
)
def test_what_cannot_be_parsed(arguments, said):
    done = command(*arguments)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert done.stdout == ""
    assert done.exit_code == 2


def test_the_line_says_where_the_help_is():
    assert command("compress").stderr.endswith("; see torchcram compress --help\n")
    assert command("nothing").stderr.endswith("; see torchcram --help\n")


def test_without_a_command_there_is_the_help():
    done = command()
    assert "Usage: torchcram" in done.output
    assert "error" not in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", SGD, "--device", "tpu"], "--device tpu: allowed are auto, cpu, cuda, cuda:1"),
        (["train", SGD, "--jobs", 2], "--jobs needs --parallel"),
        (["train", SGD, "--eager", "--compile"], "--eager and --compile exclude each other"),
        (["train", SGD, "--epochs", 1, "--set", "train.epochs=2"], "exclude each other"),
        (["train", SGD, "--sharded"], "--sharded needs several processes, which torchrun starts"),
        (["train", SGD, "--set", "train.epochs"], "allowed is KEY=VALUE"),
        (["train", SGD, SGD], "is given twice"),
        (["compress", "RUN", "--to", "top:0.5"], "--to is 'top:0.5': cannot read 'top:0.5'"),
        (
            ["compress", "RUN", "--to", "sparsegpt@global:0.5"],
            "pruned one after another; allowed: uniform, row and nm patterns",
        ),
        (["compress", "RUN", "--to", "int4", "--to", "int4"], "every operator once"),
        (["export", "RUN", "--format", "pickle"], "--format pickle: allowed are torchcram"),
        (["export", "RUN", "--to", "global:1.5"], "global:1.5"),
        (["bench", "RUN", "--engines", "torsh"], "did you mean 'torch'?"),
        (["bench", "RUN", "--to", "top:0.5"], "cannot read 'top:0.5'"),
        (["finetune", "RUN", "--at", "half"], "cannot read 'half'"),
        (["transfer", "RUN", "--at", "half", "--to", SGD], "cannot read 'half'"),
        (["sweep", SGD, "--grid", "cram.rho"], "allowed is KEY=VALUE,VALUE"),
        (["sweep", SGD, "--grid", "optimizer.lr=0.1", "--score", "best"], "cannot read 'best'"),
        (["results", "--write", "--check"], "exclude each other"),
        (["results", "README.md"], "FILE needs --write or --check"),
    ],
)
def test_what_is_not_allowed(arguments, said, run):
    line = fail(*[run if word == "RUN" else word for word in arguments], code=2)
    assert said in line


def test_what_is_wrong_with_files_is_another_error(run):
    (run / "model.safetensors").unlink()
    assert "the training is not finished" in fail("compress", run, code=1)
    assert "nowhere" in fail("compress", "nowhere", code=1)
    assert "no recipe" in fail("train", "digits/nothing", code=1)

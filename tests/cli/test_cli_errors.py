import sys
import warnings
from pathlib import Path

import pytest
import typer
from commands import SGD, command, fail

from torchcram.cli.errors import errors_in_a_line, stoppable


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("sklearn", ["train", SGD], 'sklearn, which is missing: pip install "torchcram[demo]"'),
        (
            "torchvision",
            [
                "train",
                "imagenet/resnet18/sgd",
                "--set",
                "data={name: digits, augment: none, image_size: null}",
            ],
            'torchvision, which is missing: pip install "torchcram[vision]"',
        ),
        (
            "jinja2",
            ["report", "RESULT"],
            'jinja2, which is missing: pip install "torchcram[report]"',
        ),
        (
            "safetensors.torch",
            ["evaluate", "RUN"],
            "safetensors, which is missing: pip install safetensors",
        ),
    ],
)
def test_a_missing_extra_is_named_in_one_line(module, arguments, said, run, monkeypatch):
    for name in ("runs",):  # imported anew, as where the extra is missing
        monkeypatch.delitem(sys.modules, f"torchcram.report.{name}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    places = {"RUN": run, "RESULT": run / "result.json"}
    assert fail(*[places.get(one, one) for one in arguments]) == f"error: this needs {said}"


@pytest.mark.parametrize(("package", "pip"), [("yaml", "PyYAML"), ("safetensors", "safetensors")])
def test_no_extra_is_named_for_what_torchcram_depends_on(package, pip, capsys):
    with pytest.raises(typer.Exit), errors_in_a_line(needs="the demo", extra="demo"):
        raise ImportError(name=f"{package}.part")
    said = f"error: the demo needs {package}, which is missing: pip install {pip}\n"
    assert capsys.readouterr().err == said


def test_a_missing_module_of_ours_is_a_bug(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcram.experiments.recipe.overrides", None)
    monkeypatch.delitem(sys.modules, "torchcram.cli.train_runs", raising=False)
    assert isinstance(command("train", SGD).exception, ImportError)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "{name: dpf, target: global:0.9, args: {end: 5 epochs}}",
            (
                "the schedule ends at step 110, and the training has only 44 steps: the end must "
                "be at most 43; allowed: times within 2 epochs of 22 steps"
            ),
        ),
        (
            "{name: acdc, target: nm:2:4, args: {warmup: 0, period: 3, end: 100 %}}",
            "the last compressed phase begins at step 44, and the training has only 44 steps",
        ),
        (
            "{name: dfp, target: global:0.9}",
            "method.name is 'dfp' (did you mean 'dpf'?); allowed: cram, gradual-magnitude, dpf,",
        ),
        (
            "{name: dpf, target: nm:2:4, args: {end: 5}}",
            "method.target is nm:2:4: nm:2:4 has no single sparsity that could grow by a schedule",
        ),
        (
            "{name: dpf, target: int4, args: {end: 5}}",
            "cannot take int4; allowed: operators with a single sparsity, such as global:0.9",
        ),
        (
            "{name: dpf, target: global:0.9}",
            "args.end is missing; dpf needs it; allowed: a number of steps, of epochs as in",
        ),
        (
            "{name: sr-ste, target: int4}",
            "method.target is int4: SRSTE prunes to one target and cannot take int4",
        ),
        ("{name: l0, target: global:0.9, args: {penalty: -1}}", "penalty must be at least 0"),
        (
            "{name: l0, target: global:0.9, args: {penalty: big}}",
            "method.args is {penalty: big}: a value has another type than l0 takes; allowed: num",
        ),
    ],
)
def test_a_method_that_does_not_fit_is_named_in_one_line(method, message):
    line = fail("train", SGD, "--epochs", 2, "--set", f"method={method}", "--out", "run", code=1)
    assert line.startswith("error: ")
    assert message in line
    assert not list(Path("run").rglob("*.safetensors"))


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "error: two lines"),
        (FileNotFoundError(2, "No such file", "x"), "error: x: No such file"),
        (OSError(28, "No space left on device"), "error: [Errno 28] No space left on device"),
        (FloatingPointError("nan"), "error: nan"),
        (OutOfMemoryError("CUDA"), "error: the memory of the GPU is full: CUDA"),
    ],
)
def test_errors_are_lines(error, line, capsys):
    with pytest.raises(typer.Exit) as caught, errors_in_a_line():
        raise error
    assert caught.value.exit_code == 1
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug"), TypeError("a bug")])
def test_bugs_are_not_hidden(error):
    with pytest.raises(type(error), match="a bug"), errors_in_a_line():
        raise error


def test_warnings_are_lines_too(capsys):
    before = warnings.showwarning
    with warnings.catch_warnings(), errors_in_a_line():
        warnings.simplefilter("always")
        warnings.warn("look\nhere", stacklevel=1)
        assert warnings.showwarning is not before
    assert warnings.showwarning is before
    assert capsys.readouterr().err == "warning: look here\n"


def test_ctrl_c_is_a_line(capsys):
    with pytest.raises(typer.Exit) as caught, errors_in_a_line(), stoppable():
        raise KeyboardInterrupt
    assert caught.value.exit_code == 130
    assert capsys.readouterr().err == "stopped; the same command continues where it was\n"

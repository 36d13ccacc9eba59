import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from commands import command, fail, succeed

from torchcram import artifact
from torchcram.experiments.bench.record import read_bench
from torchcram.experiments.evaluation.results import read_result

QUICK = ("--rounds", 1, "--threads", 1, "--engines", "torch,torchcram")


def test_bench_shows_and_keeps_what_was_asked_for(run):
    done = succeed(
        *("bench", run, "--to", "global:0.9", "--to", "int4", "--batch", 1, "--batch", 8),
        *(*QUICK, "--json", "out/found.json"),
    )
    found = read_bench(run / "bench.json")
    assert read_bench(Path("out/found.json")) == found
    assert [one.target for one in found.subjects] == ["dense", "global:0.9", "int4"]
    assert [(one.batch, one.threads) for one in found.settings] == [(1, 1), (8, 1)]
    assert found.engines == ["torch", "torchcram"]
    assert all(one.times.rounds == 1 for one in found.timings)
    result = read_result(run / "result.json").seeds[0]
    assert found.subjects[0].accuracy == result.dense
    assert found.subjects[1].accuracy == result.targets[1].after
    assert "testing global:0.9" not in done.stderr  # which is known
    assert "testing int4" in done.stderr
    assert "SGD: test accuracy in % on digits, and files in MB" in done.stdout
    assert "batch 8, 1 thread (8x1x8x8)" in done.stdout
    assert re.search(r"speed: relative to torch(cram)?, the fastest engine on the", done.stdout)
    for one in found.subjects:
        assert f"│ {one.target} " in done.stdout
    assert f"result: {run / 'bench.json'}" in done.stdout


def test_without_targets_they_are_those_of_the_recipe(run):
    done = succeed("bench", run, *QUICK, "--batch", 1, "--no-accuracy")
    found = read_bench(run / "bench.json")
    assert [one.target for one in found.subjects] == ["dense", "global:0.5", "global:0.9"]
    assert [one.accuracy for one in found.subjects] == [None] * 3
    assert "testing" not in done.stderr


def test_a_compact_file_is_measured_by_what_it_says(run):
    succeed("export", run, "--to", "global:0.9", "--values", "fp16", "--out", "files")
    (path,) = Path("files").iterdir()
    done = succeed("bench", path, *QUICK, "--batch", 2, "--json", "found.json")
    dense, small = read_bench(Path("found.json")).subjects
    assert (dense.target, small.target) == ("dense", "global:0.9")
    assert dense.accuracy == read_result(run / "result.json").seeds[0].dense
    metrics = artifact.read_manifest(path).metadata["metrics"]
    assert small.accuracy == metrics["after"] != metrics["before"]
    assert small.compact_bytes == path.stat().st_size
    assert small.sparsity == pytest.approx(0.9, abs=1e-3)
    assert not (run / "bench.json").exists()
    assert "compressing" not in done.stderr
    succeed("bench", path, *QUICK, "--batch", 2, "--json", "found.json", "--no-accuracy")
    assert read_bench(Path("found.json")).subjects[1].accuracy is None


def test_an_engine_that_cannot_run_has_a_note(run, monkeypatch):
    def unable(*_):
        raise RuntimeError("no compiler is found")

    monkeypatch.setattr("torchcram.experiments.bench.engines._compiled", unable)
    options = ("--rounds", 1, "--batch", 1, "--engines", "torch,compiled", "--no-accuracy")
    done = succeed("bench", run, "--to", "int8", *options)
    assert "RuntimeError: no compiler is found" in done.stdout
    timing = read_bench(run / "bench.json").timing("int8", "compiled", 0)
    assert (timing.times, timing.error) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "global:1.5"], "global:1.5"),
        (["--to", "global:0.3-0.9"], "a range"),
        (["--to", "int4", "--to", "int4"], "once"),
        (["--engines", "torsh"], "did you mean 'torch'?"),
        (["--engines", ""], "engine ''"),
        (["--batch", 1, "--batch", 1], "each once"),
        (["--batch", 400], "'digits' has 1 to 360 test images"),
        (["--device", "tpu"], "--device tpu"),
        (["--prompt", 5], "--prompt is for the generation of language models on a CPU"),
        (["--tokens", 5], "--tokens is for the generation"),
        (["--generation"], "--generation is for the generation"),
        (["--engines", "torch,torchcram-int8"], "engine 'torchcram-int8'"),
        (["--no-forward"], "nothing to measure"),
    ],
)
def test_bad_options_leave_nothing(run, arguments, said):
    done = command("bench", run, *arguments, "--no-accuracy")
    assert said in fail("bench", run, *arguments, "--no-accuracy")
    assert "compressing" not in done.stderr
    assert not (run / "bench.json").exists()


def test_what_is_neither_run_nor_file_is_named(run):
    assert "nowhere is neither a run folder nor a compact file" in fail("bench", "nowhere")
    line = fail("bench", run / "model.safetensors")
    assert "model.safetensors: it is no compact file" in line
    assert "not the folder of a run" in fail("bench", run.parent)


def test_a_file_has_its_target_and_needs_its_recipe(run):
    artifact.save({"a": torch.ones(2, 2)}, "bare.safetensors")
    assert "has no recipe in it" in fail("bench", "bare.safetensors")
    assert "is compressed already" in fail("bench", "bare.safetensors", "--to", "int4")
    assert run.exists()


def test_rounds_are_positive(run):
    done = command("bench", run, "--rounds", 0)
    assert done.exit_code == 2
    assert "--rounds" in done.stderr


def test_the_file_says_where_and_with_what(run):
    succeed("bench", run, "--to", "int8", *QUICK, "--batch", 1, "--no-accuracy")
    plain = json.loads((run / "bench.json").read_text())
    assert plain["machine"]
    assert plain["versions"]["torchcram"]
    assert plain["device"] == "cpu"


def test_the_commands_of_the_page_run():
    page = Path(__file__).parents[2] / "docs" / "bench.md"
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    lines = [words for words in lines if "wiki-paragraphs" not in words[3]]  # which is not here
    assert [words[2] for words in lines] == ["train", "bench", "report", "export", "bench"]
    for _, _, *words in lines:
        quicker = {"train": ("--epochs", 1), "bench": QUICK}.get(words[0], ())
        succeed(*words, *quicker)
    assert "Speed and size" in Path("digits.html").read_text()

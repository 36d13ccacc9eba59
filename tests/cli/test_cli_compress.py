import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import SGD, command, fail, succeed
from kills import full_disk, needs_limits

from torchcram import artifact
from torchcram.experiments.evaluation.results import read_result, write_result


def test_compress_shows_and_writes_what_was_asked_for(run):
    kept = (run / "result.json").read_bytes()
    done = succeed(
        *("compress", run, "--to", "global:0.9", "--to", "nm:2:4", "--to", "int4"),
        *("--bnt-trials", 3, "--json", "found.json", "--save", "small"),
    )
    result = read_result("found.json")
    (seed,) = result.seeds
    assert [target.operator for target in seed.targets] == ["global:0.9", "nm:2:4", "int4"]
    assert all(target.trials == 3 for target in seed.targets)
    assert all(target.after_std is not None for target in seed.targets)
    assert result.recipe["compress"]["to"] == ["global:0.9", "nm:2:4", "int4"]
    assert "over 3 calibration sets" in done.stdout
    assert all(f"│ {target.operator} " in done.stdout for target in seed.targets)
    assert (run / "result.json").read_bytes() == kept
    names = ["global-0.9.safetensors", "int4.safetensors", "nm-2-4.safetensors"]
    assert sorted(path.name for path in Path("small").iterdir()) == names


def test_without_targets_the_result_of_the_run_is_made_again(run):
    before = read_result(run / "result.json")
    (run / "result.json").unlink()
    succeed("compress", run)
    assert read_result(run / "result.json") == before


def test_results_of_another_training_are_not_lost(run):
    succeed("compress", run, "--to", "global:0.9", "--results", "all")
    path = Path("all/digits/convnet-digits/sgd.json")
    succeed("compress", run, "--to", "int4", "--results", "all")
    (seed,) = read_result(path).seeds
    assert [target.operator for target in seed.targets] == ["global:0.9", "int4"]
    other = replace(read_result(path), seeds=(replace(seed, seconds=seed.seconds + 1),))
    write_result(other, path)
    line = fail("compress", run, "--to", "nm:2:4", "--results", "all")
    assert "with seed 0 are those of another training" in line
    assert read_result(path) == other


def test_fine_tuned_results_have_a_single_target(run):
    succeed("finetune", run, "--at", "global:0.9", "--epochs", 1, "--out", "ft", "--results", "all")
    line = fail("compress", "ft", "--to", "int4", "--results", "all")
    assert "with seed 0 are those of fine-tuning, which has a single target" in line
    succeed("compress", "ft", "--to", "int4", "--results", "others")


def test_evaluate_tests_the_model_or_a_file(run):
    dense = read_result(run / "result.json").seeds[0].dense
    done = succeed("evaluate", run)
    assert done.stdout == (
        f"{run}: accuracy {100 * dense:.2f} % on the 360 test images of digits, sparsity 0.00 %\n"
    )
    succeed("compress", run, "--to", "global:0.9", "--save", "small", "--json", "found.json")
    after = read_result("found.json").seeds[0].targets[0].after
    done = succeed("evaluate", run, "--model", "small/global-0.9.safetensors")
    assert f"accuracy {100 * after:.2f} %" in done.stdout
    assert re.search(r"sparsity (89\.99|90\.0[01]) %", done.stdout)


def test_saved_models_are_tuned_on_the_first_calibration_set(run):
    succeed("compress", run, "--to", "global:0.9", "--save", "one")
    succeed("compress", run, "--to", "global:0.9", "--save", "three", "--bnt-trials", 3)
    one, three = (Path(name, "global-0.9.safetensors") for name in ("one", "three"))
    assert one.read_bytes() == three.read_bytes()


@pytest.mark.parametrize("options", [(), ("--values", "fp16")])
def test_evaluate_takes_compact_files(run, options):
    words = ("--to", "global:0.9+int4", *options, "--out", "files", "--json", "found.json")
    succeed("export", run, *words)
    (path,) = Path("files").iterdir()
    after = read_result("found.json").seeds[0].targets[0].after
    done = succeed("evaluate", run, "--model", path)
    assert done.stdout.startswith(f"{path}: accuracy {100 * after:.2f} % on the 360 test images")
    assert re.search(r"sparsity 9\d\.\d\d %", done.stdout)


def test_a_compact_file_that_does_not_fit_is_named(run):
    artifact.save(path="other.safetensors", model=torch.nn.Linear(3, 3))
    line = fail("evaluate", run, "--model", "other.safetensors", code=1)
    assert line.startswith("error: other.safetensors is of another model than this ConvNet: ")
    succeed("export", run, "--to", "global:0.9", "--out", "files")
    (path,) = Path("files").iterdir()
    whole = path.read_bytes()
    for content in (whole[:-100], whole[:-1] + bytes([whole[-1] ^ 1]), whole[:50]):
        Path("bad.safetensors").write_bytes(content)
        assert fail("evaluate", run, "--model", "bad.safetensors", code=1).startswith(
            "error: bad.safetensors"
        )
    assert "nowhere.safetensors" in fail("evaluate", run, "--model", "nowhere.safetensors", code=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "global:1.5"], "global:1.5"),
        (["--to", "global:0.3-0.9"], "a range is to train over"),
        (["--to", "int4", "--to", "int4"], "every operator once"),
        (["--to", "top:0.5"], "cannot read 'top:0.5'"),
    ],
)
def test_bad_targets_leave_nothing(run, arguments, said):
    assert said in fail("compress", run, *arguments, "--json", "found.json", "--save", "small")
    assert not Path("found.json").exists()
    assert not Path("small").exists()


def test_a_result_that_cannot_be_written_is_refused_before_the_work(run, monkeypatch):
    monkeypatch.setattr("torchcram.experiments.results_store.measure", None)
    Path("file").write_text("mine")
    assert "file" in fail("compress", run, "--to", "int4", "--json", "file/found.json")


@needs_limits
@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--to", "int4", "--save", "small"), "small/int4.safetensors"),
        (("--to", "int4", "--json", "found.json"), "found.json"),
        ((), "RUN/result.json"),
        (("--to", "int4", "--results", "all"), "all/digits/convnet-digits/sgd.json"),
    ],
)
def test_a_full_disk_is_a_line_with_the_path(run, options, name):
    with full_disk(300):
        line = fail("compress", run, *options, code=1)
    assert line == f"error: {name.replace('RUN', str(run))}: File too large"


@pytest.mark.parametrize("what", ["compress", "evaluate"])
def test_data_can_be_downloaded(what, run, monkeypatch):
    def load(_recipe, _folder, *, download, **_):
        raise ValueError(f"download={download}")

    monkeypatch.setattr("torchcram.experiments.tasks.images.load_data", load)
    assert "download=False" in fail(what, run)
    assert "download=True" in fail(what, run, "--download")


def test_a_folder_that_is_no_finished_run_is_named(run):
    assert "nowhere is not the folder of a run" in fail("compress", "nowhere")
    (run / "model.safetensors").unlink()
    assert "the training is not finished" in fail("evaluate", run)


def test_a_file_of_other_weights_is_named(run):
    Path("other.safetensors").write_bytes(b"nothing")
    line = fail("evaluate", run, "--model", "other.safetensors")
    assert "other.safetensors is damaged or no safetensors file" in line


def test_trials_are_positive(run):
    done = command("compress", run, "--bnt-trials", 0)
    assert done.exit_code == 2
    assert "--bnt-trials" in done.stderr


def test_an_unfinished_run_cannot_be_compressed():
    command("train", SGD, "--epochs", 2, "--set", "optimizer.lr=1e30", "--out", "failed")
    assert "the training is not finished" in fail("compress", "failed")

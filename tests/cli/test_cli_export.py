import json
from pathlib import Path

import pytest
import torch
from commands import fail, succeed
from kills import full_disk, needs_limits
from nets import same
from safetensors.torch import load_file

from torchcram import artifact, compressible_weights, sparsity
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.training.trainer import load_trained

CPU = torch.device("cpu")


def test_compact_files_are_small_exact_and_say_what_was_measured(run):
    targets = ("--to", "global:0.9", "--to", "global:0.8+int4", "--to", "nm:2:4")
    done = succeed("export", run, *targets, "--out", "files", "--json", "found.json")
    succeed("compress", run, *targets, "--save", "plain", "--json", "plain.json")
    (seed,) = read_result("found.json").seeds
    assert (seed,) == read_result("plain.json").seeds
    dense = (run / "model.safetensors").stat().st_size
    for target, name in zip(seed.targets, ("global-0.9", "global-0.8-int4", "nm-2-4"), strict=True):
        path = Path("files") / f"{name}.torchcram.safetensors"
        plain = load_file(Path("plain") / f"{target.operator.replace(':', '-')}.safetensors")
        found = artifact.load(path)
        assert same({name: found[name] for name in plain}, plain)
        manifest = artifact.read_manifest(path)
        metrics = manifest.metadata["metrics"]
        assert manifest.operator == target.operator
        assert metrics["metric"] == "accuracy"
        assert (metrics["dense"], metrics["before"]) == (seed.dense, target.before)
        assert metrics["after"] == target.after
        assert manifest.metadata["data"] == {"name": "digits", "test_images": 360}
        assert manifest.metadata["recipe"]["model"]["name"] == "convnet-digits"
        assert f"{path.stat().st_size:,}" in done.stdout
        assert f"{dense / path.stat().st_size:.1f}x" in done.stdout
        assert path.stat().st_size < dense
    assert f"{100 * seed.dense:.2f}" in done.stdout
    small = artifact.load("files/global-0.9.torchcram.safetensors", load_trained(run, CPU).model)
    assert sparsity(compressible_weights(small)) == pytest.approx(0.9, abs=1e-3)


def test_without_options_the_targets_of_the_recipe_go_into_the_run_folder(run):
    succeed("export", run)
    names = ["global-0.5.torchcram.safetensors", "global-0.9.torchcram.safetensors"]
    assert sorted(path.name for path in (run / "export").iterdir()) == names


def test_rounded_values_are_tested_as_they_come_out_of_the_file(run, monkeypatch):
    tested = []
    score = "torchcram.experiments.export.score_on_test"
    from torchcram.experiments.evaluation.compressed_models import score_on_test

    def watched(model, *rest, **options):
        tested.append({name: value.clone() for name, value in model.state_dict().items()})
        return score_on_test(model, *rest, **options)

    monkeypatch.setattr(score, watched)
    succeed("export", run, "--to", "global:0.9", "--values", "fp16", "--out", "files")
    path = Path("files/global-0.9.torchcram.safetensors")
    found = artifact.load(path)
    assert same({name: found[name] for name in tested[0]}, tested[0])
    encodings = {str(one.encoding) for one in artifact.read_manifest(path).tensors.values()}
    assert "mask+float16" in encodings


def test_plain_files(run):
    succeed("export", run, "--to", "global:0.9", "--format", "safetensors", "--out", "files")
    succeed("compress", run, "--to", "global:0.9", "--save", "plain")
    assert same(
        load_file("files/global-0.9.safetensors"), load_file("plain/global-0.9.safetensors")
    )


def test_onnx_files(run):
    pytest.importorskip("onnxruntime")
    done = succeed("export", run, "--to", "int8", "--format", "onnx", "--out", "files")
    assert Path("files/int8.onnx").is_file()
    assert "int8.onnx" in done.stdout


def test_an_onnx_file_says_how_images_are_normalised(run):
    onnxruntime = pytest.importorskip("onnxruntime")
    sklearn = pytest.importorskip("sklearn.datasets")
    succeed("export", run, "--to", "int8", "--format", "onnx", "--out", "files")
    session = onnxruntime.InferenceSession("files/int8.onnx")
    said = session.get_modelmeta().custom_metadata_map
    mean, std, shape, classes = (
        json.loads(said[f"torchcram.{key}"]) for key in ("mean", "std", "shape", "classes")
    )
    assert "(x - mean) / std" in said["torchcram.inputs"]
    digits = sklearn.load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]  # black is 0, white is 1
    x = (x - torch.tensor(mean).view(1, -1, 1, 1)) / torch.tensor(std).view(1, -1, 1, 1)
    assert list(x.shape[1:]) == shape
    (scores,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    right = [
        classes[guess] == str(label)
        for guess, label in zip(scores.argmax(1), digits.target, strict=True)
    ]
    assert sum(right) / len(right) > 0.8
    succeed("export", run, "--to", "int8", "--out", "files")
    metadata = artifact.read_manifest("files/int8.torchcram.safetensors").metadata
    assert (metadata["mean"], metadata["classes"]) == (mean, classes)


@needs_limits
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "global-0.9.torchcram.safetensors"),
        (["--values", "fp16"], "global-0.9.torchcram.safetensors"),
        (["--format", "safetensors"], "global-0.9.safetensors"),
        (["--format", "onnx"], "global-0.9.onnx"),
    ],
)
def test_a_full_disk_is_a_line_with_the_path(run, options, name):
    line = ("export", run, "--to", "global:0.9", *options, "--out", "files")
    with full_disk(2000):
        said = fail(*line, code=1)
    assert said == f"error: {Path('files') / name}: File too large"
    assert list(Path("files").iterdir()) == []
    succeed(*line)


@needs_limits
def test_a_full_disk_leaves_the_earlier_file(run):
    line = ("export", run, "--to", "global:0.9", "--out", "files", "--json", "found.json")
    succeed(*line)
    before = [(path, path.read_bytes()) for path in (*Path("files").iterdir(), Path("found.json"))]
    with full_disk(2000):
        fail(*line, code=1)
    with full_disk(len(before[1][1]) - 1):  # enough for the model, not for what is said of it
        fail(*line, code=1)
    assert [(path, path.read_bytes()) for path, _ in before] == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "pickle"], "--format pickle: allowed are torchcram, safetensors, transf"),
        (["--values", "int8"], "--values int8: allowed are fp32, fp16, bf16"),
        (["--values", "fp16", "--format", "onnx"], "allowed only with --format torchcram"),
        (["--embeddings", "int8"], "embeddings 'int8': the model has none"),
        (
            ["--embeddings", "int8", "--format", "safetensors"],
            "allowed only with --format torchcram",
        ),
        (["--format", "transformers"], "convnet-digits is not a model of Transformers"),
        (
            ["--to", "int8", "--format", "compressed-tensors"],
            "--format compressed-tensors: convnet-digits is not a model of Transformers",
        ),
        (["--format", "gguf"], "--format gguf: convnet-digits is not a model that generates"),
        (["--gguf-type", "f16"], "--gguf-type f16: allowed only with --format gguf"),
        (["--to", "top:0.5"], "cannot read 'top:0.5'"),
        (["--to", "int4", "--to", "int4"], "every operator once"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(run, arguments, said):
    assert said in fail("export", run, *arguments, "--out", "files")
    assert not Path("files").exists()


def test_a_manifest_is_json_that_others_can_read(run):
    succeed("export", run, "--to", "int4", "--out", "files")
    content = Path("files/int4.torchcram.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    manifest = json.loads(header["__metadata__"]["torchcram"])
    assert manifest["operator"] == "int4"
    assert {one["encoding"] for one in manifest["tensors"].values()} >= {"dense", "dense+int4"}

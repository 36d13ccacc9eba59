"""Runs on texts, written as files to deploy."""

from pathlib import Path

import pytest
import torch
from commands import succeed
from kills import check_kills, needs_fork

from torchcram import artifact, compress, compressible_weights
from torchcram.experiments.data.text.batches import TextBatches
from torchcram.experiments.evaluation.compressed_models import score_on_test
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.tasks import Score
from torchcram.experiments.training.trainer import load_trained

pytestmark = pytest.mark.usefixtures("_here")
SETS = ["text.length=48", "text.stride=16", "train.batch_size=8", "compress.to=[uniform:0.5]"]


@pytest.fixture(scope="module")
def run(tiny, questions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "seed0"
    words = ["train", "squad/minilm-l6/cram-plus-multi", "--data", questions, "--epochs", 1]
    for one in (f"model.name={tiny}", *SETS):
        words += ["--set", one]
    succeed(*words, "--out", folder)
    return folder


def test_a_folder_of_transformers_has_the_compressed_weights_and_the_tokenizer(run, questions):
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    target = ("--to", "uniform:0.5+int8", "--data", questions, "--out", "files")
    succeed("export", run, *target)
    succeed("export", run, *target, "--format", "transformers")
    trained = load_trained(run, torch.device("cpu"))
    small = artifact.load("files/uniform-0.5-int8.torchcram.safetensors", trained.model)
    found = AutoModelForQuestionAnswering.from_pretrained("files/uniform-0.5-int8")
    state = found.state_dict()
    for name, value in small.model.state_dict().items():
        assert torch.equal(state[name], value), name
    weights = compressible_weights(small, only="encoder")
    assert all(0.45 < float((value == 0).float().mean()) < 0.65 for value in weights.values())
    assert AutoTokenizer.from_pretrained("files/uniform-0.5-int8")("the river").input_ids
    modes = {path.stat().st_mode & 0o777 for path in Path("files/uniform-0.5-int8").iterdir()}
    assert modes == {Path("files").stat().st_mode & 0o644}  # others may read the weights
    metrics = artifact.read_manifest("files/uniform-0.5-int8.torchcram.safetensors").metadata
    assert metrics["metrics"]["metric"] == "F1"
    assert set(metrics["metrics"]["others"]) == {"exact match"}


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_packed_integers_of_an_encoder(run, questions):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForQuestionAnswering

    target = ("--to", "uniform:0.5+int8", "--data", questions, "--out", "files")
    succeed("export", run, *target)
    succeed("export", run, *target, "--format", "compressed-tensors")
    trained = load_trained(run, torch.device("cpu"))
    small = artifact.load("files/uniform-0.5-int8.torchcram.safetensors", trained.model).model
    loaded = AutoModelForQuestionAnswering.from_pretrained(
        "files/uniform-0.5-int8.compressed-tensors"
    )
    tokens = torch.randint(5, 20, (2, 12))
    with torch.no_grad():
        expected, logits = small.eval()(tokens), loaded(tokens)
    assert torch.equal(logits.start_logits, expected.start_logits)
    assert torch.equal(logits.end_logits, expected.end_logits)


def test_embeddings_are_rounded_and_tested_as_they_come_out_of_the_file(run, questions):
    words = ("export", run, "--to", "uniform:0.5", "--data", questions, "--embeddings")
    succeed(*words, "int8", "--out", "fine")
    succeed(*words, "int2", "--out", "coarse", "--json", "coarse.json")
    fine, coarse = (f"{one}/uniform-0.5.torchcram.safetensors" for one in ("fine", "coarse"))
    assert Path(coarse).stat().st_size < Path(fine).stat().st_size
    name = "model.bert.embeddings.word_embeddings.weight"
    assert str(artifact.read_manifest(fine).tensors[name].encoding) == "dense+int8"
    said = artifact.read_manifest(coarse).metadata["metrics"]["after"]
    (seed,) = read_result("coarse.json").seeds
    assert seed.targets[0].after == said
    trained = load_trained(run, torch.device("cpu"))
    data = trained.recipe.build_task().load(questions)
    model = artifact.load(coarse, trained.model)
    assert score_on_test(model, trained.recipe, data, device=torch.device("cpu")).value == said


def test_onnx_files_take_texts_of_any_length(run, questions):
    onnxruntime = pytest.importorskip("onnxruntime")
    words = ("--data", questions, "--format", "onnx", "--out", "files")
    succeed("export", run, "--to", "uniform:0.5", "--to", "wanda@uniform:0.5", *words)
    trained = load_trained(run, torch.device("cpu"))
    data = trained.recipe.build_task().load(questions)
    small = compress(
        trained.model, "uniform:0.5", weights=compressible_weights(trained.model, only="encoder")
    )
    session = onnxruntime.InferenceSession("files/uniform-0.5.onnx")
    (name,) = [one.name for one in session.get_inputs()]
    batches = TextBatches(data.test, batch_size=2, device="cpu", seed=0, train=False)
    whole = batches.at(torch.tensor([0, 1]), int(data.test.lengths.max()))[0]
    for inputs in (whole, whole[..., :20].contiguous()):
        (found,) = session.run(None, {name: inputs.numpy()})
        with torch.no_grad():
            expected = small(inputs)
        torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-4)


@needs_fork
@pytest.mark.slow
def test_a_folder_of_transformers_is_whole_whenever_export_is_killed(
    run, questions, tmp_path, monkeypatch
):
    folder = tmp_path / "work"
    (folder / "files" / "uniform-0.5").mkdir(parents=True)
    (folder / "files" / "uniform-0.5" / "model.safetensors").write_bytes(b"old")
    monkeypatch.chdir(folder)
    trained = load_trained(run, torch.device("cpu"))
    data = trained.recipe.build_task().load(questions)
    monkeypatch.setattr("torchcram.cli.export.load", lambda *_, **__: data)
    monkeypatch.setattr(
        "torchcram.experiments.evaluation.compressed_models.score_model",
        lambda *_, **__: Score(0.5),
    )
    words = ("export", run, "--to", "uniform:0.5", "--format", "transformers", "--out", "files")
    assert check_kills(lambda: succeed(*words), folder) > 8

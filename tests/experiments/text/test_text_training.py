import json
from pathlib import Path

import pytest
import torch
from commands import command, fail, succeed
from safetensors.torch import load_file
from tiny_texts import glue_folder, model_folder

from torchcram.experiments.data.text.datasets import TextSet
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.run_folder import read_run
from torchcram.experiments.training.steps import EagerStep
from torchcram.experiments.training.trainer import train

pytestmark = pytest.mark.usefixtures("_here")

CRAM = "squad/minilm-l6/cram-plus-multi"
SETS = ["text.length=48", "text.stride=16", "train.batch_size=8", "optimizer.lr=0.01"]


def line(verb, given, tiny, data, *sets, epochs=2):
    words = [verb, given, "--data", data, "--epochs", epochs, "--set", f"model.name={tiny}"]
    for one in (*SETS, *sets):
        words += ["--set", one]
    return words


@pytest.fixture(scope="module")
def finished(tiny, questions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "seed0"
    done = succeed(*line("train", CRAM, tiny, questions), "--out", folder)
    return folder, done


def test_a_line_trains_compresses_and_tells(finished, tiny):
    folder, done = finished
    recipe, info = read_run(folder)
    assert recipe.model.name == str(tiny)
    assert info.data.contents
    records = read_log(folder)
    assert [one.metric for one in records] == ["F1", "F1"]
    assert all(one.compressed_accuracy is not None for one in records)
    assert records[1].compressed_loss is not None
    assert set(records[1].others) == {"exact match"}
    assert records[1].loss < records[0].loss
    result = read_result(folder / "result.json")
    (seed,) = result.seeds
    assert (result.metric, seed.dense) == ("F1", records[1].accuracy)
    assert [one.operator for one in seed.targets] == list(recipe.compress.to)
    assert all(set(one.others) == {"exact match"} for one in (seed, *seed.targets))
    assert all(one.before == one.after for one in seed.targets)
    assert seed.targets[1].sparsity == pytest.approx(0.6, abs=0.01)
    assert "squad/minilm-l6/cram-plus-multi: test F1 in % on squad" in done.stdout
    assert all(f"│ {one} " in done.stdout for one in recipe.compress.to)
    assert "BNT" not in done.stdout
    assert "% of the tokens in training batches is padding" in done.stderr
    assert "compressed" in done.stderr


def test_embeddings_stay_and_only_the_encoder_is_compressed(finished, tiny, questions):
    folder, _ = finished
    initial, trained = (
        load_file(tiny / "model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    word = "embeddings.word_embeddings.weight"
    assert trained[f"model.bert.{word}"].equal(initial[word])
    query = "encoder.layer.0.attention.self.query.weight"
    assert not trained[f"model.bert.{query}"].equal(initial[query])
    succeed("compress", folder, "--to", "uniform:0.5", "--save", "small", "--data", questions)
    small = load_file(Path("small/uniform-0.5.safetensors"))
    zeros = {
        name
        for name, value in small.items()
        if (value == 0).float().mean() > 0.4 and value.dim() > 1
    }
    assert zeros == {name for name in small if ".encoder." in name and small[name].dim() > 1}


def test_evaluate_tells_both_metrics(finished, questions):
    folder, _ = finished
    said = succeed("evaluate", folder, "--data", questions).stdout
    _, info = read_run(folder)
    assert f"F1 {100 * info.finished.accuracy:.2f} %, exact match " in said
    assert "on the 6 test questions of squad, sparsity 0.00 %" in said


def test_stopped_and_continued_is_the_same_as_not_stopped(tiny, questions, monkeypatch):
    given = line("train", CRAM, tiny, questions, "compress.to=[uniform:0.5]", epochs=3)
    succeed(*given, "--out", "whole")
    taken, real = 0, EagerStep.run

    def interrupted(self):
        nonlocal taken
        taken += 1
        if taken == 4:  # the last one of the second epoch
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(EagerStep, "run", interrupted)
    assert command(*given, "--out", "stopped").exit_code == 130
    done = succeed(*given, "--out", "stopped")
    assert "3 epochs, continued after 1" in done.stderr
    one, other = (Path(name, "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert one == other
    assert read_log(Path("whole"))[2].loss == read_log(Path("stopped"))[2].loss


def test_finetuning_holds_the_masks(finished, questions):
    folder, _ = finished
    done = succeed(
        "finetune", folder, "--at", "uniform:0.7", "--epochs", 1, "--data", questions, "--out", "on"
    )
    assert "compressed to uniform:0.7" in done.stdout
    assert "batch norm" not in done.stdout
    tuned, trained = (load_file(Path(one) / "model.safetensors") for one in ("on", folder))
    name = "model.bert.encoder.layer.1.output.dense.weight"
    assert (tuned[name] == 0).float().mean() == pytest.approx(0.7, abs=0.01)
    assert not tuned[name].equal(trained[name])
    head = "model.qa_outputs.weight"
    assert tuned[head].count_nonzero() == tuned[head].numel()


def test_a_model_is_not_transferred(finished, questions):
    folder, _ = finished
    said = fail("transfer", folder, "--at", "dense", "--to", CRAM, "--data", questions)
    assert "language models are not transferred; allowed: recipes about images" in said


def test_a_sweep_holds_paragraphs_out(tiny, questions):
    words = line("sweep", CRAM, tiny, questions, "compress.to=[uniform:0.5]", epochs=1)
    done = succeed(*words, "--grid", "cram.rho=0.005,0.01", "--out", "swept")
    assert "cram.rho=0.01" in done.stdout
    assert read_run(Path("swept/cram.rho=0.01"))[1].data.train_images == 18


def test_sentences_are_classified(tiny):
    lines = "".join(
        f"a\t{number % 2}\t\t{'old king' if number % 2 else 'the river'}\n" for number in range(16)
    )
    folder = glue_folder(Path("data"), "glue/CoLA", lines, lines)
    given = "cola/minilm-l6/adam"
    sets = ["compress.to=[uniform:0.5]", "compress.watch=null", "optimizer.lr=0.003"]
    done = succeed(*line("train", given, tiny, folder, *sets, epochs=30), "--out", "run")
    result = read_result(Path("run/result.json"))
    assert result.metric == "Matthews correlation"
    assert result.seeds[0].dense == 1
    assert result.seeds[0].others == {"accuracy": 1}
    assert "test Matthews correlation in % on cola" in done.stdout
    assert read_log(Path("run"))[0].compressed_accuracy is None


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("positions", "does not take the texts of 'squad': its max_position_embeddings is 8"),
        ("words", "its vocab_size is 20, at least"),
        ("head", "cannot be loaded with a head for squad"),
        ("nothing", "is not the folder of a model: there is no config.json"),
    ],
)
def test_a_model_that_does_not_go_with_the_data_is_named(what, said, questions, tmp_path):
    folder = model_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    changes = {
        "positions": {"max_position_embeddings": 8},
        "words": {"vocab_size": 20},
        "head": {"model_type": "vit"},
        "nothing": {},
    }[what]
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    if what == "nothing":
        (folder / "config.json").unlink()
    words = line("train", CRAM, folder, questions, "model.pretrained=false")
    assert said in fail(*words, "--out", "run")
    assert not Path("run", "model.safetensors").exists()


def test_missing_data_is_named(tiny):
    said = fail(*line("train", CRAM, tiny, "nowhere"))
    assert (
        "dataset 'squad' is not in nowhere: looked for squad/train*.json and squad.tar.xz" in said
    )


def test_other_data_is_another_run(finished, questions):
    folder, _ = finished
    recipe = load_recipe(folder / "recipe.yaml")
    data = recipe.build_task().load(questions)
    other = TextSet(data.name, data.kind, data.train, data.test, "other")
    with pytest.raises(ValueError, match=r"holds another run: data.contents is"):
        train(recipe, folder, data=other, seed=0, device=torch.device("cpu"))


def test_the_page_names_the_metric_and_shows_uniform_sparsity(finished):
    succeed("report", finished[0])
    page = Path("report.html").read_text()
    assert "test F1, %" in page
    assert "after BNT, %" not in page
    assert "uniform:0.8" in page

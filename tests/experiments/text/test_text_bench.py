from pathlib import Path

import pytest
from commands import succeed
from runs import CPU
from tiny_texts import glue_folder, squad_folder

from torchcram import compress
from torchcram.experiments.bench.candidates import Candidate
from torchcram.experiments.bench.record import read_bench
from torchcram.experiments.bench.run import Plan, example_batch, run_bench
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.build import build_initial_model, target_weights
from torchcram.pruners import parse_pruner

pytestmark = pytest.mark.usefixtures("_here")
TSV = "sentence\tlabel\nthe old river\t1\nking of the north city\t0\na castle\t1\n"


@pytest.mark.parametrize("task", ["squad", pytest.param("sst2", marks=pytest.mark.slow)])
def test_texts_are_real_ones_of_middle_length(task, tiny, tmp_path):
    pytest.importorskip("onnxruntime")
    folder = tmp_path / "data"
    squad_folder(folder) if task == "squad" else glue_folder(folder, "sst2", TSV, TSV)
    sets = [f"model.name={tiny}", "text.length=48", "text.stride=16"]
    recipe = load_recipe(f"{task}/minilm-l6/cram-plus-multi", sets)
    data = recipe.build_task().load(folder)
    lengths = data.test.lengths
    middle = int(lengths.sort().values[(len(lengths) - 1) // 2])
    single = example_batch(recipe, data, 1)
    assert single.shape == (1, 2, middle)
    assert bool((single > 0).all())  # no padding
    whole = example_batch(recipe, data, len(data.test))
    assert whole.shape[2] == int(lengths.max())
    model = build_initial_model(recipe, classes=2, seed=0, pretrained=False).eval()
    candidates = [Candidate("dense", model, None, target_weights(recipe, model), None)]
    for target in ("uniform:0.8", "uniform:0.8+int8"):
        small = compress(model, target, weights=target_weights(recipe, model))
        weights = target_weights(recipe, small)
        candidates.append(Candidate(target, small, parse_pruner(target), weights, None))
    result = run_bench(
        candidates,
        recipe,
        data,
        plan=Plan(("torch", "onnxruntime", "torchcram"), (1, 2), (1,), rounds=1),
        device=CPU,
        folder=tmp_path,
        report=lambda _: None,
    )
    assert [one.note for one in result.timings if one.times is None] == []
    assert result.unit == "sequences"
    assert result.metric == ("F1" if task == "squad" else "accuracy")


def test_a_compact_file_of_a_run_on_texts_is_measured(tiny, questions):
    words = ["train", "squad/minilm-l6/cram-plus-multi", "--data", questions, "--epochs", 1]
    for one in (f"model.name={tiny}", "text.length=48", "text.stride=16", "train.batch_size=8"):
        words += ["--set", one]
    succeed(*words, "--set", "compress.to=[uniform:0.5]", "--out", "run")
    succeed("export", "run", "--data", questions, "--out", "files")
    line = ("--data", questions, "--rounds", 1, "--batch", 1, "--engines", "torch,torchcram")
    succeed("bench", "files/uniform-0.5.torchcram.safetensors", *line, "--json", "found.json")
    found = read_bench(Path("found.json"))
    seed = read_result("run/result.json").seeds[0]
    assert [one.accuracy for one in found.subjects] == [seed.dense, seed.targets[0].after]
    assert found.metric == "F1"
    assert all(one.times is not None for one in found.timings)

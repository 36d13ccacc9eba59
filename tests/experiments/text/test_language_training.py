"""Language modelling by the commands: training, perplexity, compression, fine-tuning, export."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import command, fail, succeed
from replayed import Replayed
from safetensors.torch import load_file
from tiny_language import LENGTH, RECIPE, SETTINGS, causal_folder, text_folder
from torch.nn import functional as F  # noqa: N812

from torchcram import artifact
from torchcram.experiments.bench.record import read_bench
from torchcram.experiments.bench.run import Files
from torchcram.experiments.data.text import blocks
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.export import check_export
from torchcram.experiments.models.causal import build_causal_model
from torchcram.experiments.ranks import Shard
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.build import build_batches, build_initial_model, build_optimizer
from torchcram.experiments.tasks import Score
from torchcram.experiments.tasks.language_modelling import score_windows
from torchcram.experiments.training import cuda_graph_steps as graphs
from torchcram.experiments.training.cuda_graph_steps import GraphStep, can_be_captured
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.run_folder import read_run
from torchcram.experiments.training.steps import EagerStep, Objective, distillation_loss
from torchcram.experiments.training.trainer import Epochs, load_trained
from torchcram.integrations.compressed_tensors import pack_words

pytestmark = pytest.mark.usefixtures("_here")
CPU = torch.device("cpu")
MULTI = RECIPE.format("cram-plus-multi")
UP = "model.model.layers.1.mlp.up_proj.weight"


def options(*sets):
    return [word for setting in sets for word in ("--set", setting)]


def line(word, recipe, decoder, paragraphs, *sets):
    return [word, recipe, "--data", paragraphs, *options(f"model.name={decoder}", *SETTINGS, *sets)]


@pytest.fixture(scope="module")
def finished(decoder, paragraphs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "seed0"
    done = succeed(*line("train", MULTI, decoder, paragraphs), "--out", folder)
    return folder, done


def test_training_is_scored_by_perplexity(finished, decoder):
    folder, done = finished
    records, info = read_log(folder), read_run(folder)[1]
    assert [(one.metric, one.unit) for one in records] == [("perplexity", "blocks")] * 2
    assert records[1].loss < records[0].loss
    assert 1 < records[1].accuracy < records[0].accuracy < 1000
    assert records[1].compressed_accuracy > 1
    assert 0 <= records[1].others["accuracy"] <= 1
    result = read_result(folder / "result.json")
    (seed,) = result.seeds
    assert (result.metric, seed.dense) == ("perplexity", records[1].accuracy)
    assert seed.targets[0].after == pytest.approx(seed.dense, rel=0.2)
    assert info.data.train_images == 30
    assert "test perplexity on" in done.stdout
    assert f"perplexity {seed.dense:.2f}, compressed" in done.stderr
    assert "wiki-paragraphs: 480 training tokens in 30 blocks" in done.stderr
    stored, trained = (
        load_file(decoder / "model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    assert "model.lm_head.weight" not in trained  # tied, and stored once
    head = trained["model.model.embed_tokens.weight"]
    assert not head.equal(stored["model.embed_tokens.weight"])  # trained, never compressed


@pytest.mark.parametrize("stride", [1, 5, LENGTH])
def test_the_perplexity_is_that_of_the_literature(stride, decoder, paragraphs):
    """The loop of Transformers' documentation, with a batch of one and labels of -100."""
    sets = [f"model.name={decoder}", *SETTINGS, f"task.args.stride={stride}"]
    recipe = load_recipe(MULTI, sets)
    data = recipe.build_task().load(paragraphs)
    model = build_initial_model(recipe, classes=0, seed=0).eval()
    tokens, length = data.test.tokens.long(), LENGTH + 1  # theirs counts the last label too
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + length, len(tokens))
        labels = tokens[begin:end].clone()
        labels[: len(labels) - (end - before)] = -100
        with torch.no_grad():
            scores = model.model(input_ids=tokens[None, begin:end]).logits[0]
        total += float(F.cross_entropy(scores[:-1], labels[1:], reduction="sum"))
        count += int((labels[1:] != -100).sum())
        before = end
        if end == len(tokens):
            break
    batches = build_batches(recipe, data, train=False, device=CPU, seed=0)
    model.train()
    value, accuracy = score_windows(model, batches, device=CPU)
    assert count == len(tokens) - 1
    assert value == pytest.approx(math.exp(total / count), rel=1e-5)
    assert 0 <= accuracy < 0.5
    assert model.training


def test_ranks_share_the_windows(decoder, paragraphs, monkeypatch):
    recipe = load_recipe(MULTI, [f"model.name={decoder}", *SETTINGS])
    data = recipe.build_task().load(paragraphs)
    model = build_initial_model(recipe, classes=0, seed=0)
    sums = []

    class Recorded:
        """Stands for ranks, whose sums are kept instead of added."""

        def all_reduce_sum(self, *values):
            sums.append(torch.tensor(values))
            return values

    monkeypatch.setattr(blocks, "TEST_TOKENS", 4 * LENGTH)  # several batches
    for shard in (Shard(0, 1), Shard(0, 2), Shard(1, 2)):
        options = {"batch_size": 1, "device": CPU, "seed": 0, "train": False, "shard": shard}
        batches = blocks.BlockBatches(data.test, **options)
        score_windows(model, batches, device=CPU, ranks=Recorded())
    torch.testing.assert_close(sums[1] + sums[2], sums[0], rtol=1e-6, atol=0)
    assert sums[0][2] == len(data.test.tokens) - 1


def test_stopped_and_continued_is_the_same_as_not_stopped(decoder, paragraphs, monkeypatch):
    words = line("train", MULTI, decoder, paragraphs, "compress.watch=null")
    succeed(*words, "--out", "whole")
    taken, real = 0, EagerStep.run

    def interrupted(self):
        nonlocal taken
        taken += 1
        if taken == 10:  # in the second epoch of seven steps
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(EagerStep, "run", interrupted)
    assert command(*words, "--out", "stopped").exit_code == 130
    assert "continued after 1" in succeed(*words, "--out", "stopped").stderr
    first, second = (Path(name, "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert first == second


@pytest.mark.parametrize("method", ["adamw", "cram-plus-multi-1x", "cram-plus-mixed"])
def test_steps_can_be_captured_and_are_those_without_graphs(
    method, decoder, paragraphs, monkeypatch
):
    monkeypatch.setattr(graphs, "StepGraphs", Replayed)
    groups = "cram.operators=[uniform:0.5, nm:2:4, int4:g16]"
    changed = [groups] if method == "cram-plus-mixed" else []
    recipe = load_recipe(RECIPE.format(method), [f"model.name={decoder}", *SETTINGS, *changed])
    data, ends = recipe.build_task().load(paragraphs), []
    for kind in (EagerStep, GraphStep):
        model = build_initial_model(recipe, classes=0, seed=0).train()
        optimizer = build_optimizer(recipe, model, seed=0)
        assert can_be_captured(optimizer, has_one_shape=True)
        batches = build_batches(recipe, data, train=True, device=CPU, seed=0)
        shares = (1.0, 1.0) if recipe.cram is None else recipe.cram.shares
        objective = Objective(recipe.build_task().loss, shares=shares)
        step = kind(model, optimizer, batches, recipe.train, CPU, objective=objective)
        for epoch in range(2):
            step.start_epoch(epoch)
            for _ in range(len(batches)):
                step.run()
        ends.append((step.losses(), model.state_dict()))
    (losses, weights), (other_losses, other_weights) = ends
    assert losses == other_losses
    assert all(weights[name].equal(other_weights[name]) for name in weights)


def test_compress_takes_patterns_few_bits_and_pruners(finished, paragraphs):
    targets = ["nm:2:4+int4:g16", "wanda@uniform:0.5", "sparsegpt@nm:2:4", "obs:m4@uniform:0.5"]
    words = [word for target in targets for word in ("--to", target)]
    done = succeed("compress", finished[0], *words, "--data", paragraphs, "--results", "results")
    (seed,) = read_result(f"results/{MULTI}.json").seeds
    assert {target.operator for target in seed.targets} == set(targets)
    for target in seed.targets:
        assert target.sparsity == pytest.approx(0.5, abs=0.02)
        assert target.after == target.before > 1
    assert "1.00x" in done.stdout or "1.01x" in done.stdout
    shown = succeed("evaluate", finished[0], "--data", paragraphs).stdout
    assert f"perplexity {seed.dense:.2f}, accuracy " in shown
    assert "on the 121 test tokens of wiki-paragraphs" in shown


def test_finetuning_keeps_the_best_round_which_has_the_least_perplexity(
    finished, paragraphs, monkeypatch
):
    values = iter([9.0, 5.0, 7.0, 6.0, 8.0])
    monkeypatch.setattr(Epochs, "score", lambda _: Score(next(values), "perplexity"))
    words = ["finetune", finished[0], "--at", "uniform:0.7", "--data", paragraphs, "--out", "on"]
    done = succeed(*words, "--results", "results")
    assert [record.accuracy for record in read_log(Path("on"))] == [9.0, 5.0, 7.0, 6.0, 8.0]
    recipe, info = read_run(Path("on"))
    assert (recipe.train.epochs, info.finished.epochs) == (2, 1.25)
    zeros = (load_file("on/model.safetensors")[UP] == 0).float().mean()
    assert zeros == pytest.approx(0.7, abs=0.01)
    assert "compressed to uniform:0.7" in done.stdout
    (seed,) = read_result(f"results/{MULTI}-finetune-uniform-0.7.json").seeds
    assert seed.targets[0].after == info.finished.accuracy > 1


def test_a_grid_takes_the_settings_with_the_least_perplexity(finished, paragraphs):
    words = ["finetune", finished[0], "--at", "uniform:0.5", "--data", paragraphs, "--out", "grid"]
    words += ["--epochs", 1, *options("train.distillation={}")]
    done = succeed(*words, "--grid", "optimizer.lr=1e-9,0.01")
    rows = [row for row in done.stdout.splitlines() if "optimizer.lr" in row]
    assert "optimizer.lr=0.01" in rows[0]
    assert "perplexity on the held-out samples" in done.stdout


def test_a_sweep_puts_the_least_perplexity_first(decoder, paragraphs):
    words = line("sweep", RECIPE.format("adamw"), decoder, paragraphs, "compress.watch=null")
    done = succeed(*words, "--grid", "optimizer.lr=1e-9,0.01", "--out", "swept")
    assert "best: optimizer.lr=0.01" in done.stdout
    assert "geometric mean over all targets" in done.stdout
    assert read_run(Path("swept/optimizer.lr=0.01"))[1].data.train_images == 27
    said = fail(*words, "--grid", "task.args.length=8,16", "--out", "other")
    assert "task.args.length is the same for all trainings on one dataset, got 16, 8" in said


def test_a_pretrained_model_is_the_teacher_of_its_training(decoder, paragraphs, finished):
    words = line("train", MULTI, decoder, paragraphs, "train.distillation.weight=1")
    succeed(*words, "--out", "taught")
    start = read_run(Path("taught"))[1].start
    assert start is not None
    assert read_run(finished[0])[1].start is None
    assert succeed(*words, "--out", "taught").stdout  # the same teacher: nothing is trained again
    tokens = torch.arange(LENGTH).remainder(50)[None]
    before, taught, alone = (
        model(tokens).detach().softmax(-1)
        for model in (
            build_causal_model(str(decoder), pretrained=True).eval(),
            load_trained(Path("taught"), CPU).model,
            load_trained(finished[0], CPU).model,
        )
    )
    assert (taught - before).abs().sum() < (alone - before).abs().sum()
    said = fail(*words, "--set", "model.pretrained=false", "--out", "other")
    assert "train.distillation needs a trained model as the teacher" in said


def test_distillation_compares_the_scores_of_tokens():
    scores, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    expected = F.kl_div(
        scores.log_softmax(2).flatten(0, 1),
        teacher.log_softmax(2).flatten(0, 1),
        log_target=True,
        reduction="batchmean",
    )
    torch.testing.assert_close(distillation_loss(scores, teacher, 1.0, class_dim=-1), expected)


@pytest.mark.parametrize("kind", ["torchcram", "safetensors", "transformers"])
def test_files_hold_the_compressed_model(kind, finished, paragraphs, capfd):
    words = ["export", finished[0], "--to", "uniform:0.5", "--format", kind, "--out", "files"]
    done = succeed(*words, "--data", paragraphs)
    assert "test perplexity on wiki-paragraphs" in done.stdout
    assert "shards" not in capfd.readouterr().err  # no progress bar of Transformers
    (path,) = Path("files").iterdir()
    (seed,) = read_result(finished[0] / "result.json").seeds
    if kind != "transformers":
        shown = succeed("evaluate", finished[0], "--model", path, "--data", paragraphs).stdout
        assert f"perplexity {seed.targets[0].after:.2f}" in shown
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        each.from_pretrained(path) for each in (AutoModelForCausalLM, AutoTokenizer)
    )
    up = model.get_parameter(UP.removeprefix("model."))
    assert (up == 0).float().mean() == pytest.approx(0.5)
    tokens = tokenizer("The castle", return_tensors="pt")["input_ids"]
    ours = load_trained(finished[0], CPU)
    assert model.generate(tokens, max_new_tokens=3, pad_token_id=0).shape == (
        1,
        tokens.shape[1] + 3,
    )
    assert ours.model(tokens).shape == model(tokens).logits.shape


def test_packed_integers_are_those_of_the_compressed_model(finished, paragraphs):
    words = ["export", finished[0], "--to", "uniform:0.5+int4:g8", "--data", paragraphs]
    succeed(*words, "--out", "files")
    succeed(*words, "--out", "files", "--format", "compressed-tensors")
    weight = artifact.load("files/uniform-0.5-int4-g8.torchcram.safetensors")[UP]
    folder = Path("files/uniform-0.5-int4-g8.compressed-tensors")
    state = load_file(folder / "model.safetensors")
    layer = UP.removeprefix("model.").removesuffix(".weight")
    scale = state[f"{layer}.weight_scale"].repeat_interleave(8, 1)
    integers = (weight / scale).round().to(torch.int8)
    assert torch.equal(integers * scale, weight)
    assert torch.equal(state[f"{layer}.weight_packed"], pack_words(integers, 4))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["model.embed_tokens", "lm_head"]
    assert (folder / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("targets", "message", "code"),
    [
        (["uniform:0.5"], "uniform:0.5 does not quantize; allowed are int2, int4 and int8", 2),
        (["int8", "int3"], "int3 has integers of 3 bits; allowed are int2, int4 and int8", 2),
        ([], "uniform:0.5 does not quantize", 1),  # a target of the recipe
    ],
)
def test_targets_that_cannot_be_packed_are_refused(targets, message, code, finished, paragraphs):
    words = [word for target in targets for word in ("--to", target)]
    words += ["--format", "compressed-tensors", "--data", paragraphs, "--out", "files"]
    assert message in fail("export", finished[0], *words, code=code)
    assert not Path("files").exists()


def test_layers_that_cannot_be_packed_are_refused(finished, tmp_path):
    model = build_causal_model(str(causal_folder(tmp_path, "GPT2")), pretrained=True)
    trained = replace(load_trained(finished[0], CPU), model=model)
    with pytest.raises(ValueError, match=r"h\.0\.attn\.c_attn\.weight .* of type Conv1D; only"):
        check_export(trained, "compressed-tensors", None, targets=["int8"])


def test_an_error_leaves_no_packed_folder(finished, paragraphs, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchcram.integrations.compressed_tensors._add_to_config", full)
    words = ["--to", "int8", "--format", "compressed-tensors", "--data", paragraphs]
    fail("export", finished[0], *words, "--out", "files", code=1)
    assert list(Path("files").iterdir()) == []


def test_an_onnx_file_takes_any_number_of_tokens(finished, paragraphs):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    words = ["export", finished[0], "--to", "int8", "--format", "onnx", "--out", "files"]
    succeed(*words, "--data", paragraphs)
    session = onnxruntime.InferenceSession("files/int8.onnx", providers=["CPUExecutionProvider"])
    model = load_trained(finished[0], CPU).model
    for shape in ((1, LENGTH), (3, 7)):
        tokens = torch.randint(257, shape)
        (scores,) = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})
        expected = model(tokens).detach()
        torch.testing.assert_close(torch.from_numpy(scores), expected, rtol=0.05, atol=0.02)


def test_a_compact_file_is_measured(finished, paragraphs, monkeypatch):
    monkeypatch.setattr(Files, "_export", lambda *_: "no ONNX file, which takes seconds")
    succeed("export", finished[0], "--to", "uniform:0.5", "--data", paragraphs, "--out", "files")
    settings = ("--data", paragraphs, "--rounds", 1, "--batch", 1, "--engines", "torch,torchcram")
    path = "files/uniform-0.5.torchcram.safetensors"
    done = succeed("bench", path, *settings, "--json", "bench.json")
    bench, (seed,) = read_bench(Path("bench.json")), read_result(finished[0] / "result.json").seeds
    values = [subject.accuracy for subject in bench.subjects]
    assert values == [seed.dense, pytest.approx(seed.targets[0].after)]
    assert (bench.metric, bench.unit, bench.settings[0].shape) == (
        "perplexity",
        "blocks",
        (1, LENGTH),
    )
    assert all(timing.times is not None for timing in bench.timings)
    assert "test perplexity on wiki-paragraphs, and files in MB" in done.stdout
    said = json.loads(Path("bench.json").read_text())
    said["subjects"][0]["accuracy"] = 0.5
    Path("bench.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"subjects\[0\].accuracy is 0.5; allowed: 1 or more"):
        read_bench(Path("bench.json"))


def test_a_language_model_is_not_transferred(finished, paragraphs):
    words = ["transfer", finished[0], "--at", "dense", "--to", MULTI, "--data", paragraphs]
    said = fail(*words, *options(*SETTINGS))
    assert "language models are not transferred" in said


def test_further_texts_are_scored_beside_the_first(decoder):
    folder = text_folder(Path("data"))
    (folder / "wikitext-2").mkdir()
    (folder / "wikitext-2" / "test.txt").write_text(" A river , north @-@ west of a city . \n" * 4)
    also = "task.args.also_test=[wikitext-2]"
    words = line("train", RECIPE.format("adamw"), decoder, folder, also, "compress.watch=null")
    done = succeed(*words, "--out", "run")
    (seed,) = read_result("run/result.json").seeds
    assert set(seed.others) == {"accuracy", "wikitext-2 perplexity"}
    assert f"{seed.others['wikitext-2 perplexity']:.1f}" in done.stdout
    assert seed.others["wikitext-2 perplexity"] > seed.dense


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("task.args.length=1", "task.args.length is 1; allowed: at least 2"),
        ("task.args.stride=17", "task.args.stride is 17; allowed: from 1 to length, which is 16"),
        ("task.args.test_tokens=9", "task.args.test_tokens is 9; allowed: above length"),
        ("task.args.lenght=9", "task.args.lenght is no known key (did you mean 'length'?)"),
        ("task.args.also_test=[wiki-paragraphs]", "task.args.also_test is ['wiki-paragraphs']"),
        ("data.augment=shift", "data.augment is 'shift'; allowed: none"),
        ("data.color=true", "data.color is True; allowed: false"),
        (
            "model={name: resnet20, pretrained: false}",
            "model.name is 'resnet20'; allowed: a language model",
        ),
        ("task.args.length=2000", "train has 492 tokens, too few for a block: task.args.length is"),
        ("task.args.length=200", "test has 121 tokens, too few for a block"),
        ("data.name=nothing", "looked for nothing/train.txt, nothing/train.jsonl"),
    ],
)
def test_bad_settings_are_refused_in_one_line(setting, message, decoder, paragraphs):
    assert message in fail(*line("train", MULTI, decoder, paragraphs, setting), "--out", "run")
    assert not Path("run/checkpoints").exists()


def test_bad_models_are_refused_before_training(paragraphs, tmp_path):
    folder = causal_folder(tmp_path / "small", vocab_size=60)
    said = fail(*line("train", MULTI, folder, paragraphs), "--out", "run")
    assert "does not fit its tokenizer" in said
    assert not Path("run/checkpoints").exists()
    said = fail(*line("train", MULTI, tmp_path / "nothing.gguf", paragraphs), "--out", "run")
    assert re.search(r"nothing.gguf': there is no .*nothing.gguf", said)

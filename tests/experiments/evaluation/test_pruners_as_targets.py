import pytest
import torch
from commands import SGD, fail, succeed
from runs import CPU, digits, one_thread, recipe, run

from torchcram import NM, compressible_weights
from torchcram.experiments.evaluation.compressed_models import looks_at_data, one_shot, pruned
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.io.weights import load_model_
from torchcram.experiments.recipe.build import target_weights
from torchcram.experiments.training.trainer import load_trained
from torchcram.pruners import parse_pruner

SETTINGS = "compress.calibration_samples=100"
GIVEN = recipe(SETTINGS, method="sgd", epochs=10)
TARGETS = ["wanda@uniform:0.8", "obs:m12:r2@global:0.8", "sparsegpt@nm:2:4+int8", "global:0.8"]


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("trained")
    run(folder, GIVEN, data)
    return folder


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def test_pruners_are_targets_as_others_are(tmp_path, folder, data):
    model = load_trained(folder, CPU).model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = one_shot(
        model, GIVEN, data, TARGETS, device=CPU, seed=0, trials=2, save_to=tmp_path / "small"
    )
    assert [one.operator for one in found] == TARGETS
    assert [one.sparsity for one in found] == pytest.approx([0.8, 0.8, 0.5, 0.8], abs=0.05)
    assert [one.seconds is not None for one in found] == [True, True, True, False]
    assert found[2].after > 0.2  # chance is a tenth
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    load_model_(model, tmp_path / "small" / "sparsegpt@nm-2-4+int8.safetensors")
    weights = {
        name: one for name, one in compressible_weights(model).items() if one.shape[1] % 4 == 0
    }
    assert weights
    kept = NM(2, 4).select(weights)
    assert all(not bool((weights[name] != 0)[~kept[name]].any()) for name in weights)


def test_every_pass_sees_the_same_batches_and_the_seed_chooses_them(folder, data):
    model = load_trained(folder, CPU).model
    operator = parse_pruner("obs:m12:r2@uniform:0.7")  # more than the 5 batches of an epoch
    options = {"data": data, "device": CPU}
    one, again, other = (
        target_weights(GIVEN, pruned(model, operator, GIVEN, seed=seed, **options)[0])
        for seed in (0, 0, 1)
    )
    assert all(one[name].equal(again[name]) for name in one)
    assert not all(one[name].equal(other[name]) for name in one)


def test_batches_are_as_many_as_are_needed(folder, data, monkeypatch):
    counts = []

    def count(_model, _operator, batches, **_):
        counts.append([sum(len(labels) for _, labels in batches) for _ in range(2)])

    monkeypatch.setattr("torchcram.experiments.evaluation.compressed_models.prune_", count)
    model = load_trained(folder, CPU).model
    for text in ("wanda@uniform:0.5", "obs:m12@uniform:0.5+int8"):
        pruned(model, parse_pruner(text), GIVEN, data=data, device=CPU, seed=0)
    assert counts == [[128, 128], [12 * 64, 12 * 64]]


def test_what_looks_at_data():
    found = {
        text: looks_at_data(parse_pruner(text))
        for text in ("global:0.5+int8", "global:0.5+wanda@row:0.5", "obs@uniform:0.5")
    }
    assert list(found.values()) == [False, True, True]


def test_recipes_have_pruners_as_targets_but_do_not_watch_or_train_by_them():
    given = recipe("compress.to=[obs:r8@uniform:0.50, int8]")
    assert given.compress.to == ("obs:r8@uniform:0.5", "int8")
    for wrong in ("compress.to=[obt@uniform:0.5]", "compress.watch=obs@uniform:0.5"):
        with pytest.raises(ValueError, match=r"compress\.(to\[0\]|watch) is 'ob[st]@uniform"):
            recipe(wrong)
    with pytest.raises(ValueError, match=r"cram\.operators\[0\] is 'obs@"):
        recipe("cram.operators=[obs@uniform:0.5]")


def test_compress_adds_targets_to_the_results_of_the_same_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sets = ["--set", "compress.to=[global:0.5]", "--epochs", 1, "--results", "results"]
    succeed("train", SGD, *sets, "--out", "run")
    words = ["compress", "run", "--to", "wanda@uniform:0.5", "--samples", 64]
    succeed(*words, "--results", "results")
    path = f"results/{SGD}.json"
    first = read_result(path)
    assert [one.operator for one in first.seeds[0].targets] == ["global:0.5", "wanda@uniform:0.5"]
    assert first.recipe["compress"]["to"] == ["global:0.5"]
    assert first.seeds[0].targets[1].seconds > 0
    succeed("train", SGD, *sets, "--out", "run")  # done already: nothing is lost
    assert read_result(path) == first
    succeed(*words[:4], "--to", "int8", "--results", "results")
    found = read_result(path).seeds[0].targets
    assert [one.operator for one in found] == ["global:0.5", "wanda@uniform:0.5", "int8"]
    succeed("train", SGD, *sets, "--seed", 1, "--out", "other")
    assert len(read_result(path).seeds) == 2
    assert "another recipe" in fail(
        *("train", SGD, *sets, "--set", "optimizer.lr=0.01", "--out", "third")
    )


def test_another_head_cannot_be_pruned_by_the_data_it_is_for(tmp_path, folder):
    said = fail("transfer", folder, "--at", "wanda@uniform:0.5", "--to", SGD, "--out", tmp_path)
    assert "wanda@uniform:0.5 looks at the data that" in said


def test_the_loss_is_that_of_the_recipe(folder, data, monkeypatch):
    seen = []

    def prune(model, _operator, batches, *, loss, **_):
        batch = next(iter(batches))
        seen.append((loss(model.eval(), batch), model(batch[0]), batch[1]))

    monkeypatch.setattr("torchcram.experiments.evaluation.compressed_models.prune_", prune)
    given = recipe("train.label_smoothing=0.2", method="sgd")
    model = load_trained(folder, CPU).model
    pruned(model, parse_pruner("obs@uniform:0.5"), given, data=data, device=CPU, seed=0)
    ((value, scores, labels),) = seen
    wanted = torch.nn.functional.cross_entropy(scores, labels, label_smoothing=0.2)
    assert value.item() == pytest.approx(wanted.item())

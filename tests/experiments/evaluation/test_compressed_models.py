import logging
import statistics
from dataclasses import replace

import pytest
import torch
from nets import same
from runs import CPU, digits, one_thread, recipe, run

from torchcram import compress, compressible_weights, tune_batchnorm_
from torchcram.experiments.data.images import calibration_batches
from torchcram.experiments.evaluation.compressed_models import (
    compressed_models,
    one_shot,
    score_on_test,
)
from torchcram.experiments.io.weights import load_model_
from torchcram.experiments.seeds import mixed
from torchcram.experiments.tasks import Score
from torchcram.operators import nm

GIVEN = recipe("compress.calibration_samples=100", method="sgd", epochs=2)


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    return run(tmp_path_factory.mktemp("trained"), GIVEN, data)


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def measured(trained, data, targets, given=GIVEN, **options):
    return one_shot(trained.model, given, data, targets, **{"device": CPU, "seed": 0, **options})


def test_every_target_is_measured_before_and_after_tuning(trained, data):
    dense = {name: value.clone() for name, value in trained.model.state_dict().items()}
    heard = []
    half, most = found = measured(
        trained, data, ["global:0.5", "global:0.9"], progress=heard.append
    )
    assert heard == found
    assert (half.operator, most.operator) == ("global:0.5", "global:0.9")
    total = sum(weight.numel() for weight in trained.model.parameters())
    prunable = sum(weight.numel() for weight in compressible_weights(trained.model).values())
    for result, level in ((half, 0.5), (most, 0.9)):
        assert result.sparsity == pytest.approx(level, abs=1e-3)
        assert result.model_sparsity == pytest.approx(level * prunable / total, abs=1e-3)
        assert (result.after_std, result.trials) == (None, 1)
    after = trained.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in dense.items())


def test_it_does_what_the_library_does(trained, data):
    (found,) = measured(trained, data, ["global:0.7"], seed=3)
    small = compress(trained.model, "global:0.7")
    before = score_on_test(small, GIVEN, data, device=CPU).value
    batches = calibration_batches(data, 100, 64, augment="shift", device=CPU, seed=mixed(3, 0))
    tune_batchnorm_(small, batches)
    assert (found.before, found.after) == (
        before,
        score_on_test(small, GIVEN, data, device=CPU).value,
    )
    assert found.before != found.after


def test_trials_use_other_calibration_sets_and_give_mean_and_deviation(trained, data):
    few = replace(GIVEN, compress=replace(GIVEN.compress, calibration_samples=16))
    (one,) = measured(trained, data, ["global:0.7"], few)
    (three,) = measured(trained, data, ["global:0.7"], few, trials=3)
    (again,) = measured(trained, data, ["global:0.7"], few, trials=3)
    assert three == again
    assert three.trials == 3
    assert three.before == one.before
    assert three.after_std > 0
    assert abs(three.after - one.after) <= 2 * three.after_std  # the first set is the same one


def test_the_deviation_is_that_of_a_sample(trained, data, monkeypatch):
    from torchcram.experiments.evaluation import compressed_models

    values = iter([0.5, 0.1, 0.2, 0.6])
    monkeypatch.setattr(compressed_models, "score_model", lambda *_, **__: Score(next(values)))
    (found,) = measured(trained, data, ["global:0.7"], trials=3)
    assert found.before == 0.5
    assert found.after == pytest.approx(0.3)
    assert found.after_std == pytest.approx(statistics.stdev([0.1, 0.2, 0.6]))


def test_the_seed_chooses_the_calibration_sets(trained, data, monkeypatch):
    from torchcram.experiments.evaluation import compressed_models

    seen = []

    def look(_, batches):
        seen.append(torch.cat([images.flatten() for images, _ in batches]))

    monkeypatch.setattr(compressed_models, "tune_batchnorm_", look)
    measured(trained, data, ["global:0.5", "int4"], trials=2)
    measured(trained, data, ["global:0.5"], seed=1)
    first, second, again, other_again, other_seed = seen
    assert torch.equal(first, again)
    assert torch.equal(second, other_again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other_seed)


def test_dense_ends_stay_dense_and_do_not_count(trained, data):
    given = replace(GIVEN, compress=replace(GIVEN.compress, dense_ends=True))
    (ends,) = measured(trained, data, ["uniform:0.9"], given)
    (everything,) = measured(trained, data, ["uniform:0.9"])
    assert ends.sparsity == pytest.approx(0.9, abs=1e-3)
    assert ends.model_sparsity < everything.model_sparsity


def test_layers_that_nm_leaves_dense_are_in_the_log_once(trained, data, caplog):
    nm._warn_left_dense.cache_clear()
    with caplog.at_level(logging.WARNING):
        (found, _) = measured(trained, data, ["nm:2:4", "nm:2:4+int8"])
        measured(trained, data, ["nm:2:4"])
    assert [record.message for record in caplog.records] == [
        (
            "nm:2:4 leaves dense the layers whose input dimension is no multiple of 4: "
            "features.0.weight"
        )
    ]
    assert 0.4 < found.sparsity < 0.5


def test_compressed_models_can_be_saved(trained, data, tmp_path):
    found = measured(trained, data, ["global:0.9", "int4:g4"], save_to=tmp_path / "small")
    names = sorted(path.name for path in (tmp_path / "small").iterdir())
    assert names == ["global-0.9.safetensors", "int4-g4.safetensors"]
    model = compress(trained.model, "int8")
    load_model_(model, tmp_path / "small" / "global-0.9.safetensors")
    assert score_on_test(model, GIVEN, data, device=CPU).value == found[0].after


def test_saved_models_are_tuned_on_the_first_of_several_calibration_sets(trained, data, tmp_path):
    targets = ["global:0.9", "int4"]
    measured(trained, data, targets, save_to=tmp_path / "one")
    measured(trained, data, targets, trials=3, save_to=tmp_path / "three")
    used = {
        str(small.operator): small.model.state_dict()
        for small in compressed_models(
            trained.model, GIVEN, data, targets, device=CPU, seed=0, trials=3
        )
    }
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "three" / path.name).read_bytes()
    assert list(used) == targets
    model = compress(trained.model, "int8")
    load_model_(model, tmp_path / "one" / "global-0.9.safetensors")
    assert same(used["global:0.9"], model.state_dict())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"targets": ["global:0.5", "half"]}, "'half'"),
        ({"targets": ["global:0.3-0.9"]}, "'global:0.3-0.9' is a range"),
        ({"targets": ["int4", "int4"]}, "'int4' is given twice"),
        ({"targets": ["int4"], "trials": 0}, "trials=0"),
    ],
)
def test_bad_targets_are_refused_before_anything_is_done(trained, data, wrong, said):
    def never(_):
        raise AssertionError

    with pytest.raises(ValueError, match=said):
        measured(trained, data, **wrong, progress=never)

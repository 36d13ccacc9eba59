from dataclasses import replace

import pytest
import torch

from torchcram import compressible_weights
from torchcram.experiments import demo
from torchcram.experiments.demo import run_demo
from torchcram.experiments.demo_result import DemoSettings
from torchcram.experiments.models import ConvNet

TINY = DemoSettings(
    epochs=1, widths=(4, 8, 8), targets=("global:0.5", "global:0.9", "nm:2:4", "global:0.8+int4")
)


@pytest.fixture(scope="module")
def tiny():
    return run_demo(TINY)


def test_the_same_seed_gives_the_same_result(tiny):
    assert run_demo(TINY) == tiny


def test_another_seed_gives_another_result(tiny):
    assert run_demo(replace(TINY, seed=1)).rows != tiny.rows


def test_every_method_is_compressed_to_every_target(tiny):
    found = [(row.method, row.operator) for row in tiny.rows]
    assert found == [(method, target) for method in ("SGD", "CrAM+") for target in TINY.targets]


def test_every_net_is_a_file_and_is_timed(tiny):
    assert [one.operator for one in tiny.deployed] == ["dense", *TINY.targets]
    assert len({one.plain_bytes for one in tiny.deployed}) == 1
    sizes = {one.operator: one.compact_bytes for one in tiny.deployed}
    assert sizes["global:0.9"] < sizes["global:0.5"] < sizes["dense"]
    assert sizes["global:0.8+int4"] < sizes["nm:2:4"]
    assert all(one.torch_ms > 0 and one.runtime_ms > 0 for one in tiny.deployed)
    assert all("layers" in one.note for one in tiny.deployed)


def test_both_methods_learn():
    result = run_demo(DemoSettings(epochs=5, lr=0.1, targets=("global:0.5",)))
    for trained in result.trained:
        assert trained.accuracy > 0.8  # chance is 0.1
        assert trained.seconds > 0


def test_achieved_sparsity_is_that_of_the_target(tiny):
    total, first = tiny.weights, 4 * 9
    assert total == first + 4 * 8 * 9 + 8 * 8 * 9 + 8 * 10
    for method in ("SGD", "CrAM+"):
        assert tiny.row(method, "global:0.5").sparsity == pytest.approx(0.5, abs=0.001)
        assert tiny.row(method, "global:0.9").sparsity == pytest.approx(0.9, abs=0.001)
        assert tiny.row(method, "nm:2:4").sparsity == pytest.approx((total - first) / 2 / total)
        assert tiny.row(method, "global:0.8+int4").sparsity >= 0.799  # rounding adds zeros


def test_tuning_batch_norm_changes_the_accuracy(tiny):
    assert any(row.before != row.after for row in tiny.rows)


def test_change_is_against_the_dense_model_of_the_same_method(tiny):
    for trained in tiny.trained:
        row = tiny.row(trained.method, "global:0.9")
        assert tiny.change(row) == row.after - trained.accuracy


def test_both_start_alike_and_sgd_gets_twice_the_epochs(monkeypatch):
    starts = []

    def no_training(model, _data, _settings, *, method, epochs, progress):  # noqa: ARG001
        weights = {name: w.detach().clone() for name, w in model.named_parameters()}
        starts.append((method, epochs, weights))
        with torch.no_grad():
            model.fc.weight.zero_()  # as a training would, changes the weights

    monkeypatch.setattr(demo, "_train", no_training)
    run_demo(replace(TINY, epochs=3))
    assert [start[:2] for start in starts] == [("SGD", 6), ("CrAM+", 3)]
    (_, _, one), (_, _, other) = starts
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_progress_hears_of_every_epoch():
    heard = []
    run_demo(replace(TINY, epochs=1), lambda *news: heard.append(news))
    assert heard == [("SGD", 0, 2), ("SGD", 1, 2), ("SGD", 2, 2), ("CrAM+", 0, 1), ("CrAM+", 1, 1)]


def test_threads_and_the_global_generator_are_left_alone(monkeypatch):
    set_threads = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    state = torch.random.get_rng_state()

    def stop(*_news):
        assert set_threads == [1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(TINY, stop)
    assert set_threads == [1, 7]
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"tuning_samples": 0}, "tuning_samples=0"),
        ({"timed_images": 0}, "timed_images=0"),
        ({"levels": ()}, "at least one"),
        ({"levels": (0.5, 1.5)}, "1.5"),
        ({"targets": ()}, "at least one"),
        ({"targets": ("global:0.5", "half")}, "'half'"),
        ({"targets": ("global:0.3-0.9",)}, "'global:0.3-0.9' is a range"),
        ({"targets": ("int4", "int4")}, "twice"),
    ],
)
def test_bad_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        DemoSettings(**wrong)


def test_the_first_convolution_is_the_one_left_out_of_nm():
    model = ConvNet(DemoSettings().widths)
    left = compressible_weights(model, skip=demo.FIRST_CONV)
    assert set(compressible_weights(model)) - set(left) == {"features.0.weight"}
    assert all(weight.shape[1] % 4 == 0 for weight in left.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_the_demonstration_is_to_show(seed):
    result = run_demo(DemoSettings(seed=seed))
    plain, aware = result.trained
    assert aware.accuracy > plain.accuracy - 0.011
    lost = {(row.method, row.operator): -result.change(row) for row in result.rows}
    assert lost["SGD", "global:0.9"] > 0.2
    assert lost["SGD", "global:0.95"] > 0.6
    assert lost["CrAM+", "global:0.9"] < 0.03
    assert lost["CrAM+", "global:0.95"] < 0.06

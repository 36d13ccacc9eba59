"""Training on a GPU: the same code, other kernels."""

import pytest
import torch
from runs import Stop, digits, recipe, run, stop_after

from torchcram.experiments.data.images import ImageDataset, Images
from torchcram.experiments.evaluation.compressed_models import one_shot, score_on_test
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.adapters import add_adapters_, merged_model
from torchcram.experiments.recipe.build import build_batches, build_initial_model, build_optimizer
from torchcram.experiments.training.cuda_graph_steps import GraphStep, make_step
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.steps import EagerStep, Objective
from torchcram.experiments.training.trainer import load_trained
from torchcram.experiments.training.weight_average import WeightAverage

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def data():
    return digits(train=1024, test=360)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "overrides",
    [[], ["optimizer.name=adamw", "optimizer.lr=0.01"], ["cram.mask_interval=3"]],
    ids=["SGD", "AdamW", "masks kept"],
)
def test_a_run_learns_can_be_stopped_and_compressed(tmp_path, data, overrides, precision):
    given = recipe(f"train.precision={precision}", "optimizer.lr=0.2", *overrides, epochs=8)
    with pytest.raises(Stop):
        run(tmp_path, given, data, device=CUDA, make_step=stop_after(40))
    found = run(tmp_path, given, data, device=CUDA)
    records = read_log(tmp_path)
    assert [record.epoch for record in records] == list(range(1, 9))
    assert records[-1].loss < records[0].loss / 2
    assert found.finished.accuracy > 0.7
    assert found.info.machine == torch.cuda.get_device_name()
    assert score_on_test(found.model, given, data, device=CUDA).value == found.finished.accuracy
    (small,) = one_shot(found.model, given, data, ["global:0.7"], device=CUDA, seed=0)
    assert small.sparsity == pytest.approx(0.7, abs=1e-3)


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")], ids=" to ".join)
def test_a_run_may_go_on_on_another_device(tmp_path, data, devices):
    first, second = map(torch.device, devices)
    given = recipe("optimizer.lr=0.2", epochs=6)
    with pytest.raises(Stop):
        run(tmp_path, given, data, device=first, make_step=stop_after(40))
    found = run(tmp_path, given, data, device=second)
    assert found.finished.accuracy > 0.5
    assert load_trained(tmp_path, first).finished == found.finished


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_steps_do_not_wait_for_the_device(tmp_path, data):
    class Strict(EagerStep):
        begun = False

        def start_epoch(self, epoch):
            super().start_epoch(epoch)
            self.begun = False

        def run(self):
            # the first step draws the epoch and copies it to the device
            torch.cuda.set_sync_debug_mode("error" if self.begun else "default")
            try:
                super().run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            self.begun = True

    run(tmp_path, recipe(method="sgd", epochs=2), data, device=CUDA, make_step=Strict)
    assert len(read_log(tmp_path)) == 2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("make", [EagerStep, make_step], ids=["eager", "captured"])
@pytest.mark.parametrize("name", ["sgd", "cram-plus-multi", "cram-plus-multi-1x"])
def test_an_average_follows_every_step_without_waiting_for_the_device(
    tmp_path, data, make, name, monkeypatch
):
    update, states, kept = WeightAverage.update_parameters, [], []

    def strict(self, model):
        torch.cuda.set_sync_debug_mode("error")
        try:
            update(self, model)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        kept[:] = [self]
        states.append({key: value.clone() for key, value in model.state_dict().items()})

    def made(*arguments, **options):
        step = make(*arguments, **options)
        assert isinstance(step, GraphStep) == (make is make_step)
        return step

    monkeypatch.setattr(WeightAverage, "update_parameters", strict)
    given = recipe("train.ema=0.8", method=name, epochs=2)
    found = run(tmp_path, given, data, device=CUDA, make_step=made)
    assert len(states) == 2 * 1024 // given.train.batch_size
    weights = {key: value.double() for key, value in states[0].items()}
    for t, state in enumerate(states[1:], 1):
        d = min(0.8, (1 + t) / (10 + t))
        weights = {key: d * value + (1 - d) * state[key] for key, value in weights.items()}
    for key, value in found.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), weights[key], rtol=1e-4, atol=1e-5, msg=key)
        else:
            assert torch.equal(value, states[-1][key])
        assert torch.equal(value, kept[0].module.state_dict()[key])


def colours(count):
    """Images of one colour each, which is its class, under noise."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(10, (count,), generator=generator)
    levels = torch.randint(256, (10, 1, 1, 3), generator=torch.Generator().manual_seed(0))
    noise = torch.randint(-20, 21, (count, 32, 32, 3), generator=generator)
    return Images((levels[labels] + noise).clamp(0, 255).byte(), labels)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("method", ["adamw", "cram-plus-multi", "cram-plus-multi-1x"])
def test_captured_steps_of_the_vision_transformer_are_the_eager_ones(method, accumulation):
    name = f"cifar10/vit/{method}"
    changes = ["train.precision=fp32", "train.batch_size=32", f"train.accumulation={accumulation}"]
    given = load_recipe(name, changes)
    data = ImageDataset("cifar10", colours(256), colours(64), tuple("abcdefghij"))
    shares = (1.0, 1.0) if given.cram is None else given.cram.shares
    losses = []
    for make in (EagerStep, make_step):
        model = build_initial_model(given, classes=10, seed=0).to(CUDA).train()
        optimizer = build_optimizer(given, model, seed=0)
        batches = build_batches(given, data, train=True, device=CUDA, seed=0)
        step = make(
            model, optimizer, batches, given.train, CUDA, objective=Objective(shares=shares)
        )
        assert isinstance(step, GraphStep) == (make is make_step)
        step.start_epoch(0)
        for _ in range(len(batches)):
            step.run()
        losses.append([loss for loss in step.losses() if loss is not None])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize("method", ["sgd", "cram-plus-multi"])
def test_captured_steps_of_adapters_are_the_eager_ones(method):
    pytest.importorskip("peft", reason="peft is not installed")
    given = recipe("train.precision=fp32", "lora={rank: 4}", "train.accumulation=2", method=method)
    data, losses = digits(), []
    for make in (EagerStep, make_step):
        model = build_initial_model(given, classes=10, seed=0).to(CUDA).train()
        add_adapters_(given, model, seed=0)
        optimizer = build_optimizer(given, model, seed=0)
        batches = build_batches(given, data, train=True, device=CUDA, seed=0)
        step = make(model, optimizer, batches, given.train, CUDA)
        assert isinstance(step, GraphStep) == (make is make_step)
        for epoch in range(3):
            with merged_model(model):  # as a test after every epoch does
                pass
            step.start_epoch(epoch)
            for _ in range(len(batches)):
                step.run()
        losses.append([loss for loss in step.losses() if loss is not None])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_the_vision_transformer_learns_with_cram(tmp_path):
    changes = ["train.epochs=10", "schedule.warmup_epochs=1", "train.batch_size=64"]
    given = load_recipe("cifar10/vit/cram-plus-multi-1x", changes)
    data = ImageDataset("cifar10", colours(1024), colours(256), tuple("abcdefghij"))
    found = run(tmp_path, given, data, device=CUDA, make_step=make_step)
    assert found.finished.accuracy > 0.8
    (small,) = one_shot(found.model, given, data, ["global:0.7"], device=CUDA, seed=0)
    assert small.after == pytest.approx(small.before, abs=0.01)  # there is no batch norm
    assert small.after > 0.7

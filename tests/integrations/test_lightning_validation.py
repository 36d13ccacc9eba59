"""Validation of the compressed model, which leaves the model and its training as they are."""

import copy
from contextlib import nullcontext

import pytest
import torch
from nets import same, snapshot
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

from torchcram import CrAM, compress_, compressible_weights, tune_batchnorm_

L = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from torchmetrics import MeanMetric, MetricCollection  # noqa: E402

from torchcram.integrations.lightning import CompressedPass, CompressedValidation  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
TARGETS = ("global:0.8", "nm:2:4")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
        )
        self.losses = MetricCollection({"metric": MeanMetric()})
        self.outputs = []

    def loss(self, batch):
        return cross_entropy(self.net(batch["x"]), batch.pop("y"))

    def training_step(self, batch):
        loss = self.loss(batch)
        self.losses(loss)
        self.log("train", loss)
        return loss

    def validation_step(self, batch):
        size = len(batch["x"])
        loss = self.loss(batch)
        self.log("plain", loss, batch_size=size)
        self.log("worst", loss, reduce_fx="max", batch_size=size)
        self.losses.update(loss, weight=size)
        self.log_dict(self.losses)
        self.outputs.append(loss)

    def on_validation_epoch_end(self):
        self.log("last", self.outputs[-1])
        self.log("count", float(len(self.outputs)))
        self.outputs.clear()

    def configure_optimizers(self):
        weights = compressible_weights(self, skip="4.weight")
        return CrAM(self, SGD(self.parameters(), lr=0.2), TARGETS, weights=weights)


def batches(count, seed, sizes=(6,)):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(sizes[i % len(sizes)], 8, generator=generator),
            "y": torch.randint(4, (sizes[i % len(sizes)],), generator=generator),
        }
        for i in range(count)
    ]


TRAIN, TEST = batches(7, seed=1), batches(3, seed=2, sizes=(6, 9))


def loader(found):
    return DataLoader([dict(batch) for batch in found], batch_size=None)


def trainer(*callbacks, epochs=1, **options):
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CompressedPass(), *callbacks],
        **{"enable_checkpointing": False, **options},
    )


@torch.no_grad()
def by_hand(module, target, tune, skip="4.weight"):
    """The loss on every test batch of a compressed copy of `module`, and the sizes of these."""
    twin = copy.deepcopy(module.net).train()
    compress_(twin, target, weights=compressible_weights(twin, skip=skip))
    if tune:
        tune_batchnorm_(twin, [batch["x"] for batch in tune])
    twin.eval()
    losses = [cross_entropy(twin(batch["x"]), batch["y"]) for batch in TEST]
    return torch.stack(losses), torch.tensor([len(batch["y"]) for batch in TEST])


@pytest.mark.parametrize("count", [0, 3])
def test_the_numbers_are_those_of_an_evaluation_by_hand(count):
    module = Net()
    fit = trainer(CompressedValidation(TARGETS, count))
    fit.fit(module, loader(TRAIN), loader(TEST))
    found = fit.callback_metrics
    for target in TARGETS:
        losses, sizes = by_hand(module, target, TRAIN[len(TRAIN) - count :])
        mean = (losses * sizes).sum() / sizes.sum()
        torch.testing.assert_close(found[f"plain/{target}"], mean)
        torch.testing.assert_close(found[f"metric/{target}"], mean)
        torch.testing.assert_close(found[f"worst/{target}"], losses.max())
        torch.testing.assert_close(found[f"last/{target}"], losses[-1])
        assert found[f"count/{target}"] == found["count"] == len(TEST)
        assert found[f"plain/{target}"] != found["plain"]


def test_training_goes_on_as_if_nothing_had_been_validated():
    alone, watched = Net(), Net()
    options = {"epochs": 2, "val_check_interval": 2, "accumulate_grad_batches": 3}
    torch.manual_seed(3)
    first = trainer(**options)
    first.fit(alone, loader(TRAIN), loader(TEST))
    torch.manual_seed(3)
    second = trainer(CompressedValidation(TARGETS, 2), **options)
    second.fit(watched, loader(TRAIN), loader(TEST))
    assert same(snapshot(alone), snapshot(watched))  # dropout, so random numbers too
    for name, value in first.callback_metrics.items():
        assert torch.equal(value, second.callback_metrics[name]), name


def test_the_model_is_put_back_when_validation_fails():
    class Fails(Net):
        def validation_step(self, batch):
            del batch
            self.before.append(snapshot(self))
            raise KeyError("no")

    module = Fails()
    module.before = []
    whole = snapshot(module)
    watch = CompressedValidation(["global:0.9"], 0)
    fit = trainer(watch, num_sanity_val_steps=0)
    with pytest.raises(KeyError):
        fit.validate(module, loader(TEST), verbose=False)
    assert not same(whole, module.before[0])
    assert same(whole, snapshot(module))
    assert "log" not in vars(module)


def test_several_loaders_and_limits():
    module = Net()
    watch = CompressedValidation(["nm:2:4"], 2, weights=compressible_weights)

    def validation_step(batch, batch_idx, dataloader_idx):
        del batch_idx, dataloader_idx
        loss = module.loss(batch)
        module.log("plain", loss, batch_size=len(batch["x"]))
        module.outputs.append(loss)

    module.validation_step = validation_step
    fit = trainer(watch, limit_val_batches=2)
    with pytest.warns(UserWarning, match=r"were left dense in training with CrAM: net\.4\.weight"):
        fit.fit(module, loader(TRAIN), [loader(TEST), loader(TEST[::-1])])
    losses, sizes = by_hand(module, "nm:2:4", TRAIN[-2:], skip=None)
    for number, chosen in enumerate(([0, 1], [2, 1])):
        mean = (losses[chosen] * sizes[chosen]).sum() / sizes[chosen].sum()
        found = fit.callback_metrics[f"plain/dataloader_idx_{number}/nm:2:4"]
        torch.testing.assert_close(found, mean)


def test_checkpoints_can_follow_a_target(tmp_path):
    keep = ModelCheckpoint(tmp_path, monitor="plain/nm:2:4", filename="best")
    watch = CompressedValidation(TARGETS, 2)
    fit = trainer(watch, keep, enable_checkpointing=True)
    fit.fit(Net(), loader(TRAIN), loader(TEST))
    assert torch.equal(keep.best_model_score, fit.callback_metrics["plain/nm:2:4"])


def test_batch_norm_needs_training_batches():
    module = Net()
    with pytest.warns(UserWarning, match="kept during fit only"):
        trainer(CompressedValidation(TARGETS)).validate(module, loader(TEST), verbose=False)


class Kept(L.Callback):
    """Looks at how many batches are kept when validation ends, and may end all by an error."""

    def __init__(self, watch, error=None):
        self.watch, self.error, self.counts = watch, error, []

    def on_validation_end(self, trainer, pl_module):
        del pl_module
        if not trainer.sanity_checking:
            self.counts.append(len(self.watch._batches))
            if self.error is not None:
                raise self.error


@pytest.mark.parametrize("error", [None, KeyError])
@pytest.mark.parametrize("norm", [False, True])
def test_batches_are_kept_for_batch_norm_and_during_fit_only(norm, error):
    module = Net()
    if not norm:
        module.net[1] = nn.Identity()
    watch = CompressedValidation(TARGETS, 2)
    kept = Kept(watch, error)
    with nullcontext() if error is None else pytest.raises(error):
        trainer(watch, kept).fit(module, loader(TRAIN), loader(TEST))
    assert kept.counts == [2 if norm else 0]
    assert not watch._batches
    assert not watch._results


@pytest.mark.parametrize("count", [0, 2])
def test_batch_norm_in_manual_optimization(count):
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch):
            optimizer, y = self.optimizers(), batch.pop("y")
            optimizer.zero_grad()
            self.manual_backward(cross_entropy(self.net(batch["x"]), y))
            with optimizer.compressed():
                self.manual_backward(cross_entropy(self.net(batch["x"]), y))
            optimizer.step()

    fit = trainer(CompressedValidation(TARGETS, count))
    if count:
        with pytest.raises(ValueError, match=r"batchnorm_batches=2 was given, only .*=0"):
            fit.fit(Manual(), loader(TRAIN), loader(TEST))
    else:
        fit.fit(Manual(), loader(TRAIN), loader(TEST))
        assert "plain/nm:2:4" in fit.callback_metrics


@pytest.mark.parametrize(
    ("targets", "count", "message"),
    [
        (["global:0.5-0.9"], 8, "global:0.5-0.9 is a range"),
        (["nm:2:4"], -1, "batchnorm_batches=-1 is not at least 0"),
    ],
)
def test_what_cannot_be_validated_is_refused(targets, count, message):
    with pytest.raises(ValueError, match=message):
        CompressedValidation(targets, count)

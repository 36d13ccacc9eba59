"""Lightning's own loop takes the steps that a loop written by hand takes."""

import itertools
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from nets import same, snapshot
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from torchcram import C_SAM, CRAM, CRAM_PLUS, SAM, CrAM, split_batch

L = pytest.importorskip("lightning")
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402
from torchmetrics import MeanMetric  # noqa: E402

from torchcram.integrations.lightning import CompressedPass  # noqa: E402
from torchcram.integrations.lightning import compressed_pass as integration  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
OPERATORS = ("global:0.5", "nm:2:4", "int4")
WHOLE, HALF, HALVES = (1.0, 1.0), (1.0, 0.5), (0.5, 0.5)  # shares of a batch


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class Net(L.LightningModule):
    def __init__(self, rule=CRAM_PLUS, **options):
        super().__init__()
        torch.manual_seed(0)
        self.net = network()
        self.mean = MeanMetric()
        self.make = lambda model, base: CrAM(
            model, base, OPERATORS if rule.compresses else (), rule=rule, rho=0.1, **options
        )
        self.calls = []

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.net(batch["x"]), batch.pop("y"))
        self.mean(loss.detach())
        self.log_dict({"loss": loss}, on_epoch=True)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        self.calls.append(("training_step", batch_idx, float(loss.detach())))
        return {"loss": loss}

    def on_after_backward(self):
        self.calls.append(("on_after_backward",))

    def on_before_optimizer_step(self, optimizer):  # noqa: ARG002
        self.calls.append(("on_before_optimizer_step",))

    def configure_optimizers(self):
        optimizer = self.make(self, SGD(self.parameters(), lr=0.2, momentum=0.9))
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}


def batches(count=5, size=8):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, size, 8, generator=generator)
    return [{"x": x, "y": torch.randint(4, (size,), generator=generator)} for x in inputs]


def loader(found):
    return DataLoader([dict(batch) for batch in found], batch_size=None)


def trainer(epochs=2, callbacks=(), shares=WHOLE, **options):
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CompressedPass(*shares), *callbacks],
        **options,
    )


def by_hand(
    module,
    found,
    *,
    accumulate=1,
    clip=None,
    epochs=2,
    autocast=nullcontext,
    scaler=None,
    split=lambda batch: split_batch(batch, 1, 1),
):
    """Trains `module.net` as the trainer is to train it, without Lightning."""
    optimizer = module.make(module, SGD(module.parameters(), lr=0.2, momentum=0.9))
    scaler = scaler or GradScaler("cpu", enabled=False)

    def backward(step):
        for batch in step:
            with autocast():
                loss = cross_entropy(module.net(batch["x"]), batch["y"])
            scaler.scale(loss / accumulate).backward()

    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * 0.5**epoch
        for first in range(0, len(found), accumulate):
            parts = [split(batch) for batch in found[first : first + accumulate]]
            optimizer.zero_grad()
            backward([part for part, _ in parts])
            for _ in optimizer.rule.passes:
                with optimizer.compressed(grad_scaler=scaler) as needed:
                    if needed:
                        backward([part for _, part in parts])
            scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
    return optimizer


CASES = [
    (CRAM_PLUS, 1, None, WHOLE),
    (CRAM_PLUS, 1, 0.05, WHOLE),
    (CRAM_PLUS, 2, 0.05, WHOLE),
    (CRAM, 3, None, WHOLE),
    (SAM, 2, 0.05, WHOLE),
    (C_SAM, 2, None, WHOLE),
    (CRAM_PLUS, 1, None, HALVES),
    (CRAM_PLUS, 2, 0.05, HALF),
    (C_SAM, 3, None, (0.75, 0.5)),
]


@pytest.mark.parametrize(("rule", "accumulate", "clip", "shares"), CASES)
def test_the_weights_are_those_of_a_loop_by_hand(rule, accumulate, clip, shares):
    ours, theirs = Net(rule), Net(rule)
    split = partial(split_batch, dense=shares[0], compressed=shares[1])
    optimizer = by_hand(ours, batches(), accumulate=accumulate, clip=clip, split=split)
    fit = trainer(accumulate_grad_batches=accumulate, gradient_clip_val=clip, shares=shares)
    fit.fit(theirs, loader(batches()))
    assert same(snapshot(ours.net), snapshot(theirs.net))  # batch-norm statistics, too
    state = fit.optimizers[0].state_dict()["cram"]
    assert torch.equal(state["generator"], optimizer.state_dict()["cram"]["generator"])
    assert sum(state["uses"].values()) == (fit.global_step if rule.compresses else 0)


def test_plain_steps_are_drawn_alike():
    ours, theirs = Net(base_step_probability=0.5), Net(base_step_probability=0.5)
    by_hand(ours, batches(), accumulate=2)
    trainer(accumulate_grad_batches=2).fit(theirs, loader(batches()))
    assert same(snapshot(ours.net), snapshot(theirs.net))


@pytest.mark.parametrize("shares", [WHOLE, HALVES])
def test_bf16_is_that_of_a_loop_by_hand(shares):
    ours, theirs = Net(), Net()
    split = partial(split_batch, dense=shares[0], compressed=shares[1])

    def autocast():
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    by_hand(ours, batches(), accumulate=2, clip=0.05, autocast=autocast, split=split)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "shares": shares}
    fit = trainer(precision="bf16-mixed", **options)
    fit.fit(theirs, loader(batches()))
    assert same(snapshot(ours.net), snapshot(theirs.net))


@pytest.mark.filterwarnings("ignore:Encountered `nan` values in tensor")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # all steps are skipped
@pytest.mark.parametrize("scale", [2.0**8, 2.0**40])  # the latter overflows at first
def test_fp16_with_a_scaler_is_that_of_a_loop_by_hand(scale):
    ours, theirs = Net(CRAM), Net(CRAM)
    start = snapshot(ours.net)

    def autocast():
        return torch.autocast("cpu", torch.float16, cache_enabled=False)

    def scaler():
        return GradScaler("cpu", init_scale=scale, growth_interval=3)

    hand, found = scaler(), scaler()
    by_hand(ours, batches(), accumulate=2, clip=0.05, autocast=autocast, scaler=hand)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=found)
    fit = trainer(accumulate_grad_batches=2, gradient_clip_val=0.05, plugins=[plugin])
    fit.fit(theirs, loader(batches()))
    assert same(snapshot(ours.net), snapshot(theirs.net))
    assert found.get_scale() == hand.get_scale() != scale
    weights = (start["0.weight"], theirs.net[0].weight)
    assert torch.equal(*weights) == (scale == 2.0**40)


def test_logs_metrics_and_hooks_count_each_batch_once():
    module = Net(C_SAM)
    fit = trainer(epochs=1, accumulate_grad_batches=2)
    fit.fit(module, loader(batches()))
    names = [name for name, *_ in module.calls]
    assert names.count("training_step") == 3 * 5
    assert names.count("on_after_backward") == 5
    assert names.count("on_before_optimizer_step") == fit.global_step == 3
    dense, seen = [], -1
    for _, index, loss in (call for call in module.calls if call[0] == "training_step"):
        if index == seen + 1:  # not one of a compressed pass
            seen = index
            dense.append(loss)
    assert len(dense) == 5
    assert float(fit.callback_metrics["loss_epoch"]) == pytest.approx(sum(dense) / 5)
    assert float(fit.callback_metrics["mean"]) == pytest.approx(sum(dense) / 5)


def test_replayed_randomness_covers_micro_batches():
    class Noisy(Net):
        def training_step(self, batch, batch_idx):
            self.calls.append((batch_idx, float(torch.rand(()))))
            return cross_entropy(self.net(batch["x"]), batch["y"])

    module = Noisy(replay_randomness=True)
    trainer(epochs=1, accumulate_grad_batches=2).fit(module, loader(batches(4)))
    drawn = [call for call in module.calls if isinstance(call[0], int)]
    assert drawn[:2] == drawn[2:4]
    assert len({number for _, number in drawn}) == 4


@pytest.mark.parametrize(("accumulate", "shares"), [(1, WHOLE), (2, WHOLE), (2, HALVES)])
def test_to_resume_equals_not_to_stop(tmp_path, accumulate, shares):
    options = {"mask_interval": 2}
    whole, first, second = (Net(**options) for _ in range(3))
    options = {"accumulate_grad_batches": accumulate, "shares": shares}
    trainer(4, **options).fit(whole, loader(batches()))
    half = trainer(2, **options)
    half.fit(first, loader(batches()))
    half.save_checkpoint(tmp_path / "half.ckpt")
    fit = trainer(4, **options)
    fit.fit(second, loader(batches()), ckpt_path=tmp_path / "half.ckpt")
    assert same(snapshot(whole.net), snapshot(second.net))
    assert not same(snapshot(whole.net), snapshot(first.net))


class Sizes(L.Callback):
    """Records the batches that other callbacks see."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
        self.seen.append(len(batch["x"]))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):  # noqa: ARG002
        self.seen.append(len(batch["y"]))


def test_short_batches_are_taken_whole_and_other_callbacks_see_whole_batches():
    def split(batch):
        return split_batch(batch, 1, 0.2) if len(batch["x"]) == 8 else (batch, batch)

    given = [*batches(3), *batches(1, size=2)]  # a fifth of the last one is no sample
    ours, theirs, sizes = Net(), Net(), Sizes()
    by_hand(ours, given, accumulate=2, split=split)
    trainer(shares=(1, 0.2), accumulate_grad_batches=2, callbacks=[sizes]).fit(
        theirs, loader(given)
    )
    assert same(snapshot(ours.net), snapshot(theirs.net))
    assert sizes.seen == [8, 8, 8, 8, 8, 8, 2, 2] * 2


def test_both_passes_see_what_the_module_makes_of_a_batch():
    class Doubles(Net):
        def on_train_batch_start(self, batch, batch_idx):  # noqa: ARG002
            batch["x"] = 2 * batch["x"]

    doubled = [{"x": 2 * batch["x"], "y": batch["y"]} for batch in batches()]
    ours, theirs = Net(), Doubles()
    by_hand(ours, doubled)
    trainer().fit(theirs, loader(batches()))
    assert same(snapshot(ours.net), snapshot(theirs.net))


@pytest.mark.parametrize("shares", [(0, 1), (1, 1.5), (float("nan"), 0.5)])
def test_shares_are_checked_at_construction(shares):
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got"):
        CompressedPass(*shares)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"x": torch.randn(1, 8), "y": torch.zeros(1).long()}, "without a sample in a batch of 1"),
        ({"x": torch.randn(4, 8), "y": torch.zeros(3).long()}, r"got \[3, 4\] \(x: 4; y: 3\)"),
    ],
)
def test_batches_that_cannot_be_split_are_refused_before_a_step(bad, message):
    module, fit = Net(), trainer(shares=HALVES)
    before = snapshot(module.net)
    with pytest.raises(ValueError, match=message):
        fit.fit(module, loader([bad, *batches()]))
    assert same(snapshot(module.net), before)
    assert "training_step" not in vars(fit.strategy)
    trainer(shares=HALVES).fit(module, loader(batches()))
    twin = Net()
    by_hand(twin, batches(), split=split_batch)
    assert same(snapshot(module.net), snapshot(twin.net))


def test_afterwards_the_optimizer_takes_closures_again():
    fit = trainer(epochs=1)
    module = Net()
    fit.fit(module, loader(batches()))
    callback = fit.callbacks[0]
    assert (callback._optimizer, callback._isolation, callback._micro) == (None, None, [])
    assert "training_step" not in vars(fit.strategy)
    calls = itertools.count()

    def closure():
        next(calls)
        module.zero_grad()
        loss = module.net(batches()[0]["x"]).sum()
        loss.backward()
        return loss

    fit.optimizers[0].step(closure)
    assert next(calls) == 2


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_training_that_is_broken_off_lets_go_of_the_optimizer(error):
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise error
            return super().training_step(batch, batch_idx)

    module, fit, calls = Breaks(), trainer(), itertools.count()
    with pytest.raises((KeyError, KeyboardInterrupt, SystemExit)):
        fit.fit(module, loader(batches()))
    callback = fit.callbacks[0]
    assert (callback._optimizer, callback._isolation, callback._micro) == (None, None, [])
    assert "training_step" not in vars(fit.strategy)

    def closure():
        next(calls)
        module.zero_grad()
        loss = module.net(batches()[0]["x"]).sum()
        loss.backward()
        return loss

    fit.optimizers[0].step(closure)
    assert next(calls) == 2


def test_processes_are_to_be_given_the_same(monkeypatch):
    compared = []
    monkeypatch.setattr(integration, "require_alike_everywhere", compared.append)
    fit = trainer(epochs=1)
    fit.fit(Net(), loader(batches()))
    assert compared == fit.optimizers


def test_the_wrong_optimizers_are_refused():
    class Plain(Net):
        def configure_optimizers(self):
            return SGD(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="return a CrAM; the optimizers are: SGD"):
        trainer().fit(Plain(), loader(batches()))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_batches_that_cannot_be_had_again_are_refused():
    class Iterates(Net):
        def training_step(self, dataloader_iter):  # noqa: ARG002
            return None

    with pytest.raises(ValueError, match="dataloader_iter"):
        trainer().fit(Iterates(), loader(batches()))


def test_flattened_parameters_are_refused():
    module = Net()
    optimizer = module.make(module, SGD(module.parameters(), lr=0.1))
    stub = SimpleNamespace(optimizers=[optimizer], strategy=FSDPStrategy())
    with pytest.raises(ValueError, match="FSDPStrategy flattens"):
        CompressedPass().on_fit_start(stub, module)


def test_manual_optimization_enters_the_pass_itself():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            del batch_idx
            optimizer = self.optimizers()
            first, second = split_batch(batch)
            optimizer.zero_grad()
            self.manual_backward(cross_entropy(self.net(first["x"]), first["y"]))
            with optimizer.compressed():
                self.manual_backward(cross_entropy(self.net(second["x"]), second["y"]))
            optimizer.step()

    ours, theirs = Net(), Manual()
    by_hand(ours, batches(), epochs=1, split=split_batch)
    with pytest.raises(ValueError, match=r"shares of 0.5 and 0.5.*use torchcram.split_batch"):
        trainer(epochs=1, shares=HALVES).fit(theirs, loader(batches()))
    trainer(epochs=1).fit(theirs, loader(batches()))
    assert same(snapshot(ours.net), snapshot(theirs.net))


def test_accumulation_without_the_callback_is_refused():
    class Plain(Net):
        def training_step(self, batch):
            return cross_entropy(self.net(batch["x"]), batch["y"])

    def fit_without_callback(**options):
        module = Plain()
        alone = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        alone.fit(module, loader(batches()))
        return module

    with pytest.raises(RuntimeError, match=r"over 2 batches.*CompressedPass\(\)"):
        fit_without_callback(accumulate_grad_batches=2)
    ours = Net()
    by_hand(ours, batches(), epochs=1)
    assert same(snapshot(ours.net), snapshot(fit_without_callback().net))  # a closure will do
    with pytest.raises(RuntimeError, match="no compressed pass went before"):
        fit_without_callback(plugins=[MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))])


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_a_batch_that_is_left_out():
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    module, given = Skips(), batches(3)
    trainer(epochs=1).fit(module, loader(given))
    ours = Net()
    by_hand(ours, [given[0], given[2]], epochs=1)
    assert same(snapshot(ours.net), snapshot(module.net))
    module = Skips()  # now the last micro-batch of a step
    trainer(epochs=1, accumulate_grad_batches=2).fit(module, loader(given[:2]))
    ours = Net()
    optimizer = ours.configure_optimizers()["optimizer"]

    def backward():
        (cross_entropy(ours.net(given[0]["x"]), given[0]["y"]) / 2).backward()

    backward()
    with optimizer.compressed():
        backward()
    optimizer.step()
    assert same(snapshot(ours.net), snapshot(module.net))

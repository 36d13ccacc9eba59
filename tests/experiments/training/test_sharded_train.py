"""Trainings of two processes with sharded parameters against those of one."""

import shutil
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from runs import Stop, digits, recipe, run, stop_after, weights
from safetensors.torch import load_file
from torch import nn

from torchcram.experiments.models import build as models
from torchcram.experiments.ranks import Ranks
from torchcram.experiments.recipe.methods import MethodConfig
from torchcram.experiments.training import log as runlog
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.run_folder import read_run
from torchcram.experiments.training.shards import check_sharded, numbered_blocks
from torchcram.experiments.training.steps import EagerStep
from torchcram.sharding import fsdp_modules, is_sharded

RANKS, STEPS = 2, 5


class Stacked(nn.Module):
    """A net with numbered blocks, of which one has fewer rows than processes."""

    def __init__(self, classes):
        super().__init__()
        self.first = nn.Conv2d(1, 5, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.gate = nn.Linear(8, 1)
        self.last = nn.Linear(320, classes)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last((x * self.gate(x).sigmoid()).flatten(1))


@contextmanager
def small():
    """The net that recipes name here, and no TensorBoard, which is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runlog, "_tensorboard", lambda *_: None)
        patch.setitem(models._MODELS, "stacked", Stacked)
        yield


@pytest.fixture(scope="module", autouse=True)
def _small():
    with small():
        yield


def given(*sets, method="cram-plus-multi"):
    chosen = recipe("compress.watch=global:0.7", *sets, method=method)
    with small():
        return replace(chosen, model=replace(chosen.model, name="stacked"))


GIVEN = {
    "sgd": given(method="sgd"),
    "cram": given("cram.rho=0.05", "cram.operators=[global:0.5, uniform:0.8, int4]"),
    "micro-batches": given("train.accumulation=3"),
    "c-sam": given("cram.rule=C-SAM", "optimizer.name=adamw", "optimizer.lr=0.002"),
}


def seeing(kept):
    """Steps that note the model which they train."""

    class Seeing(EagerStep):
        def __init__(self, model, *others, **options):
            kept.append(model)
            super().__init__(model, *others, **options)

    return Seeing


def trainings(rank, folder):
    ranks, data = Ranks(rank, RANKS, rank, RANKS), digits()
    options = {"ranks": ranks, "sharded": True}
    with small():
        for name, chosen in GIVEN.items():
            kept = []
            run(folder / name, chosen, data, make_step=seeing(kept), **options)
            (model,) = kept
            assert all(map(is_sharded, model.parameters()))
            assert fsdp_modules(model) == [model, *model.blocks]
            rows = len(model.last.weight.to_local())
            assert rows == 5
        for steps in (STEPS + 2, STEPS + 1):
            with suppress(Stop):
                run(folder / "cut", GIVEN["cram"], data, make_step=stop_after(steps), **options)
        run(folder / "cut", GIVEN["cram"], data, **options)

        chosen = GIVEN["c-sam"]
        with suppress(Stop):
            run(folder / "begun", chosen, data, make_step=stop_after(STEPS + 2), **options)
        with suppress(Stop):
            stop = stop_after(STEPS + 2)
            run(folder / "replicated", chosen, data, make_step=stop, ranks=ranks)
        run(folder / "replicated", chosen, data, **options)
        with pytest.raises(ValueError, match=r"does not work with train.batch_size=63, which 2"):
            run(folder / "odd", given("train.batch_size=63"), data, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What one process did, below `alone`, and two with shards."""
    folder = tmp_path_factory.mktemp("sharded")
    for name, chosen in GIVEN.items():
        run(folder / "alone" / name, chosen, digits())
    assert run_ranks(RANKS, trainings, folder) == RANKS
    return folder


def assert_close(one, other):
    ours, theirs = (load_file(path / "model.safetensors") for path in (one, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", GIVEN)
def test_two_processes_with_shards_train_as_one(folder, name):
    one, two = folder / "alone" / name, folder / name
    assert_close(one, two)
    for ours, theirs in zip(read_log(one), read_log(two), strict=True):
        assert (ours.epoch, ours.lr) == (theirs.epoch, theirs.lr)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert ours.accuracy == pytest.approx(theirs.accuracy, abs=0.011)  # of 100 images
        assert ours.compressed_accuracy == pytest.approx(theirs.compressed_accuracy, abs=0.021)
        assert ours.mask_change == pytest.approx(theirs.mask_change, abs=1e-3)
    names = {str(path.relative_to(one)) for path in one.rglob("*")}
    assert names == {str(path.relative_to(two)) for path in two.rglob("*")}
    assert read_run(two)[1].finished.processes == 2


@pytest.mark.slow
def test_a_stopped_training_continues_exactly(folder):
    assert weights(folder / "cut") == weights(folder / "cram")


@pytest.mark.slow
def test_one_process_and_replicas_share_checkpoints_with_shards(folder, tmp_path):
    shutil.copytree(folder / "begun", tmp_path / "begun")
    run(tmp_path / "begun", GIVEN["c-sam"], digits())
    assert [record.processes for record in read_log(tmp_path / "begun")] == [2, 1, 1]
    for path in (tmp_path / "begun", folder / "replicated"):
        assert_close(folder / "alone" / "c-sam", path)


class Flat(nn.Sequential):
    """A net without numbered blocks, which is sharded as a whole."""

    def __init__(self, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, classes))


FLAT = recipe("compress.watch=null", epochs=2)


def train_flat(rank, folder):
    ranks, kept = Ranks(rank, RANKS, rank, RANKS), []
    with small(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(models._MODELS, "flat", Flat)
        chosen = replace(FLAT, model=replace(FLAT.model, name="flat"))
        options = {"ranks": ranks, "sharded": True, "make_step": seeing(kept)}
        run(folder / "two", chosen, digits(train=128, test=40), **options)
    assert type(kept[0]).__name__ == "FSDPFlat"  # and nothing is wrapped around it


def test_a_net_without_blocks_trains_as_in_one_process(tmp_path, monkeypatch):
    assert run_ranks(RANKS, train_flat, tmp_path) == RANKS
    monkeypatch.setitem(models._MODELS, "flat", Flat)
    chosen = replace(FLAT, model=replace(FLAT.model, name="flat"))
    run(tmp_path / "one", chosen, digits(train=128, test=40))
    assert_close(tmp_path / "one", tmp_path / "two")
    for ours, theirs in zip(*(read_log(tmp_path / name) for name in ("one", "two")), strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)


def test_blocks_are_the_modules_of_the_outermost_lists():
    net = Stacked(10)
    assert list(numbered_blocks(net)) == list(net.blocks)
    assert list(numbered_blocks(nn.Sequential(nn.Linear(2, 2)))) == []
    inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    nested = nn.Module()
    nested.lists = nn.ModuleList([inner])
    nested.other = nn.ModuleDict({"a": nn.Linear(2, 2)})
    assert list(numbered_blocks(nested)) == list(inner)


def test_blocks_of_a_decoder_are_its_layers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=1,
    )
    model = transformers.LlamaForCausalLM(config)
    assert list(numbered_blocks(model)) == list(model.model.layers)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (recipe("lora={}"), "does not work with the section lora"),
        (recipe("train.ema=0.9"), r"does not work with train.ema"),
        (recipe("cram.mask_interval=4"), "does not work with cram.mask_interval=4"),
        (recipe("train.batch_size=63"), "train.batch_size=63, which 2 processes do not divide"),
        (recipe("train.early_stopping={}"), "does not work with train.early_stopping"),
        (
            replace(
                recipe(method="sgd"),
                method=MethodConfig("dpf", "global:0.7", args={"end": "75 %"}),
            ),
            "does not work with the section method",
        ),
    ],
)
def test_what_shards_do_not_support_is_named_before_training(chosen, message):
    with pytest.raises(ValueError, match=message):
        check_sharded(chosen, Ranks(0, 2), holds_masks=False)


def test_one_process_has_nothing_to_shard(tmp_path):
    with pytest.raises(ValueError, match="needs several processes: start them by torchrun"):
        run(tmp_path / "run", recipe(), digits(), sharded=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="does not work with held masks"):
        check_sharded(recipe(), Ranks(0, 2), holds_masks=True)

"""Trainings of two processes against those of one."""

import json
import shutil
import warnings
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import assert_same_on_all_ranks, run_ranks
from runs import CPU, Stop, digits, one_thread, recipe, reseal, run, stop_after, weights
from safetensors.torch import load_file
from torch import nn

from torchcram.cli import options
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.models import build as models
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.recipe.methods import MethodConfig
from torchcram.experiments.results_store import load_or_measure
from torchcram.experiments.tasks import images
from torchcram.experiments.training import log as runlog
from torchcram.experiments.training import trainer
from torchcram.experiments.training.data_parallel import average_statistics_, seed_epoch
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.run_folder import read_run
from torchcram.experiments.training.steps import EagerStep
from torchcram.experiments.training.trainer import load_trained
from torchcram.experiments.training.weight_average import WeightAverage

# gates have no time to close here
pytestmark = pytest.mark.filterwarnings("ignore:.*training reached a sparsity")

RANKS, STEPS = 2, 5


def with_method(**section):
    return replace(recipe(method="sgd"), method=MethodConfig(**section))


METHODS = {
    "movement": with_method(
        name="movement", target="global:0.7", args={"end": "75 %", "interval": 3, "score_lr": 1.0}
    ),
    "l0": with_method(name="l0", target="uniform:0.7", args={"gate_lr": 5.0}),
}
GIVEN = {
    **METHODS,
    "sgd": recipe(method="sgd"),
    "cram": recipe(),
    "batches that cannot be halved": recipe("train.batch_size=63"),
    "adapters": recipe("lora={rank: 2}", "train.accumulation=2"),
    "micro-batches": recipe("train.batch_size=63", "train.accumulation=4"),
    "average": recipe("train.ema=0.8"),
    "c-sam": recipe("cram.rule=C-SAM", "optimizer.name=adamw", "optimizer.lr=0.002"),
}


def plain(classes):
    """A net without batch norm, which is the same on a part of a batch."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(384, classes)
    )


class Random(nn.Module):
    """The same with dropout, and a hook that cannot be sent to another process."""

    def __init__(self, classes):
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.3), *plain(classes))
        self.net.register_forward_hook(lambda *_: None)

    def forward(self, x):
        return self.net(x)


@contextmanager
def small():
    """Nets that a recipe may name, tests in four batches, and no TensorBoard, which is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "TEST_BATCH", (16, 30))
        patch.setattr(runlog, "_tensorboard", lambda *_: None)
        patch.setitem(models._MODELS, "plain", plain)
        patch.setitem(models._MODELS, "random", Random)
        yield


@pytest.fixture(scope="module", autouse=True)
def _small():
    with small():
        yield


def with_model(given, name):
    return replace(given, model=replace(given.model, name=name))


def keeping():
    """A list, and steps that put the model they train into it."""
    kept = []

    class Keeping(EagerStep):
        def __init__(self, model, *others, **options):
            kept.append(model)
            super().__init__(model, *others, **options)

    return kept, Keeping


@contextmanager
def averages():
    """A list that averages of weights are put into."""
    kept = []

    class Kept(WeightAverage):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            kept.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "WeightAverage", Kept)
        yield kept


def noting_seeds(seeds):
    """Steps that note the seed of the global generator at every epoch."""

    class Noting(EagerStep):
        def start_epoch(self, epoch):
            seeds.append(torch.initial_seed())
            super().start_epoch(epoch)

    return Noting


def without_draws(content):
    content["state"]["training"]["optimizer"]["cram"] = {}


def team_of(rank):
    return Ranks(rank, RANKS, rank, RANKS)


def trainings(rank, folder):
    """All trainings that two processes do here, in one go: processes take long to start."""
    ranks, data = team_of(rank), digits()
    heard = []
    with small():
        for name, given in GIVEN.items():
            kept, make_step = keeping()
            run(
                folder / name,
                with_model(given, "plain"),
                data,
                ranks=ranks,
                make_step=make_step,
                progress=lambda *news: heard.append(news),
            )
            assert_same_on_all_ranks(kept[0].state_dict())
        assert bool(heard) == (rank == 0)

        kept, make_step = keeping()
        with averages() as averaged:
            given = recipe("train.ema=0.8", epochs=2)
            trained = run(folder / "normed", given, data, ranks=ranks, make_step=make_step)
        for one in (kept[0], averaged[0]):
            assert_same_on_all_ranks(one.state_dict())
        for name, value in averaged[0].module.state_dict().items():
            assert torch.equal(value, trained.model.state_dict()[name]), name
        found = load_or_measure(folder / "normed", trained, data, device=CPU, ranks=ranks)
        assert found == load_or_measure(folder / "normed", trained, data, device=CPU, ranks=ranks)

        noisy = with_model(recipe(), "random")
        seeds = []
        run(folder / "noisy", noisy, data, ranks=ranks, make_step=noting_seeds(seeds))
        assert len({seed for both in ranks.all_gather(seeds) for seed in both}) == RANKS * 3
        cut = folder / ("cut" if rank == 0 else "not looked at")  # as on another machine
        for steps in (STEPS + 2, STEPS + 1):
            with suppress(Stop):
                run(cut, noisy, data, ranks=ranks, make_step=stop_after(steps))
        run(cut, noisy, data, ranks=ranks)

        for name, given in METHODS.items():
            cut, given = folder / f"{name}, cut", with_model(given, "plain")
            with suppress(Stop):
                run(cut, given, data, ranks=ranks, make_step=stop_after(STEPS + 2))
            run(cut, given, data, ranks=ranks)

        given = with_model(GIVEN["cram"], "plain")
        with suppress(Stop):
            run(folder / "begun by two", given, data, ranks=ranks, make_step=stop_after(STEPS + 2))
        run(folder / "begun by one", given, data, ranks=ranks)

        with suppress(Stop):
            run(folder / "altered", given, data, ranks=ranks, make_step=stop_after(2 * STEPS))
        if rank == 0:
            reseal(folder / "altered" / "checkpoints" / "epoch-0002.pt", without_draws)
        ranks.all_reduce_sum(0)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run(folder / "altered", given, data, ranks=ranks)
        refused = [warning for warning in told if "epoch-0002.pt is not used" in str(warning)]
        assert len(refused) == (rank == 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What one process did, below `alone`, and two."""
    folder = tmp_path_factory.mktemp("together")
    data = digits()
    for name, given in GIVEN.items():
        run(folder / "alone" / name, with_model(given, "plain"), data)
    given = with_model(GIVEN["cram"], "plain")
    with pytest.raises(Stop):
        run(folder / "begun by one", given, data, make_step=stop_after(STEPS + 2))
    assert run_ranks(RANKS, trainings, folder) == RANKS
    return folder


def assert_close(one, other):
    ours, theirs = (load_file(path / "model.safetensors") for path in (one, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", GIVEN)
def test_two_processes_train_as_one(folder, name):
    one, two = folder / "alone" / name, folder / name
    assert_close(one, two)
    for ours, theirs in zip(read_log(one), read_log(two), strict=True):
        assert (ours.epoch, ours.lr) == (theirs.epoch, theirs.lr)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        losses = [ours.compressed_loss, theirs.compressed_loss]
        assert losses == [None, None] or losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert ours.accuracy == pytest.approx(theirs.accuracy, abs=0.011)  # of 100 images
        assert (ours.processes, theirs.processes) == (1, 2)


def test_a_checkpoint_that_does_not_fit_is_passed_over_by_all(folder):
    assert weights(folder / "altered") == weights(folder / "cram")


def test_the_folder_is_that_of_one_process(folder):
    one, two = folder / "alone" / "cram", folder / "cram"
    names = {str(path.relative_to(one)) for path in one.rglob("*")}
    assert names == {str(path.relative_to(two)) for path in two.rglob("*")}
    assert (one / "recipe.yaml").read_bytes() == (two / "recipe.yaml").read_bytes()
    said = [json.loads((path / "run.json").read_text()) for path in (one, two)]
    assert "processes" not in said[0]["finished"]
    assert said[1]["finished"]["processes"] == 2
    assert said[0].keys() == said[1].keys()


def test_a_table_is_what_one_process_gives_from_the_same_model(folder, tmp_path):
    shutil.copytree(folder / "normed", tmp_path / "normed")
    trained = load_trained(tmp_path / "normed", CPU)
    with one_thread():
        alone = load_or_measure(
            tmp_path / "normed", trained, digits(), device=CPU, file="alone.json"
        )
    together = read_result(folder / "normed" / "result.json")
    assert together == alone
    assert together.seeds[0].processes == 2
    assert together.seeds[0].dense == read_log(folder / "normed")[-1].accuracy
    assert len({target.after for target in alone.seeds[0].targets}) > 3


def test_a_stopped_training_continues_exactly(folder):
    assert weights(folder / "cut") == weights(folder / "noisy")
    assert [record.epoch for record in read_log(folder / "cut")] == [1, 2, 3]
    assert not (folder / "not looked at").exists()


@pytest.mark.parametrize("name", METHODS)
def test_a_stopped_training_with_a_method_continues_exactly(folder, name):
    assert weights(folder / f"{name}, cut") == weights(folder / name)
    zeros = load_file(folder / name / "model.safetensors")["3.weight"] == 0
    assert 0.5 < zeros.float().mean() < 0.9


def test_one_process_continues_what_two_began_and_two_what_one_began(folder, tmp_path):
    shutil.copytree(folder / "begun by two", tmp_path / "begun")
    run(tmp_path / "begun", with_model(GIVEN["cram"], "plain"), digits())
    assert_close(folder / "alone" / "cram", tmp_path / "begun")
    assert [record.processes for record in read_log(tmp_path / "begun")] == [2, 1, 1]
    assert read_run(tmp_path / "begun")[1].finished.processes == 1
    assert_close(folder / "alone" / "cram", folder / "begun by one")
    assert [record.processes for record in read_log(folder / "begun by one")] == [1, 2, 2]


def small_things(rank, folder):
    with small():
        _small_things(team_of(rank), rank, folder)


def _small_things(ranks, rank, folder):
    data = digits()

    def refused(said, given, data=data, name="new", **others):
        with pytest.raises(ValueError, match=said):
            run(folder / name, given, data, ranks=ranks, **others)
        assert not (folder / name / "model.safetensors").exists()

    first = "process 1 has other settings than process 0: "
    refused(first + r"recipe.optimizer.lr is 0.3, not 0.2$", recipe(f"optimizer.lr=0.{2 + rank}"))
    refused(first + r"seed is 1, not 0$", recipe(), seed=rank)
    refused(first + r"data.train_images is 300, not 320", recipe(), digits(320 - 20 * rank))
    refused(first + r"eval_interval is 2, not 1$", recipe(), eval_interval=rank + 1)
    refused("a batch of 1 images cannot be divided into 2 parts", recipe("train.batch_size=1"))
    refused("it has log.jsonl but no run.json", recipe(), name="foreign")

    with pytest.raises(FloatingPointError, match="epoch 1: the training loss is"):
        run(folder / "bad", recipe("optimizer.lr=1e30", method="sgd"), data, ranks=ranks)

    layer = nn.BatchNorm2d(3)
    layer.running_mean.fill_(rank)
    layer.running_var.fill_(4 - rank)
    average_statistics_(nn.Sequential(layer), ranks)
    assert layer.running_mean.tolist() == [0.5] * 3
    assert layer.running_var.tolist() == [3.5] * 3

    def load(*_, **__):
        if rank == 1:
            raise FileNotFoundError(2, "No such file or directory", "data/digits")
        return data

    options.load = load  # of this process alone
    with pytest.raises(ValueError, match=r"process 1: data/digits: No such file or directory$"):
        options.load_in(ranks, recipe(), Path("data"))

    def fail():
        raise KeyError("the same everywhere")

    with pytest.raises(KeyError):
        ranks.run_on_all(fail)
    assert ranks.run_on_all(lambda: rank) == rank
    assert ranks.broadcast_from_rank0(lambda: rank) == 0


def test_what_is_wrong_is_an_error_in_every_process(tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "log.jsonl").touch()
    assert run_ranks(RANKS, small_things, tmp_path) == RANKS


def test_processes_draw_numbers_of_their_own():
    def drawn(*key):
        seed_epoch(*key)
        return float(torch.rand(()))

    assert drawn(Ranks(0, 2), 0, 1) == drawn(Ranks(0, 2), 0, 1)
    others = [(Ranks(1, 2), 0, 1), (Ranks(0, 2), 1, 1), (Ranks(0, 2), 0, 2)]
    assert len({drawn(*key) for key in [(Ranks(0, 2), 0, 1), *others]}) == 4
    torch.manual_seed(5)
    before = torch.get_rng_state()
    seed_epoch(SINGLE, 0, 1)
    assert torch.equal(torch.get_rng_state(), before)

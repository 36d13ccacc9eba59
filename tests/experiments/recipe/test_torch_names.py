"""Optimizers and schedulers of torch in recipes."""

import pytest
import torch
from runs import CPU, Stop, digits, recipe, reseal, run, stop_after, weights
from torch import nn
from torch.optim import SGD, AdamW, RMSprop, lr_scheduler

from torchcram import CrAM
from torchcram.experiments.recipe import Recipe, ScheduleConfig, load_recipe
from torchcram.experiments.recipe.build import build_batches, build_initial_model, build_optimizer
from torchcram.experiments.recipe.torch_names import OPTIMIZERS, SCHEDULERS
from torchcram.experiments.training import cuda_graph_steps as fast
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.schedule import lr_at
from torchcram.optim.graphs import is_capturable

NO_DECAY = "optimizer.weight_decay=0"
SCHEDULES = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 3], "gamma": 0.1},
    "ConstantLR": {"factor": 0.5, "total_iters": 2},
    "LinearLR": {"start_factor": 0.5, "total_iters": 3},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 4, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 4, "eta_min": 0.01},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 2},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "OneCycleLR": {"max_lr": 0.2},
}


@pytest.fixture(scope="module")
def data():
    return digits()


def optimizer_of(*overrides, method="sgd"):
    model = nn.Linear(4, 2)
    return build_optimizer(recipe(*overrides, method=method), model, seed=0)


def test_an_optimizer_gets_its_arguments():
    args = "optimizer.args={alpha: 0.5, momentum: 0.25}"
    optimizer = optimizer_of("optimizer.name=RMSprop", "optimizer.weight_decay=0.125", args)
    (group,) = optimizer.param_groups
    assert type(optimizer) is RMSprop
    assert [group[key] for key in ("lr", "alpha", "momentum")] == [0.05, 0.5, 0.25]
    assert group["weight_decay"] == 0.125
    wrapped = optimizer_of(
        "optimizer.name=AdamW", "optimizer.args={betas: [0.8, 0.9]}", method="cram-plus-multi"
    )
    assert isinstance(wrapped, CrAM)
    assert type(wrapped.base) is AdamW
    assert wrapped.base.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"Muon"}))
def test_every_optimizer_resumes_exactly(tmp_path, data, name):
    given = [f"optimizer.name={name}", "optimizer.lr=0.001", NO_DECAY]
    given = recipe(*given, "schedule.name=ExponentialLR", "schedule.args={gamma: 0.5}")
    run(tmp_path / "whole", given, data)
    with pytest.raises(Stop):
        run(tmp_path / "stopped", given, data, make_step=stop_after(7))
    run(tmp_path / "stopped", given, data)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    epochs = [record.epoch for record in read_log(tmp_path / "stopped")]
    assert epochs == [1, 2, 3]
    assert read_log(tmp_path / "stopped")[-1].lr == pytest.approx(0.001 / 4)


def test_state_of_another_shape_is_refused(tmp_path, data):
    given = recipe("optimizer.name=Adafactor", "optimizer.lr=0.001", NO_DECAY)
    with pytest.raises(Stop):
        run(tmp_path / "run", given, data, make_step=stop_after(7))

    def change(content):
        state = content["state"]["training"]["optimizer"]["state"][0]
        state["row_var"] = torch.ones(7)

    reseal(tmp_path / "run" / "checkpoints" / "epoch-0001.pt", change)
    with pytest.warns(UserWarning, match="its 'row_var' of parameter 0 is float32 of shape"):
        run(tmp_path / "run", given, data)


def expected_rates(name, args, count, lr=0.1):
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = getattr(lr_scheduler, name)(optimizer, **args)
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step() if len(rates) < count else None
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_every_scheduler_has_the_rates_that_torch_gives(name, interval):
    config = ScheduleConfig(name=name, warmup_epochs=1, args=SCHEDULES[name], interval=interval)
    rates = [lr_at(step, 3, config, lr=0.1, epochs=5) for step in range(15)]
    assert rates[:3] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])
    count = 4 if interval == "epoch" else 12
    args = dict(SCHEDULES[name])
    if name == "OneCycleLR":
        args.update(total_steps=count, cycle_momentum=False)
    if name == "CyclicLR":
        args.update(cycle_momentum=False)
    expected = expected_rates(name, args, count)
    if interval == "epoch":
        expected = [rate for rate in expected for _ in range(3)]
    assert rates[3:] == pytest.approx(expected)
    assert len(set(rates[3:])) > 1


def test_a_training_that_is_all_warm_up_has_no_use_for_a_scheduler():
    given = recipe("schedule.name=OneCycleLR", "schedule.warmup_epochs=3", epochs=3)
    assert lr_at(5, 2, given.schedule, lr=0.3, epochs=3) == pytest.approx(0.3)


def test_recipes_keep_what_they_said():
    given = recipe("optimizer.name=Adam", "optimizer.args={eps: 0.1}", "schedule.interval=epoch")
    assert Recipe.from_dict(given.to_dict()) == given
    assert given.to_dict()["optimizer"]["args"] == {"eps": 0.1}
    assert recipe().to_dict()["optimizer"].keys() == {
        *("name", "lr", "momentum", "weight_decay", "nesterov")
    }
    assert recipe().to_dict()["schedule"].keys() == {"name", "warmup_epochs"}
    hash(given)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["optimizer.name=rmsprop"], r"optimizer.name is 'rmsprop' \(did you mean 'RMSprop'\?\)"),
        (["optimizer.name=LBFGS"], "optimizer.name is 'LBFGS'.*; allowed: sgd, adamw, or of torch"),
        (
            ["optimizer.args={eps: 1}"],
            "optimizer.args is .*allowed: null, as optimizer.name is sgd",
        ),
        (
            ["optimizer.name=Adam", "optimizer.args={beta: 1}"],
            r"optimizer.args.beta is no known argument \(did you mean 'betas'\?\); allowed: betas",
        ),
        (["optimizer.name=Adam", "optimizer.args={lr: 1}"], "args.lr is no known argument"),
        (["optimizer.name=Adam", "optimizer.args={fused: true}"], "args.fused is no known"),
        (["optimizer.name=Adam", "optimizer.args={betas: [2, 3]}"], "Invalid beta parameter"),
        (["optimizer.name=Adam", "optimizer.args={betas: 3}"], "optimizer.args is {'betas': 3}: "),
        (["optimizer.name=Rprop"], "optimizer.weight_decay is 0.0005; allowed: 0, as Rprop has"),
        (["schedule.name=steplr"], r"schedule.name is 'steplr' \(did you mean 'StepLR'\?\)"),
        (["schedule.name=LambdaLR"], "schedule.name is 'LambdaLR'"),
        (["schedule.name=StepLR"], "schedule.args is {}: .*'step_size'"),
        (["schedule.args={gamma: 1}"], "allowed: null, as schedule.name is cosine"),
        (["schedule.interval=step"], "allowed: epoch, as schedule.name is cosine"),
        (["schedule.name=StepLR", "schedule.interval=batch"], "schedule.interval is 'batch'"),
        (
            ["schedule.name=StepLR", "schedule.args={step_size: 1, gama: 2}"],
            r"schedule.args.gama is no known argument \(did you mean 'gamma'\?\)",
        ),
        (
            ["schedule.name=OneCycleLR", "schedule.args={total_steps: 1}"],
            "schedule.args is .*allowed: arguments for 3 epochs",
        ),
        (
            ["schedule.name=ExponentialLR", "schedule.args={gamma: fast}"],
            "schedule.args is {'gamma': 'fast'}: ",
        ),
    ],
)
def test_what_is_not_allowed_is_named(texts, says):
    with pytest.raises(ValueError, match=says):
        recipe("schedule.warmup_epochs=0", *texts)


def test_early_stopping_needs_a_scheduler_that_counts_steps():
    texts = ["schedule={name: ExponentialLR, args: {gamma: 0.9}}", "train.early_stopping={}"]
    with pytest.raises(ValueError, match=r"schedule.interval is 'epoch'; allowed: step, as"):
        load_recipe("sst2/minilm-l6/adam", texts)
    given = load_recipe("sst2/minilm-l6/adam", [*texts, "schedule.interval=step"])
    assert given.schedule.interval == "step"


@pytest.mark.parametrize(
    ("texts", "captured"),
    [
        ([], True),
        (["optimizer.name=adamw"], True),
        (["optimizer.name=Adam"], True),
        (["optimizer.name=SGD", "optimizer.args={momentum: 0.9}"], True),
        (["optimizer.name=SGD", "optimizer.args={momentum: 0.9, dampening: 0.1}"], False),
        (["optimizer.name=RMSprop"], False),
        (["optimizer.name=NAdam"], False),
    ],
)
@pytest.mark.parametrize("method", ["sgd", "cram-plus-multi"])
def test_what_cannot_be_captured_is_taken_eagerly_with_one_warning(
    monkeypatch, recwarn, texts, captured, method
):
    given, data = recipe(*texts, method=method), digits(train=128, test=10)
    model = build_initial_model(given, classes=10, seed=0)
    optimizer = build_optimizer(given, model, seed=0)
    assert is_capturable(optimizer) is captured
    for kind in ("GraphStep", "EagerStep"):
        monkeypatch.setattr(fast, kind, lambda *_, kind=kind, **__: kind)
    fast._warn_eager.cache_clear()
    batches = build_batches(given, data, train=True, device=CPU, seed=0)
    for _ in range(2):
        step = fast.make_step(model, optimizer, batches, given.train, torch.device("cuda"))
        assert step == ("GraphStep" if captured else "EagerStep")
    assert len(recwarn) == (0 if captured else 1)

"""Methods by name: those of the library, and those that other packages register."""

from typing import Annotated, Optional

import pytest
from packages import install
from problems import BATCHES, batches, build, sgd, train

from torchcram import sparsity
from torchcram.baselines import (
    Baseline,
    GradualMagnitude,
    HeldMask,
    Scheduled,
    Steps,
    register_method,
)
from torchcram.baselines.registry import METHODS, find_method, method_names
from torchcram.experiments.recipe.methods import MethodConfig

CUT = '''
from torchcram.baselines import HeldMask, Steps, register_method

print("the package was imported")


@register_method("cut")
class Cut(HeldMask):
    """Prunes once, at a step of the training."""

    def __init__(self, model, base, operator, *, at: Steps, weights=None):
        super().__init__(model, base, operator, weights=weights)
        self.at = at

    def update_masks(self):
        if self.steps == self.at:
            self.set_masks(self.operator.select(self.weights))
            self.hold_()
'''
ANNOUNCED = "[torchcram.methods]\ncut = cut_module\n"


class Late(HeldMask):
    """Has times and a number.

    More about it.
    """

    def __init__(
        self,
        model,
        base,
        operator,
        *,
        at: Steps,
        pause: Optional[Steps] = None,  # noqa: UP045
        text: "Steps | None" = None,
        number: Annotated[int, "other"] = 3,
        weights=None,
    ):
        super().__init__(model, base, operator, weights=weights)
        self.args = (at, pause, text, number)


def test_arguments_times_and_the_line_come_from_the_class():
    assert register_method("late")(Late) is Late
    method = find_method("late")
    assert method.kind is Late
    assert method.summary == "Has times and a number."
    assert method.arguments == ["at", "pause", "text", "number"]
    assert method.times == ["at", "pause", "text"]
    assert method.required == ["at"]
    assert method_names() == [*METHODS, "late"]


def test_a_registered_method_is_one_of_recipes():
    register_method("late")(Late)
    args = {"at": "1 epoch", "pause": "50 %", "number": 9}
    config = MethodConfig(name="late", target="global:0.5", args=args)
    model = build()
    options = {"weights": None, "epochs": 3, "steps_per_epoch": 4, "seed": 0}
    assert config.build(model, sgd(model), **options).args == (4, 6, None, 9)
    with pytest.raises(ValueError, match=r"args\.at is missing"):
        MethodConfig(name="late", target="global:0.5")
    with pytest.raises(ValueError, match=r"'lat' \(did you mean 'late'\?\).*cram, .*platon, late"):
        MethodConfig(name="lat", target="global:0.5")


def test_a_schedule_is_given_by_its_arguments():

    @register_method("scheduled")
    class Own(GradualMagnitude):
        """A schedule of its own."""

    method = find_method("scheduled")
    assert method.arguments == ["end", "begin", "interval", "initial"]
    assert method.times == ["end", "begin", "interval"]
    model = build()
    arguments = {"end": 5, "interval": 2}
    optimizer = method.build(model, sgd(model), "global:0.5", arguments=arguments)
    assert isinstance(optimizer, Own)
    assert isinstance(optimizer, Scheduled)
    assert (optimizer.schedule.end, optimizer.schedule.interval) == (5, 2)


def test_a_package_is_imported_when_its_name_is_read(tmp_path, monkeypatch, capsys):
    install(tmp_path, monkeypatch, entry_points=ANNOUNCED, cut_module=CUT)
    assert method_names()[-1] == "cut"
    assert not capsys.readouterr().out
    config = MethodConfig(name="cut", target="nm:2:4", args={"at": "50 %"})
    assert capsys.readouterr().out == "the package was imported\n"
    model = build()
    options = {"weights": None, "epochs": 1, "steps_per_epoch": BATCHES, "seed": 0}
    optimizer = config.build(model, sgd(model), **options)
    assert optimizer.at == BATCHES // 2
    train(model, optimizer, batches()[: BATCHES // 2])
    assert sparsity(optimizer.weights) == 0
    train(model, optimizer, batches()[BATCHES // 2 :])
    assert sparsity(optimizer.weights) == 0.5


def test_names_that_are_taken_and_other_classes_are_refused():
    for name in ("dpf", "cram"):
        with pytest.raises(ValueError, match=f"'{name}' is taken by torchcram itself"):
            register_method(name)(Late)
    with pytest.raises(ValueError, match="allowed is a letter"):
        register_method("a b")(Late)
    register_method("late")(Late)
    with pytest.raises(ValueError, match=r"'late' is taken by .*Late"):
        register_method("late")(GradualMagnitude)
    with pytest.raises(ValueError, match="<class 'dict'> is not a subclass of Baseline"):
        register_method("mine")(dict)

    class NoWeights(Baseline):
        def __init__(self, model, base, operator):
            super().__init__(model, base, operator)

    with pytest.raises(ValueError, match="needs model, base, operator, weights; missing: weights"):
        register_method("mine")(NoWeights)


def test_a_broken_package_is_named(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, entry_points=ANNOUNCED, cut_module="import not_installed")
    with pytest.raises(ValueError, match=r"method 'cut' of blocks-package 1.5 \(cut_module\) cann"):
        MethodConfig(name="cut", target="global:0.5")
    assert find_method("dpf") is METHODS["dpf"]

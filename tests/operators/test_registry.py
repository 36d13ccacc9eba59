import pickle
import re
import sys
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from packages import BLOCKS, install, install_blocks
from torch import nn

from torchcram import Chain, CrAM, Operator, Quantize, Sparsifier, parse_operator
from torchcram import register_operator as register
from torchcram.experiments.recipe import load_recipe
from torchcram.operators.parse import parse_without_pruners
from torchcram.pruners import Pruner, Wanda, parse_pruner, prune_, register_pruner
from torchcram.report.summary import sort_operators


@dataclass(frozen=True)
class Half(Sparsifier):
    """Keeps every `step`-th weight."""

    step: int = 2

    @classmethod
    def from_text(cls, text):
        return cls(int(text or 2))

    def select(self, scores):
        return {
            name: (torch.arange(score.numel()) % self.step == 0).view_as(score)
            for name, score in scores.items()
        }

    def __str__(self):
        return "half" if self.step == 2 else f"half:{self.step}"


def test_an_operator_that_draws_stands_for_a_range():
    class Drawing(Half):
        def draw(self, generator):
            return Half(2 + int(torch.randint(3, (), generator=generator)))

    assert Drawing().is_range
    assert not Half().is_range
    assert not Quantize(4).is_range
    assert parse_operator("global:0.3-0.9").is_range
    assert not parse_operator("global:0.3").is_range


def test_a_decorated_class_is_read_by_its_name():
    assert register("half")(Half) is Half
    assert parse_operator("half:3") == Half(3)
    assert parse_operator("half") == parse_operator("half:2") == Half()
    assert parse_operator("half:3 + int8") == Chain(Half(3), Quantize(8))
    assert parse_without_pruners("obs@half:3+int8") == Chain(Half(3), Quantize(8))
    assert parse_pruner("wanda@half:3") == Wanda(Half(3))
    assert pickle.loads(pickle.dumps(parse_operator("half:3"))) == Half(3)  # noqa: S301
    model = nn.Linear(4, 2)
    optimizer = CrAM(model, torch.optim.SGD(model.parameters(), lr=0.1), "half:4")
    assert [str(operator) for operator in optimizer.operators] == ["half:4"]


def test_what_it_refuses_names_the_whole_text():
    register("half")(Half)
    with pytest.raises(ValueError, match=re.escape("operator 'int8+half:x': invalid literal")):
        parse_operator("int8+half:x")


def test_a_misspelled_name_is_corrected():
    register("half")(Half)
    with pytest.raises(ValueError, match=re.escape("(did you mean half:3?); allowed: global")):
        parse_operator("hafl:3")
    with pytest.raises(ValueError, match="of other packages: half"):
        parse_operator("wholly-unlike:3")


def test_a_name_that_is_taken_is_refused_with_who_has_it():
    register("half")(Half)
    register("half")(Half)  # a cell that runs twice

    @dataclass(frozen=True)
    class Other(Half):
        pass

    with pytest.raises(ValueError, match=r"'half' is taken by .*test_registry.Half; .*Other needs"):
        register("half")(Other)
    for name in ("global", "nm", "int", "int4", "dense"):
        with pytest.raises(ValueError, match=f"'{name}' is taken by torchcram itself"):
            register(name)(Half)
    for name in ("", "half:2", "a+b", "a@b", "2half", "half "):
        with pytest.raises(ValueError, match="allowed is a letter, then letters"):
            register(name)(Half)


def test_what_a_class_lacks_is_said():

    @dataclass
    class Thawed:
        pass

    with pytest.raises(ValueError, match="is no subclass of Operator"):
        register("thawed")(Thawed)

    class NoText(Operator):
        compress_ = Operator.recompress_

    with pytest.raises(ValueError, match="NoText needs a classmethod from_text"):
        register("no-text")(NoText)
    NoText.from_text = classmethod(lambda cls, _: cls())
    with pytest.raises(ValueError, match="must be a frozen dataclass: put @register_operator"):
        register("no-text")(NoText)


@pytest.mark.parametrize("text", ["halves:2", "half:4", "half:3+int8", "half@3"])
def test_text_and_operator_must_be_inverse(text):
    register("half")(dataclass(frozen=True)(type("Wrong", (Half,), {"__str__": lambda _: text})))
    with pytest.raises(ValueError, match=f"not inverse, as .* is {re.escape(repr(text))}"):
        parse_operator("half:3")


def test_from_text_must_return_an_operator():
    wrong = type("Wrong", (Half,), {"from_text": classmethod(lambda _, text: text)})
    register("half")(dataclass(frozen=True)(wrong))
    with pytest.raises(ValueError, match=r"Wrong.from_text\('3'\) returned '3'"):
        parse_operator("half:3")


@dataclass(frozen=True)
class Shaky(Pruner):
    """Adds noise of a size to the magnitudes."""

    letters: ClassVar = {"n": "noise", "t": "times"}
    noise: float = 0.5
    times: int = 1

    def prune_(self, weights, calibration):
        calibration.run()
        return self.pattern.compress_(weights)


def test_a_decorated_pruner_is_read_with_its_options():
    register_pruner("shaky")(Shaky)
    pruner = parse_pruner("shaky:n2:t3@nm:2:4")
    assert (pruner.noise, pruner.times, str(pruner)) == (2.0, 3, "shaky:n2.0:t3@nm:2:4")
    assert parse_pruner(str(pruner)) == pruner
    model = nn.Linear(8, 2)
    masks = prune_(model, "shaky@nm:2:4", [torch.randn(2, 8)])
    assert masks["weight"].float().mean() == 0.5
    with pytest.raises(ValueError, match=r"\(did you mean shaky\?\).* of other packages: shaky"):
        parse_pruner("shaki@nm:2:4")
    with pytest.raises(ValueError, match=r"option 't1.5'.*n \(noise\), t \(times\)"):
        parse_pruner("shaky:t1.5@nm:2:4")


def test_pruners_that_cannot_be_registered():
    with pytest.raises(ValueError, match="'obs' is taken by torchcram itself"):
        register_pruner("obs")(Shaky)
    with pytest.raises(ValueError, match="is no subclass of Pruner"):
        register_pruner("half")(Half)

    @dataclass(frozen=True)
    class NoDefault(Shaky):
        letters: ClassVar = {"k": "keep"}
        keep: tuple = field(default=())

    with pytest.raises(ValueError, match="'k' for 'keep'; allowed is one letter for a field"):
        register_pruner("no-default")(NoDefault)


def test_a_package_is_imported_when_its_name_is_read(tmp_path, monkeypatch, capsys):
    install_blocks(tmp_path, monkeypatch)
    parse_operator("global:0.9")
    with pytest.raises(ValueError, match="of other packages: blocks"):
        parse_operator("wholly-unlike:3")
    assert not capsys.readouterr().out
    operator = parse_operator("blocks:0.75")
    assert capsys.readouterr().out == "blocks were imported\n"
    assert str(operator) == "blocks:0.75"
    assert str(parse_pruner("blocks-obs:m8@blocks:0.5+int8")) == "blocks-obs:m8@blocks:0.5+int8"
    assert not capsys.readouterr().out


def test_a_misspelled_name_of_a_package_is_corrected(tmp_path, monkeypatch):
    install_blocks(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=re.escape("(did you mean blocks:0.75?)")):
        parse_operator("block:0.75")
    with pytest.raises(ValueError, match=re.escape("(did you mean blocks-obs?)")):
        parse_pruner("block-obs@nm:2:4")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import not_installed", "cannot be imported: ModuleNotFoundError: No module named"),
        ("Blocks = 3", "nothing there is decorated with @register_operator('blocks')"),
        ("raise SyntaxError('odd')", "cannot be imported: SyntaxError: odd"),
    ],
)
def test_a_broken_package_is_named(tmp_path, monkeypatch, code, says):
    points = "[torchcram.operators]\nblocks = blocks_module:Blocks\n"
    install(tmp_path, monkeypatch, entry_points=points, blocks_module=code)
    named = "operator 'blocks:0.75': operator 'blocks' of blocks-package 1.5 (blocks_module:Blocks)"
    with pytest.raises(ValueError, match=re.escape(f"{named} ")) as error:
        parse_operator("blocks:0.75")
    assert says in str(error.value)
    assert str(parse_operator("global:0.9")) == "global:0.9"
    sys.modules.pop("blocks_module", None)


def test_two_packages_of_one_name_are_named(tmp_path, monkeypatch):
    install_blocks(tmp_path / "one", monkeypatch)
    points = "[torchcram.operators]\nblocks = other_blocks\n"
    install(tmp_path / "two", monkeypatch, name="others", entry_points=points, other_blocks=BLOCKS)
    with pytest.raises(ValueError, match=r"announced by (blocks-package|others) 1.5 and "):
        parse_operator("blocks:0.75")


def test_recipes_and_reports_know_the_names(tmp_path, monkeypatch):
    install_blocks(tmp_path, monkeypatch)
    overrides = ["cram.operators=[blocks:0.75]", "compress.to=[blocks:.5, blocks-obs@blocks:0.5]"]
    recipe = load_recipe("digits/convnet-digits/cram-plus-multi", overrides)
    assert recipe.cram.operators == ("blocks:0.75",)
    assert recipe.compress.to == ("blocks:0.5", "blocks-obs@blocks:0.5")
    with pytest.raises(ValueError, match=r"compress.to\[0\] is .*of other packages: blocks"):
        load_recipe("digits/convnet-digits/sgd", ["compress.to=[wholly-unlike:0.5]"])
    texts = ["unknown:1", "blocks-obs@nm:2:4", "obs@nm:2:4", "blocks:0.9", "blocks:0.5", "nm:2:4"]
    assert sort_operators(texts) == [
        *("nm:2:4", "blocks:0.5", "blocks:0.9", "obs@nm:2:4", "blocks-obs@nm:2:4", "unknown:1"),
    ]

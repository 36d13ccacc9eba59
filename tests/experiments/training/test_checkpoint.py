import copy
import hashlib
import io
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import CPU
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from torchcram.experiments.io.dict_diff import explain_differences
from torchcram.experiments.training.checkpoint import (
    forked_rng,
    load_latest,
    load_state_,
    save_checkpoint,
    state_of,
)
from torchcram.experiments.training.weight_average import WeightAverage

WHO = {"recipe": {"cram": {"rho": 0.1, "operators": ["global:0.5"]}, "name": "a/b/c"}, "seed": 0}


def state(value=1.0):
    return {"model": {"w": torch.full((3,), value)}, "count": 7, "pairs": [("a", 1)]}


def save(folder, epoch, value=None):
    return save_checkpoint(folder, epoch, state(epoch if value is None else value), identity=WHO)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with checkpoints of epochs 1 and 2, only ever copied."""
    folder = tmp_path_factory.mktemp("two")
    save(folder, 1)
    save(folder, 2)
    return folder


def damaged(two, content):
    """Loads from a copy of `two` whose newest file holds `content`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(two / "epoch-0001.pt", folder)
        (folder / "epoch-0002.pt").write_bytes(content)
        with pytest.warns(UserWarning, match=r"epoch-0002\.pt is not used") as told:
            found = load_latest(folder, WHO)
        assert len(told) == 1
        return found


def test_what_was_saved_comes_back(tmp_path):
    save(tmp_path / "new", 12, 3.0)
    epoch, found = load_latest(tmp_path / "new", WHO)
    assert epoch == 12
    assert torch.equal(found["model"]["w"], torch.full((3,), 3.0))
    assert (found["count"], found["pairs"]) == (7, [("a", 1)])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["epoch-0012.pt"]


def test_nothing_is_found_where_nothing_is(tmp_path):
    assert load_latest(tmp_path, WHO) is None
    assert load_latest(tmp_path / "missing", WHO) is None


def test_the_two_newest_are_kept(tmp_path):
    for epoch in (1, 2, 3, 9, 10):
        save(tmp_path, epoch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-0009.pt", "epoch-0010.pt"]
    assert load_latest(tmp_path, WHO)[0] == 10


def test_a_bad_file_of_a_later_epoch_does_not_push_good_ones_out(tmp_path):
    (tmp_path / "epoch-9999.pt").write_bytes(b"no checkpoint")
    save(tmp_path, 1)
    save(tmp_path, 2)
    with pytest.warns(UserWarning, match=r"epoch-9999\.pt is not used: it is not a checkpoint"):
        assert load_latest(tmp_path, WHO)[0] == 2
    assert (tmp_path / "epoch-0001.pt").exists()


def test_epochs_beyond_four_digits(tmp_path):
    save(tmp_path, 9999)
    save(tmp_path, 10000)
    assert load_latest(tmp_path, WHO)[0] == 10000


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_file_cut_off_anywhere_is_named_and_the_one_before_is_used(two, data):
    whole = (two / "epoch-0002.pt").read_bytes()
    length = data.draw(st.integers(0, len(whole) - 1))
    epoch, found = damaged(two, whole[:length])
    assert epoch == 1
    assert float(found["model"]["w"][0]) == 1


@given(st.data(), st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_byte_changed_anywhere_is_noticed(two, data, change):
    whole = bytearray((two / "epoch-0002.pt").read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= change
    assert damaged(two, bytes(whole))[0] == 1


@given(st.binary(max_size=200))
@settings(max_examples=30, deadline=None)
def test_a_foreign_file_is_refused(two, content):
    assert damaged(two, content)[0] == 1


def sealed(payload):
    return (
        b"torchcram-checkpoint 1 " + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload
    )


def test_nothing_in_a_file_is_executed(two, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    buffer = io.BytesIO()
    torch.save({"identity": WHO, "epoch": 2, "state": Evil()}, buffer)
    assert damaged(two, sealed(buffer.getvalue()))[0] == 1
    assert not (tmp_path / "executed").exists()


@given(st.data(), st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_content_that_was_altered_and_sealed_again_ends_in_no_traceback(two, data, change):
    whole = bytearray((two / "epoch-0002.pt").read_bytes().partition(b"\n")[2])
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[place] ^= change
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shutil.copy(two / "epoch-0001.pt", name)
        Path(name, "epoch-0002.pt").write_bytes(sealed(bytes(whole)))
        try:
            assert load_latest(Path(name), WHO)[0] in (1, 2)
        except ValueError as error:
            assert "belongs to another run" in str(error)  # noqa: PT017


def test_a_file_under_the_name_of_another_epoch_is_refused(two):
    assert damaged(two, (two / "epoch-0001.pt").read_bytes())[0] == 1


def test_a_plain_file_of_torch_is_refused(two):
    buffer = io.BytesIO()
    torch.save(state(), buffer)
    assert damaged(two, buffer.getvalue())[0] == 1
    assert damaged(two, sealed(buffer.getvalue()))[0] == 1


def test_a_sealed_file_of_something_else_is_refused(two):
    for content in (
        {"identity": 3, "epoch": 2, "state": state()},
        {"identity": WHO, "epoch": 2, "state": 3},
    ):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        assert damaged(two, sealed(buffer.getvalue()))[0] == 1


def test_all_bad_is_like_none(tmp_path):
    for epoch in (1, 2):
        (tmp_path / f"epoch-000{epoch}.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match="not used") as told:
        assert load_latest(tmp_path, WHO) is None
    assert len(told) == 2


def test_another_run_is_an_error_that_names_what_differs(two):
    other = {"recipe": {"cram": {"rho": 0.2, "operators": ["global:0.5"]}, "name": "a/b/c"}}
    with pytest.raises(ValueError, match=r"epoch-0002\.pt belongs to another run") as caught:
        load_latest(two, other)
    assert "recipe.cram.rho is 0.1, not 0.2" in str(caught.value)
    assert "seed is 0, but not set here" in str(caught.value)
    assert "operators" not in str(caught.value)


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".epoch-0002.pt.123.tmp").write_bytes(b"half")
    assert load_latest(tmp_path, WHO)[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-0001.pt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_while_writing_leaves_what_was_there(tmp_path, monkeypatch, call):
    save(tmp_path, 1)

    def fail(*_):
        raise OSError("the disk is full")

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    for epoch in (1, 2):
        with pytest.raises(OSError, match="full"):
            save(tmp_path, epoch, 5.0)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-0001.pt"]
    assert float(load_latest(tmp_path, WHO)[1]["model"]["w"][0]) == 1


def test_a_whole_file_gives_no_warning(two):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_latest(two, WHO)[0] == 2


def test_differences_are_named_by_key():
    found = {"a": {"b": 1, "c": [1, 2]}, "d": None, "e": {}}
    asked = {"a": {"b": 2, "c": [1, 2]}, "d": {"x": 3}, "e": {}}
    assert explain_differences(found, found) == []
    assert explain_differences(found, asked) == [
        "a.b is 1, not 2",
        "d is None, but not set here",
        "d.x is not set, but 3 here",
    ]


def stepped(form):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=form)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    cross_entropy(model(torch.randn(2, 3, 3, 3)), torch.tensor([0, 1])).backward()
    optimizer.step()
    return model, optimizer


def test_groups_are_not_saved():
    state = state_of(*stepped(torch.contiguous_format), CPU)
    assert state.keys() == {"model", "optimizer", "random"}
    assert state["optimizer"].keys() == {"state"}
    assert state["random"].keys() == {"cpu"}


def test_an_average_is_saved_and_loaded():
    model, optimizer = stepped(torch.contiguous_format)
    average, other = WeightAverage(model, 0.9), WeightAverage(model, 0.9)
    average.update_parameters(model)
    with torch.no_grad():
        average.module[0].weight.add_(1)
    state = state_of(model, optimizer, CPU, average=average)
    load_state_(model, optimizer, CPU, state=state, average=other)
    assert torch.equal(other.module[0].weight, model[0].weight + 1)
    assert int(other.n_averaged) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("average"), "its state has no 'average'"),
        (lambda state: state["average"].pop("n_averaged"), "its average of the weights has no "),
        (lambda state: state["average"]["n_averaged"].fill_(-10), "is that of -10 steps"),
        (lambda state: state.update(average=3), "its average of the weights is 3, not a mapping"),
        (
            lambda state: state["average"].update({"module.0.bias": torch.ones(2)}),
            r"its 'module.0.bias' is float32 of shape \(2,\); expected: float32 of shape \(4,\)",
        ),
    ],
)
def test_a_wrong_average_is_named_and_nothing_loaded(change, said):
    model, optimizer = stepped(torch.contiguous_format)
    average = WeightAverage(model, 0.9)
    average.update_parameters(model)
    state = state_of(model, optimizer, CPU, average=average)
    state = copy.deepcopy(state)
    change(state)
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(ValueError, match=said):
        load_state_(model, optimizer, CPU, state=state, average=average)
    assert not model[0].weight.any()


def test_state_takes_the_layout_of_the_parameters_it_is_for():
    model, optimizer = stepped(torch.contiguous_format)
    other, twin = stepped(torch.channels_last)
    load_state_(other, twin, CPU, state=state_of(model, optimizer, CPU))
    weight, moment = other[0].weight, twin.state[other[0].weight]["momentum_buffer"]
    assert moment.stride() == weight.stride() != model[0].weight.stride()
    assert torch.equal(moment, optimizer.state[model[0].weight]["momentum_buffer"])
    assert torch.equal(weight, model[0].weight)


def test_random_numbers_go_on_where_they_were():
    pair = stepped(torch.contiguous_format)
    before = torch.get_rng_state()
    with forked_rng(CPU, 5):
        first = torch.rand(3)
        state = state_of(*pair, CPU)
        expected = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with forked_rng(CPU, 5):
        assert torch.equal(torch.rand(3), first)
        torch.rand(10)
        load_state_(*pair, CPU, state=state)
        assert torch.equal(torch.rand(3), expected)

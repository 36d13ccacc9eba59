from dataclasses import replace

import pytest
import torch
from runs import CPU

from torchcram import compress, masks_of
from torchcram.experiments.bench.candidates import (
    candidates_of_run,
    known_accuracies,
)
from torchcram.experiments.evaluation.compressed_models import one_shot, read_targets
from torchcram.experiments.io.weights import load_model_
from torchcram.experiments.results_store import load_or_measure

TARGETS = ["global:0.9", "nm:2:4", "global:0.8+int4", "wanda@uniform:0.5"]


def candidates(trained, data, targets=TARGETS, known=None):
    said = []
    found = candidates_of_run(
        trained[1], data, targets, device=CPU, known=known, report=said.append
    )
    return list(found), said


@pytest.mark.filterwarnings("ignore:nm.2.4 leaves dense")
def test_models_and_accuracies_are_those_of_one_shot(trained, data, tmp_path):
    one = trained[1]
    expected = one_shot(
        one.model, one.recipe, data, TARGETS, device=CPU, seed=0, save_to=tmp_path / "small"
    )
    (dense, *found), said = candidates(trained, data, known={})
    assert (dense.target, dense.accuracy, dense.sparsity) == ("dense", one.finished.accuracy, 0)
    assert [candidate.target for candidate in found] == TARGETS
    assert [candidate.accuracy for candidate in found] == [target.after for target in expected]
    assert [candidate.sparsity for candidate in found] == [target.sparsity for target in expected]
    for candidate in found:
        other = compress(one.model, "int8")
        load_model_(other, tmp_path / "small" / f"{candidate.target.replace(':', '-')}.safetensors")
        mine = candidate.model.state_dict()
        assert all(torch.equal(mine[name], value) for name, value in other.state_dict().items())
    assert said[:2] == ["compressing to global:0.9", "testing global:0.9"]


def test_what_is_known_is_not_tested_again(trained, data):
    (_, known, new), said = candidates(trained, data, ["int4", "int8"], known={"int4": 0.125})
    assert known.accuracy == 0.125
    assert new.accuracy is not None
    assert said == ["compressing to int4", "compressing to int8", "testing int8"]


def test_without_accuracy_nothing_is_tested(trained, data):
    found, said = candidates(trained, data, ["int4"])
    assert [candidate.accuracy for candidate in found] == [None, None]
    assert said == ["compressing to int4"]


def test_the_trained_model_stays_as_it_is(trained, data):
    before = {name: value.clone() for name, value in trained[1].model.state_dict().items()}
    found, _ = candidates(trained, data, ["global:0.9"])
    assert not any(candidate.model is trained[1].model for candidate in found)
    after = trained[1].model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(not candidate.model.training for candidate in found)


def test_accuracies_come_from_the_result_of_the_same_training(trained, data, tmp_path):
    folder, one = trained
    assert known_accuracies(tmp_path, one) == {}
    result = load_or_measure(tmp_path, one, data, device=CPU)
    known = known_accuracies(tmp_path, one)
    assert known == {target.operator: target.after for target in result.seeds[0].targets}
    assert set(known) == {"global:0.5", "int4"}
    other = replace(one, finished=replace(one.finished, accuracy=0.125))
    assert known_accuracies(tmp_path, other) == {}
    (tmp_path / "result.json").write_text("{}")
    assert known_accuracies(tmp_path, one) == {}
    assert folder != tmp_path


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["half"], "'half'"),
        (["global:0.3-0.9"], "is a range"),
        (["int4", "int4"], "'int4' is given twice"),
        (["global:.5", "global:0.5"], "'global:0.5' is given twice"),
    ],
)
def test_bad_targets_are_refused(targets, said):
    with pytest.raises(ValueError, match=said):
        read_targets(targets)


def test_zeros_of_the_case_are_those_of_its_model(trained, data):
    (_, candidate), _ = candidates(trained, data, ["global:0.9"])
    kept = sum(int(mask.sum()) for mask in masks_of(candidate.weights).values())
    total = sum(weight.numel() for weight in candidate.weights.values())
    assert candidate.sparsity == pytest.approx(1 - kept / total)

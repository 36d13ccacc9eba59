import shutil
from dataclasses import replace

import pytest
from result_samples import result, seed, sgd
from runs import CPU, digits, one_thread, recipe, run

from torchcram.experiments.evaluation.results import write_result
from torchcram.experiments.results_store import load_or_measure
from torchcram.report.sources import merge_seeds, read_sources

GIVEN = recipe("compress.to=[global:0.5]", method="sgd", epochs=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    data, found = digits(), []
    for number in (1, 0):
        folder = tmp_path_factory.mktemp("seeds") / f"seed{number}"
        trained = run(folder, GIVEN, data, seed=number)
        with one_thread():
            load_or_measure(folder, trained, data, device=CPU)
        found.append(folder)
    return found


def test_seeds_of_a_recipe_become_one_result_with_all_their_logs(folders, tmp_path):
    write_result(sgd(), tmp_path / "file.json")
    results, logs = read_sources([folders[0], tmp_path / "file.json", folders[1]])
    assert [[one.seed for one in found.seeds] for found in results] == [[0, 1], [0]]
    assert results[1] == sgd()
    assert [(log.result, log.seed) for log in logs] == [(0, 1), (0, 0)]
    assert [record["epoch"] for record in logs[1].records] == [1]


def test_the_same_seed_twice_stays_apart(folders, tmp_path):
    copy = shutil.copytree(folders[0], tmp_path / "copy")
    results, logs = read_sources([folders[0], copy])
    assert len(results) == 2
    assert [(log.result, log.seed) for log in logs] == [(0, 1), (1, 1)]


def test_only_the_same_recipe_is_merged():
    one = result("m", [seed(0, 0.9, {"int4": 0.8})])
    other = replace(one, recipe={**one.recipe, "train": {"epochs": 21}}, seeds=(seed(1, 0.9, {}),))
    titled = replace(one, recipe={**one.recipe, "title": "T"}, seeds=(seed(2, 0.9, {}),))
    assert merge_seeds([one, other]) == [one, other]
    (merged,) = merge_seeds([titled, one])
    assert [found.seed for found in merged.seeds] == [0, 2]


def test_what_is_no_source_is_named(folders, tmp_path):
    with pytest.raises(ValueError, match="is neither a run folder nor a folder of results"):
        read_sources([tmp_path])
    copy = shutil.copytree(folders[0], tmp_path / "copy")
    (copy / "result.json").unlink()
    with pytest.raises(
        ValueError, match=r"has no result\.json yet: finish its training, or run `torch"
    ):
        read_sources([copy])
    with pytest.raises(FileNotFoundError, match="missing"):
        read_sources([tmp_path / "missing.json"])

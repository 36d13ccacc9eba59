import json
import multiprocessing
import shutil
from dataclasses import replace

import pytest
from runs import CPU, digits, one_thread, recipe, run

from torchcram.experiments import results_store as module
from torchcram.experiments.evaluation.results import SeedResult, read_result
from torchcram.experiments.results_store import add_to_results, check_results, load_or_measure

GIVEN = recipe("compress.to=[global:0.5, int4]", method="sgd", epochs=1)


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.fixture(scope="module")
def once(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("once")
    return folder, run(folder, GIVEN, data)


@pytest.fixture
def trained(once, tmp_path):
    folder = shutil.copytree(once[0], tmp_path / "run")
    return folder, once[1]


def found(folder, trained, data, **options):
    with one_thread():
        return load_or_measure(folder, trained, data, device=CPU, **options)


def test_it_is_measured_once(trained, data, monkeypatch):
    folder, one = trained
    heard = []
    first = found(folder, one, data, progress=heard.append)
    (seed,) = first.seeds
    assert seed == SeedResult(
        seed=0,
        dense=one.finished.accuracy,
        seconds=one.finished.seconds,
        targets=tuple(heard),
        machine=one.info.machine,
        versions=one.info.versions,
    )
    assert [target.operator for target in heard] == ["global:0.5", "int4"]
    assert read_result(folder / "result.json") == first
    monkeypatch.setattr(module, "one_shot", None)
    assert found(folder, one, data) == first


def test_a_new_title_is_taken_over_without_measuring(trained, data, monkeypatch):
    folder, one = trained
    first = found(folder, one, data)
    monkeypatch.setattr(module, "one_shot", None)
    titled = replace(one, recipe=replace(one.recipe, title="another"))
    again = found(folder, titled, data)
    assert (again.title, again.seeds) == ("another", first.seeds)
    assert read_result(folder / "result.json") == again


def test_other_data_than_that_of_the_run_is_refused(trained):
    folder, one = trained
    with pytest.raises(
        ValueError, match="the run was trained on other data: test_images is 100, not 50"
    ):
        found(folder, one, digits(test=50))
    assert not (folder / "result.json").exists()


@pytest.mark.parametrize("how", ["targets", "damaged", "of another training"])
def test_what_does_not_fit_is_measured_again(trained, data, how):
    folder, one = trained
    first = found(folder, one, data)
    path = folder / "result.json"
    if how == "targets":
        other = replace(one.recipe, compress=replace(one.recipe.compress, to=("int4",)))
        again = found(folder, replace(one, recipe=other), data)
        assert [target.operator for target in again.seeds[0].targets] == ["int4"]
        return
    if how == "damaged":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        content = json.loads(path.read_text())
        content["seeds"][0]["dense"] = 0.123
        path.write_text(json.dumps(content))
    assert found(folder, one, data) == first == read_result(path)


def seed(number):
    return SeedResult(number, 0.5, 1.0, (), "machine", {"torch": "2"})


def add(arguments):
    folder, number = arguments
    add_to_results(folder, GIVEN, seed(number))


def test_many_processes_lose_no_seed(tmp_path):
    pytest.importorskip("fcntl")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(add, [(tmp_path / "results", number) for number in range(12)])
    path = tmp_path / "results" / "digits" / "convnet-digits" / "sgd.json"
    assert [one.seed for one in read_result(path).seeds] == list(range(12))
    assert [one for one in (tmp_path / "results").rglob("*") if one.is_file()] == [path]


def test_what_a_killed_process_left_is_removed(tmp_path):
    path = add_to_results(tmp_path, GIVEN, seed(0))
    (path.parent / ".sgd.json.123.tmp").write_bytes(b"half")
    add_to_results(tmp_path, GIVEN, seed(1))
    assert list(path.parent.iterdir()) == [path]


def test_another_recipe_is_refused_before_and_after(tmp_path):
    path = add_to_results(tmp_path, GIVEN, seed(0))
    before = path.read_bytes()
    check_results(tmp_path, GIVEN, 1)
    other = recipe("compress.to=[int4]", method="sgd", epochs=1)
    for refused in (
        lambda: check_results(tmp_path, other, 1),
        lambda: add_to_results(tmp_path, other, seed(1)),
    ):
        with pytest.raises(ValueError, match=r"seed 1 was trained with another.*compress\.to"):
            refused()
    assert path.read_bytes() == before
    check_results(tmp_path / "none", other, 1)

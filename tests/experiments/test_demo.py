import pytest
import torch

from torchcram.experiments import demo
from torchcram.experiments.bench.record import read_bench
from torchcram.experiments.demo import CRAM, SGD, run_demo
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.recipe import load_recipe
from torchcram.report.summary import summaries

TARGETS = list(load_recipe(SGD).compress.to)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp("demo"), epochs=1)


def scores(done):
    return [(result.seeds[0].dense, result.seeds[0].targets) for result in done.results]


def sizes(done):
    return [(model.target, model.compact_bytes) for model in done.bench.subjects]


def test_the_same_seed_gives_the_same_numbers(tiny, tmp_path):
    again = run_demo(tmp_path, epochs=1)
    assert scores(again) == scores(tiny)
    assert sizes(again) == sizes(tiny)


def test_another_seed_gives_other_numbers(tiny, tmp_path):
    assert scores(run_demo(tmp_path, epochs=1, seed=1)) != scores(tiny)


def test_a_finished_demonstration_is_not_trained_again(tiny):
    logs = [(run / "log.jsonl").read_bytes() for run in tiny.runs]  # they have times in them
    assert scores(run_demo(tiny.runs[0].parent, epochs=1)) == scores(tiny)
    assert [(run / "log.jsonl").read_bytes() for run in tiny.runs] == logs


def test_other_settings_have_folders_of_their_own(tiny):
    others = run_demo(tiny.runs[0].parent, epochs=1, seed=3)
    assert not {*others.runs} & {*tiny.runs}


def test_every_method_is_compressed_to_every_target(tiny):
    assert [result.title for result in tiny.results] == ["SGD", "CrAM+-Multi"]
    for result in tiny.results:
        assert [target.operator for target in result.seeds[0].targets] == TARGETS


def test_both_recipes_are_those_of_the_package_and_sgd_has_twice_the_epochs(tiny):
    for name, epochs, result in zip((SGD, CRAM), (2, 1), tiny.results, strict=True):
        given = load_recipe(name, [f"train.epochs={epochs}"])
        assert result.recipe == given.to_dict()
    sgd, cram = (load_recipe(name) for name in (SGD, CRAM))
    assert (sgd.data, sgd.model, sgd.optimizer) == (cram.data, cram.model, cram.optimizer)
    assert sgd.compress == cram.compress


def test_every_model_is_a_file_and_is_timed_in_one_thread(tiny):
    bench = tiny.bench
    assert [model.target for model in bench.subjects] == ["dense", *TARGETS]
    assert [setting.threads for setting in bench.settings] == [1]
    bytes_of = dict(sizes(tiny))
    assert bytes_of["global:0.9"] < bytes_of["global:0.5"] < bytes_of["dense"]
    assert bytes_of["global:0.8+int4"] < bytes_of["nm:2:4"]
    for target in ("dense", *TARGETS):
        for engine in ("torch", "torchcram"):
            assert bench.timing(target, engine, 0).times.median > 0


def test_results_and_benchmark_are_in_the_run_folders(tiny):
    for run, result in zip(tiny.runs, tiny.results, strict=True):
        assert read_result(run / "result.json") == result
    kept = read_bench(tiny.runs[1] / "bench.json")  # of the latest call, so with other times
    assert kept.subjects == tiny.bench.subjects


def test_progress_hears_of_both_trainings(tmp_path):
    heard = []

    def training(title):
        return lambda done, epochs, record: heard.append((title, done, epochs, record))

    run_demo(tmp_path, epochs=1, progress=training)
    ends = [(title, done, epochs) for title, done, epochs, record in heard if record is not None]
    assert ends == [("SGD", 1, 2), ("SGD", 2, 2), ("CrAM+-Multi", 1, 1)]


def test_threads_and_the_global_generator_are_left_alone(monkeypatch, tmp_path):
    set_threads = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    state = torch.random.get_rng_state()

    def stop(_title):
        assert set_threads == [1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, epochs=1, progress=stop)
    assert set_threads == [1, 7]
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_the_demonstration_is_to_show(seed, tmp_path):
    done = run_demo(tmp_path, seed=seed)
    sgd, cram = done.results
    assert cram.seeds[0].dense > sgd.seeds[0].dense - 0.011
    lost = {
        (method, operator): -row.change.mean
        for method, result in (("SGD", sgd), ("CrAM+", cram))
        for operator, row in summaries(result).items()
    }
    assert lost["SGD", "global:0.9"] > 0.2
    assert lost["SGD", "global:0.95"] > 0.6
    assert lost["CrAM+", "global:0.9"] < 0.03
    assert lost["CrAM+", "global:0.95"] < 0.06
    assert cram.recipe["train"]["epochs"] == demo.EPOCHS

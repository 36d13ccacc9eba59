import json
import os
from copy import deepcopy
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_samples import cram, result, seed, sgd

from torchcram.experiments.evaluation.results import (
    Result,
    SeedResult,
    TargetResult,
    mean,
    merge_seed,
    read_result,
    read_results,
    std,
    write_result,
)
from torchcram.experiments.io.dict_diff import differences, flat
from torchcram.experiments.recipe import load_recipe

fractions = st.floats(0, 1)
names = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,8}", fullmatch=True)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
targets = st.builds(
    TargetResult,
    operator=st.text(min_size=1).filter(str.strip),
    sparsity=fractions,
    model_sparsity=fractions,
    before=fractions,
    after=fractions,
    after_std=st.none() | fractions,
    trials=st.integers(1, 100),
    seconds=st.none() | st.floats(0, 1e9),
)
seeds = st.builds(
    SeedResult,
    seed=st.integers(0, 2**63),
    dense=fractions,
    seconds=st.floats(0, 1e9),
    targets=st.lists(targets, max_size=3, unique_by=lambda one: one.operator).map(tuple),
    machine=st.text(),
    versions=st.dictionaries(st.text(), st.text(), max_size=2),
    epochs=st.none() | st.floats(0, 1e3, exclude_min=True),
    reached=st.none() | st.floats(0, 1),
)
results = st.builds(
    Result,
    task=names,
    model=names,
    method=names,
    title=st.text(),
    data=st.text(),
    recipe=st.dictionaries(st.text(), plain, max_size=3),
    seeds=st.lists(seeds, min_size=1, max_size=3, unique_by=lambda one: one.seed).map(
        lambda some: tuple(sorted(some, key=lambda one: one.seed))
    ),
)


@settings(max_examples=60, deadline=None)
@given(given_result=results)
def test_what_is_written_is_read_back(given_result, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "new" / "one.json"
    write_result(given_result, path)
    assert read_result(path) == given_result
    assert [entry.name for entry in path.parent.iterdir()] == ["one.json"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "one.json"
    write_result(cram(), path)
    return path.read_text()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_that_was_cut_is_refused_by_name(data, whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "one.json"
    path.write_text(whole[: data.draw(st.integers(0, len(whole) - 3))])
    with pytest.raises(ValueError, match=r"one\.json is not JSON"):
        read_result(path)


def places(value, above=()):
    """All places of a plain structure, with the keys that lead there."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in entries:
        yield (*above, key)
        if isinstance(inner, (dict, list)) and key != "recipe":
            yield from places(inner, (*above, key))


PLAIN = json.loads(json.dumps(asdict(sgd())))
PLACES = list(places(PLAIN))
OPTIONAL = ("after_std", "trials", "processes", "others", "metric", "samples", "chosen", "epochs")
OPTIONAL = (*OPTIONAL, "source", "reached")
REQUIRED = [keys for keys in PLACES if keys[-1] not in (*OPTIONAL, *range(9))]
REQUIRED = [keys for keys in REQUIRED if "versions" not in keys[:-1]]
REQUIRED = [keys for keys in REQUIRED if "targets" not in keys or keys[-1] != "seconds"]


def edited(keys, edit):
    inner = value = deepcopy(PLAIN)
    for key in keys[:-1]:
        inner = inner[key]
    edit(inner, keys[-1])
    return value


def refused(tmp_path, value, text=None):
    path = tmp_path / "bad.json"
    path.write_text(text or json.dumps(value))
    with pytest.raises(ValueError, match=r"bad\.json") as error:
        read_result(path)
    return str(error.value)


@pytest.mark.parametrize("keys", REQUIRED, ids=str)
def test_a_missing_key_is_named(keys, tmp_path):
    message = refused(tmp_path, edited(keys, lambda inner, key: inner.pop(key)))
    assert f"{keys[-1]} is missing" in message
    assert all(f"[{key}]" in message for key in keys if isinstance(key, int))


@pytest.mark.parametrize("keys", PLACES, ids=str)
def test_a_value_of_another_kind_is_refused(keys, tmp_path):
    wrong = [[["x"]], True]
    if keys[-1] in ("versions", "recipe"):
        wrong = ["x", [1]]
    for value in wrong:
        message = refused(
            tmp_path, edited(keys, lambda inner, key, v=value: inner.__setitem__(key, v))
        )
        assert "allowed" in message
        name = f"[{keys[-1]}]" if isinstance(keys[-1], int) else keys[-1]
        assert name in message


def test_an_unknown_key_is_refused_with_a_guess(tmp_path):
    value = asdict(sgd())
    value["seeds"][0]["machin"] = "x"
    message = refused(tmp_path, value)
    assert "seeds[0].machin is no known key (did you mean 'machine'?)" in message
    value = asdict(sgd())
    value["seeds"][0]["targets"][1]["speed"] = 1
    assert "seeds[0].targets[1].speed is no known key" in refused(tmp_path, value)


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("task",), "../up", "task is '../up'"),
        (("method",), "a/b", "method is 'a/b'"),
        (("seeds",), [], "seeds is ()"),
        (("seeds", 0, "dense"), 88.7, "seeds[0].dense is 88.7; allowed: from 0 to 1"),
        (("seeds", 0, "seconds"), -1, "seconds is -1"),
        (("seeds", 0, "seconds"), 10**400, "seconds is 1000"),
        (("seeds", 0, "seed"), -1, "seed is -1"),
        (("seeds", 0, "seed"), 1.5, "seed is 1.5; allowed: an integer"),
        (("seeds", 0, "targets", 1, "after"), 1.01, "seeds[0].targets[1].after is 1.01"),
        (("seeds", 0, "targets", 1, "after_std"), -0.1, "targets[1].after_std is -0.1"),
        (("seeds", 0, "targets", 0, "trials"), 0, "targets[0].trials is 0"),
        (("seeds", 0, "targets", 0, "operator"), "int4", "every operator once"),
        (("seeds", 0, "targets", 0, "operator"), " ", "operator is ' '"),
        (("seeds", 0, "versions", "torch"), 2.8, "seeds[0].versions.torch is 2.8"),
    ],
)
def test_an_impossible_value_is_refused(keys, value, said, tmp_path):
    assert said in refused(tmp_path, edited(keys, lambda inner, key: inner.__setitem__(key, value)))


def test_what_json_allows_and_we_do_not_is_refused(tmp_path):
    text = json.dumps(asdict(sgd()))
    assert "NaN is no number" in refused(tmp_path, None, text.replace("0.887", "NaN"))
    twice = text.replace('"title"', '"data": "x", "title"', 1)
    assert "'data' appears twice" in refused(tmp_path, None, twice)
    assert "not JSON" in refused(tmp_path, None, "[" * 100_000)
    assert "the document is [1]" in refused(tmp_path, [1])
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"bad\.json is not JSON"):
        read_result(tmp_path / "bad.json")


def test_seeds_twice_or_out_of_order_are_refused():
    one, other = seed(1, 0.5, {}), seed(2, 0.5, {})
    for wrong in ([other, one], [one, one]):
        with pytest.raises(ValueError, match="every seed once, in order"):
            result("sgd", wrong)


def test_a_failure_to_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "one.json"
    write_result(sgd(), path)
    old = path.read_bytes()

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_result(cram(), path)
    assert path.read_bytes() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["one.json"]


def test_what_cannot_be_written_as_json_leaves_the_old_file(tmp_path):
    path = tmp_path / "one.json"
    write_result(sgd(), path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_result(replace(cram(), recipe={"rho": float("nan")}), path)
    assert read_result(path) == sgd()


def test_a_folder_is_read_in_order_and_refuses_a_misplaced_file(tmp_path):
    for one in (sgd(), cram()):
        write_result(one, tmp_path / one.path)
    assert read_results(tmp_path) == [cram(), sgd()]
    write_result(sgd(), tmp_path / "cifar" / "net" / "sam.json")
    with pytest.raises(ValueError, match=r"sam\.json holds .* belongs in .*sgd\.json"):
        read_results(tmp_path)
    assert read_results(tmp_path / "nothing") == []


@pytest.fixture
def recipe():
    return load_recipe("cifar10/resnet20/cram-plus-multi")


def test_seeds_are_merged_sorted_and_replaced(recipe):
    merged = None
    for number, dense in ((3, 0.5), (1, 0.6), (2, 0.7), (1, 0.8)):
        merged = merge_seed(merged, recipe, seed(number, dense, {"int4": 0.4}))
    assert [(one.seed, one.dense) for one in merged.seeds] == [(1, 0.8), (2, 0.7), (3, 0.5)]
    assert (merged.task, merged.model, merged.method) == ("cifar10", "resnet20", "cram-plus-multi")
    assert merged.title == recipe.title
    assert merged.data == recipe.data.name
    assert merged.recipe == recipe.to_dict()


def test_what_was_merged_survives_the_file(recipe, tmp_path):
    merged = merge_seed(None, recipe, seed(0, 0.5, {"int4": 0.4}))
    write_result(merged, tmp_path / "one.json")
    again = merge_seed(read_result(tmp_path / "one.json"), recipe, seed(1, 0.5, {"int4": 0.4}))
    assert [one.seed for one in again.seeds] == [0, 1]


def test_another_recipe_is_refused_with_the_keys_that_differ(recipe):
    merged = merge_seed(None, recipe, seed(0, 0.5, {}))
    other = load_recipe(recipe.name, ["cram.rho=0.3", "train.epochs=7"])
    with pytest.raises(ValueError, match=r"seed 1 .* differ in train\.epochs, cram\.rho$"):
        merge_seed(merged, other, seed(1, 0.5, {}))
    with pytest.raises(ValueError, match=r"differ in .*cram"):
        merge_seed(merged, load_recipe(recipe.name, ["cram=null"]), seed(0, 0.5, {}))


def test_a_new_title_is_no_other_recipe(recipe):
    merged = merge_seed(None, recipe, seed(0, 0.5, {}))
    again = merge_seed(merged, replace(recipe, title="better"), seed(0, 0.6, {}))
    assert (again.title, again.recipe["title"]) == ("better", "better")
    assert len(again.seeds) == 1


def test_nested_keys_are_dotted_names():
    assert flat({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}
    assert differences({"a": {"b": 1}}, {"a": {"b": 1, "c": None}}) == ["a.c"]
    assert differences({"a": {"b": 1}}, {"a": {"b": 1.0}}) == []


def test_mean_and_deviation():
    assert mean([0.25]) == 0.25
    assert std([0.25]) is None
    assert mean([1, 2, 3, 4]) == 2.5
    assert std([1, 2, 3, 4]) == pytest.approx((5 / 3) ** 0.5)

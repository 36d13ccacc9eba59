import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchcram.experiments.io.dataclass_io import BadValue, build, plain, require


@dataclass(frozen=True)
class Leaf:
    number: float
    names: tuple[str, ...] = ()

    def __post_init__(self):
        require(self.number >= 0, "number", self.number, "at least 0")


@dataclass(frozen=True)
class Tree:
    count: int
    leaf: Leaf
    flag: bool = False
    note: str | None = None
    twig: Leaf | None = None
    grid: tuple[tuple[int, ...], ...] = ()
    words: dict[str, str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


texts = st.text(max_size=8)
leaves = st.builds(
    Leaf, st.floats(0, allow_nan=False, allow_infinity=False), st.lists(texts).map(tuple)
)
trees = st.builds(
    Tree,
    st.integers(),
    leaves,
    st.booleans(),
    st.none() | texts,
    st.none() | leaves,
    st.lists(st.lists(st.integers(), max_size=3).map(tuple), max_size=3).map(tuple),
    st.dictionaries(texts, texts, max_size=2),
    st.dictionaries(texts, st.integers() | st.lists(texts), max_size=2),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["count", "leaf", "number", "x"]) | texts, inner)
    ),
    max_leaves=12,
)


@given(trees)
def test_plain_and_build_are_inverse(tree):
    assert build(Tree, plain(tree), "a file") == tree


@given(anything)
def test_any_data_is_built_or_refused_by_name(data):
    try:
        tree = build(Tree, data, "a file")
    except ValueError as refused:
        message = str(refused)
    else:
        assert build(Tree, plain(tree), "a file") == tree
        return
    assert message.startswith("a file: ")
    assert "; allowed: " in message


@given(st.dictionaries(st.sampled_from(["number", "names", "nmber", "9"]), anything))
def test_a_section_is_built_only_out_of_its_own_keys(data):
    try:
        leaf = build(Leaf, data, "a file")
    except ValueError:
        return
    assert set(data) <= {"number", "names"}
    assert leaf.number == data["number"]
    assert type(leaf.number) is float


def test_integers_do_for_numbers():
    leaf = build(Leaf, {"number": 3}, "a file")
    assert leaf == Leaf(3.0)
    assert type(leaf.number) is float


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"the document is \[\]; allowed: a section with the keys count, leaf"),
        ({}, r"count is missing; allowed: an integer"),
        ({"count": 1}, r"leaf is missing; allowed: a section with the keys number, names"),
        ({"count": 1, "leaf": {}}, r"leaf.number is missing; allowed: a finite number"),
        ({"count": True}, r"count is True; allowed: an integer"),
        ({"count": 1.0}, r"count is 1.0; allowed: an integer"),
        ({"count": "1"}, r"count is '1'; allowed: an integer"),
        ({"count": None}, r"count is None; allowed: an integer"),
        ({"cuont": 1}, r"cuont is no known key \(did you mean 'count'\?\); allowed: count, leaf"),
        ({7: 1}, r"7 is no known key; allowed: count"),
        ({"leaf": None, "count": 1}, r"leaf is None; allowed: a section with the keys number"),
        ({"count": 1, "leaf": {"number": True}}, r"leaf.number is True; allowed: a finite number"),
        ({"count": 1, "leaf": {"number": "1"}}, r"leaf.number is '1'; allowed"),
        ({"count": 1, "leaf": {"number": float("nan")}}, r"leaf.number is nan; allowed"),
        ({"count": 1, "leaf": {"number": float("inf")}}, r"leaf.number is inf; allowed"),
        ({"count": 1, "leaf": {"number": 10**400}}, r"leaf.number is 10+\.\.\.; allowed"),
        ({"count": 1, "leaf": {"number": -1}}, r"leaf.number is -1.0; allowed: at least 0"),
        (
            {"count": 1, "leaf": {"number": 1, "names": "ab"}},
            r"leaf.names is 'ab'; allowed: a list in which each item is a text",
        ),
        ({"count": 1, "leaf": {"number": 1, "names": ["a", 1]}}, r"leaf.names\[1\] is 1; allowed"),
        ({"count": 1, "leaf": {"number": 1}, "flag": 1}, r"flag is 1; allowed: true or false"),
        ({"count": 1, "leaf": {"number": 1}, "grid": [[1], ["a"]]}, r"grid\[1\]\[0\] is 'a'"),
        ({"count": 1, "leaf": {"number": 1}, "twig": {"number": -1}}, r"twig.number is -1.0"),
    ],
)
def test_what_is_wrong_is_named(data, message):
    with pytest.raises(ValueError, match=f"^a file: {message}"):
        build(Tree, data, "a file")


def test_an_error_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(BadValue("key", "is 3", "4")))  # noqa: S301
    assert str(error) == "key is 3; allowed: 4"


@pytest.mark.parametrize(
    ("given_words", "said"),
    [
        (["a"], r"words is \['a'\]; allowed: a section in which each value is a text"),
        ({"torch": 2.8}, r"words\.torch is 2\.8; allowed: a text"),
        ({3: "a"}, "words is 3; allowed: a text"),
    ],
)
def test_a_mapping_has_texts_for_names_and_values_of_its_kind(given_words, said):
    data = {"count": 1, "leaf": {"number": 1}, "words": given_words}
    with pytest.raises(ValueError, match=said):
        build(Tree, data, "a file")

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchcram.experiments.io.yaml_text import dump, merged, override, parse

keys = st.text("abcxyz_-", min_size=1, max_size=6)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
    | st.from_regex(r"[-+]?\d{0,3}\.?\d{0,3}[eE][-+]?\d{1,2}", fullmatch=True)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(keys, values, max_size=4)


@given(values)
@example("a\x85b")  # an end of line to YAML
def test_what_is_written_is_read_back(data):
    assert parse(dump(data), "a file") == data


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        parse(text, "a file")
    except ValueError as refused:
        message = str(refused)
    else:
        return
    assert message.startswith("a file is not YAML: ")


TAGS = ["bool", "int", "float", "null", "str", "timestamp", "binary", "set", "omap", "pairs"]


@given(
    st.sampled_from([*TAGS, "seq", "map", "merge", "value"]),
    st.text(max_size=8)
    | st.sampled_from(["", "x", "2001-99-99", "0x", ":", "1:x", "[1]", "{a: b}"]),
    st.booleans(),
)
def test_any_tag_on_any_text_is_read_or_refused(tag, text, quoted):
    value = '"' + text.replace("\\", "").replace('"', "") + '"' if quoted else text
    try:
        parse(f"a: 1\nb: !!{tag} {value}", "a file")
    except ValueError as refused:
        message = str(refused)
    else:
        return
    assert message.startswith("a file is not YAML: ")
    assert message.startswith("a file is not YAML: line ") or "not allowed" in message


def test_what_is_wrong_is_said_with_its_place():
    with pytest.raises(ValueError, match=r"^a file is not YAML: line 2, column 11: ") as refused:
        parse("a: 1\nb: {c: 0.1", "a file")
    assert str(refused.value).endswith("expected ',' or '}', but got the end")


@pytest.mark.parametrize(
    ("text", "number"),
    [("5e-4", 5e-4), ("1E3", 1000.0), ("-2.5e+2", -250.0), (".5e1", 5.0), ("5.e-1", 0.5)],
)
def test_scientific_notation_is_a_number(text, number):
    assert parse(text, "a file") == number
    assert parse(f"lr: {text}", "a file") == {"lr": number}
    assert parse(f"[{text}]", "a file") == [number]


@pytest.mark.parametrize("text", ["e4", "5e", "1e3x", "int4", "global:0.5", "nm:2:4", "'5e-4'"])
def test_what_only_looks_like_a_number_is_a_text(text):
    assert parse(text, "a file") == text.strip("'")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' appears twice"),
        ("a: {b: 1, b: 2}", "the key 'b' appears twice"),
        ("a: &x [1]\nb: *x", "line 2, column 4: aliases are not allowed"),
        ("a: &x [*x]", "aliases are not allowed"),
        ("a: [1", "line 1"),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
        ("a: 2001-99-99", "line 1, column 4: '2001-99-99' is no timestamp, month must be in "),
        ('a: 1\nb: !!timestamp "x"', "line 2, column 4: 'x' is no timestamp"),
        ("a: !!bool maybe", "line 1, column 4: 'maybe' is no bool"),
        ("a: 1\n\nb: [!!int x]", "line 3, column 5: 'x' is no int, "),
        ('!!int ""', "line 1, column 1: '' is no int"),
        ("{!!bool maybe: 1}", "line 1, column 2: 'maybe' is no bool"),
        ("!!float x", "line 1, column 1: 'x' is no float, "),
        ("[" * 5000, "a file is not YAML"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("\0", "a file is not YAML"),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(text, "a file")
    assert str(error.value).startswith("a file is not YAML: ")


@given(mappings, mappings)
def test_merging_takes_every_key_and_prefers_the_second(base, over):
    both = merged(base, over)
    assert both.keys() == base.keys() | over.keys()
    for key, value in both.items():
        if key not in over:
            assert value == base[key]
        elif not (isinstance(base.get(key), dict) and isinstance(over[key], dict)):
            assert value == over[key]
    assert merged(both, over) == both
    assert merged(base, {}) == base


def test_mappings_merge_and_lists_are_replaced():
    base = {"a": {"b": 1, "c": [1, 2]}, "d": {"e": 1}}
    assert merged(base, {"a": {"c": [3]}, "d": None}) == {"a": {"b": 1, "c": [3]}, "d": None}
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": {"e": 1}}


@given(mappings, st.lists(keys, min_size=1, max_size=4), scalars)
def test_an_override_puts_its_value_where_it_says(data, names, value):
    found = override(data, [f"{'.'.join(names)}={dump(value)}"])
    for name in names:
        found = found[name]
    assert found == value


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("cram.rho=0.1", {"cram": {"rho": 0.1}, "x": 1}),
        ("x=5e-4", {"cram": None, "x": 5e-4}),
        ("x=a=b", {"cram": None, "x": "a=b"}),
        (" x = 2", {"cram": None, "x": 2}),
        ("x=", {"cram": None, "x": None}),
        ("x=[global:0.5, int4]", {"cram": None, "x": ["global:0.5", "int4"]}),
        ("cram={rho: 1}", {"cram": {"rho": 1}, "x": 1}),
    ],
)
def test_overrides(text, result):
    assert override({"cram": None, "x": 1}, [text]) == result


def test_later_overrides_win():
    assert override({}, ["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}


@pytest.mark.parametrize("text", ["", "x", "=1", ".x=1", "x..y=1", "x.=1"])
def test_what_is_no_override_is_refused(text):
    with pytest.raises(ValueError, match="allowed is KEY=VALUE") as error:
        override({}, [text])
    assert repr(text) in str(error.value)


def test_an_override_that_is_not_yaml_is_refused():
    with pytest.raises(ValueError, match=r"override 'x=\[1' is not YAML"):
        override({}, ["x=[1"])

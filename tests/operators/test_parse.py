import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchcram import NM, Chain, GlobalTopK, Quantize, RowTopK, UniformTopK, parse_operator
from torchcram.operators.parse import parse_without_pruners

levels = st.floats(0, 1, exclude_max=True)
ranges = st.tuples(levels, levels).filter(lambda pair: pair[0] < pair[1])
simple = st.one_of(
    st.builds(GlobalTopK, levels | ranges),
    st.builds(UniformTopK, levels | ranges),
    st.builds(RowTopK, levels | ranges),
    st.integers(1, 64).flatmap(lambda m: st.builds(NM, st.integers(1, m), st.just(m))),
    st.builds(Quantize, st.integers(2, 8), st.none() | st.integers(1, 4096)),
)
operators = st.recursive(simple, lambda parts: st.builds(Chain, parts, parts), max_leaves=4)


@given(operators)
def test_text_and_operator_are_inverse(operator):
    assert parse_operator(str(operator)) == operator


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        ("global:0.9", GlobalTopK(0.9)),
        ("uniform:0.8", UniformTopK(0.8)),
        ("row:0.5", RowTopK(0.5)),
        ("global:0.3-0.9", GlobalTopK((0.3, 0.9))),
        ("nm:2:4", NM(2, 4)),
        ("int4", Quantize(4)),
        ("int4:g64", Quantize(4, 64)),
        ("global:0.5+int8", Chain(GlobalTopK(0.5), Quantize(8))),
    ],
)
def test_the_documented_texts(text, operator):
    assert parse_operator(text) == operator
    assert str(operator) == text


def test_a_lenient_reading():
    assert parse_operator("global:.5 + int8") == parse_operator("global:0.5+int8")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot read ''"),
        ("topk:0.5", "allowed: global:0.9"),
        ("global:1.0", "not in"),
        ("global:-0.5", "cannot read"),
        ("nm:5:4", "cannot keep 5"),
        ("int9", "allowed are 2 to 8"),
        ("int4:64", "cannot read"),
        ("global:0.5+", "cannot read ''"),
        ("global:0.9-0.3", "is empty"),
    ],
)
def test_what_cannot_be_read_says_why(text, says):
    with pytest.raises(ValueError, match=says) as error:
        parse_operator(text)
    assert repr(text) in str(error.value)


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text):
    try:
        operator = parse_operator(text)
    except ValueError:
        return
    assert parse_operator(str(operator)) == operator


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        ("obs:m64@global:0.9", GlobalTopK(0.9)),
        ("obs:m256:b25:d1e-05:r2@nm:2:4+int8", Chain(NM(2, 4), Quantize(8))),
        ("wanda@row:0.5 + sparsegpt:b64@nm:2:4", Chain(RowTopK(0.5), NM(2, 4))),
        ("int4:g64", Quantize(4, 64)),
    ],
)
def test_pruners_are_left_out(text, operator):
    assert parse_without_pruners(text) == operator


@pytest.mark.parametrize("text", ["obs:m64@", "obs@wanda@nm:2:4", "obs", "nm:2:4+obs:m64"])
def test_what_a_pruner_leaves_is_an_operator(text):
    with pytest.raises(ValueError, match="cannot read") as error:
        parse_without_pruners(text)
    assert repr(text) in str(error.value)

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchcram import NM, Chain, GlobalTopK, Quantize, RowTopK, UniformTopK, parse_operator
from torchcram.operators.parse import parse_without_pruners
from torchcram.pruners import Obs, SparseGPT

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
        ("global:1.0", r"must be in \[0, 1\), got 1.0"),
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


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("globl:0.9", "global:0.9"),
        ("Global:0.9", "global:0.9"),
        ("unifrom:0.3-0.9", "uniform:0.3-0.9"),
        ("mn:2:4", "nm:2:4"),
        ("itn4:g64", "int4:g64"),
        ("int8+globl:0.9", "global:0.9"),
    ],
)
def test_a_misspelled_word_is_corrected(text, meant):
    with pytest.raises(ValueError, match=re.escape(f"(did you mean {meant}?); allowed")):
        parse_operator(text)


@pytest.mark.parametrize("text", ["topk:0.5", "globl:1.5", "globl", "0.9", "", "nm:2"])
def test_no_correction_is_made_up(text):
    with pytest.raises(ValueError, match="operator") as error:
        parse_operator(text)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("kind", [GlobalTopK, UniformTopK, RowTopK])
def test_minus_zero_is_zero(kind):
    assert str(kind(-0.0)) == str(kind(0))
    assert str(kind((-0.0, 0.5))) == str(kind((0, 0.5)))
    assert parse_operator(str(kind(-0.0))) == kind(0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GlobalTopK(False), r"sparsity must be in \[0, 1\), got False"),
        (lambda: Quantize(True), "bits is True"),
        (lambda: Quantize(4, True), "group_size must be None or a positive integer, got True"),
        (lambda: NM(True, True), "keep and group must be integers, got True and True"),
        (lambda: NM(1, True), "got 1 and True"),
        (lambda: Obs(GlobalTopK(0.5), gradients=True), "gradients is True"),
        (lambda: Obs(GlobalTopK(0.5), damping=True), "damping is True"),
        (lambda: Obs(GlobalTopK(0.5), damping=float("inf")), "damping is inf"),
        (lambda: SparseGPT(NM(2, 4), block=True), "block is True"),
        (lambda: SparseGPT(NM(2, 4), damping=True), "damping is True"),
    ],
)
def test_what_no_text_says_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


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

"""Texts of operators and pruners: read, written and read again, they are the same."""

import warnings

import torch

from fuzz.mutations import change_text
from torchcram import parse_operator
from torchcram.operators.parse import parse_without_pruners
from torchcram.pruners import parse_pruner

LEVELS = ("0", "0.5", ".9", "0.", "00.7", "1e-3", "0.0000001", "1", "0.3-0.9", "1e400", "-0.0")
INTEGERS = ("0", "1", "2", "4", "8", "16", "00", "04", "256", "9" * 19, "9" * 40, "-1", "٣")
WORDS = (*LEVELS, *INTEGERS, "+", ":", "@", "g", " ", "nm:", "int", "obs", "global", "_", "0_1")


def make(rng):
    parts = [_part(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 60)))]
    if rng.random() < 0.01:
        parts = parts[:1] * 1000
    text = rng.choice(("+", "+", " + ", "+ ")).join(parts)
    if rng.random() < 0.6:
        text = change_text(rng, text, WORDS)
    return text.encode("utf-8", "surrogatepass")


def _part(rng):
    level, integer, other = rng.choice(LEVELS), rng.choice(INTEGERS), rng.choice(INTEGERS)
    kind = rng.choice(("global", "uniform", "row"))
    part = rng.choice(
        (f"{kind}:{level}", f"nm:{integer}:{other}", f"int{integer}", f"int{integer}:g{other}")
    )
    if rng.random() < 0.3:
        options = [
            f":{rng.choice('mbdrx')}{rng.choice((*INTEGERS, *LEVELS))}"
            for _ in range(rng.choice((0, 0, 1, 2, 5)))
        ]
        part = f"{rng.choice(('obs', 'wanda', 'sparsegpt', 'obt'))}{''.join(options)}@{part}"
    return part


def read(content, folder):
    del folder
    text = content.decode("utf-8", "surrogatepass")
    accepted = [_read(parse, text) for parse in (parse_operator, parse_pruner)]
    left = _read(parse_without_pruners, text)
    if accepted[0]:
        assert accepted[1], f"{text!r} is an operator and no pruner"
    assert left or not accepted[1], f"nothing is left of {text!r} without its pruners"
    if accepted[0]:
        _compress(parse_operator(text))
    return accepted[1]


def _read(parse, text):
    try:
        operator = parse(text)
    except ValueError as error:
        require_named(text, error)
        return False
    again = parse(str(operator))
    assert again == operator, f"{text!r}: {operator!r} is read back as {again!r}"
    assert str(again) == str(operator)
    hash(operator)
    return True


def require_named(text, error):
    assert repr(text) in str(error), f"the error does not name {text!r}: {error}"


def _compress(operator):
    weights = {"a": torch.linspace(-1, 1, 48).view(6, 8), "b": torch.ones(2, 4, 3, 3)}
    before = {name: weight.clone() for name, weight in weights.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # layers that a pattern does not fit
            masks = operator.compress_(weights)
    except ValueError:
        assert operator.is_range, f"{operator} is read and cannot be used"
        return
    for name, weight in weights.items():
        assert weight.shape == before[name].shape
        assert bool(weight.isfinite().all())
        assert masks is None or masks[name].shape == weight.shape

import copy
import pickle
from functools import reduce

import pytest
import torch

from torchcram import NM, Chain, GlobalTopK, Quantize, parse_operator
from torchcram.pruners import bind


def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(8, 8, generator=generator),
        "b": torch.randn(4, 8, generator=generator),
    }


@pytest.mark.parametrize(
    ("first", "then"), [(NM(2, 4), GlobalTopK(0.75)), (GlobalTopK(0.9), NM(2, 4))]
)
def test_one_after_the_other_and_the_mask_of_both(first, then):
    chained, by_hand = weights(), weights()
    masks = Chain(first, then).compress_(chained)
    kept_first = first.compress_(by_hand)
    kept_then = then.compress_(by_hand)
    for name in chained:
        assert torch.equal(chained[name], by_hand[name])
        assert torch.equal(masks[name], kept_first[name] & kept_then[name])


def test_a_chain_without_masks_has_none():
    assert Chain(Quantize(8), Quantize(4)).compress_(weights()) is None


def test_nesting_does_not_matter():
    a, b, c = GlobalTopK(0.5), NM(2, 4), Quantize(8)
    assert Chain(a, Chain(b, c)) == Chain(Chain(a, b), c)
    assert str(Chain(a, Chain(b, c))) == "global:0.5+nm:2:4+int8"


def test_old_masks_and_new_scales():
    operator = Chain(GlobalTopK(0.5), Quantize(4))
    masks = operator.compress_(weights())
    again = {name: w * 3 + 0.1 for name, w in weights().items()}
    by_hand = {name: w.masked_fill(~masks[name], 0) for name, w in again.items()}
    Quantize(4).compress_(by_hand)
    operator.recompress_(again, masks)
    assert all(torch.equal(again[name], by_hand[name]) for name in again)


def test_draws_all_its_parts():
    drawn = Chain(GlobalTopK((0.3, 0.9)), Quantize(4)).draw(torch.Generator().manual_seed(1))
    assert isinstance(drawn.first.sparsity, float)
    with pytest.raises(ValueError, match="not an Operator"):
        Chain(GlobalTopK(0.5), "int8")


def test_the_parts_are_those_that_are_not_chains():
    a, b, c = GlobalTopK(0.5), NM(2, 4), Quantize(8)
    assert Chain(a, Chain(b, c)).parts == (a, b, c)
    assert a.parts == (a,)
    assert repr(Chain(Chain(a, b), c)) == (
        "Chain(first=Chain(first=GlobalTopK(sparsity=0.5), then=NM(keep=2, group=4)), "
        "then=Quantize(bits=8, group_size=None))"
    )
    assert Chain(a, b) != (a, b)


@pytest.mark.parametrize("nested", ["first", "then"])
def test_chains_of_many_parts(nested):
    parts = [GlobalTopK(step / 4_000) for step in range(2_000)] + [Quantize(8)]
    if nested == "first":
        chain = reduce(Chain, parts)
    else:
        chain = reduce(lambda then, first: Chain(first, then), reversed(parts[-50:]))
        chain = Chain(reduce(Chain, parts[:-50]), chain)
    text = str(chain)
    assert text == "+".join(map(str, parts))
    assert parse_operator(text) == chain
    assert hash(parse_operator(text)) == hash(chain)
    assert repr(chain).count("Chain(first=") == len(parts) - 1
    assert not chain.is_range
    assert chain.draw(torch.Generator()) == chain
    assert pickle.loads(pickle.dumps(chain)) == chain  # noqa: S301
    assert copy.deepcopy(chain) == chain
    assert bind(chain, torch.nn.Linear(2, 2), []) == chain
    some = Chain(*(reduce(Chain, half) for half in (parts[-1200:-600], parts[-600:])))
    weights = {"w": torch.randn(8, 8)}
    masks = some.compress_(weights)
    assert int(masks["w"].sum()) == 32
    some.recompress_(weights, masks)
